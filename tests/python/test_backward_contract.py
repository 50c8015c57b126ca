from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import ANY, Recorder, compare, leaf, partly
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def graph() -> tuple[Tensor, ...]:
    """Two leaves, two intermediates, a scalar root, and a leaf that the root does not reach."""
    a, b = leaf(3), leaf(3, seed=1)
    c = a * b
    d = c.sin() + a
    return a, b, c, d, (d * c).sum(), leaf(3, seed=2)


INPUTS: dict[str, Callable[..., list[Any]]] = {
    "leaf": lambda a, b, c, d, loss, unused: [a],
    "both leaves": lambda a, b, c, d, loss, unused: [b, a],
    "intermediate": lambda a, b, c, d, loss, unused: [c],
    "leaf and intermediate": lambda a, b, c, d, loss, unused: [a, d, c],
    "duplicates": lambda a, b, c, d, loss, unused: [a, a, c, a, c],
    "root": lambda a, b, c, d, loss, unused: [loss],
    "root and leaf": lambda a, b, c, d, loss, unused: [loss, a],
    "unused": lambda a, b, c, d, loss, unused: [unused],
    "used and unused": lambda a, b, c, d, loss, unused: [a, unused, b],
    "leaf edge": lambda a, b, c, d, loss, unused: [get_gradient_edge(a)],
    "edges": lambda a, b, c, d, loss, unused: [get_gradient_edge(c), get_gradient_edge(a), d],
    "edge and its tensor": lambda a, b, c, d, loss, unused: [get_gradient_edge(c), c],
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("allow_unused", [False, True])
def test_grad_of(inputs: str, allow_unused: bool) -> None:
    def program(rec: Recorder) -> None:
        tensors = graph()
        chosen = INPUTS[inputs](*tensors)
        with rec.catch():
            rec.say(torch.autograd.grad(tensors[4], chosen, retain_graph=True, allow_unused=allow_unused))
        with rec.catch():
            rec.say(torch.autograd.grad(tensors[4], chosen, allow_unused=allow_unused))
        rec.grads(*tensors[:2])

    compare(program)


@pytest.mark.parametrize("inputs", INPUTS)
def test_backward_into(inputs: str) -> None:
    def program(rec: Recorder) -> None:
        tensors = graph()
        tensors[2].retain_grad()
        chosen = INPUTS[inputs](*tensors)
        for _ in range(2):
            with rec.catch():
                tensors[4].backward(inputs=chosen, retain_graph=True)
            rec.grads(*tensors)
        tensors[4].backward()
        rec.grads(*tensors)

    compare(program)


def test_unused_inputs_can_be_materialized() -> None:
    def program(rec: Recorder) -> None:
        a, b, c, d, loss, unused = graph()
        rec.say(torch.autograd.grad(loss, (a, unused), materialize_grads=True, retain_graph=True))
        with rec.catch():
            torch.autograd.grad(loss, (a, unused), materialize_grads=True, allow_unused=False)

    compare(program)


@pytest.mark.parametrize(
    "roots",
    [
        lambda a, b, c, d, loss, unused: ([c, d], [torch.ones(3), torch.full((3,), 2.0)]),
        lambda a, b, c, d, loss, unused: ([d, d], [torch.ones(3), torch.ones(3)]),
        lambda a, b, c, d, loss, unused: ([loss, c], [None, torch.ones(3)]),
        lambda a, b, c, d, loss, unused: ([loss, a], [None, torch.ones(3)]),
        lambda a, b, c, d, loss, unused: ([a], [torch.ones(3)]),
        lambda a, b, c, d, loss, unused: ([a, a], [torch.ones(3), torch.ones(3)]),
        lambda a, b, c, d, loss, unused: ([get_gradient_edge(c)], [torch.ones(3)]),
        lambda a, b, c, d, loss, unused: ([get_gradient_edge(loss), d], [None, torch.ones(3)]),
        lambda a, b, c, d, loss, unused: ([loss, loss.detach().requires_grad_() * a.sum()], [None, None]),
    ],
    ids=range(9),
)
def test_several_roots(roots: Callable[..., tuple[list[Any], list[Tensor | None]]]) -> None:
    def program(rec: Recorder) -> None:
        tensors = graph()
        outputs, grads = roots(*tensors)
        with rec.catch():
            torch.autograd.backward(outputs, grads, retain_graph=True)
        rec.grads(*tensors[:2])
        with rec.catch():
            rec.say(torch.autograd.grad(outputs, tensors[:3], grads, allow_unused=True))

    compare(program)


@pytest.mark.parametrize(
    "grad",
    [
        torch.full((3,), 2.0),
        torch.ones(1).expand(3),
        torch.arange(6.0)[::2],
        torch.ones(3, dtype=torch.float64),
        torch.ones(3, requires_grad=True),
        torch.tensor([float("nan"), float("inf"), -0.0]),
        torch.ones(4),
        torch.ones(1, 3),
        torch.ones(3, dtype=torch.int64),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, device="meta"),
        torch.ones(3).to_sparse(),
        "text",
        1.0,
        None,
    ],
    ids=lambda g: repr(g)[:50],
)
def test_gradients_given_for_the_root(grad: Any) -> None:
    def program(rec: Recorder) -> None:
        a, b, c, d, loss, unused = graph()
        with rec.catch():
            d.backward(grad, retain_graph=True)
        rec.grads(a, b)
        with rec.catch():
            rec.say(torch.autograd.grad(d, (a, c), grad, retain_graph=True))
        loss.backward()
        rec.grads(a, b)

    compare(program, path=partly("irregular_call"))  # what the stock engine refuses is refused by it


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b, c, d, loss, unused: torch.ones(()).backward(),
        lambda a, b, c, d, loss, unused: torch.autograd.backward([loss, torch.ones(())]),
        lambda a, b, c, d, loss, unused: torch.autograd.backward([loss, None]),
        lambda a, b, c, d, loss, unused: torch.autograd.backward(["text"]),
        lambda a, b, c, d, loss, unused: torch.autograd.backward([]),
        lambda a, b, c, d, loss, unused: torch.autograd.backward([loss], [None, None]),
        lambda a, b, c, d, loss, unused: torch.autograd.backward([c], [None]),
        lambda a, b, c, d, loss, unused: loss.backward(inputs=[]),
        lambda a, b, c, d, loss, unused: loss.backward(inputs=["text"]),
        lambda a, b, c, d, loss, unused: loss.backward(inputs=[torch.ones(3)]),
        lambda a, b, c, d, loss, unused: torch.autograd.grad(loss, []),
        lambda a, b, c, d, loss, unused: torch.autograd.grad(loss, [torch.ones(3)]),
        lambda a, b, c, d, loss, unused: torch.autograd.grad(loss, [torch.ones(3)], allow_unused=True),
        lambda a, b, c, d, loss, unused: torch.autograd.grad(loss, [None]),
        lambda a, b, c, d, loss, unused: torch.autograd.grad(c, [a]),
        lambda a, b, c, d, loss, unused: torch.autograd.grad(torch.ones(()), [a]),
        lambda a, b, c, d, loss, unused: (d * 1j).sum().backward(),
        lambda a, b, c, d, loss, unused: torch.autograd.Variable._execution_engine.run_backward(),
        lambda a, b, c, d, loss, unused: torch.autograd.Variable._execution_engine.run_backward(
            (loss,), (None,), False, False, ()
        ),
        lambda a, b, c, d, loss, unused: torch.autograd.Variable._execution_engine.run_backward(
            [loss], [torch.ones(())], False, False, ()
        ),
        lambda a, b, c, d, loss, unused: torch.autograd.Variable._execution_engine.run_backward(
            (loss,), (torch.ones(()),), False, False, (3,), allow_unreachable=True
        ),
        lambda a, b, c, d, loss, unused: torch.autograd.Variable._execution_engine.run_backward(
            (loss,), (torch.ones(()), torch.ones(())), False, False
        ),
    ],
    ids=range(22),
)
def test_irregular_calls_get_the_stock_error(call: Callable[..., Any]) -> None:
    def program(rec: Recorder) -> None:
        tensors = graph()
        with rec.catch():
            rec.say(call(*tensors))
        rec.grads(*tensors[:2])
        with rec.catch("the next call"):
            tensors[4].backward()
        rec.grads(*tensors[:2])

    compare(program, path=partly("irregular_call"))  # what the stock engine refuses is refused by it


