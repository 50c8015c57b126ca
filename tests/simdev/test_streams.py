"""Backward over streams and devices: no missing synchronization, and the stock engine's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import simdev
import torch
from device_oracle import DeviceRecorder, compare, run
from oracle import run_threads
from programs import current_stream, integers, leaf, new_stream, share
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import retrograd

DeviceProgram = Callable[[DeviceRecorder], None]


def gradient_from_another_stream(rec: DeviceRecorder) -> None:
    a = new_stream(0)
    w = leaf(a, 4)
    with a:
        y = w * 3
    grad = integers(0, 4, seed=1) * 2
    grad.record_stream(a)
    rec.backward_begins()
    y.backward(grad)
    rec.grads(w)


def made_on_one_stream_used_on_another(rec: DeviceRecorder) -> None:
    a, b = new_stream(0), new_stream(0)
    w = leaf(a, 4, 4)
    with a:
        y = w * w
    share(y, a, b)
    with b:
        z = y * 3
    rec.backward_begins()
    z.backward(integers(0, 4, 4, seed=1))
    rec.grads(w)


def accumulated_across_streams(rec: DeviceRecorder) -> None:
    a, b, c = new_stream(0), new_stream(0), new_stream(0)
    w = leaf(a, 4)
    with a:
        y = w * 2
    share(y, a, b, c)
    with b:
        u = y * 3
    with c:
        v = y * y
    share(u, b, current_stream(0))
    share(v, c, current_stream(0))
    z = u * v
    rec.backward_begins()
    z.backward(integers(0, 4, seed=1))
    rec.grads(w)


def leaves_on_streams_of_their_own(rec: DeviceRecorder) -> None:
    streams = [new_stream(0) for _ in range(3)]
    leaves = [leaf(stream, 4, seed=i) for i, stream in enumerate(streams)]
    z = integers(0, 4, seed=9)
    for stream, w in zip(streams, leaves, strict=True):
        with stream:
            y = w * 2
        share(y, stream, current_stream(0))
        z = z * y
    rec.backward_begins()
    z.backward(integers(0, 4, seed=10))
    rec.grads(*leaves)


def two_devices_four_streams(rec: DeviceRecorder) -> None:
    a, b = new_stream(0), new_stream(0)
    c, d = new_stream(1), new_stream(1)
    w, v = leaf(a, 4, 4), leaf(c, 4, 4, seed=1)
    with a, c:
        h = (w @ w).relu()
        h1 = h.to("sim:1")
        y = h1 @ v
    share(y, c, d)
    d.wait_stream(a)
    b.wait_stream(a)
    with d, b:
        back = (y * 2).to("sim:0")
    share(h, a, b)
    with b:
        z = back * h
    rec.backward_begins()
    z.backward(integers(0, 4, 4, seed=2))
    rec.grads(w, v)


def several_roots_on_two_devices(rec: DeviceRecorder) -> None:
    a, b = new_stream(0), new_stream(1)
    w, v = leaf(a, 4), leaf(b, 4, seed=1)
    with a:
        y = w * w
    with b:
        z = v * v
    rec.backward_begins()
    torch.autograd.backward([y, z], [integers(0, 4, seed=2), integers(1, 4, seed=3)])
    rec.grads(w, v)


def gradients_that_are_captured(rec: DeviceRecorder) -> None:
    a, b = new_stream(0), new_stream(0)
    w, v = leaf(a, 4), leaf(b, 4, seed=1)
    with a:
        y = w * w
    share(y, a, b)
    with b:
        z = y * v
    rec.backward_begins()
    rec.say(torch.autograd.grad(z, [w, y, v], integers(0, 4, seed=2)))


def captured_on_two_devices(rec: DeviceRecorder) -> None:
    """A leaf, and inner tensors: one whose node runs, and one of whose node only the tensor's hook does."""
    a, c, d = new_stream(0), new_stream(1), new_stream(1)
    w, v = leaf(a, 4), leaf(c, 4, seed=1)
    with a, c:
        h = w * w
        y = h.to("sim:1") * v
    share(y, c, d)
    with d:
        z = y * 3
    gradient = integers(1, 4, seed=2)
    gradient.record_stream(d)
    h.register_hook(lambda grad: grad * 2)
    rec.backward_begins()
    rec.say(torch.autograd.grad(z, [h, v, y], gradient))


def calls_that_accumulate(rec: DeviceRecorder) -> None:
    """The caller reads and changes gradients between calls, on its own stream, and waits for nothing."""
    a, b = new_stream(0), new_stream(0)
    w = leaf(a, 4)
    rec.backward_begins()
    for seed in range(3):
        with a:
            y = w * w
        share(y, a, b)
        with b:
            z = y * 2
        z.backward(integers(0, 4, seed=seed))
        rec.grads(w)
        w.grad.mul_(2)


