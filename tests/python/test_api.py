from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from oracle import Calls, counting, leaf, run_threads
from torch.autograd import Variable

import retrograd


def step() -> None:
    x = leaf(3)
    x.sin().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().cos())


def enabled_here() -> bool:
    with counting() as calls:
        step()
    return calls.schedule == 1


def paths(calls: Calls) -> tuple[int, int]:
    return calls.schedule, calls.previous


def python(script: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=120, env=environment, check=False,
    )  # fmt: skip


def test_enable_and_disable_nest() -> None:
    with counting() as calls:
        step()
        with retrograd.enable("schedule"):
            step()
            with retrograd.disable():
                step()
                with retrograd.enable():
                    step()
                step()
            step()
        step()
    assert paths(calls) == (3, 4)
    assert calls.reasons == {"not_enabled": 4}


def test_enable_twice_and_leave_once_is_still_enabled() -> None:
    with retrograd.enable(), counting() as calls:
        with retrograd.enable():
            step()
        step()
    assert paths(calls) == (2, 0)


def test_making_the_context_manager_enables_nothing() -> None:
    with counting() as calls:
        on = retrograd.enable()
        step()
        with on:
            step()
        step()
    assert paths(calls) == (1, 2)


def test_decorators() -> None:
    @retrograd.enable("schedule")
    def enabled(x: int, *, y: int = 0) -> int:
        """Steps once."""
        step()
        return x + y

    @retrograd.disable()
    def disabled() -> None:
        step()

    assert (enabled.__name__, enabled.__doc__) == ("enabled", "Steps once.")
    with counting() as calls:
        assert enabled(1, y=2) == 3
        assert enabled(5) == 5
        step()
        with retrograd.enable():
            disabled()
            step()
    assert paths(calls) == (3, 2)


def test_decorated_function_may_call_itself() -> None:
    @retrograd.enable("schedule")
    def recursive(depth: int) -> None:
        if depth:
            recursive(depth - 1)
        step()

    with counting() as calls:
        recursive(4)
        step()
    assert paths(calls) == (5, 1)


def test_one_decorated_function_serves_many_threads() -> None:
    @retrograd.enable("schedule")
    def train() -> None:
        for _ in range(50):
            step()

    with counting() as calls:
        run_threads([train] * 4)
        step()
    assert paths(calls) == (200, 1)


def test_one_scope_object_serves_several_threads() -> None:
    on, off = retrograd.enable(), retrograd.disable()
    meet, one_at_a_time = threading.Barrier(2), threading.Lock()
    seen = {}

    def work(name: str, first: AbstractContextManager[None], second: AbstractContextManager[None]) -> None:
        with first:
            meet.wait()
            with second:
                meet.wait()
            meet.wait()
            with one_at_a_time:
                seen[name] = enabled_here()
            meet.wait()

    run_threads([lambda: work("a", off, on), lambda: work("b", on, off)])
    assert seen == {"a": False, "b": True}


def test_leaving_on_a_thread_that_did_not_enter_is_an_error() -> None:
    scope = retrograd.enable()
    scope.__enter__()

    def leave() -> None:
        with pytest.raises(RuntimeError, match="enter and leave it on the same thread"):
            scope.__exit__(None, None, None)

    try:
        run_threads([leave])
        assert enabled_here()
    finally:
        scope.__exit__(None, None, None)
    assert not enabled_here()


def test_only_plain_functions_can_be_decorated() -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None: ...

    class Class: ...

    for scope in (retrograd.enable(), retrograd.disable()):
        for thing in (generator, coroutine, Class, 3):
            with pytest.raises(TypeError, match=r"plain functions only; .* put a `with` block"):
                scope(thing)  # type: ignore[type-var]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_leaving_by_an_exception_restores(error: type[BaseException]) -> None:
    with counting() as calls:
        with pytest.raises(error), retrograd.enable():
            with retrograd.disable():
                step()
                raise error
        step()
        with retrograd.enable(), pytest.raises(error), retrograd.disable():
            raise error
    assert paths(calls) == (0, 2)


def test_enable_does_not_swallow_exceptions_of_decorated_functions() -> None:
    @retrograd.enable()
    def fails() -> None:
        raise LookupError("mine")

    with counting() as calls:
        with pytest.raises(LookupError, match="mine"):
            fails()
        step()
    assert paths(calls) == (0, 1)


