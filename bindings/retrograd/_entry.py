"""Where retrograd takes its place inside PyTorch: what install() puts in, and uninstall() takes out again."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

from retrograd import _dropin, _tracing
from retrograd._load import C as _C
from retrograd._load import torch

Variable = torch.autograd.Variable

_lock = threading.RLock()  # code that runs in the middle of it, a finalizer say, may come here again
_engine = _C.Engine()
_undo: list[Callable[[], None]] = []


def install() -> bool:
    """Installs both entries and the small patches that belong to them. False if it was already done."""
    with _lock:
        if _C.is_installed():
            return False
        _C.install()
        _replace(Variable, "_execution_engine", _engine)
        # Inside a region libtorch takes the region for the current node; the function that tells Python is ours.
        _replace(torch._C, "_current_autograd_node", _C.current_autograd_node)
        _watch_saved_tensor_hooks()
        _dropin.install(_replace, _undo.append)
        _tracing.install(_replace, _undo.append)
        return True


def uninstall() -> bool:
    """Takes out what install() put in, except what someone has replaced since. False if there is nothing."""
    with _lock:
        if not _C.is_installed():
            return False
        while _undo:
            _undo.pop()()
        _C.uninstall()
        return True


def _replace(owner: Any, name: str, value: Any) -> None:
    previous = getattr(owner, name)
    setattr(owner, name, value)

    def undo() -> None:
        if getattr(owner, name) is value:
            setattr(owner, name, previous)

    _undo.append(undo)


def _watch_saved_tensor_hooks() -> None:
    """SavedTensor.register_hooks bypasses the engine, which must know that such hooks exist (engine/gated_hooks.h)."""
    saved_tensor = torch._C._autograd.SavedTensor
    register_hooks = saved_tensor.register_hooks

    @functools.wraps(register_hooks)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        _C.note_ungated_hooks()
        return register_hooks(self, *args, **kwargs)

    _replace(saved_tensor, "register_hooks", noting)


# A child that is forked in the middle of another thread's install() would be left with half of it: fork() waits.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
# In a forked child PyTorch makes its Python engine anew at its next use through Python; C++ callers reach it by
# address. One use is enough.
os.register_at_fork(after_in_child=torch._C._ImperativeEngine().is_checkpoint_valid)
