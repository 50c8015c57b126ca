"""Compiler functions in many threads and at any depth: one capture for each graph, exact sums, and nobody waits."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from oracle import run_threads
from test_nested import Nested
from torch import Tensor, nn
from torch._dynamo import compiled_autograd as front_end
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import retrograd

THREADS = 8
Run = Callable[..., Any]


class Compiler:
    """A compiler function that keeps the graphs it was given. `make` turns one into what runs."""

    def __init__(self, make: Callable[[GraphModule], Run] = lambda graph: graph) -> None:
        self.make = make
        self.graphs: list[GraphModule] = []
        self.ran_in: set[int] = set()  # threads that ran what it made

    def __call__(self, graph: GraphModule) -> Run:
        self.graphs.append(graph)
        compiled = self.make(graph)

        def run(*args: Any) -> Any:
            self.ran_in.add(threading.get_ident())
            return compiled(*args)

        return run


def with_dynamo(graph: GraphModule) -> Run:
    return torch.compile(graph, backend="eager")


def with_inductor(graph: GraphModule) -> Run:
    return torch.compile(graph)


MAKERS: dict[str, Callable[[GraphModule], Run]] = {
    "raw": lambda graph: graph,
    "dynamo": with_dynamo,
    "inductor": with_inductor,
}

SWITCHES: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    "_enable": lambda compiler: front_end._enable(compiler, dynamic=False),
    "enable": lambda compiler: retrograd.enable(backend=compiler, dynamic=False),
}


@dataclasses.dataclass
class Tally:
    """What happened, as differences of `retrograd.stats()`."""

    schedule: int = 0
    callable: int = 0
    previous: int = 0
    hits: int = 0
    misses: int = 0
    captures: int = 0
    nested: int = 0
    fallbacks: dict[str, int] = dataclasses.field(default_factory=dict)
    torch_captures: int = 0  # as torch's own front end counts them


@contextlib.contextmanager
def tallying() -> Iterator[Tally]:
    """Fills the yielded `Tally` when the block ends."""
    tally, was, torch_was = Tally(), retrograd.stats(), counters["compiled_autograd"]["captures"]
    try:
        yield tally
    finally:
        now = retrograd.stats()
        for path in ("schedule", "callable", "previous"):
            setattr(tally, path, now["calls"][path] - was["calls"][path])
        for name, key in (("hits", "hits"), ("misses", "misses"), ("captures", "captures"), ("nested", "nested_calls")):
            setattr(tally, name, now[key] - was[key])
        before = was["schedule_reasons"]
        new = {reason: count - before.get(reason, 0) for reason, count in now["schedule_reasons"].items()}
        tally.fallbacks = {reason: count for reason, count in new.items() if count}
        tally.torch_captures = counters["compiled_autograd"]["captures"] - torch_was


def integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def polynomial(x: Tensor, kind: int) -> Tensor:
    """A graph of its own for each `kind`, with exact gradients for small integers."""
    y = x * 3
    for bit in range(max(kind.bit_length(), 3)):
        y = (y + x) if kind >> bit & 1 else y.relu()
    return y.sum()


def gradient(kind: int = 0, seed: int = 0) -> list[float]:
    x = integers(4, seed=seed).requires_grad_()
    polynomial(x, kind).backward()
    assert x.grad is not None
    return x.grad.tolist()


def eager_gradient(kind: int = 0, seed: int = 0) -> list[float]:
    with retrograd.disable():
        return gradient(kind, seed)


def expect_only_in_progress(tally: Tally) -> None:
    """Every call was answered by the compiled function, or by the schedule because the graph was being compiled."""
    assert tally.previous == 0
    assert set(tally.fallbacks) <= {"capture_in_progress"}
    assert tally.schedule == sum(tally.fallbacks.values())


# --- One capture for each graph ---


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("maker", MAKERS)
def test_eight_threads_capture_each_graph_once(maker: str, switch: str) -> None:
    retrograd.cache_clear()
    kinds = range(1 if maker == "inductor" else 4)
    compiler, enabled = Compiler(MAKERS[maker]), SWITCHES[switch]
    want = {(kind, seed): eager_gradient(kind, seed) for kind in kinds for seed in range(THREADS)}

    def work(thread: int) -> None:
        with enabled(compiler):
            for call in range(20):
                for kind in kinds:
                    seed = (thread + call) % THREADS
                    assert gradient(kind, seed) == want[kind, seed]

    with tallying() as tally:
        run_threads([lambda i=i: work(i) for i in range(THREADS)])
    assert tally.captures == tally.torch_captures == len(compiler.graphs) == len(kinds)
    expect_only_in_progress(tally)
    assert tally.schedule + tally.callable == tally.hits + tally.misses == THREADS * 20 * len(kinds)

    with tallying() as tally:
        run_threads([lambda i=i: work(i) for i in range(THREADS)])
    assert (tally.callable, tally.hits) == (THREADS * 20 * len(kinds),) * 2, "warm, so hits only"
    assert tally.captures == tally.misses == tally.schedule == 0
    assert len(compiler.ran_in) >= THREADS


def test_enable_and_torchs_own_switch_share_graphs() -> None:
    retrograd.cache_clear()
    compiler = Compiler()

    def work(switch: str) -> None:
        with SWITCHES[switch](compiler):
            for _ in range(50):
                assert gradient(5) == want

    want = eager_gradient(5)
    with tallying() as tally:
        run_threads([lambda s=s: work(s) for s in ("enable", "_enable") * 4])
    assert tally.captures == len(compiler.graphs) == 1
    expect_only_in_progress(tally)


def test_one_compiler_as_the_default_of_all_threads() -> None:
    retrograd.cache_clear()
    compiler, want = Compiler(), eager_gradient(2)
    retrograd.set_default(backend=compiler)

    def work() -> None:
        for _ in range(50):
            assert gradient(2) == want

    with tallying() as tally:
        run_threads([work] * THREADS)
    assert tally.captures == len(compiler.graphs) == 1
    expect_only_in_progress(tally)
    retrograd.set_default(None)
    with tallying() as tally:
        run_threads([work])
    assert (tally.previous, tally.callable, tally.schedule) == (50, 0, 0)


def test_graph_built_in_one_thread_runs_compiled_in_others() -> None:
    retrograd.cache_clear()
    compiler, want = Compiler(), eager_gradient(3)
    for switch in SWITCHES.values():
        leaves = [integers(4).requires_grad_() for _ in range(THREADS)]
        losses: list[Tensor] = []
        run_threads([lambda: losses.extend(polynomial(x, 3) for x in leaves)])

        def work(loss: Tensor) -> None:
            with switch(compiler):
                loss.backward()

        run_threads([lambda loss=loss: work(loss) for loss in losses])
        assert [x.grad.tolist() for x in leaves if x.grad is not None] == [want] * THREADS
    assert len(compiler.graphs) == 1


def test_sizes_that_differ_between_threads_end_in_one_dynamic_graph() -> None:
    retrograd.cache_clear()
    compiler = Compiler()

    def call(size: int) -> None:
        x = integers(size).requires_grad_()
        (x * 3).relu().expand(2, size).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, 6.0 * (x.detach() > 0))

    def work(index: int) -> None:
        with retrograd.enable(backend=compiler):
            for repeat in range(20):
                call(3 + (index + repeat) % 5)

    with tallying() as tally:
        run_threads([lambda i=i: work(i) for i in range(THREADS)])
    expect_only_in_progress(tally)
    captures = tally.captures
    assert 2 <= captures == len(compiler.graphs) <= 6, "static, then dynamic; at most once for each size that changes"
    with tallying() as tally, retrograd.enable(backend=compiler):
        call(30)
        call(31)
    assert (tally.hits, tally.captures) == (2, 0)


# --- Threads that share a model ---


class Model:
    """Integer weights, so that gradients are whole numbers and their sums exact in any order."""

    def __init__(self) -> None:
        self.w, self.b = integers(4, 4).requires_grad_(), integers(4, seed=1).requires_grad_()
        self.x = integers(2, 4, seed=2)
        with retrograd.disable():
            self.backward()
        self.once = [self.w.grad, self.b.grad]
        self.w.grad = self.b.grad = None

    def loss(self) -> Tensor:
        h = (self.x @ self.w + self.b).relu()
        return (h @ self.w).sum() + self.b.sum()  # both are used twice

    def backward(self) -> None:
        self.loss().backward()

    def start_with(self, value: float | None) -> None:
        for leaf in (self.w, self.b):
            leaf.grad = None if value is None else torch.full_like(leaf, value)

    def expect(self, calls: int, start: float | None) -> None:
        for leaf, once in zip((self.w, self.b), self.once, strict=True):
            assert leaf.grad is not None and once is not None
            assert torch.equal(leaf.grad, once * calls + (start or 0.0))


def expect_exact_sums(
    scopes: Sequence[Callable[[], AbstractContextManager[None]]], calls: int = 200, model: Model | None = None
) -> Tally:
    """One thread for each scope, all on one model; `.grad` None at the start, then present; cold, then warm."""
    model = model or Model()
    retrograd.cache_clear()

    def work(scope: Callable[[], AbstractContextManager[None]]) -> None:
        with scope():
            for _ in range(calls):
                model.backward()

    with tallying() as tally:
        for start in (None, 5.0, None):
            model.start_with(start)
            run_threads([lambda s=s: work(s) for s in scopes])
            model.expect(calls * len(scopes), start)
    return tally


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("maker", ["raw", "dynamo"])
def test_shared_model_loses_no_gradient(maker: str, switch: str) -> None:
    compiler = Compiler(MAKERS[maker])
    tally = expect_exact_sums([lambda: SWITCHES[switch](compiler)] * THREADS)
    assert tally.captures == len(compiler.graphs) == 1, "one graph, whether .grad is None or present"
    expect_only_in_progress(tally)


class Product(torch.autograd.Function):
    """x @ w, with the weight itself among its saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        assert w.is_the_parameter
        return grad @ w.t(), x.t() @ grad


