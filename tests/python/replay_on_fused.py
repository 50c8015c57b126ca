"""A pytest plugin: tests that compare the schedule with the stock engine compare fused plans with it instead.

`pytest -p replay_on_fused tests/python/test_hooks.py`, with this folder in PYTHONPATH. Prints what ran.
"""

from __future__ import annotations

import json
from typing import Any

import fused_oracle
import oracle

total = {"fused": 0, "schedule": 0, "compiled": 0, "by_node": 0}


def compare(program: oracle.Program, *, path: oracle.Path = oracle.SCHEDULE, always_miss: bool = False) -> Any:
    ran = fused_oracle.compare_fused(program, path="any")
    for what in total:
        total[what] += getattr(ran, what)
    return ran.stock


oracle.compare = compare


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line("replayed: " + json.dumps(total))