def test_threads_are_untouched_by_another_threads_enable() -> None:
    with counting() as calls, retrograd.enable():
        run_threads([step, step])
        step()
    assert paths(calls) == (1, 2)
    assert calls.reasons == {"not_enabled": 2}


def test_default_reaches_threads_that_set_nothing() -> None:
    def with_disable() -> None:
        with retrograd.disable():
            step()
        step()

    entered, go = threading.Event(), threading.Event()

    def started_before() -> None:
        step()
        entered.set()
        go.wait(60)
        step()

    with counting() as calls:
        early = threading.Thread(target=started_before)
        early.start()
        entered.wait(60)
        retrograd.set_default("schedule")
        go.set()
        early.join()
        run_threads([step, with_disable])
        step()
        retrograd.set_default(None)
        step()
        run_threads([step])
    assert paths(calls) == (4, 4)
    assert sum(calls.reasons.values()) == 4


def test_unknown_backend() -> None:
    with counting() as calls:
        for call in (retrograd.enable, retrograd.set_default):
            with pytest.raises(ValueError, match="nonsense") as caught:
                call("nonsense")
            assert "schedule" in str(caught.value), "the sentence should say what there is"
        step()
    assert paths(calls) == (0, 1)


def test_uninstalled() -> None:
    on = retrograd.enable
    retrograd.uninstall()
    assert not retrograd.is_installed()
    sentence = r"retrograd is not installed; call retrograd\.install\(\) first\."
    with pytest.raises(RuntimeError, match=sentence), on():
        pass
    with counting() as calls:
        step()
    assert paths(calls) == (0, 0), "the previous engine should be alone"
    retrograd.install()
    with counting() as calls, on():
        step()
    assert paths(calls) == (1, 0)


def test_uninstall_inside_enable() -> None:
    with retrograd.enable():
        retrograd.uninstall()
        step()
        retrograd.install()
        with counting() as calls:
            step()
    assert paths(calls) == (1, 0)


def test_install_and_uninstall_are_idempotent_and_restore_the_very_engine() -> None:
    retrograd.uninstall()
    stock = Variable._execution_engine
    for _ in range(3):
        retrograd.install()
        ours = Variable._execution_engine
        retrograd.install()
        assert retrograd.is_installed()
        assert Variable._execution_engine is ours is not stock
        assert isinstance(ours, torch._C._ImperativeEngine)
        step()
        retrograd.uninstall()
        retrograd.uninstall()
        assert Variable._execution_engine is stock
        step()


def test_uninstall_from_inside_a_hook() -> None:
    with retrograd.enable():
        x = leaf(3)
        y = x.exp()
        y.register_hook(lambda g: retrograd.uninstall())
        (y * 2).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, 2 * x.detach().exp())
        assert not retrograd.is_installed()


def test_install_and_uninstall_while_threads_run_backward() -> None:
    stop = threading.Event()
    retrograd.uninstall()
    stock = Variable._execution_engine
    retrograd.install()

    def work(enabled: bool) -> None:
        with retrograd.enable() if enabled else retrograd.disable():
            ready.wait(60)
            while not stop.is_set():
                step()

    def toggle() -> None:
        ready.wait(60)
        try:
            for _ in range(300):
                retrograd.uninstall()
                time.sleep(0.001)
                retrograd.install()
                time.sleep(0.001)
        finally:
            stop.set()

    ready = threading.Barrier(5)
    run_threads([toggle, *[lambda e=e: work(e) for e in (True, True, True, False)]])
    retrograd.uninstall()
    assert Variable._execution_engine is stock


