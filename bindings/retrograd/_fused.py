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
from concurrent.futures import Future
from typing import Any

from retrograd import _importing, _lowering, _worker
from retrograd._load import C as _C

logger = logging.getLogger("retrograd")


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
        self._queue: queue.SimpleQueue[tuple[Any, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending = 0
        self._idle = threading.Condition(self._lock)
        self._folder: str | None = None

    def add(self, recording: Any, claim: Any, wait: bool) -> None:
        with self._lock:
            self._pending += 1
            if not wait and self._thread is None:
                self._thread = threading.Thread(target=self._trace_all, name="retrograd-trace", daemon=True)
                self._thread.start()
        if not wait:
            self._queue.put((recording, claim))
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
        while (work := self._queue.get()) is not None:
            self._start(*work)
            del work

    def stop(self) -> None:
        """At exit. A thread that is in the middle of libtorch's code when Python goes would take the process along."""
        with self._lock:
            thread = self._thread
        if thread is None:
            return
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self._queue.put(None)
        thread.join(10)

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
                claim.refuse(getattr(error, "member", -1))
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
            if not hasattr(error, "member"):
                _warn_once(error)
                with self._lock:
                    self._plans.pop(digest, None)
            plan.set_exception(error)

        try:
            from retrograd import _group_trace  # takes a second, which the training thread must not wait for

            traced = _group_trace.trace(recording)
            if os.environ.get("RETROGRAD_LOWERING") == "eager":
                inputs = [n.meta["val"] for n in traced.graph.graph.nodes if n.op == "placeholder"]
                guards = _group_trace.guards_of(recording, traced, _worker.export_guards(inputs))
                plan.set_result(_C.Plan(traced.graph.forward, traced.inputs, traced.outputs, guards))
                return
        except Exception as error:
            logger.debug("group %s is not traced: %s", recording.name, error)
            fail(error)
            return
        except BaseException as error:  # Ctrl-C; calls that wait for this plan would wait for good
            with self._lock:
                self._plans.pop(digest, None)
            plan.set_exception(error)
            raise

        def load(lowered: Future[_lowering.Lowered]) -> None:
            try:
                result = lowered.result()
                guards = _group_trace.guards_of(recording, traced, result.guards)
                plan_object = _C.Plan(result.library, traced.inputs, traced.outputs, guards, recording)
            except Exception as error:
                fail(error)
            else:
                plan.set_result(plan_object)

        lowered = _lowering.submit(
            traced.graph, threads=recording.threads, name=recording.name, out_dir=self._make_folder()
        )
        lowered.add_done_callback(load)

    def _make_folder(self) -> str:
        with self._lock:
            if self._folder is None:
                self._folder = tempfile.mkdtemp(prefix="retrograd-plans-")
                atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
            return self._folder


_warned: set[type[BaseException]] = set()


def _warn_once(error: BaseException) -> None:
    if type(error) in _warned:
        logger.debug("a plan was not compiled: %s", error)
        return
    _warned.add(type(error))
    logger.warning("a plan was not compiled, so its nodes run one by one: %s", error)


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
