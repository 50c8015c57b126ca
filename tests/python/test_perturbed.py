"""Tests of threads from other files, with delays at the points where threads meet (cache/perturb.h)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import test_callable_threads
import test_threads
from test_callable_threads import (  # noqa: F401
    test_clearing_all_the_time_while_threads_run,
    test_one_graph_under_eight_compilers_is_captured_by_each,
    test_one_shared_retained_graph,
    test_sizes_that_differ_between_threads_end_in_one_dynamic_graph,
    test_threads_never_see_each_others_compilers,
)
from test_threads import (  # noqa: F401
    test_checkpoints,
    test_errors_in_one_thread_do_not_reach_another,
    test_grad_of_one_shared_retained_graph,
    test_separate_models,
)

from retrograd import _C


@pytest.fixture(autouse=True, params=[1, 2])
def perturbed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(test_threads, "CALLS", 200)
    before = _C.perturbations()
    former = _C.perturb_with(request.param)
    yield
    _C.perturb_with(former)
    assert _C.perturbations() > before


@pytest.mark.parametrize("switch", test_callable_threads.SWITCHES)
def test_each_graph_is_captured_once(switch: str) -> None:
    test_callable_threads.test_eight_threads_capture_each_graph_once("raw", switch)
