"""explain(): what it says is what the next call does."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from fused_oracle import counting_fused
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import retrograd
from retrograd import _fused, _group_trace


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETROGRAD_LOWERING", "eager")
    retrograd.cache_clear()


def loss_of(net: nn.Module) -> torch.Tensor:
    return net(torch.ones(3, 6)).pow(2).sum()


def net_of(width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2))


def test_before_while_and_after_plans_are_made() -> None:
    net = net_of()
    with retrograd.enable("inductor"):
        said = retrograd.explain(loss_of(net))
        assert (said.path, said.known, len(said.groups)) == ("schedule", False, 1)
        assert said.groups[0].state == "cold" and said.groups[0].plans == 0
        assert retrograd.explain(loss_of(net)).known
        for _ in range(3):
            loss_of(net).backward()
        assert retrograd.wait(60)
        loss = loss_of(net)
        said = retrograd.explain(loss)
        assert (said.path, said.groups[0].state, said.groups[0].plans) == ("fused", "ready", 1)
        with counting_fused() as ran:
            loss.backward()
        assert ran.fused == 1
    assert sorted(said.groups[0].nodes) == sorted(
        ["SumBackward0", "PowBackward0", "TanhBackward0", *2 * ["AddmmBackward0", "TBackward0"]]
    )
    assert said.alone == {"kind": 4}  # the leaves
    assert len(said.nodes) == 7 + 4


def test_sizes_left_open_are_told() -> None:
    net = net_of()
    with retrograd.enable("inductor", mode="blocking"):
        for batch in (3, 4, 5):
            net(torch.ones(batch, 6)).pow(2).sum().backward()
        said = retrograd.explain(loss_of(net))
    assert (said.groups[0].plans, said.groups[0].dynamic_plans) == (2, 1)
    assert "2 plans, 1 with open sizes" in str(said)


def test_nodes_that_run_by_themselves() -> None:
    net = net_of()
    x = torch.ones(3, 6, requires_grad=True)
    y = net(checkpoint(net[0], x, use_reentrant=True))
    y.register_hook(lambda grad: None)
    with retrograd.enable("inductor"):
        said = retrograd.explain(y.pow(2).sum())
    assert said.alone["user_code"] == 2
    assert "alone: 2 nodes, it runs Python or custom C++ code, or has hooks" in str(said)


def test_why_nodes_run_by_themselves() -> None:
    net = net_of()
    with retrograd.enable("inductor"):
        said = retrograd.explain(loss_of(net) * 2, inputs=[net[2].bias])
        assert said.alone == {"kind": 1} and "alone: 1 node, not a node made from a derivative formula" in str(said)
        said = retrograd.explain(torch.ones(2, requires_grad=True).sum())
        assert said.alone == {"fusable": 1, "kind": 1} and said.groups == ()
        assert "alone: 1 node, too few nodes beside it that could be compiled with it" in str(said)
        said = retrograd.explain(loss_of(net), inputs=[torch.ones(2, requires_grad=True)])
        assert said.alone == {"not_needed": 1} and "alone: 1 node, not needed for the given inputs" in str(said)


def test_nodes_that_were_found_out() -> None:
    """A saved tensor's hooks show only when a group is made."""
    net = net_of()
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(net)
    with retrograd.enable("inductor", mode="blocking"), counting_fused() as ran:
        loss.backward(retain_graph=True)
        said = retrograd.explain(loss)
    assert ran.schedule == 1, ran
    assert said.alone["found_out"] > 0
    assert f"alone: {said.alone['found_out']} nodes, it saved tensors with hooks, or could not be" in str(said)


