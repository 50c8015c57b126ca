from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import Recorder, compare, leaf
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop


def block(rec: Recorder | None = None, dropout: float = 0.0) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, 4))
    if rec is not None:
        net.register_forward_pre_hook(lambda m, x: rec.say("forward", rec.task(), torch.is_grad_enabled()))
    return net


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_chain_of_checkpoints(reentrant: bool, dropout: float) -> None:
    def program(rec: Recorder) -> None:
        net = nn.ModuleList(block(rec, dropout) for _ in range(3))
        x = leaf(2, 4)
        y: Tensor = x
        for part in net:
            y = checkpoint(part, y, use_reentrant=reentrant)
        y.register_hook(rec.hook("y"))
        y.sum().backward()
        rec.module(net)
        rec.grads(x)

    compare(program)


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_checkpoint_inside_checkpoint(outer: bool, inner: bool) -> None:
    def program(rec: Recorder) -> None:
        first, second = block(rec, 0.3), block(rec, 0.3)

        def body(x: Tensor) -> Tensor:
            return checkpoint(second, checkpoint(first, x, use_reentrant=inner).sin(), use_reentrant=inner)

        x = leaf(2, 4)
        y = checkpoint(body, x * 2, use_reentrant=outer)
        (y + checkpoint(first, y, use_reentrant=inner)).sum().backward()
        rec.module(first)
        rec.module(second)
        rec.grads(x)

    compare(program)


@pytest.mark.parametrize("depth", [10, 70])
def test_deeply_nested_reentrant_checkpoint(depth: int) -> None:
    def program(rec: Recorder) -> None:
        part = block()

        def body(x: Tensor, depth: int) -> Tensor:
            if depth == 0:
                return part(x)
            return checkpoint(body, x.sin(), depth - 1, use_reentrant=True) + x

        x = leaf(2, 4)
        body(x, depth).sum().backward()
        rec.module(part)
        rec.grads(x)

    compare(program)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_under_inputs(reentrant: bool) -> None:
    def program(rec: Recorder) -> None:
        net = block(rec)
        x = leaf(2, 4)
        y = checkpoint(net, x, use_reentrant=reentrant)
        with rec.catch("backward"):
            y.sum().backward(inputs=(x,), retain_graph=True)
        with rec.catch("grad"):
            rec.say(torch.autograd.grad(y.sum(), x, retain_graph=True))
        rec.module(net)
        rec.grads(x)
        y.sum().backward()
        rec.module(net)

    compare(program)


@pytest.mark.parametrize("early_stop", [True, False])
def test_early_stop(early_stop: bool) -> None:
    def program(rec: Recorder) -> None:
        def body(x: Tensor) -> Tensor:
            rec.say("begin")
            y = x.sin().exp()
            rec.say("middle")
            z = y * 2
            rec.say("end")
            return z

        x = leaf(2, 4)
        with set_checkpoint_early_stop(early_stop):
            y = checkpoint(body, x, use_reentrant=False)
        y.sum().backward()
        rec.grads(x)

    compare(program)


def test_recomputation_runs_once_a_call() -> None:
    def program(rec: Recorder) -> None:
        net = block(rec)
        x = leaf(2, 4)
        y = checkpoint(net, x, use_reentrant=False)
        for _ in range(3):
            y.sum().backward(retain_graph=True)
        rec.module(net)

    want = compare(program)
    assert sum(line.startswith("forward") for line in want.log) == 4


def test_several_inputs_outputs_and_arguments_without_gradient() -> None:
    def program(rec: Recorder) -> None:
        def body(x: Tensor, k: float, w: Tensor, index: Tensor) -> tuple[Tensor, Tensor, float]:
            return x[index] * k, w.sin(), k

        for reentrant in (True, False):
            x, w = leaf(3, 4), leaf(3, 4, seed=1)
            a, b, _ = checkpoint(body, x * 1, 2.0, w * 1, torch.tensor([0, 0, 2]), use_reentrant=reentrant)
            (a.sum() * b).sum().backward()
            rec.grads(x, w)

    compare(program)


def test_checkpoint_sequential_and_unused_output() -> None:
    def program(rec: Recorder) -> None:
        net = nn.Sequential(*[block() for _ in range(4)])
        x = leaf(2, 4)
        checkpoint_sequential(net, 2, x, use_reentrant=True).sum().backward()
        checkpoint_sequential(net, 3, x, use_reentrant=False).sum().backward()
        rec.module(net)
        rec.grads(x)

    compare(program)


@pytest.mark.parametrize("reentrant", [True, False])
def test_autocast_is_restored_for_the_recomputation(reentrant: bool) -> None:
    def program(rec: Recorder) -> None:
        net = block()
        net.register_forward_hook(lambda m, i, o: rec.say(o.dtype))
        x = leaf(2, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = checkpoint(net, x, use_reentrant=reentrant)
        y.float().sum().backward()
        rec.module(net)
        rec.grads(x)

    compare(program)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_that_raises(reentrant: bool) -> None:
    def program(rec: Recorder) -> None:
        runs = []

        def body(x: Tensor) -> Tensor:
            runs.append(1)
            if len(runs) == 2:
                raise LookupError("in the recomputation")
            return x.sin()

        x = leaf(2, 4)
        y = checkpoint(body, x * 1, use_reentrant=reentrant)
        with rec.catch():
            y.sum().backward()
        rec.grads(x)
        checkpoint(body, x * 1, use_reentrant=reentrant).sum().backward()
        rec.grads(x)

    compare(program)


def test_recomputation_that_saves_other_tensors_is_found() -> None:
    def program(rec: Recorder) -> None:
        runs = []

        def body(x: Tensor) -> Tensor:
            runs.append(1)
            return x.sin() if len(runs) == 1 else x[:1].sin()

        x = leaf(2, 4)
        y = checkpoint(body, x * 1, use_reentrant=False)
        with rec.catch():
            y.sum().backward()
        rec.grads(x)

    compare(program)


class AsksValidity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rec: Recorder, x: Tensor) -> Tensor:
        ctx.rec = rec
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        ctx.rec.say("valid", Variable._execution_engine.is_checkpoint_valid())
        return None, grad * 2


def test_checkpoint_validity_seen_in_a_backward() -> None:
    def program(rec: Recorder) -> None:
        def valid(grad: Tensor) -> None:
            rec.say("hook", Variable._execution_engine.is_checkpoint_valid())

        def nested(grad: Tensor) -> None:
            valid(grad)
            with torch.enable_grad():
                w = leaf(3)
                v = AsksValidity.apply(rec, w.sin())
                v.sum().backward(retain_graph=True)
                torch.autograd.grad(v.sum(), w)
            valid(grad)

        rec.say("outside", Variable._execution_engine.is_checkpoint_valid())
        x = leaf(3)
        y = AsksValidity.apply(rec, x.exp())
        y.register_hook(nested)
        y.sum().backward(retain_graph=True)
        y.sum().backward(inputs=(x,), retain_graph=True)
        torch.autograd.grad(y.sum(), x)
        rec.say("outside", Variable._execution_engine.is_checkpoint_valid())
        rec.grads(x)

    compare(program)
