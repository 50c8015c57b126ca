"""Random graphs: gradients bit for bit, and the order in which the nodes ran."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from oracle import Recorder, compare, leaf
from torch import Tensor


def operation(choose: random.Random, a: Tensor, b: Tensor) -> Tensor:
    match choose.choice(["add", "mul", "sin", "exp", "view", "slice", "split", "in place", "same", "conjugate"]):
        case "add":
            return a + b * 0.37
        case "mul":
            return a * b
        case "sin":
            return a.sin()
        case "exp":
            return (a * 0.1).exp()
        case "view":
            return a.view(8, 8).t().reshape(64)
        case "slice":
            return torch.cat([a[:32], b[32:]])
        case "split":
            first, second = a.split([24, 40])
            return torch.cat([second, first]) if choose.random() < 0.5 else torch.cat([second, b[:24]])
        case "in place":
            c = a.clone()
            c[8:16] = b[:8] * 2
            return c
        case "same":
            return a + a
    return torch.complex(a, b).conj().imag


def build(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves, and results of random operations on them; a third of the graphs is built by several threads."""
    choose = random.Random(seed)
    leaves = [leaf(64, seed=seed * 100 + i) for i in range(3)]
    pool = list(leaves)

    def extend(choose: random.Random, into: list[Tensor]) -> None:
        for _ in range(6):
            into.append(operation(choose, choose.choice(pool), choose.choice(pool)))

    if seed % 3 == 0:
        for turn in range(3):
            made: list[list[Tensor]] = [[] for _ in range(3)]
            for k, into in enumerate(made):
                # One after the other: each thread numbers its nodes by itself all the same, and threads that index
                # shared tensors can deadlock in PyTorch (a tensor's mutex and the GIL, taken in either order).
                worker = threading.Thread(target=extend, args=(random.Random(seed * 7 + k + turn * 31), into))
                worker.start()
                worker.join()
            pool.extend(t for part in made for t in part)
    else:
        for _ in range(40):
            pool.append(operation(choose, choose.choice(pool), choose.choice(pool)))
    return leaves, pool[3:]


def watch(roots: list[Tensor], order: list[int]) -> None:
    """Makes every node append its number, given in a fixed walk, when it runs."""
    seen = set()
    stack = [root.grad_fn for root in roots]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        number = len(seen)
        seen.add(node)
        node.register_prehook(lambda grads, number=number: order.append(number))
        stack += [following for following, _ in node.next_functions]


@pytest.mark.parametrize("seed", range(150))
def test_random_graph(seed: int) -> None:
    def program(rec: Recorder) -> None:
        choose = random.Random(seed + 1000)
        leaves, inner = build(seed)
        roots = [t.sum() * 0.01 for t in inner[-6:]]
        if seed % 3 == 1:
            roots = roots[:1]
        order: list[int] = []
        watch(roots, order)
        for t in choose.sample(inner, 4):
            if choose.random() < 0.5:
                t.register_hook(lambda g: g * 1.01)
            else:
                t.retain_grad()
        inputs = [None, leaves[:1], [*choose.sample(inner, 2), leaves[1]]][seed % 3]
        retain = bool(seed % 2)
        if inputs is not None and seed % 4 == 0:
            rec.say(torch.autograd.grad(roots, inputs, retain_graph=True, allow_unused=True))
        torch.autograd.backward(roots, inputs=inputs, retain_graph=retain)
        if retain:
            torch.autograd.backward(roots)
        rec.say("order", order)
        rec.grads(*leaves)

    compare(program)
