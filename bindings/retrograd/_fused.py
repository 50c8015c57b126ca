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
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    fetch_object_proxy,
    track_tensor_tree,
)

from retrograd import _lowering
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
            graph, inputs, outputs = _trace(recording)
        except Exception as error:
            logger.debug("group %s is not traced: %s", recording.name, error)
            fail(error)
            return
        if not any(node.op == "call_function" for node in graph.graph.nodes):
            fail(_NotTraceable("nothing to compute", -1))
            return

        if os.environ.get("RETROGRAD_LOWERING") == "eager":
            plan.set_result(_C.Plan(graph.forward, inputs, outputs))
            return

        def load(lowered: Future[_lowering.Lowered]) -> None:
            try:
                plan_object = _C.Plan(lowered.result().library, inputs, outputs)
            except Exception as error:
                fail(error)
            else:
                plan.set_result(plan_object)

        lowered = _lowering.submit(graph, threads=recording.threads, name=recording.name, out_dir=self._make_folder())
        lowered.add_done_callback(load)

    def _make_folder(self) -> str:
        with self._lock:
            if self._folder is None:
                self._folder = tempfile.mkdtemp(prefix="retrograd-plans-")
                atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
            return self._folder


def _trace(recording: Any) -> tuple[torch.fx.GraphModule, list[int], list[int]]:
    """The group's ATen graph; which inputs of the group it takes; which of its results each output is, or -1."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tracer = PythonKeyTracer()
    tracer.root = torch.nn.Module()
    tracer.graph = torch.fx.Graph(tracer_cls=PythonKeyTracer)
    tracer.tensor_attrs = {}
    fakes: list[torch.Tensor | None] = []
    placeholders: list[torch.fx.Node | None] = []
    with torch.no_grad():
        for i, given in enumerate(recording.inputs):
            if given is None:
                fakes.append(None)
                placeholders.append(None)
                continue
            with mode:
                fake = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)
            proxy = tracer.create_proxy("placeholder", f"in{i}", (), {})
            proxy.node.meta["val"] = fake
            track_tensor_tree(fake, proxy, constant=None, tracer=tracer)
            fakes.append(fake)
            placeholders.append(proxy.node)
        with mode, ProxyTorchDispatchMode(tracer, "fake"):
            results, failed = recording.trace(fakes)
    if failed is not None:
        raise _NotTraceable(f"{results}", failed)
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
    for i, node in enumerate(placeholders):
        if node is None:
            continue
        if node.users:
            inputs.append(i)
        else:
            graph.graph.erase_node(node)
    graph.recompile()
    operators = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    if len(operators) > _MAX_OPERATORS:
        raise _NotTraceable(f"{len(operators)} operators are too many", -1)
    for operator in operators:
        if torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()):
            raise _NotTraceable(f"{operator} draws random numbers", -1)
    return graph, inputs, outputs


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
