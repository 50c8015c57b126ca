"""Modes of torch that change what a backward call is: what retrograd hands back, and what must still work."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from oracle import ANY, Recorder, compare, counting, leaf, previous
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._python_dispatch import TorchDispatchMode

import retrograd


@pytest.mark.parametrize("nan", [False, True])
def test_anomaly_mode_is_handed_back(nan: bool) -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        with torch.autograd.detect_anomaly():
            y = x.sin()
            z = (y * 0 / 0 if nan else y).exp().sum()
            with rec.catch():
                z.backward()
        rec.grads(x)

    want = compare(program, path=previous("anomaly_mode"))
    if nan:
        assert any("returned nan values" in line for line in want.log)
        assert any("Traceback of forward call" in w for w in want.warnings)


def test_anomaly_mode_with_an_error_of_its_own() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)

        def fails(grad: Tensor) -> None:
            raise LookupError("in the hook")

        with torch.autograd.set_detect_anomaly(True):
            y = x.exp()
            y.register_hook(fails)
            with rec.catch():
                y.sum().backward()

    compare(program, path=previous("anomaly_mode"))


class LogOperators(TorchDispatchMode):
    def __init__(self, rec: Recorder) -> None:
        super().__init__()
        self.rec = rec

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.rec.say(str(func))
        return func(*args, **(kwargs or {}))


def test_active_dispatch_mode_is_handed_back_and_sees_every_operator() -> None:
    def program(rec: Recorder) -> None:
        x, w = leaf(3), leaf(3, seed=1)
        y = (x * w).sin().sum()
        with LogOperators(rec):
            y.backward()
        rec.grads(x, w)

    assert "aten.cos.default" in compare(program, path=previous("dispatch_mode")).log


def test_dispatch_mode_inside_a_hook_only() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.sin()

        def hook(grad: Tensor) -> Tensor:
            with LogOperators(rec):
                return grad * 2

        y.register_hook(hook)
        y.exp().sum().backward()
        rec.grads(x)

    compare(program)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_level() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        with fwAD.dual_level():
            dual = fwAD.make_dual(x, torch.ones(3))
            y = dual.sin()
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            rec.say(grad, fwAD.unpack_dual(grad).tangent)

    program(Recorder())  # the first use of forward mode in a process warns
    compare(program)


def test_function_transforms() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3).detach()

        def f(x: Tensor) -> Tensor:
            return x.sin().exp().sum()

        rec.say(torch.func.grad(f)(x))
        rec.say(torch.func.hessian(f)(x))
        rec.say(torch.func.vmap(torch.func.grad(f))(torch.stack([x, x * 2])))
        rec.say(torch.func.vjp(torch.sin, x)[1](x))
        net = nn.Linear(3, 1)
        parameters = dict(net.named_parameters())

        def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(net, parameters, (x,)).pow(2).sum()

        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.stack([x, x * 2]))
        rec.say(per_sample["weight"], per_sample["bias"])

    # ANY: torch.func calls the engine with wrapped tensors; whichever engine answers, the answer is compared.
    compare(program, path=ANY)


class Tagged(Tensor):
    """A tensor subclass without behaviour of its own."""


def test_tensor_subclass_as_parameter() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3).detach().as_subclass(Tagged).requires_grad_()
        y = x.sin()
        y.register_hook(lambda g: rec.say(type(g).__name__))
        y.exp().sum().backward()
        assert x.grad is not None
        rec.say(type(x.grad).__name__, x.grad.as_subclass(Tensor))

    compare(program)


class Wrapped(Tensor):
    """A tensor subclass that wraps another and dispatches to it."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def open_(value: Any) -> Any:
            return value.inner if isinstance(value, cls) else value

        out = torch.utils._pytree.tree_map(open_, func(*torch.utils._pytree.tree_map(open_, args), **(kwargs or {})))
        return torch.utils._pytree.tree_map(lambda o: cls(o) if isinstance(o, Tensor) else o, out)


