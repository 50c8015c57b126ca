"""How a compiled graph is called: what torch's runtime_wrapper does for one call, with less work for each.

Imported by the extension module at the first capture, since it needs Dynamo.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import _guards
from torch._dynamo import compiled_autograd as front_end
from torch._dynamo import trace_rules

from retrograd import _dropin

# A backward inside a function that Dynamo compiles runs this package's functions under Dynamo's eyes. It is to pass
# over them, as it passes over torch's own in the same place.
trace_rules.add("retrograd")

Run = Callable[[list[Any], tuple[int, ...], list[Any], tuple[Any, ...], tuple[Any, ...]], Any]

# Combinations of sizes for which size tensors are kept, for each graph.
_KEPT_SIZES = 16


def make_runner(runtime_wrapper: Callable[..., Any], compiled: Callable[..., Any]) -> Run:
    """What runs a graph: run(inputs, sizes, scalars, hooks, packed) -> gradients.

    Args:
        runtime_wrapper: torch's own, from AutogradCompilerInstance.end_capture(); its closure tells what this needs.
            For any other front end it is called as it is.
        compiled: what the compiler function made.
    """
    code = getattr(runtime_wrapper, "__code__", None)
    if code is None or code.co_filename != front_end.__file__:
        return _wrapped(runtime_wrapper, compiled)
    cells = dict(zip(code.co_freevars, (cell.cell_contents for cell in runtime_wrapper.__closure__), strict=True))
    instance = cells["self"]
    return _direct(
        compiled, instance.id, sorted(cells["used_sizes_idx"]), cells["runtime_inputs_to_move"], instance.nan_checker
    )


def _wrapped(runtime_wrapper: Callable[..., Any], compiled: Callable[..., Any]) -> Run:
    def run(*call: Any) -> Any:
        with _dropin.entering_region():
            return runtime_wrapper(compiled, *call)

    return run


def _direct(
    compiled: Callable[..., Any],
    graph_id: int,
    used_sizes: list[int],
    inputs_to_move: Sequence[int],
    nan_checker: Any,
) -> Run:
    compile_id = _guards.CompileId(compiled_autograd_id=graph_id, frame_id=None, frame_compile_id=None)

    # A size is given as a dimension of an empty tensor, because Dynamo cannot treat a plain int as dynamic. Such
    # tensors are only ever read, so one set of them serves all calls with the same sizes.
    kept: dict[tuple[int, ...], list[Any]] = {}

    def size_tensors(sizes: tuple[int, ...]) -> list[Any]:
        found = kept.get(sizes)
        if found is None:
            found = [_as_dynamic(sizes[i]) for i in used_sizes]
            if len(kept) >= _KEPT_SIZES:
                kept.clear()
            kept[sizes] = found
        return found.copy()

    def run(
        inputs: list[Any],
        sizes: tuple[int, ...],
        scalars: list[Any],
        hooks: tuple[Any, ...],
        packed: tuple[Any, ...],
    ) -> Any:
        checker = None
        if nan_checker is not None:
            checker = copy.copy(nan_checker)  # it keeps the call's parameters on itself
            checker.params_to_check = {}
            checker.prep_with_inputs(inputs)
        for i in inputs_to_move:
            inputs[i] = inputs[i].pin_memory().cuda(non_blocking=True)
        filtered = size_tensors(sizes) if used_sizes else []
        # torch._guards.compile_context(), without a generator.
        outer_context = getattr(_guards._TLS, "compile_context", None)
        _guards._TLS.compile_context = _guards.CompileContext(compile_id)
        try:
            outputs = compiled(inputs, filtered, scalars, hooks, packed)
            if checker is not None:
                checker.check(outputs)
            return outputs
        finally:
            _guards._TLS.compile_context = outer_context

    return run


def _as_dynamic(size: int) -> Any:
    if size <= 0:
        return size
    tensor = torch.empty(0, size)
    torch._dynamo.maybe_mark_dynamic(tensor, 1)
    return tensor
