"""Compiler functions that misbehave: a clear error where one is due, and a working next call, always."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle import leaf, run_threads
from torch import Tensor
from torch._dynamo import compiled_autograd as front_end
from torch.fx import GraphModule

import retrograd

binding = torch._C._dynamo.compiled_autograd


def raw(graph: GraphModule) -> GraphModule:
    return graph


def step(shape: int = 3) -> tuple[Tensor, Tensor]:
    """One backward; the gradient and what it must be."""
    x, w = leaf(shape), leaf(shape, seed=1)
    (x * w).sin().sum().backward()
    assert x.grad is not None
    return x.grad, (x * w).cos().mul(w).detach()


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """After each test a compiled backward works, on a thread of its own in case a lock is still held here."""
    retrograd.cache_clear()
    retrograd.reset_stats()
    yield
    assert not front_end.in_compiled_autograd_region
    assert not front_end.compiled_autograd_enabled
    assert not front_end.active_disable_ctx
    assert front_end.depth == 0
    assert torch._guards.CompileContext.try_get() is None
    assert torch._C._len_torch_dispatch_stack() == 0

    def work() -> None:
        before = retrograd.stats()
        with retrograd.enable(backend=lambda graph: graph):
            got, want = step(5)
        after = retrograd.stats()
        torch.testing.assert_close(got, want)
        assert after["calls"]["callable"] == before["calls"]["callable"] + 1

    retrograd.cache_clear()
    run_threads([work], timeout=60)


class Failing:
    """A compiler function that raises `error` the first `times` times."""

    def __init__(self, error: BaseException, times: int) -> None:
        self.error = error
        self.times = times
        self.calls = 0

    def __call__(self, graph: GraphModule) -> GraphModule:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return graph


def test_error_of_the_compiler_reaches_the_caller_and_the_next_call_tries_again() -> None:
    error = ZeroDivisionError("no such number")
    compiler = Failing(error, times=2)
    with retrograd.enable(backend=compiler):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="no such number") as caught:
                step()
            assert caught.value is error
            assert "__call__" in [entry.name for entry in caught.traceback]
        got, want = step()
    torch.testing.assert_close(got, want)
    stats = retrograd.stats()
    assert (stats["captures"], stats["misses"], stats["calls"]["callable"], compiler.calls) == (3, 1, 1, 3)


def test_a_compiler_that_keeps_failing_is_asked_three_times_for_one_graph() -> None:
    error = ZeroDivisionError("never")
    compiler = Failing(error, times=1000)
    with retrograd.enable(backend=compiler):
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                step()
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"failed 3 times for this graph.*retrograd\.cache_clear\(\)"
            ) as caught:
                step()
            cause = caught.value.__cause__
            assert type(cause) is ZeroDivisionError
            assert str(cause) == "never"
            assert cause.__traceback__ is None
        assert compiler.calls == 3
        with pytest.raises(ZeroDivisionError):  # another graph
            leaf(3).exp().sum().backward()
        assert compiler.calls == 4
        retrograd.cache_clear()
        compiler.times = 0
        got, want = step()
    torch.testing.assert_close(got, want)
    with retrograd.enable(backend=raw):  # another compiler function, all the while
        step()


def test_success_makes_the_failures_before_it_forgotten() -> None:
    compiler = Failing(ZeroDivisionError(), times=2)
    with retrograd.enable(backend=compiler):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                step()
        step()
        compiler.times, compiler.calls = 2, 0
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                step(4)  # a size that changed: captured again
        got, want = step(4)
    torch.testing.assert_close(got, want)


def test_keyboard_interrupt_is_no_failure() -> None:
    compiler = Failing(KeyboardInterrupt(), times=4)
    with retrograd.enable(backend=compiler):
        for _ in range(4):
            with pytest.raises(KeyboardInterrupt):
                step()
        got, want = step()
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("result", [None, 7, "text"], ids=["None", "int", "str"])
def test_compiler_that_returns_something_not_callable(result: Any) -> None:
    kind = type(result).__name__
    with retrograd.enable(backend=lambda graph: result), pytest.raises(RuntimeError, match=f"returned {kind} object"):
        step()


WRONG_OUTPUTS: dict[str, Callable[..., Any]] = {
    "none": lambda *args: None,
    "a number": lambda *args: 3,
    "too few": lambda *args: [],
    "too many": lambda *args: [torch.zeros(3), torch.zeros(3)],
    "not tensors": lambda *args: ["x"],
}


@pytest.mark.parametrize("outputs", WRONG_OUTPUTS)
def test_compiled_function_that_returns_wrong_outputs_of_grad(outputs: str) -> None:
    x = leaf(3)
    with (
        retrograd.enable(backend=lambda graph: WRONG_OUTPUTS[outputs]),
        pytest.raises((RuntimeError, TypeError), match=r"compiled function returned|expected a tensor"),
    ):
        torch.autograd.grad(x.sin().sum(), x)


def test_compiled_function_that_returns_outputs_of_backward() -> None:
    with (
        retrograd.enable(backend=lambda graph: lambda *args: [torch.zeros(1)]),
        pytest.raises(RuntimeError, match="returned 1 gradients, but 0 were asked for"),
    ):
        step()


def test_compiled_function_that_raises_and_then_works() -> None:
    fails = [True]

    def compiler(graph: GraphModule) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if fails.pop():
                raise LookupError("midway")
            return graph(*args)

        return run

    with retrograd.enable(backend=compiler):
        with pytest.raises(LookupError, match="midway"):
            step()
        fails.append(False)
        got, want = step()
    torch.testing.assert_close(got, want)
    assert retrograd.stats()["captures"] == 1


def test_what_was_accumulated_before_an_error_stays() -> None:
    x, w = leaf(3), leaf(3, seed=1)

    def raises(grad: Tensor) -> None:
        raise LookupError

    y = x * 2
    y.register_hook(raises)
    with retrograd.enable(backend=raw), pytest.raises(LookupError):
        (w.exp() * 1 + y).sum().backward()
    eager_x, eager_w = leaf(3), leaf(3, seed=1)
    y = eager_x * 2
    y.register_hook(raises)
    with pytest.raises(LookupError):
        (eager_w.exp() * 1 + y).sum().backward()
    assert x.grad is eager_x.grad is None
    assert eager_w.grad is not None  # the eager engine ran that branch first
    assert w.grad is None or torch.equal(w.grad, eager_w.grad)  # the captured graph's order is another


def test_compiler_that_calls_backward() -> None:
    inner: list[tuple[Tensor, Tensor]] = []

    def compiler(graph: GraphModule) -> GraphModule:
        if len(inner) < 3:
            inner.append((torch.zeros(1), torch.zeros(1)))
            with torch.enable_grad():  # off, as in any backward
                inner[-1] = step(len(inner))
        return graph

    with retrograd.enable(backend=compiler):
        got, want = step(9)
    assert len(inner) == 1
    for pair in [(got, want), *inner]:
        torch.testing.assert_close(*pair)
    stats = retrograd.stats()
    assert stats["schedule_reasons"]["capture_in_progress"] == 1  # the same graph, in the middle of its own capture
    assert (stats["calls"]["callable"], stats["calls"]["schedule"], stats["nested_calls"]) == (1, 1, 1)


def test_compiler_that_never_returns_while_others_work() -> None:
    inside, release = threading.Event(), threading.Event()

    def compiler(graph: GraphModule) -> GraphModule:
        if not inside.is_set():
            inside.set()
            assert release.wait(60)
        return graph

    def stuck() -> None:
        with retrograd.enable(backend=compiler):
            torch.testing.assert_close(*step())

    def other() -> None:
        assert inside.wait(60)
        with retrograd.enable(backend=compiler):
            torch.testing.assert_close(*step())  # the same graph
            x = leaf(3)
            x.exp().sum().backward()  # another one
            torch.testing.assert_close(x.grad, x.exp())
        release.set()

    run_threads([stuck, other])
    stats = retrograd.stats()
    assert stats["schedule_reasons"]["capture_in_progress"] == 1
    assert (stats["calls"]["callable"], stats["calls"]["schedule"]) == (2, 1)


@pytest.mark.parametrize("do", ["clear", "switch off", "uninstall"])
def test_switches_in_the_middle_of_a_call(do: str) -> None:
    actions: dict[str, Callable[[], Any]] = {
        "clear": binding.clear_cache,
        "switch off": lambda: binding.set_autograd_compiler(None, False),
        "uninstall": retrograd.uninstall,
    }
    here, done = threading.Event(), threading.Event()

    def work() -> None:
        x = leaf(3)
        y = x.exp()
        first = []

        def hook(grad: Tensor) -> None:
            if not first:
                first.append(True)
                here.set()
                assert done.wait(60)
                actions[do]()

        y.register_hook(hook)
        with retrograd.enable(backend=raw):
            y.sum().backward()
        torch.testing.assert_close(x.grad, x.exp())

    def meddle() -> None:
        assert here.wait(60)
        actions[do]()
        done.set()

    run_threads([work, meddle])
    retrograd.install()


class Logger:
    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.lines: list[str] = []

    def debug(self, line: str) -> None:
        if self.error is not None:
            raise self.error
        self.lines.append(line)


@pytest.fixture
def set_logger() -> Iterator[Callable[[Any], Any]]:
    yield binding.set_verbose_logger
    binding.set_verbose_logger(None)


def test_verbose_logger_that_raises(set_logger: Callable[[Any], Any]) -> None:
    set_logger(Logger(LookupError("logger")))
    with retrograd.enable(backend=raw):
        with pytest.raises(LookupError, match="logger"):
            step()
        set_logger(None)
        torch.testing.assert_close(*step())


def test_verbose_logger_without_debug(set_logger: Callable[[Any], Any]) -> None:
    set_logger(object())
    with retrograd.enable(backend=raw), pytest.raises(AttributeError, match="debug"):
        step()


def test_verbose_logger_that_was_dropped(set_logger: Callable[[Any], Any]) -> None:
    lines: list[str] = []
    logger = Logger()
    logger.lines = lines
    set_logger(logger)
    del logger
    with retrograd.enable(backend=raw):
        torch.testing.assert_close(*step())
    assert len(lines) == 1
    assert "Cache miss due to new autograd node" in lines[0]


def test_backend_that_is_nothing_of_the_kind() -> None:
    with pytest.raises(ValueError, match="unknown backend 'inductr'"):
        retrograd.enable(backend="inductr")
    for bad in (3, None, b"schedule"):
        with pytest.raises(TypeError, match="a backend is a name or a compiler function"):
            retrograd.enable(backend=bad)  # type: ignore[arg-type]
    for bad in (1, "yes"):
        with pytest.raises(TypeError, match="dynamic must be"):
            retrograd.enable(backend=raw, dynamic=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dynamic is for compiler functions"):
        retrograd.set_default("schedule", dynamic=True)


def test_node_that_cannot_be_captured_gives_the_error_of_stock_and_leaves_the_graph_whole() -> None:
    def program() -> tuple[Tensor, Tensor]:
        x = leaf(3)
        nested = torch.nested.as_nested_tensor([x.exp(), x.sin()], layout=torch.jagged)
        return x, nested.cos().values().sum()

    def error_of(y: Tensor) -> tuple[type, str] | None:
        try:
            y.backward(retain_graph=True)
        except Exception as error:
            return type(error), str(error).splitlines()[0]
        return None

    retrograd.uninstall()
    with front_end._enable(raw, dynamic=False):
        want = error_of(program()[1])
    front_end.reset()
    retrograd.install()
    x, y = program()
    with retrograd.enable(backend=raw):
        got = error_of(y)
    assert got == want
    assert got is not None
    y.backward()
    x_eager, y_eager = program()
    y_eager.backward()
    torch.testing.assert_close(x.grad, x_eager.grad)


def test_a_graph_whose_capture_fails_in_the_middle_is_whole_again() -> None:
    class Front(front_end.AutogradCompilerInstance):
        def apply_functional(self, fn_name: str, *args: Any) -> Any:
            if fn_name == "MulBackward0":
                raise LookupError("in the middle")
            return super().apply_functional(fn_name, *args)

    x, w = leaf(3), leaf(3, seed=1)
    y = (x * w).exp().sum()
    prior = binding.set_autograd_compiler(lambda: Front(raw), True)
    try:
        with pytest.raises(LookupError, match="in the middle"):
            y.backward(retain_graph=True)
    finally:
        binding.set_autograd_compiler(*prior)
    y.backward()
    torch.testing.assert_close(x.grad, (x * w).exp().mul(w).detach())
    torch.testing.assert_close(w.grad, (x * w).exp().mul(x).detach())


def test_a_second_backward_of_a_freed_graph() -> None:
    x = leaf(3)
    y = x.exp().sum()
    with retrograd.enable(backend=raw):
        y.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            y.backward()


def test_what_a_compiler_function_holds_is_let_go_of() -> None:
    class Held:
        pass

    held = Held()
    alive = weakref.ref(held)

    def make(thing: Held) -> Callable[[GraphModule], GraphModule]:
        def compiler(graph: GraphModule) -> GraphModule:
            assert thing is not None
            return graph

        return compiler

    compiler = make(held)
    with retrograd.enable(backend=compiler):
        step()
    del compiler, held
    retrograd.cache_clear()
    with retrograd.enable(backend=raw):
        step(4)  # a thread keeps the plans that it used last until its next call
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None


class Picky(Exception):
    def __init__(self, number: int, held: object) -> None:
        super().__init__(number, held)
        self.number = number

    def __str__(self) -> str:
        return f"number {self.number}"


@pytest.mark.parametrize("kind", ["plain", "picky", "chained"])
def test_an_error_of_the_compiler_does_not_keep_its_callers_variables(kind: str) -> None:
    class Held:
        pass

    def compiler(graph: GraphModule) -> Any:
        held = Held()
        alive.append(weakref.ref(held))
        if kind == "picky":
            raise Picky(3, held)
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("bad", 7) from (inner if kind == "chained" else None)

    alive: list[weakref.ref[Any]] = []
    want = {"plain": "ValueError: ('bad', 7)", "picky": "RuntimeError: Picky: number 3"}
    with retrograd.enable(backend=compiler):
        for _ in range(3):
            with pytest.raises((ValueError, Picky)) as caught:
                step()
            assert "compiler" in [entry.name for entry in caught.traceback]
            del caught
        with pytest.raises(RuntimeError, match="failed 3 times") as last:
            step()
    cause = last.value.__cause__
    assert f"{type(cause).__name__}: {cause}" == want.get(kind, want["plain"])
    del last, cause
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
@pytest.mark.parametrize("why", ["create_graph", "not_capturable", "inside_capture"])
def test_what_runs_on_no_compiled_graph_looks_for_nan_under_anomaly_mode(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backward() -> None:
        x = leaf(3)
        if why == "not_capturable":
            x.grad_dtype = None
        y = (x * 0).abs().sqrt().mul(0).sum()
        with pytest.raises(RuntimeError, match="Function 'SqrtBackward0' returned nan values in its 0th output"):
            torch.autograd.backward(y, create_graph=why == "create_graph")
        assert x.grad is None
        torch.autograd.backward((x * x).sum(), create_graph=why == "create_graph")
        torch.testing.assert_close(x.grad.detach(), 2 * x.detach())
        if why == "create_graph":
            torch.testing.assert_close(torch.autograd.grad(x.grad.sum(), x), (torch.full((3,), 2.0),))

    calls = []

    class Front(front_end.AutogradCompilerInstance):
        def begin_capture(self, *args: Any) -> Any:
            calls.append("begin")
            with torch.enable_grad():
                backward()
            return super().begin_capture(*args)

    with torch.autograd.set_detect_anomaly(True):
        if why == "inside_capture":
            with monkeypatch.context() as patch:
                patch.setattr(front_end, "AutogradCompilerInstance", Front)
                with retrograd.enable(backend=lambda graph: graph):
                    leaf(3).sin().sum().backward()
            assert calls == ["begin"]
        else:
            with retrograd.enable(backend=raw):
                backward()
    stats = retrograd.stats()
    assert stats["calls"]["schedule"] == 0
    assert stats["previous_reasons"]["anomaly_mode"] >= 2
    assert not any(stats["schedule_reasons"].values())


@pytest.mark.parametrize("inside", ["compiled", "compiler", "hook"])
def test_a_block_that_is_entered_inside_a_call_and_never_left_ends_with_it(inside: str) -> None:
    def enter() -> None:
        retrograd.enable().__enter__()
        retrograd.disable().__enter__()

    def compiler(graph: GraphModule) -> Any:
        if inside == "compiler":
            enter()

        def run(*args: Any) -> Any:
            if inside == "compiled":
                enter()
            return graph(*args)

        return run

    def path(backward: Callable[[], Any]) -> str:
        before = retrograd.stats()["calls"]
        backward()
        after = retrograd.stats()["calls"]
        (name,) = [name for name in after if after[name] != before[name]]
        return name

    def hooked() -> None:
        x = leaf(3)
        if inside == "hook":
            x.register_hook(lambda g: enter())
        x.sin().sum().backward()

    assert path(step) == "previous"
    with retrograd.enable():
        with retrograd.enable(backend=compiler if inside != "hook" else "schedule"):
            for _ in range(2):
                assert path(hooked) == ("schedule" if inside == "hook" else "callable")
        assert path(step) == "schedule"
        with retrograd.disable():
            assert path(step) == "previous"
        assert path(step) == "schedule"
    assert path(step) == "previous"
    with pytest.raises(RuntimeError, match="left on a thread that did not enter it"):
        retrograd.enable().__exit__(None, None, None)
