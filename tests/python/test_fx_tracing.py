"""A thread that traces with torch.fx disturbs no other thread, and is disturbed by none."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle import run_threads
from test_callable_threads import Compiler, Gate, held, in_new_process
from torch import Tensor, nn
from torch.fx import _symbolic_trace as fx

import retrograd
from retrograd import _runtime  # noqa: F401  # tells Dynamo about the package, as the first capture does

x = torch.ones(2, 3)


@torch.fx.wrap
def wrapped(value: Any) -> Any:
    if isinstance(value, torch.fx.Proxy):
        raise AssertionError("traced into")
    return value + 1


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.weight


class Model(nn.Module):
    """Uses whatever a trace replaces, before and after `pause`."""

    def __init__(self, pause: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.pause = pause
        self.linear = nn.Linear(3, 3)
        nn.init.constant_(self.linear.weight, 0.5)
        nn.init.constant_(self.linear.bias, 1.0)
        self.inner = Inner()
        self.weight = nn.Parameter(torch.ones(3))

    def once(self, value: Tensor) -> Tensor:
        value = self.inner(self.linear(value)) + self.weight
        return wrapped(value) * math.sqrt(value.size(0))  # type: ignore[no-any-return]

    def forward(self, value: Tensor) -> Tensor:
        value = self.once(value)
        self.pause()
        return self.once(value)


def trace(pause: Callable[[], Any] = lambda: None) -> torch.fx.GraphModule:
    model = Model(pause)
    traced = torch.fx.symbolic_trace(model)
    assert traced.code == CODE
    if not fx.is_fx_tracing():  # of a trace around this one
        assert torch.equal(traced(x), Model()(x))
    return traced


retrograd.uninstall()
CODE = torch.fx.symbolic_trace(Model()).code  # stock, undisturbed
PLACES = [
    (nn.Module, "__call__"), (nn.Module, "__getattr__"), (math, "sqrt"), (fx, "_maybe_revert_all_patches"),
    (fx.is_fx_tracing, "__code__"), (fx.is_fx_symbolic_tracing, "__code__"),
    (inspect.unwrap(fx.Tracer.trace), "__code__"), (nn.Module.__getattr__, "__code__"), (fx, "__class__"),
    (fx, "_is_fx_tracing_flag"),
]  # fmt: skip


def everything() -> list[Any]:
    """As it is, not as descriptors give it out."""
    return [vars(owner)[name] if owner is nn.Module else getattr(owner, name) for owner, name in PLACES] + [wrapped]


STOCK = everything()


def in_traces() -> list[Any]:
    """What a trace replaces."""
    return [vars(nn.Module)["__call__"], nn.Module.__getattr__.__code__, math.sqrt, globals()["wrapped"]]


IN_TRACES = in_traces()


@pytest.fixture(autouse=True)
def restores() -> Iterator[None]:
    assert in_traces() == IN_TRACES
    yield
    retrograd.install()
    assert in_traces() == IN_TRACES
    assert not fx._is_fx_tracing_flag


@contextlib.contextmanager
def another_thread_traces() -> Iterator[None]:
    """It is in the middle of a trace while the block runs. What it traced must be right."""
    gate, done = Gate(), []
    with held(gate, lambda: done.append(trace(gate))):
        yield
    assert done, "its trace failed"


# --- One thread traces, another one works ---


def test_stock_torch_disturbs_other_threads() -> None:
    """Else retrograd need not do anything about it."""
    linear = nn.Linear(3, 3)
    compiled = torch.compile(lambda value: value + 1, backend="eager")
    compiled(x)
    retrograd.uninstall()
    with another_thread_traces():
        with pytest.raises(NameError, match="module is not installed as a submodule"):
            linear(x)
        with pytest.raises(RuntimeError, match="FX to symbolically trace a dynamo-optimized function"):
            compiled(x)
        assert fx.is_fx_tracing()


def test_modules() -> None:
    model, linear = Model(), nn.Sequential(nn.Linear(3, 3))
    want = model(x), linear(x)
    with another_thread_traces():
        assert torch.equal(model(x), want[0]) and torch.equal(linear(x), want[1])
        assert model.weight is model._parameters["weight"]
        with pytest.raises(AttributeError, match="object has no attribute 'missing'"):
            _ = model.missing
        assert nn.Module.__call__ is IN_TRACES[0]
        assert model.__call__.__func__ is IN_TRACES[0]


def test_compiled_functions() -> None:
    """Those compiled before install(), after it, and in the middle of the trace."""
    torch._dynamo.reset()
    compilers = [Compiler() for _ in range(3)]
    model = nn.Sequential(nn.Linear(3, 3), Inner())
    want = model(x)

    def compiled(compiler: Compiler) -> Callable[[Tensor], Tensor]:
        return torch.compile(lambda value: model(value), backend=lambda graph, _: compiler(graph), fullgraph=True)

    retrograd.uninstall()
    before = compiled(compilers[0])
    retrograd.install()
    after = compiled(compilers[1])
    torch.testing.assert_close([before(x), after(x)], [want] * 2)
    with another_thread_traces():
        torch.testing.assert_close([before(x), after(x)], [want] * 2)
    assert [len(compiler.graphs) for compiler in compilers] == [1, 1, 0]


class OwnGetattr(nn.Linear):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


def hooked() -> nn.Module:
    model = Inner()
    model.register_forward_hook(lambda module, args, output: output + 1)
    return nn.Sequential(model)


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(3, 3), Inner()), lambda: OwnGetattr(3, 3), hooked])
def test_compiling(make: Callable[[], nn.Module]) -> None:
    """Dynamo sees nn.Module as it is, and knows its methods by identity."""
    torch._dynamo.reset()
    model, graphs = make(), []

    def compile_() -> Tensor:
        torch._dynamo.reset()
        compiler = Compiler()
        got = torch.compile(model, backend=lambda graph, _: compiler(graph), fullgraph=True)(x)
        (graph,) = compiler.graphs
        graphs.append(graph.code)
        return got

    want = compile_()
    with another_thread_traces():
        assert torch.equal(compile_(), want)
    assert graphs[0] == graphs[1]


def test_flags() -> None:
    with another_thread_traces():
        assert not fx.is_fx_tracing() and not fx.is_fx_symbolic_tracing() and not fx._is_fx_tracing_flag
    seen: list[Any] = []
    trace(lambda: seen.extend([fx.is_fx_tracing(), fx.is_fx_symbolic_tracing(), fx._is_fx_tracing_flag]))
    assert seen == [True, True, True]


def test_a_flag_that_is_set_is_the_threads_own() -> None:
    """torch sets it around its own compilation of control flow."""

    def pause() -> None:
        fx._is_fx_tracing_flag = False
        assert not fx.is_fx_symbolic_tracing()
        fx._is_fx_tracing_flag = True

    with another_thread_traces():
        fx._is_fx_tracing_flag = True
        assert fx.is_fx_tracing() is True and fx.is_fx_symbolic_tracing() is True
        run_threads([lambda: pytest.fail("seen") if fx.is_fx_tracing() else None])
        fx._is_fx_tracing_flag = False
    trace(pause)


def test_control_flow_is_compiled_in_the_middle_of_another_threads_trace() -> None:
    def branch(value: Tensor) -> Tensor:
        return torch.cond(value.sum() > 0, lambda v: v + 1, lambda v: v - 1, (value,))  # type: ignore[no-any-return]

    want, seen = branch(x), []
    gate = Gate()

    def pause() -> None:
        gate()
        seen.append(fx.is_fx_tracing())

    with held(gate, lambda: seen.append(trace(pause))):
        torch._dynamo.reset()
        assert torch.equal(branch(x), want)
    assert len(seen) == 2 and seen[0] is True


# --- Two traces at a time ---


@pytest.mark.parametrize("ends_first", ["first", "second"])
def test_two_traces(ends_first: str) -> None:
    """What one thread has put back is still in place for the other."""
    first, second, done = Gate(), Gate(), []
    with contextlib.ExitStack() as stack:
        gates = {"first": first, "second": second}
        blocks = {}
        for name, gate in gates.items():
            blocks[name] = contextlib.ExitStack()
            blocks[name].enter_context(held(gate, lambda g=gate: done.append(trace(g))))  # type: ignore[misc]
        blocks.pop(ends_first).close()
        assert len(done) == 1
        assert in_traces() != IN_TRACES
        trace()
        stack.enter_context(blocks.popitem()[1])
    assert len(done) == 2


def test_traces_of_many_threads() -> None:
    def work() -> None:
        for _ in range(30):
            trace()
            assert Model()(x).shape == x.shape

    run_threads([work] * 4)


def test_a_trace_inside_a_trace() -> None:
    inner: list[Any] = []

    def pause() -> None:
        inner.append(trace())
        assert fx.is_fx_tracing()

    trace(pause)
    assert len(inner) == 1
    with another_thread_traces():
        trace(pause)
    assert len(inner) == 2


def test_a_trace_that_fails() -> None:
    def pause() -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        trace(pause)
    assert in_traces() == IN_TRACES and not fx.is_fx_tracing()
    with another_thread_traces():
        with pytest.raises(LookupError, match="mine"):
            trace(pause)
        assert Model()(x).shape == x.shape


# --- Dynamo inside a trace ---


@pytest.mark.parametrize("force", [True, False])
def test_a_compiled_function_inside_a_trace(force: bool) -> None:
    """As with stock: it is traced through, or compiled with nothing replaced."""
    results = []
    for install in (retrograd.uninstall, retrograd.install):
        install()
        torch._dynamo.reset()
        seen: list[Any] = []

        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            seen.append([nn.Module.__call__ is IN_TRACES[0], math.sqrt is IN_TRACES[2], wrapped is IN_TRACES[3]])
            return graph.forward

        def pause() -> None:
            seen.append(torch.compile(lambda value: value + 1, backend=backend)(x))
            seen.append([nn.Module.__call__ is IN_TRACES[0], math.sqrt is IN_TRACES[2], wrapped is IN_TRACES[3]])

        settings = {"error_on_nested_fx_trace": False, "force_compile_during_fx_trace": force}
        with torch._dynamo.config.patch(settings):
            model = Model(pause)
            torch.fx.symbolic_trace(model)
        results.append(repr(seen))
        assert in_traces() == IN_TRACES
    assert results[0] == results[1]
    assert "[True, True, True]" in results[0] or not force


# --- Installing, fork ---


def test_uninstall_restores_everything() -> None:
    retrograd.uninstall()
    assert everything() == STOCK
    for _ in range(3):
        retrograd.install()
        assert everything() != STOCK
        trace()
        retrograd.uninstall()
        assert everything() == STOCK
        trace()


def test_install_and_uninstall_in_the_middle_of_a_trace() -> None:
    for first, second in ((retrograd.install, retrograd.uninstall), (retrograd.uninstall, retrograd.install)):
        first()
        with another_thread_traces():
            second()
            if second is retrograd.uninstall:
                assert Model()(x).shape == x.shape
        assert in_traces() == IN_TRACES
        retrograd.uninstall()
        assert everything() == STOCK
        trace()


def test_fork_in_the_middle_of_another_threads_trace() -> None:
    in_new_process(
        """
    import test_fx_tracing as tests
    retrograd.install()
    def in_child(work):
        child = os.fork()
        if child == 0:
            try:
                work()
                os._exit(0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0

    def child():
        assert tests.in_traces() == tests.IN_TRACES
        tests.trace()
        assert tests.in_traces() == tests.IN_TRACES

    def child_of_a_trace():
        assert tests.in_traces() != tests.IN_TRACES

    with tests.another_thread_traces():
        in_child(child)
        tests.trace(lambda: in_child(child_of_a_trace))
        tests.trace()
    """
    )


# --- Captures ---


def test_a_capture_that_traces(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch traces a compiled forward's backward graph again if it comes from AOTAutograd's cache."""
    monkeypatch.setenv("TORCHINDUCTOR_AUTOGRAD_CACHE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = """
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    x = torch.ones(2, 4)
    want = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    compiled = torch.compile(model, backend="inductor")
    """
    in_new_process(model + "compiled(x).sum().backward()")
    in_new_process(
        model
        + """
    from oracle import run_threads
    from test_callable_threads import Gate, held
    gate, done = Gate(), []
    create_arg = torch.fx.Tracer.create_arg

    def pausing(self, *args):
        if not done and type(self).__name__ == "KeepModules" and not gate.arrived.is_set():
            gate()
        return create_arg(self, *args)

    def capture():
        with front_end._enable(lambda graph: graph):
            loss.backward()
        done.append(1)

    torch.fx.Tracer.create_arg = pausing
    loss = compiled(x).sum()
    with held(gate, capture):
        model(x)
        compiled(x)
    assert done
    torch.testing.assert_close([p.grad for p in model.parameters()], list(want))
    """
    )
