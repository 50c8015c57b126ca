"""The tests of the schedule once more, on fused plans: the same programs, the same oracle, but for rounding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FILES = [
    "test_backward_contract.py",
    "test_bad_input.py",
    "test_checkpoint.py",
    "test_custom_function.py",
    "test_gradients.py",
    "test_hooks.py",
    "test_modes.py",
    "test_modules.py",
    "test_nested.py",
    "test_saved_tensor_hooks.py",
    "test_views_and_inplace.py",
]
NOT = [
    "test_order_of_computing_equal_branches_is_part_of_the_key",  # about bits
    "test_two_leaves_fed_one_gradient_share_it",  # a plan's results never share memory
    "test_depth_is_back_to_zero_after_errors",  # counts calls of the schedule
    "test_order_of_ties_among_leaves_with_outer_nodes_waiting",  # a fused call lends no heap to nested ones
]


def test_replay() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "replay_on_fused"]
    command += ["-k", " and ".join(f"not {name}" for name in NOT), *FILES]
    paths = [str(HERE), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "RETROGRAD_CACHE": "0"}
    environment.pop("PYTEST_ADDOPTS", None)
    run = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    line = next(line for line in run.stdout.splitlines() if line.startswith("replayed: "))
    ran = json.loads(line.removeprefix("replayed: "))
    assert ran["fused"] > 1000 and ran["compiled"] > 3 * ran["by_node"], ran
