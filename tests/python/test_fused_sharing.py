"""Gradients that would share memory with one another, with what the graph saved, or with what the caller gave."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fused_oracle import compare_fused, counting_fused, lowering
from oracle import Recorder, first_difference, leaf, observe
from torch import Tensor

import retrograd

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

LOSSES: dict[str, Loss] = {
    "view of a leaf": lambda a, b, w: ((a.view(-1) + b) * w).sum(),
    "same twice": lambda a, b, w: ((a.view(-1) + b) * w).sum() + (a.view(-1) * 1 + b).sum(),
    "one gradient for two": lambda a, b, w: (a.view(-1) + b).mul(1).sum(),
    "straight to the leaves": lambda a, b, w: (a.view(-1) + b + w).sum(),
    "the saved tensor is the gradient": lambda a, b, w: (a.view(-1) * w).sum() + (b * w).sum(),
    "negated": lambda a, b, w: (a.view(-1) - b).mul(w).sum(),
    "expanded": lambda a, b, w: (a.sum() * 1).expand(6).mul(1).sum() + (b * w).sum(),
    "chunks": lambda a, b, w: (
        sum((c + d).sum() for c, d in zip(a.view(-1).chunk(2), b.chunk(2), strict=True)) + w.sum()
    ),
    "unbind": lambda a, b, w: (a.unbind(0)[0] + b[:3] + w[3:]).mul(1).sum(),
    "cat": lambda a, b, w: (torch.cat([a.view(-1), b]) * torch.cat([w, w])).sum(),
    "stack and back": lambda a, b, w: (torch.stack([a.view(-1), b, w]).unbind(0)[1] * 1).sum(),
    "transposed": lambda a, b, w: (a.t().reshape(-1) + b).view(3, 2).t().mul(1).sum() + w.sum(),
    "flip": lambda a, b, w: (a.flip(0).view(-1) + b.flip(0)).mul(w).sum(),
    "select": lambda a, b, w: a[0].sum() + b[0] * 1 + (w.narrow(0, 1, 3) * 1).sum(),
    "diagonal": lambda a, b, w: (a[:, :2].diagonal() * b[:2]).sum() + w.sum(),
    "as strided": lambda a, b, w: (a.as_strided((2, 2), (1, 2)) * 1).sum() + (b.unfold(0, 3, 1) * 1).sum() + w.sum(),
    "a clone in between": lambda a, b, w: (a.clone().view(-1) + b.contiguous()).mul(w).sum(),
    "outer": lambda a, b, w: (torch.outer(a.view(-1), b) @ w).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("retain", [False, True])
def test_accumulated_twice(name: str, retain: bool) -> None:
    def program(rec: Recorder) -> None:
        a, b, w = leaf(2, 3), leaf(6, seed=1), leaf(6, seed=2)
        first = (a * 1).view(2, 3) if name == "same twice" else a
        for _ in range(2):
            loss = LOSSES[name](first, b, w)
            if retain:
                loss.backward(retain_graph=True)
            loss.backward(retain_graph=name == "same twice")
            rec.grads(a, b, w)
        for t in (a, b, w):
            if t.grad is not None:
                t.grad.add_(1)  # none may change with another
        rec.grads(a, b, w)
        rec.say(a, b, w)

    compare_fused(program, path="mixed", reasons=("not_fusable",))


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_from_grad_are_the_callers_own(name: str) -> None:
    def program(rec: Recorder) -> None:
        a, b, w = leaf(2, 3), leaf(6, seed=1), leaf(6, seed=2)
        loss = LOSSES[name](a, b, w)
        given = torch.ones(())
        first = torch.autograd.grad(loss, (a, b, w), given, retain_graph=True, allow_unused=True)
        second = torch.autograd.grad(loss, (a, b, w), given, allow_unused=True)
        rec.say(first, second, given, a, b, w)

    compare_fused(program, path="mixed", reasons=("not_fusable",))


def test_the_gradient_that_the_caller_gave_stays_as_it_was() -> None:
    # In the stock engine a leaf may take over memory of the caller's tensor, and the next backward adds into it.
    retrograd.cache_clear()
    with lowering("eager"), retrograd.enable("inductor", mode="blocking"), counting_fused() as ran:
        for shape in ((6,), (2, 3)):
            a, b = leaf(2, 3), leaf(6, seed=1)
            y = (a.view(-1) + b).view(shape) * 1
            given = torch.full(shape, 2.0)
            for _ in range(2):
                y.backward(given, retain_graph=True)
            assert a.grad is not None and b.grad is not None
            assert a.grad.eq(4).all() and b.grad.eq(4).all() and given.eq(2).all()
            a.grad.zero_()
            assert b.grad.eq(4).all() and given.eq(2).all()
    assert ran.fused == ran.compiled == 4, ran


def test_hooks_may_keep_and_change_what_a_group_gave_them() -> None:
    def program(rec: Recorder) -> None:
        a, b, w = leaf(2, 3), leaf(6, seed=1), leaf(6, seed=2)
        kept: list[Tensor] = []
        y = a.view(-1) * 1
        z = (y + b) * 1
        y.register_hook(kept.append)
        z.register_hook(kept.append)
        a.register_hook(kept.append)
        b.register_hook(lambda g: g.mul_(3))
        (z * w * 1).view(2, 3).sum().backward()
        rec.say(kept)
        for k in kept:
            k.add_(100)
        rec.grads(w)

    compare_fused(program, path="any")


@pytest.mark.parametrize("mode", ["blocking", "background"])
@pytest.mark.parametrize("kind", ["embedding", "bag", "gather", "values"])
def test_sparse_gradients_share_nothing_with_dense_ones(kind: str, mode: str) -> None:
    """A sparse gradient is made from a dense one without a copy; also where the group runs by its nodes."""

    def program(rec: Recorder) -> None:
        x = torch.ones(4, 4, requires_grad=True)
        t = torch.ones(5, 4, requires_grad=True)
        rows = torch.arange(4)
        if kind == "values":
            t = torch.ones(4, 4).to_sparse(1).requires_grad_()
        for _ in range(4):
            part = {
                "embedding": lambda: torch.nn.functional.embedding(rows, t, sparse=True),
                "bag": lambda: torch.nn.functional.embedding_bag(rows, t, rows, mode="sum", sparse=True),
                "gather": lambda: torch.gather(t, 0, rows.view(4, 1).expand(4, 4), sparse_grad=True),
                "values": lambda: t.coalesce().values(),
            }[kind]()
            y = x + part
            torch.autograd.backward([y.sum(), y.sum()])
        rec.grads(x)
        rec.say(t.grad.to_dense() if t.grad is not None else None)

    retrograd.cache_clear()
    with retrograd.disable():
        want = observe(program)
    with lowering("eager"), retrograd.enable("inductor", mode=mode), counting_fused() as ran:
        got = observe(program)
        retrograd.wait(60)
    assert first_difference(want, got) is None, first_difference(want, got)
    assert ran.previous == 1 and ran.fused + ran.schedule == 4, ran  # one is observe()'s own
    assert ran.fused == 4 if mode == "blocking" else ran.by_node >= 2, ran
