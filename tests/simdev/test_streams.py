"""Backward over streams and devices: no missing synchronization, and the stock engine's gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import simdev
import torch
from device_oracle import BACKENDS, DeviceRecorder, check, compare, expected_paths, run, run_without_races
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
        side, far = new_stream(0), new_stream(1)
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            share(inner, own, side)
            with side, far:
                y = (inner * 3).to("sim:1") * 2
        torch.autograd.backward(y, grad.to("sim:1"))
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


PROGRAMS: list[DeviceProgram] = [
    gradient_from_another_stream,
    made_on_one_stream_used_on_another,
    accumulated_across_streams,
    leaves_on_streams_of_their_own,
    two_devices_four_streams,
    several_roots_on_two_devices,
    gradients_that_are_captured,
    calls_that_accumulate,
    retained_graph,
    hooks_on_streams,
    backward_inside_a_function,
    backward_inside_a_hook,
    reentrant_checkpoint,
]
