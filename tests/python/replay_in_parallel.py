"""A pytest plugin: tests that compare the schedule with the stock engine run independent branches at the same time.

`pytest -p replay_in_parallel tests/python/test_hooks.py`, with this folder in PYTHONPATH. Prints what ran.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

os.environ["RETROGRAD_PARALLEL"] = "always"  # small graphs, too; read once

import oracle

import retrograd

total = {"parallel": 0, "schedule": 0}


@contextlib.contextmanager
def parallel() -> Iterator[None]:
    before = retrograd.stats()
    with retrograd.enable("schedule", parallel=True):
        yield
    after = retrograd.stats()
    total["parallel"] += after["parallel_calls"] - before["parallel_calls"]
    total["schedule"] += after["calls"]["schedule"] - before["calls"]["schedule"]


oracle.on_retrograd = parallel


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"replayed: {total['parallel']} of {total['schedule']} in parallel")
