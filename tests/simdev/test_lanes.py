"""Calls on several devices: each device's steps on a thread of its own, the stock engine's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from programs import integers
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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


def backward(loss: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    loss.backward()
    return values(list(weights))


def backward_of_inputs(loss: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    loss.backward(inputs=weights)
    return values(list(weights))


def grad(loss: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return [gradient.cpu() for gradient in torch.autograd.grad(loss, weights)]


CALLS = [backward, backward_of_inputs, grad]
Call = Callable[[Tensor, Sequence[Tensor]], list[Tensor]]


def schedule_calls() -> int:
    return retrograd.stats()["calls"]["schedule"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_run_on_their_devices_threads(backend: str, call: Call) -> None:
    def threads() -> dict[int, set[int]]:
        seen: dict[int, set[int]] = {0: set(), 1: set()}
        loss, weights = towers(lambda device, layer: seen[device].add(threading.get_ident()))
        call(loss, weights)
        return seen

    with retrograd.disable():
        want = threads()
    before = schedule_calls()
    with retrograd.enable(backend):
        got = threads()
    assert schedule_calls() == before + 1
    assert got == want and len(want[0]) == len(want[1]) == 1 and want[0] != want[1]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_of_two_devices_meet(backend: str, call: Call) -> None:
    """Layer by layer the two hooks wait for each other: neither device's steps may wait for the other's to be over."""
    meeting = threading.Barrier(2)
    loss, weights = towers(lambda device, layer: meeting.wait(20))
    before = schedule_calls()
    with retrograd.enable(backend):
        got = call(loss, weights)
    assert schedule_calls() == before + 1
    loss, weights = towers(lambda device, layer: None)
    with retrograd.disable():
        want = call(loss, weights)
    for ours, stock in zip(got, want, strict=True):
        assert torch.equal(ours, stock)


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_several_threads_share_the_devices_threads(call: Call) -> None:
    """Segments never wait in the middle, so calls cannot block one another."""
    results: list[list[Tensor]] = []

    def train() -> None:
        with retrograd.enable("schedule"):
            for _ in range(25):
                loss, weights = towers(lambda device, layer: None)
                got = call(loss, weights)
        results.append(got)

    before = schedule_calls()
    threads = [threading.Thread(target=train, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert schedule_calls() == before + 100 and len(results) == 4
    for got in results[1:]:
        for a, b in zip(got, results[0], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("device", [0, 1])
def test_an_error_on_one_device_ends_the_call(device: int, call: Call) -> None:
    def raises(on: int, layer: int) -> None:
        if (on, layer) == (device, 1):
            raise ValueError("on purpose")

    loss, weights = towers(raises)
    before = schedule_calls()
    with retrograd.enable("schedule"), pytest.raises(ValueError, match="on purpose"):
        call(loss, weights)
    first = weights[4 * device]
    assert first.grad is None
    loss, weights = towers(lambda device, layer: None)
    with retrograd.enable("schedule"):
        assert len(call(loss, weights)) == len(weights)
    assert schedule_calls() == before + 2


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


# --- grad() and inputs= ---


class Graph:
    """Two devices that send gradients to and fro; every tensor of it is there to be asked for."""

    def __init__(self, on_grad: Callable[[str, Tensor], object] = lambda name, grad: None) -> None:
        self.w = integers(0, 4, seed=1).requires_grad_()
        self.v = integers(1, 4, seed=2).requires_grad_()
        self.unused = integers(1, 4, seed=3).requires_grad_()
        self.h = self.w * self.w
        self.k = self.h.to("sim:1") * self.v
        self.l = self.v.relu()
        self.m = (self.k * self.l).to("sim:0") * self.h
        for name in ("w", "v", "h", "k", "l", "m"):
            getattr(self, name).register_hook(lambda grad, n=name: (on_grad(n, grad), None)[1])
        self.loss = self.m.sum() + (self.l * 3).sum().to("sim:0")

    def named(self, names: str) -> list[Tensor]:
        return [getattr(self, "unused" if name == "u" else name) for name in names]


def described(gradients: Sequence[Tensor | None]) -> list[Any]:
    return [None if gradient is None else (str(gradient.device), gradient.cpu().tolist()) for gradient in gradients]


def as_stock(program: Callable[[], Any], calls: int = 1) -> Any:
    """What `program` returns on the schedule, which must be what it returns on the stock engine."""
    with retrograd.disable():
        want = program()
    before = retrograd.stats()
    for backend in BACKENDS:
        with retrograd.enable(backend):
            assert program() == want
    after = retrograd.stats()
    assert after["calls"]["schedule"] - before["calls"]["schedule"] == calls * len(BACKENDS)
    assert after["calls"]["previous"] == before["calls"]["previous"]
    return want


@pytest.mark.parametrize("names", ["wv", "vw", "h", "k", "l", "hv", "kl", "wk", "lkhvw", "ww", "vhv"])
def test_results_hooks_and_threads_of_grad(names: str) -> None:
    """Leaves and inner tensors of either device, in the order asked for; which hooks ran, on which thread."""

    def program() -> Any:
        seen: dict[str, list[Any]] = {}
        graph = Graph(lambda name, grad: seen.setdefault(name, []).append((threading.get_ident(), described([grad]))))
        got = described(torch.autograd.grad(graph.loss, graph.named(names)))
        return got, seen, described(tensor.grad for tensor in graph.named("wvu"))

    got, seen, left = as_stock(program)
    assert len(got) == len(names) and set(names) <= set(seen) and left == [None] * 3


@pytest.mark.parametrize("names", ["w", "v", "vw", "wu", "ww"])
def test_backward_fills_only_what_inputs_names(names: str) -> None:
    def program() -> Any:
        seen: dict[str, set[int]] = {}
        graph = Graph(lambda name, grad: seen.setdefault(name, set()).add(threading.get_ident()))
        graph.loss.backward(inputs=graph.named(names))
        return seen, described(tensor.grad for tensor in graph.named("wvu"))

    _, left = as_stock(program)
    assert [gradient is not None for gradient in left] == ["w" in names, "v" in names, False]


def test_inputs_that_are_not_reached() -> None:
    def program() -> Any:
        graph = Graph()
        allowed = torch.autograd.grad(graph.loss, graph.named("uvw"), retain_graph=True, allow_unused=True)
        zeros = torch.autograd.grad(graph.loss, graph.named("uv"), retain_graph=True, materialize_grads=True)
        with pytest.raises(RuntimeError, match="at index 1 appears to not have been used") as refused:
            torch.autograd.grad(graph.loss, graph.named("vu"))
        with pytest.raises(RuntimeError, match="second time") as freed:
            torch.autograd.grad(graph.loss, graph.named("v"))
        return described(allowed), described(zeros), str(refused.value), str(freed.value)

    allowed, zeros, *_ = as_stock(program, calls=4)
    assert allowed[0] is None and zeros[0] == ("sim:1", [0.0] * 4)


@pytest.mark.parametrize("names", ["wv", "hk"])
def test_gradients_of_gradients(names: str) -> None:
    def program() -> Any:
        graph = Graph()
        first = torch.autograd.grad(graph.loss, graph.named(names), create_graph=True)
        total = sum((gradient * gradient).sum().to("sim:0") for gradient in first)
        second = torch.autograd.grad(total, graph.named("vw"), retain_graph=True)
        total.backward(inputs=graph.named("w"))
        return described(first), described(second), described(tensor.grad for tensor in graph.named("wv"))

    as_stock(program, calls=3)


def test_several_roots_on_two_devices() -> None:
    def program() -> Any:
        graph = Graph()
        roots = [graph.m, graph.l, graph.k]
        gradients = [integers(root.device.index, 4, seed=i) for i, root in enumerate(roots)]
        return described(torch.autograd.grad(roots, graph.named("vlw"), gradients))

    as_stock(program)


def test_what_a_compiler_function_cannot_have_runs_on_the_devices_threads() -> None:
    def program() -> Any:
        seen: dict[str, set[int]] = {}
        graph = Graph(lambda name, grad: seen.setdefault(name, set()).add(threading.get_ident()))
        return described(torch.autograd.grad(graph.loss, graph.named("wvkl"), create_graph=True)), seen

    with retrograd.disable():
        want = program()
    before = retrograd.stats()
    with retrograd.enable(lambda module: module):
        assert program() == want
    after = retrograd.stats()
    assert after["schedule_reasons"]["create_graph"] == before["schedule_reasons"]["create_graph"] + 1
    assert after["calls"]["schedule"] == before["calls"]["schedule"] + 1


class SaysWhatIsNeeded(torch.autograd.Function):
    """Says on each device what the graph task tells of the call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, say: Callable[[Any], None], ask: Callable[[], list[Any]]) -> Tensor:
        ctx.say, ctx.ask = say, ask
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = torch._C._will_engine_execute_node
        ctx.say((ctx.needs_input_grad, [needed(node) for node in ctx.ask()]))
        return grad, grad, None, None


