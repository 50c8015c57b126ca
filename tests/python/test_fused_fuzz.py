"""Random programs on fused plans: gradients as the stock engine's, and the order of everything with a side effect."""

from __future__ import annotations

import random

import pytest
import torch
from fused_oracle import compare_fused
from oracle import Recorder
from test_fuzz import build

fused: list[bool] = []  # by seed: whether a group ran compiled


class Logged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, say):  # type: ignore[no-untyped-def]
        ctx.say = say
        return x * 2

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.say()
        return grad * 2, None


@pytest.mark.parametrize("seed", range(60))
def test_random_graph(seed: int) -> None:
    def program(rec: Recorder) -> None:
        choose = random.Random(seed + 5000)
        leaves, inner = build(seed)
        watched = choose.sample(range(len(inner)), choose.choice([0, 1, 3, 6]))
        for number in watched:
            t = inner[number]
            match choose.choice(["hook", "retain", "pre", "post", "changes"]):
                case "hook":
                    t.register_hook(lambda g, number=number: rec.say("hook", number, g))
                case "retain":
                    t.retain_grad()
                case "changes":
                    t.register_hook(lambda g: g * 1.01)
                case "pre" if t.grad_fn is not None:
                    t.grad_fn.register_prehook(lambda g, number=number: rec.say("pre", number))
                case "post" if t.grad_fn is not None:
                    t.grad_fn.register_hook(lambda i, o, number=number: rec.say("post", number))
        for number, t in enumerate(leaves):
            if choose.random() < 0.5:
                t.register_post_accumulate_grad_hook(lambda p, number=number: rec.say("leaf", number, p.grad))
        ends = inner[-6:]
        if choose.random() < 0.5:
            ends = [*ends, *(Logged.apply(t, lambda n=n: rec.say("function", n)) for n, t in enumerate(ends[:2]))]
        roots = [t.sum() * 0.01 for t in ends]
        if seed % 3 == 1:
            roots = roots[:1]
        inputs = [None, None, leaves[:1], [*choose.sample(inner, 2), leaves[1]]][seed % 4]
        retain = choose.random() < 0.5
        if inputs is not None and seed % 8 > 3:
            rec.say(torch.autograd.grad(roots, inputs, retain_graph=True, allow_unused=True))
        torch.autograd.backward(roots, inputs=inputs, retain_graph=retain)
        if retain:
            torch.autograd.backward(roots)
        rec.grads(*leaves)
        rec.say([inner[number].grad for number in watched if inner[number].retains_grad])

    ran = compare_fused(program, path="any")
    assert ran.previous == 0, ran
    fused.append(ran.fused > 0)


def test_most_of_them_ran_fused() -> None:
    assert sum(fused) >= 0.8 * len(fused), fused  # the rest has hooks everywhere, or saved conjugates