class ModelWithFunction(Model):
    def loss(self) -> Tensor:
        self.w.is_the_parameter = True  # type: ignore[attr-defined]
        h = (self.x @ self.w + self.b).relu()
        return Product.apply(h, self.w).sum() + self.b.sum()  # type: ignore[no-any-return]


def test_shared_model_whose_custom_function_saves_a_weight() -> None:
    compiler = Compiler(MAKERS["raw"])
    tally = expect_exact_sums([lambda: retrograd.enable(backend=compiler)] * THREADS, model=ModelWithFunction())
    assert tally.captures == len(compiler.graphs) == 1
    expect_only_in_progress(tally)


def test_shared_model_with_inductor() -> None:
    compiler = Compiler(with_inductor)
    tally = expect_exact_sums([lambda: front_end._enable(compiler)] * THREADS)
    assert tally.captures == len(compiler.graphs) == 1
    expect_only_in_progress(tally)


@pytest.mark.parametrize("dynamic", [False, True])
def test_other_threads_see_nothing_of_a_capture_in_the_leaves_they_share(dynamic: bool) -> None:
    """A capture swaps what nodes keep for symbols; the leaves' nodes belong to other threads' graphs too.

    The front end stops at every node, so that the others run in the middle of the capture.
    """
    retrograd.cache_clear()
    model, errors, stops = Model(), [], []
    scopes = [retrograd.disable, lambda: retrograd.enable("schedule"), lambda: switched_on(factory, dynamic)]

    def other(scope: Callable[[], AbstractContextManager[None]]) -> None:
        with scope(), torch.enable_grad():
            model.backward()

    class FrontEnd(front_end.AutogradCompilerInstance):
        def stop(self) -> None:
            stops.append(1)
            try:
                run_threads([lambda s=s: other(s) for s in scopes], timeout=60)
            except BaseException as error:
                errors.append(error)

        def apply_functional(self, *args: Any) -> Any:
            self.stop()
            return super().apply_functional(*args)

        def validate_outputs(self, *args: Any) -> Any:
            self.stop()
            return super().validate_outputs(*args)

        def accumulate_grad(self, *args: Any) -> Any:
            self.stop()
            return super().accumulate_grad(*args)

    def factory() -> FrontEnd:
        return FrontEnd(lambda graph: graph)

    with switched_on(factory, dynamic), tallying() as tally:
        model.backward()
    assert not errors
    assert len(stops) > 10
    assert (tally.previous, tally.captures, tally.callable) == (len(stops), 1, 1)
    assert tally.fallbacks == {"capture_in_progress": len(stops)}
    model.expect(1 + 3 * len(stops), None)


