"""What the threads of several devices share in one call: none of its parts can be left unguarded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import simdev
import torch
from oracle import run_threads
from programs import integers
from torch import Tensor

import retrograd


@pytest.fixture(autouse=True)
def quick_kernels(clean: None) -> Iterator[None]:
    simdev.set_delay(0)
    yield
    simdev.synchronize()


def lanes(loss: Tensor) -> None:
    before = retrograd.stats()["calls"]["schedule"]
    try:
        with retrograd.enable("schedule"):
            loss.backward()
    finally:
        assert retrograd.stats()["calls"]["schedule"] == before + 1


def test_two_devices_add_to_one_gradient_all_the_time() -> None:
    """Each device's thread sends a hundred gradients to the leaf's step while the other does the same."""
    factors = range(1, 101)
    for _ in range(20):
        x = integers(0, 3, seed=1).requires_grad_()
        here = x * 0
        there = here.detach().to("sim:1")
        for factor in factors:
            here = here + x * factor
            there = there + x.to("sim:1") * factor
        lanes(here.sum() + there.sum().to("sim:0"))
        assert x.grad is not None and x.grad.cpu().tolist() == [2.0 * sum(factors)] * 3


def test_a_hook_on_each_device_finds_the_task_described_once() -> None:
    """Twice, and nodes would wait for twice as many edges as lead to them."""
    orders: list[list[str]] = []

    def hook(grad: Tensor) -> None:
        orders.append([node.name() for node in torch._C._current_graph_task_execution_order()])

    x, y = integers(0, 3, seed=1).requires_grad_(), integers(1, 3, seed=2).requires_grad_()
    a, b = (x * 2).sin(), (y * 3).cos()
    a.register_hook(hook)
    b.register_hook(hook)
    with torch.autograd.set_multithreading_enabled(False):  # else nobody may ask for the order
        lanes((a.exp() + b.exp().to("sim:0")).sum())
    assert len(orders) == 2 and orders[0] == orders[1]
    assert {"SumBackward0", "ToCopyBackward0", "SinBackward0", "CosBackward0"} <= set(orders[0])


def test_a_large_task_is_described_while_another_device_goes_on() -> None:
    """A hook has one device's thread describe the graph, while the other's ends one segment after the other."""
    for _ in range(20):
        x, y = integers(0, 2, seed=1).requires_grad_(), integers(1, 2, seed=2).requires_grad_()
        many, hooked = x * 0, y * 1
        for _ in range(100):
            many = many + x.to("sim:1").to("sim:0")
        for _ in range(500):
            hooked = hooked + y
        hooked.register_hook(lambda grad: None)  # its turn on its device is first
        lanes(many.sum() + hooked.sum().to("sim:0"))
        assert x.grad is not None and x.grad.cpu().tolist() == [100.0] * 2
        assert y.grad is not None and y.grad.cpu().tolist() == [501.0] * 2


def test_steps_that_never_come_on_two_devices_at_once() -> None:
    """Neighbours in the schedule are on different devices, so both threads write to the same words all the time."""
    for steps in [2000] * 5 + [5] * 200:
        x, y = integers(0, 2, seed=1).requires_grad_(), integers(1, 2, seed=2).requires_grad_()
        a, b = x, y
        for _ in range(steps):
            a, b = a + x, b + y
        a, b = a * 2, b * 2
        simdev.send_nothing(a)
        simdev.send_nothing(b)
        lanes(a.sum() + b.sum().to("sim:0"))
        assert x.grad is None and y.grad is None


def test_a_step_that_never_comes_though_another_device_has_sent_something() -> None:
    def run() -> str:
        x = integers(0, 2, seed=1).requires_grad_()
        here, there = x * 2, x.to("sim:1") * 3
        simdev.send_nothing(here)
        with pytest.raises(RuntimeError) as caught:
            (here + there.to("sim:0")).sum().backward()
        assert x.grad is None
        return str(caught.value)

    with retrograd.disable():
        want = run()
    before = retrograd.stats()["calls"]["schedule"]
    with retrograd.enable("schedule"):
        assert run() == want
    assert retrograd.stats()["calls"]["schedule"] == before + 1


def test_a_nested_call_that_fails_while_a_step_on_the_other_device_needs_its_thread() -> None:
    """The nested call waits for that step on a device's thread, and so the step must do without that thread."""
    begun, raised = threading.Event(), threading.Event()
    happened: list[str] = []

    def fail(grad: Tensor) -> None:
        assert begun.wait(20)
        raised.set()
        raise ValueError("on purpose")

    def on_the_other(grad: Tensor) -> None:
        begun.set()
        assert raised.wait(20)
        time.sleep(0.5)  # until the error has left the hook, and the engine
        with torch.enable_grad():
            u, v = integers(0, 3, seed=5).requires_grad_(), integers(1, 3, seed=6).requires_grad_()
            ((u * 2).sum() + (v * 3).sum().to("sim:0")).backward()
        assert u.grad is not None and v.grad is not None
        happened.append(f"{u.grad.cpu().tolist()} {v.grad.cpu().tolist()}")

    def on_the_first(grad: Tensor) -> None:
        with torch.enable_grad():
            a = integers(0, 3, seed=1).requires_grad_() * 2
            b = integers(1, 3, seed=2).requires_grad_() * 2
            a.register_hook(fail)
            b.register_hook(on_the_other)
            with pytest.raises(ValueError, match="on purpose"):
                (a.sum() + b.sum().to("sim:0")).backward()
        happened.append("failed")

    def outermost() -> None:
        c = integers(0, 3, seed=3).requires_grad_() * 2
        c.register_hook(on_the_first)
        with retrograd.enable("schedule"):
            (c.sum() + (integers(1, 3, seed=4).requires_grad_() * 2).sum().to("sim:0")).backward()
        happened.append("ended")

    before = retrograd.stats()
    run_threads([outermost], 60)
    after = retrograd.stats()
    assert happened == ["[2.0, 2.0, 2.0] [3.0, 3.0, 3.0]", "failed", "ended"]
    assert after["calls"]["schedule"] - before["calls"]["schedule"] == 3
    assert after["nested_calls"] - before["nested_calls"] == 2


@pytest.mark.parametrize("caller_is_busy", [False, True])
def test_a_call_that_fails_on_one_device_waits_for_the_step_on_the_other(caller_is_busy: bool) -> None:
    """The stock engine returns at once when the caller has something to do; what its threads then use outlives it."""
    begun, raised = threading.Event(), threading.Event()
    ran: list[int] = []

    def fail(grad: Tensor) -> None:
        assert begun.wait(20)
        raised.set()
        raise ValueError("on purpose")

    def go_on(layer: int) -> None:
        begun.set()
        assert raised.wait(20)
        time.sleep(1)  # until the error has left the hook, and the engine
        ran.append(layer)

    def on_the_caller(grad: Tensor) -> None:
        assert raised.wait(20)
        time.sleep(0.3)

    x, y = integers(0, 3, seed=1).requires_grad_(), integers(1, 3, seed=2).requires_grad_()
    a, b = x * 2, y
    a.register_hook(fail)
    for layer in range(4):
        b = b * 2
        b.register_hook(lambda grad, layer=layer: go_on(layer))
    loss = a.sum() + b.sum().to("sim:0")
    if caller_is_busy:
        c = torch.ones(3, dtype=torch.float64, requires_grad=True) * 2
        c.register_hook(on_the_caller)
        loss = loss + c.sum().to("sim:0")
    with pytest.raises(ValueError, match="on purpose"):
        lanes(loss)
    assert ran == [3]  # and no further one
