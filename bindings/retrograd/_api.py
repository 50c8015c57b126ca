"""The user's functions over retrograd._C."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from retrograd import _entry
from retrograd._load import C as _C

logger = logging.getLogger("retrograd")
logger.addHandler(logging.NullHandler())

_F = TypeVar("_F", bound=Callable[..., Any])

_BACKENDS = {"schedule": _C.BACKEND_SCHEDULE}


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

    def __init__(self, setting: tuple[int, int]) -> None:
        self._setting = setting

    def _check(self) -> None:
        pass

    def __enter__(self) -> None:
        self._check()
        _C.enter_setting(self._setting)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _C.leave_setting()

    def __call__(self, function: _F) -> _F:
        suspends = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
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
        backend: what runs a graph. "schedule" runs the graph's own nodes in a precomputed order; any graph,
            gradients bit-identical.

    Nested calls follow, also those that PyTorch moves to another thread. Other threads are not affected.

    Raises:
        ValueError: for an unknown backend.
        TypeError: for `@retrograd.enable` without parentheses.
        RuntimeError: on entering, if `install()` was not called.
    """

    def __init__(self, backend: str = "schedule") -> None:
        super().__init__((_C.MODE_ENABLED, _backend_id(backend)))

    def _check(self) -> None:
        _check_installed()


class disable(_Scope):
    """Runs the calling thread's backward calls on the previous engine; a context manager and a decorator."""

    def __init__(self) -> None:
        super().__init__((_C.MODE_DISABLED, _C.BACKEND_SCHEDULE))


def set_default(backend: str | None = "schedule") -> None:
    """Decides for threads that use neither `enable()` nor `disable()`; None is the previous engine, as at the start.

    Takes effect at each thread's next backward call.

    Raises:
        ValueError: for an unknown backend.
        RuntimeError: for a backend, if `install()` was not called.
    """
    if backend is None:
        _C.set_default(None)
        return
    identifier = _backend_id(backend)
    _check_installed()
    _C.set_default(identifier)


def stats() -> dict[str, Any]:
    """Counters of all threads since the start or the last `reset_stats()`; always on.

    Returns a dict with
        calls: how many backward calls ran on each path, {"schedule": int, "previous": int}.
        previous_reasons: why calls ran on the previous engine, by reason; sums to calls["previous"].
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


def _check_installed() -> None:
    if not is_installed():
        raise RuntimeError("retrograd is not installed; call retrograd.install() first.")


def _backend_id(backend: str) -> int:
    if callable(backend):
        raise TypeError("retrograd.enable takes the name of a backend: as a decorator, write @retrograd.enable().")
    try:
        return _BACKENDS[backend]
    except (KeyError, TypeError):
        known = ", ".join(repr(name) for name in _BACKENDS)
        raise ValueError(f"unknown backend {backend!r}: the known ones are {known}.") from None
