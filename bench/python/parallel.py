"""Branches at the same time: the schedule with and without `parallel=True` in turn, in one process; ratios of medians.

Says how many of the calls with `parallel=True` were split: graphs for which it does not pay are found out and left
alone. Above 1, splitting is faster.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from suite import layers_of, timed
from torch import Tensor

import retrograd


def branches(count: int, depth: int, width: int, batch: int) -> Callable[[], Tensor]:
    towers, x = [layers_of(depth, width) for _ in range(count)], torch.randn(batch, width)

    def loss() -> Tensor:
        for tower in towers:
            tower.zero_grad()
        return torch.stack([tower(x).square().mean() for tower in towers]).sum()

    return loss


def compare(name: str, make_loss: Callable[[], Tensor], rounds: int, should_split: bool) -> str:
    retrograd.cache_clear()  # what an earlier row found out about a graph of this shape
    one_by_one, at_once = [], []

    def call(parallel: bool) -> float:
        loss = make_loss()
        with retrograd.enable("schedule", parallel=parallel):
            return timed(loss)

    for _ in range(20):
        call(True)
    retrograd.reset_stats()
    for _ in range(rounds):
        one_by_one.append(call(False))
        at_once.append(call(True))
    counted = retrograd.stats()
    assert counted["calls"]["schedule"] == 2 * rounds, counted
    share = counted["parallel_calls"] / rounds
    assert (share > 0.5) == should_split, f"{name}: {share:.0%} of the calls were split"
    before, now = statistics.median(one_by_one), statistics.median(at_once)
    return f"{name:44}  {before:13.1f}  {now:11.1f}  {before / now:5.2f}  {share:6.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="calls on each side for the largest models")
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    retrograd.install()
    print(f"{'backward, one intra-op thread, us':44}  one at a time  parallel=True  ratio  split")
    print(compare("2 branches of 4 x Linear(512, 512), batch 256", branches(2, 4, 512, 256), rounds, True))
    print(compare("8 branches of 3 x Linear(16, 16), batch 8", branches(8, 3, 16, 8), rounds * 10, False))


if __name__ == "__main__":
    main()
