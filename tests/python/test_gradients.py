"""What gradients are made of: layouts, types, strides, storage, and the order in which several are added."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import Recorder, compare, leaf
from torch import Tensor, nn


@pytest.mark.parametrize("uses", [1, 2, 4])
@pytest.mark.parametrize("backwards", [1, 3])
def test_sparse_embedding(uses: int, backwards: int) -> None:
    def program(rec: Recorder) -> None:
        table = nn.Embedding(5, 3, sparse=True)
        for step in range(backwards):
            loss = sum(table(torch.tensor([i % 5, 0, step])).pow(2).sum() for i in range(uses))
            assert isinstance(loss, Tensor)
            loss.backward()
            rec.grads(table.weight)

    compare(program)


@pytest.mark.parametrize("order", ["sparse first", "dense first", "between"])
@pytest.mark.parametrize("before", [None, "sparse", "dense"])
def test_sparse_and_dense_gradients_meet(order: str, before: str | None) -> None:
    def program(rec: Recorder) -> None:
        weight = leaf(5, 3)
        if before == "sparse":
            F.embedding(torch.tensor([4]), weight, sparse=True).sum().backward()
        elif before == "dense":
            weight.sin().sum().backward()
        w = weight * 1 if before is None else weight

        def sparse() -> Tensor:
            return F.embedding(torch.tensor([1, 1, 3]), w, sparse=True).sum()

        def dense() -> Tensor:
            return w.pow(2).sum()

        parts = {
            "sparse first": (sparse, dense),
            "dense first": (dense, sparse),
            "between": (sparse, dense, sparse, dense),
        }[order]
        values = [part() for part in parts]
        torch.autograd.backward(values)
        rec.grads(weight)

    compare(program)


def test_sparse_gradients_seen_by_hooks_and_grad() -> None:
    def program(rec: Recorder) -> None:
        weight = leaf(5, 3)
        weight.register_hook(rec.hook("weight", lambda g: g * 2))
        weight.register_post_accumulate_grad_hook(lambda p: rec.say(p.grad))
        y = F.embedding(torch.tensor([1, 1, 3]), weight, sparse=True)
        rec.say(torch.autograd.grad(y.sum(), weight, retain_graph=True))
        y.sum().backward()
        rec.grads(weight)

    compare(program)


def test_sparse_matrix_product() -> None:
    def program(rec: Recorder) -> None:
        w = leaf(3, 3)
        eye = torch.eye(3).to_sparse().requires_grad_()
        torch.sparse.mm(eye, w).pow(2).sum().backward()
        rec.grads(w, eye)

    compare(program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("uses", [2, 3, 5, 17])
def test_fan_in_is_added_in_the_stock_order(uses: int, dtype: torch.dtype) -> None:
    def program(rec: Recorder) -> None:
        x = leaf(64, dtype=dtype)
        for y in (x, x * 1.1):
            branches = [(y * (1.7**k)).sin() * (10.0 ** (k % 4)) for k in range(uses)]
            total = branches[0]
            for branch in branches[1:]:
                total = total + branch
            y.register_hook(rec.hook("sum"))
            total.sum().backward()
        rec.grads(x)

    compare(program)


@pytest.mark.parametrize("flip", [False, True])
def test_order_of_computing_equal_branches_is_part_of_the_key(flip: bool) -> None:
    def program(rec: Recorder) -> None:
        # Both variants in one program, so that the second must not run the first one's schedule.
        for turn in (flip, not flip):
            x = leaf(1000)
            branches = [lambda x=x: x * 1.7, lambda x=x: x.sin() * 1e3, lambda x=x: x.exp() * 1e-3]
            done: dict[int, Tensor] = {}
            for k in (2, 1, 0) if turn else (0, 1, 2):
                done[k] = branches[k]()
            (done[0] + done[1] + done[2]).sum().backward()
            rec.grads(x)

    log = compare(program).log
    assert log[0] != log[1], "the two orders should give other bits, or this test shows nothing"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex(dtype: torch.dtype) -> None:
    def program(rec: Recorder) -> None:
        x = (torch.arange(6.0) - 2.5).to(dtype).mul(1 + 2j).reshape(2, 3).requires_grad_()
        real = leaf(3)
        y = x.conj() * real + torch.view_as_complex(torch.view_as_real(x) * 2)
        y = torch.fft.ifft(torch.fft.fft(y) * x).resolve_conj()
        (y.abs().sum() + y.real.sin().sum() + (x.imag * real).sum()).backward()
        rec.grads(x, real)

    compare(program)


def test_real_leaf_gets_a_real_gradient_from_complex_operations() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        (x * (1 + 2j)).abs().sum().backward()
        (x.to(torch.complex64) * 1j).imag.sum().backward()
        rec.grads(x)

    compare(program)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types_convert_on_the_way(dtype: torch.dtype) -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3, 3), leaf(3, 3, seed=1, dtype=dtype)
        y = (x.to(dtype) @ w).float() * x
        y.sum().backward()
        rec.grads(x, w)

    compare(program)


def test_autocast() -> None:
    def program(rec: Recorder) -> None:
        net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
        x = leaf(4, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x) + net(x * 2), torch.tensor([0, 1, 1, 0]))
            loss.backward(retain_graph=True)  # inside on purpose: backward may not take part in autocast
        loss.backward()
        rec.module(net)
        rec.grads(x)

    compare(program)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 0)])
def test_zero_size_and_zero_dimensional_tensors(shape: tuple[int, ...]) -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(*shape), leaf(*shape, seed=1)
        y = (x * w).sin() + x.expand((2, *shape)).sum(0)
        y.sum().backward()
        torch.cat([y.reshape(-1).detach(), (x * 2).reshape(-1)]).sum().backward()
        rec.grads(x, w)

    compare(program)


def strided_leaf(kind: str) -> Tensor:
    base = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    match kind:
        case "transposed":
            base = base.t()
        case "strided":
            base = base[:, ::2]
        case "expanded":
            base = base[:1].expand(4, 6)
        case "overlapping":
            base = base.as_strided((4, 4), (2, 1))
    return base.detach().requires_grad_()


@pytest.mark.parametrize("kind", ["plain", "transposed", "strided", "expanded", "overlapping"])
def test_strides_of_gradients(kind: str) -> None:
    def program(rec: Recorder) -> None:
        x = strided_leaf(kind)
        x.register_hook(rec.hook("incoming"))
        for y in (x * 2, x.t(), x.sum().expand(x.shape), x.contiguous().exp()):
            y.sum().backward(retain_graph=True)
            rec.grads(x)
            x.grad = None
            y.backward(torch.ones(y.shape[::-1]).t())
            rec.grads(x)
        rec.say(torch.autograd.grad(x.t().sum(), x), torch.autograd.grad(x.sum(), x))

    compare(program)


def test_channels_last_parameters_get_channels_last_gradients() -> None:
    def program(rec: Recorder) -> None:
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
        net = net.to(memory_format=torch.channels_last)
        x = leaf(2, 3, 8, 8).detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        for _ in range(2):
            net(x).sum().backward()
            rec.module(net)
            rec.grads(x)

    compare(program)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate_over_steps(set_to_none: bool) -> None:
    def program(rec: Recorder) -> None:
        net = nn.Linear(4, 3)
        kept = []
        for step in range(6):
            net(leaf(2, 4, seed=step)).sin().sum().backward()
            kept.append(net.weight.grad)
            rec.say([g is kept[0] for g in kept])
            rec.module(net)
            if step == 3:
                net.zero_grad(set_to_none=set_to_none)

    compare(program)


class Gives(torch.autograd.Function):
    """Hands a tensor, prepared in advance, to its input as gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = [gradient]
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.pop() if len(ctx.gradient) == 1 else grad, None


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("shape", ["plain", "expanded", "transposed", "view"])
@pytest.mark.parametrize("hook", [None, "reads", "returns it"])
def test_gradients_are_stolen_as_in_the_stock_engine(held: bool, shape: str, hook: str | None) -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3, 3)
        gradient = {
            "plain": torch.full((3, 3), 2.0),
            "expanded": torch.full((1, 3), 2.0).expand(3, 3),
            "transposed": torch.arange(9.0).reshape(3, 3).t(),
            "view": torch.arange(18.0)[9:].view(3, 3),
        }[shape]
        storage = gradient.untyped_storage()
        if hook is not None:
            x.register_hook(lambda g: g if hook == "returns it" else None)
        y = Gives.apply(x, gradient)
        if not held:
            del gradient
        y.sum().backward()
        assert x.grad is not None
        rec.say("same storage", x.grad.untyped_storage().data_ptr() == storage.data_ptr())
        rec.grads(x)

    compare(program)


