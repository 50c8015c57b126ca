"""Makes plans for recorded groups: traced to ATen on fake tensors here, compiled by AOTInductor in a worker.

Imported by the extension module at the first recording. With RETROGRAD_LOWERING=eager in the environment, traced graphs
run operator by operator instead of compiled: to find out which of the two is at fault, and for tests.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import queue
import shutil
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from retrograd import _importing, _lowering, _turns, _worker
from retrograd._load import C as _C

logger = logging.getLogger("retrograd")

# Seconds for calls that waited for a plan to come to their end before the interpreter does.
_GRACE = 0.2


def make(recording: Any, claim: Any, wait: bool) -> None:
    """Sees to it that `claim` is settled or refused: now, or on another thread. Does not raise but for Ctrl-C."""
    _state.add(recording, claim, wait)


def wait(timeout: float | None = None) -> bool:
    """Waits until no plan is being made; whether that came true within `timeout` seconds."""
    return _state.wait(timeout)


def forget() -> None:
    """Lets go of plans that no cache entry uses."""
    _state.forget()


@dataclass(eq=False)
class _Work:
    recording: Any
    claim: Any
    is_waited_for: bool
    done: threading.Event = field(default_factory=threading.Event)


class _State:
    """What the process's threads share. Its lock is held for look-ups only."""

    def __init__(self) -> None:
        # A signal handler or a finalizer that runs in the middle of it may call backward and come here again.
        self._lock = threading.RLock()
        self._plans: dict[bytes, Future[Any]] = {}  # by content: equal groups share one plan
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._pending: set[_Work] = set()
        self._idle = threading.Condition(self._lock)
        self._folder: str | None = None
        self._turns = _turns.Turns()

    def add(self, recording: Any, claim: Any, wait: bool) -> None:
        is_queued = False
        try:
            work = _Work(recording, claim, wait)
            if threading.current_thread() is self._thread:  # what is traced calls backward: it would wait for itself
                is_queued = True
                self._start(work)
                return
            # What holds the lock in this very thread was interrupted by this call: no plan is made until that goes on.
            wait = wait and not self._lock._is_owned()  # type: ignore[attr-defined]
            with self._lock:
                if self._stopped:
                    return
                if self._thread is None:
                    self._thread = threading.Thread(target=self._trace_all, name="retrograd-trace", daemon=True)
                    try:
                        self._thread.start()
                    except BaseException:
                        self._thread = None
                        raise
                self._queue.put(work)
                is_queued = True
                self._pending.add(work)
        except RuntimeError as error:  # no thread can be started
            _warn_once(error)
            return
        finally:
            if not is_queued:
                claim.give_back()  # the next call tries again, whoever keeps a traceback with the claim
        # A call waits for another thread even if it has to wait anyway: a signal handler's exception ends the call, but
        # not the making of the plan, which other calls may be waiting for too.
        while wait and not work.done.wait(1) and self is _state:  # another state: a signal handler has forked
            pass

    def wait(self, timeout: float | None) -> bool:
        with self._idle:
            return self._idle.wait_for(lambda: not self._pending, timeout)

    def forget(self) -> None:
        with self._lock:
            self._plans.clear()

    def _trace_all(self) -> None:
        _C.this_thread_makes_plans()
        while (work := self._queue.get()) is not None:
            self._start(work)
            del work

    def stop(self) -> None:
        """At exit. A thread that is in the middle of libtorch's code when Python goes would take the process along."""
        self._turns.stop()
        with self._lock:
            self._stopped = True
            thread = self._thread
            is_waited_for = any(work.is_waited_for for work in self._pending)
        if thread is None:
            return
        with contextlib.suppress(queue.Empty):
            while True:
                work = self._queue.get_nowait()
                if work is not None:
                    work.claim.give_back()
                    self._finish(work)
        self._queue.put(None)
        thread.join(10)
        _lowering.close()
        if is_waited_for:  # by daemon threads, whose calls go on by their nodes now
            time.sleep(_GRACE)

    def _finish(self, work: _Work) -> None:
        with self._idle:
            self._pending.discard(work)
            self._idle.notify_all()
        work.done.set()

    def _start(self, work: _Work) -> None:
        digest = hashlib.sha256(work.recording.content).digest()
        with self._lock:
            plan = self._plans.get(digest)
            is_new = plan is None
            if plan is None:
                plan = self._plans[digest] = Future()

        def settle(plan: Future[Any]) -> None:
            try:
                error = plan.exception()
                if error is None:
                    work.claim.settle(plan.result())
                else:
                    work.claim.refuse(getattr(error, "member", -1))
            finally:
                self._finish(work)
                del work.recording  # the future keeps this function

        plan.add_done_callback(settle)
        if not is_new:
            return
        recording = work.recording
        if _runs_eagerly():
            self._make(recording, digest, plan)
            return
        self._turns.take(
            recording,
            plan,
            lambda: self._make(recording, digest, plan),
            lambda error: self._fail(digest, plan, error),
        )

    def _make(self, recording: Any, digest: bytes, plan: Future[Any]) -> None:
        """Gives `plan` a result or an exception, now or later."""

        def load(lowered: Future[_lowering.Lowered]) -> None:
            try:
                result = lowered.result()
                guards = _group_trace.guards_of(recording, traced, result.guards)
                plan_object = _C.Plan(result.library, traced.inputs, traced.outputs, guards, recording)
            except BaseException as error:
                self._fail(digest, plan, error)
            else:
                plan.set_result(plan_object)

        try:
            from retrograd import _group_trace  # takes a second, which the training thread must not wait for

            traced = _group_trace.trace(recording)
            if _runs_eagerly():
                from torch.fx.graph import _BoxedCodeGen

                placeholders = traced.graph.graph.find_nodes(op="placeholder")
                exported = _worker.export_guards([node.meta["val"] for node in placeholders])
                guards = _group_trace.guards_of(recording, traced, exported)
                traced.graph.graph.set_codegen(_BoxedCodeGen())  # lets go of inputs as a compiled plan does
                traced.graph.recompile()
                made = _C.Plan(traced.graph.forward, traced.inputs, traced.outputs, guards)
                lowered = None
            else:
                lowered = _lowering.submit(
                    traced.graph, threads=recording.threads, name=recording.name, out_dir=self._make_folder()
                )
        except BaseException as error:
            logger.debug("group %s has no plan: %s", recording.name, error)
            self._fail(digest, plan, error)
            return
        if lowered is None:
            plan.set_result(made)
        else:
            lowered.add_done_callback(load)

    def _fail(self, digest: bytes, plan: Future[Any], error: BaseException) -> None:
        error.__traceback__ = None  # has frames with the recording
        if not hasattr(error, "member"):
            _warn_once(error)
            with self._lock:
                self._plans.pop(digest, None)
        plan.set_exception(error)

    def _make_folder(self) -> str:
        with self._lock:
            if self._folder is None:
                self._folder = tempfile.mkdtemp(prefix="retrograd-plans-")
                atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
            return self._folder