def test_a_retained_graph_runs_again() -> None:
    def program(rec: Recorder) -> None:
        a, b, c, d, loss, unused = graph()
        for _ in range(3):
            loss.backward(retain_graph=True)
            rec.grads(a, b)

    compare(program)


def test_a_released_graph_does_not_run_again() -> None:
    def program(rec: Recorder) -> None:
        a, b, c, d, loss, unused = graph()
        loss.backward()
        rec.grads(a, b)
        with rec.catch():
            loss.backward()
        with rec.catch():
            torch.autograd.grad(loss, a)
        rec.grads(a, b)

    compare(program)


def test_parts_of_a_graph_are_released() -> None:
    def program(rec: Recorder) -> None:
        a, b, c, d, loss, unused = graph()
        rec.say(torch.autograd.grad(d.sum(), c))
        with rec.catch("above"):
            rec.say(torch.autograd.grad(c.sum(), a))
        with rec.catch("below"):
            loss.backward()
        rec.grads(a, b)

    compare(program)


def test_saved_tensors_are_dropped_unless_retained() -> None:
    def program(rec: Recorder) -> None:
        a = leaf(3)
        y = a.exp().sin()
        assert y.grad_fn is not None
        y.sum().backward(retain_graph=True)
        rec.say(y.grad_fn._saved_self)
        y.sum().backward()
        with rec.catch():
            rec.say(y.grad_fn._saved_self)

    compare(program)


