"""When backward takes the GIL: never on a graph that C++ built, and in one go for what Python wrapped.

Plans are really compiled here: those of RETROGRAD_LOWERING=eager run in Python.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fused_oracle import counting_fused, lowering
from torch import nn

import retrograd

STOCK, SCHEDULE, FUSED = range(3)  # as in gil_backward.cpp


def library(name: str) -> Path:
    path = Path(retrograd._C.__file__).parents[2] / "tests" / f"lib{name}.so"
    assert path.exists(), "build it, as `make test-python` does: scripts/build.sh release python_test_libraries"
    return path


@pytest.fixture
def holding() -> ctypes.PyDLL:
    """gil_backward.cpp, called with the GIL: no other thread can have it until a call returns."""
    return declared(ctypes.PyDLL(str(library("gil_backward"))))


@pytest.fixture
def letting_go() -> ctypes.CDLL:
    """The same, called without the GIL."""
    return declared(ctypes.CDLL(str(library("gil_backward"))))


def declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    loaded.backward_of_own_graph.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_double]
    loaded.backward_of.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_double]
    loaded.wait_again.argtypes = [ctypes.c_double]
    loaded.last_error.restype = ctypes.c_char_p
    return loaded


def test_a_graph_built_by_cpp_code_is_run_without_the_gil(holding: ctypes.PyDLL, letting_go: ctypes.CDLL) -> None:
    with lowering(None):
        assert letting_go.backward_of_own_graph(FUSED, 1, 200.0) == 1, letting_go.last_error()  # makes the plan
    for engine in (SCHEDULE, FUSED):
        with counting_fused() as ran:
            ended = holding.backward_of_own_graph(engine, 3, 60.0)
            if not ended:
                letting_go.wait_again(60.0)
        assert ended == 1, "waits for the GIL" if ended == 0 else letting_go.last_error()
        assert (ran.fused, ran.compiled, ran.schedule) == ((3, 3, 0) if engine == FUSED else (0, 0, 3)), ran
        assert (ran.by_node, ran.recordings, ran.plans) == (0, 0, 0), ran


def test_the_gil_is_really_held(holding: ctypes.PyDLL, letting_go: ctypes.CDLL) -> None:
    """Activations that Python has seen are let go of under the GIL: the stock engine cannot end without it."""
    loss = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))(torch.randn(2, 3)).sum()
    assert holding.backward_of(loss._cdata, STOCK, 0.5) == 0
    assert letting_go.wait_again(60.0) == 1, letting_go.last_error()


def test_wrapped_tensors_are_let_go_of_under_one_take() -> None:
    """A hit on mlp10x64, whose nine saved activations have wrappers, in a process that counts how the GIL is taken.

    A wrapper that goes gives the GIL up while its tensor is freed, and takes it again. That is in libtorch_python, and
    so the same on all engines.
    """
    environment = os.environ | {"LD_PRELOAD": str(library("gil_count"))}
    environment.pop("RETROGRAD_LOWERING", None)
    script = Path(__file__).with_name("gil_takes.py")
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["stock"] == [[10, 10]] * 3, counts
    assert counts["schedule"] == counts["stock"], counts
    assert len(counts["hits"]) == 3
    for takes, retakes in counts["hits"]:
        assert 1 <= takes <= 2, counts
        assert retakes == 10, counts