def test_shape_and_arithmetic_of_stats() -> None:
    retrograd.reset_stats()
    retrograd.cache_clear()
    with retrograd.enable():
        for _ in range(3):
            step()
        with torch.autograd.set_detect_anomaly(True):
            step()
    step()
    stats = retrograd.stats()
    assert set(stats) == {
        "calls", "groups", "recordings", "plans", "previous_reasons", "schedule_reasons", "captures",
        "hits", "misses", "nested_calls", "max_depth", "seconds", "cache", "parallel_calls",
        "helped_steps",
    }  # fmt: skip
    assert stats["calls"] == {"schedule": 3, "fused": 0, "callable": 0, "previous": 2}
    assert stats["captures"] == 0 and not any(stats["schedule_reasons"].values())
    assert {k: v for k, v in stats["previous_reasons"].items() if v} == {"not_enabled": 1, "anomaly_mode": 1}
    assert sum(stats["previous_reasons"].values()) == stats["calls"]["previous"]
    assert (stats["hits"], stats["misses"], stats["nested_calls"]) == (2, 1, 0)
    assert set(stats["seconds"]) == {"walk", "lookup", "run"}
    assert all(isinstance(s, float) and 0 <= s < 60 for s in stats["seconds"].values())
    assert set(stats["cache"]) == {"leaves", "nodes", "evictions"}
    assert stats["cache"]["leaves"] == 1 and stats["cache"]["nodes"] >= 1


def test_stats_is_a_copy() -> None:
    stats = retrograd.stats()
    stats["calls"]["schedule"] = -1
    stats["previous_reasons"]["not_enabled"] = -1
    assert retrograd.stats()["calls"]["schedule"] >= 0
    assert retrograd.stats()["previous_reasons"].get("not_enabled", 0) >= 0


def test_time_is_counted_where_it_is_spent() -> None:
    x = leaf(3)
    y = x.exp()
    y.register_hook(lambda g: time.sleep(0.05))
    retrograd.reset_stats()
    with retrograd.enable():
        y.sum().backward()
    seconds = retrograd.stats()["seconds"]
    assert seconds["run"] >= 0.05
    assert seconds["walk"] + seconds["lookup"] < 0.05


def test_reset_stats_keeps_the_cache() -> None:
    with retrograd.enable():
        step()
    retrograd.reset_stats()
    stats = retrograd.stats()
    assert stats["calls"] == {"schedule": 0, "fused": 0, "callable": 0, "previous": 0}
    assert sum(stats["previous_reasons"].values()) == 0
    assert (stats["hits"], stats["misses"], stats["max_depth"]) == (0, 0, 0)
    assert stats["seconds"] == {"walk": 0.0, "lookup": 0.0, "run": 0.0}
    assert stats["cache"]["leaves"] >= 1
    with counting() as calls, retrograd.enable():
        step()
    assert (calls.hits, calls.misses) == (1, 0)


def test_stats_of_ended_threads_are_kept() -> None:
    def work() -> None:
        with retrograd.enable():
            for _ in range(10):
                step()

    with counting() as calls:
        for _ in range(5):
            run_threads([work, work])
    assert calls.schedule == 100 and calls.hits + calls.misses == 100


def test_cache_clear() -> None:
    with retrograd.enable():
        step()
        retrograd.cache_clear()
        assert retrograd.stats()["cache"]["leaves"] == 0
        with counting() as calls:
            step()
            step()
    assert (calls.misses, calls.hits) == (1, 1)


def test_cache_clear_from_inside_a_hook() -> None:
    with retrograd.enable(), counting() as calls:
        for _ in range(3):
            x = leaf(3)
            y = x.exp()
            y.register_hook(lambda g: retrograd.cache_clear())
            (y * 2).sum().backward()
            assert x.grad is not None and torch.equal(x.grad, 2 * x.detach().exp())
    assert (calls.schedule, calls.previous) == (3, 0)


def test_cache_clear_while_threads_run() -> None:
    stop = threading.Event()

    def work() -> None:
        with retrograd.enable():
            while not stop.is_set():
                step()

    def clear() -> None:
        try:
            for _ in range(500):
                retrograd.cache_clear()
                retrograd.stats()
                time.sleep(0.001)
        finally:
            stop.set()

    with counting() as calls:
        run_threads([clear, work, work, work, work])
    assert calls.previous == 0
    assert calls.schedule == calls.hits + calls.misses > 0


def test_different_graphs_have_different_plans() -> None:
    retrograd.cache_clear()
    with retrograd.enable(), counting() as calls:
        for _ in range(2):
            for length in range(1, 21):
                y = leaf(3)
                for _ in range(length):
                    y = y.sin()
                y.sum().backward()
    assert (calls.misses, calls.hits) == (20, 20)
    assert retrograd.stats()["cache"]["leaves"] == 20


