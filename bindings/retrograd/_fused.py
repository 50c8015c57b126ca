"""Makes plans for recorded groups: traced to ATen on fake tensors here, compiled by AOTInductor in a worker.

Imported by the extension module at the first recording. With RETROGRAD_LOWERING=eager in the environment, traced graphs
run operator by operator instead of compiled: to find out which of the two is at fault, and for tests.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import queue
import shutil
import tempfile
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    fetch_object_proxy,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from retrograd import _lowering, _worker
from retrograd._load import C as _C

logger = logging.getLogger("retrograd")

# Graphs with more operators than this run by their nodes: compiling them takes minutes.
_MAX_OPERATORS = 2000


class _NotTraceable(Exception):  # noqa: N818
    def __init__(self, why: str, member: int) -> None:
        super().__init__(why)
        self.member = member


def make(recording: Any, claim: Any, wait: bool) -> None:
    """Sees to it that `claim` is settled or refused: now, or on another thread. Does not raise but for Ctrl-C."""
    _state.add(recording, claim, wait)


def wait(timeout: float | None = None) -> bool:
    """Waits until no plan is being made; whether that came true within `timeout` seconds."""
    return _state.wait(timeout)


def forget() -> None:
    """Lets go of plans that no cache entry uses."""
    _state.forget()


class _State:
    """What the process's threads share. Its lock is held for look-ups only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: dict[bytes, Future[Any]] = {}  # by content: equal groups share one plan
        self._tracing: queue.SimpleQueue[tuple[Any, Any]] | None = None
        self._pending = 0
        self._idle = threading.Condition(self._lock)
        self._folder: str | None = None

    def add(self, recording: Any, claim: Any, wait: bool) -> None:
        with self._lock:
            self._pending += 1
            if not wait and self._tracing is None:
                self._tracing = queue.SimpleQueue()
                threading.Thread(target=self._trace_all, name="retrograd-trace", daemon=True).start()
        if not wait:
            assert self._tracing is not None
            self._tracing.put((recording, claim))
            return
        done = threading.Event()
        self._start(recording, claim, done)
        done.wait()

    def wait(self, timeout: float | None) -> bool:
        with self._idle:
            return self._idle.wait_for(lambda: self._pending == 0, timeout)

    def forget(self) -> None:
        with self._lock:
            self._plans.clear()

    def _trace_all(self) -> None:
        assert self._tracing is not None
        while True:
            self._start(*self._tracing.get())

    def _start(self, recording: Any, claim: Any, done: threading.Event | None = None) -> None:
        digest = hashlib.sha256(recording.content).digest()
        with self._lock:
            plan = self._plans.get(digest)
            is_new = plan is None
            if plan is None:
                plan = self._plans[digest] = Future()

        def settle(plan: Future[Any]) -> None:
            error = plan.exception()
            if error is None:
                claim.settle(plan.result())
            else:
                claim.refuse(error.member if isinstance(error, _NotTraceable) else -1)
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()
            if done is not None:
                done.set()

        plan.add_done_callback(settle)
        if is_new:
            self._make(recording, digest, plan)

    def _make(self, recording: Any, digest: bytes, plan: Future[Any]) -> None:
        def fail(error: BaseException) -> None:
            if not isinstance(error, _NotTraceable):
                _warn_once(error)
                with self._lock:
                    self._plans.pop(digest, None)
            plan.set_exception(error)

        try:
            traced = _trace(recording)
        except Exception as error:
            logger.debug("group %s is not traced: %s", recording.name, error)
            fail(error)
            return
        if not any(node.op == "call_function" for node in traced.graph.graph.nodes):
            fail(_NotTraceable("nothing to compute", -1))
            return

        if os.environ.get("RETROGRAD_LOWERING") == "eager":
            exported = _worker.export_guards([n.meta["val"] for n in traced.graph.graph.nodes if n.op == "placeholder"])
            guards = _guards(recording, traced, exported)
            plan.set_result(_C.Plan(traced.graph.forward, traced.inputs, traced.outputs, guards))
            return

        def load(lowered: Future[_lowering.Lowered]) -> None:
            try:
                result = lowered.result()
                guards = _guards(recording, traced, result.guards)
                plan_object = _C.Plan(result.library, traced.inputs, traced.outputs, guards)
            except Exception as error:
                fail(error)
            else:
                plan.set_result(plan_object)

        lowered = _lowering.submit(traced.graph, threads=recording.threads, name=recording.name, out_dir=self._make_folder())
        lowered.add_done_callback(load)

    def _make_folder(self) -> str:
        with self._lock:
            if self._folder is None:
                self._folder = tempfile.mkdtemp(prefix="retrograd-plans-")
                atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
            return self._folder


