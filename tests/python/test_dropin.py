"""torch's own switches for compiled autograd while retrograd is installed: as stock in one thread; each thread's own.

`both` runs a program with retrograd uninstalled, then installed, and wants the same log.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle import run_threads
from test_callable_threads import (
    Compiler,
    Gate,
    Run,
    eager_gradient,
    expect_only_in_progress,
    gradient,
    held,
    in_new_process,
    integers,
    switched_on,
    tallying,
)
from torch import Tensor, nn
from torch._dynamo import compiled_autograd as front_end
from torch._dynamo.utils import counters
from torch.autograd import Variable
from torch.fx import GraphModule

import retrograd
from retrograd import _importing

binding = torch._C._dynamo.compiled_autograd

FLAGS = (
    "compiled_autograd_enabled", "compiled_autograd_enabled_force_eager", "in_compiled_autograd_region",
    "active_disable_ctx", "depth",
)  # fmt: skip
OFF = dict.fromkeys(FLAGS, False) | {"depth": 0}


def flags() -> dict[str, Any]:
    """The module's flags as a reader outside of it sees them."""
    return {name: getattr(front_end, name) for name in FLAGS}


@pytest.fixture(autouse=True)
def off_before_and_after() -> Iterator[None]:
    front_end.reset()
    assert flags() == OFF
    yield
    retrograd.install()
    front_end.reset()
    assert flags() == OFF


