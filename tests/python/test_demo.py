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


def test_short_run_of_both_jobs(tmp_path: Path) -> None:
    done = demo("--steps", "4", "--output", "curves.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {words[0]: words for words in map(str.split, done.stdout.splitlines()) if words}
    same, hits, misses, nested = rows["digits"][4:]
    assert (same, nested) == ("yes", "0")
    assert int(hits) + int(misses) == 8 * 4  # eight threads; those that come while the plan is being made miss too
    assert int(hits) > int(misses) > 0
    assert rows["text"][4:] == ["yes", "18", "2", "16"]  # one outer and four nested calls a step, of two structures
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


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
