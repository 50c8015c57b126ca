"""Errors: the stock engine's exception, the thread's state back as it was, and the next call as good as ever."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from oracle import Recorder, compare, counting, leaf, partly
from test_nested import Nested
from torch import Tensor

import retrograd


class Custom(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


class BadText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ctx.error


PLACES = ["tensor", "leaf", "pre", "post", "accumulated", "function", "multi"]


def graph_that_raises(place: str, error: BaseException) -> Tensor:
    def fails(*ignored: Any) -> None:
        raise error

    x = leaf(3)
    y = x.exp()
    assert y.grad_fn is not None
    match place:
        case "tensor":
            y.register_hook(fails)
        case "leaf":
            x.register_hook(fails)
        case "pre":
            y.grad_fn.register_prehook(fails)
        case "post":
            y.grad_fn.register_hook(fails)
        case "accumulated":
            x.register_post_accumulate_grad_hook(fails)
        case "function":
            return Raises.apply(y, error)
        case "multi":
            torch.autograd.graph.register_multi_grad_hook((x, y), fails)
    return y * 2


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        Custom(3, "text"),
        KeyboardInterrupt(),
        SystemExit(4),
        RuntimeError(),
        StopIteration(1),
    ],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("depth", [0, 1, 3, 70])
def test_error_keeps_its_identity_and_leaves_nothing_behind(error: BaseException, place: str, depth: int) -> None:
    def program(rec: Recorder) -> None:
        error.__traceback__ = error.__context__ = None
        w = leaf(3, seed=1)

        def at_level(level: int) -> None:
            if level == 0:
                with torch.enable_grad():
                    loss = graph_that_raises(place, error).sum()
                loss.backward()

        if depth == 0:
            y = graph_that_raises(place, error) * w
        else:
            y = Nested.apply(w.exp(), depth - 1, at_level)
        try:
            y.sum().backward()
        except BaseException as caught:
            rec.say("same object", caught is error)
        with rec.catch("again"):
            y.sum().backward()
        rec.say(rec.task(), torch.is_grad_enabled())
        w.sin().sum().backward()
        rec.grads(w)

    want = compare(program)
    assert "same object True" in want.log


def test_calls_after_an_error_are_still_hits() -> None:
    def step(fail: bool) -> None:
        x = leaf(3)
        y = x.exp().sin()

        def hook(grad: Tensor) -> None:
            if fail:
                raise LookupError("now")

        y.register_hook(hook)
        y.sum().backward()

    with retrograd.enable("schedule"):
        step(fail=False)
        for _ in range(3):
            with pytest.raises(LookupError, match="now"):
                step(fail=True)
            with counting() as calls:
                step(fail=False)
            assert (calls.schedule, calls.hits, calls.misses, calls.previous) == (1, 1, 0, 0)


def test_an_error_on_the_first_sight_of_a_graph_leaves_no_half_made_plan() -> None:
    def program(rec: Recorder) -> None:
        for fail in (True, False, True, False):
            x = leaf(3)
            y = x.exp()
            y.register_hook(lambda g, fail=fail: 1 / 0 if fail else None)
            with rec.catch():
                (y.tan() * 3).sum().backward()
            rec.grads(x)

    compare(program)


def test_error_whose_text_raises() -> None:
    for engine in (retrograd.disable(), retrograd.enable("schedule"), retrograd.enable("schedule")):
        y = graph_that_raises("tensor", BadText())
        with engine, pytest.raises(BadText):
            y.sum().backward()


def test_interrupt_in_a_hook() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.exp()

        def press(grad: Tensor) -> None:
            signal.raise_signal(signal.SIGINT)
            rec.say("not reached")

        handle = y.register_hook(press)
        y.register_hook(rec.hook("later hook"))
        with rec.catch():
            y.sum().backward(retain_graph=True)
        rec.grads(x)
        handle.remove()
        y.sum().backward()
        rec.grads(x)

    compare(program)


def test_depth_is_back_to_zero_after_errors() -> None:
    with retrograd.enable("schedule"):
        for _ in range(3):
            with pytest.raises(LookupError):
                Nested.apply(leaf(3), 5, lambda level: [][1] if level == 0 else None).sum().backward()
        retrograd.reset_stats()
        leaf(3).sin().sum().backward()
    stats = retrograd.stats()
    assert stats["nested_calls"] == 0
    assert stats["calls"] == {"schedule": 1, "fused": 0, "callable": 0, "previous": 0}
    shallow = stats["max_depth"]
    with retrograd.enable("schedule"):
        Nested.apply(leaf(3), 1, lambda level: None).sum().backward()
    assert retrograd.stats()["max_depth"] == shallow + 1


def test_tensor_changed_in_place_is_found() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.exp()
        z = y.sin() * 2
        z.register_hook(rec.hook("runs before the error"))
        y.add_(1)
        for _ in range(2):
            with rec.catch():
                z.sum().backward()
        rec.grads(x)

    compare(program)


def test_leaf_changed_in_place_and_saved_output_changed() -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)
        y = x * w
        with torch.no_grad():
            w.mul_(2)
        with rec.catch():
            y.sum().backward()
        rec.grads(x, w)
        z = x.exp()
        z.mul_(2)
        with rec.catch():
            z.sum().backward()

    compare(program)


def test_parameter_replaced_between_forward_and_backward() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.sin()
        x.data = torch.ones(4)
        with rec.catch():
            y.sum().backward()
        rec.grads(x)
        z = leaf(3)
        v = z * 2
        z.data = torch.ones(3, dtype=torch.float64)
        with rec.catch():
            v.sum().backward()
        rec.grads(z)

    compare(program)


def test_gradient_of_the_wrong_shape_set_by_hand() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        with rec.catch("assign"):
            x.grad = torch.ones(4)
        x.grad = torch.full((3,), 5.0)
        x.sin().sum().backward()
        rec.grads(x)
        x.grad = torch.ones(3).to_sparse()
        x.sin().sum().backward()
        rec.grads(x)

    compare(program)


@pytest.mark.parametrize("depth", [0, 1, 3, 70])
def test_nan_gradients_pass_through(depth: int) -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = Nested.apply((x * 0).log(), depth, lambda level: None)
        y.sum().backward()
        rec.grads(x)

    compare(program)


def test_backward_without_a_graph_inside_a_hook() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.exp()

        def hook(grad: Tensor) -> None:
            with rec.catch("inner"):
                grad.backward(torch.ones(3))
            rec.say(rec.task(), torch._C._current_autograd_node().name())

        y.register_hook(hook)
        (y * 2).sum().backward()
        rec.grads(x)

    compare(program, path=partly("irregular_call"))


def test_very_wide_and_very_deep_graphs() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(2)
        torch.cat([x * float(k) for k in range(3000)]).sin().sum().backward()
        rec.grads(x)
        y = x
        for _ in range(20_000):
            y = y + 1e-3
        y.sum().backward()
        rec.grads(x)

    compare(program)
