"""How far two devices work at the same time during backward: `python tests/simdev/overlap.py`.

A tower of layers on each of two devices; one loss, so one backward call. For each engine and each length of kernels it
prints, as the median of several calls: the time of the call until both devices are done, the time that each device is
busy, and the part of the shorter of these two times in which the other device is busy too.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

import simdev
from programs import integers
from torch import Tensor

import retrograd

LAYERS = 10
CALLS = 9


def spans(kernels: list[simdev.Kernel], device: int) -> list[tuple[int, int]]:
    """When the device was busy, in nanoseconds: begins and ends, in order, joined where kernels overlap."""
    joined: list[tuple[int, int]] = []
    for kernel in sorted((k for k in kernels if k.device == device), key=lambda k: k.begin_ns):
        if joined and kernel.begin_ns <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], kernel.end_ns)
        else:
            joined.append((kernel.begin_ns, kernel.end_ns))
    return joined


def common(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> int:
    """Nanoseconds in both."""
    return sum(max(0, min(end, end_b) - max(begin, begin_b)) for begin, end in a for begin_b, end_b in b)


def forward(host_reads: bool) -> Tensor:
    """The loss of two towers; with `host_reads`, a hook on each layer reads a value of the gradient on the host."""
    results = []
    for device in range(2):
        x = integers(device, 8, 8, seed=device)
        for layer in range(LAYERS):
            x = (x @ integers(device, 8, 8, seed=layer).requires_grad_()).relu()
            if host_reads:
                x.register_hook(lambda grad: grad.sum().item() and None)
        results.append(x.sum())
    return results[0] + results[1].to("sim:0")


def measure(engine: str, kernel_us: int, host_reads: bool) -> Iterator[tuple[float, float, float, float]]:
    """Milliseconds of a call, of both devices' work, and the overlap, 0 to 1; call by call."""
    for _ in range(CALLS):
        simdev.set_delay(0)
        loss = forward(host_reads)
        simdev.synchronize()
        simdev.reset()
        simdev.set_delay(kernel_us)
        begin = time.perf_counter()
        with retrograd.disable() if engine == "stock" else retrograd.enable("schedule"):
            loss.backward()
        simdev.synchronize()
        took = time.perf_counter() - begin
        first, second = (spans(simdev.seen().kernels, device) for device in range(2))
        busy = [sum(end - start for start, end in device) for device in (first, second)]
        yield took * 1e3, busy[0] / 1e6, busy[1] / 1e6, common(first, second) / min(busy)


def main() -> None:
    """Prints the table."""
    retrograd.install()
    print(f"{'kernels':>10} {'host reads':>10} {'engine':>10} {'call':>9} {'busy 0':>9} {'busy 1':>9} {'overlap':>8}")
    for kernel_us in (200, 1000, 5000):
        for host_reads in (False, True):
            for engine in ("stock", "retrograd"):
                calls = zip(*measure(engine, kernel_us, host_reads), strict=True)
                took, first, second, overlap = map(statistics.median, calls)
                head = f"{kernel_us:>7} us {'yes' if host_reads else 'no':>10} {engine:>10}"
                print(f"{head} {took:>6.1f} ms {first:>6.1f} ms {second:>6.1f} ms {overlap:>8.0%}", flush=True)


if __name__ == "__main__":
    main()
