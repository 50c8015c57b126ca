"""The simulated accelerator `sim`, for tests; importing it makes it this process's accelerator.

Import it before the process's first backward. Devices are `sim:0` to `sim:2`; `torch.Stream("sim:0")` is the next of
eight streams a device; kernels run late and beside each other, on threads. runtime.h says what the checker reports.
"""

from __future__ import annotations

import atexit
import types

import torch

torch.utils.rename_privateuse1_backend("sim")
import _simdev  # noqa: E402
from _simdev import (  # noqa: E402
    DEVICES,
    Kernel,
    Seen,
    drop_wait,
    reset,
    seen,
    send_nothing,
    set_synchronous,
    synchronize,
)

__all__ = [
    "DEVICES",
    "Kernel",
    "Seen",
    "drop_wait",
    "reset",
    "seen",
    "send_nothing",
    "set_delay",
    "set_synchronous",
    "synchronize",
]


def set_delay(microseconds: int, where: torch.Stream | int | None = None) -> None:
    """How long each kernel takes at least, from now on: on a stream, on all streams of a device, or everywhere."""
    if isinstance(where, torch.Stream):
        _simdev.set_delay(microseconds, where.device_index, where.stream_id)
        return
    for device in range(DEVICES) if where is None else (where,):
        _simdev.set_delay(microseconds, device)


def _device_module() -> types.ModuleType:
    """What PyTorch looks for under `torch.sim`: autocast, checkpoint, manual_seed and fake tensors do."""
    module = types.ModuleType("torch.sim")
    functions = {
        "device_count": lambda: DEVICES,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "current_device": _simdev.current_device,
        "set_device": _simdev.set_device,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_rng_state": lambda device=None: torch.empty(0, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


torch._register_device_module("sim", _device_module())
atexit.register(synchronize)  # kernels in flight would outlive what they use
