"""The user's functions over retrograd._C."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from retrograd import _compilers, _dropin, _entry
from retrograd._load import C as _C

logger = logging.getLogger("retrograd")
logger.addHandler(logging.NullHandler())

_F = TypeVar("_F", bound=Callable[..., Any])

# A backend's number, a compiler function or None, whether all sizes are symbolic, when to compile, whether branches may
# run at the same time.
_Choice = tuple[int, "Callable[..., Any] | None", bool, int, bool]

_BACKENDS = {"inductor": _C.BACKEND_INDUCTOR, "schedule": _C.BACKEND_SCHEDULE}
_MODES = {"background": _C.COMPILE_BACKGROUND, "blocking": _C.COMPILE_BLOCKING}


def install() -> None:
    """Puts retrograd's engine in front of PyTorch's, for Python and C++ callers. Idempotent.

    Nothing changes for a thread until it uses `enable()`, or `set_default()` decides for it. Safe while other threads
    are inside backward.
    """
    if _entry.install():
        logger.info("installed: backward calls of threads that enable retrograd run on it")


def uninstall() -> None:
    """Puts the previous engine back. Idempotent; calls in flight finish on the engine they began on."""
    if _entry.uninstall():
        logger.info("uninstalled: all backward calls run on the previous engine")


def is_installed() -> bool:
    """Whether retrograd's engine is in place."""
    return bool(_C.is_installed())


class _Scope:
    """A setting for the calling thread, for a `with` block or a decorated function; both may nest.

    One object may serve several threads and calls at a time: what a block has to put back is kept by its thread.
    """

    def __init__(self, mode: int, choice: _Choice) -> None:
        self._mode = mode
        self._choice = choice

    def __enter__(self) -> None:
        backend, compiler_fn, dynamic, when, parallel = self._choice
        if self._mode == _C.MODE_ENABLED:
            _check_installed()
        compiler = None if compiler_fn is None else _compilers.from_function(compiler_fn)
        if compiler is not None:
            _dropin.log_misses_if_asked()
        _C.enter_setting((self._mode, backend, compiler, dynamic, when, parallel))

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _C.leave_setting()

    def __call__(self, function: _F = None) -> _F:  # type: ignore[assignment]
        suspends = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if function is None:
            name = type(self).__name__
            raise TypeError(f"nothing to decorate: as a decorator, write @retrograd.{name}().")
        if isinstance(function, type) or not callable(function) or any(test(function) for test in suspends):
            raise TypeError(
                f"retrograd.{type(self).__name__}() decorates plain functions only; inside a class, generator or "
                "coroutine put a `with` block around the backward call."
            )

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]


class enable(_Scope):
    """Runs the calling thread's backward calls on retrograd; a context manager and a decorator.

    Args:
        backend: what runs a graph.
            "default": "inductor", or what the environment variable RETROGRAD_BACKEND names.
            "inductor": nodes are fused in groups and compiled; a graph whose plans are not ready, and what cannot be
            compiled, runs as on "schedule". Gradients agree with eager's within rounding, as torch.compile's do.
            "schedule": the graph's own nodes in a precomputed order; any graph, gradients bit-identical.
            A function: the graph is captured as torch's compiled autograd captures it, and function(graph_module)
            returns what runs it from then on. It is called once for a graph, outside all locks, and what it returned
            is kept for all threads that use the same function; functions made by the same code from the same things,
            such as a lambda in a loop, are the same.
        mode: for "inductor", when plans are made. "background" (the default): on other threads and in a worker process,
            from a graph's third call on, while its calls run as on "schedule". "blocking": at first sight, and the call
            waits.
        dynamic: for a function, whether every size in a captured graph is symbolic from the start. Else sizes are
            constants first, and one that is seen to change becomes symbolic, which costs one more capture.
        parallel: whether independent branches of a graph may run at the same time, on this thread and on oneTBB's. For
            graphs on the CPU that run as on "schedule", and where it turns out to be faster; `torch.set_num_threads(1)`
            leaves the cores to it. Results are the same bit for bit, and hooks and custom functions run on the calling
            thread in the stock engine's order. Not for a function.

    Nested calls follow, also those that PyTorch moves to another thread. Other threads are not affected.

    Raises:
        ValueError: for an unknown backend or mode, or one that takes no `dynamic` or `mode`.
        TypeError: for a backend that is neither a name nor a function, or `dynamic` that is not a bool.
        RuntimeError: on entering, if `install()` was not called.
    """

    def __init__(
        self,
        backend: str | Callable[..., Any] = "default",
        dynamic: bool | None = None,
        mode: str | None = None,
        parallel: bool = False,
    ) -> None:
        super().__init__(_C.MODE_ENABLED, _choice(backend, dynamic, mode, parallel))


class disable(_Scope):
    """Runs the calling thread's backward calls on the previous engine; a context manager and a decorator."""

    def __init__(self) -> None:
        super().__init__(_C.MODE_DISABLED, (_C.BACKEND_SCHEDULE, None, False, _C.COMPILE_BACKGROUND, False))