class Log:
    """What a program saw: the flags, who compiled, who ran."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.want = eager_gradient()

    def say(self, *values: Any) -> None:
        self.lines.append(" ".join(map(str, values)))

    def flags(self, where: str) -> None:
        """Not active_disable_ctx: stock forgets it at the end of any inner block, and of any compiled call."""
        on = {name: value for name, value in flags().items() if value and name != "active_disable_ctx"}
        self.say(where, on or "all off")

    def compiler(self, name: str) -> Callable[[GraphModule], Run]:
        def compile_(graph: GraphModule) -> Run:
            self.flags(f"{name} compiles,")

            def run(*args: Any) -> Any:
                self.flags(f"{name} runs,")
                return graph(*args)

            return run

        return compile_

    def call(self, where: str) -> None:
        """A backward whose graph is not cached; stock would give one compiler's graph to another."""
        binding.clear_cache()
        self.flags(where)
        assert gradient() == self.want
        self.flags(f"after {where}")

    @contextlib.contextmanager
    def catch(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.say(what, "raises", type(error).__name__, error)
        else:
            self.say(what, "is fine")


def both(program: Callable[[Log], None]) -> list[str]:
    """The log, which must be the same with stock and with retrograd; who ran is checked by `retrograd.stats()`."""
    logs: list[list[str]] = []
    for install in (retrograd.uninstall, retrograd.install):
        install()
        front_end.reset()
        log = Log()
        before = counters["compiled_autograd"]["captures"]
        with tallying() as tally:
            program(log)
        captures = counters["compiled_autograd"]["captures"] - before
        log.say(captures, "captures")
        logs.append(log.lines)
        if install is retrograd.install:
            runs = sum(" runs, " in line for line in log.lines)
            assert (tally.captures, tally.callable) == (captures, runs)
        else:
            assert tally.callable == tally.schedule == tally.previous == 0
        front_end.reset()
    assert logs[1] == logs[0]
    return logs[0]


# --- _enable, _disable, reset ---


def test_enable_and_disable_nest() -> None:
    def program(log: Log) -> None:
        a, b = log.compiler("a"), log.compiler("b")
        log.call("outside")
        with front_end._enable(a):
            log.call("in a")
            with front_end._enable(b, dynamic=False):
                log.call("in b")
                with front_end._disable():
                    log.call("disabled")
                    with front_end._enable(a):
                        log.call("in a again")
                    log.call("disabled again")
                    with front_end._disable():
                        log.call("disabled twice")
                    log.call("disabled once more")
                log.call("back in b")
            log.call("back in a")
        log.call("outside again")
        with front_end._disable():
            log.call("disabled, nothing to disable")
        log.flags("at the end")

    lines = both(program)
    assert any(line.startswith("b runs") for line in lines)
    assert lines[-1] == "5 captures"


def test_enable_of_a_region_that_may_be_disabled() -> None:
    def program(log: Log) -> None:
        a = log.compiler("a")
        for ignore in (True, False):
            with front_end._enable(a, ignore_active_disable_ctx=ignore):
                log.call(f"{ignore}, not disabled")
            with front_end._disable(), front_end._enable(a, True, ignore):
                log.call(f"{ignore}, disabled")
            log.flags("after")

    assert both(program)[-1] == "3 captures"


def test_active_disable_ctx_lasts_as_long_as_the_block() -> None:
    compiler = Compiler()
    with front_end._disable():
        with front_end._enable(compiler):
            gradient()
            assert front_end.active_disable_ctx
        with front_end._enable(compiler, ignore_active_disable_ctx=False), tallying() as tally:
            gradient()
        assert tally.callable == 0
    assert not front_end.active_disable_ctx
    with front_end._enable(compiler, ignore_active_disable_ctx=False), tallying() as tally:
        gradient()
    assert tally.callable == 1


def test_active_disable_ctx_after_an_inner_block() -> None:
    def program(log: Log) -> None:
        with front_end._disable():
            with front_end._disable():
                log.say("inner", front_end.active_disable_ctx)
            log.say("outer", front_end.active_disable_ctx)
        log.say("after", front_end.active_disable_ctx)

    assert both(program)[:3] == ["inner True", "outer False", "after False"]


def test_active_disable_ctx_stays_for_the_whole_of_a_compiled_call() -> None:
    seen: list[bool] = []

    def make(graph: GraphModule) -> Run:
        def run(*args: Any) -> Any:
            with front_end._disable():
                seen.append(front_end.active_disable_ctx)
            seen.append(front_end.active_disable_ctx)
            return graph(*args)

        return run

    with front_end._enable(make):
        gradient()
    assert seen == [True, True]


def test_multithreading_is_off_inside_enable() -> None:
    def program(log: Log) -> None:
        log.say(torch._C._is_multithreading_enabled())
        with front_end._enable(log.compiler("a")):
            log.say(torch._C._is_multithreading_enabled())
        log.say(torch._C._is_multithreading_enabled())

    assert both(program)[:3] == ["True", "False", "True"]


def test_wrong_order_of_leaving() -> None:
    def program(log: Log) -> None:
        outer, inner = front_end._enable(log.compiler("a")), front_end._enable(log.compiler("b"))
        outer.__enter__()
        inner.__enter__()
        with log.catch("leaving the outer one first"):
            outer.__exit__(None, None, None)
        with log.catch("leaving the inner one"):
            inner.__exit__(None, None, None)
        front_end.reset()
        log.say("depth", front_end.depth)
        log.call("after reset")
        with front_end._enable(log.compiler("c")):
            log.call("in c")

    lines = both(program)
    message = "Nested Compiled Autograd Contexts must return before their parent context"
    assert f"leaving the outer one first raises AssertionError {message}" in lines


def test_force_eager_stance() -> None:
    def program(log: Log) -> None:
        a = log.compiler("a")
        with torch.compiler.set_stance("force_eager"):
            with front_end._enable(a):
                log.call("force_eager")
            log.flags("left")
            with pytest.raises(LookupError), front_end._enable(a):
                raise LookupError
            log.flags("left by an error")
        with front_end._enable(a):
            log.call("default stance")

    lines = both(program)
    assert "force_eager {'compiled_autograd_enabled_force_eager': True}" in lines
    assert lines[-1] == "1 captures"


def test_dynamic_must_be_a_bool() -> None:
    def program(log: Log) -> None:
        for dynamic in ("yes", 1, 2.0, None, 0, True, False):
            with log.catch(f"dynamic={dynamic!r}"), front_end._enable(log.compiler("a"), dynamic):  # type: ignore[arg-type]
                log.call("inside")
            log.flags("after")

    assert "dynamic='yes' raises AssertionError Expected dynamic to be bool, got <class 'str'>" in both(program)


def test_leaving_by_an_error_restores() -> None:
    def program(log: Log) -> None:
        a, b = log.compiler("a"), log.compiler("b")
        with front_end._enable(a):
            with log.catch("block"), front_end._enable(b):
                with front_end._disable():
                    raise LookupError("mine")
            log.call("back in a")
        log.flags("after")

    assert both(program)[-1] == "1 captures"


def test_as_decorators() -> None:
    def program(log: Log) -> None:
        a = log.compiler("a")

        @front_end._enable(a)
        def enabled() -> None:
            log.call("enabled")
            disabled()

        @front_end._disable()
        def disabled() -> None:
            log.call("disabled")

        for _ in range(2):
            enabled()
        log.flags("after")

    assert both(program)[-1] == "2 captures"


def test_reset() -> None:
    def program(log: Log) -> None:
        a = log.compiler("a")
        scope = front_end._enable(a)
        scope.__enter__()
        log.call("in a")
        front_end.reset()
        log.say("enabled", front_end.compiled_autograd_enabled, "empty", binding.is_cache_empty())
        log.say("prior", binding.set_autograd_compiler(None, False))
        front_end.reset()
        binding.clear_cache()
        assert gradient() == eager_gradient()
        with contextlib.suppress(AssertionError):
            scope.__exit__(None, None, None)
        front_end.reset()
        log.flags("at the end")

    assert both(program)[-1] == "1 captures"


def test_reset_takes_the_logger_away_and_numbers_graphs_anew() -> None:
    def program(log: Log) -> None:
        logger = Logger()
        binding.set_verbose_logger(logger)
        next(front_end.COMPILE_COUNTER)
        front_end.reset()
        with front_end._enable(log.compiler("a")):
            log.say(next(front_end.COMPILE_COUNTER))
            for size in (4, 5):
                torch.ones(size, requires_grad=True).sum().backward()
        log.say(len(logger.messages), "messages")

    lines = both(program)
    assert lines[0] == "0" and "0 messages" in lines


def test_reset_inside_a_compiled_graph_is_refused() -> None:
    def program(log: Log) -> None:
        def compiler(graph: GraphModule) -> Run:
            def run(*args: Any) -> Any:
                log.flags("x runs,")
                with log.catch("reset"):
                    front_end.reset()
                return graph(*args)

            return run

        with front_end._enable(compiler):
            gradient()

    assert "reset raises AssertionError Cannot reset while in_compiled_autograd_region is True" in both(program)


def test_flags_in_hooks_and_nested_calls() -> None:
    def program(log: Log) -> None:
        def hook(grad: Tensor) -> None:
            log.flags("hook")
            with front_end._disable():
                log.flags("disabled in the hook")
            log.flags("hook again")
            with torch.enable_grad(), front_end._disable():
                gradient()
            log.flags("hook at its end")

        with front_end._enable(log.compiler("a")):
            x = integers(4).requires_grad_()
            y = x * 3
            y.register_hook(hook)
            y.sum().backward()
            log.flags("after")

    assert both(program)[-1] == "1 captures"


def test_dynamo_reset_keeps_the_switches_in_order() -> None:
    def program(log: Log) -> None:
        for _ in range(2):
            with front_end._enable(log.compiler("a")):
                log.call("in a")
            torch._dynamo.reset()
            log.say("empty", binding.is_cache_empty())
            log.flags("after")

    both(program)


def test_functorch_inside_enable() -> None:
    """torch.func uses `_disable` around its own calls."""

    def program(log: Log) -> None:
        with front_end._enable(log.compiler("a")):
            x = integers(4)
            log.say(torch.func.grad(lambda y: (y * y).sum())(x).tolist())
            log.say(torch.func.vmap(torch.func.grad(lambda y: y * y))(x).tolist())
            log.say(torch.func.jacrev(lambda y: y * 2)(x).tolist())
            log.flags("after")

    assert both(program)[-1] == "0 captures"


# --- set_autograd_compiler and the cache's switches ---


def silent(log: Log, name: str) -> Callable[[GraphModule], Run]:
    """Does not log flags: with this switch alone stock does not raise compiled_autograd_enabled, and retrograd does."""

    def compile_(graph: GraphModule) -> Run:
        def run(*args: Any) -> Any:
            log.say(name, "runs, at last")
            return graph(*args)

        return run

    return compile_


def test_set_autograd_compiler_returns_what_was_set_before() -> None:
    def program(log: Log) -> None:
        def partial(name: str) -> Any:
            return functools.partial(front_end.AutogradCompilerInstance, silent(log, name))

        a, b = partial("a"), partial("b")
        names = {a: "a", b: "b", None: None}
        for compiler, dynamic in (
            (a, True),
            (b, False),
            (b, True),
            (a, False),
            (None, False),
            (a, True),
            (None, False),
        ):
            prior, was_dynamic = binding.set_autograd_compiler(compiler, dynamic)
            log.say(names[prior], was_dynamic)
            if compiler is not None:
                binding.clear_cache()
                assert gradient() == eager
                log.say("ran")
        log.say(*binding.set_autograd_compiler(None, False))

    eager = eager_gradient()
    assert both(program)[0] == "None False"


def test_set_autograd_compiler_with_a_front_end_of_ones_own() -> None:
    def program(log: Log) -> None:
        class FrontEnd(front_end.AutogradCompilerInstance):
            def begin_capture(self, *args: Any, **kwargs: Any) -> Any:
                log.say("begins")
                return super().begin_capture(*args, **kwargs)

        compiler = silent(log, "a")
        prior = binding.set_autograd_compiler(lambda: FrontEnd(compiler), False)
        for _ in range(2):
            assert gradient() == eager
        binding.set_autograd_compiler(*prior)
        assert gradient() == eager

    eager = eager_gradient()
    lines = both(program)
    assert lines.count("begins") == 1
    assert lines[-1] == "1 captures"


def test_set_autograd_compiler_goes_back_to_what_was_there_each_time() -> None:
    factory = functools.partial(front_end.AutogradCompilerInstance, Compiler())
    for scope, path in ((contextlib.nullcontext(), "previous"), (retrograd.enable("schedule"), "schedule")):
        with scope:
            binding.set_autograd_compiler(factory, False)
            binding.set_autograd_compiler(None, False)
            with tallying() as tally:
                gradient()
            assert getattr(tally, path) == 1


class OwnWrapper(front_end.AutogradCompilerInstance):
    """Has a runtime wrapper of its own, which may use torch's or not."""

    uses_torchs = True

    def end_capture(self, *args: Any, **kwargs: Any) -> Any:
        wrapper, compiled = super().end_capture(*args, **kwargs)

        def own(compiled: Run, inputs: list[Any], *more: Any) -> Any:
            return wrapper(compiled, inputs, *more) if self.uses_torchs else compiled(inputs, *more)

        return own, compiled


def test_calls_nested_in_a_graph_of_a_front_end_of_ones_own() -> None:
    """They are compiled, and can be switched off, as in a graph of torch's."""
    want = eager_gradient(1)

    def make(graph: GraphModule) -> Run:
        def run(*args: Any) -> Any:
            if outermost:
                outermost.clear()
                for scope in (front_end._disable(), contextlib.nullcontext()):
                    with torch.enable_grad(), scope, tallying() as tally:
                        assert gradient(1) == want
                    counts.append((tally.callable, tally.previous))
            return graph(*args)

        return run

    outermost, counts = [True], list[tuple[int, int]]()
    with switched_on(lambda: OwnWrapper(make), False):
        gradient()
    assert counts == [(0, 1), (1, 0)]


def test_a_front_end_that_does_not_enter_a_region() -> None:
    class NoRegion(OwnWrapper):
        uses_torchs = False

    with switched_on(lambda: NoRegion(Compiler()), False):
        gradient()
        with front_end._disable(), tallying() as tally:
            gradient()
    assert (tally.callable, tally.previous) == (0, 1)


# --- What the call of a compiled graph leaves behind ---


def test_compile_context_is_the_calls_own() -> None:
    seen: list[Any] = []

    def make(graph: GraphModule) -> Run:
        def run(*args: Any) -> Any:
            seen.append(torch._guards.CompileContext.current_compile_id())
            return graph(*args)

        return run

    outer = torch._guards.CompileContext(torch._guards.CompileId(frame_id=1, frame_compile_id=2))
    with torch._guards.compile_context(outer), retrograd.enable(backend=make):
        gradient()
        assert torch._guards.CompileContext.try_get() is outer
    assert torch._guards.CompileContext.try_get() is None
    assert seen[0].compiled_autograd_id is not None


def test_nan_checks_keep_no_parameters() -> None:
    inputs: list[Any] = []

    def make(graph: GraphModule) -> Run:
        def run(args: list[Any], *more: Any) -> Any:
            inputs.extend(weakref.ref(arg) for arg in args)
            return graph(args, *more)

        return run

    with torch.autograd.detect_anomaly(check_nan=True), retrograd.enable(backend=make), tallying() as tally:
        gradient()
    gc.collect()
    assert tally.callable == 1 and inputs
    assert [ref() for ref in inputs] == [None] * len(inputs)


def expanded(size: int) -> list[float]:
    x = torch.ones(1, requires_grad=True)
    x.expand(size).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


def test_sizes_are_the_calls_own() -> None:
    """Whatever a compiled function does with the list of them."""

    def make(graph: GraphModule) -> Run:
        def run(inputs: list[Any], sizes: list[Any], *more: Any) -> Any:
            got = graph(inputs, sizes.copy(), *more)
            numbers.append(len(sizes))
            sizes.clear()
            return got

        return run

    numbers: list[int] = []
    with retrograd.enable(backend=make, dynamic=True):
        for size in (3, 3, *range(1, 60)):
            assert expanded(size) == [size]
    assert set(numbers) == {numbers[0]} and numbers[0] > 0


def test_sizes_are_dynamic_to_dynamo() -> None:
    torch._dynamo.reset()
    graphs = Compiler()
    with retrograd.enable(
        backend=lambda graph: torch.compile(graph, backend=lambda g, _: graphs(g), dynamic=None), dynamic=True
    ):
        for size in (3, 4, 5, 6):
            assert expanded(size) == [size]
    assert len(graphs.graphs) == 1


def test_set_autograd_compiler_checks_its_arguments() -> None:
    def program(log: Log) -> None:
        factory = functools.partial(front_end.AutogradCompilerInstance, log.compiler("a"))
        for arguments in ((), (factory,), (factory, True, 3)):
            try:
                binding.set_autograd_compiler(*arguments)
            except TypeError:
                log.say(len(arguments), "TypeError")
        with pytest.raises(TypeError):
            binding.set_autograd_compiler(compiler=None, dynamic=False)
        log.flags("after")

    assert both(program)[:3] == ["0 TypeError", "1 TypeError", "3 TypeError"]


def test_prior_compiler_put_back_inside_retrograd_enable() -> None:
    """What torch's own code does around a call that must not be compiled."""
    compiler = Compiler()
    for scope in (retrograd.enable(backend=compiler, dynamic=True), front_end._enable(compiler)):
        with scope:
            prior = binding.set_autograd_compiler(None, False)
            with tallying() as tally:
                gradient()
            assert (tally.callable, tally.previous) == (0, 1)
            assert binding.set_autograd_compiler(*prior) == (None, False)
            assert front_end.compiled_autograd_enabled
            with tallying() as tally:
                gradient()
            assert (tally.callable, tally.previous) == (1, 0)
        assert prior[1] is True and prior[0]().compiler_fn is compiler
        with tallying() as tally:
            gradient()
        assert (tally.callable, tally.previous) == (0, 1)
    assert len(compiler.graphs) == 1


def test_a_compiler_put_back_inside_a_block_is_forgotten_with_the_block() -> None:
    compiler = Compiler()
    with retrograd.enable(backend=compiler):
        binding.set_autograd_compiler(*binding.set_autograd_compiler(None, False))
    front_end.reset()
    retrograd.set_default("schedule")
    with tallying() as tally:
        gradient()
    assert tally.schedule == 1, "the thread has no setting of its own"


def test_schedule_stays_on_inside_torchs_switches() -> None:
    compiler = Compiler()
    with retrograd.enable("schedule"):
        with front_end._disable(), tallying() as tally:
            gradient()
        assert (tally.schedule, tally.previous) == (1, 0), "there was no compiler to disable"
        with front_end._enable(compiler), tallying() as tally:
            gradient()
        assert tally.callable == 1
        with tallying() as tally:
            gradient()
        assert tally.schedule == 1


def test_clear_cache_and_is_cache_empty() -> None:
    def program(log: Log) -> None:
        binding.clear_cache()
        log.say("empty", binding.is_cache_empty())
        with front_end._enable(log.compiler("a")):
            for _ in range(2):
                gradient()
            log.say("empty", binding.is_cache_empty())
            binding.clear_cache()
            log.say("empty", binding.is_cache_empty())
            gradient()
            log.say("empty", binding.is_cache_empty())

    lines = both(program)
    assert [line for line in lines if "empty" in line] == ["empty True", "empty False", "empty True", "empty False"]
    assert lines[-1] == "2 captures"


class Logger:
    def __init__(self) -> None:
        self.messages: list[str] = []

    def debug(self, *message: Any) -> None:
        self.messages.append(" ".join(map(str, message)))


def test_verbose_logger() -> None:
    def program(log: Log) -> None:
        logger = Logger()
        log.say(binding.set_verbose_logger(logger))
        with front_end._enable(log.compiler("a"), dynamic=False):
            for size in (4, 4, 5, 6):
                x = torch.ones(size, requires_grad=True)
                x.expand(2, size).sum().backward()
                log.say(len(logger.messages), "messages")
            log.say(*(message.partition(":")[0].partition(" with")[0] for message in logger.messages))
            log.say(binding.set_verbose_logger(None))
            gradient()
        log.say(len(logger.messages), "messages")

    lines = both(program)
    assert "2 messages" in lines and lines[-1] == "3 captures"


def test_verbose_logger_is_the_threads_own() -> None:
    mine, other, compiler = Logger(), Logger(), Compiler()

    def work() -> None:
        with front_end._enable(compiler):
            gradient(1)
        assert not mine.messages
        binding.set_verbose_logger(other)
        with front_end._enable(compiler):
            gradient(2)

    binding.set_verbose_logger(mine)
    run_threads([work])
    assert len(other.messages) == 1 and not mine.messages
    with front_end._enable(compiler):
        gradient(3)
    assert len(other.messages) == 1 and len(mine.messages) == 1
    binding.set_verbose_logger(None)


def test_cpp_tensor_hooks_outside_of_a_call() -> None:
    def program(log: Log) -> None:
        with pytest.raises(RuntimeError):
            binding.call_cpp_tensor_pre_hooks(0, torch.ones(1))
        x = integers(4).requires_grad_()
        y = x * 3
        y.retain_grad()  # a C++ hook
        with front_end._enable(log.compiler("a")):
            y.sum().backward()
        assert y.grad is not None and x.grad is not None
        log.say(y.grad.tolist(), x.grad.tolist())

    assert both(program)[-1] == "1 captures"


# --- Flags are each thread's own ---


def test_flags_are_each_threads_own() -> None:
    compiler, meet = Compiler(), threading.Barrier(4)
    on = {**OFF, "compiled_autograd_enabled": True, "depth": 1}
    disabled = {**OFF, "active_disable_ctx": True}
    inside = {**OFF, "in_compiled_autograd_region": True, "active_disable_ctx": True, "depth": 1}

    @contextlib.contextmanager
    def in_region() -> Iterator[None]:
        gate = Gate()

        def make(graph: GraphModule) -> Run:
            def run(*args: Any) -> Any:
                seen.append(flags())
                gate()
                seen.append(flags())
                return graph(*args)

            return run

        seen: list[dict[str, Any]] = []

        def work() -> None:
            with front_end._enable(make):
                gradient()

        with held(gate, work):
            yield
        assert seen == [inside, inside]

    def work(scope: Callable[[], Any], want: dict[str, Any]) -> None:
        for _ in range(5):
            meet.wait(60)
            with scope():
                meet.wait(60)
                assert flags() == want
                meet.wait(60)
            meet.wait(60)
            assert flags() == OFF

    run_threads(
        [
            lambda: work(lambda: front_end._enable(compiler), on),
            lambda: work(front_end._disable, disabled),
            lambda: work(contextlib.nullcontext, OFF),
            lambda: work(in_region, OFF),
        ]
    )


def test_force_eager_flag_is_each_threads_own() -> None:
    with torch.compiler.set_stance("force_eager"), front_end._enable(Compiler()):
        assert front_end.compiled_autograd_enabled_force_eager
        run_threads([lambda: pytest.fail("seen") if front_end.compiled_autograd_enabled_force_eager else None])


def test_functions_inside_torch_see_the_threads_flags() -> None:
    """`reset` and `_enable(ignore_active_disable_ctx=False)` decide by flags of the calling thread."""
    gate, compiler = Gate(), Compiler()

    def make(graph: GraphModule) -> Run:
        def run(*args: Any) -> Any:
            with pytest.raises(AssertionError, match="Cannot reset while"):
                front_end.reset()
            gate()
            return graph(*args)

        return run

    def work() -> None:
        with front_end._enable(make):
            gradient()

    with held(gate, work):
        front_end.reset()  # the other thread is in a region, this one is not
        with front_end._enable(compiler, ignore_active_disable_ctx=False):
            gradient()
    assert len(compiler.graphs) == 1


def test_code_traced_by_dynamo_sees_the_threads_flags() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def traced(x: Tensor) -> Tensor:
        if front_end.compiled_autograd_enabled:
            return x + 1
        if front_end.in_compiled_autograd_region:
            return x + 2
        return x + 3

    zero, meet = torch.zeros(()), threading.Barrier(3)
    seen: list[float] = []

    def make(graph: GraphModule) -> Run:
        def run(*args: Any) -> Any:
            seen.append(traced(zero).item())
            return graph(*args)

        return run

    def work(scope: Callable[[], Any], want: float) -> None:
        for _ in range(5):
            meet.wait(60)
            with scope():
                meet.wait(60)
                assert traced(zero).item() == want
            meet.wait(60)
            assert traced(zero).item() == 3

    with torch.no_grad():
        assert traced(zero).item() == 3
        with front_end._enable(Compiler()):
            assert traced(zero).item() == 1
        with front_end._enable(make), torch.enable_grad():
            gradient()
        assert seen == [2]
        run_threads(
            [
                lambda: work(lambda: front_end._enable(Compiler()), 1),
                lambda: work(front_end._disable, 3),
                lambda: work(contextlib.nullcontext, 3),
            ]
        )


# --- torch.compile ---


def training_step(backend: str, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Forward and backward inside one compiled function."""

    def step(x: Tensor) -> Tensor:
        loss = model(x).pow(2).sum()
        loss.backward()
        return loss.detach()

    return torch.compile(step, backend=backend)


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def gradients(model: nn.Module, x: Tensor, step: Callable[[Tensor], Any] | None = None) -> list[Tensor]:
    model.zero_grad()
    if step is None:
        model(x).pow(2).sum().backward()
    else:
        step(x)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_training_step(backend: str) -> None:
    torch._dynamo.reset()
    model = small_model()
    xs = [torch.randn(3, 4) for _ in range(3)]
    want = [gradients(model, x) for x in xs]
    assert len(want[0]) == 4
    with torch._dynamo.config.patch(compiled_autograd=True):
        step = training_step(backend, model)
        with tallying() as tally:
            torch.testing.assert_close(gradients(model, xs[0], step), want[0])
        # AOTAutograd differentiates while it traces, with everything switched off.
        assert (tally.captures, tally.callable, tally.schedule) == (1, 1, 0)
        assert tally.previous == (0 if backend == "eager" else 1)
        with tallying() as tally:
            for _ in range(3):
                for x, expected in zip(xs, want, strict=True):
                    torch.testing.assert_close(gradients(model, x, step), expected)
        assert (tally.callable, tally.hits, tally.misses) == (9, 9, 0), (
            "a new compiler function each time, the same graph"
        )
        assert (tally.captures, tally.previous, tally.schedule) == (0, 0, 0)
    assert flags() == OFF


def test_compiled_training_step_is_compiled_once_by_dynamo() -> None:
    """Dynamo looks at every Python frame that runs inside of a compiled step. None of retrograd's are for it."""

    def compiles() -> int:
        return sum(torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER.values())

    torch._dynamo.reset()
    model, x = small_model(), torch.randn(3, 4)
    want = gradients(model, x)
    with torch._dynamo.config.patch(compiled_autograd=True, error_on_recompile=True):
        step = training_step("aot_eager", model)
        gradients(model, x, step)
        once = compiles()
        assert once > 0
        for _ in range(3):
            torch.testing.assert_close(gradients(model, x, step), want)
        assert compiles() == once


def test_making_the_compiled_step_anew_captures_nothing_anew() -> None:
    torch._dynamo.reset()
    model, x = small_model(), torch.randn(3, 4)
    want = gradients(model, x)

    def step(x: Tensor) -> None:
        model(x).pow(2).sum().backward()

    for backend in ("eager", "aot_eager"):
        with torch._dynamo.config.patch(compiled_autograd=True), tallying() as tally:
            for _ in range(4):
                torch.testing.assert_close(gradients(model, x, torch.compile(step, backend=backend)), want)
        assert (tally.captures, tally.callable) == (1, 4)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("shared", [True, False])
def test_compiled_training_step_in_four_threads(backend: str, shared: bool) -> None:
    """A model for each thread; `shared`: one compiled function for all, else each thread compiles its own."""
    torch._dynamo.reset()
    models, calls = [small_model() for _ in range(4)], 10
    x = torch.randn(3, 4)
    want = gradients(models[0], x)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).pow(2).sum()
        loss.backward()
        return loss.detach()

    compiled = None
    if shared:
        with torch._dynamo.config.patch(compiled_autograd=True):
            compiled = torch.compile(step, backend=backend)

    def work(model: nn.Module) -> None:
        with torch._dynamo.config.patch(compiled_autograd=True):
            mine = compiled if compiled is not None else torch.compile(step, backend=backend)
            for _ in range(calls):
                torch.testing.assert_close(gradients(model, x, lambda x: mine(model, x)), want)
        assert flags() == OFF

    with tallying() as tally:
        run_threads([lambda m=m: work(m) for m in models])
    assert tally.previous <= 4, "at most one for each time that AOTAutograd traces"
    assert tally.callable + tally.schedule == 4 * calls
    assert tally.schedule == sum(tally.fallbacks.values())
    assert tally.callable > 0 and tally.captures <= 4, "one for each time that the forward was compiled"
    with tallying() as tally:
        run_threads([lambda m=m: work(m) for m in models])
    assert (tally.callable, tally.hits, tally.captures, tally.previous) == (4 * calls, 4 * calls, 0, 0)


def test_four_threads_train_one_model_with_compiled_steps() -> None:
    torch._dynamo.reset()
    w, x, calls = integers(4, 4).requires_grad_(), integers(3, 4, seed=1), 20
    (x @ w).relu().sum().backward()
    once, w.grad = w.grad, None
    assert once is not None

    def work() -> None:
        with torch._dynamo.config.patch(compiled_autograd=True):

            @torch.compile(backend="aot_eager")
            def step() -> None:
                (x @ w).relu().sum().backward()

            for _ in range(calls):
                step()

    with tallying() as tally:
        run_threads([work] * 4)
    assert tally.previous <= 4 and tally.callable > 0
    assert tally.callable + tally.schedule == 4 * calls
    assert w.grad is not None and torch.equal(w.grad, once * 4 * calls)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_forward_with_enable_around(backend: str) -> None:
    torch._dynamo.reset()
    model, x = small_model(), torch.randn(3, 4)
    want = gradients(model, x)
    compiled = torch.compile(model, backend=backend)
    compiler = Compiler()
    for run in range(3):
        with front_end._enable(compiler), tallying() as tally:
            model.zero_grad()
            compiled(x).pow(2).sum().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], want)
        assert (tally.callable, tally.captures) == (1, int(run == 0))
    (graph,) = compiler.graphs
    assert any("aot" in node.name for node in graph.graph.nodes), "the forward's own backward graph is pasted in"


