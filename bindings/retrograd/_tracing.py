"""torch.fx's tracer, made to act on the thread that traces.

`Tracer.trace` replaces `__call__` and `__getattr__` of torch.nn.Module and raises a flag, for the whole process:
another thread that calls a module meanwhile is taken for traced code, and fails. It comes to that in the middle of
training, since torch traces graphs when it compiles, and when a capture meets a forward from AOTAutograd's cache.

While retrograd is installed, each thread has a flag of its own, and while any thread traces, nn.Module has methods in
the two places that ask which thread is calling. No thread waits for another one's trace.

Dynamo, torch.compile's results and wrappers know most of these functions by identity. So functions stay what they are
and get other code, which runs among the globals of the module that they are from, and so begins with an import.

The third thing that a trace replaces are functions: those of the math module, and those marked by torch.fx.wrap(), in
the globals of modules. Those do for any thread what they always did unless they get a proxy. They are shared by all
traces and put back by the last one. (To Dynamo they are other functions: a frame with such a call that another thread
compiles or runs meanwhile may break its graph there, or be compiled once more.)
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import types
from collections.abc import Callable, Generator
from typing import Any

import torch.fx._symbolic_trace as fx
from torch.nn import Module

# What a trace does with the lock held runs none of the traced code. A finalizer may trace, on top of anything.
_lock = threading.RLock()
_METHODS = ("__call__", "__getattr__")


class _Local(threading.local):
    def __init__(self) -> None:
        self.flag = False  # torch's _is_fx_tracing_flag
        self.patcher: _Patcher | None = None  # torch's CURRENT_PATCHER
        # What a trace of this thread has in the places of the methods. No use of them is made but by name.
        self.methods = types.SimpleNamespace(**dict.fromkeys(_METHODS))


_local = _Local()


class _Call:
    """In the place of nn.Module.__call__ while any thread traces: gives each thread its own, also to look at."""

    def __init__(self) -> None:
        self._real: Any = None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        method = vars(_local.methods)["__call__"] or self._real
        return method.__get__(instance, owner) if hasattr(method, "__get__") else method

    def put_in(self) -> None:
        there = vars(Module)["__call__"]
        if there is not self:
            self._real = there
            Module.__call__ = self  # type: ignore[assignment]

    def take_out(self) -> None:
        if vars(Module)["__call__"] is self:
            Module.__call__ = self._real


_call = _Call()

# Dynamo takes no descriptor for this one.
_getattr: Any = fx._orig_module_getattr
real_getattr = types.FunctionType(_getattr.__code__, _getattr.__globals__, "__getattr__")


def _getattr_of_thread(self: Any, name: str) -> Any:
    from retrograd import _tracing

    if torch.compiler.is_dynamo_compiling():  # type: ignore[name-defined]  # noqa: F821
        return _tracing.real_getattr(self, name)
    return _tracing.getattr_of_thread(self, name)


# Dynamo, which passes over this package, looks into it for modules that have a __getattr__ of their own.
_code_of_thread = _getattr_of_thread.__code__.replace(co_filename=_getattr.__code__.co_filename)


def getattr_of_thread(module: Any, name: str) -> Any:
    """nn.Module.__getattr__ while any thread traces."""
    method = vars(_local.methods)["__getattr__"] or real_getattr
    return method(module, name)


class _Shared:
    """A replaced function, for one of the traces that want it: has the methods of torch's _PatchedFn."""

    # What is in place, by owner and name: the replacement, which keeps its owner, and how many traces want it.
    _in_place: dict[tuple[int, str], tuple[Any, int]] = {}  # noqa: RUF012

    def __init__(self, place: tuple[int, str], patched: Any) -> None:
        self._place = place
        self._patched = patched

    @classmethod
    def in_place(cls, owner: Any, name: str) -> Any:
        return cls._in_place.get((id(owner), name), (None, 0))[0]

    @classmethod
    def functions(cls, module: dict[str, Any]) -> list[tuple[str, Any]]:
        """The public functions among these globals, as they are without traces."""
        found = [(name, cls.in_place(module, name), value) for name, value in list(module.items())]
        real = [(name, value if patched is None else patched.orig_fn) for name, patched, value in found]
        return [(name, value) for name, value in real if not name.startswith("_") and callable(value)]

    def patch(self) -> None:
        with _lock:
            patched, count = self._in_place.get(self._place, (self._patched, 0))
            self._in_place[self._place] = (patched, count + 1)
            if count == 0:
                patched.patch()

    def revert(self) -> None:
        with _lock:
            patched, count = self._in_place.pop(self._place)
            if count > 1:
                self._in_place[self._place] = (patched, count - 1)
            else:
                patched.revert()


class _Patcher(fx._Patcher):
    """What one trace has replaced."""

    open: set[_Patcher] = set()  # noqa: RUF012  # of all threads

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def patch(self, frame_dict: Any, name: str, new_fn: Any, deduplicate: bool = True) -> None:
        self._share(super().patch, frame_dict, name, new_fn, deduplicate)

    def patch_method(self, cls: Any, name: str, new_fn: Any, deduplicate: bool = True) -> None:
        if cls is Module and name in _METHODS:
            super().patch_method(_local.methods, name, new_fn, deduplicate)  # type: ignore[arg-type]
        else:
            self._share(super().patch_method, cls, name, new_fn, deduplicate)

    def _share(self, patch: Callable[..., None], owner: Any, name: str, new_fn: Any, deduplicate: bool) -> None:
        with _lock:
            patched = _Shared.in_place(owner, name)
            if patched is None:
                patch(owner, name, new_fn, deduplicate)
                patched = self.patches_made.pop()
            shared = _Shared((id(owner), name), patched)
            shared.patch()
            self.patches_made.append(shared)  # type: ignore[arg-type]