@contextlib.contextmanager
def switched_on(factory: Callable[[], Any], dynamic: bool) -> Iterator[None]:
    """torch's lowest switch, which takes what makes a front end."""
    prior = torch._C._dynamo.compiled_autograd.set_autograd_compiler(factory, dynamic)
    try:
        yield
    finally:
        torch._C._dynamo.compiled_autograd.set_autograd_compiler(*prior)


def test_shared_model_with_an_eager_and_a_schedule_thread() -> None:
    compiler = Compiler()
    compiled = [lambda: retrograd.enable(backend=compiler)] * (THREADS - 2)
    tally = expect_exact_sums([retrograd.disable, lambda: retrograd.enable("schedule"), *compiled])
    assert tally.previous == 3 * 200
    assert tally.captures == 1


def test_shared_model_with_every_thread_under_another_backend() -> None:
    raw, other, dynamo, dynamic = Compiler(), Compiler(), Compiler(with_dynamo), Compiler()
    tally = expect_exact_sums(
        [
            retrograd.disable,
            lambda: retrograd.enable("schedule"),
            lambda: retrograd.enable(backend=raw),
            lambda: front_end._enable(other, dynamic=False),
            lambda: retrograd.enable(backend=dynamo),
            lambda: front_end._enable(dynamic),
            lambda: retrograd.enable(backend=lambda graph: graph.forward),
        ]
    )
    assert [len(c.graphs) for c in (raw, other, dynamo, dynamic)] == [1, 1, 1, 1]
    assert tally.captures == 5
    assert tally.previous == tally.schedule - tally.fallbacks.get("capture_in_progress", 0) == 3 * 200


def test_shared_model_while_gradients_are_read_and_set_to_none() -> None:
    """A thread that zeroes gradients at a time when no call is in flight."""
    model, compiler, rounds = Model(), Compiler(), 30
    meet = threading.Barrier(THREADS)

    def work(index: int) -> None:
        with retrograd.enable(backend=compiler):
            for _ in range(rounds):
                meet.wait(60)
                for _ in range(3):
                    model.backward()
                if meet.wait(60) == 0:
                    model.expect(3 * THREADS, None)
                    model.start_with(None)

    with tallying() as tally:
        run_threads([lambda i=i: work(i) for i in range(THREADS)])
    expect_only_in_progress(tally)
    assert tally.captures == 1