def _runs_eagerly() -> bool:
    return os.environ.get("RETROGRAD_LOWERING") == "eager"


_warned: set[type[BaseException]] = set()


def _warn_once(error: BaseException) -> None:
    if type(error) in _warned:
        logger.debug("a plan was not compiled: %s", error)
        return
    _warned.add(type(error))
    logger.warning("a plan was not compiled, so its nodes run one by one: %s", error)


def report_change(node: Any, sizes: bool) -> None:
    """Warns that a group of nodes will not be compiled for new values of what keeps changing.

    Args:
        node: the node of the backward graph whose constants (or sizes) they are; None: the state outside the graph, or
            the kinds of the tensors that come in.
        sizes: whether it is sizes of tensors that change.
    """
    if node is None:
        what = "settings that a plan depends on (intra-op threads, default dtype, dtypes of inputs)"
    elif sizes:
        what = f"sizes of tensors at {node.name()}"
    else:
        values = _constants(node)
        what = f"constants of {node.name()}" + (f" ({values})" if values else "")
    logger.warning(
        "a backward graph was compiled for several %s, and new ones keep coming, so nodes that depend on them run one "
        "by one from now on; %s.",
        what,
        "pad to a few sizes" if sizes else "pass a value that changes as a tensor",
    )


def _constants(node: Any) -> str:
    found = []
    for attribute in dir(node):
        if not attribute.startswith("_saved_"):
            continue
        try:
            value = getattr(node, attribute)
        except Exception:  # a saved tensor that is gone
            continue
        if isinstance(value, (int, float, complex, tuple)):
            found.append(f"{attribute.removeprefix('_saved_')}={value}")
    return ", ".join(found)


def _forward(module: Any) -> Any:
    _C.forward_bound_functions()
    return lambda: None


_importing.when_imported("torch._dynamo", _forward)
_state = _State()
atexit.register(lambda: _state.stop())


def _after_fork_in_child() -> None:
    global _state
    _state = _State()


os.register_at_fork(after_in_child=_after_fork_in_child)
