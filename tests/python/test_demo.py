from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def demo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run(
        [sys.executable, "-m", "retrograd.demo", *arguments],
        capture_output=True, text=True, timeout=240, env=environment, cwd=cwd, check=False,
    )  # fmt: skip


def rows_of(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    assert done.returncode == 0, done.stderr
    return {words[0]: words for words in map(str.split, done.stdout.splitlines()) if words}


def test_short_run_of_both_jobs(tmp_path: Path) -> None:
    rows = rows_of(demo("--steps", "4", "--backend", "schedule", "--output", "curves.png", cwd=tmp_path))
    losses, fused, schedule, misses, nested = rows["digits"][4:]
    assert (losses, fused, nested) == ("identical", "0", "0")
    assert int(schedule) == 8 * 4
    assert 0 < int(misses) < 8 * 4  # eight threads; those that come while the plan is being made miss too
    # One outer and four nested calls a step, of two structures.
    assert rows["text"][4:] == ["identical", "0", "20", "2", "16"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_fused_plans(tmp_path: Path) -> None:
    done = demo("--steps", "4", "--job", "digits", cwd=tmp_path)
    rows = rows_of(done)
    losses, *counts = rows["digits"][4:]
    assert counts == [str(8 * 4), "0", "0", "0"]
    assert losses == "identical" or float(losses) < 1e-3
    assert "1 plans compiled" in done.stdout or "1 found in the plan store" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--steps", "abc"), "must be a whole number of at least 1, not 'abc'"),
        (("--steps", "0"), "must be a whole number of at least 1, not '0'"),
        (("--job", "nonsense"), "invalid choice: 'nonsense'"),
        (("--output", "no/such/folder/x.png"), "cannot write no/such/folder/x.png (No such file or directory)"),
        (("--output", "/proc/x.png"), "cannot write /proc/x.png"),
        (("--output", "."), "cannot write . (Is a directory)"),
    ],
)
def test_bad_arguments_are_told_before_the_training(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    done = demo(*arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
