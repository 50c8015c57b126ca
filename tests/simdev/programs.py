"""What programs on simulated devices are made of."""

from __future__ import annotations

import torch
from torch import Tensor


def new_stream(device: int, other_than: torch.Stream | None = None) -> torch.Stream:
    """The next stream of the device's pool."""
    stream = torch.Stream(f"sim:{device}")
    return torch.Stream(f"sim:{device}") if stream == other_than else stream


def current_stream(device: int) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def integers(device: int, *shape: int, seed: int = 0) -> Tensor:
    """Small random integers, so that sums have the same bits in any order; made on the device's current stream."""
    values = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(f"sim:{device}")


def leaf(stream: torch.Stream, *shape: int, seed: int = 0) -> Tensor:
    """A leaf that requires a gradient, made on `stream`."""
    with stream:
        return integers(stream.device_index, *shape, seed=seed).requires_grad_()


def share(tensor: Tensor, made_on: torch.Stream, *users: torch.Stream) -> None:
    """What a program owes the device before other streams use a tensor: they wait, and its memory waits for them."""
    for user in users:
        user.wait_stream(made_on)
        if user.device == tensor.device:
            tensor.detach().record_stream(user)
