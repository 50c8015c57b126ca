"""Calls on several devices: each device's steps on a thread of its own, the stock engine's."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from programs import integers
from torch import Tensor

import retrograd

BACKENDS = ["schedule", "inductor"]


def towers(on_grad: Callable[[int, int], object], layers: int = 4) -> tuple[Tensor, list[Tensor]]:
    """The loss of a tower on each of two devices, and their weights; `on_grad(device, layer)` is called in hooks."""
    results, weights = [], []
    for device in range(2):
        x = integers(device, 4, 4, seed=device)
        for layer in range(layers):
            weights.append(integers(device, 4, 4, seed=layer).requires_grad_())
            x = (x @ weights[-1]).relu()
            x.register_hook(lambda grad, d=device, i=layer: (on_grad(d, i), None)[1])
        results.append(x.sum())
    return results[0] + results[1].to("sim:0"), weights


def values(weights: list[Tensor]) -> list[Tensor]:
    return [weight.grad.cpu() for weight in weights]  # type: ignore[union-attr]


def schedule_calls() -> int:
    return retrograd.stats()["calls"]["schedule"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_run_on_their_devices_threads(backend: str) -> None:
    def threads() -> dict[int, set[int]]:
        seen: dict[int, set[int]] = {0: set(), 1: set()}
        loss, _ = towers(lambda device, layer: seen[device].add(threading.get_ident()))
        loss.backward()
        return seen

    with retrograd.disable():
        want = threads()
    before = schedule_calls()
    with retrograd.enable(backend):
        got = threads()
    assert schedule_calls() == before + 1
    assert got == want and len(want[0]) == len(want[1]) == 1 and want[0] != want[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_of_two_devices_meet(backend: str) -> None:
    """Layer by layer the two hooks wait for each other: neither device's steps may wait for the other's to be over."""
    meeting = threading.Barrier(2)
    loss, weights = towers(lambda device, layer: meeting.wait(20))
    before = schedule_calls()
    with retrograd.enable(backend):
        loss.backward()
    assert schedule_calls() == before + 1
    got = values(weights)
    loss, weights = towers(lambda device, layer: None)
    with retrograd.disable():
        loss.backward()
    for ours, stock in zip(got, values(weights), strict=True):
        assert torch.equal(ours, stock)


def test_calls_of_several_threads_share_the_devices_threads() -> None:
    """Segments never wait in the middle, so calls cannot block one another."""
    results: list[list[Tensor]] = []

    def train() -> None:
        with retrograd.enable("schedule"):
            for _ in range(25):
                loss, weights = towers(lambda device, layer: None)
                loss.backward()
        results.append(values(weights))

    before = schedule_calls()
    threads = [threading.Thread(target=train, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert schedule_calls() == before + 100
    for got in results[1:]:
        for a, b in zip(got, results[0], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("device", [0, 1])
def test_an_error_on_one_device_ends_the_call(device: int) -> None:
    def raises(on: int, layer: int) -> None:
        if (on, layer) == (device, 1):
            raise ValueError("on purpose")

    loss, weights = towers(raises)
    with retrograd.enable("schedule"), pytest.raises(ValueError, match="on purpose"):
        loss.backward()
    first = weights[4 * device]
    assert first.grad is None
    loss, weights = towers(lambda device, layer: None)
    with retrograd.enable("schedule"):
        loss.backward()
    assert all(weight.grad is not None for weight in weights)


def test_a_call_inside_a_hook_on_each_device() -> None:
    inner: dict[int, Tensor] = {d: integers(d, 3, seed=7).requires_grad_() for d in range(2)}

    def nested(device: int, layer: int) -> None:
        with torch.enable_grad():
            other = integers(1 - device, 3, seed=8).requires_grad_()
            (inner[device] * 2 + other.to(f"sim:{device}")).sum().backward()

    before = retrograd.stats()
    loss, weights = towers(nested)
    with retrograd.enable("schedule"):
        loss.backward()
    after = retrograd.stats()
    assert after["nested_calls"] - before["nested_calls"] == 8
    assert after["calls"]["previous"] == before["calls"]["previous"]
    for tensor in inner.values():
        assert tensor.grad is not None and tensor.grad.cpu().tolist() == [8.0] * 3
    assert all(weight.grad is not None for weight in weights)


def test_post_hook_that_drops_a_gradient_between_devices() -> None:
    """What the step on the other device would have been sent never comes; the stock engine's error says so."""

    def run() -> str:
        x, y = integers(0, 3, seed=1).requires_grad_(), integers(1, 3, seed=2).requires_grad_()
        z = x * y.to("sim:0")
        z.grad_fn.register_hook(lambda grad_inputs, grad_outputs: (grad_inputs[0], None))  # type: ignore[union-attr]
        z.sum().backward()
        return f"{x.grad.cpu().tolist() if x.grad is not None else None} {y.grad is None}"

    with retrograd.disable():
        want = run()
    with retrograd.enable("schedule"):
        assert run() == want
