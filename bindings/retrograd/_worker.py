"""The compiling process: takes traced graphs from a pipe, lowers them by AOTInductor, answers with a library's path.

_lowering.py starts it by this file's path, so it imports neither retrograd nor the user's script, and finds torch
through the folders it is told. Both pipes are its own: compilers may print what they like to stdout and stderr.

It ends when its parent does: the parent's end of the pipe closes however the parent went, and where there is
PR_SET_PDEATHSIG the kernel sends a signal too, for the case that somebody else inherited that end.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import json
import os
import queue
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

_MAGIC = b"RGW1"
_HEADER = struct.Struct(">4sQ")
HEADER_SIZE = _HEADER.size

# An answer holds guards and an error's text; more than this is not an answer.
MAX_ANSWER = 64 << 20

# Names a fault and a job, "hang:NAME": for tests only.
FAULT = "RETROGRAD_TEST_WORKER_FAULT"


class GarbledError(Exception):
    """What came over the pipe is no frame."""


class RefusedError(Exception):
    """The graph is sound but cannot become a plan; says why in one sentence."""


def frame(payload: bytes) -> bytes:
    """A length-prefixed message."""
    return _HEADER.pack(_MAGIC, len(payload)) + payload


def frame_length(header: bytes) -> int:
    """The length of the payload that follows a header.

    Raises:
        GarbledError: that is no header.
    """
    magic, length = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise GarbledError(f"a message begins with {header[:4]!r}")
    return int(length)


# Guards: sympy to trees ---------------------------------------------------------------------------------------------


def export_guards(placeholders: list[Any]) -> dict[str, Any]:
    """All that must hold of the inputs for a compiled graph to be right, as JSON.

    A tree is an integer, ["sym", i], or [operator, tree, ...] with the operators add, mul, min, max, and, or (two or
    more operands), floordiv, mod, eq, ne, lt, le (two) and not (one). Integers are 64 bits wide; floordiv and mod
    round towards minus infinity; truth is 1 or 0.

    Args:
        placeholders: the fake tensors that the graph's inputs stand for, after lowering, which adds guards to their
            ShapeEnv.

    Returns:
        "symbols": for each symbol the [input, dimension] whose size it is; "inputs": for each input its "size" and
        "stride", a tree for each dimension; "conditions": trees that must all be true. A stride says nothing where the
        tensor is empty or the dimension's size is 1.

    Raises:
        RefusedError: something depends on what is no size of an input, or is not expressible.
    """
    env = next((env for env in map(_shape_env, placeholders) if env is not None), None)
    places: dict[Any, list[int]] = {}
    for i, value in enumerate(placeholders):
        for dim, size in enumerate(value.shape):
            symbol = _expr(size)
            if getattr(symbol, "is_Symbol", False) and symbol not in places:
                places[symbol] = [i, dim]
    to_tree = _Trees({symbol: i for i, symbol in enumerate(places)})

    inputs = [
        {"size": [to_tree(_expr(n)) for n in value.shape], "stride": [to_tree(_expr(n)) for n in value.stride()]}
        for value in placeholders
    ]
    conditions: list[Any] = []
    facts = [] if env is None else _facts(env, places)
    hints = [int(env.backed_var_to_val[symbol]) for symbol in places] if env is not None else []
    for fact in facts:
        tree = to_tree(fact)
        if not evaluate(tree, hints):
            raise RefusedError(f"the guard {fact} does not hold for the sizes that the graph was traced with")
        if not isinstance(tree, int) and tree not in conditions:
            conditions.append(tree)
    return {"symbols": list(places.values()), "inputs": inputs, "conditions": conditions}


def evaluate(tree: Any, symbols: list[int]) -> int:
    """A tree's value for given sizes: what the C++ side computes too."""
    if isinstance(tree, int):
        return tree
    operator, *operands = tree
    if operator == "sym":
        return symbols[operands[0]]
    values = [evaluate(operand, symbols) for operand in operands]
    return int(_EVALUATE[operator](*values))


def _product(*values: int) -> int:
    result = 1
    for value in values:
        result *= value
    return result


_EVALUATE: dict[str, Callable[..., Any]] = {
    "add": lambda *values: sum(values),
    "mul": _product,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "min": min,
    "max": max,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "and": lambda *values: all(values),
    "or": lambda *values: any(values),
    "not": lambda a: not a,
}


def _shape_env(value: Any) -> Any:
    return getattr(getattr(value, "fake_mode", None), "shape_env", None)


def _expr(size: Any) -> Any:
    node = getattr(size, "node", None)
    return size if node is None else node._expr  # before replacements, which are conditions of their own