def test_logger() -> None:
    assert retrograd.logger is logging.getLogger("retrograd")


def test_enable_before_install_in_a_new_process() -> None:
    done = python("""
        import retrograd
        assert not retrograd.is_installed()
        try:
            with retrograd.enable(): pass
        except RuntimeError as error:
            print(error)
        retrograd.uninstall()
    """)
    assert done.stdout.strip() == "retrograd is not installed; call retrograd.install() first.", done.stderr
    assert done.returncode == 0


def test_missing_torch_is_one_sentence() -> None:
    done = python("""
        import sys
        sys.modules["torch"] = None
        try:
            import retrograd
        except ImportError as error:
            print(error)
    """)
    assert "retrograd needs PyTorch" in done.stdout, done.stderr
    assert "pip install torch==2.13.0" in done.stdout


def test_other_torch_is_one_sentence() -> None:
    done = python("""
        import torch
        torch.__version__ = "2.12.0+cpu"
        try:
            import retrograd
        except ImportError as error:
            print(error)
    """)
    assert done.stdout.strip() == (
        "retrograd is built for torch 2.13.0, but torch 2.12.0+cpu is installed: run `pip install torch==2.13.0`."
    ), done.stderr


def test_sources_without_the_built_module_are_one_sentence() -> None:
    sources = Path(__file__).parents[2] / "bindings"
    done = python(f"""
        import sys
        sys.path.insert(0, {str(sources)!r})
        try:
            import retrograd
        except ImportError as error:
            print(error)
    """)
    assert "not built here: run `make build`" in done.stdout, done.stderr


def test_decorator_without_parentheses() -> None:
    with pytest.raises(TypeError, match=r"write @retrograd\.enable\(\)"):

        @retrograd.enable
        def function() -> None: ...

        function()


def test_importing_retrograd_first_imports_torch_and_changes_nothing() -> None:
    done = python("""
        import sys
        import retrograd
        assert "torch" in sys.modules
        import torch
        from torch.autograd import Variable
        assert type(Variable._execution_engine) is torch._C._ImperativeEngine
        stock = Variable._execution_engine
        retrograd.install()
        x = torch.ones(2, requires_grad=True)
        with retrograd.enable():
            (x * 2).sum().backward()
        assert retrograd.stats()["calls"]["schedule"] == 1
        retrograd.uninstall()
        assert Variable._execution_engine is stock
        print(x.grad.tolist())
    """)
    assert done.stdout.strip() == "[2.0, 2.0]", done.stderr
    assert done.returncode == 0


def test_process_exits_cleanly_while_installed() -> None:
    done = python("""
        import threading, torch, retrograd
        retrograd.install()
        retrograd.set_default("schedule")
        ran = threading.Semaphore(0)
        def work():
            for _ in range(100):
                x = torch.ones(2, requires_grad=True)
                x.sin().sum().backward()
            with retrograd.enable():
                ran.release()
                threading.Event().wait()
        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        retrograd.enable().__enter__()
        y = torch.ones(2, requires_grad=True)
        kept = (y * 2).sin()
        kept.sum().backward(retain_graph=True)
        for _ in range(3):
            ran.acquire()
        print("done", flush=True)
    """)
    assert done.stdout.strip() == "done", done.stderr
    assert done.returncode == 0, done.stderr


FORK = """
    import os, sys, torch
    if {ours}:
        import retrograd
        retrograd.install()
        retrograd.enable().__enter__()
    def step():
        x = torch.ones(2, requires_grad=True)
        (x * 3).sum().backward()
        return x.grad.tolist()
    print(step(), flush=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            print("child", step(), flush=True)
            code = 0
        except Exception as error:
            print("child", type(error).__name__, error, flush=True)
        os._exit(code)
    print(os.waitpid(child, 0)[1] >> 8, step(), flush=True)
    if {ours}:
        assert retrograd.stats()["calls"]["schedule"] == 2
"""


def test_fork_behaves_as_with_the_stock_engine() -> None:
    want, got = (python(FORK.format(ours=ours)) for ours in (False, True))
    assert got.stdout == want.stdout, got.stderr
    assert got.returncode == want.returncode == 0