def test_compiled_forward_with_enable_around_in_threads() -> None:
    torch._dynamo.reset()
    model, x = small_model(), torch.randn(3, 4)
    want = gradients(model, x)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    compiler = Compiler(lambda graph: torch.compile(graph, backend="eager"))

    def work() -> None:
        with front_end._enable(compiler):
            for _ in range(10):
                got = torch.autograd.grad(compiled(x).pow(2).sum(), list(model.parameters()))
                torch.testing.assert_close(list(got), want)

    with tallying() as tally:
        run_threads([work] * 4)
    expect_only_in_progress(tally)
    assert tally.captures == len(compiler.graphs) == 1


def test_maybe_enable_compiled_autograd() -> None:
    with torch._dynamo.utils.maybe_enable_compiled_autograd(True), tallying() as tally:
        for _ in range(2):
            assert gradient() == eager_gradient()
    assert (tally.callable, tally.captures) == (2, 1)


# --- Installing and uninstalling ---


BINDINGS = ("set_autograd_compiler", "clear_cache", "is_cache_empty", "set_verbose_logger", "call_cpp_tensor_pre_hooks")
PLACES = [
    *((binding, name) for name in BINDINGS),
    *((front_end, name) for name in ("_enable", "_disable", "reset", "AutogradCompilerInstance", "ops", "verbose_log")),
    (Variable, "_execution_engine"),
    (torch._C, "_current_autograd_node"),
    (torch._C._autograd.SavedTensor, "register_hooks"),
]


