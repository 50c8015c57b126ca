"""Makes the plans that stored_plans.cpp runs: its model, from Python, on fused plans.

    RETROGRAD_CACHE_DIR=FOLDER python make_plans.py compile | use

"compile" expects an empty store, so that this process records and compiles; "use" a store in which everything is found.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import retrograd

# The first size gives a plan for just that size, the second one that leaves it open, which serves the third.
BATCHES = (8, 12, 20)


def main() -> None:
    wanted = sys.argv[1]
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    retrograd.install()
    with retrograd.enable(backend="inductor", mode="blocking"):
        for batch in BATCHES:
            model(torch.randn(batch, 16)).pow(2).mean().backward()
    stats = retrograd.stats()
    assert stats["calls"]["fused"] == len(BATCHES) and stats["groups"]["by_node"] == 0, stats
    if wanted == "compile":
        assert stats["plans"] == {"compiled": 2, "from_store": 0} and stats["recordings"] == 2, stats
    else:
        assert stats["plans"] == {"compiled": 0, "from_store": 2} and stats["recordings"] == 0, stats
    print(f"make_plans: {wanted}: {stats['plans']}, recordings {stats['recordings']}")


if __name__ == "__main__":
    main()