@contextlib.contextmanager
def _new_patcher() -> Generator[_Patcher, None, None]:
    """torch's, for the calling thread."""
    outer, mine = _local.patcher, _Patcher()
    with _lock:
        _Patcher.open.add(mine)
        _call.put_in()
        _getattr.__code__ = _code_of_thread
    _local.patcher = mine
    try:
        yield mine
    finally:
        _local.patcher = outer
        _close(mine)


def _close(patcher: _Patcher) -> None:
    with _lock:
        patcher.revert_all_patches()
        _Patcher.open.discard(patcher)
        if not _Patcher.open:
            _call.take_out()
            _getattr.__code__ = real_getattr.__code__


@contextlib.contextmanager
def _maybe_revert_all_patches() -> Generator[None, None, None]:
    """torch's, for the calling thread: around Dynamo's work."""
    patcher = _local.patcher
    if patcher is None:
        yield
        return
    reverted, patcher.patches_made = patcher.revert_all_patches(), []
    try:
        yield
    finally:
        patcher.patches_made = reverted
        patcher.reapply_all_patches()


def _patch_wrapped_functions(patcher: _Patcher) -> None:
    with _lock:
        fx._patch_wrapped_functions(patcher)


def _autowrap_check(patcher: _Patcher, frame_dict: dict[str, Any], function_ids: set[int]) -> None:
    """torch's, which takes functions for what they are, also where another thread's trace has replaced them."""
    with _lock:
        if patcher.visit_once(frame_dict):
            for name, value in _Shared.functions(frame_dict):
                if id(value) in function_ids:
                    patcher.patch(frame_dict, name, fx._create_wrapped_func(value))


class FxModule(types.ModuleType):
    """The class of torch.fx._symbolic_trace while retrograd is installed, for those who read or set its flag."""

    @property
    def _is_fx_tracing_flag(self) -> bool:
        return _local.flag

    @_is_fx_tracing_flag.setter
    def _is_fx_tracing_flag(self, value: bool) -> None:
        _local.flag = value


_OURS = {
    function.__name__: function
    for function in (_new_patcher, _maybe_revert_all_patches, _patch_wrapped_functions, _autowrap_check)
} | {"_orig_module_getattr": real_getattr}
_trace: Any = inspect.unwrap(fx.Tracer.trace)
_real_trace_code = _trace.__code__


def trace(tracer: Any, root: Any, concrete_args: Any = None) -> Any:
    """Tracer.trace. torch's sets the flag among its globals; these are its own."""
    own = types.FunctionType(_real_trace_code, {**vars(fx), **_OURS}, "trace", (None,))
    with _lock:  # the tracer may have been made, and have looked at the functions that it wraps, during another trace
        modules = [_Shared.functions(vars(module)) for module in tracer._autowrap_search]
        tracer._autowrap_function_ids |= {id(function) for functions in modules for _, function in functions}
    outer, _local.flag = _local.flag, True
    try:
        return own(tracer, root, concrete_args)
    finally:
        _local.flag = outer


# Code for functions of torch.fx._symbolic_trace.


def _trace_of_thread(self: Any, root: Any, concrete_args: Any = None) -> Any:
    from retrograd import _tracing

    return _tracing.trace(self, root, concrete_args)


def _is_fx_tracing() -> bool:
    is_fx_tracing_warning()  # type: ignore[name-defined]  # noqa: F821
    return torch.fx._symbolic_trace._is_fx_tracing_flag  # type: ignore[name-defined,no-any-return]  # noqa: F821


def _is_fx_symbolic_tracing() -> bool:
    return torch.fx._symbolic_trace._is_fx_tracing_flag and not torch.compiler.is_compiling()  # type: ignore[name-defined,no-any-return]  # noqa: F821


def install(replace: Callable[[Any, str, Any], None], on_undo: Callable[[Callable[[], None]], None]) -> None:
    """Puts the functions above into their places in torch.fx. Traces in progress end as they began.

    Args:
        replace: replace(owner, name, value), undone by uninstall().
        on_undo: registers a function that uninstall() calls.
    """
    previous_class = type(fx)

    def undo() -> None:
        if type(fx) is FxModule:
            fx.__class__ = previous_class

    on_undo(undo)
    fx.__class__ = FxModule
    for function, ours in (
        (_trace, _trace_of_thread),
        (fx.is_fx_tracing, _is_fx_tracing),
        (fx.is_fx_symbolic_tracing, _is_fx_symbolic_tracing),
    ):
        replace(function, "__code__", ours.__code__)
    replace(fx, "_maybe_revert_all_patches", _maybe_revert_all_patches)


def _after_fork_in_child() -> None:
    """Other threads' traces do not go on here."""
    _lock.release()
    for patcher in list(_Patcher.open):
        if patcher.thread != threading.get_ident():
            _close(patcher)


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_fork_in_child)
