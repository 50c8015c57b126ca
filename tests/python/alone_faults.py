"""Faults at every step of a call: right gradients or an error in one sentence, and a next call as good as ever.

Of the compile workers alone: test_lowering.py; of the plan store alone: tests/cpp/plan_store_test.cpp; memory that runs
out inside the engine: tests/cpp/fused_faults_test.cpp.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_oracle import check_values, counting_fused, lowering
from oracle import leaf, run_threads
from test_callable_threads import DISTINCT, Model, in_new_process
from test_fused_compiled import MODELS, pair
from test_fused_compiled import step as compiled_step
from test_fused_features import net_of
from test_lowering import eventually, members
from torch import Tensor, nn
from torch._dynamo import compiled_autograd as front_end

import retrograd
from retrograd import _fused, _group_trace, _lowering, _runtime


def as_it_is(graph: Any) -> Any:
    return graph


def fused() -> AbstractContextManager[None]:
    return retrograd.enable("inductor", mode="blocking")


SCOPES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "schedule": lambda: retrograd.enable("schedule"),
    "fused": fused,
    "callable": lambda: retrograd.enable(as_it_is),
}


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_fused, "_warned", set())
    retrograd.cache_clear()
    with lowering("eager"):
        yield
        assert retrograd.wait(60)


@contextlib.contextmanager
def calls_on(path: str, count: int) -> Iterator[None]:
    """Exactly `count` calls run inside, all on `path`."""
    before = retrograd.stats()["calls"]
    yield
    after = retrograd.stats()["calls"]
    ran = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert ran == ({path: count} if count else {}), ran


def interrupt(number: int) -> None:
    """A signal, to the thread that runs the handlers: it may be waiting for the thread that calls this."""
    signal.pthread_kill(threading.main_thread().ident, number)  # type: ignore[arg-type]


def step(net: nn.Module, seed: int = 0) -> list[Tensor]:
    """One backward of `net`; its gradients, which the net does not keep."""
    net.zero_grad()
    net(leaf(2, 4, seed=seed).detach()).pow(2).sum().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def net_and_gradients(depth: int = 2) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    net = net_of(depth)
    with retrograd.disable():
        return net, step(net)


def expect_works(scope: str, net: nn.Module, want: list[Tensor], calls: int = 2) -> None:
    """From here on, calls run where they should, or do after at most one that makes what they need."""
    with SCOPES[scope]():
        for call in range(calls):
            with calls_on(scope, 1):
                check_values(want, step(net), f"call {call} after the fault")


class Fault:
    """Replaces a function by one that fails at its first call, or does something else first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, what: BaseException | Callable[[], Any]):
        self.hits = 0
        real = getattr(owner, name)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            self.hits += 1
            if self.hits == 1:
                if isinstance(what, BaseException):
                    raise what
                what()
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, faulty)


# Exceptions at each step ---------------------------------------------------------------------------------------------