@pytest.mark.parametrize("fails", [False, True])
def test_while_plans_are_made(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From "cold" to "compiling" to what became of it, and in other sizes "cold" again."""
    reached, go_on = threading.Event(), threading.Event()
    trace = _group_trace.trace

    def held(recording: Any) -> Any:
        reached.set()
        assert go_on.wait(60)
        if fails:
            raise RuntimeError("a fault")
        return trace(recording)

    monkeypatch.setattr(_group_trace, "trace", held)
    _fused.forget()
    net = net_of()
    texts = []
    with retrograd.enable("inductor", mode="background"):
        try:
            while not reached.wait(0):
                texts.append(str(retrograd.explain(loss_of(net))))
                loss_of(net).backward()
                if len(texts) > 2:
                    assert reached.wait(60)
            said = retrograd.explain(loss_of(net))
        finally:
            go_on.set()
        assert retrograd.wait(60)
        after = retrograd.explain(loss_of(net))
        net(torch.ones(4, 6)).pow(2).sum().backward()
        other = retrograd.explain(loss_of(net))
    names = "SumBackward0, PowBackward0, 2 x AddmmBackward0, 2 x TBackward0, TanhBackward0"
    leaves = "\nalone: 4 nodes, not a node made from a derivative formula, or too wide"
    head, group = "11 nodes; would run on: schedule", "\ngroup 0: 7 nodes, "
    assert texts[0] == f"{head}; a graph not seen before{group}cold (0 plans): {names}{leaves}"
    assert texts[1] == f"{head}{group}cold (0 plans, 1 warming up): {names}{leaves}"
    assert str(said) == f"{head}{group}compiling (0 plans, 1 compiling): {names}{leaves}"
    if fails:
        assert str(after) == f"{head}{group}refused (0 plans, 1 refused): {names}{leaves}"
        assert str(other) == f"{head}{group}cold (0 plans, 1 warming up, 1 refused): {names}{leaves}"
    else:
        assert str(after) == f"11 nodes; would run on: fused{group}ready (1 plan): {names}{leaves}"
        assert str(other) == f"11 nodes; would run on: fused{group}ready (1 plan, 1 warming up): {names}{leaves}"
    with retrograd.enable("schedule"):
        assert retrograd.explain(loss_of(net)).path == "schedule"  # whatever plans there are


def test_each_path() -> None:
    net = net_of()
    assert (retrograd.explain(loss_of(net)).path, retrograd.explain(loss_of(net)).reason) == ("previous", "not_enabled")
    with retrograd.enable("schedule"):
        assert retrograd.explain(loss_of(net)).path == "schedule"
    with retrograd.enable(lambda graph: graph):
        assert retrograd.explain(loss_of(net)).path == "callable"
        with FlopCounterMode(display=False):
            said = retrograd.explain(loss_of(net))
    assert (said.path, said.reason) == ("previous", "dispatch_mode")
    with retrograd.enable(), torch.autograd.detect_anomaly(check_nan=False):
        said = retrograd.explain(loss_of(net))
    assert (said.path, said.reason) == ("previous", "anomaly_mode")
    assert str(said).splitlines()[0] == f"{len(said.nodes)} nodes; would run on: previous (anomaly_mode)"


def test_runs_nothing_and_leaves_the_graph() -> None:
    net = net_of()
    ran = []
    loss = loss_of(net)
    loss.register_hook(lambda grad: ran.append("hook"))
    with counting_fused() as counts:
        retrograd.explain(loss)
        retrograd.explain(loss, loss * 2, inputs=[net[0].weight])
    assert ran == [] and counts.fused + counts.schedule + counts.previous == 0
    assert net[0].weight.grad is None
    loss.backward()
    assert ran == ["hook"] and net[0].weight.grad is not None


def test_inputs_leave_nodes_out() -> None:
    net = net_of()
    with retrograd.enable("inductor"):
        said = retrograd.explain(loss_of(net), inputs=[net[2].weight])
    assert sorted(said.groups[0].nodes) == sorted(["SumBackward0", "PowBackward0", "AddmmBackward0", "TBackward0"])
    assert said.alone == {"kind": 1}


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ((), RuntimeError, "needs a tensor that backward would be called of"),
        ((3,), TypeError, "takes tensors, not int"),
        ((torch.ones(2),), RuntimeError, "has no backward graph"),
    ],
)
def test_bad_arguments(arguments: tuple[object, ...], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        retrograd.explain(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [(3, TypeError, "takes tensors, not int"), (torch.ones(2), RuntimeError, "has no backward graph")],
)
def test_bad_inputs(wrong: object, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        retrograd.explain(torch.ones(2, requires_grad=True).sum(), inputs=[wrong])  # type: ignore[list-item]