def _facts(env: Any, places: dict[Any, list[int]]) -> list[Any]:
    import sympy

    hints = env.backed_var_to_val
    symbols = {*env.var_to_range, *env.replacements} - set(places)
    if unbacked := sorted(str(s) for s in symbols if s not in hints):
        raise RefusedError(f"a size depends on the values of tensors (symbol {unbacked[0]})")
    facts = [guard.expr for guard in env.guards]
    facts += [check.expr for checks in env.deferred_runtime_asserts.values() for check in checks]
    facts += [sympy.Eq(symbol, target, evaluate=False) for symbol, target in env.replacements.items()]
    # A symbol that nothing reads restricts nothing, but for what a guard or a replacement says of it.
    for symbol, limits in env.var_to_range.items():
        if symbol not in places:
            continue
        if limits.lower.is_Integer and limits.lower > 0:
            facts.append(sympy.Le(limits.lower, symbol, evaluate=False))
        if limits.upper.is_Integer and limits.upper < 2**63 - 1:
            facts.append(sympy.Le(symbol, limits.upper, evaluate=False))
    return facts


class _Trees:
    """Makes trees of sympy's expressions, of the kinds that ShapeEnv and Inductor make for sizes."""

    def __init__(self, index: dict[Any, int]) -> None:
        from torch.utils._sympy import functions as torch_sympy

        self._index = index
        self._binary = {
            torch_sympy.FloorDiv: "floordiv",
            torch_sympy.CleanDiv: "floordiv",
            torch_sympy.PythonMod: "mod",
            torch_sympy.Mod: "mod",
        }
        self._torch = torch_sympy

    def __call__(self, expr: Any) -> Any:
        import sympy

        if isinstance(expr, bool | int | sympy.logic.boolalg.BooleanAtom | sympy.Integer):
            value = int(bool(expr)) if isinstance(expr, sympy.logic.boolalg.BooleanAtom) else int(expr)
            if not -(2**63) <= value < 2**63:
                raise RefusedError(f"the number {value} in a guard is too large")
            return value
        if isinstance(expr, sympy.Symbol):
            if expr not in self._index:
                raise RefusedError(f"a guard depends on {expr}, which is the size of no input")
            return ["sym", self._index[expr]]
        if operator := self._binary.get(type(expr)):
            return [operator, *map(self, expr.args)]
        many = {
            sympy.Add: "add",
            sympy.Mul: "mul",
            sympy.Max: "max",
            sympy.Min: "min",
            self._torch.Max: "max",
            self._torch.Min: "min",
            sympy.And: "and",
            sympy.Or: "or",
            sympy.Not: "not",
            sympy.Eq: "eq",
            sympy.Ne: "ne",
            sympy.StrictLessThan: "lt",
            sympy.LessThan: "le",
        }
        if operator := many.get(type(expr)):
            return [operator, *map(self, sorted(expr.args, key=str) if operator in ("add", "mul") else expr.args)]
        if isinstance(expr, sympy.StrictGreaterThan | sympy.GreaterThan):
            left, right = expr.args
            return ["lt" if isinstance(expr, sympy.StrictGreaterThan) else "le", self(right), self(left)]
        if isinstance(expr, self._torch.ModularIndexing):
            base, divisor, modulus = map(self, expr.args)
            return ["mod", base if divisor == 1 else ["floordiv", base, divisor], modulus]
        if isinstance(expr, self._torch.Identity):
            return self(expr.args[0])
        if isinstance(expr, sympy.Pow | self._torch.PowByNatural):
            base, exponent = expr.args
            if exponent.is_Integer and 0 < exponent <= 8:
                return ["mul", *[self(base)] * int(exponent)] if exponent > 1 else self(base)
        raise RefusedError(f"the guard expression {expr} ({type(expr).__name__}) cannot be checked at run time")


# Lowering -----------------------------------------------------------------------------------------------------------


_CONFIG = {
    "fallback_random": True,  # eager's numbers
    "freezing": False,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "aot_inductor.enable_line_tables": False,  # a quarter of the size
}


def _import_compiler() -> None:
    """The costly imports and set-ups that every job needs, done before the first one comes."""
    import torch._inductor.compile_fx
    import torch.fx._graph_pickler  # noqa: F401
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Later, when every job has a temporary folder of its own, the default would be inside that.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())


