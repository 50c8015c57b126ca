"""retrograd: a backward engine for PyTorch that works from any thread and at any reentrant depth.

    import retrograd
    retrograd.install()            # once
    with retrograd.enable():       # this thread
        loss.backward()

Everything autograd promises holds inside: the same gradients (within rounding where nodes are fused and compiled, bit
for bit with `enable(backend="schedule")`), the same hooks in the same order, the same exceptions. Calls that retrograd
does not take run on the engine that was there before; `stats()` and `explain()` say which and why.
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
from retrograd._explain import Explanation, explain
from retrograd._version import __version__

__all__ = [
    "Explanation",
    "__version__",
    "cache_clear",
    "disable",
    "enable",
    "explain",
    "install",
    "is_installed",
    "logger",
    "reset_stats",
    "set_default",
    "stats",
    "uninstall",
    "wait",
]