def test_wrapper_subclass() -> None:
    def program(rec: Recorder) -> None:
        x = Wrapped(leaf(3).detach()).requires_grad_()
        (x * 2 + x.sin()).sum().backward()
        rec.say(type(x.grad).__name__, x.grad.inner)

    # ANY: subclasses that dispatch may be handed back.
    compare(program, path=ANY)


def profiled(run: Callable[[], None]) -> collections.Counter[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    names = (event.name for event in profile.events())
    return collections.Counter(n for n in names if n.startswith("autograd::engine::evaluate_function: "))


def test_profiler_names_every_node() -> None:
    def run() -> None:
        x, w = leaf(3), leaf(3, seed=1)
        y = (x * w).sin()
        y.register_hook(lambda g: g * 2)
        torch.autograd.grad(y.sum(), (x,), retain_graph=True)
        y.sum().backward()

    region = "autograd::engine::evaluate_function: BackwardRegion"
    with retrograd.disable():
        want = profiled(run)
    assert want["autograd::engine::evaluate_function: SinBackward0"] == 2
    for _ in range(2):
        with counting() as calls, retrograd.enable("schedule"):
            got = profiled(run)
        assert calls.schedule == 2 and calls.previous == 0
        assert got.pop(region, 2) == 2
        assert got == want


def test_inference_mode_and_no_grad_around_backward() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3)
        y = x.sin().sum()
        with torch.no_grad():
            y.backward(retain_graph=True)
            rec.grads(x)
        with torch.inference_mode(), rec.catch():
            rec.say(torch.autograd.grad(y, x, retain_graph=True))
        with torch.autograd.set_multithreading_enabled(False):
            y.backward()
        rec.grads(x)

    compare(program)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backward_of_a_compiled_model(backend: str) -> None:
    def program(rec: Recorder) -> None:
        compiled.zero_grad()
        x = leaf(2, 4)
        for _ in range(2):
            compiled(x).pow(2).sum().backward()
        rec.module(compiled)
        rec.grads(x)

    torch._dynamo.reset()
    torch.manual_seed(1)
    compiled = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    compiled.compile(backend=backend)
    # Compiling calls backward in modes of its own: it is done before the calls are compared.
    with retrograd.enable("schedule"):
        program(Recorder())
    compare(program)


def test_dynamo_accepts_the_engine() -> None:
    engine = Variable._execution_engine
    assert isinstance(engine, torch._C._ImperativeEngine)
    ran = []

    @torch.compile(backend="eager")
    def hook(grad: Tensor) -> Tensor:
        Variable._execution_engine.queue_callback(lambda: ran.append(1))
        return grad * 2

    torch._dynamo.reset()
    x = leaf(3)
    y = x * 3
    y.register_hook(hook)
    with retrograd.enable("schedule"):
        y.sum().backward()
    assert ran == [1]
    assert x.grad is not None and x.grad.tolist() == [6.0] * 3


def test_stock_compiled_autograd_enabled_before_install_stays_until_its_block_ends() -> None:
    compiled = []

    def compiler(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    retrograd.uninstall()
    x, w = leaf(3), leaf(3, seed=1)
    with torch._dynamo.compiled_autograd._enable(compiler):
        retrograd.install()
        with counting() as calls, retrograd.enable("schedule"):
            (x * w).sin().sum().backward()
        assert (calls.schedule, calls.previous) == (0, 1)
        assert len(compiled) == 1
    with counting() as calls, retrograd.enable("schedule"):
        (x * w).sin().sum().backward()
    assert (calls.schedule, calls.previous, len(compiled)) == (1, 0, 1)


def test_warnings_from_c_plus_plus_in_a_backward_are_python_warnings() -> None:
    def program(rec: Recorder) -> None:
        x = leaf(3, 3)
        sparse = torch.eye(3).to_sparse_csr().requires_grad_()
        y = torch.mm(sparse, x)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y.sum().backward()
        rec.say([str(w.message) for w in caught])
        rec.grads(x)

    assert "beta state" in compare(program).log[0]