def everything() -> list[Any]:
    return [(name, getattr(owner, name)) for owner, name in PLACES] + [type(front_end)]


def test_uninstall_restores_everything_every_time() -> None:
    retrograd.uninstall()
    stock = everything()
    assert type(front_end) is types.ModuleType
    for _ in range(5):
        retrograd.install()
        assert everything() != stock
        compiler = Compiler()
        with front_end._enable(compiler), tallying() as tally:
            assert gradient() == eager_gradient()
        assert (tally.callable, len(compiler.graphs)) == (1, 1)
        assert flags() == OFF
        retrograd.uninstall()
        restored = everything()
        assert [a for a, b in zip(restored, stock, strict=True) if a != b] == []
        assert flags() == OFF
        assert {name: vars(front_end)[name] for name in FLAGS} == OFF
        binding.clear_cache()
        stock_compiler = Compiler()
        with front_end._enable(stock_compiler), tallying() as tally:
            assert flags() == {**OFF, "compiled_autograd_enabled": True, "depth": 1}
            assert gradient() == eager_gradient()
        assert (tally.callable, tally.schedule, tally.previous) == (0, 0, 0), "stock alone"
        assert len(stock_compiler.graphs) == 1
        assert not binding.is_cache_empty()
        assert flags() == OFF


ORDERS = {
    "stock first": ["stock", "ours", "stock"],
    "ours first": ["ours", "stock", "ours"],
    "ours only": ["ours", "ours"],
}