@pytest.mark.parametrize("others", ["none", "eager", "schedule"])
def test_one_shared_retained_graph(others: str) -> None:
    """The capture swaps what the nodes saved; nobody who runs the same graph may see it."""
    calls, rounds = 20, 15
    other = {"eager": retrograd.disable, "schedule": lambda: retrograd.enable("schedule")}.get(others)
    for _ in range(rounds):
        retrograd.cache_clear()
        compiler, model = Compiler(), Model()
        loss = model.loss()

        def work(scope: Callable[[], AbstractContextManager[None]]) -> None:
            with scope():
                for _ in range(calls):
                    loss.backward(retain_graph=True)

        scopes = [lambda: retrograd.enable(backend=compiler)] * 4 + ([other] * 4 if other is not None else [])
        with tallying() as tally:
            run_threads([lambda s=s: work(s) for s in scopes])
        model.expect(calls * len(scopes), None)
        assert tally.captures <= 1
        assert tally.callable + tally.schedule + tally.previous == calls * len(scopes)


# --- Reentrant checkpoint ---


class Checkpointed:
    """Three checkpointed blocks with integer weights; `shared`: a weight that is used outside of them as well."""

    def __init__(self, shared: bool = False, inner: bool = False) -> None:
        self.weights = [integers(3, 3, seed=seed).abs().requires_grad_() for seed in range(3)]
        self.shared, self.inner = shared, inner
        self.nested = 3 * (2 if inner else 1)

    def block(self, x: Tensor, w: Tensor) -> Tensor:
        h = (x @ w - 3).relu()
        return checkpoint(lambda y: (y @ w.t() - 3).relu(), h, use_reentrant=True) if self.inner else h

    def step(self) -> list[list[float]]:
        for w in self.weights:
            w.grad = None
        x = integers(2, 3, seed=9).abs().requires_grad_()
        y = x @ self.weights[0] if self.shared else x * 2
        for w in self.weights:
            y = checkpoint(lambda y, w=w: self.block(y, w), y, use_reentrant=True)
        (y @ self.weights[1] if self.shared else y).sum().backward()
        assert x.grad is not None
        return [g.flatten().tolist() for g in (x.grad, *(w.grad for w in self.weights)) if g is not None]


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("maker", ["raw", "dynamo"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_reentrant_checkpoint_hits_outside_and_inside(maker: str, switch: str, shared: bool, inner: bool) -> None:
    model = Checkpointed(shared, inner)
    if inner and maker == "dynamo":
        model.nested = 3  # Dynamo traces through the recomputation, and so through a checkpoint in it
    with retrograd.disable():
        want = model.step()
    assert len(want) == 4
    retrograd.cache_clear()
    compiler = Compiler(MAKERS[maker])
    with SWITCHES[switch](compiler):
        with tallying() as tally:
            assert model.step() == want
        assert tally.captures == tally.torch_captures == len(compiler.graphs) == tally.misses
        assert 2 <= tally.captures <= 1 + model.nested
        assert (tally.callable, tally.nested) == (1 + model.nested, model.nested)
        for _ in range(3):
            with tallying() as tally:
                assert model.step() == want
            assert (tally.hits, tally.misses, tally.captures) == (1 + model.nested, 0, 0)
            assert (tally.callable, tally.schedule, tally.previous) == (1 + model.nested, 0, 0)
            assert tally.nested == model.nested
            assert tally.fallbacks == {}


def test_reentrant_checkpoint_in_eight_threads_that_share_the_weights() -> None:
    model = Checkpointed(shared=True)
    with retrograd.disable():
        want = model.step()
    retrograd.cache_clear()
    compiler, steps = Compiler(), 20
    for w in model.weights:
        w.grad = None

    def work() -> None:
        with front_end._enable(compiler):
            for _ in range(steps):
                x = integers(2, 3, seed=9).abs().requires_grad_()
                y = x @ model.weights[0]
                for w in model.weights:
                    y = checkpoint(lambda y, w=w: model.block(y, w), y, use_reentrant=True)
                (y @ model.weights[1]).sum().backward()
                assert x.grad is not None and x.grad.flatten().tolist() == want[0]

    with tallying() as tally:
        run_threads([work] * THREADS)
    expect_only_in_progress(tally)
    assert tally.nested == 3 * THREADS * steps
    assert tally.callable + tally.schedule == 4 * THREADS * steps
    assert tally.captures == len(compiler.graphs) <= 3
    for w, once in zip(model.weights, want[1:], strict=True):
        assert w.grad is not None
        assert w.grad.flatten().tolist() == [g * THREADS * steps for g in once]


@pytest.mark.parametrize("maker", ["raw", "dynamo"])
def test_module_under_checkpoint_matches_eager(maker: str) -> None:
    torch.manual_seed(0)
    net = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4)) for _ in range(2))

    def step() -> list[Tensor]:
        torch.manual_seed(1)
        net.zero_grad()
        y = torch.ones(2, 4, requires_grad=True)
        for part in net:
            y = checkpoint(part, y, use_reentrant=True)
        y.sum().backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    want = step()
    compiler = Compiler(MAKERS[maker])
    with retrograd.enable(backend=compiler):
        for run in range(3):
            with tallying() as tally:
                got = step()
            torch.testing.assert_close(got, want)
            assert (tally.callable, tally.nested, tally.previous) == (3, 2, 0)
            assert run == 0 or (tally.hits, tally.captures) == (3, 0)