@dataclass
class _Traced:
    graph: torch.fx.GraphModule
    inputs: list[int]  # which inputs of the group the graph takes
    outputs: list[int]  # which of its results each output of the group is, or -1
    extra: list[int]  # places of numbers that it takes as the second dimension of empty tensors, after its inputs
    alike: list[tuple[int, int]]  # pairs of places whose numbers must be equal


def _trace(recording: Any) -> _Traced:
    """The group's ATen graph. Numbers that the recording leaves open are symbols in it, one for each value."""
    numbers: list[int] = recording.numbers
    is_open: list[bool] = recording.open
    shape_env = ShapeEnv() if is_open else None
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    tracer = PythonKeyTracer()
    tracer.root = torch.nn.Module()
    tracer.graph = torch.fx.Graph(tracer_cls=PythonKeyTracer)
    tracer.tensor_attrs = {}
    placeholders: list[torch.fx.Node] = []
    taken: list[int] = []  # by placeholder: the input, or the place of an extra number after all inputs

    def add_placeholder(name: str, example: torch.Tensor, dims: list[DimDynamic], is_taken: int) -> torch.Tensor:
        if shape_env is None:
            with mode:
                fake = torch.empty_strided(
                    example.shape, example.stride(), dtype=example.dtype, device=example.device
                )
        else:
            fake = mode.from_tensor(
                example, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims), source=ConstantSource(name)
            )
        proxy = tracer.create_proxy("placeholder", name, (), {})
        proxy.node.meta["val"] = fake
        track_tensor_tree(fake, proxy, constant=None, tracer=tracer)
        placeholders.append(proxy.node)
        taken.append(is_taken)
        return fake

    fakes: list[torch.Tensor | None] = []
    first_place: dict[int, int] = {}  # by value of an open size: where it was met first
    symbol_of: dict[int, Any] = {}  # by value of an open size
    alike: list[tuple[int, int]] = []
    of_inputs: set[int] = set()
    given = recording.inputs
    with torch.no_grad():
        for i, (tensor, place) in enumerate(zip(given, recording.input_places, strict=True)):
            if tensor is None:
                fakes.append(None)
                continue
            open_dims = [d for d in range(tensor.dim()) if is_open and is_open[place + d]]
            dims = [DimDynamic.DUCK if d in open_dims else DimDynamic.STATIC for d in range(tensor.dim())]
            fake = add_placeholder(f"in{i}", tensor, dims, i)
            fakes.append(fake)
            of_inputs.update(range(place, place + 2 * tensor.dim()))
            for d in open_dims:
                size = tensor.shape[d]
                symbol_of.setdefault(size, fake.shape[d])
                alike.append((first_place.setdefault(size, place + d), place + d))
        symbols: dict[int, Any] = {}
        for place in range(len(is_open)):
            if not is_open[place] or place in of_inputs:
                continue
            size = numbers[place]
            if size not in symbol_of:
                example = torch.empty(0, size)
                dims = [DimDynamic.STATIC, DimDynamic.DUCK]
                symbol_of[size] = add_placeholder(f"size{place}", example, dims, len(given) + place).shape[1]
            alike.append((first_place.setdefault(size, place), place))
            symbols[place] = symbol_of[size]
        with mode, ProxyTorchDispatchMode(tracer, "fake" if shape_env is None else "symbolic"):
            results, failed = recording.trace(fakes, symbols)
    if failed is not None:
        # What cannot be traced with open sizes may well be with fixed ones.
        raise _NotTraceable(f"{results}", failed if shape_env is None else -1)
    nodes = []
    outputs = []
    for result in results:
        outputs.append(-1 if result is None else len(nodes))
        if result is not None:
            nodes.append(fetch_object_proxy(tracer, result).proxy.node)
    tracer.graph.output(tuple(nodes))
    graph = torch.fx.GraphModule(tracer.root, tracer.graph)
    graph.graph.eliminate_dead_code()
    inputs = []
    extra = []
    for node, i in zip(placeholders, taken, strict=True):
        if not node.users and not _is_only_place_of_a_symbol(node, placeholders):
            graph.graph.erase_node(node)
        elif i < len(given):
            inputs.append(i)
        else:
            extra.append(i - len(given))
    graph.recompile()
    operators = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    if len(operators) > _MAX_OPERATORS:
        raise _NotTraceable(f"{len(operators)} operators are too many", -1)
    for operator in operators:
        if torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()):
            raise _NotTraceable(f"{operator} draws random numbers", -1)
    return _Traced(graph, inputs, outputs, extra, [pair for pair in alike if pair[0] != pair[1]])


