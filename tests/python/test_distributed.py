"""DistributedDataParallel and fully_shard on two processes: the stock engine's losses, parameters and order of hooks.

The two processes live as long as the module's tests and run one program after another (distributed_worker.py): what
takes time is their start. A program that fails, or takes too long, ends both.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from distributed_worker import PARAMETERS, STEPS, serve

WORLD = 2
TIMEOUT = 200.0


class Processes:
    """Started when needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._starts = 0
        self._running: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def run(self, backend: str, program: str, **arguments: Any) -> list[Any]:
        """What each process, by rank, says of the program. Raises AssertionError with the first error."""
        if not self._running:
            self._start()
        for _, pipe in self._running:
            pipe.send((backend, program, arguments))
        answers: dict[int, Any] = {}
        try:
            while len(answers) < WORLD:
                pipes = [pipe for rank, (_, pipe) in enumerate(self._running) if rank not in answers]
                ready = wait(pipes, TIMEOUT)
                assert ready, f"{program}: no answer from {len(pipes)} processes"
                for rank, (_, pipe) in enumerate(self._running):
                    if pipe in ready:
                        error, answers[rank] = pipe.recv()
                        assert error is None, f"{program}, rank {rank}: {error}"
        except BaseException:
            self.end()
            raise
        return [answers[rank] for rank in range(WORLD)]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._starts += 1
        store = self._folder / f"store {self._starts}"
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, str(store), theirs))
            process.start()
            theirs.close()
            self._running.append((process, ours))

    def end(self, patience: float = 0.0) -> None:
        for _, pipe in self._running:
            pipe.close()
        for process, _ in self._running:
            process.join(patience)
            if process.is_alive():
                assert process.pid is not None
                os.kill(process.pid, signal.SIGABRT)  # has it tell where it is
                process.join()
        self._running.clear()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    started = Processes(tmp_path_factory.mktemp("distributed"))
    yield started
    started.end(patience=60.0)


# With the calls of one run, and the groups of a call. A bucket needs no group of its own: the reducer's hooks are on
# AccumulateGrad nodes, which come after the group in the stock engine's order. Checkpoints run by node, or are calls
# of their own; fully_shard's hooks lie between its units, of which there are four.
DDP = {
    "small_buckets": (STEPS, 1),
    "one_bucket": (STEPS, 1),
    "comm_hook": (STEPS, 1),
    "static_graph": (STEPS, 1),
    "gradient_as_bucket_view": (STEPS, 1),
    "no_sync": (4 * STEPS, 1),
    "find_unused_parameters": (STEPS, 1),
    "parameters_that_get_no_gradient": (1, 1),
    "growing_batches": (STEPS, 1),
    "hook_that_raises": (2, 1),
    "checkpoints": (STEPS, 1),
    "reentrant_checkpoints": (4 * STEPS, 1),
}
SHARDED = {
    "reshard_after_forward": (STEPS, 4),
    "keep_after_forward": (STEPS, 4),
    "accumulate_before_reducing": (2 * STEPS, 4),
    "mixed_precision": (STEPS, 4),
    "frozen_block": (STEPS, 4),
    "sharded_checkpoints": (5 * STEPS, 1),
}


def check_program(program: str, log: list[str]) -> None:
    """That a program does what it is here for, by what it said on the stock engine."""
    buckets = [place for place, line in enumerate(log) if line.startswith("bucket ")]
    if program == "small_buckets":
        assert log[-2].startswith("buckets") and "," in log[-2].split("then")[1], log[-2]
    elif program in DDP and buckets and program != "hook_that_raises":
        later = [place for place in buckets if not log[place].startswith("bucket 0")]
        between = [log[place - 1].split()[0] for place in later]
        assert later and all(".weight" in name or ".bias" in name for name in between), between
    elif program in SHARDED:
        gathers = [line for line in log if line.startswith("all_gather")]
        assert any(not line.endswith("no task") for line in gathers) == (program != "keep_after_forward"), gathers
        assert any(line.startswith("reduce_scatter") for line in log)
    elif program == "hook_that_raises":
        assert any("LookupError: in the hook" in line for line in log)
    elif program == "parameters_that_get_no_gradient":
        assert "Expected to have finished reduction in the prior iteration" in log[-2]


@pytest.mark.parametrize("program", [*DDP, *SHARDED, "uneven_inputs", "tensor_parallel"])
def test_schedule(program: str, processes: Processes) -> None:
    for stock in processes.run("schedule", program):
        check_program(program, stock.log)


@pytest.mark.parametrize("program", [*DDP, *SHARDED])
def test_fused(program: str, processes: Processes) -> None:
    calls, groups = {**DDP, **SHARDED}[program]
    # That a checkpoint's nodes cannot be fused is found out in the first call.
    arguments: dict[str, Any] = {"path": "mixed", "reasons": ("not_fusable",)} if "checkpoints" in program else {}
    for ran in processes.run("inductor", program, compiled=calls * groups, **arguments):
        assert (ran.fused, ran.by_node, ran.recordings) == (calls, 0, 0), ran


def test_fused_on_uneven_inputs(processes: Processes) -> None:
    for rank, ran in enumerate(processes.run("inductor", "uneven_inputs")):
        assert ran.fused == ran.compiled == 2 + rank, ran


def test_distributed_tensors_run_by_node(processes: Processes) -> None:
    for ran in processes.run("inductor", "tensor_parallel", path="schedule", reasons=("not_fusable",)):
        assert (ran.schedule, ran.compiled) == (STEPS, 0) and ran.by_node > 0, ran


def test_compiled(processes: Processes) -> None:
    for ran in processes.run("compiled", "comm_hook"):
        assert (ran.fused, ran.compiled, ran.by_node, ran.recordings) == (STEPS, STEPS, 0, 0), ran


@pytest.mark.parametrize(("program", "groups"), [("comm_hook", 1), ("reshard_after_forward", 4)])
def test_one_process_is_fused_and_the_other_not_yet(program: str, groups: int, processes: Processes) -> None:
    stock, fused = processes.run("one process only", program)
    assert (stock.fused, stock.schedule, stock.previous) == (0, 0, STEPS + 1), stock  # and observe()'s own call
    assert (fused.fused, fused.compiled, fused.by_node) == (STEPS, groups * STEPS, 0), fused


def test_python_reducer_with_a_compiler_function(processes: Processes) -> None:
    for calls in processes.run("function", "python_reducer", captures=1):
        assert len(calls) == STEPS
        assert all(call.count("'partial'") == PARAMETERS for call in calls), calls  # the reducer's hooks


def test_a_compiler_function_is_told_what_torch_says(processes: Processes) -> None:
    for stock, ours in processes.run("refused", ""):
        assert stock == ours and 'use torch._dynamo.config.optimize_ddp="python_reducer"' in ours