# --- Threads do not see each other ---


def names_in(graph: GraphModule) -> list[str]:
    """The names of libtorch's backward functions in a captured graph."""
    return [getattr(node.target, "__name__", "") for node in graph.graph.nodes if node.op == "call_function"]


def test_threads_never_see_each_others_compilers() -> None:
    """Each thread has a kind of graph, told by the number of sines in it, and a compiler, or none, of its own."""
    rounds, compilers = 6, [Compiler() for _ in range(4)]
    meet = threading.Barrier(len(compilers) + 2)
    idents: dict[int, int] = {}

    def call(sines: int) -> None:
        y = x = torch.ones(2, requires_grad=True)
        for _ in range(sines):
            y = y.sin()
        y.sum().backward()
        assert x.grad is not None

    def work(index: int, scope: Callable[[], AbstractContextManager[None]], enabled: bool) -> None:
        idents[index] = threading.get_ident()
        for turn in range(rounds):
            meet.wait(60)
            with scope():
                meet.wait(60)
                assert front_end.compiled_autograd_enabled is enabled
                call(1 + index)
                if (turn + index) % 2:  # half of the threads leave and come back while the others are inside
                    meet.wait(60)
                    call(1 + index)
                    continue
            meet.wait(60)
            assert front_end.compiled_autograd_enabled is False
            with scope():
                call(1 + index)

    retrograd.cache_clear()
    works = [
        lambda i=i, c=c: work(i, lambda: SWITCHES[("_enable", "enable")[i % 2]](c), True)
        for i, c in enumerate(compilers)
    ]
    works.append(lambda: work(4, contextlib.nullcontext, False))
    works.append(lambda: work(5, lambda: retrograd.enable("schedule"), False))
    with tallying() as tally:
        run_threads(works)
    for index, compiler in enumerate(compilers):
        (graph,) = compiler.graphs
        assert names_in(graph).count("SinBackward0") == 1 + index
        assert compiler.ran_in == {idents[index]}
    assert (tally.callable, tally.schedule, tally.previous) == (4 * 2 * rounds, 2 * rounds, 2 * rounds)
    assert tally.captures == 4


def test_one_graph_under_eight_compilers_is_captured_by_each() -> None:
    retrograd.cache_clear()
    compilers = [Compiler() for _ in range(THREADS)]
    want, meet = eager_gradient(6), threading.Barrier(THREADS)
    idents: dict[int, int] = {}

    def work(index: int) -> None:
        idents[index] = threading.get_ident()
        for _ in range(20):
            meet.wait(60)
            with retrograd.enable(backend=compilers[index]):
                assert gradient(6) == want

    with tallying() as tally:
        run_threads([lambda i=i: work(i) for i in range(THREADS)])
    assert [len(compiler.graphs) for compiler in compilers] == [1] * THREADS
    assert [compiler.ran_in for compiler in compilers] == [{idents[i]} for i in range(THREADS)]
    assert (tally.captures, tally.callable, tally.fallbacks) == (THREADS, 20 * THREADS, {})


def test_compiler_does_not_reach_threads_started_inside_its_block() -> None:
    compiler = Compiler()

    def other() -> None:
        assert not front_end.compiled_autograd_enabled
        gradient()

    with tallying() as tally, front_end._enable(compiler):
        run_threads([other, other])
        gradient()
    assert (tally.previous, tally.callable) == (2, 1)


# --- Compilers that do more than compile ---


INSIDE: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    "same compiler": lambda compiler: retrograd.enable(backend=compiler),
    "its own switch": lambda compiler: front_end._enable(compiler),
    "other compiler": lambda compiler: retrograd.enable(backend=Compiler()),
    "schedule": lambda compiler: retrograd.enable("schedule"),
    "eager": lambda compiler: retrograd.disable(),
}


@pytest.mark.parametrize("inside", INSIDE)
def test_compiler_that_starts_threads_which_call_backward_and_joins_them(inside: str) -> None:
    retrograd.cache_clear()
    want = [eager_gradient(kind) for kind in range(2)]
    started = []

    def make(graph: GraphModule) -> Run:
        if not started:  # the graphs that the new threads bring are compiled plainly
            started.append(graph)
            run_threads([lambda k=k: other(k) for k in (0, 1, 0, 1)], timeout=60)
        return graph

    compiler = Compiler(make)

    def other(kind: int) -> None:
        with INSIDE[inside](compiler):
            assert gradient(kind) == want[kind]

    def work() -> None:
        with retrograd.enable(backend=compiler):
            assert gradient() == want[0]

    with tallying() as tally:
        run_threads([work])
        run_threads([work])
    assert len(started) == 1
    assert tally.callable >= 2
    if inside == "same compiler":  # kind 0 is in progress, kind 1 is captured by one of the two that want it
        assert tally.captures == 2
        assert tally.fallbacks["capture_in_progress"] >= 2


