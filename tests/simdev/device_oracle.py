"""The stock engine as the oracle on simulated devices.

`compare` runs a program on the stock engine with kernels that are done at once, so that missing synchronization cannot
change a value; then on each of retrograd's backends, twice, with kernels that run late. It wants no report of the
checker first, then that no host synchronization hid one, then which path ran, and the values last: a race need not show
in them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import simdev
import torch
from oracle import Observation, Program, Recorder, describe, first_difference, observe
from torch import Tensor

import retrograd


def run_captured(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A compiler function: the captured graph runs as it is."""
    return module


BACKENDS: dict[str, str | Callable[..., Any]] = {
    "schedule": "schedule",
    "inductor": "inductor",
    "compiler function": run_captured,
}


class DeviceRecorder(Recorder):
    """Reads tensors on the current stream, as a user's kernel would, and looks at what it read when all is over."""

    def __init__(self, drop: int | None = None) -> None:
        super().__init__()
        self._drop = drop
        self._read: list[tuple[int, tuple[Any, ...]]] = []

    def say(self, *values: Any) -> None:
        self._read.append((len(self.log), tuple(self._later(value) for value in values)))
        self.log.append("(still on the device)")

    def _later(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(map(self._later, value))
        if not isinstance(value, Tensor) or value.device.type != "sim":
            return value
        value.detach().record_stream(torch.accelerator.current_stream(value.device.index))
        head = f"{value.device} requires_grad={value.requires_grad}"
        return head, value.detach().to("cpu", non_blocking=True)

    def backward_begins(self) -> None:
        """Ends the program's own part, which must be in order, and begins the counting of waits."""
        seen = simdev.seen()
        assert not seen.reports, f"the program itself lacks synchronization: {seen.reports}"
        simdev.reset()
        if self._drop is not None:
            simdev.drop_wait(self._drop)

    def settle(self) -> None:
        """Fills in what was read. After a synchronization."""
        for line, values in self._read:
            self.log[line] = " ".join(v if isinstance(v, str) else describe(v) for v in values)
        self._read.clear()


@dataclasses.dataclass
class Ran:
    """One run of a program."""

    saw: Observation
    reports: list[str]
    waits: list[str]
    kernels: list[simdev.Kernel]
    host_syncs: int
    paths: Counter[str]  # calls by path, and by reason those that were not compiled
    misses: int  # calls whose plan had to be made


def run(program: Program, backend: str | Callable[..., Any] | None, drop: int | None = None) -> Ran:
    """Runs `program` on a backend of retrograd's, or on the stock engine for None.

    `drop` leaves out that wait, counted from `DeviceRecorder.backward_begins()`.
    """
    simdev.synchronize()
    simdev.reset()
    rec = DeviceRecorder(drop)
    misses = retrograd.stats()["misses"]
    with counting_paths() as paths, retrograd.disable() if backend is None else retrograd.enable(backend):
        saw = observe(program, rec)
    before_the_end = simdev.seen()
    simdev.drop_wait(-1)
    simdev.synchronize()
    rec.settle()
    paths["previous"] -= 1  # observe() runs a stock call of its own at the end
    paths = +paths
    return Ran(
        saw=saw,
        reports=before_the_end.reports,
        waits=before_the_end.waits,
        kernels=simdev.seen().kernels,
        host_syncs=before_the_end.host_syncs,
        paths=paths,
        misses=retrograd.stats()["misses"] - misses,
    )


@contextlib.contextmanager
def counting_paths() -> Iterator[Counter[str]]:
    """Fills the yielded counter when the block ends."""
    ran: Counter[str] = Counter()
    before = _paths()
    try:
        yield ran
    finally:
        ran.update(_paths() - before)


def _paths() -> Counter[str]:
    stats = retrograd.stats()
    return Counter(stats["calls"]) + Counter(stats["schedule_reasons"])


def run_without_races(program: Program) -> Ran:
    """The oracle: the stock engine, with kernels that are done at once."""
    simdev.set_synchronous(True)
    try:
        oracle = run(program, None)
    finally:
        simdev.set_synchronous(False)
    assert set(oracle.paths) == {"previous"}, "the oracle itself ran through retrograd"
    assert oracle.kernels, "nothing ran on a device"
    return oracle


def compare(program: Program, *, captured: int = 0, create_graph: int = 0) -> Ran:
    """Compares each backend with the oracle, which is returned.

    `captured`: calls that a compiler function can have. `create_graph`: calls with that argument.
    """
    oracle = run_without_races(program)
    for backend in BACKENDS:
        check(oracle, program, backend, captured, create_graph)
    return oracle


def check(oracle: Ran, program: Program, backend: str, captured: int = 0, create_graph: int = 0) -> None:
    """Runs `program` twice on a backend: first a miss, then a hit."""
    retrograd.cache_clear()
    for turn in ("miss", "hit"):
        where = f"{backend}, {turn}"
        ran = run(program, BACKENDS[backend])
        assert not ran.reports, f"{where}: {ran.reports}"
        assert ran.host_syncs == 0, f"{where}: the host waited for a device, which can hide a race"
        assert ran.paths == expected_paths(backend, oracle, captured, create_graph), where
        assert bool(ran.misses) == (turn == "miss"), where
        difference = first_difference(oracle.saw, ran.saw)
        assert difference is None, f"{where}: {difference}"


def expected_paths(backend: str, oracle: Ran, captured: int, create_graph: int) -> Counter[str]:
    """Fused groups cannot be compiled for this device; a compiler function gets what runs on the caller's streams."""
    calls = oracle.paths["previous"]
    if backend == "schedule":
        return Counter(schedule=calls)
    if backend == "inductor":
        captured = 0
    by_schedule = calls - captured
    return +Counter(
        callable=captured, schedule=by_schedule, streams=by_schedule - create_graph, create_graph=create_graph
    )