@pytest.mark.parametrize("order", ORDERS)
def test_engines_in_turn_in_a_new_process(order: str) -> None:
    """libtorch hands over each function once in a process: whoever comes second must get it from the first."""
    output = in_new_process(
        f"""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.GELU(), torch.nn.Linear(4, 4))
    def call():
        net.zero_grad()
        x = torch.ones(3, 4, requires_grad=True)
        y = net(x).softmax(-1)
        y = y.clone()
        y[0] = y[0] * 2  # copy-slices
        torch.cat([y, x]).pow(2).sum().backward()
        return [x.grad, *(p.grad for p in net.parameters())]
    want = call()
    for turn in {ORDERS[order]!r}:
        (retrograd.install if turn == "ours" else retrograd.uninstall)()
        graphs = []
        def compiler(graph):
            graphs.append(graph)
            return graph
        torch._C._dynamo.compiled_autograd.clear_cache()
        for _ in range(2):
            with front_end._enable(compiler):
                torch.testing.assert_close(call(), want)
        assert len(graphs) == 1, (turn, len(graphs))
        print(turn, retrograd.stats()["calls"]["callable"])
        retrograd.reset_stats()
    """
    )
    assert output.split("\n")[:-1] == [f"{turn} {2 if turn == 'ours' else 0}" for turn in ORDERS[order]]