ERRORS = [RuntimeError("a fault"), MemoryError(), OSError(28, "No space left on device"), RecursionError("too deep")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (_group_trace, "trace"),
        (_group_trace, "guards_of"),
        (_fused._worker, "export_guards"),
        (_fused._C, "Plan"),
        (torch.fx.GraphModule, "recompile"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("mode", ["blocking", "background"])
def test_making_a_plan_fails(
    owner: Any, name: str, error: Exception, mode: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    net, want = net_and_gradients()
    _fused.forget()
    fault = Fault(monkeypatch, owner, name, error)
    with (
        caplog.at_level(logging.WARNING, "retrograd"),
        calls_on("schedule", 4),
        retrograd.enable("inductor", mode=mode),
    ):
        for _ in range(4):
            check_values(want, step(net))
        assert retrograd.wait(60)
    assert fault.hits == 1, "a plan that failed is not made at every call"
    (record,) = caplog.records
    assert "a plan was not compiled, so its nodes run one by one" in record.getMessage()
    retrograd.cache_clear()
    expect_works("fused", net, want)


def test_no_folder_for_libraries(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    net, want = net_and_gradients()
    _fused.forget()
    monkeypatch.setattr(_fused._state, "_folder", None)
    Fault(monkeypatch, _fused.tempfile, "mkdtemp", OSError(28, "No space left on device"))
    monkeypatch.setenv("RETROGRAD_CACHE", "0")
    monkeypatch.setattr(_lowering, "submit", lambda *args, **kwargs: pytest.fail("nothing to put a library into"))
    with lowering(None), caplog.at_level(logging.WARNING, "retrograd"), fused(), calls_on("schedule", 2):
        for _ in range(2):
            check_values(want, step(net))
    assert "No space left on device" in caplog.text
    retrograd.cache_clear()
    expect_works("fused", net, want)


def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    net, want = net_and_gradients()
    monkeypatch.setattr(_fused, "_state", _fused._State())
    monkeypatch.setattr(_fused.threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread")))
    for mode, calls in (("blocking", 2), ("background", 4)):
        with retrograd.enable("inductor", mode=mode), calls_on("schedule", calls):
            for _ in range(calls):
                check_values(want, step(net))
        assert retrograd.wait(0), "nothing is being made"
    assert "no thread" in caplog.text
    monkeypatch.undo()
    expect_works("fused", net, want)


@pytest.mark.parametrize("error", [MemoryError("a fault"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_handing_the_record_over_fails(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can only come from a signal handler or a lack of memory reaches the caller, and nothing is left claimed."""
    net, want = net_and_gradients()
    Fault(monkeypatch, _fused, "_Work", error)
    with fused(), pytest.raises(type(error)) as caught:
        step(net)
    assert caught.value is error
    expect_works("fused", net, want)


@pytest.mark.parametrize("error", [RuntimeError("a fault"), MemoryError(), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("which", ["first run", "second run"])
def test_a_plan_fails_as_it_runs(
    error: BaseException, retain: bool, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, want = net_and_gradients()
    runs: list[int] = []
    plan = _fused._C.Plan

    def failing_plan(forward: Callable[..., Any], *rest: Any) -> Any:
        def run(*inputs: Tensor) -> Any:
            runs.append(len(runs))
            if runs[-1] == (0 if which == "first run" else 1):
                raise error
            return forward(*inputs)

        return plan(run, *rest)

    _fused.forget()
    monkeypatch.setattr(_fused._C, "Plan", failing_plan)
    if which == "second run":
        with fused(), calls_on("fused", 1):
            check_values(want, step(net))
    loss = net(leaf(2, 4).detach()).pow(2).sum()
    net.zero_grad()
    with fused():
        with calls_on("schedule", 1), pytest.raises(type(error)) as caught:
            loss.backward(retain_graph=retain)
        assert caught.value is error
        assert all(p.grad is None for p in net.parameters())
        if retain or which == "first run":  # the graph is whole
            with calls_on("fused", 1):
                loss.backward()
            check_values(want, [p.grad for p in net.parameters()])  # type: ignore[misc]
        else:
            with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
                loss.backward()
    expect_works("fused", net, want)


@pytest.mark.parametrize("error", [RuntimeError("a fault"), MemoryError(), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (front_end.AutogradCompilerInstance, name)
        for name in ("__init__", "begin_capture", "set_node_origin", "accumulate", "accumulate_grad", "end_capture")
    ]
    + [(_runtime, "make_runner")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_capturing_fails(owner: Any, name: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets the error, and the graph is as it was: for the stock engine, and for the next attempt."""
    a, b = leaf(3), leaf(3, seed=1)
    loss = ((a * b).exp() * a + a).sum()
    with retrograd.disable():
        want = torch.autograd.grad(loss, (a, b), retain_graph=True)
    fault = Fault(monkeypatch, owner, name, error)
    with SCOPES["callable"](), calls_on("callable", 0):
        with pytest.raises(type(error)) as caught:
            loss.backward(retain_graph=True)
    assert caught.value is error and fault.hits == 1
    assert a.grad is None and b.grad is None
    with retrograd.disable():
        check_values(list(want), list(torch.autograd.grad(loss, (a, b), retain_graph=True)))
    for _ in range(2):
        with SCOPES["callable"](), calls_on("callable", 1):
            loss.backward(retain_graph=True)
        check_values(list(want), [a.grad, b.grad])  # type: ignore[list-item]
        a.grad = b.grad = None


@pytest.mark.parametrize("place", ["hook", "function"])
@pytest.mark.parametrize("scope", SCOPES)
def test_sys_exit_and_ctrl_c_inside_a_call(scope: str, place: str) -> None:
    class Exits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raised.pop()()
            return grad

    def program(x: Tensor) -> Tensor:
        y = x.sin()
        if place == "function":
            y = Exits.apply(y)
        else:
            y.register_hook(lambda g: raised.pop()())
        return (y.exp() * y).sum()

    raised: list[Callable[[], Any]] = []
    x = leaf(3)
    with retrograd.disable():
        raised.append(lambda: None)
        (want,) = torch.autograd.grad(program(x), x)
    with SCOPES[scope]():
        for leave in (lambda: sys.exit(3), lambda: interrupt(signal.SIGINT)):
            raised.append(leave)
            with pytest.raises((SystemExit, KeyboardInterrupt)):
                program(x).backward()
            assert x.grad is None and raised == []
            raised.append(lambda: None)
            with calls_on(scope, 1):
                (got,) = torch.autograd.grad(program(x), x)
            torch.testing.assert_close(got, want)


# Retained graphs, deep nests -----------------------------------------------------------------------------------------


def test_a_retained_graph_is_recorded_while_a_thread_that_never_opted_in_runs_it() -> None:
    """Recording swaps what the nodes saved; nobody who runs the same graph may see it."""
    calls, rounds, recordings = 20, 40, 0
    for _ in range(rounds):
        retrograd.cache_clear()
        model = Model()
        loss = model.loss()

        def work(scope: Callable[[], AbstractContextManager[None]], pause: float) -> None:
            with scope():
                for _ in range(calls):
                    loss.backward(retain_graph=True)
                    time.sleep(pause)  # else somebody is always inside, and nothing is ever recorded

        scopes = [fused, fused, contextlib.nullcontext, contextlib.nullcontext]
        with counting_fused() as ran:
            run_threads([lambda s=s, k=k: work(s, 1e-4 * k) for k, s in enumerate(scopes)])
        model.expect(calls * len(scopes), None)
        assert ran.previous == 2 * calls and ran.fused + ran.schedule == 2 * calls, ran
        assert set(ran.fallbacks) <= {"graph_in_use", "compiling"}, ran
        recordings += ran.recordings
    assert recordings > rounds / 4


@pytest.mark.parametrize("scope", ["fused", "callable"])
def test_a_retained_graph_that_another_thread_is_inside_of_is_left_alone(scope: str) -> None:
    x = leaf(3)
    y = (x.sin() * x).exp()
    loss = (y * y).sum()
    with retrograd.disable():
        (want,) = torch.autograd.grad(loss, x, retain_graph=True)
    inside, leave = threading.Event(), threading.Event()
    others: list[Tensor] = []

    def hook(grad: Tensor) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert leave.wait(60)

    y.register_hook(hook)

    def other() -> None:
        others.extend(torch.autograd.grad(loss, x, retain_graph=True))

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert inside.wait(60)
        before = retrograd.stats()
        with SCOPES[scope]():
            (got,) = torch.autograd.grad(loss, x, retain_graph=True)
        after = retrograd.stats()
    finally:
        leave.set()
        thread.join(60)
    assert after["schedule_reasons"]["graph_in_use"] == before["schedule_reasons"]["graph_in_use"] + 1
    assert (after["recordings"], after["captures"]) == (before["recordings"], before["captures"])
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(others[0], want)
    with SCOPES[scope](), calls_on(scope, 1):
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], want)


def test_nested_calls_past_the_stock_engines_limit_each_record() -> None:
    """From 60 levels on the stock engine runs nested calls on other threads."""
    depth = 80
    output = in_new_process(
        DISTINCT
        + f"""
    os.environ["RETROGRAD_LOWERING"] = "eager"
    class Nest(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, level):
            ctx.save_for_backward(x)
            ctx.level = level
            return x * 2
        @staticmethod
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
        Nest.apply(x, {depth}).sum().backward()
        return x.grad
    sys.setrecursionlimit(20000)
    want = run()
    retrograd.reset_stats()
    with retrograd.enable("inductor", mode="blocking"):
        for recordings in ({depth}, {depth}):
            torch.testing.assert_close(run(), want)
            stats = retrograd.stats()
            assert stats["recordings"] == recordings, stats
    assert stats["max_depth"] == {depth} + 1 and stats["calls"]["fused"] == 2 * {depth}, stats
    assert stats["calls"]["schedule"] == 2 and stats["calls"]["previous"] == 0, stats  # the outermost has no group
    print("done", flush=True)
    os._exit(0)  # the stock engine alone may abort at exit after such nesting: its extra threads race it
    """
    )
    assert output.strip() == "done"


# Memory --------------------------------------------------------------------------------------------------------------


def test_memory_runs_out() -> None:
    """A limit on the address space, so that libtorch's own allocations fail, at any point of the call."""
    output = in_new_process("""
    import resource
    os.environ["RETROGRAD_LOWERING"] = "eager"
    from alone_faults import SCOPES
    def gradients(megabytes):
        x = torch.ones(megabytes << 18, requires_grad=True)
        y = (x * 2).exp()
        loss = (y * x + y.sin()).sum()
        limit()
        try:
            loss.backward()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return x.grad
    def limit():
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        if room is not None:
            resource.setrlimit(resource.RLIMIT_AS, (used + (room << 20), most))
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    room = None
    want = gradients(1)
    for name, scope in SCOPES.items():
        with scope():
            torch.testing.assert_close(gradients(40)[:10], want[:10])  # all threads and plans are there
            failed = 0
            for room in range(0, 400, 80):
                try:
                    got = gradients(40)
                except (RuntimeError, MemoryError) as error:
                    assert "can't allocate memory" in str(error) or "alloc" in str(error).lower(), error
                    failed += 1
                else:
                    torch.testing.assert_close(got[:10], want[:10])
                room = None
                before = retrograd.stats()["calls"][name]
                torch.testing.assert_close(gradients(1), want)
                assert retrograd.stats()["calls"][name] == before + 1, (name, retrograd.stats())
            assert 0 < failed < 5, (name, failed)  # neither never nor always
        print(name, flush=True)
    """)
    assert output.split() == list(SCOPES)


# Workers -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Future[Any]]]:
    """Compiles stay pending; the futures are for the test to settle."""
    futures: list[Future[Any]] = []

    def submit(*args: Any, **kwargs: Any) -> Future[Any]:
        futures.append(Future())
        return futures[-1]

    monkeypatch.setattr(_lowering, "submit", submit)
    monkeypatch.setattr(_fused._state, "_plans", {})
    net = nn.Sequential(nn.Linear(4, 3), nn.Softsign(), nn.Linear(3, 3), nn.Softsign())  # in no store
    monkeypatch.setattr(_fused, "net", net, raising=False)
    with lowering(None):
        yield futures
    for future in futures:
        if not future.done():
            future.set_exception(_lowering.LoweringError("the test is over"))


def test_a_killed_worker_and_the_next_compile(caplog: pytest.LogCaptureFixture) -> None:
    net, want = net_and_gradients()
    for p in net.parameters():
        p.requires_grad_(p.dim() == 2)  # a graph that no other test compiles
    with retrograd.disable():
        want = step(net)
    _fused.forget()
    _lowering.shutdown()

    stop = threading.Event()

    def keep_killing() -> None:  # a worker that dies before its job gets a successor, once
        while not stop.wait(0.05):
            for worker in list(_lowering._pool._workers):
                with contextlib.suppress(OSError):
                    os.kill(worker._process.pid, signal.SIGKILL)

    killer = threading.Thread(target=keep_killing, daemon=True)
    killer.start()
    try:
        with lowering(None), caplog.at_level(logging.WARNING, "retrograd"), fused(), calls_on("schedule", 2):
            for _ in range(2):
                check_values(want, step(net))
    finally:
        stop.set()
        killer.join(60)
    (record,) = caplog.records
    assert "a plan was not compiled" in record.getMessage()
    _lowering.shutdown()
    retrograd.cache_clear()
    expect_works("fused", net, want)


def test_while_a_compile_hangs_others_run_and_ctrl_c_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Softsign(), nn.Linear(3, 3), nn.Softsign())
    with retrograd.disable():
        want = step(net)
    with compiles(monkeypatch) as futures:
        for first in (True, False):  # who has it compiled, and who waits for another call's compile
            timer = threading.Timer(0.5, lambda: interrupt(signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt), fused():
                step(net)
            timer.join()
            assert len(futures) == 1, first
        assert not retrograd.wait(0)
        with retrograd.enable("inductor", mode="background"), calls_on("schedule", 3):
            for _ in range(3):
                check_values(want, step(net))
        for scope in ("schedule", "callable"):
            expect_works(scope, net, want)
        futures[0].set_exception(_lowering.LoweringError("it took more than 600 s"))
        assert retrograd.wait(0)
        with fused(), calls_on("schedule", 1):
            check_values(want, step(net))
    retrograd.cache_clear()
    expect_works("fused", net, want)


PLANS_WITHOUT_COMPILER = """
    from concurrent.futures import Future
    from retrograd import _fused, _group_trace, _lowering, _turns
    C = _fused._C
    def step(layers):
        x = torch.ones(3, requires_grad=True)
        y = x
        for _ in range(layers):
            y = y.sin()
        with torch.enable_grad(), retrograd.enable("inductor", mode="blocking"):
            y.sum().backward()
        z = x.detach().requires_grad_()
        y = z
        for _ in range(layers):
            y = y.sin()
        with torch.enable_grad(), retrograd.disable():
            y.sum().backward()
        assert torch.equal(x.grad, z.grad)
    def returns(layers):
        thread = threading.Thread(target=step, args=(layers,), daemon=True)
        thread.start()
        thread.join(20)
        return not thread.is_alive()
    def no_compiler(*args, **kwargs):
        future = Future()
        future.set_exception(_lowering.LoweringError("there is no compiler here"))
        return future
"""


def test_waiting_for_another_process_goes_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls go on, and so do the next ones, which wait for the same thread."""
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("RETROGRAD_LOWERING", raising=False)
    output = in_new_process(
        PLANS_WITHOUT_COMPILER
        + """
    _lowering.submit = no_compiler
    class Turn:
        reason = ""
        def __init__(self, held):
            self.held = held
        def release(self):
            pass
    class Stand:  # of the extension: another process has the turn, the first time that one asks
        def __init__(self):
            self.asked = 0
        def __getattr__(self, name):
            return getattr(C, name)
        def reserve_plan(self, recording):
            self.asked += 1
            return Turn(held=self.asked > 1)
        def find_plan(self, recording):
            found, self.found = getattr(self, "found", None), None
            if isinstance(found, BaseException):
                raise found
    def new_stand():
        retrograd.cache_clear()
        _turns._C = Stand()
        return _turns._C

    # No thread can be started.
    new_stand()
    start, failed = threading.Thread.start, []
    def failing(thread):
        if thread.name == "retrograd-turns" and not failed:
            failed.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)
    threading.Thread.start = failing
    assert returns(3) and failed
    stand = new_stand()
    assert returns(4) and stand.asked == 2

    # Something fails on the thread.
    stand = new_stand()
    stand.found = MemoryError("once")
    assert returns(5) and stand.asked == 2
    stand = new_stand()
    assert returns(6) and stand.asked == 2

    # What is traced there, a finalizer, say, calls backward on the very graph.
    stand = new_stand()
    trace, on = _group_trace.trace, []
    def traced(recording):
        if not on:
            on.append(threading.current_thread().name)
            step(7)
        return trace(recording)
    _group_trace.trace = traced
    assert returns(7) and on == ["retrograd-turns"], on
    stand = new_stand()
    assert returns(8) and stand.asked == 2
    print("well")
    """
    )
    assert output == "well\n"


def test_backward_on_the_thread_of_the_compile_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler of its log messages, say: the plan it asks for can only be compiled after it."""
    monkeypatch.setenv("RETROGRAD_CACHE", "0")
    monkeypatch.delenv("RETROGRAD_LOWERING", raising=False)
    output = in_new_process(
        PLANS_WITHOUT_COMPILER
        + """
    import logging
    def no_worker(pool, job, generation):
        raise _lowering.LoweringError("there is no worker here")
    _lowering._Pool._start = no_worker
    inside = []
    class Handler(logging.Handler):
        def emit(self, record):
            if threading.current_thread().name == "retrograd-lowering" and not inside:
                inside.append("begun")
                step(6)
                inside.append("ended")
    logger = logging.getLogger("retrograd")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(Handler())
    logger.propagate = False
    assert returns(3) and inside == ["begun", "ended"], inside
    # An error that nobody foresaw does not leave a call waiting.
    def unforeseen(pool, job, worker, generation):
        job.future.set_running_or_notify_cancel()
        raise ValueError("unforeseen")
    real, _lowering._Pool._run = _lowering._Pool._run, unforeseen
    threading.excepthook = lambda args: inside.append(str(args.exc_value))
    assert returns(4) and inside[2:] == ["unforeseen"], inside
    _lowering._Pool._run = real
    assert returns(5)
    print("well")
    """
    )
    assert output == "well\n"


# The plan store ------------------------------------------------------------------------------------------------------

STORE = """
    import contextlib, ctypes, logging, pathlib, shutil, subprocess, tempfile
    from concurrent.futures import Future
    from fused_oracle import check_values, counting_fused
    from retrograd import _fused, _lowering
    from alone_faults import fused
    from test_fused_compiled import MODELS, pair, step
    folder = pathlib.Path(os.environ["RETROGRAD_CACHE_DIR"])
    library = pathlib.Path({library!r})
    def call(path, warnings=0):
        net, twin = pair("mlp")
        said.clear()
        before = retrograd.stats()["plans"]["from_store"]
        with fused(), counting_fused() as ran:
            got = step(net, MODELS["mlp"][1], 0)
        check_values(step(twin, MODELS["mlp"][1], 0), got)
        from_store = retrograd.stats()["plans"]["from_store"] - before
        where = ["nodes", "plan", "store"][ran.fused + from_store]
        assert (where, len(said)) == (path, warnings), (where, said, ran)
    said = []
    class Handler(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())
    logging.getLogger("retrograd").addHandler(Handler(logging.WARNING))
    def forget():
        retrograd.cache_clear()
        _fused._warned.clear()
    compiler_makes = None
    def submit(*args, **kwargs):
        future = Future()
        if compiler_makes is None:
            future.set_exception(_lowering.LoweringError("there is no compiler here"))
        else:
            handle, path = tempfile.mkstemp(dir=folder.parent, suffix=".so")
            os.write(handle, compiler_makes)
            os.close(handle)
            future.set_result(_lowering.Lowered(path, 0.0, {{}}))
        return future
    _lowering.submit = submit
"""


@pytest.fixture(scope="module")
def compiled_library() -> Path:
    """One that is in the tests' plan store afterwards, made now if it is not there yet (ten seconds)."""
    net, _ = pair("mlp")
    retrograd.cache_clear()
    with lowering(None), fused(), counting_fused() as ran:
        compiled_step(net, MODELS["mlp"][1], 0)
    assert ran.fused == 1, ran
    plans = Path(os.environ["RETROGRAD_CACHE_DIR"], "plans")
    return max(plans.glob("*/plan.so"), key=lambda path: path.with_name("record").stat().st_mtime)


def in_process_with_store(script: str, library: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(folder))
    monkeypatch.delenv("RETROGRAD_LOWERING", raising=False)
    return in_new_process(STORE.format(library=str(library)) + script)


def test_a_store_that_is_damaged_or_removed_while_in_use(
    compiled_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    shutil.copytree(os.environ["RETROGRAD_CACHE_DIR"], folder, dirs_exist_ok=True)
    folder.chmod(0o700)
    output = in_process_with_store(
        """
    # A library that is none gets into the store and is not in the way of the next one.
    shutil.rmtree(folder / "plans")
    compiler_makes = bytes(50_000)
    call("nodes", warnings=1)
    compiler_makes = library.read_bytes()
    forget()
    call("plan")
    compiler_makes = None
    shutil.rmtree(folder / "plans")
    shutil.copytree(library.parents[1], folder / "plans")
    forget()
    call("store")
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    plan = next(path for path in files if path.name == "plan.so" and path.read_bytes() == library.read_bytes())
    record = plan.with_name("record")
    for path in files:  # as after a jump of the clock
        os.utime(path, (4e9, 4e9))
    forget()
    call("store")
    assert record.stat().st_mtime < 4e9, "it would be the last one to be evicted, for ever"
    for path in (plan, record):
        for garbage in (b"", files[path][:-100], bytes(len(files[path])), files[path][:50] + b"x" + files[path][51:]):
            path.unlink()  # a library that is loaded stays as it is, as on any system that replaces files
            path.write_bytes(garbage)
            forget()
            call("nodes", warnings=1)  # said by the compiler, which is asked next
            call("nodes")
        path.unlink()
        path.write_bytes(files[path])
        forget()
        call("store")
    shutil.rmtree(folder)
    call("plan")
    forget()
    call("nodes", warnings=1)
    compiler_makes = library.read_bytes()
    forget()
    call("plan")  # and published, in a folder that is made anew
    compiler_makes = None
    forget()
    call("store")
    print("done")
    """,
        compiled_library, folder, monkeypatch,
    )  # fmt: skip
    assert output.strip() == "done"


def test_a_store_on_a_full_or_read_only_disk(
    compiled_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    output = in_process_with_store(
        """
    def mount(*arguments):
        return subprocess.run(["mount", *arguments], capture_output=True).returncode == 0
    # In a mount namespace of this thread's own.
    if ctypes.CDLL(None).unshare(0x20000) != 0 or not mount("--make-rprivate", "/"):
        print("not allowed")
        os._exit(0)
    assert mount("-t", "tmpfs", "-o", "size=64k,mode=700", "none", str(folder))
    compiler_makes = library.read_bytes()
    call("plan")
    assert not list(folder.glob("plans/*/plan.so")), "it was too large"
    for size, wanted in (("64k,ro", "plan"), ("16m,rw", "plan"), ("16m,ro", "store")):
        assert mount("-o", f"remount,size={size}", str(folder))
        forget()
        call(wanted)
    print("done")
    """,
        compiled_library, folder, monkeypatch,
    )  # fmt: skip
    if output.strip() == "not allowed":
        pytest.skip("mounting is not allowed here")
    assert output.strip() == "done"


# Signals -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def handling(number: int, handler: Callable[..., Any]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_ctrl_c_while_a_graph_is_traced_leaves_the_plan_to_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    net, want = net_and_gradients()
    _fused.forget()
    Fault(monkeypatch, _group_trace, "trace", lambda: (interrupt(signal.SIGINT), time.sleep(0.3)))
    with fused(), counting_fused() as ran:
        with pytest.raises(KeyboardInterrupt):
            step(net)
        check_values(want, step(net))
    assert (ran.fused, ran.recordings, ran.plans) == (1, 1, 1), ran  # the plan of the call that was interrupted


def test_an_error_of_a_signal_handler_is_not_taken_for_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    def expire(*ignored: Any) -> None:
        raise TimeoutError("the user's own")

    net, want = net_and_gradients()
    _fused.forget()
    Fault(monkeypatch, _group_trace, "trace", lambda: (interrupt(signal.SIGALRM), time.sleep(0.3)))
    with handling(signal.SIGALRM, expire), fused(), pytest.raises(TimeoutError, match="the user's own"):
        step(net)
    expect_works("fused", net, want)


@pytest.mark.parametrize("same", [True, False], ids=["same graph", "other graph"])
@pytest.mark.parametrize("moment", ["start", "queue", "trace", "compile", "hook", "compiler"])
def test_a_signal_handler_that_calls_backward(moment: str, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    net, want = net_and_gradients()
    other, wanted = (net_of(2), want) if same else net_and_gradients(3)
    other.load_state_dict(net.state_dict()) if same else None
    scope = "callable" if moment == "compiler" else "fused"
    inner: list[list[Tensor]] = []
    asked: list[Any] = []

    def handler(*ignored: Any) -> None:
        with SCOPES[scope](), torch.enable_grad():  # which is off inside backward, for handlers too
            inner.append(step(other))

    def compiler(graph: Any) -> Any:
        if not asked:
            asked.append(graph)
            interrupt(signal.SIGALRM)
        return graph

    _fused.forget()
    threads = sum(thread.name == "retrograd-trace" for thread in threading.enumerate())
    raises = (lambda: interrupt(signal.SIGALRM), lambda: time.sleep(0.2))
    if moment in ("start", "queue"):  # with the lock that what makes plans needs, too
        monkeypatch.setattr(_fused, "_state", _fused._State())
    if moment == "start":
        Fault(monkeypatch, _fused.threading.Thread, "start", raises[0])
    elif moment == "queue":
        pending: Any = type("Pending", (set,), {})()
        monkeypatch.setattr(_fused._state, "_pending", pending)
        Fault(monkeypatch, pending, "add", raises[0])
    elif moment == "trace":
        Fault(monkeypatch, _group_trace, "trace", lambda: [act() for act in raises])
    elif moment == "compile":
        Fault(monkeypatch, _fused._C, "Plan", lambda: [act() for act in raises])
    elif moment == "compiler":
        monkeypatch.setitem(SCOPES, "callable", lambda: retrograd.enable(compiler))
    with handling(signal.SIGALRM, handler), SCOPES[scope]():
        net.zero_grad()
        loss = net(leaf(2, 4).detach()).pow(2)
        if moment == "hook":
            loss.register_hook(lambda g: interrupt(signal.SIGALRM))
        loss.sum().backward()
    check_values(want, [p.grad for p in net.parameters()])  # type: ignore[misc]
    assert len(inner) == 1
    check_values(wanted, inner[0])
    expect_works(scope, net, want)
    if moment in ("start", "queue"):
        assert sum(thread.name == "retrograd-trace" for thread in threading.enumerate()) <= 1 + threads


@pytest.mark.parametrize("same", [True, False], ids=["same graph", "other graph"])
@pytest.mark.parametrize("moment", ["trace", "compile"])
def test_what_is_traced_calls_backward(moment: str, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer, say. The thread that makes plans would wait for itself."""
    net, want = net_and_gradients()
    other, wanted = (net_of(2), want) if same else net_and_gradients(3)
    other.load_state_dict(net.state_dict()) if same else None
    inner: list[list[Tensor]] = []

    def call_backward() -> None:
        assert threading.current_thread() is _fused._state._thread
        with fused(), torch.enable_grad():
            inner.append(step(other))

    _fused.forget()
    Fault(monkeypatch, *((_group_trace, "trace") if moment == "trace" else (_fused._C, "Plan")), call_backward)
    before = retrograd.stats()["calls"]
    with fused():
        check_values(want, step(net))
    after = retrograd.stats()["calls"]
    ran = [after[path] - before[path] for path in ("fused", "schedule")]
    assert ran == ([1, 1] if same else [2, 0])  # the plan that is being made is not there yet
    assert len(inner) == 1
    check_values(wanted, inner[0])
    expect_works("fused", net, want)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_signal_handler_that_forks_in_the_middle_of_a_call(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes go on with the call; a plan that was being made comes to the parent only."""
    net, want = net_and_gradients()
    _fused.forget()
    children: list[int] = []

    def handler(*ignored: Any) -> None:
        children.append(os.fork())

    def forks(*graph: Any) -> Any:
        if not children:
            interrupt(signal.SIGUSR1)
            time.sleep(0.2)
        return graph[0] if graph else None

    if scope == "fused":
        Fault(monkeypatch, _group_trace, "trace", forks)
    elif scope == "callable":
        monkeypatch.setitem(SCOPES, "callable", lambda: retrograd.enable(forks))
    code = 1
    try:
        with handling(signal.SIGUSR1, handler), SCOPES[scope]():
            net.zero_grad()
            loss = net(leaf(2, 4).detach()).pow(2)
            if scope == "schedule":
                loss.register_hook(lambda g: forks())
            loss.sum().backward()
        check_values(want, [p.grad for p in net.parameters()])  # type: ignore[misc]
        expect_works(scope, net, want)
        code = 0
    finally:
        if children and children[0] == 0:
            os._exit(code)
    assert status_of(children[0]) == 0


# Fork ----------------------------------------------------------------------------------------------------------------


def status_of(child: int, seconds: float = 60) -> int:
    """How the child ended; a hang is an error."""
    end = time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)


def in_child(work: Callable[[], None]) -> int:
    """Forks; the child does `work` and ends with 0 if nothing was raised."""
    child = os.fork()
    if child != 0:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def test_fork_while_other_threads_are_inside_backward() -> None:
    """Threads of all backends, which also record and capture all the time; each child uses all backends."""
    output = in_new_process("""
    os.environ["RETROGRAD_LOWERING"] = "eager"
    from alone_faults import SCOPES, expect_works, in_child, net_and_gradients, status_of, step
    from oracle import run_threads
    net, want = net_and_gradients()
    for name in SCOPES:
        expect_works(name, net, want)
    stop = threading.Event()
    def train(name):
        mine, gradients = net_and_gradients()
        with SCOPES[name]():
            while not stop.is_set():
                for a, b in zip(step(mine), gradients):
                    torch.testing.assert_close(a, b)
    def disturb():
        while not stop.wait(0.003):
            retrograd.cache_clear()
    def child():
        for name in SCOPES:
            expect_works(name, net, want)
        assert retrograd.wait(30)
    def fork():
        try:
            for _ in range(12):
                assert status_of(in_child(child)) == 0
        finally:
            stop.set()
    run_threads([fork, disturb, *[lambda name=name: train(name) for name in SCOPES]])
    for name in SCOPES:
        expect_works(name, net, want)
    print(*SCOPES)
    """)
    assert output.split() == list(SCOPES)


@pytest.mark.parametrize("lock", ["of compiler functions", "of references dropped without the GIL"])
def test_fork_while_another_thread_holds_a_lock_of_the_bindings(lock: str) -> None:
    """Both are held for a moment and without the GIL; delays make the moment long enough to be hit."""
    output = in_new_process(
        f"""
    lock = {lock!r}
    """
        + """
    from alone_faults import SCOPES, in_child, status_of
    from oracle import run_threads
    from retrograd import _C
    def backward():
        x = torch.ones(2, requires_grad=True)
        with SCOPES["callable"]():
            (x * 2).sum().backward()
        assert x.grad.tolist() == [2, 2]
    def busy():
        while not stop.is_set():
            if lock == "of compiler functions":
                backward()
            else:
                _C.drop_without_gil(object())
    def child():
        _C.perturb_with(0)
        if lock == "of compiler functions":
            backward()
        else:
            retrograd.cache_clear()  # empties the list
    def fork():
        try:
            for _ in range(60):
                assert status_of(in_child(child), 10) == 0
        finally:
            stop.set()
    stop = threading.Event()
    backward()
    before = _C.perturbations()
    _C.perturb_with(1)
    run_threads([fork, busy])
    assert _C.perturbations() > before
    print("done")
    """
    )
    assert output.strip() == "done"


@pytest.mark.parametrize("moment", ["trace", "lower"])
def test_fork_while_a_plan_is_being_made(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, want = net_and_gradients()
    _fused.forget()
    reached, go_on = threading.Event(), threading.Event()

    def stop_here() -> None:
        reached.set()
        assert go_on.wait(60)

    Fault(monkeypatch, *((_group_trace, "trace") if moment == "trace" else (_fused._C, "Plan")), stop_here)

    def work() -> None:
        assert retrograd.wait(0), "what the parent makes is no concern of the child"
        expect_works("fused", net, want)

    with retrograd.enable("inductor", mode="background"):
        for _ in range(3):
            check_values(want, step(net))
    assert reached.wait(60)
    try:
        assert status_of(in_child(work)) == 0
        assert not retrograd.wait(0)
    finally:
        go_on.set()
    assert retrograd.wait(60)
    with retrograd.enable("inductor", mode="background"), calls_on("fused", 1):
        check_values(want, step(net))


class TrainsInWorkers(torch.utils.data.Dataset[Tensor]):
    """Each item is a gradient that is computed where it is asked for, on the backend of its number."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        scope = list(SCOPES)[index % 3]
        net, want = net_and_gradients()
        expect_works(scope, net, want)
        return want[0] * index


def test_a_dataloader_that_forks_its_workers_while_the_model_trains() -> None:
    net, want = net_and_gradients()
    loader = torch.utils.data.DataLoader(TrainsInWorkers(), batch_size=1, num_workers=2, multiprocessing_context="fork")
    for scope in SCOPES:
        expect_works(scope, net, want)
        for index, item in enumerate(loader):
            check_values([want[0] * index], [item[0]])
            expect_works(scope, net, want, calls=1)


# Threads that end ----------------------------------------------------------------------------------------------------


def test_threads_that_end_inside_a_block_with_a_plan_under_way() -> None:
    net, want = net_and_gradients()

    def work() -> None:
        retrograd.enable("inductor", mode="background").__enter__()
        mine, gradients = net_and_gradients()
        for _ in range(3):
            check_values(gradients, step(mine))
        retrograd.enable(lambda graph: graph).__enter__()
        check_values(gradients, step(mine))

    for _ in range(4):
        run_threads([work] * 4)
    assert retrograd.wait(60)
    with retrograd.enable("inductor", mode="background"), calls_on("fused", 1):
        check_values(want, step(net))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_by_an_exception_of_its_backward() -> None:
    net, want = net_and_gradients()

    def work(scope: str) -> None:
        with SCOPES[scope]():
            loss = net_of(2)(leaf(2, 4).detach()).sum()
            loss.register_hook(lambda g: sys.exit())
            loss.backward()

    for scope in SCOPES:
        thread = threading.Thread(target=work, args=(scope,))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        expect_works(scope, net, want)


# The end of the program ----------------------------------------------------------------------------------------------

PROGRAM = """
    import atexit, copy, os, sys, threading, time
    import torch, retrograd
    torch.set_num_threads(1)
    retrograd.install()
    first = torch.nn.Sequential(*(m for _ in range(2) for m in (torch.nn.Linear(4, 4), torch.nn.Tanh())))
    def step():
        net = copy.deepcopy(first)
        net(torch.ones(2, 4)).pow(2).sum().backward()
        return [p.grad for p in net.parameters()]
    want = step()
    def train(mode, calls):
        with retrograd.enable("inductor", mode=mode):
            for _ in range(calls):
                for a, b in zip(step(), want, strict=True):
                    torch.testing.assert_close(a, b)
"""
ENDS = {
    "trace": """
        import retrograd._fused
        from retrograd import _group_trace
        real = _group_trace.trace
        _group_trace.trace = lambda recording: (time.sleep(0.5), real(recording))[1]
        train("background", 3)
        """,
    "compile": """
        os.environ["RETROGRAD_LOWERING"] = ""
        train("background", 3)
        from retrograd import _lowering
        while not _lowering._pool._workers:
            time.sleep(0.01)
        (worker,) = _lowering._pool._workers
        print(worker._process.pid, flush=True)
        """,
    # What is registered first runs last, when no plan can be made any more.
    "backward at exit": """
        @atexit.register
        def at_exit():
            train("blocking", 2)
            assert retrograd.wait(0)
            print(retrograd.stats()["calls"]["schedule"], flush=True)
        train("background", 2)
        """,
    "threads that wait for a compile": """
        os.environ["RETROGRAD_LOWERING"] = ""
        for _ in range(2):
            threading.Thread(target=train, args=("blocking", 1), daemon=True).start()
        from retrograd import _lowering
        while not _lowering._pool._workers:
            time.sleep(0.01)
        (worker,) = _lowering._pool._workers
        print(worker._process.pid, flush=True)
        """,
    "SIGTERM": """
        import signal
        os.environ["RETROGRAD_LOWERING"] = ""
        signal.signal(signal.SIGTERM, lambda *ignored: sys.exit(7))
        def terminate():
            from retrograd import _lowering
            while not _lowering._pool._workers:
                time.sleep(0.01)
            (worker,) = _lowering._pool._workers
            print(worker._process.pid, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Thread(target=terminate).start()
        train("blocking", 1)
        """,
    "exit in a hook": """
        first[1].register_full_backward_hook(lambda *ignored: sys.exit(7))
        train("blocking", 1)
        """,
}


def test_a_program_ends_in_the_middle_of_it() -> None:
    """As it would without retrograd: its own exit code, nothing on stderr, nobody left behind."""
    environment = {
        **os.environ,
        "RETROGRAD_CACHE": "0",
        "RETROGRAD_LOWERING": "eager",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }

    def run(name: str) -> tuple[int, str, str]:
        code = textwrap.dedent(PROGRAM) + textwrap.dedent(ENDS[name])
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", code],
            capture_output=True, text=True, timeout=120, env=environment, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    with ThreadPoolExecutor(2) as threads:
        results = dict(zip(ENDS, threads.map(run, ENDS), strict=True))
    for name, (code, said, errors) in results.items():
        assert (code, errors) == (7 if name in ("exit in a hook", "SIGTERM") else 0, ""), (name, said)
    for name in ("compile", "threads that wait for a compile", "SIGTERM"):
        worker = int(results[name][1])
        eventually(lambda: not members(worker), 10)
    assert results["backward at exit"][1].strip() == "4", "all calls ran by their nodes"


# Installing, importing, settings -------------------------------------------------------------------------------------


def test_install_and_uninstall_while_calls_run_on_every_backend() -> None:
    calls = 60
    model, ended = Model(), threading.Event()

    def work(scope: Callable[[], AbstractContextManager[None]]) -> None:
        with scope():
            ready.wait(60)
            for _ in range(calls):
                model.backward()

    def toggle() -> None:
        ready.wait(60)
        while not ended.wait(0.002):
            retrograd.uninstall()
            time.sleep(0.001)
            retrograd.install()

    ready = threading.Barrier(len(SCOPES) + 1)
    before = retrograd.stats()["calls"]
    toggler = threading.Thread(target=toggle)
    toggler.start()
    try:
        run_threads([lambda s=s: work(s) for s in SCOPES.values()])
    finally:
        ended.set()
        toggler.join(60)
        retrograd.install()
    model.expect(calls * len(SCOPES), None)
    after = retrograd.stats()["calls"]
    ran = {name: after[name] - before[name] for name in after}
    assert sum(ran.values()) <= calls * len(SCOPES), "calls are counted once, or not at all while it is uninstalled"
    assert ran["schedule"] > 0 and ran["callable"] > 0, ran


def test_reloading_and_importing_again() -> None:
    output = in_new_process("""
    import importlib
    os.environ["RETROGRAD_LOWERING"] = "eager"
    x = torch.tensor([0.5, 1.0], requires_grad=True)
    stock = torch.autograd.Variable._execution_engine
    def run(module, path):
        scope = {"schedule": module.enable, "fused": lambda: module.enable("inductor", mode="blocking"),
                 "callable": lambda: module.enable(lambda graph: graph)}[path]
        before = module.stats()["calls"][path]
        with scope():
            (grad,) = torch.autograd.grad((x.sin() * x).sum(), x)
        torch.testing.assert_close(grad, x.detach().cos() * x.detach() + x.detach().sin())
        assert module.stats()["calls"][path] == before + 1, (path, module.stats())
    def run_all(module):
        for path in ("schedule", "fused", "callable"):
            run(module, path)
    run_all(retrograd)
    first = importlib.reload(retrograd)
    assert first.is_installed()
    run_all(first)
    for name in [name for name in sys.modules if name.partition(".")[0] == "retrograd"]:
        del sys.modules[name]
    import retrograd as second
    assert second is not first and second.is_installed()
    run_all(second)
    run_all(first)
    second.uninstall()
    assert not first.is_installed()
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]
    for module in (first, second):
        module.install()
        run_all(module)
        module.uninstall()
    print("done")
    """)
    assert output.strip() == "done"


def test_a_subinterpreter_is_refused_in_one_sentence() -> None:
    output = in_new_process("""
    import _xxsubinterpreters as interpreters
    other = interpreters.create()
    code = f"import sys; sys.path[:] = {sys.path!r}\\nimport retrograd"
    try:
        interpreters.run_string(other, code)
    except interpreters.RunFailedError as error:
        print(error)
    interpreters.destroy(other)
    """)
    assert "retrograd cannot be imported in a subinterpreter" in output
    assert len(output.strip().splitlines()) == 1


def settings() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """By name: what changes a setting of the process or thread, and what puts it back."""
    return {
        "threads": (lambda: torch.set_num_threads(2), lambda: torch.set_num_threads(1)),
        "deterministic": (
            lambda: torch.use_deterministic_algorithms(True),
            lambda: torch.use_deterministic_algorithms(False),
        ),
        "default dtype": (
            lambda: torch.set_default_dtype(torch.float64),
            lambda: torch.set_default_dtype(torch.float32),
        ),
        "default device": (lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)),
    }


@pytest.mark.parametrize("setting", settings())
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("batches", [[3, 3], [3, 5]], ids=["same sizes", "other sizes"])
def test_settings_that_change_between_calls(scope: str, setting: str, batches: list[int]) -> None:
    """Also such that change while a plan is made, or between the graph's making and its backward."""
    index = torch.tensor([0, 2, 2])
    weight = leaf(4, 4)
    inputs = [leaf(batch, 4, seed=batch).detach() for batch in batches]

    def gradients(changes: int, x: Tensor) -> list[Tensor]:
        """`changes`: 0 the setting stays as it is, 1 it changes before the forward, 2 between forward and backward."""
        change, put_back = settings()[setting]
        w = weight.detach().clone().requires_grad_()
        try:
            if changes == 1:
                change()
            h = (x @ w).tanh() * 0.5 + w.mean() * 2
            loss = h[index].pow(2).sum() + h.gather(1, index.expand(h.shape[0], 3)).exp().mean()
            if changes == 2:
                change()
            loss.backward()
            assert w.grad is not None
            return [w.grad]
        finally:
            put_back()

    for changes in (0, 1, 2, 0, 2, 1):
        for x in inputs:
            with retrograd.disable():
                want = gradients(changes, x)
            for _ in range(2):
                with SCOPES[scope](), calls_on(scope, 1):
                    got = gradients(changes, x)
                if scope == "schedule":
                    assert torch.equal(got[0], want[0])
                check_values(want, got, f"{setting} {changes}")
