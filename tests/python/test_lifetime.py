"""What a backward call may keep alive: nothing that the stock engine does not, whatever way the call ends."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Recorder, compare, counting, leaf
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks

import retrograd


class Packed:
    """Stands for a saved tensor; says when it is released."""

    def __init__(self, rec: Recorder, name: str, tensor: Tensor) -> None:
        self.rec = rec
        self.name = name
        self.tensor = tensor

    def __del__(self) -> None:
        self.rec.say("released", self.name)


@pytest.mark.parametrize("retain", [True, False])
def test_saved_tensors_are_released_node_by_node(retain: bool) -> None:
    def program(rec: Recorder) -> None:
        names = iter("abcdefgh")
        x = leaf(3)
        with saved_tensors_hooks(lambda t: Packed(rec, next(names), t), lambda p: p.tensor):
            y = x.sin()
            z = y.exp() * y
        for name, tensor in (("x", x), ("y", y), ("z", z)):
            tensor.register_hook(lambda g, name=name: rec.say("hook", name))
        z.sum().backward(retain_graph=retain)
        rec.say("end of the call")
        del y, z, tensor
        gc.collect()
        rec.say("end of the graph")
        rec.grads(x)

    compare(program)


class Mark:
    """Lives as long as the node that it is put on."""


def fails(*ignored: Any) -> None:
    raise LookupError("in the hook")


@pytest.mark.parametrize("end", ["well", "error", "callback error"])
def test_nothing_is_kept_after_the_call(end: str) -> None:
    def program(rec: Recorder) -> None:
        watched: dict[str, weakref.ref[Any]] = {}

        def step() -> None:
            x = leaf(3)
            y = x.exp()

            def hook(grad: Tensor) -> None:
                watched["gradient"] = weakref.ref(grad)

                def callback() -> None:
                    if end == "callback error":
                        fails()

                watched["callback"] = weakref.ref(callback)
                Variable._execution_engine.queue_callback(callback)

            y.register_hook(hook)
            if end == "error":
                x.register_hook(fails)
            assert y.grad_fn is not None
            mark = Mark()
            y.grad_fn.metadata["mark"] = mark
            watched.update(x=weakref.ref(x), y=weakref.ref(y), hook=weakref.ref(hook), node=weakref.ref(mark))
            try:
                y.sin().sum().backward()
            except LookupError:
                rec.say("error")

        step()
        gc.collect()
        rec.say(*[f"{name} {'kept' if ref() is not None else 'gone'}" for name, ref in sorted(watched.items())])

    assert not any("kept" in line for line in compare(program).log)


def test_gradients_returned_belong_to_the_caller_alone() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.exp()
        refs = [weakref.ref(g) for g in torch.autograd.grad(y.sum(), (x, y))]
        gc.collect()
        rec.say([ref() is None for ref in refs])

    compare(program)


def plain(x: Tensor) -> None:
    x.sin().exp().sum().backward()


def with_hooks(x: Tensor) -> None:
    y = x.sin()
    y.register_hook(lambda g: g * 2)
    y.retain_grad()
    x.register_post_accumulate_grad_hook(lambda p: None)
    y.exp().sum().backward()


def with_error(x: Tensor) -> None:
    y = x.sin()
    y.register_hook(fails)
    with pytest.raises(LookupError):
        y.exp().sum().backward()


def with_double_backward(x: Tensor) -> None:
    (g,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
    g.sum().backward()


@pytest.mark.parametrize("step", [plain, with_hooks, with_error, with_double_backward])
def test_repeated_calls_leave_no_python_objects(step: Callable[[Tensor], None]) -> None:
    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    with retrograd.enable("schedule"):
        for _ in range(3):
            step(leaf(3))
        before = tensors()
        with counting() as calls:
            for _ in range(50):
                step(leaf(3))
        assert tensors() <= before
    assert calls.previous == 0 and calls.hits == calls.schedule > 0