def test_install_and_uninstall_inside_each_others_blocks() -> None:
    want = eager_gradient()
    for first, second in ((retrograd.uninstall, retrograd.install), (retrograd.install, retrograd.uninstall)):
        for enter in (front_end._enable, None):
            first()
            compiler = Compiler()
            scope = (enter or front_end._enable)(compiler)
            with contextlib.suppress(AssertionError):
                with scope:
                    assert gradient() == want
                    second()
                    assert gradient() == want
            retrograd.install()
            front_end.reset()
            assert flags() == OFF
            with tallying() as tally:
                assert gradient() == want
            assert (tally.previous, tally.callable) == (1, 0)
            with front_end._enable(compiler), tallying() as tally:
                assert gradient() == want
            assert tally.callable == 1
            retrograd.uninstall()
            front_end.reset()
            assert flags() == OFF
            retrograd.install()


def test_install_and_uninstall_while_threads_use_the_switches() -> None:
    stop, want = threading.Event(), eager_gradient()

    def work() -> None:
        while not stop.is_set():
            with retrograd.enable("schedule") if retrograd.is_installed() else contextlib.nullcontext():
                assert gradient() == want

    def toggle() -> None:
        try:
            for _ in range(100):
                retrograd.uninstall()
                retrograd.install()
                with front_end._enable(Compiler()), tallying() as tally:
                    assert gradient() == want
                assert tally.callable == 1
        finally:
            stop.set()

    def careful() -> None:
        with contextlib.suppress(RuntimeError):  # enable() right after uninstall()
            work()

    run_threads([toggle, careful, careful])


