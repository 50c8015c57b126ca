"""Runs the tests that need a process of their own.

`alone_*.py` here are about what one earlier test in the process would change for good: saved-tensor hooks were used,
libtorch has started threads of its own (after which it refuses backward in a forked child). Those of tests/simdev need
their accelerator to be there before a process's first backward, and every other test would meet it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = [*sorted(HERE.glob("alone_*.py")), *sorted((HERE.parent / "simdev").glob("test_*.py"))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_alone(file: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file.name]
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    done = subprocess.run(command, cwd=file.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[1-9]\d* passed", done.stdout, re.MULTILINE), done.stdout
