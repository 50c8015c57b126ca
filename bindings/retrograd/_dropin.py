"""torch's own switches for compiled autograd, made to act on the calling thread and on retrograd.

torch keeps what is enabled in process-wide flags of the module torch._dynamo.compiled_autograd and in one pointer
inside libtorch, so its switches work for one thread at a time. While retrograd is installed, the switches are the
functions below, and the flags are properties of the module that read the calling thread's own.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import types
from collections.abc import Callable, Generator
from typing import Any

from retrograd import _compilers, _importing
from retrograd._load import C as _C
from retrograd._load import torch

# torch's own set_autograd_compiler, and whether it has a compiler set: one that was set before install(), whose block
# is still open. torch's compiled autograd then stands in front of every engine, and its block must find it at its end.
_stock_set: Callable[..., Any]
_stock_active = False


class _Local(threading.local):
    entering_region = False
    # The number of the compiler that set_autograd_compiler(compiler) set, and what set_autograd_compiler(None) goes
    # back to. Of use as long as the former is in place: a block that was left has put back what was there before it.
    mine: int | None = None
    base: Any = None


_local = _Local()

_OFF = (_C.MODE_DISABLED, _C.BACKEND_SCHEDULE, None, False, _C.COMPILE_BACKGROUND, False)


def _on(compiler: Any, dynamic: bool) -> tuple[Any, ...]:
    return (_C.MODE_ENABLED, _C.BACKEND_SCHEDULE, compiler, dynamic, _C.COMPILE_BACKGROUND, False)


def _compiler_in_force() -> Any:
    """The calling thread's compiler; None while it has none."""
    mode, _, compiler, *_ = _C.setting_in_force()
    return compiler if mode == _C.MODE_ENABLED else None


class FrontEndModule(types.ModuleType):
    """The class of torch._dynamo.compiled_autograd while retrograd is installed.

    Properties of a module's class come before the module's own globals, but only for readers from outside; the
    functions in the module that use the flags are replaced as well.
    """

    @property
    def compiled_autograd_enabled(self) -> bool:
        return not _C.get_in_region() and _compiler_in_force() is not None

    @compiled_autograd_enabled.setter
    def compiled_autograd_enabled(self, value: bool) -> None:
        raise AttributeError("compiled_autograd_enabled follows _enable() and _disable(); it cannot be set.")

    @property
    def compiled_autograd_enabled_force_eager(self) -> bool:
        return bool(_C.get_force_eager())

    @compiled_autograd_enabled_force_eager.setter
    def compiled_autograd_enabled_force_eager(self, value: bool) -> None:
        _C.set_force_eager(value)

    @property
    def in_compiled_autograd_region(self) -> bool:
        return bool(_C.get_in_region())

    @in_compiled_autograd_region.setter
    def in_compiled_autograd_region(self, value: bool) -> None:
        _C.set_in_region(value)

    @property
    def active_disable_ctx(self) -> bool:
        return bool(_C.get_active_disable())

    @active_disable_ctx.setter
    def active_disable_ctx(self, value: bool) -> None:
        _C.set_active_disable(value)

    @property
    def depth(self) -> int:
        return int(_C.get_depth())

    @depth.setter
    def depth(self, value: int) -> None:
        _C.set_depth(value)


@contextlib.contextmanager
def _enable(
    compiler_fn: Callable[..., Any],
    dynamic: bool = True,
    ignore_active_disable_ctx: bool = True,
) -> Generator[None, None, None]:
    """torch._dynamo.compiled_autograd._enable for the calling thread."""
    if not ignore_active_disable_ctx and _C.get_active_disable():
        yield
        return
    if dynamic and type(dynamic) is not bool:
        raise AssertionError(f"Expected dynamic to be bool, got {type(dynamic)}")

    from torch._dynamo import eval_frame

    if eval_frame._stance.stance == "force_eager":
        _C.set_force_eager(True)
        try:
            yield
        finally:
            _C.set_force_eager(False)
        return

    if torch.cuda.is_available():
        from torch._inductor import cudagraph_trees  # noqa: F401
    log_misses_if_asked()
    depth = _C.get_depth()
    _C.enter_setting(_on(_compilers.from_function(compiler_fn), dynamic))
    _C.set_depth(depth + 1)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        _C.leave_setting()
        _C.set_depth(_C.get_depth() - 1)
        if _C.get_depth() != depth:
            raise AssertionError("Nested Compiled Autograd Contexts must return before their parent context")