def test_every_compile_starts_a_thread_whose_graph_is_compiled_too() -> None:
    """A chain of ten threads, each inside the compiler function that the one before it waits in."""
    retrograd.cache_clear()
    depth = 10
    want = [eager_gradient(kind) for kind in range(depth)]

    def make(graph: GraphModule) -> Run:
        if len(compiler.graphs) < depth:
            kind = len(compiler.graphs)
            run_threads([lambda: work(kind)], timeout=60)
        return graph

    compiler = Compiler(make)

    def work(kind: int) -> None:
        with retrograd.enable(backend=compiler):
            assert gradient(kind) == want[kind]

    with tallying() as tally:
        run_threads([lambda: work(0)])
    assert (tally.captures, tally.callable, tally.fallbacks) == (depth, depth, {})


def test_compiler_that_calls_backward_of_other_graphs_and_of_its_own() -> None:
    retrograd.cache_clear()
    want = [eager_gradient(kind) for kind in range(2)]
    seen = []

    def make(graph: GraphModule) -> Run:
        if not seen:
            seen.append(graph)
            with torch.enable_grad():  # off inside a compiler function, as with torch's own compiled autograd
                assert gradient(0) == want[0]  # the very graph that is being compiled
                assert gradient(1) == want[1]
        return graph

    compiler = Compiler(make)
    with tallying() as tally, retrograd.enable(backend=compiler):
        assert gradient(0) == want[0]
        assert gradient(1) == want[1]
    assert (tally.captures, tally.callable, tally.schedule) == (2, 3, 1)
    assert tally.fallbacks == {"capture_in_progress": 1}


def in_new_process(script: str, timeout: float = 120) -> str:
    """Runs it after the imports below; a hang is an error. Its output."""
    prelude = """
        import os, sys, threading, torch, retrograd
        from torch._dynamo import compiled_autograd as front_end
        torch.set_num_threads(1)
        retrograd.install()
    """
    paths = [*(p for p in sys.path if p), os.path.dirname(__file__)]
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(prelude) + textwrap.dedent(script)],
        capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


DISTINCT = """
    def distinct(x, level):  # a chain of its own for each level
        for bit in range(8):
            x = x.sin() if level >> bit & 1 else x.cos()
        return x
"""


@pytest.mark.parametrize(
    ("maker", "switch", "depth"), [("raw", "enable", 100), ("raw", "_enable", 100), ("dynamo", "_enable", 100)]
)
def test_nested_capture_at_depth(maker: str, switch: str, depth: int) -> None:
    """Each level of a nest of backward calls is a graph of its own, captured while all calls around it run."""
    output = in_new_process(
        DISTINCT
        + f"""
    class Nest(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, level):
            ctx.save_for_backward(x)
            ctx.level = level
            return x * 2
        @staticmethod
        @torch._dynamo.disable
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            if ctx.level == 0:
                return grad * 2, None
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                y = distinct(Nest.apply(inner, ctx.level - 1), ctx.level)
            torch.autograd.backward(y, grad)
            return inner.grad, None
    def run():
        x = torch.linspace(-1, 1, 3).requires_grad_()
        Nest.apply(x, {depth} - 1).sum().backward()
        return x.grad
    def scope():
        compiler = graphs_of
        if {switch!r} == "enable":
            return retrograd.enable(backend=compiler)
        return front_end._enable(compiler)
    graphs = []
    def graphs_of(graph):
        graphs.append(graph)
        if {maker!r} == "raw" or len(graphs) % 8:  # Dynamo is slow, so not for every level
            return graph
        return torch.compile(graph, backend="eager")
    sys.setrecursionlimit(20000)
    want = run()
    retrograd.reset_stats()
    with scope():
        got = run()
    torch.testing.assert_close(got, want)
    stats = retrograd.stats()
    assert len(graphs) == stats["captures"] == stats["misses"] == stats["calls"]["callable"] == {depth}, stats
    assert stats["max_depth"] == {depth} and stats["nested_calls"] == {depth} - 1, stats
    with scope():
        got = run()
    torch.testing.assert_close(got, want)
    stats = retrograd.stats()
    assert stats["captures"] == stats["hits"] == {depth}, stats
    assert stats["calls"] == {{"schedule": 0, "fused": 0, "callable": 2 * {depth}, "previous": 0}}, stats
    print("done", flush=True)
    os._exit(0)  # the stock engine alone may abort at exit after such nesting: its extra threads race it
    """
    )
    assert output.strip() == "done"


def test_a_compiled_function_that_calls_itself_without_end() -> None:
    """Through backward of the same kind of graph. Ends in a RecursionError at every level, and leaves all in order."""
    out = in_new_process("""
        def backward():
            with torch.enable_grad():
                x = torch.ones(3, requires_grad=True)
                x.sin().sum().backward()

        depth = [0]
        def compiler(graph):
            def run(*args):
                depth[0] += 1
                if endless:
                    backward()
                return graph(*args)
            return run

        endless = True
        with retrograd.enable(backend=compiler):
            try:
                backward()
            except RecursionError as error:
                print(error)
            endless = False
            backward()
        print(depth[0], flush=True)
        os._exit(0)  # after such depths the stock engine cannot end in order
    """)
    message, depth = out.splitlines()
    assert message.startswith("maximum recursion depth exceeded"), message
    assert 60 < int(depth) < 1010


