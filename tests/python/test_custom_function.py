from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import Recorder, compare, leaf
from torch import Tensor
from torch.autograd.function import once_differentiable


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rec: Recorder, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.rec = rec
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        ctx.rec.say("needs", ctx.needs_input_grad, "grad", grad)
        return (
            None,
            grad * w if ctx.needs_input_grad[1] else None,
            grad * x if ctx.needs_input_grad[2] else None,
        )


@pytest.mark.parametrize("wanted", ["x", "w", "both", "neither is a leaf"])
def test_needs_input_grad_follows_inputs(wanted: str) -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)
        a, b = (x.exp(), w.exp()) if wanted == "neither is a leaf" else (x, w)
        y = Multiply.apply(rec, a, b).sin()
        inputs = {"x": (x,), "w": (w,), "both": (x, w), "neither is a leaf": (a,)}[wanted]
        rec.say(torch.autograd.grad(y.sum(), inputs, retain_graph=True))
        y.sum().backward(inputs=inputs, retain_graph=True)
        rec.grads(x, w)
        y.sum().backward()
        rec.grads(x, w)

    compare(program)


def test_an_input_that_requires_no_gradient() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        Multiply.apply(rec, x, torch.ones(3)).sum().backward()
        rec.grads(x)

    compare(program)


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rec: Recorder, x: Tensor, materialize: bool) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(materialize)
        ctx.rec = rec
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.rec.say("grads", a, b)
        parts = [g * k for g, k in ((a, 2), (b, 3)) if g is not None]
        return None, sum(parts[1:], start=parts[0]) if parts else None, None


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("used", ["first", "second", "both"])
def test_materialize_grads(materialize: bool, used: str) -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        a, b = TwoOutputs.apply(rec, x, materialize)
        loss = {"first": a, "second": b, "both": a * b}[used].sum()
        loss.backward()
        rec.grads(x)

    compare(program)


class GivesNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rec: Recorder, x: Tensor) -> Tensor:
        ctx.rec = rec
        ctx.set_materialize_grads(False)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None]:
        ctx.rec.say("grad", grad)
        return None, None


def test_undefined_gradients_reach_the_nodes_above() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        above = GivesNone.apply(rec, x.sin())
        y = GivesNone.apply(rec, above.exp())
        above.register_hook(rec.hook("undefined"))
        x.register_post_accumulate_grad_hook(rec.hook("accumulated"))
        y.sum().backward()
        rec.grads(x)

    compare(program)


def test_undefined_and_defined_gradients_meet() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.sin()
        (GivesNone.apply(rec, y) + y * 2 + GivesNone.apply(rec, y)).sum().backward()
        rec.grads(x)
        rec.say(torch.autograd.grad(GivesNone.apply(rec, x).sum(), x, allow_unused=True))
        with rec.catch():
            torch.autograd.grad(GivesNone.apply(rec, x).sum(), x)

    compare(program)


class SumAndIndex(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rec: Recorder, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.rec = rec
        index = x.argmax()
        ctx.mark_non_differentiable(index)
        return x.sum().expand(3), index

    @staticmethod
    def backward(ctx: Any, grad: Tensor, index: Tensor) -> tuple[None, Tensor]:
        ctx.rec.say("grads", grad, index)
        return None, grad


def test_mark_non_differentiable() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y, index = SumAndIndex.apply(rec, x * 2)
        (y * index).sum().backward()
        rec.grads(x)

    compare(program)


class AddInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rec: Recorder, x: Tensor, amount: Tensor) -> Tensor:
        ctx.rec = rec
        ctx.mark_dirty(x)
        return x.add_(amount)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        ctx.rec.say("grad", grad)
        return None, grad, grad * 2


@pytest.mark.parametrize("view", [False, True])
def test_mark_dirty(view: bool) -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(4), leaf(4, seed=1)
        y = x.clone()
        AddInPlace.apply(rec, y.view(2, 2) if view else y, w.view(2, 2) if view else w)
        (y * y).sum().backward()
        rec.grads(x, w)

    compare(program)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_once_differentiable() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        Once.apply(x.sin()).sum().backward()
        rec.grads(x)
        (grad,) = torch.autograd.grad(Once.apply(x.sin()).pow(2).sum(), x, create_graph=True)
        rec.say(grad)
        with rec.catch():
            grad.sum().backward()

    compare(program)


class Returns(torch.autograd.Function):
    """Its backward returns whatever it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, result: Any) -> Tensor:
        ctx.result = result
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.result


@pytest.mark.parametrize(
    "result",
    [
        torch.ones(3),
        (torch.ones(3), torch.ones(3), None, None, None),
        (torch.ones(3), torch.ones(3), None, torch.ones(3)),
        (torch.ones(2), torch.ones(3), None),
        (torch.ones(3, 3), torch.ones(3), None),
        (torch.ones(1, 3), torch.ones(3), None),
        (torch.ones(3, dtype=torch.float64), torch.ones(3), None),
        (torch.ones(3, dtype=torch.complex64), torch.ones(3), None),
        (torch.ones(3, dtype=torch.int64), torch.ones(3), None),
        (torch.ones(3, device="meta"), torch.ones(3), None),
        (torch.ones(3).to_sparse(), torch.ones(3), None),
        (1.0, torch.ones(3), None),
        ("text", torch.ones(3), None),
        (torch.ones(3), torch.ones(3), torch.ones(3)),
        (None, None, None),
        (torch.ones(1).expand(3), torch.ones(3), None),
        None,
        (),
    ],
    ids=lambda r: repr(r).replace("\n", " ")[:60],
)
@pytest.mark.parametrize("leaves", [True, False])
def test_return_values_of_a_backward(result: Any, leaves: bool) -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)
        y = Returns.apply(x if leaves else x.sin(), w if leaves else w.exp(), result)
        with rec.catch():
            y.sum().backward()
        rec.grads(x, w)

    compare(program)


class Doubled(torch.autograd.Function):
    """Differentiable twice, and written with setup_context."""

    @staticmethod
    def forward(x: Tensor, k: float) -> tuple[Tensor, Tensor]:
        return x.pow(3) * k, x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        x, ctx.k = inputs
        ctx.save_for_backward(x, output[0])

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, None]:
        x, y = ctx.saved_tensors
        return a * 3 * x * x * ctx.k + b + 0 * y, None


def test_double_backward_of_a_function_that_saves_its_output() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        a, b = Doubled.apply(x.exp(), 0.5)
        (grad,) = torch.autograd.grad((a * b).sum(), x, create_graph=True)
        rec.say(grad)
        grad.pow(2).sum().backward()
        rec.grads(x)

    compare(program)


class Identity(torch.autograd.Function):
    """Hands back its gradient itself, so that storage may be shared."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x.view_as(x), w.view_as(w)

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a, a


def test_one_tensor_returned_for_two_inputs() -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)
        for _ in range(2):
            a, b = Identity.apply(x, w)
            (a * 3 + b).sum().backward()
            rec.grads(x, w)
        c, d = Identity.apply(x.sin(), x.cos())
        (c * d + x).sum().backward()
        rec.grads(x, w)

    compare(program)


def test_the_context_of_a_function_is_usable_after_backward() -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)
        y = Multiply.apply(rec, x, w)
        rec.say(y.grad_fn.saved_tensors)
        y.sum().backward(retain_graph=True)
        rec.say(y.grad_fn.saved_tensors)
        y.sum().backward()
        with rec.catch():
            rec.say(y.grad_fn.saved_tensors)
        with rec.catch():
            y.sum().backward()
        rec.grads(x, w)

    compare(program)
