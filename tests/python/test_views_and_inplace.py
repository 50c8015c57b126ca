from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import Recorder, compare, leaf
from torch import Tensor


def slice_assignment(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:3] = w[:, :2] * 2
    y[0].mul_(3)
    return y.pow(2)


def in_place_through_a_view(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y.view(-1)[2:].mul_(w.reshape(-1)[2:])
    return y.sin()


def view_read_after_its_base_changed(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    v = y[1]
    y.add_(w)
    return v.exp()


def chain_of_views(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1
    y.t().unsqueeze(0)[:, 1].fill_(2.0)
    y.diagonal().mul_(w.diagonal())
    return y * w


def as_strided(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y.as_strided((2, 2), (1, 2), 1).mul_(w[:2, :2])
    return y.as_strided((3, 2), (1, 3), 2) * 2


def view_of_a_leaf(x: Tensor, w: Tensor) -> Tensor:
    return x.view(-1)[3:] * w.t().reshape(-1)[3:]


def copy_in_place(x: Tensor, w: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[1:].copy_(x[1:])
    y.t()[0].copy_(w[:, 0])
    return y * w


def detached_in_between(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    with torch.no_grad():
        y[0].zero_()
    y[1] = w[1]
    return y * 3


def into_a_tensor_without_gradient(x: Tensor, w: Tensor) -> Tensor:
    y = torch.zeros(3, 4)
    y[0] = x[0]
    y[:, 1] = w[:, 1] * x[:, 2]
    return y.exp()


def complex_views(x: Tensor, w: Tensor) -> Tensor:
    z = torch.complex(x, w)
    z = z * 1
    z.real.mul_(2)
    z.imag.add_(x)
    return z.abs()


def unbind_and_split(x: Tensor, w: Tensor) -> Tensor:
    a, _, c = x.unbind(0)
    d, _ = w.split([1, 3], dim=1)
    e, _, _, h = (x * w).chunk(4, 1)
    return a * c + (d * h).sum() + e.sum()


def unsafe_split_written_to(x: Tensor, w: Tensor) -> Tensor:
    a, b = torch.unsafe_split_with_sizes(x * 1, [1, 2])
    a.mul_(2)
    return a.sum() * b * w[:2]


def topk_and_sort(x: Tensor, w: Tensor) -> Tensor:
    values, index = x.topk(2, dim=1)
    ordered, _ = w.sort(dim=1)
    return values * ordered.gather(1, index)


def decompositions(x: Tensor, w: Tensor) -> Tensor:
    _, s, _ = torch.linalg.svd(x, full_matrices=False)
    q, _ = torch.linalg.qr(w)
    return s + q[0]


def max_with_index(x: Tensor, w: Tensor) -> Tensor:
    return x.max(1)[0] * torch.cummax(w, 0)[0][:, 0] + torch.aminmax(x)[1]


def broadcast(x: Tensor, w: Tensor) -> Tensor:
    return x[:, :1].expand(3, 4) * w[0] + w.mean() * x


def index_put_accumulate(x: Tensor, w: Tensor) -> Tensor:
    y = x.index_put((torch.tensor([0, 0, 2]),), w, accumulate=True)
    y = y.clone()
    y[torch.tensor([True, False, True])] *= 2
    return y[[0, 1, 1]]


def masked(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y[y > 0] = w[0, 0]
    return torch.where(w > 0, y, w).masked_fill(x < -1, 0.5)


GRAPHS = [
    slice_assignment,
    in_place_through_a_view,
    view_read_after_its_base_changed,
    chain_of_views,
    as_strided,
    view_of_a_leaf,
    copy_in_place,
    detached_in_between,
    into_a_tensor_without_gradient,
    complex_views,
    unbind_and_split,
    unsafe_split_written_to,
    topk_and_sort,
    decompositions,
    max_with_index,
    broadcast,
    index_put_accumulate,
    masked,
]


@pytest.mark.parametrize("graph", GRAPHS)
def test_backward(graph: Callable[[Tensor, Tensor], Tensor]) -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3, 4), leaf(3, 4, seed=1)
        for _ in range(2):
            graph(x, w).sum().backward()
            rec.grads(x, w)

    compare(program)


@pytest.mark.parametrize("graph", GRAPHS)
def test_grad_on_a_retained_graph(graph: Callable[[Tensor, Tensor], Tensor]) -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3, 4), leaf(3, 4, seed=1)
        y = graph(x, w)
        for retain in (True, True, False):
            rec.say(torch.autograd.grad(y, (x, w), torch.ones_like(y), retain_graph=retain, allow_unused=True))

    compare(program)


@pytest.mark.parametrize("unused", [(0,), (1, 2), (0, 1)])
def test_outputs_of_a_node_left_unused(unused: tuple[int, ...]) -> None:
    def program(rec: Recorder) -> None:
        x = leaf(4, 3)
        outputs = torch.linalg.svd(x, full_matrices=False)
        loss = sum((o.abs().sum() for i, o in enumerate(outputs) if i not in unused), start=torch.zeros(()))
        assert outputs[0].grad_fn is not None
        outputs[0].grad_fn.register_prehook(rec.hook("pre"))
        loss.backward()
        rec.grads(x)

    compare(program)


def test_hooks_of_a_view_written_to() -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3, 4), leaf(3, 4, seed=1)
        y = x.clone()
        v = y[1]
        v.register_hook(rec.hook("old view"))
        v.mul_(w[1])
        v.register_hook(rec.hook("new view"))
        y.register_hook(rec.hook("base"))
        v.retain_grad()
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(rec.hook("CopySlices pre"))
        y.grad_fn.register_hook(rec.hook("CopySlices post"))
        (y * w).sum().backward()
        rec.say(v.grad)
        rec.grads(x, w)

    compare(program)