@pytest.mark.parametrize("names", ["wv", "x", "y", "wx", "vy"])
@pytest.mark.parametrize("call", [backward_of_inputs, grad])
def test_nodes_are_told_what_is_needed(names: str, call: Call) -> None:
    def program() -> Any:
        said: dict[int, Any] = {}
        leaves = {name: integers("wxvy".index(name) // 2, 4, seed=1).requires_grad_() for name in "wxvy"}
        a, b, c, d = ((leaves[name] * 2) for name in "wxvy")
        nodes = [tensor.grad_fn for tensor in (a, b, c, d)]
        p = SaysWhatIsNeeded.apply(a, b, lambda what: said.update({0: what}), lambda: nodes)
        q = SaysWhatIsNeeded.apply(c, d, lambda what: said.update({1: what}), lambda: nodes)
        loss = p.sum() + q.sum().to("sim:0")
        got = described(call(loss, [leaves[name] for name in names]))
        return got, said

    for _ in range(10):  # both devices ask at the same time
        as_stock(program)


@pytest.mark.parametrize("call", [backward_of_inputs, grad])
def test_reentrant_checkpoint_refuses_inputs(call: Call) -> None:
    def program() -> str:
        graph = Graph()
        loss = checkpoint(lambda x: x * 2, graph.l, use_reentrant=True, preserve_rng_state=False).sum()
        with pytest.raises(RuntimeError, match="reentrant") as refused:
            call(graph.loss + loss.to("sim:0"), graph.named("wv"))
        return str(refused.value)

    as_stock(program)


def test_grad_inside_a_hook_on_each_device() -> None:
    """The calling thread is then a device's own, and does that device's segments itself."""

    def program() -> Any:
        inner: dict[str, set[Any]] = {}

        def nested(name: str, grad: Tensor) -> None:
            def note(which: str, gradient: Tensor) -> None:
                inner.setdefault(name, set()).add((which, threading.get_ident(), str(described([gradient]))))

            with torch.enable_grad():
                graph = Graph(note)
                results = torch.autograd.grad(graph.loss, graph.named("vh"))
                (graph.w * graph.v.to("sim:0")).backward(grad.to("sim:0"))
            inner.setdefault(name, set()).add(str(described([*results, graph.w.grad])))

        graph = Graph(nested)
        return described(torch.autograd.grad(graph.loss, graph.named("vwl"))), inner

    _, inner = as_stock(program, calls=1 + 6 * 2)
    assert len(inner) == 6
