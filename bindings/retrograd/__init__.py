"""retrograd: a backward engine for PyTorch that works from any thread and at any reentrant depth.

    import retrograd
    retrograd.install()            # once
    with retrograd.enable():       # this thread
        loss.backward()

Everything autograd promises holds inside: the same gradients bit for bit, the same hooks in the same order, the same
exceptions. Calls that retrograd does not take run on the engine that was there before; `stats()` says which and why.
"""

from __future__ import annotations

from retrograd._api import (
    cache_clear,
    disable,
    enable,
    install,
    is_installed,
    logger,
    reset_stats,
    set_default,
    stats,
    uninstall,
    wait,
)
from retrograd._version import __version__

__all__ = [
    "__version__",
    "cache_clear",
    "disable",
    "enable",
    "install",
    "is_installed",
    "logger",
    "reset_stats",
    "set_default",
    "stats",
    "uninstall",
    "wait",
]
