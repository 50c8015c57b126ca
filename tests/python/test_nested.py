from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import ANY, Recorder, compare, counting, leaf
from torch import Tensor
from torch.autograd import Variable

import retrograd


def queue_callback(callback: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(callback)


class Nested(torch.autograd.Function):
    """Runs a backward inside its own backward, `depth` levels down; `at_level` is told each level on the way down."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, at_level: Callable[[int], None]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.depth = depth
        ctx.at_level = at_level
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        ctx.at_level(ctx.depth)
        if ctx.depth == 0:
            return grad * 1.5, None, None
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            y = Nested.apply(inner.sin(), ctx.depth - 1, ctx.at_level)
        torch.autograd.backward(y, grad)
        return inner.grad, None, None


def test_backward_inside_a_tensor_hook() -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)

        def nested(grad: Tensor) -> Tensor:
            with torch.enable_grad():
                inner = grad.detach().requires_grad_()
                (inner.sin() * w).sum().backward()
            rec.say("inner", inner.grad)
            return inner.grad

        y = x.exp()
        y.register_hook(nested)
        x.register_hook(rec.hook("x"))
        (y * w).sum().backward()
        rec.grads(x, w)

    compare(program)


@pytest.mark.parametrize("place", ["pre", "post", "accumulated", "multi", "callback"])
def test_backward_inside_other_hooks(place: str) -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)

        def nested(*ignored: Any) -> None:
            with torch.enable_grad():
                (w.sin() * w).sum().backward()
            rec.say(place, w.grad, rec.task())

        y = x.exp()
        assert y.grad_fn is not None
        match place:
            case "pre":
                y.grad_fn.register_prehook(nested)
            case "post":
                y.grad_fn.register_hook(nested)
            case "accumulated":
                x.register_post_accumulate_grad_hook(nested)
            case "multi":
                torch.autograd.graph.register_multi_grad_hook((x, y), nested)
            case "callback":
                y.register_hook(lambda g: queue_callback(nested))
        (y * 2).sum().backward()
        rec.grads(x, w)

    compare(program)


def test_grad_inside_a_hook_of_the_same_retained_graph() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.exp()
        z = y.sin()
        ones = torch.ones(3)
        z.register_hook(lambda g: rec.say("nested", torch.autograd.grad(y, x, ones, retain_graph=True)))
        for _ in range(2):
            z.sum().backward(retain_graph=True)
            rec.grads(x)

    compare(program)


@pytest.mark.parametrize("depth", [1, 5, 59, 60, 61, 200])
def test_chain_of_nested_backwards(depth: int) -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        Nested.apply(x.exp(), depth, lambda level: rec.say(level, rec.task())).sum().backward()
        rec.grads(x)

    retrograd.reset_stats()
    compare(program)
    stats = retrograd.stats()
    assert stats["max_depth"] == depth + 1
    assert stats["nested_calls"] == 2 * depth  # in the two runs on retrograd


@pytest.mark.parametrize("depth", [0, 3, 70, 200])
def test_callbacks_queued_at_each_depth(depth: int) -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)

        def at_level(level: int) -> None:
            for name in ("first", "second"):
                queue_callback(lambda: rec.say("callback", level, name, rec.task(), torch.is_grad_enabled()))

        Nested.apply(x.exp(), depth, at_level).sum().backward()
        rec.say("after")
        rec.grads(x)

    compare(program)


def test_callbacks_run_when_all_gradients_are_there() -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)
        y = x * w
        y.register_hook(lambda g: queue_callback(lambda: rec.say("done", x.grad, w.grad)))
        y.sum().backward()
        z = (x * w).sin()
        z.register_hook(lambda g: queue_callback(lambda: rec.say("done", x.grad, w.grad)))
        rec.say(torch.autograd.grad(z.sum(), x))

    compare(program)


def test_callbacks_may_queue_callbacks() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)

        def again(left: int) -> None:
            rec.say("callback", left, rec.task())
            if left:
                queue_callback(lambda: again(left - 1))

        y = x.sin()
        y.register_hook(lambda g: again(3))
        y.register_hook(lambda g: queue_callback(lambda: rec.say("other")))
        y.sum().backward()
        rec.grads(x)

    compare(program)


@pytest.mark.parametrize("depth", [0, 1, 3, 70])
def test_callback_that_raises(depth: int) -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)

        def fails() -> None:
            raise LookupError("from the callback")

        def at_level(level: int) -> None:
            queue_callback(lambda: rec.say("callback", level))
            if level == 0:
                queue_callback(fails)
                queue_callback(lambda: rec.say("not reached?"))

        with rec.catch():
            Nested.apply(x.exp(), depth, at_level).sum().backward()
        rec.grads(x)
        x.exp().sum().backward()
        rec.grads(x)

    compare(program)


def test_callbacks_are_dropped_when_a_node_raises() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)

        def fails(grad: Tensor) -> None:
            queue_callback(lambda: rec.say("callback"))
            raise LookupError("from the hook")

        y = x.sin()
        y.register_hook(fails)
        with rec.catch():
            y.sum().backward()
        (x * 2).sum().backward()
        rec.grads(x)

    compare(program)


def test_callback_outside_backward_is_refused() -> None:
    def program(rec: Recorder) -> None:
        with rec.catch():
            queue_callback(lambda: None)
        x = leaf(3)
        x.sin().sum().backward()
        with rec.catch():
            queue_callback(lambda: None)

    compare(program)


def test_nested_call_that_raises_and_is_caught_leaves_the_outer_call_whole() -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)

        def fails(grad: Tensor) -> None:
            raise LookupError("inner")

        def nested(grad: Tensor) -> None:
            with torch.enable_grad():
                y = w.sin()
                y.register_hook(fails)
                loss = y.sum()
            with rec.catch("inner"):
                loss.backward()
            rec.say(rec.task(), str(torch._C._current_autograd_node().name()))

        y = x.exp()
        y.register_hook(nested)
        y.register_hook(rec.hook("y"))
        (y * 2).sum().backward()
        rec.grads(x, w)

    compare(program)


def test_nested_double_backward() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)

        def penalty(grad: Tensor) -> Tensor:
            with torch.enable_grad():
                inner = grad.detach().requires_grad_()
                (first,) = torch.autograd.grad(inner.pow(3).sum(), inner, create_graph=True)
                (second,) = torch.autograd.grad(first.sin().sum(), inner)
            return second

        y = x.exp()
        y.register_hook(penalty)
        (y * 2).sum().backward()
        rec.grads(x)

    compare(program)


def test_enable_and_disable_inside_a_hook() -> None:
    """A hook decides for the calls that it makes; the call it is part of goes on as it began."""
    seen = []

    def nested(grad: Tensor) -> None:
        with torch.enable_grad(), retrograd.disable():
            w = leaf(3)
            w.sin().sum().backward()
            seen.append(w.grad)

    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.exp()
        y.register_hook(nested)
        (y * 2).sum().backward()
        rec.grads(x)
        rec.say(seen[-1])

    # ANY: one of the two calls is handed back on purpose.
    compare(program, path=ANY)
    with counting() as calls, retrograd.enable("schedule"):
        program(Recorder())
    assert (calls.schedule, calls.previous) == (1, 1)


def test_disable_covers_nested_calls_that_move_to_another_thread() -> None:
    retrograd.set_default("schedule")
    with retrograd.disable(), counting() as calls:
        Nested.apply(leaf(3), 70, lambda level: None).sum().backward()
    assert (calls.schedule, calls.previous) == (0, 71)


def test_threads_that_served_an_enabled_call_are_not_enabled_after_it() -> None:
    for enabled in (True, False, True, False):
        with retrograd.enable() if enabled else retrograd.disable(), counting() as calls:
            Nested.apply(leaf(3), 130, lambda level: None).sum().backward()
        assert (calls.schedule, calls.previous) == ((131, 0) if enabled else (0, 131))


@pytest.mark.parametrize("depth", [0, 59, 60, 61, 62, 75])
def test_backward_in_a_callback_follows_the_setting_of_its_call(depth: int) -> None:
    """At depth 61 the callback is the first thing to run on a thread of the stock engine's pool."""

    @torch.enable_grad()
    def callback() -> None:
        (leaf(1) * 2).sum().backward()

    @torch.enable_grad()
    def nest(levels: int) -> None:
        y = leaf(1) * 2

        def hook(_: Tensor) -> None:
            if levels > 0:
                nest(levels - 1)
            else:
                queue_callback(callback)

        y.register_hook(hook)
        y.sum().backward()

    for scope, path in ((retrograd.enable(), "schedule"), (retrograd.disable(), "previous")):
        retrograd.set_default("schedule" if path == "previous" else None)
        try:
            retrograd.reset_stats()
            with scope:
                nest(depth)
            calls = retrograd.stats()["calls"]
        finally:
            retrograd.set_default(None)
        assert calls[path] == sum(calls.values()) == depth + 2, (path, calls)


@pytest.mark.parametrize("seed", range(60))
def test_order_of_ties_among_leaves_with_outer_nodes_waiting(seed: int) -> None:
    """Leaves that are ready at once come in the order that the heap has with the outer calls' nodes on it."""

    def program(rec: Recorder) -> None:
        def graph(tag: str, depth: int, seed: int) -> Tensor:
            choose = random.Random(seed)
            leaves = [leaf(1) for _ in range(choose.randint(2, 9))]
            for i, x in enumerate(leaves):
                x.register_hook(lambda _, i=i: rec.say(tag, i))
            pieces = [
                torch.cat([choose.choice(leaves) for _ in range(choose.randint(1, 8))]).sum()
                for _ in range(choose.randint(1, 4))
            ]
            total = sum(pieces)
            if tag != "outer" and seed % 4 == 0:  # what is left of the call stays on the heap
                choose.choice(pieces).register_hook(fail)
            if depth > 0:
                for outer in choose.sample(pieces, min(len(pieces), 2)) + choose.sample(leaves, 1):
                    outer.register_hook(nested(tag + ">", depth - 1, choose.randint(0, 10**6)))
            return total

        def nested(tag: str, depth: int, seed: int) -> Callable[[Tensor], None]:
            def hook(_: Tensor) -> None:
                with torch.enable_grad():
                    y = graph(tag, depth, seed)
                try:
                    y.backward()
                except LookupError:
                    rec.say(tag, "failed")

            return hook

        def fail(_: Tensor) -> None:
            raise LookupError("in a nested call")

        graph("outer", 2, seed).backward()

    compare(program)


def test_backward_in_a_finalizer_while_an_error_drops_waiting_gradients() -> None:
    def program(rec: Recorder) -> None:
        def finalizer() -> None:
            with torch.enable_grad():
                (leaf(1) * 3).sum().backward()
            rec.say("finalized")

        def with_finalizer(grads: tuple[Tensor], _: tuple[Tensor]) -> tuple[Tensor]:
            fresh = grads[0].clone()
            weakref.finalize(fresh, finalizer)
            return (fresh,)

        def fail(_: Tensor) -> None:
            raise LookupError("while a gradient waits")

        x = leaf(3)
        y = x * 2
        early = y.sin()
        late = y.cos()
        late.grad_fn.register_hook(with_finalizer)  # its gradient waits for that of `early`, which never comes
        early.register_hook(fail)
        with rec.catch():
            (early + late).sum().backward()
        rec.say("after")
        rec.grads(x)

    compare(program)
