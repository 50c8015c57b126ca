from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest
import torch

import retrograd

# Not the user's own store of plans; and none of what earlier runs compiled.
if "RETROGRAD_CACHE_DIR" not in os.environ:
    os.environ["RETROGRAD_CACHE_DIR"] = tempfile.mkdtemp(prefix="retrograd-tests-")
    atexit.register(shutil.rmtree, os.environ["RETROGRAD_CACHE_DIR"], ignore_errors=True)

# Tests that name no backend are about the engine, whose gradients are compared bit for bit.
os.environ["RETROGRAD_BACKEND"] = "schedule"
# `parallel=True` then also means graphs that are too small to gain from it.
os.environ["RETROGRAD_PARALLEL"] = "always"
# A shell starts jobs in the background with Ctrl-C ignored, which these tests' children would be, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def installed() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.set_warn_always(True)  # otherwise only the first of the compared runs would warn
    # Threads number their nodes from zero. Tests that mix nodes of several threads must find the main thread's
    # numbers above theirs in every run.
    advance = torch.ones((), requires_grad=True)
    for _ in range(1000):
        advance = advance * 1
    retrograd.install()
    yield
    retrograd.uninstall()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    assert retrograd.is_installed()
    yield
    retrograd.set_default(None)
    retrograd.install()