def retained_graph(rec: DeviceRecorder) -> None:
    a, b = new_stream(0), new_stream(0)
    w = leaf(a, 4)
    with a:
        y = w * w
    share(y, a, b)
    with b:
        z = y * y
    rec.backward_begins()
    z.backward(integers(0, 4, seed=1), retain_graph=True)
    rec.grads(w)
    z.backward(integers(0, 4, seed=2))
    rec.grads(w)


def hooks_on_streams(rec: DeviceRecorder) -> None:
    """Hooks find their node's stream current, and what they return is waited for like what a node returns."""
    a, b = new_stream(0), new_stream(0)
    ids = {a.stream_id: "a", b.stream_id: "b", current_stream(0).stream_id: "caller's"}

    def hook(name: str) -> Callable[[Tensor], Tensor]:
        def doubled(grad: Tensor) -> Tensor:
            rec.say(name, "on", ids[current_stream(0).stream_id], grad)
            return grad * 2

        return doubled

    w = leaf(a, 4)
    with a:
        y = w * w
    share(y, a, b)
    with b:
        z = y * 3
    w.register_hook(hook("w"))
    y.register_hook(hook("y"))
    z.register_hook(hook("z"))
    w.register_post_accumulate_grad_hook(lambda p: rec.say("accumulated", p.grad))
    rec.backward_begins()
    z.backward(integers(0, 4, seed=1))
    rec.grads(w)


class NestedOnStreams(torch.autograd.Function):
    """Its backward makes a graph on another device and on another stream, and runs it from its own stream."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        own = current_stream(0)
        side, far = new_stream(0, other_than=own), new_stream(1)
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            share(inner, own, side)
            with side, far:
                y = (inner * 3).to("sim:1") * 2
        torch.autograd.backward(y, grad.to("sim:1"))
        inner.grad.record_stream(own)
        return inner.grad * grad


def backward_inside_a_function(rec: DeviceRecorder) -> None:
    a, b = new_stream(0), new_stream(0)
    w = leaf(a, 4)
    with a:
        y = NestedOnStreams.apply(w * w)
    share(y, a, b)
    with b:
        z = y * 3
    rec.backward_begins()
    z.backward(integers(0, 4, seed=1))
    rec.grads(w)


class NestedDeeply(torch.autograd.Function):
    """Its backward runs one like it, `depth` levels down, each with a root on a stream that is not its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
        ctx.depth = depth
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.depth == 0:
            return grad * 1, None
        own = current_stream(0)
        side = new_stream(0, other_than=own)
        inner = grad.detach() * 1
        with torch.enable_grad():
            y = NestedDeeply.apply(inner.requires_grad_(), ctx.depth - 1)
            share(y, own, side)
            with side:
                z = y * 1
        made_here = grad * 1
        made_here.record_stream(side)
        z.backward(made_here)
        return inner.grad, None


def backward_nested_past_a_change_of_threads(rec: DeviceRecorder) -> None:
    a = new_stream(0)
    w = leaf(a, 4)
    with a:
        y = NestedDeeply.apply(w, 64)  # the stock engine changes threads at 60
    grad = integers(0, 4, seed=1)
    grad.record_stream(a)
    rec.backward_begins()
    y.backward(grad)
    rec.grads(w)


def backward_inside_a_hook(rec: DeviceRecorder) -> None:
    a, b = new_stream(0), new_stream(0)
    w = leaf(a, 4)
    with a:
        y = w * w
    share(y, a, b)

    def hook(grad: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = grad.detach().requires_grad_()
            NestedOnStreams.apply(inner).backward(grad)
        rec.say("inner", inner.grad)
        return inner.grad

    y.register_hook(hook)
    with b:
        z = y * 3
    rec.backward_begins()
    z.backward(integers(0, 4, seed=1))
    rec.grads(w)


def reentrant_checkpoint(rec: DeviceRecorder) -> None:
    a, b = new_stream(0), new_stream(0)
    w, v = leaf(a, 4), leaf(a, 4, seed=1)
    with a:
        x = w * 2
    share(x, a, b)
    share(v, a, b)
    with b:
        z = checkpoint(lambda t: (t * v) * t, x, use_reentrant=True, preserve_rng_state=False)
    rec.backward_begins()
    z.backward(integers(0, 4, seed=2))
    rec.grads(w, v)


def everything_on_the_callers_streams(rec: DeviceRecorder) -> None:
    with new_stream(0), new_stream(1):
        w = integers(0, 4, 4).requires_grad_()
        v = integers(1, 4, 4, seed=1).requires_grad_()
        rec.backward_begins()
        for seed in range(2):
            y = (w @ w).relu().to("sim:1") @ v
            y.backward(integers(1, 4, 4, seed=seed))
            rec.grads(w, v)


# Programs, and how many of their calls run on the caller's streams alone, so that a compiler function can have them.
PROGRAMS: list[tuple[DeviceProgram, int]] = [
    (gradient_from_another_stream, 0),
    (made_on_one_stream_used_on_another, 0),
    (accumulated_across_streams, 0),
    (leaves_on_streams_of_their_own, 0),
    (two_devices_four_streams, 0),
    (gradients_that_are_captured, 0),
    (captured_on_two_devices, 0),
    (calls_that_accumulate, 0),
    (retained_graph, 0),
    (hooks_on_streams, 0),
    (backward_inside_a_function, 0),
    (backward_inside_a_hook, 1),
    (backward_nested_past_a_change_of_threads, 0),
    (reentrant_checkpoint, 1),
    (everything_on_the_callers_streams, 2),
]

# Waits that nobody misses: libtorch waits twice for a stream that sends two gradients to one place, and the caller
# waits for streams that another one waited for.
NOT_NEEDED = {
    accumulated_across_streams: 2,
    two_devices_four_streams: 1,
    gradients_that_are_captured: 1,
    retained_graph: 4,
}
TOO_MANY_OR_NONE = {backward_nested_past_a_change_of_threads, everything_on_the_callers_streams}


def name(value: Any) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("program", "captured"), PROGRAMS, ids=name)
def test_as_the_stock_engine_and_without_a_race(program: DeviceProgram, captured: int) -> None:
    oracle = compare(program, captured=captured)
    stock = run(program, None)  # the same, with kernels that run late
    assert not oracle.reports and not stock.reports