def test_double_backward() -> None:
    def program(rec: Recorder) -> None:
        a, b, c, d, loss, unused = graph()
        first = torch.autograd.grad(loss, (a, b, c), create_graph=True)
        rec.say(first)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), (a, b), create_graph=True)
        rec.say(second)
        sum(g.sum() for g in second).backward()
        rec.grads(a, b)

    compare(program)


def test_backward_with_create_graph_warns_and_accumulates_differentiably() -> None:
    def program(rec: Recorder) -> None:
        a, b, c, d, loss, unused = graph()
        loss.backward(create_graph=True)
        rec.grads(a, b)
        assert a.grad is not None
        loss.backward(create_graph=True)
        rec.grads(a, b)
        rec.say(torch.autograd.grad(a.grad.pow(2).sum(), b))
        a.grad = b.grad = None

    want = compare(program)
    assert any("create_graph=True" in w for w in want.warnings)


@pytest.mark.parametrize("accumulate_first", [False, True])
def test_create_graph_and_an_existing_gradient(accumulate_first: bool) -> None:
    def program(rec: Recorder) -> None:
        a, b, c, d, loss, unused = graph()
        if accumulate_first:
            loss.backward(retain_graph=True)
        torch.autograd.backward(loss, create_graph=True, inputs=(a, b))
        rec.grads(a, b)
        torch.autograd.backward(loss)
        rec.grads(a, b)
        a.grad = b.grad = None

    compare(program)


def softmax_of_matmul(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x @ w, -1)


def slices_in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y[0] = w[1] * 2
    y.t()[1].mul_(w[0])
    return y


def solve(x: Tensor, w: Tensor) -> Tensor:
    return torch.linalg.solve(x + 4 * torch.eye(3, dtype=x.dtype), w)


def norm(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, (3,), w[0], w[1])


def outputs(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (x * w).unbind(0)


FUNCTIONS = [softmax_of_matmul, slices_in_place, solve, norm, outputs]


@pytest.mark.parametrize(
    ("function", "dtype"),
    [(f, torch.float64) for f in FUNCTIONS] + [(f, torch.complex128) for f in (slices_in_place, solve, outputs)],
)
def test_gradcheck(function: Callable[..., Any], dtype: torch.dtype) -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3, 3, dtype=dtype), leaf(3, 3, seed=1, dtype=dtype)
        # Batched gradients are vmapped and may be handed back: see test_batched_gradients.
        rec.say(torch.autograd.gradcheck(function, (x, w), check_batched_grad=False))
        rec.say(torch.autograd.gradgradcheck(function, (x, w), check_batched_grad=False))

    compare(program)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradcheck_finds_a_wrong_gradient_on_both_engines(function: Callable[..., Any]) -> None:
    def wrong(x: Tensor, w: Tensor) -> Any:
        y = x * 1
        y.register_hook(lambda g: g * 1.1)
        return function(y, w)

    def program(rec: Recorder) -> None:
        x, w = leaf(3, 3, dtype=torch.float64), leaf(3, 3, seed=1, dtype=torch.float64)
        rec.say(torch.autograd.gradcheck(wrong, (x, w), raise_exception=False))

    assert "False" in compare(program).log


def test_batched_gradients() -> None:
    def program(rec: Recorder) -> None:
        a, b, c, d, loss, unused = graph()
        rec.say(torch.autograd.grad(d, (a, b), torch.eye(3), is_grads_batched=True))
        x, w = leaf(3, 3, dtype=torch.float64), leaf(3, 3, seed=1, dtype=torch.float64)
        rec.say(torch.autograd.functional.jacobian(softmax_of_matmul, (x, w), vectorize=True))
        rec.say(torch.autograd.functional.hessian(lambda x: x.exp().prod(), leaf(3), vectorize=True))

    # ANY: gradients under vmap may be handed back to the previous engine.
    compare(program, path=ANY)


def test_jacobian_and_hessian() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3, dtype=torch.float64)
        rec.say(torch.autograd.functional.jacobian(lambda x: x.sin() * x[0], x))
        rec.say(torch.autograd.functional.hessian(lambda x: x.exp().prod(), x))

    compare(program)


def test_graph_task_state_seen_by_autograd_functions() -> None:
    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rec: Recorder, x: Tensor) -> Tensor:
            ctx.rec = rec
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
            ctx.rec.say("keep_graph", torch._C._autograd._get_current_graph_task_keep_graph())
            return None, grad * 2

    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = Keep.apply(rec, x)
        y.sum().backward(retain_graph=True)
        torch.autograd.grad(y.sum(), x, create_graph=True)
        y.sum().backward()
        rec.grads(x)

    # The class is new in each run, so that its node may be another one to the cache.
    compare(program, always_miss=True)
