"""Backward from Python: the stock engine and retrograd in turn, in one process; medians and their ratio.

Every row asserts from retrograd.stats() that its calls took the path that is measured. Above 1, retrograd is faster.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd


@dataclass
class Row:
    name: str
    stock_us: float
    retrograd_us: float

    @property
    def ratio(self) -> float:
        return self.stock_us / self.retrograd_us


def layers_of(depth: int, width: int, relu: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width)] + ([nn.ReLU()] if relu else [])
    return nn.Sequential(*layers)


def mlp(depth: int, width: int, batch: int, relu: bool = True) -> Callable[[], Tensor]:
    model, x = layers_of(depth, width, relu), torch.randn(batch, width)

    def loss() -> Tensor:
        model.zero_grad()
        return model(x).sum()

    return loss


def encoder(batch: int = 8) -> Callable[[], Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(batch, 16, 64)

    def loss() -> Tensor:
        model.zero_grad()
        return model(x).pow(2).mean()

    return loss


def checkpointed(use_reentrant: bool) -> Callable[[], Tensor]:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(6))
    x = torch.randn(8, 64, requires_grad=True)

    def loss() -> Tensor:
        blocks.zero_grad()
        h = x
        for block in blocks:
            h = checkpoint(block, h, use_reentrant=use_reentrant)
        return h.sum()

    return loss


def hooked() -> Callable[[], Tensor]:
    """mlp10x64 with a Python hook on every activation."""
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(10))
    x = torch.randn(8, 64)

    def loss() -> Tensor:
        layers.zero_grad()
        h = x
        for layer in layers:
            h = layer(h).relu()
            h.register_hook(lambda g: None)
        return h.sum()

    return loss


def timed(loss: Tensor) -> float:
    start = time.perf_counter()
    loss.backward()
    return (time.perf_counter() - start) * 1e6


def compare(name: str, make_loss: Callable[[], Tensor], rounds: int) -> Row:
    with retrograd.enable("schedule"):
        for _ in range(10):
            make_loss().backward()
    retrograd.reset_stats()
    stock, ours = [], []
    for _ in range(rounds):
        stock.append(timed(make_loss()))
        loss = make_loss()
        with retrograd.enable("schedule"):
            ours.append(timed(loss))
    counted = retrograd.stats()
    assert counted["calls"]["schedule"] - counted["nested_calls"] == rounds, counted
    assert counted["misses"] == 0, counted
    return Row(name, statistics.median(stock), statistics.median(ours))


def installed_not_enabled(rounds: int) -> Row:
    make_loss = mlp(10, 64, 8)
    absent, installed = [], []
    retrograd.reset_stats()
    for _ in range(rounds):
        loss = make_loss()
        retrograd.uninstall()
        absent.append(timed(loss))
        loss = make_loss()
        retrograd.install()
        installed.append(timed(loss))
    counted = retrograd.stats()
    assert counted["previous_reasons"]["not_enabled"] == rounds, counted  # those with retrograd; absent, it sees none
    assert counted["calls"]["schedule"] == 0, counted
    return Row("mlp10x64, installed but not enabled", statistics.median(absent), statistics.median(installed))


def timed_threads(works: list[Callable[[threading.Barrier], None]]) -> float:
    """Microseconds of all works at once, a thread each; each waits at the barrier before and after what counts."""
    gate = threading.Barrier(len(works) + 1)
    workers = [threading.Thread(target=work, args=(gate,)) for work in works]
    for worker in workers:
        worker.start()
    gate.wait()
    start = time.perf_counter()
    gate.wait()
    elapsed = time.perf_counter() - start
    for worker in workers:
        worker.join()
    return elapsed * 1e6


def threads(count: int, rounds: int, calls: int) -> Row:
    """Wall time per backward call with `count` threads, each on a model of its own."""
    losses = [mlp(10, 64, 8) for _ in range(count)]

    def run(enabled: bool) -> float:
        def work(gate: threading.Barrier, make_loss: Callable[[], Tensor]) -> None:
            torch.set_num_threads(1)  # a property of each thread
            with retrograd.enable("schedule") if enabled else retrograd.disable():
                loss = make_loss()
                gate.wait()
                for _ in range(calls):
                    loss.backward(retain_graph=True)
                gate.wait()

        works = [functools.partial(work, make_loss=make_loss) for make_loss in losses]
        return timed_threads(works) / (count * calls)

    run(True)
    retrograd.reset_stats()
    stock, ours = [], []
    for _ in range(rounds):
        stock.append(run(False))
        ours.append(run(True))
    assert retrograd.stats()["calls"]["schedule"] == rounds * count * calls, retrograd.stats()
    return Row(f"mlp10x64, {count} Python threads", statistics.median(stock), statistics.median(ours))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3000, help="calls on each side for the smallest models")
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    retrograd.install()
    rows = [
        compare("mlp10x64", mlp(10, 64, 8), rounds),
        compare("mlp10x64, a Python hook per layer", hooked(), rounds),
        compare("4 x Linear(512, 512), batch 64", mlp(4, 512, 64, relu=False), max(rounds // 20, 50)),
        compare("transformer encoder, 2 layers", encoder(), max(rounds // 10, 50)),
        compare("6 blocks, reentrant checkpoint", checkpointed(True), max(rounds // 5, 50)),
        compare("6 blocks, non-reentrant checkpoint", checkpointed(False), max(rounds // 5, 50)),
        installed_not_enabled(rounds),
        threads(2, 5, max(rounds // 6, 50)),
        threads(4, 5, max(rounds // 12, 50)),
    ]
    width = max(len(row.name) for row in rows)
    print(f"{'backward, one intra-op thread':{width}}  stock us  retrograd us  ratio")
    for row in rows:
        print(f"{row.name:{width}}  {row.stock_us:8.1f}  {row.retrograd_us:12.1f}  {row.ratio:5.2f}")


if __name__ == "__main__":
    main()
