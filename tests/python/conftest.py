from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# A backward graph that torch takes from this cache is traced anew when it is captured, and torch's FX tracer patches
# torch.nn.Module for all threads meanwhile (docs/architecture.md). Read when torch is imported.
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"

import torch

import retrograd


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