def set_default(
    backend: str | Callable[..., Any] | None = "default",
    dynamic: bool | None = None,
    mode: str | None = None,
    parallel: bool = False,
) -> None:
    """Decides for threads that use neither `enable()` nor `disable()`; None is the previous engine, as at the start.

    Takes effect at each thread's next backward call. Arguments and errors as for `enable()`.
    """
    if backend is None:
        _C.set_default(None)
        return
    number, compiler_fn, *others = _choice(backend, dynamic, mode, parallel)
    _check_installed()
    compiler = None if compiler_fn is None else _compilers.from_function(compiler_fn)
    _C.set_default((number, compiler, *others))


def stats() -> dict[str, Any]:
    """Counters of all threads since the start or the last `reset_stats()`; always on.

    Returns a dict with
        calls: how many backward calls ran on each path, {"fused": int, "schedule": int, "callable": int,
            "previous": int}; "fused": at least one compiled group; "callable": what a compiler function made.
        groups: {"compiled", "by_node"}: groups of nodes that ran compiled, and those that ran node by node in calls
            that looked for compiled ones.
        recordings: groups recorded from a live graph. plans: {"compiled", "from_store"}.
        previous_reasons: why calls ran on the previous engine, by reason; sums to calls["previous"].
        schedule_reasons: why calls of threads that asked for more ran on the schedule, by reason.
        parallel_calls: of calls["schedule"], those that ran independent branches at the same time.
        helped_steps: nodes of such calls that ran on another thread than the caller's.
        captures: graphs captured for compiler functions, failed attempts included.
        hits, misses: calls whose plan was found, and calls that had to make it.
        nested_calls: calls made inside another retrograd call. max_depth: 1 where nothing was nested, 0 before any.
        seconds: time in {"walk", "lookup", "run"}, summed over threads; "run" includes nested calls.
        cache: {"leaves", "nodes", "evictions"} of the plan cache now.
    """
    return _C.stats()  # type: ignore[no-any-return]


def reset_stats() -> None:
    """Starts the counters of `stats()` again. The cache stays as it is."""
    _C.reset_stats()


def cache_clear() -> None:
    """Forgets all plans. Safe at any moment.

    Calls in flight keep what they use, and each thread keeps the few plans that it used last until its next call.
    """
    _C.cache_clear()
    fused = sys.modules.get("retrograd._fused")
    if fused is not None:
        fused.forget()


def wait(timeout: float | None = None) -> bool:
    """Waits until no plan is being made in the background; returns whether that came true within `timeout` seconds."""
    fused = sys.modules.get("retrograd._fused")
    return True if fused is None else bool(fused.wait(timeout))


def _check_installed() -> None:
    if not is_installed():
        raise RuntimeError("retrograd is not installed; call retrograd.install() first.")


def _choice(backend: Any, dynamic: bool | None, mode: str | None, parallel: bool) -> _Choice:
    if isinstance(backend, str) and backend == "default":
        backend = os.environ.get("RETROGRAD_BACKEND", "inductor")
        if backend not in _BACKENDS:
            known = " or ".join(repr(name) for name in _BACKENDS)
            raise ValueError(f"the environment variable RETROGRAD_BACKEND must be {known}, not {backend!r}.")
        if backend != "inductor":
            mode = None if mode in _MODES else mode  # the environment overrules the program
    if mode is not None and mode not in _MODES:
        raise ValueError(f"mode must be {' or '.join(repr(name) for name in _MODES)}, not {mode!r}.")
    if mode is not None and backend != "inductor":
        raise ValueError(f"mode is for backend 'inductor'; {backend!r} has nothing to compile ahead.")
    when = _MODES[mode or "background"]
    if dynamic is not None and type(dynamic) is not bool:
        raise TypeError(f"dynamic must be True, False or None, not {dynamic!r}.")
    if type(parallel) is not bool:
        raise TypeError(f"parallel must be True or False, not {parallel!r}.")
    if isinstance(backend, str):
        if backend not in _BACKENDS:
            known = ", ".join(repr(name) for name in _BACKENDS)
            raise ValueError(f"unknown backend {backend!r}: the known ones are {known}, and any compiler function.")
        if dynamic is not None:
            raise ValueError(f"dynamic is for compiler functions; backend {backend!r} takes no notice of sizes.")
        if backend == "inductor":
            importlib.import_module("retrograd._fused")  # now, rather than in the first call that records
        return (_BACKENDS[backend], None, False, when, parallel)
    if not callable(backend):
        raise TypeError(f"a backend is a name or a compiler function, not {backend!r}.")
    if parallel:
        raise ValueError(
            "parallel is for backends that run the graph's nodes; a compiler function makes one of them all."
        )
    return (_C.BACKEND_SCHEDULE, backend, bool(dynamic), when, False)