@pytest.mark.parametrize("retain", [True, False])
def test_gradient_given_for_the_root_is_not_written_to(retain: bool) -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        given = torch.full((3,), 2.0)
        y = x.view(3)
        for _ in range(2):
            torch.autograd.backward([y, x, y], [given, given, given], retain_graph=True)
            assert x.grad is not None
            rec.say("shared", x.grad.data_ptr() == given.data_ptr(), given)
            x.grad.add_(1)
            rec.say(given)
        (x.view(3) * 1).backward(given, retain_graph=retain)
        rec.say(given)
        rec.grads(x)

    compare(program)


def test_two_leaves_fed_one_gradient_share_it_as_in_the_stock_engine() -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)
        (x + w).backward(torch.ones(3))
        assert x.grad is not None and w.grad is not None
        rec.say("shared", x.grad.data_ptr() == w.grad.data_ptr())
        (x.view(-1) + w.view(-1) + x).sum().backward()
        rec.say("shared", x.grad.data_ptr() == w.grad.data_ptr())
        rec.grads(x, w)
        a, b = torch.autograd.grad((x + w).sum(), (x, w))
        rec.say("shared", a.data_ptr() == b.data_ptr())

    compare(program)


def test_the_add_of_a_view_and_its_base_is_right() -> None:
    def program(rec: Recorder) -> None:
        a, b, w = leaf(2, 3), leaf(6, seed=1), leaf(6, seed=2)
        for _ in range(2):
            ((a.view(-1) + b) * w).sum().backward()
            rec.grads(a, b, w)

    compare(program)


def test_gradient_of_a_gradient_that_is_a_leaf_again() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        x.sin().sum().backward()
        assert x.grad is not None
        g = x.grad.requires_grad_()
        (g * x).sum().backward()
        rec.say(g.grad)
        rec.grads(x)

    compare(program)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e-42])
def test_special_values(value: float) -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(4), torch.tensor([1.0, value, -1.0, value], requires_grad=True)
        ((x * w) / w + w.sqrt()).sum().backward()
        rec.grads(x, w)

    compare(program)