def test_a_call_with_create_graph_around_the_capture_of_a_retained_graph() -> None:
    """It is counted as retained, on a thread that the innermost call is not on, but waits for it."""
    out = in_new_process("""
        captures = []
        def compiler(graph):
            captures.append(graph)
            return graph

        def nested(level):
            with torch.enable_grad():
                x = torch.ones(3, requires_grad=True)
                y = x.sin()
                if level:
                    y.register_hook(lambda grad: nested(level - 1))
                else:
                    y = y.exp()  # a graph of its own
                    before = len(captures)
                y.sum().backward(create_graph=level == 70, retain_graph=level == 0)
                if not level:
                    print(len(captures) - before, retrograd.stats()["schedule_reasons"], flush=True)

        with retrograd.enable(backend=compiler):
            nested(70)
        os._exit(0)
    """)
    assert out.startswith("1 "), out
    assert "'graph_in_use': 0" in out, out


def test_compiler_functions_nested_in_one_another_at_depth_100() -> None:
    """Each compile calls backward on a graph that is not yet compiled, so 100 compiles are open at one time."""
    output = in_new_process(
        DISTINCT
        + """
    sys.setrecursionlimit(20000)
    graphs = []
    def compiler(graph):
        graphs.append(graph)
        if len(graphs) < 100:
            with torch.enable_grad():
                call(len(graphs))
        return graph
    def call(level):
        x = torch.linspace(-1, 1, 3).requires_grad_()
        distinct(x, level).sum().backward()
        return x.grad
    with retrograd.enable(backend=compiler):
        got = call(0)
    stats = retrograd.stats()
    assert len(graphs) == stats["captures"] == stats["calls"]["callable"] == 100, stats
    assert stats["calls"]["schedule"] == 0, stats
    torch.testing.assert_close(got, call(0))
    print("done", flush=True)
    os._exit(0)  # the stock engine alone may abort at exit after such nesting: its extra threads race it
    """
    )
    assert output.strip() == "done"


def test_deep_nesting_in_several_threads() -> None:
    def call(seed: int) -> list[float]:
        x = torch.linspace(-1, 1, 3).add(seed).requires_grad_()
        Nested.apply(x.exp(), 70, lambda level: None).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    retrograd.cache_clear()
    want = [call(seed) for seed in range(4)]
    compiler = Compiler()

    def work(index: int) -> None:
        with retrograd.enable(backend=compiler):
            for _ in range(3):
                assert call(index) == pytest.approx(want[index])

    with tallying() as tally:
        run_threads([lambda i=i: work(i) for i in range(4)])
    expect_only_in_progress(tally)
    assert tally.callable + tally.schedule == 4 * 3 * 71
    assert tally.nested == 4 * 3 * 70
    assert tally.captures == len(compiler.graphs) <= 3


# --- Others work while one compiles, captures or runs ---


class Gate:
    """Where a thread says that it has arrived, and waits until it is let through."""

    def __init__(self) -> None:
        self.arrived, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.arrived.set()
        assert self.opened.wait(120)


@contextlib.contextmanager
def held(gate: Gate, work: Callable[[], None]) -> Iterator[None]:
    """`work` in a thread that waits at the gate while the block runs, then goes on to its end."""
    thread = threading.Thread(target=lambda: run_threads([work]), daemon=True)
    thread.start()
    try:
        assert gate.arrived.wait(60), "it never came to the gate"
        yield
    finally:
        gate.opened.set()
        thread.join(60)
    assert not thread.is_alive()


def test_others_finish_while_a_compiler_is_blocked() -> None:
    retrograd.cache_clear()
    want, gate = [eager_gradient(kind) for kind in range(4)], Gate()

    def make(graph: GraphModule) -> Run:
        if not gate.arrived.is_set():
            gate()
        return graph

    compiler, other = Compiler(make), Compiler()
    ended = []

    def blocked() -> None:
        with retrograd.enable(backend=compiler):
            assert gradient(0) == want[0]
        ended.append(1)

    def same_graph() -> None:
        with retrograd.enable(backend=compiler):
            for _ in range(5):
                assert gradient(0) == want[0]

    def other_graphs(scope: Callable[[], AbstractContextManager[None]]) -> None:
        with scope():
            for kind in (1, 2, 3):
                assert gradient(kind) == want[kind]

    with held(gate, blocked):
        with tallying() as tally:
            run_threads([same_graph] * 4)
        assert tally.fallbacks == {"capture_in_progress": 20}
        assert (tally.schedule, tally.callable, tally.captures) == (20, 0, 0)
        with tallying() as tally:
            run_threads([lambda: other_graphs(lambda: front_end._enable(compiler, dynamic=False))] * 4)
        expect_only_in_progress(tally)
        assert tally.captures == 3, "other graphs are captured and compiled meanwhile"
        with tallying() as tally, retrograd.enable(backend=other):
            assert gradient(0) == want[0]
        assert (tally.captures, tally.callable) == (1, 1), "and this one by another compiler"
        with tallying() as tally:
            run_threads(
                [lambda: other_graphs(lambda: retrograd.enable("schedule")), lambda: other_graphs(retrograd.disable)]
            )
        assert (tally.schedule, tally.previous) == (3, 3)
        assert not ended
    assert ended
    with tallying() as tally:
        run_threads([same_graph])
    assert (tally.callable, tally.hits, tally.captures) == (5, 5, 0)
    assert len(compiler.graphs) == 4


