"""Random programs on every backend, one at a time and in threads; `make soak` runs them for as long as one likes.

A failing test prints the smallest program that fails, and the command that runs it again.
"""

from __future__ import annotations

import collections
import gc

import pytest
import torch
from fused_oracle import lowering
from fuzz_oracle import (
    BACKENDS,
    PATHS,
    Paths,
    ask_torchs,
    check,
    check_shared,
    check_threads,
    difference,
    observe,
    report,
)
from oracle import content
from random_programs import CALLS, HOOKS, OPERATIONS, Program, Run, Step, generate

import retrograd

SEEDS = {"schedule": range(250), "compiler": range(25), "fused": range(40)}
# How many of the calls must have run as asked for; the others have no group, or build a graph of their own.
LEAST = {"schedule": 1.0, "compiler": 0.9, "fused": 0.4}

# Reentrant checkpoint says so where nothing requires a gradient, which programs do now and then.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

ran: dict[str, Paths] = collections.defaultdict(Paths)


@pytest.mark.parametrize(("backend", "seed"), [(backend, seed) for backend in BACKENDS for seed in SEEDS[backend]])
def test_random_program(backend: str, seed: int) -> None:
    program = generate(seed)
    with lowering("eager"):
        found = check(program, backend, ran[backend])
        assert found is None, report(program, backend, found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_most_calls_ran_as_asked_for(backend: str) -> None:
    calls = ran[backend].calls
    if not calls:
        pytest.skip("the programs were left out")
    assert calls["previous"] == 0 and calls[PATHS[backend]] >= LEAST[backend] * calls.total(), ran[backend]


@pytest.mark.parametrize("backend", BACKENDS)
def test_programs_leave_no_graph_and_no_capture_behind(backend: str) -> None:
    def kept() -> collections.Counter[str]:
        retrograd.cache_clear()
        for _ in range(2):  # what goes may let go of more
            gc.collect()
        kinds = {"Run", "AutogradCompilerInstance", "CheckpointFunctionBackward"}
        return collections.Counter(name for o in gc.get_objects() if (name := type(o).__name__) in kinds)

    paths, before = Paths(), kept()
    with lowering("eager"):
        for seed in range(3000, 3015):
            assert check(generate(seed), backend, paths) is None
        # This one keeps a gradient that has a graph, in which the gradient's own tensor is saved.
        assert check(generate(91004001), backend, paths) is None
    assert paths.calls[PATHS[backend]] > 20, paths
    assert kept() == before


def test_values_are_told_whatever_the_stride_of_a_single_element() -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert {content(one.as_strided((1,), (stride,))) for stride in (0, 1, 4)} == {content(one)} != {content(-one)}


def test_torchs_own_compiled_autograd_is_asked_in_another_process() -> None:
    hook_changes_size = ["--seed", "90029930", "--steps", "0,24", "--rounds", "1"]
    assert "has changed the size of value" in (ask_torchs(hook_changes_size) or "")
    assert ask_torchs(["--seed", "5", "--shared"]) is None
    with pytest.raises(RuntimeError, match="invalid int value"):
        ask_torchs(["--seed", "five"])


def test_programs_have_steps_of_every_kind_and_errors() -> None:
    programs = [generate(seed) for seed in SEEDS["schedule"]]
    assert {step.kind for program in programs for step in program.steps} == {*OPERATIONS, *HOOKS, *CALLS}
    with retrograd.disable():
        failed = [Run(program)().failed() for program in programs[:100]]
    assert 5 < sum(failed) < 50  # most say something about calls that work


def test_a_program_is_a_function_of_its_seed() -> None:
    assert generate(7) == generate(7) != generate(8)


def test_graphs_that_differ_in_the_number_of_gradients_only() -> None:
    """Gradients of leaves that are not reached: one, then two, with one cache."""
    rounds = {"dtype": torch.float64, "exact": True, "parts": True}
    one = Program(2020424, rounds=((1, 0),), steps=(Step(26, "grad", 3, 21, 274),), **rounds)  # type: ignore[arg-type]
    two = Program(
        2020431,
        rounds=((3, 0),),
        steps=(Step(4, "function_nested", -2, 1, 534), Step(5, "grad", 2, -2, 1)),
        **rounds,  # type: ignore[arg-type]
    )
    want = [observe(program, "stock") for program in (one, two)]
    retrograd.cache_clear()
    before = retrograd.stats()["calls"]["callable"]
    got = [observe(program, "compiler") for program in (one, two)]
    assert retrograd.stats()["calls"]["callable"] >= before + 2
    for program, stock, ours in zip((one, two), want, got, strict=True):
        assert difference(stock, ours, program, "compiler") is None


def test_separate_models_in_threads() -> None:
    with lowering("eager"):
        jobs = [(generate(seed), BACKENDS[seed % 3]) for seed in range(1000, 1036)]
        got = check_threads(jobs, threads=4)
    assert not got.failures, "\n".join(report(program, backend, found) for program, backend, found in got.failures)
    assert got.wrong_path() is None
    assert all(got.ran.calls[path] > 20 for path in PATHS.values()), got.ran


def test_the_schedule_in_threads_makes_as_many_calls_as_the_stock_engine() -> None:
    got = check_threads([(generate(seed), "schedule") for seed in range(1000, 1080)], threads=8)
    assert not got.failures, got.failures[0]
    assert got.ran.calls["schedule"] == got.ran.calls.total() == got.stock.calls["previous"] > 500, got


def test_one_model_in_threads() -> None:
    paths = Paths()
    with lowering("eager"):
        for seed in range(5):
            assert check_shared(seed, 4, 5, paths) is None
    assert all(paths.calls[path] > 20 for path in ("previous", *PATHS.values())), paths
