"""Tests on simulated devices, in a process of their own: see tests/python/test_alone.py, which runs them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))  # the oracles

import simdev  # the process's first backward must come after this

import retrograd

KERNEL_MICROSECONDS = 100


@pytest.fixture(scope="session", autouse=True)
def installed() -> Iterator[None]:
    torch.set_warn_always(True)  # otherwise only the first of the compared runs would warn
    retrograd.install()
    yield
    retrograd.uninstall()


@pytest.fixture(autouse=True)
def clean() -> None:
    simdev.synchronize()
    simdev.reset()
    simdev.set_synchronous(False)
    simdev.set_delay(KERNEL_MICROSECONDS)