def test_others_finish_while_a_compiled_function_is_blocked() -> None:
    retrograd.cache_clear()
    want, gate = [eager_gradient(kind) for kind in range(2)], Gate()

    def make(graph: GraphModule) -> Run:
        def run(*args: Any) -> Any:
            if not gate.arrived.is_set():
                gate()
            return graph(*args)

        return run

    compiler = Compiler(make)

    def call(kind: int) -> None:
        with retrograd.enable(backend=compiler):
            assert gradient(kind) == want[kind]

    with held(gate, lambda: call(0)), tallying() as tally:
        run_threads([lambda: call(0)] * 4)
        run_threads([lambda: call(1)] * 4)
    expect_only_in_progress(tally)
    assert tally.hits >= 4, "the same function runs in other threads meanwhile"
    assert tally.captures == 1


def test_hits_go_on_while_another_thread_is_inside_a_capture() -> None:
    """A verbose logger that waits stands for a slow capture: it is called in the middle of one."""
    retrograd.cache_clear()
    want, gate = [eager_gradient(kind) for kind in range(2)], Gate()

    class Logger:
        def debug(self, *message: Any) -> None:
            if not gate.arrived.is_set():
                gate()

    logger, compiler = Logger(), Compiler()

    def call(kind: int) -> None:
        with retrograd.enable(backend=compiler):
            assert gradient(kind) == want[kind]

    def capturing() -> None:
        torch._C._dynamo.compiled_autograd.set_verbose_logger(logger)
        try:
            call(0)
        finally:
            torch._C._dynamo.compiled_autograd.set_verbose_logger(None)

    call(1)
    with held(gate, capturing):
        with tallying() as tally:
            run_threads([lambda: call(1)] * 4)
        assert (tally.callable, tally.hits) == (4, 4)
        with tallying() as tally:
            run_threads([lambda: call(0)] * 4)
        assert tally.fallbacks == {"capture_in_progress": 4}
    assert len(compiler.graphs) == 2


# --- Clearing ---


@pytest.mark.parametrize("clear", ["retrograd", "torch"])
def test_clearing_all_the_time_while_threads_run(clear: str) -> None:
    clear_cache = {"retrograd": retrograd.cache_clear, "torch": torch._C._dynamo.compiled_autograd.clear_cache}[clear]
    want = [eager_gradient(kind) for kind in range(3)]
    compilers, stop = [Compiler(), Compiler()], threading.Event()
    model = Model()
    calls = []

    def work(index: int) -> None:
        with (retrograd.enable, front_end._enable)[index % 2](compilers[index // 4]):
            mine = 0
            while not stop.is_set():
                assert gradient(mine % 3) == want[mine % 3]
                model.backward()
                mine += 1
        calls.append(mine)

    def hammer() -> None:
        try:
            end = time.monotonic() + 2
            while time.monotonic() < end:
                clear_cache()
                time.sleep(0.005)
        finally:
            stop.set()

    with tallying() as tally:
        run_threads([hammer, *(lambda i=i: work(i) for i in range(THREADS))])
    expect_only_in_progress(tally)
    assert tally.callable + tally.schedule == 2 * sum(calls)
    assert tally.captures > 8, "cleared graphs are captured again"
    assert tally.captures == sum(len(compiler.graphs) for compiler in compilers)
    model.expect(sum(calls), None)


def test_training_in_eight_threads_under_one_compiler_matches_eager() -> None:
    """Separate models, real steps: forward, backward, update, with the optimizer between the calls."""

    def train(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        w = torch.randn(6, 6, generator=generator).requires_grad_()
        v = torch.randn(6, 2, generator=generator).requires_grad_()
        optimizer = torch.optim.SGD([w, v], lr=0.05, momentum=0.9)
        for _ in range(20):
            x = torch.randn(5, 6, generator=generator)
            optimizer.zero_grad()
            ((x @ w).tanh() @ v).pow(2).mean().backward()
            optimizer.step()
        return [w.detach(), v.detach()]

    want = [train(seed) for seed in range(THREADS)]
    retrograd.cache_clear()
    compiler = Compiler()

    def work(index: int) -> None:
        with retrograd.enable(backend=compiler):
            torch.testing.assert_close(train(index), want[index])

    with tallying() as tally:
        run_threads([lambda i=i: work(i) for i in range(THREADS)])
    expect_only_in_progress(tally)
    assert tally.captures == len(compiler.graphs) == 1
