"""Acting on a module when it is imported, without importing it."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_lock = threading.RLock()  # comparing finders may run code
# Held for a moment only, so fork() can wait: what it guards is whole in the child.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def when_imported(name: str, action: Callable[[Any], Callable[[], None]]) -> Callable[[], None]:
    """Calls action(module) once: now if the module is there, else right after its first import.

    Returns what undoes it: calls what `action` returned, or sees to it that `action` is never called.
    """
    pending = _Pending(name, action)
    module = sys.modules.get(name)
    # A module that is being imported by another thread at this moment is not complete yet.
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        pending.run(module)
    else:
        sys.meta_path.insert(0, pending)
        if module is not None:
            importlib.import_module(name)  # waits for the other thread
            pending.run(sys.modules[name])
    return pending.undo


class _Pending(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, action: Callable[[Any], Callable[[], None]]) -> None:
        self._name = name
        self._action: Callable[[Any], Callable[[], None]] | None = action
        self._undo: Callable[[], None] | None = None
        self._here = threading.local()  # set while this thread searches: another one of these would ask this one

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name or getattr(self._here, "searching", False):
            return None
        self._here.searching = True
        try:
            for finder in sys.meta_path:
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        _run_after(spec.loader, self.run)
                    return spec
        finally:
            self._here.searching = False
        return None

    def run(self, module: Any) -> None:
        with _lock:
            action, self._action = self._action, None
            if self in sys.meta_path:
                sys.meta_path.remove(self)
        if action is not None:
            self._undo = action(module)

    def undo(self) -> None:
        with _lock:
            self._action = None
            if self in sys.meta_path:
                sys.meta_path.remove(self)
        if self._undo is not None:
            self._undo()


def _run_after(loader: Any, run: Callable[[Any], None]) -> None:
    """Makes this one loader call `run` with the module that it loaded."""
    exec_module = loader.exec_module

    def exec_then_run(module: ModuleType) -> None:
        exec_module(module)
        run(module)

    loader.exec_module = exec_then_run
