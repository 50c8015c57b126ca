"""Prints how often an engine call takes the GIL, as JSON. alone_gil.py runs it with libgil_count.so preloaded."""

from __future__ import annotations

import ctypes
import json

import torch
from fused_oracle import counting_fused
from torch import nn
from torch.autograd import Variable

import retrograd

process = ctypes.PyDLL(None)
for count in (process.gil_takes, process.gil_retakes):
    count.restype = ctypes.c_int64


def taken(net: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Takes and retakes between entry and return of the engine; its way back to Python is a retake."""
    loss = net(x).sum()
    arguments = ((loss,), (torch.ones_like(loss),), False, False, (), True, True)
    before = process.gil_takes(), process.gil_retakes()
    Variable._execution_engine.run_backward(*arguments)
    return process.gil_takes() - before[0], process.gil_retakes() - before[1]


def main() -> None:
    torch.set_num_threads(1)
    retrograd.install()
    # mlp10x64 of bench/python/suite.py
    net = nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(64, 64), nn.ReLU())))
    x = torch.randn(8, 64)
    counts: dict[str, list[tuple[int, int]]] = {"stock": [], "schedule": [], "hits": []}
    for _ in range(3):
        counts["stock"].append(taken(net, x))
    for backend in ("schedule", "hits"):
        scope = retrograd.enable("schedule") if backend == "schedule" else retrograd.enable("inductor", mode="blocking")
        with scope:
            taken(net, x)  # makes the plan
            for _ in range(3):
                with counting_fused() as ran:
                    counts[backend].append(taken(net, x))
                assert (ran.fused, ran.compiled, ran.schedule) == ((1, 1, 0) if backend == "hits" else (0, 0, 1)), ran
                assert ran.by_node == ran.recordings == ran.plans == 0, ran
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
