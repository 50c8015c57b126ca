"""Random graphs over devices and streams."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import simdev
import torch
from device_oracle import BACKENDS, DeviceRecorder, check, run, run_without_races
from programs import integers, leaf, new_stream, share
from torch import Tensor

SIZE = 3
SEEDS = range(40)

Made = tuple[Tensor, torch.Stream]  # a tensor and the stream that made it


def bring(made: Made, to: torch.Stream) -> Tensor:
    """The tensor on the stream's device, ready for the stream."""
    tensor, on = made
    if tensor.device == to.device:
        share(tensor, on, to)
        return tensor
    with on, to:
        return tensor.to(to.device)


def operation(choose: random.Random, pool: list[Made], streams: list[torch.Stream]) -> Made:
    stream = choose.choice(streams)
    a, b = (bring(choose.choice(pool), stream) for _ in range(2))
    with stream:
        match choose.choice(["add", "mul", "mm", "relu", "same", "transpose", "in place"]):
            case "add":
                c = a + b  # one gradient for both
            case "mul":
                c = a * b
            case "mm":
                c = a @ b
            case "relu":
                c = (a - b).relu()
            case "same":
                c = a + a
            case "transpose":
                c = a.t() * b
            case "in place":
                c = a * 2
                c.add_(b)
        return c.clamp(-4, 4), stream  # sums of integers stay exact


def program(seed: int) -> Callable[[DeviceRecorder], None]:
    def run_it(rec: DeviceRecorder) -> None:
        choose = random.Random(seed)
        devices = choose.choice([1, simdev.DEVICES])
        streams = [new_stream(choose.randrange(devices)) for _ in range(5)]
        for stream in streams:
            simdev.set_delay(choose.choice([0, 50, 400]), stream)
        pool: list[Made] = []
        for index in range(3):
            stream = choose.choice(streams)
            pool.append((leaf(stream, SIZE, SIZE, seed=seed * 10 + index), stream))
        leaves = [tensor for tensor, _ in pool]
        for _ in range(choose.randint(4, 16)):
            pool.append(operation(choose, pool, streams))
        roots = choose.sample(pool[3:], choose.randint(1, 3))
        for tensor, _ in pool[3:]:
            if choose.random() < 0.2:
                tensor.register_hook(lambda grad: grad * 1)
        if choose.random() < 0.2:  # a leaf's hook, which may look at what was accumulated
            leaves[0].register_post_accumulate_grad_hook(lambda p: rec.say("accumulated", p.grad))
        calls = choose.choice([1, 1, 2])
        inputs = choose.choice([None, None, leaves[1:]])
        captured = (
            [*inputs, *(tensor for tensor, _ in choose.sample(pool[3:], 2) if tensor.requires_grad)]
            if inputs and choose.random() < 0.5
            else None
        )
        rec.backward_begins()
        for call in range(calls):
            gradients = []
            for number, (root, on) in enumerate(roots):
                device = root.device.index
                gradients.append(integers(device, SIZE, SIZE, seed=seed * 10 + call * 3 + number))
                gradients[-1].record_stream(on)
            outputs = [root for root, _ in roots]
            if any(tensor.requires_grad for tensor in outputs):
                if captured is not None:
                    grads = torch.autograd.grad(outputs, captured, gradients, call + 1 < calls, allow_unused=True)
                    rec.say(grads)
                else:
                    torch.autograd.backward(outputs, gradients, retain_graph=call + 1 < calls, inputs=inputs)
            rec.grads(*leaves)

    return run_it


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_without_a_race(seed: int) -> None:
    check(run_without_races(program(seed)), program(seed), list(BACKENDS)[seed % len(BACKENDS)])


def test_the_stock_engine_is_not_without_a_race_on_these_graphs() -> None:
    """Else they would be too tame to show anything: see test_streams.py for what it does wrong."""
    reports = [report for seed in SEEDS for report in run(program(seed), None).reports]
    assert {report.partition(":")[0] for report in reports} == {"read after write", "write after read"}, reports