def _lower(request: dict[str, Any], blob: bytes) -> dict[str, Any]:
    import torch
    from torch._inductor.compile_fx import compile_fx_aot
    from torch._subclasses import FakeTensor, FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    torch.set_num_threads(request["threads"])  # AOTInductor bakes it in
    graph_module: Any = GraphPickler.loads(blob, FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True))
    values = [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
    for i, value in enumerate(values):
        if not isinstance(value, FakeTensor):
            raise RefusedError(f"input {i} is no tensor but {type(value).__name__}")
    export_guards(values)  # what cannot be expressed before lowering cannot be afterwards: no need to compile
    with torch.no_grad():
        library = compile_fx_aot(
            graph_module,
            values,
            config_patches={**_CONFIG, "aot_inductor.output_path": request["folder"]},
        )
    if not isinstance(library, str):
        raise RefusedError(f"AOTInductor made {type(library).__name__} instead of a library")
    return {"ok": True, "library": library, "guards": export_guards(values)}


def _prime() -> None:
    """Does what the first compile on a machine does for all later ones: headers, the processor's vector width."""
    import torch
    from torch._inductor import codecache
    from torch._inductor.compile_fx import compile_fx_aot
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch.fx.experimental.proxy_tensor import make_fx

    pick_vec_isa()
    joint_graph.lazy_init()
    post_grad.lazy_init()
    done = os.path.join(codecache._HEADER_DIR, f"retrograd-{torch.__version__}")
    if os.path.exists(done):
        return

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        graph_module = make_fx(lambda x: (x * 2,))(torch.zeros(4))
        compile_fx_aot(graph_module, [torch.zeros(4)], config_patches={**_CONFIG, "aot_inductor.output_path": folder})
    with open(done, "w"):
        pass


def _answer(request: dict[str, Any], blob: bytes) -> dict[str, Any]:
    start = time.monotonic()
    # g++ and Inductor keep temporary files here, and the parent removes it, whatever becomes of this process.
    os.environ["TMPDIR"] = tempfile.tempdir = request["folder"]
    # Even a process that holds the GIL for ever, or is left without its parent meanwhile, comes to an end.
    faulthandler.dump_traceback_later(request["timeout"] + 30, exit=True)
    try:
        _fault(request["name"])
        if request["task"] == "prime":
            _prime()
            answer: dict[str, Any] = {"ok": True}
        else:
            answer = _lower(request, blob)
    except RefusedError as error:
        answer = {"ok": False, "kind": "refused", "why": str(error)}
    except BaseException as error:
        traceback.print_exc()  # into the log, whose tail the parent quotes
        full = getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error)
        kind = "disk" if full else "memory" if isinstance(error, MemoryError) else "failed"
        answer = {"ok": False, "kind": kind, "why": _first_line(error)}
    finally:
        faulthandler.cancel_dump_traceback_later()
    answer |= {"id": request["id"], "seconds": time.monotonic() - start}
    gc.collect()
    return answer


def _first_line(error: BaseException) -> str:
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = next((line for line in lines if "error:" in line), lines[0] if lines else "no reason given")
    return f"{type(error).__name__}: {said}"[:500]


def _fault(name: str) -> None:
    fault, _, job = os.environ.get(FAULT, "").partition(":")
    if not fault or job != name:
        return
    print(f"fault: {fault}", flush=True)
    if fault == "hang":
        time.sleep(3600)
    elif fault in ("disk", "slow"):
        time.sleep(4 if fault == "slow" else 0)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "garbage":
        os.write(_answers, b"Segmentation fault, or whatever a library prints to the wrong place\n")
        time.sleep(3600)


# The process --------------------------------------------------------------------------------------------------------

_answers = -1
_scratch = ""
_ending = threading.Lock()


def _end() -> None:
    """Ends this process and the compilers it started, and leaves no files behind."""
    if not _ending.acquire(blocking=False):
        return
    with contextlib.suppress(OSError):
        os.killpg(0, signal.SIGTERM)  # to compilers, so that they write no more; this process is in _end() already
    shutil.rmtree(_scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _read_exactly(fd: int, size: int) -> bytes:
    parts = []
    while size > 0:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _read_requests(fd: int, requests: queue.SimpleQueue[tuple[dict[str, Any], bytes]]) -> None:
    """Reads all the time, also while a job runs, because that is how the parent's end is noticed."""
    try:
        while True:
            header = _read_exactly(fd, frame_length(_read_exactly(fd, HEADER_SIZE)))
            blob = _read_exactly(fd, frame_length(_read_exactly(fd, HEADER_SIZE)))
            requests.put((json.loads(header), blob))
    except BaseException:
        _end()


def _send(answer: dict[str, Any]) -> None:
    data = memoryview(frame(json.dumps(answer).encode()))
    while data:
        data = data[os.write(_answers, data) :]


def _die_with_parent(parent: int) -> None:
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        _end()


def main() -> None:
    """Serves the parent that is described in the only argument, until it goes."""
    global _answers, _scratch
    if len(sys.argv) != 2:
        sys.exit("This program is started by retrograd itself, to compile plans; there is nothing to run by hand.")
    setup = json.loads(sys.argv[1])
    _answers, _scratch = setup["answers"], setup["scratch"]
    os.set_inheritable(_answers, False)
    os.set_inheritable(setup["requests"], False)
    signal.signal(signal.SIGTERM, lambda *_: _end())
    _die_with_parent(setup["parent"])
    faulthandler.enable()
    with contextlib.suppress(OSError):
        os.nice(setup["nice"])
    requests: queue.SimpleQueue[tuple[dict[str, Any], bytes]] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(setup["requests"], requests), daemon=True).start()

    sys.path.extend(path for path in setup["path"] if path not in sys.path)
    try:
        _import_compiler()
        import torch

        hello = {"ok": True, "torch": torch.__version__}
    except BaseException as error:
        traceback.print_exc()
        hello = {"ok": False, "kind": "failed", "why": _first_line(error)}
    try:
        _send(hello)
        while True:
            request, blob = requests.get()
            _send({"taken": request["id"]})
            _send(_answer(request, blob))
    except OSError:  # the parent is gone
        pass
    finally:
        _end()


if __name__ == "__main__":
    main()