def _is_only_place_of_a_symbol(node: torch.fx.Node, placeholders: list[torch.fx.Node]) -> bool:
    """Whether a symbol can be read from this input only, so that it must stay though nothing computes with it."""
    for size in node.meta["val"].shape:
        if not isinstance(size, torch.SymInt):
            continue
        name = str(size)
        others = (n for n in placeholders if n is not node and (n.users or n.name < node.name))
        if not any(name == str(other) for n in others for other in n.meta["val"].shape):
            return True
    return False


_OPERATORS = {
    "add": 3, "mul": 4, "floordiv": 5, "mod": 6, "min": 7, "max": 8, "eq": 9, "ne": 10, "lt": 11, "le": 12, "and": 13,
    "or": 14, "not": 15,
}  # fmt: skip


def _program(tree: Any) -> list[int]:
    """A guard's tree (see _worker.export_guards) as a program of engine/shape_guards.h."""
    if isinstance(tree, int):
        return [0, tree]
    operator, *operands = tree
    if operator == "sym":
        return [1, operands[0]]
    if operator == "number":
        return [2, operands[0]]
    program = _program(operands[0])
    if operator == "not":
        return [*program, _OPERATORS["not"], 0]
    for operand in operands[1:]:
        program += [*_program(operand), _OPERATORS[operator], 0]
    return program


def _guards(recording: Any, traced: _Traced, exported: dict[str, Any] | None) -> Any:
    """What must hold of the group's numbers. `exported`: what lowering said of the graph's inputs; None: nothing."""
    if not recording.open:
        return _C.ShapeGuards([], [], [])
    conditions: list[Any] = [["eq", ["number", a], ["number", b]] for a, b in traced.alike]
    symbols: list[int] = []
    if exported is not None:
        places = [recording.input_places[i] for i in traced.inputs]
        rank = [recording.inputs[i].dim() for i in traced.inputs]
        for i, dim in exported["symbols"]:
            symbols.append(places[i] + dim if i < len(places) else traced.extra[i - len(places)])
        for place, dims, trees in zip(places, rank, exported["inputs"], strict=False):
            for d in range(dims):
                if recording.open[place + d]:
                    conditions.append(["eq", ["number", place + d], trees["size"][d]])
                if recording.open[place + dims + d]:
                    conditions.append(["eq", ["number", place + dims + d], trees["stride"][d]])
        conditions += exported["conditions"]
    return _C.ShapeGuards(symbols, [_program(condition) for condition in conditions], traced.extra)


_warned: set[type[BaseException]] = set()


def _warn_once(error: BaseException) -> None:
    if type(error) in _warned:
        logger.debug("a plan was not compiled: %s", error)
        return
    _warned.add(type(error))
    logger.warning("a plan was not compiled, so its nodes run one by one: %s", error)


_state = _State()


def _after_fork_in_child() -> None:
    global _state
    _state = _State()


os.register_at_fork(after_in_child=_after_fork_in_child)