@contextlib.contextmanager
def _disable() -> Generator[None, None, None]:
    """torch._dynamo.compiled_autograd._disable for the calling thread."""
    if _local.entering_region:
        # torch's runtime_wrapper, on its way into a compiled graph. A nested call in there is to be compiled too.
        _local.entering_region = False
        yield
        return
    was_active = _C.get_active_disable()
    # Only a compiler is disabled: a thread on the schedule stays there.
    off = _compiler_in_force() is not None
    if off:
        _C.enter_setting(_OFF)
    _C.set_active_disable(True)
    try:
        yield
    finally:
        _C.set_active_disable(was_active and _C.get_in_region())
        if off:
            _C.leave_setting()


@contextlib.contextmanager
def entering_region() -> Generator[None, None, None]:
    """Makes the next _disable() of this thread, torch's own on entering a region, disable nothing."""
    _local.entering_region = True
    try:
        yield
    finally:
        _local.entering_region = False


def reset() -> None:
    """torch._dynamo.compiled_autograd.reset for the calling thread and retrograd's cache."""
    if _C.get_in_region():
        raise AssertionError("Cannot reset while in_compiled_autograd_region is True")
    set_autograd_compiler(None, False)
    set_verbose_logger(None)
    clear_cache()
    torch._dynamo.compiled_autograd.COMPILE_COUNTER = itertools.count()


def set_autograd_compiler(compiler: Callable[[], Any] | None, dynamic: bool, /) -> tuple[Any, bool]:
    """Sets the calling thread's compiler; returns the one before, as (compiler, dynamic), with None for none.

    None puts back what the thread had before the first compiler that was set here; a compiler that came from
    retrograd.enable() is switched off.
    """
    if _stock_active:
        return _set_stock(compiler, dynamic)
    current = _compiler_in_force()
    before = _C.setting_in_force()
    prior = (None, False) if current is None else (current.factory.factory, before[3])
    own = _C.own_setting()
    is_mine = own[2] is not None and own[2].number == _local.mine
    if compiler is not None:
        if not is_mine:
            _local.base = own
        mine = _compilers.intern(compiler)
        _C.set_setting(_on(mine, bool(dynamic)))
        _local.mine = mine.number
    elif is_mine:
        _C.set_setting(_local.base)
        _local.mine = _local.base = None
    elif current is not None:
        _C.set_setting(_OFF)
    return prior


def clear_cache() -> None:
    """Forgets all plans."""
    _C.cache_clear()


def is_cache_empty() -> bool:
    """Whether no graph has a plan."""
    return bool(_C.cache_is_empty())


def set_verbose_logger(logger: Any) -> bool:
    """Sets the object whose debug() the calling thread's cache misses are told to; None for none."""
    _C.set_verbose_logger(_C.logger_number(logger))
    return True


def log_misses_if_asked() -> None:
    """Sets the verbose logger if torch's log settings ask for it (TORCH_LOGS=compiled_autograd_verbose)."""
    from torch._dynamo import compiled_autograd as front_end

    if front_end.snapshot_verbose_logging_enabled():
        set_verbose_logger(front_end.verbose_log)


def _set_stock(compiler: Any, dynamic: bool) -> tuple[Any, bool]:
    global _stock_active
    prior: tuple[Any, bool] = _stock_set(compiler, dynamic)
    _stock_active = compiler is not None
    _C.set_stock_compiled_autograd_active(_stock_active)
    return prior


def install(replace: Callable[[Any, str, Any], None], on_undo: Callable[[Callable[[], None]], None]) -> None:
    """Puts the functions above into their places in libtorch's module and in Dynamo's.

    Args:
        replace: replace(owner, name, value), undone by uninstall().
        on_undo: registers a function that uninstall() calls.
    """
    global _stock_set
    binding = torch._C._dynamo.compiled_autograd
    _stock_set = binding.set_autograd_compiler
    _set_stock(*_set_stock(None, False))  # what is set can only be read by setting something
    for function in (set_autograd_compiler, clear_cache, is_cache_empty, set_verbose_logger):
        replace(binding, function.__name__, function)
    replace(binding, "call_cpp_tensor_pre_hooks", _C.call_cpp_tensor_pre_hooks)
    on_undo(_importing.when_imported("torch._dynamo.compiled_autograd", _take_front_end))


def _take_front_end(front_end: Any) -> Callable[[], None]:
    names = {"_enable": _enable, "_disable": _disable, "reset": reset}
    previous = {name: getattr(front_end, name) for name in names}
    previous_class = type(front_end)
    for name, value in names.items():
        setattr(front_end, name, value)
    front_end.__class__ = FrontEndModule

    def undo() -> None:
        if type(front_end) is FrontEndModule:
            front_end.__class__ = previous_class
        for name, value in names.items():
            if getattr(front_end, name) is value:
                setattr(front_end, name, previous[name])
        _C.restore_validate_outputs()

    return undo
