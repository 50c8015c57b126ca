"""Fused plans in the plan store: several processes that want the same one, and metadata that cannot be used.

One plan is really compiled, for all tests; the compilers of other processes are stand-ins that hand over its library.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plan_process
import pytest
import torch
from fused_oracle import check_values, counting_fused, lowering

import retrograd
from retrograd import _lowering, _worker
from retrograd._load import C

_LIMIT = 120.0  # seconds that anything here may take

BATCHES = (5, 6)  # the second one makes a plan that leaves it open


@dataclass
class Stored:
    """A compiled plan, and how the store knows it."""

    key: bytes
    environment: str
    metadata: bytes
    library: Path


def _session_store() -> Any:
    return C.PlanStore(C.PlanStore.default_folder())


def _take_out(store: Any, name: str, folder: Path) -> Stored:
    (entry,) = (entry for entry in store.list()[0] if entry["name"] == name)
    plan = store.folder / "plans" / name
    record = (plan / "record").read_bytes()  # cache/plan_record.h
    key_size, environment_size, _ = struct.unpack_from("=3Q", record, 16)
    body = record[len(record) - key_size - environment_size - len(entry["metadata"]) :]
    shutil.move(plan / "plan.so", folder / f"{name}.so")
    shutil.rmtree(plan)
    return Stored(body[:key_size], entry["environment"], entry["metadata"], folder / f"{name}.so")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stored, Stored]:
    """Plans for plan_process.net_of(), compiled and taken out of the store: for one batch size, and for any."""
    store, folder, plans = _session_store(), tmp_path_factory.mktemp("stored"), []
    known = {entry["name"] for entry in store.list()[0]}
    retrograd.cache_clear()
    for batch in BATCHES:
        with lowering(None), retrograd.enable("inductor", mode="blocking"), counting_fused() as ran:
            plan_process.gradients(plan_process.net_of(), batch)
        assert ran.fused == ran.compiled == ran.recordings == ran.plans == 1, ran
        (name,) = {entry["name"] for entry in store.list()[0]} - known
        plans.append((name, folder))
        known.add(name)
    exact, opened = (_take_out(store, *plan) for plan in plans)
    return exact, opened


@pytest.fixture
def stored(both: tuple[Stored, Stored]) -> Stored:
    return both[0]


@pytest.fixture
def stored_open(both: tuple[Stored, Stored]) -> Stored:
    return both[1]


# Several processes --------------------------------------------------------------------------------------------------


class Processes:
    """Programs that want the same plan at once, in a folder of their own."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder, self._library = folder, library
        self.store = folder / "store"
        self._running: list[subprocess.Popen[str]] = []

    def start(self, mode: str = "blocking", **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, plan_process.__file__, str(self._library), str(self.folder), mode]
        variables = {**os.environ, "RETROGRAD_CACHE_DIR": str(self.store), **environment}
        variables.pop("RETROGRAD_LOWERING", None)
        self._running.append(
            subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
        return self._running[-1]

    def go(self) -> None:
        (self.folder / "go").touch()

    def compiles(self) -> list[int]:
        """The processes that began to compile, in order."""
        file = self.folder / "compiles"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def waits(self, process: subprocess.Popen[str]) -> bool:
        log = self.folder / f"log.{process.pid}"
        return log.exists() and "another process is making a plan" in log.read_text()

    def until(self, what: Callable[[], bool]) -> None:
        end = time.monotonic() + _LIMIT
        while not what():
            assert time.monotonic() < end, self.output()
            for process in self._running:
                assert process.poll() in (None, 0, -signal.SIGKILL), self.output()
            time.sleep(0.02)

    def result(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        output, _ = process.communicate(timeout=_LIMIT)
        assert process.returncode == 0, output
        return json.loads(output.splitlines()[-1])  # type: ignore[no-any-return]

    def output(self) -> list[str]:
        self.end()
        return [process.stdout.read() for process in self._running if process.stdout]

    def end(self) -> None:
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(10)


@pytest.fixture
def processes(tmp_path: Path, stored: Stored) -> Iterator[Processes]:
    several = Processes(tmp_path, stored.library)
    yield several
    several.end()


COMPILED, FOUND = {"compiled": 1, "from_store": 0}, {"compiled": 0, "from_store": 1}


def _owner_and_waiter(several: Processes, mode: str = "blocking", **environment: str) -> list[subprocess.Popen[str]]:
    owner = several.start(mode)
    several.until(lambda: several.compiles() == [owner.pid])
    waiter = several.start(mode, **environment)
    several.until(lambda: several.waits(waiter))
    assert several.compiles() == [owner.pid]
    return [owner, waiter]


@pytest.mark.parametrize("mode", ["blocking", "background"])
def test_one_process_compiles_and_the_other_takes_its_plan(processes: Processes, mode: str) -> None:
    owner, waiter = _owner_and_waiter(processes, mode)
    processes.go()
    first, second = processes.result(owner), processes.result(waiter)
    assert (first["plans"], first["recordings"]) == (COMPILED, 1)
    assert (second["plans"], second["recordings"]) == (FOUND, 1)
    assert processes.compiles() == [owner.pid]

    third = processes.result(processes.start(mode))
    assert (third["plans"], third["recordings"], third["calls"]["schedule"]) == (FOUND, 0, 0)


def test_the_waiter_compiles_when_the_owner_is_killed(processes: Processes) -> None:
    owner, waiter = _owner_and_waiter(processes)
    owner.kill()
    processes.until(lambda: processes.compiles() == [owner.pid, waiter.pid])
    processes.go()
    assert processes.result(waiter)["plans"] == COMPILED


def test_the_waiter_compiles_when_the_owner_takes_longer_than_a_compile_may(processes: Processes) -> None:
    owner, waiter = _owner_and_waiter(processes, RETROGRAD_COMPILE_TIMEOUT="1")
    os.kill(owner.pid, signal.SIGSTOP)
    processes.until(lambda: processes.compiles() == [owner.pid, waiter.pid])
    processes.go()
    assert processes.result(waiter)["plans"] == COMPILED
    os.kill(owner.pid, signal.SIGCONT)
    assert processes.result(owner)["calls"]["fused"] == 1  # with the waiter's plan or its own


def test_the_store_is_removed_while_one_compiles_and_one_waits(processes: Processes) -> None:
    owner, waiter = _owner_and_waiter(processes)
    shutil.rmtree(processes.store)
    processes.until(lambda: processes.compiles() == [owner.pid, waiter.pid])
    processes.go()
    for process in (owner, waiter):
        assert processes.result(process)["calls"]["fused"] == 1
    assert len(C.PlanStore(processes.store).list()[0]) == 1
    assert processes.result(processes.start())["plans"] == FOUND


# Metadata -----------------------------------------------------------------------------------------------------------


def _with(metadata: bytes, line: str, values: str | None) -> bytes:
    """The metadata with a line's values replaced; None: without the line."""
    text = metadata.decode().splitlines()
    (k,) = (k for k, old in enumerate(text) if old.split()[0] == line)
    text[k : k + 1] = [] if values is None else [f"{line} {values}"]
    return "".join(f"{each}\n" for each in text).encode()


@contextlib.contextmanager
def _published(stored: Stored, metadata: bytes) -> Iterator[None]:
    plan, added, reason = _session_store().publish(stored.key, stored.environment, stored.library, metadata)
    assert added, reason
    plan.release()
    try:
        yield
    finally:
        shutil.rmtree(plan.library.parent)


def _run_with(stored: Stored, metadata: bytes, batch: int = BATCHES[0]) -> tuple[int, int]:
    """Recordings, and plans from the store, of a call that finds the plan with this metadata in the store."""
    net = plan_process.net_of()
    want = [g.clone() for g in plan_process.gradients(net, batch)]
    retrograd.cache_clear()
    found = retrograd.stats()["plans"]["from_store"]
    with _published(stored, metadata):
        with lowering("eager"), retrograd.enable("inductor", mode="blocking"), counting_fused() as ran:
            got = plan_process.gradients(net, batch)
    check_values(want, got)
    assert ran.fused == ran.compiled == 1, ran
    return ran.recordings, retrograd.stats()["plans"]["from_store"] - found


def _line_of(metadata: bytes, line: str) -> str:
    (values,) = (old for old in metadata.decode().splitlines() if old.split()[0] == line)
    return values.removeprefix(line).strip()


# In the words of engine/stored_plans.cpp; {} is what was there.
NONSENSE = {
    "an input that the group does not have": ("inputs", "{} 99"),
    "an input past 32 bits": ("inputs", "{} 4294967296"),
    "a negative input": ("inputs", "-1 {}"),
    "fewer inputs than the library takes": ("inputs", ""),
    "no number": ("inputs", "{} x"),
    "a number past 64 bits": ("inputs", "{} 99999999999999999999"),
    "no outputs": ("outputs", ""),
    "more outputs than the group has": ("outputs", "{} -1"),
    "a result that the library does not give": ("outputs", "9 8 7 6"),
    "fewer results than the library gives": ("outputs", "0 1 2 -1"),
    "one result for two outputs": ("outputs", "0 0 1 2"),
    "a result below -1": ("outputs", "-2 0 1 2"),
    "sizes of another group": ("numbers", "5 4"),
    "no sizes": ("numbers", ""),
    "open marks for other sizes": ("open", "0 1"),
    "open marks that are none": ("open", "2"),
    "a symbol of no size": ("symbols", "4000"),
    "an extra size that is not there": ("extra", "4000"),
    "an extra size that the library does not take": ("extra", "0"),
    "a line twice": ("open", "\nopen"),
    "a line of another version": ("open", "\nstreams 1"),
    "a condition that is no program": ("open", "\ncondition 3 0"),
    "a line is missing": ("outputs", None),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_in_metadata_is_answered_by_recording(stored: Stored, what: str) -> None:
    line, values = NONSENSE[what]
    if values is not None:
        values = values.replace("{}", _line_of(stored.metadata, line))
    assert _run_with(stored, _with(stored.metadata, line, values)) == (1, 0)


OPEN_NONSENSE = {
    "too few open marks": ("open", "0 1"),
    "open marks that are none": ("open", "{} 2"),
    "too few sizes": ("numbers", "6 4"),
    "a symbol of no size": ("symbols", "4000"),
    "a symbol that does not exist": ("open", "{}\ncondition 1 60"),
    "a condition on no size": ("open", "{}\ncondition 2 4000"),
    "a condition without an end": ("open", "{}\ncondition 0"),
    "a condition of no known operator": ("open", "{}\ncondition 0 1 99 0"),
    "an extra size that is not there": ("extra", "4000"),
    "an extra size that the library does not take": ("extra", "{} 0"),
}


@pytest.mark.parametrize("what", OPEN_NONSENSE)
def test_nonsense_in_metadata_of_an_open_size(stored_open: Stored, what: str) -> None:
    line, values = OPEN_NONSENSE[what]
    values = values.replace("{}", _line_of(stored_open.metadata, line))
    assert _run_with(stored_open, _with(stored_open.metadata, line, values), BATCHES[1]) == (1, 0)


@pytest.mark.parametrize("metadata", [b"", b"\n\n", b"\xff\xfe\x00", b"name only\n"])
def test_metadata_of_another_kind(stored: Stored, metadata: bytes) -> None:
    assert _run_with(stored, metadata) == (1, 0)


def _no_turn_is_taken(store: Any) -> bool:
    """Whether that comes true soon: turns end a moment after their plans are there."""
    end = time.monotonic() + _LIMIT
    while time.monotonic() < end:
        if {file.name for file in (store.folder / "locks").iterdir()} <= {"removal"}:
            return True
        time.sleep(0.01)
    return False


# Two plans for one key ----------------------------------------------------------------------------------------------


def test_a_plan_that_leaves_less_open_does_not_stand_in_for_one_that_leaves_more(
    both: tuple[Stored, Stored], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another process stores it while this one compiles. It would be used for sizes that it is not for."""
    store, (exact, opened) = _session_store(), both
    marks = _line_of(opened.metadata, "open").split()
    marks[marks.index("1")] = "0"
    narrower = _with(opened.metadata, "open", " ".join(marks))
    others = contextlib.ExitStack()

    def submit(graph: torch.fx.GraphModule, **_: Any) -> Future[_lowering.Lowered]:
        inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        is_open = any(isinstance(size, torch.SymInt) for value in inputs for size in value.shape)
        if is_open:
            others.enter_context(_published(opened, narrower))
        library = tmp_path / f"{is_open}.so"
        shutil.copyfile((exact, opened)[is_open].library, library)
        future: Future[_lowering.Lowered] = Future()
        future.set_result(_lowering.Lowered(str(library), 0.0, _worker.export_guards(inputs)))
        return future

    monkeypatch.setattr(_lowering, "submit", submit)
    net = plan_process.net_of()
    known = {entry["name"] for entry in store.list()[0]}
    retrograd.cache_clear()
    with others:
        with lowering(None), retrograd.enable("inductor", mode="blocking"), counting_fused() as ran:
            for batch in BATCHES:
                plan_process.gradients(net, batch)
        assert ran.fused == ran.recordings == ran.plans == 2, ran
        made = [entry for entry in store.list()[0] if entry["name"] not in known]
        assert _no_turn_is_taken(store)
        left_open = sorted(_line_of(entry["metadata"], "open") for entry in made)
        assert left_open == sorted(_line_of(each, "open") for each in (exact.metadata, opened.metadata, narrower))
    for entry in made:
        shutil.rmtree(store.folder / "plans" / entry["name"], ignore_errors=True)
