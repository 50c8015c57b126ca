"""Models whose groups are really compiled by AOTInductor, in a worker process: gradients within stated tolerances.

Five compiles, each done once for the module (half a minute of two cores on the first machine this ran on).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fused_oracle import check_values, counting_fused, lowering
from oracle import run_threads
from torch import Tensor, nn

import retrograd


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str]) -> Tensor:
        ctx.log = log
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.log.append("function")
        return grad * 2, None


class Mixed(nn.Module):
    """A custom function and hooks in the middle, with a group on either side."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.log: list[str] = []
        for name, p in self.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: self.log.append(name))

    def forward(self, x: Tensor) -> Tensor:
        h = Scale.apply(self.first(x).tanh() * 0.5, self.log)
        h.register_hook(lambda g: self.log.append("hook"))
        return self.second(h.sin() + h).tanh()


class Complex(nn.Module):
    """Inductor leaves products of complex numbers to libtorch, and lists them in a file next to the library."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imag = nn.Linear(4, 4), nn.Linear(4, 4)
        self.turn = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(self.real(x), self.imag(x))
        return (z * self.turn * z).imag


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {  # with the input's shape and the groups
    "mlp": (lambda: nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(8, 8), nn.Tanh()))), (5, 8), 1),
    "conv": (conv, (4, 1, 8, 8), 1),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.2, batch_first=True), (3, 5, 16), 1),
    "mixed": (Mixed, (3, 4), 2),
    "complex": (Complex, (3, 4), 1),
}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> Iterator[None]:
    retrograd.cache_clear()
    with lowering(None):
        yield
    retrograd.wait(60)


def step(net: nn.Module, shape: tuple[int, ...], seed: int) -> list[Tensor]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    net(x).pow(2).mean().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    net = MODELS[name][0]()
    twin = MODELS[name][0]()
    twin.load_state_dict(net.state_dict())
    return net, twin


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str) -> None:
    _, shape, groups = MODELS[name]
    net, twin = pair(name)
    for seed in range(4):
        with retrograd.enable("inductor", mode="blocking"), counting_fused() as ran:
            got = step(net, shape, seed)
        check_values(step(twin, shape, seed), got)
        assert ran.fused == 1 and ran.compiled == groups and ran.by_node == 0, ran
        assert seed == 0 or ran.recordings == 0, ran
    if isinstance(net, Mixed) and isinstance(twin, Mixed):
        assert net.log == twin.log and net.log[:1] != [], (net.log, twin.log)


def test_threads_run_one_plan_at_once() -> None:
    _, shape, _ = MODELS["mlp"]
    pairs = [pair("mlp") for _ in range(2)]

    def work(k: int) -> None:
        with retrograd.enable("inductor", mode="blocking"):
            for _ in range(200):
                step(pairs[k][0], shape, 7)

    step(pairs[0][0], shape, 0)
    pairs[0][0].zero_grad()
    with counting_fused() as ran:
        run_threads([lambda k=k: work(k) for k in range(2)])
    assert ran.fused == ran.compiled == 400 and ran.recordings == 0, ran
    for net, twin in pairs:
        for _ in range(200):
            want = step(twin, shape, 7)
        check_values(want, [p.grad for p in net.parameters()])  # type: ignore[misc]


def test_background_mode() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    twin = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    twin.load_state_dict(net.state_dict())
    seen: list[str] = []
    with retrograd.enable("inductor"):
        for seed in range(8):
            with counting_fused() as ran:
                got = step(net, (2, 3), seed)
            seen.append("fused" if ran.fused else next(iter(ran.fallbacks)))
            with retrograd.disable():
                check_values(step(twin, (2, 3), seed), got)
            if seed == 4:
                assert retrograd.wait(120)
    assert seen[-3:] == ["fused"] * 3, seen
    assert set(seen[:5]) <= {"warming_up", "compiling", "fused"}, seen