def test_custom_front_end_may_be_used_by_several_threads() -> None:
    compiler, want = Compiler(), eager_gradient(1)
    factory = functools.partial(front_end.AutogradCompilerInstance, compiler)

    def work() -> None:
        with switched_on(factory, False):
            for _ in range(10):
                assert gradient(1) == want

    with tallying() as tally:
        run_threads([work] * 4)
    expect_only_in_progress(tally)
    assert tally.captures == len(compiler.graphs) == 1


@pytest.mark.parametrize(
    "first_use",
    [
        "import torch._dynamo",
        "import torch._dynamo.compiled_autograd",
        "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1))",
    ],
)
def test_dynamo_may_be_imported_after_install(first_use: str) -> None:
    program = f"""
import sys, torch, retrograd
retrograd.install()
assert "torch._dynamo" not in sys.modules
{first_use}
assert type(torch._dynamo.compiled_autograd).__name__ == "FrontEndModule"
retrograd.uninstall()
assert type(torch._dynamo.compiled_autograd).__name__ == "module"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_uninstall_leaves_what_others_have_put_in_since() -> None:
    retrograd.uninstall()
    places = [(binding, "clear_cache"), (front_end, "reset"), (torch._C, "_current_autograd_node")]
    stock = [getattr(owner, name) for owner, name in places]
    retrograd.install()
    mine = [lambda: None for _ in places]
    try:
        for (owner, name), function in zip(places, mine, strict=True):
            setattr(owner, name, function)
        retrograd.uninstall()
        assert [getattr(owner, name) for owner, name in places] == mine
    finally:
        for (owner, name), function in zip(places, stock, strict=True):
            setattr(owner, name, function)


def test_a_module_that_another_thread_is_importing(tmp_path: Any) -> None:
    """It is waited for: what install() replaces is there at its end only."""
    (tmp_path / "slow_module.py").write_text("import gate\ngate.wait()\nlast = 1\n")
    sys.modules["gate"] = gate = types.ModuleType("gate")
    middle, seen = Gate(), list[int]()
    gate.wait = middle  # type: ignore[attr-defined]
    sys.path.insert(0, str(tmp_path))
    try:
        with held(middle, lambda: importlib.import_module("slow_module") and None):
            threading.Timer(0.5, middle.opened.set).start()
            _importing.when_imported("slow_module", lambda module: seen.append(module.last))  # type: ignore[arg-type,return-value]
        assert seen == [1]
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["gate"]


# --- Fork ---

FORK = """
    import contextlib, faulthandler
    from retrograd import _compilers, _dropin, _entry, _importing

    @contextlib.contextmanager
    def in_thread(body):  # body(inside, leave) in the middle of its work while the block runs, and for a moment longer
        inside, leave = threading.Event(), threading.Event()
        thread = threading.Thread(target=body, args=(inside.set, lambda: leave.wait(60)))
        thread.start()
        assert inside.wait(60)
        threading.Timer(0.5, leave.set).start()
        yield
        thread.join()

    def gradient():
        x = torch.ones(4, requires_grad=True)
        with front_end._enable(lambda graph: graph), retrograd.enable(backend=lambda graph: graph):
            (x * 3).sum().backward()
        assert x.grad.tolist() == [3.0] * 4
        assert retrograd.stats()["calls"]["callable"] > 0

    def in_child(work):
        child = os.fork()
        if child == 0:
            try:
                faulthandler.dump_traceback_later(30, exit=True)  # it hangs
                work()
                os._exit(0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
"""


def test_fork_while_another_thread_compares_compiler_functions() -> None:
    in_new_process(
        FORK
        + """
    def comparing(inside, leave):
        with _compilers._lock:
            inside()
            leave()

    for _ in range(2):
        with in_thread(comparing):
            in_child(gradient)
        gradient()
    """
    )


@pytest.mark.parametrize("what", ["install", "uninstall"])
def test_fork_while_another_thread_installs_or_uninstalls(what: str) -> None:
    """The child finds all of it or nothing, and may do it again."""
    in_new_process(
        FORK
        + f"""
    what = {what!r}
    """
        + """
    def installing(inside, leave):
        def slow(*args):
            inside()
            leave()
            return install(*args)

        install, _dropin.install = _dropin.install, slow
        _entry.install()
        _dropin.install = install

    def uninstalling(inside, leave):
        def slow():
            inside()
            leave()

        _entry._undo.append(slow)
        _entry.uninstall()

    def child():
        whole = retrograd.is_installed()
        assert whole == (what == "install")
        assert type(front_end).__name__ == ("FrontEndModule" if whole else "module")
        retrograd.uninstall()
        assert type(front_end).__name__ == "module"
        retrograd.install()
        gradient()

    if what == "install":
        retrograd.uninstall()
    with in_thread(installing if what == "install" else uninstalling):
        in_child(child)
    child()
    """
    )


def test_fork_while_another_thread_imports() -> None:
    in_new_process(
        FORK
        + """
    def importing(inside, leave):
        with _importing._lock:
            inside()
            leave()

    def child():
        retrograd.uninstall()
        retrograd.install()
        gradient()

    with in_thread(importing):
        in_child(child)
    child()
    """
    )
