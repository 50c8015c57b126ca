"""Random programs on every backend, one at a time and in threads; `make soak` runs them for as long as one likes.

A failing test prints the smallest program that fails, and the command that runs it again.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz_oracle import BACKENDS, Paths, check, check_shared, check_threads, report, shrink
from fused_oracle import lowering
from random_programs import CALLS, HOOKS, OPERATIONS, Program, Run, Step, generate

import retrograd

SEEDS = {"schedule": range(250), "compiler": range(40), "fused": range(60)}
# How many of the calls must have run as asked for; the others have no group, or build a graph of their own.
LEAST = {"schedule": 1.0, "compiler": 0.9, "fused": 0.4}

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
    own = {"schedule": "schedule", "compiler": "callable", "fused": "fused"}[backend]
    assert calls["previous"] == 0 and calls[own] >= LEAST[backend] * calls.total(), ran[backend]


def test_programs_have_steps_of_every_kind_and_errors() -> None:
    programs = [generate(seed) for seed in SEEDS["schedule"]]
    assert {step.kind for program in programs for step in program.steps} == {*OPERATIONS, *HOOKS, *CALLS}
    with retrograd.disable():
        failed = [Run(program)().failed() for program in programs[:100]]
    assert 5 < sum(failed) < 50  # most say something about calls that work


def test_a_program_is_a_function_of_its_seed() -> None:
    assert generate(7) == generate(7) != generate(8)


def test_separate_models_in_threads() -> None:
    with lowering("eager"):
        assert check_threads(seeds=range(1000, 1024), threads=4) is None


@pytest.mark.parametrize("seed", [0, 1])
def test_one_model_in_threads(seed: int) -> None:
    with lowering("eager"):
        assert check_shared(seed, threads=4, calls=5) is None
