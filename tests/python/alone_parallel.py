"""`parallel=True`: independent branches at the same time, with the stock engine's bits, side effects and errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from oracle import Program, Recorder, first_difference, observe
from torch import Tensor

import retrograd
from retrograd import _C

HERE = Path(__file__).parent


def parallel(program: Program, calls: int | None = None, times: int = 3) -> None:
    """`program` on the stock engine and `times` times in parallel; `calls`: how many of its calls are, None for all."""
    with retrograd.disable():
        want = observe(program)
    for seed in range(times):
        before = retrograd.stats()
        _C.perturb_with(seed)  # 0: not at all
        with retrograd.enable("schedule", parallel=True):
            got = observe(program)
        _C.perturb_with(0)
        after = retrograd.stats()
        assert first_difference(want, got) is None, first_difference(want, got)
        ran = after["calls"]["schedule"] - before["calls"]["schedule"]
        assert after["parallel_calls"] - before["parallel_calls"] == (ran if calls is None else calls)
        assert ran > 0


def branches(x: Tensor, count: int = 6, depth: int = 5) -> list[Tensor]:
    out = []
    for i in range(count):
        y = x * (i + 1)
        for _ in range(depth):
            y = (y @ y.T).tanh() + x
        out.append(y)
    return out


def test_branches_that_meet_add_up_in_the_stock_order() -> None:
    def program(rec: Recorder) -> None:
        x = torch.randn(24, 24, requires_grad=True)
        w = torch.randn(24, 24, requires_grad=True)
        for _ in range(3):
            torch.stack([y @ w for y in branches(x)]).square().sum().backward()
        rec.grads(x, w)

    before = retrograd.stats()["helped_steps"]
    parallel(program, times=20)
    assert retrograd.stats()["helped_steps"] > before


def test_not_while_there_are_saved_tensor_hooks() -> None:
    def program(rec: Recorder) -> None:
        x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: rec.say("unpack", t) or t):
            y = x * w
        torch.stack(branches(w)).sum().backward()  # not this graph's, but there
        torch.stack(branches(y)).sum().backward()
        del y
        torch.stack(branches(w)).sum().backward()
        rec.grads(x, w)

    parallel(program, calls=1)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, rec: Recorder, name: str) -> Tensor:
        ctx.rec, ctx.name = rec, name  # type: ignore[attr-defined]
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.rec.say(ctx.name, grad, threading.current_thread().name)  # type: ignore[attr-defined]
        return grad * 2, None, None


def test_side_effects_keep_their_order_and_thread() -> None:
    def program(rec: Recorder) -> None:
        x = torch.randn(8, 8, requires_grad=True)
        leaves = [torch.randn(8, 8, requires_grad=True) for _ in range(6)]
        parts = []
        for i, (y, leaf) in enumerate(zip(branches(x), leaves, strict=True)):
            leaf.register_hook(rec.hook(f"leaf {i}"))
            leaf.register_post_accumulate_grad_hook(rec.hook(f"done {i}"))
            y.register_hook(rec.hook(f"branch {i}", lambda g: g * 0.5))
            z = Scale.apply(y * leaf, rec, f"function {i}")
            z.grad_fn.register_prehook(rec.hook(f"pre {i}"))
            z.grad_fn.register_hook(rec.hook(f"post {i}"))
            parts.append(z)
        torch.stack(parts).sum().backward()
        rec.grads(x, *leaves)

    parallel(program, times=10)


@pytest.mark.parametrize("kind", ["hook", "function", "freed"])
@pytest.mark.parametrize("where", range(4))
def test_an_error_leaves_what_the_stock_engine_leaves(kind: str, where: int) -> None:
    def program(rec: Recorder) -> None:
        x = torch.randn(8, 8, requires_grad=True)
        leaves = [torch.randn(8, 8, requires_grad=True) for _ in range(4)]
        quiet = [torch.randn(8, 8, requires_grad=True) for _ in range(4)]
        parts = []
        for i, (y, leaf) in enumerate(zip(branches(x, 4), leaves, strict=True)):
            leaf.register_post_accumulate_grad_hook(rec.hook(f"done {i}"))
            z = (y * leaf) @ quiet[i]
            if i == where:
                if kind == "hook":
                    z.register_hook(rec.hook("raises", lambda g: 1 / 0))  # type: ignore[arg-type, return-value]
                elif kind == "function":
                    z = Raises.apply(z)
                else:
                    z = z.exp()
                    z.sum().backward(inputs=[leaf])  # frees part of the graph
            parts.append(z)
        with rec.catch():
            torch.stack(parts).sum().backward()
        rec.grads(x, *leaves, *quiet)

    parallel(program, calls=1, times=8)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise RuntimeError("in backward")


def test_a_hook_that_hooks_a_node_of_its_own_branch() -> None:
    def program(rec: Recorder) -> None:
        x = torch.randn(8, 8, requires_grad=True)
        early = [y.exp() for y in branches(x, 3)]
        late = [Scale.apply(y.tanh(), rec, f"function {i}") for i, y in enumerate(early)]
        for i, (y, z) in enumerate(zip(early, late, strict=True)):
            z.register_hook(lambda g, i=i, y=y: y.grad_fn.register_prehook(rec.hook(f"added {i}")) and None)
        torch.stack(late).sum().backward()
        rec.grads(x)

    parallel(program)


def test_nested_calls_and_other_threads_at_the_same_time() -> None:
    def program(rec: Recorder) -> None:
        x = torch.randn(8, 8, requires_grad=True)
        inner = torch.randn(8, 8, requires_grad=True)
        ys = branches(x, 4)

        def nested(grad: Tensor) -> None:
            with torch.enable_grad():
                torch.stack(branches(inner, 3)).sum().backward()

        ys[1].register_hook(nested)
        torch.stack(ys).sum().backward()
        rec.grads(x, inner)

    failures: list[BaseException] = []

    def work() -> None:
        try:
            with retrograd.enable("schedule", parallel=True):
                for _ in range(20):
                    x = torch.ones(8, 8, requires_grad=True)
                    torch.stack([(x * i).sin() for i in range(5)]).sum().backward()
                    want = sum((i * torch.cos(torch.tensor(float(i))) for i in range(5)), torch.tensor(0.0))
                    assert x.grad is not None
                    torch.testing.assert_close(x.grad, want.expand(8, 8))
        except BaseException as error:
            failures.append(error)

    parallel(program, calls=2)
    with retrograd.disable():
        want = observe(program)
    threads = [threading.Thread(target=work) for _ in range(4)]
    before = retrograd.stats()
    for thread in threads:
        thread.start()
    with retrograd.enable("schedule", parallel=True):
        for _ in range(3):
            got = observe(program)
            assert first_difference(want, got) is None, first_difference(want, got)
    for thread in threads:
        thread.join()
    assert not failures
    assert retrograd.stats()["parallel_calls"] - before["parallel_calls"] == 4 * 20 + 3 * 2


def test_warnings_of_helpers_reach_the_caller() -> None:
    def program(rec: Recorder) -> None:
        x = torch.randn(64, 64, requires_grad=True)
        mask = torch.ones(64, dtype=torch.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = torch.stack([y[mask] for y in branches(x, 8)]).sum()
        loss.backward()  # deprecated: indexing with uint8; each branch warns again
        rec.grads(x)

    with retrograd.disable():
        assert len(observe(program).warnings) == 8
    parallel(program, times=10)


@pytest.mark.parametrize("what", ["inputs", "create_graph"])
def test_calls_that_are_run_one_by_one(what: str) -> None:
    def program(rec: Recorder) -> None:
        x = torch.randn(8, 8, requires_grad=True)
        loss = torch.stack(branches(x, 3)).sum()
        if what == "inputs":
            loss.backward(inputs=[x])
            rec.grads(x)
        else:
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            rec.say(grad)

    parallel(program, calls=0)


def test_child_after_fork() -> None:
    with retrograd.enable("schedule", parallel=True):

        def grad() -> list[float]:
            x = torch.ones(4, requires_grad=True)
            torch.stack([(x * i).sin() for i in range(5)]).sum().backward()
            return x.grad.tolist()  # type: ignore[union-attr]

        want = grad()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if grad() == want else 1)
        assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"parallel": 1}, TypeError, "parallel must be True or False, not 1"),
        ({"backend": print, "parallel": True}, ValueError, "parallel is for backends that run the graph's nodes"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], error: type[Exception], sentence: str) -> None:
    for call in (retrograd.enable, retrograd.set_default):
        with pytest.raises(error, match=sentence):
            call(**arguments)  # type: ignore[arg-type]


def test_replay() -> None:
    """The tests of the schedule once more."""
    files = [
        "test_backward_contract.py", "test_bad_input.py", "test_custom_function.py", "test_gradients.py",
        "test_hooks.py", "test_modules.py", "test_nested.py", "test_views_and_inplace.py",
    ]  # fmt: skip
    differ = [
        "test_order_of_ties_among_leaves_with_outer_nodes_waiting",  # calls share no heap with nested ones
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "replay_in_parallel"]
    command += ["-k", " and ".join(f"not {name}" for name in differ), *files]
    paths = [str(HERE), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    environment.pop("PYTEST_ADDOPTS", None)
    run = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    found = re.search(r"replayed: (\d+) of (\d+) in parallel", run.stdout)
    assert found is not None
    ran, calls = map(int, found.groups())
    assert ran > 500 and 2 * ran > calls, found.group()