@pytest.mark.parametrize("program", [program for program, _ in PROGRAMS if program not in TOO_MANY_OR_NONE], ids=name)
def test_each_wait_that_is_left_out_is_missed(program: DeviceProgram) -> None:
    complete = run(program, "schedule")
    assert complete.waits and not complete.reports
    unmissed = [wait for n, wait in enumerate(complete.waits) if not run(program, "schedule", drop=n).reports]
    assert len(unmissed) == NOT_NEEDED.get(program, 0), (unmissed, complete.waits)


def test_gradients_of_gradients() -> None:
    def program(rec: DeviceRecorder) -> None:
        a, b = new_stream(0), new_stream(0)
        w = leaf(a, 4)
        with a:
            y = w * w * w
        share(y, a, b)
        with b:
            z = y * y
        rec.backward_begins()
        (first,) = torch.autograd.grad(z, w, integers(0, 4, seed=1), create_graph=True)
        rec.say(first)
        share(first, current_stream(0), b)
        with b:
            second = first * 2
        second.backward(integers(0, 4, seed=2))
        rec.grads(w)

    compare(program, create_graph=1)


# --- Where the stock engine is not in order ---


def check_where_stock_races(program: DeviceProgram, kind: str) -> None:
    """The stock engine's run is reported for `kind`; retrograd's are not, and give the right values."""
    stock = run(program, None)
    assert {report.partition(":")[0] for report in stock.reports} == {kind}, stock.reports
    compare(program)


def test_a_gradient_that_is_still_being_read_is_not_added_to_in_place() -> None:
    """The host has dropped its references to y's first gradient when the second one comes, but a kernel of the slow
    stream has yet to read it."""

    def program(rec: DeviceRecorder) -> None:
        main, fast, slow = new_stream(0), new_stream(0), new_stream(0)
        x, y = leaf(slow, 4), leaf(fast, 4, seed=1)
        with fast:
            b = y * 2
            c = b * 5
        with slow:
            a = x * 3
        share(b, fast, main)
        share(a, slow, main)
        with main:
            z = (a + b) * 2
        gradients = integers(0, 4, seed=2), integers(0, 4, seed=3)
        for gradient in gradients:
            gradient.record_stream(main)
            gradient.record_stream(fast)
        simdev.set_delay(5000, slow)
        rec.backward_begins()
        torch.autograd.backward([z, c], gradients)
        rec.grads(x, y)

    check_where_stock_races(program, "write after read")


def test_the_callers_gradients_are_waited_for_on_every_device() -> None:
    """The stock engine's root of several roots has one stream, the caller's on one device."""
    check_where_stock_races(several_roots_on_two_devices, "read after write")


# --- Several threads ---


def test_threads_with_streams_of_their_own() -> None:
    def work(device: int) -> None:
        with retrograd.enable("schedule"), new_stream(device):
            for seed in range(10):
                other = new_stream(device)
                w = integers(device, 4, seed=seed).requires_grad_()
                y = w * w
                share(y, current_stream(device), other)
                with other:
                    z = y * 2
                z.backward(integers(device, 4, seed=seed + 1))
                results[device].append((w.detach(), w.grad * 1, seed))

    results: list[list[tuple[Tensor, Tensor, int]]] = [[] for _ in range(simdev.DEVICES)]
    before = retrograd.stats()["calls"]["schedule"]
    run_threads([lambda device=device: work(device) for device in range(simdev.DEVICES)])
    seen = simdev.seen()
    assert not seen.reports and seen.host_syncs == 0
    assert retrograd.stats()["calls"]["schedule"] - before == 10 * simdev.DEVICES
    simdev.synchronize()
    for w, grad, seed in (result for of_device in results for result in of_device):
        gradient = integers(w.device.index, 4, seed=seed + 1)
        torch.testing.assert_close(grad.cpu(), w.cpu() * 4 * gradient.cpu())
