"""Compiler functions: torch's compiled autograd and retrograd in turn, in one process; medians and their ratio.

The same compiler function on both sides, the same model (10 x Linear(64, 64) + ReLU, batch 8), backward alone. Both
sides are asserted to have run compiled, and to have captured nothing, inside the timed calls. Above 1, retrograd is
faster; the eager engine's median is beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters

import retrograd

Compiler = Callable[[torch.fx.GraphModule], Callable[..., Any]]


class Counted:
    """A compiler function whose compiled functions count their calls."""

    def __init__(self, compile_graph: Compiler) -> None:
        self.runs = 0
        self._compile = compile_graph

    def __call__(self, graph: torch.fx.GraphModule) -> Callable[..., Any]:
        compiled = self._compile(graph)

        def run(*args: Any) -> Any:
            self.runs += 1
            return compiled(*args)

        return run


def raw(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    return graph


def inductor(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    return torch.compile(graph)  # type: ignore[no-any-return]


def make_loss() -> Callable[[], Tensor]:
    layers = [layer for _ in range(10) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model, x = nn.Sequential(*layers), torch.randn(8, 64)

    def loss() -> Tensor:
        model.zero_grad()
        return model(x).sum()

    return loss


def timed(loss: Tensor) -> float:
    start = time.perf_counter()
    loss.backward()
    return (time.perf_counter() - start) * 1e6


@contextlib.contextmanager
def stock(compiler: Compiler, dynamic: bool) -> Any:
    retrograd.uninstall()
    try:
        with compiled_autograd._enable(compiler, dynamic=dynamic):
            yield
    finally:
        retrograd.install()


def captures() -> int:
    return int(counters["compiled_autograd"]["captures"])


def cached_call(name: str, compile_graph: Compiler, dynamic: bool, rounds: int) -> str:
    loss, compiler = make_loss(), Counted(compile_graph)
    sides = {
        "stock": lambda: stock(compiler, dynamic),
        "retrograd": lambda: retrograd.enable(backend=compiler, dynamic=dynamic),
        "eager": lambda: retrograd.disable(),
    }
    with stock(compiler, dynamic):
        torch._C._dynamo.compiled_autograd.clear_cache()  # it does not tell compiler functions apart
    for side in sides.values():
        for _ in range(10):
            with side():
                loss().backward()
    retrograd.reset_stats()
    captured, times = captures(), {side: [] for side in sides}
    compiler.runs = 0
    for _ in range(rounds):
        for side, enable in sides.items():
            y = loss()
            with enable():
                times[side].append(timed(y))
    stats = retrograd.stats()
    assert stats["calls"]["callable"] == stats["hits"] == rounds, stats
    assert stats["misses"] == 0, stats
    assert compiler.runs == 2 * rounds, "a side did not run compiled"
    assert captures() == captured, "a timed call captured"
    return row(name, times)


def capture(rounds: int) -> str:
    """The first call with a compiler function that does nothing: capture, and one run."""
    loss, times = make_loss(), {"stock": [], "retrograd": []}
    retrograd.reset_stats()
    before = captures()
    for _ in range(rounds):
        y = loss()
        with stock(raw, dynamic=True):
            torch._C._dynamo.compiled_autograd.clear_cache()
            times["stock"].append(timed(y))
        y = loss()
        retrograd.cache_clear()
        with retrograd.enable(backend=raw, dynamic=True):
            times["retrograd"].append(timed(y))
    assert retrograd.stats()["captures"] == rounds
    assert captures() == before + 2 * rounds
    return row("capture, dynamic sizes", times)


def row(name: str, times: dict[str, list[float]]) -> str:
    median = {side: statistics.median(values) for side, values in times.items()}
    eager = f"{median['eager']:9.1f}" if "eager" in median else " " * 9
    ratio = median["stock"] / median["retrograd"]
    return f"{name:36}  {median['stock']:8.1f}  {median['retrograd']:12.1f}  {ratio:5.2f}{eager}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000, help="calls on each side")
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    retrograd.install()
    print(f"{'mlp10x64, backward':36}  stock us  retrograd us  ratio eager us")
    print(cached_call("graph as it is, dynamic sizes", raw, True, rounds))
    print(cached_call("graph as it is, static sizes", raw, False, rounds))
    print(cached_call("Dynamo + Inductor, dynamic sizes", inductor, True, rounds))
    print(cached_call("Dynamo + Inductor, static sizes", inductor, False, rounds))
    print(capture(max(rounds // 20, 20)))


if __name__ == "__main__":
    main()
