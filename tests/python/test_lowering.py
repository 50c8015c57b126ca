"""Lowering in worker processes: what comes out, and what becomes of jobs and processes when things go wrong."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    fetch_object_proxy,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy import functions as torch_sympy

from retrograd import _lowering, _worker
from retrograd._lowering import Lowered, LoweringError, NoCompiler

Tensors = list[torch.Tensor]


def trace(
    function: Callable[..., tuple[torch.Tensor, ...]], inputs: Tensors, dynamic: set[tuple[int, int]] | None = None
) -> torch.fx.GraphModule:
    """An ATen graph of a function; `dynamic` names the (input, dimension) whose sizes are symbols."""
    mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None, allow_non_fake_inputs=True)
    tracer = PythonKeyTracer()
    tracer.root, tracer.graph, tracer.tensor_attrs = torch.nn.Module(), torch.fx.Graph(), {}
    fakes = []
    for i, tensor in enumerate(inputs):
        if dynamic:
            kinds = [DimDynamic.DUCK if (i, d) in dynamic else DimDynamic.STATIC for d in range(tensor.dim())]
            context = StatelessSymbolicContext(dynamic_sizes=kinds)
            fake = mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(f"in{i}"))
        else:
            fake = mode.from_tensor(tensor, static_shapes=True)
        proxy = tracer.create_proxy("placeholder", f"in{i}", (), {})
        proxy.node.meta["val"] = fake
        track_tensor_tree(fake, proxy, constant=None, tracer=tracer)
        fakes.append(fake)
    with mode, ProxyTorchDispatchMode(tracer, "symbolic" if dynamic else "fake"):
        outputs = function(*fakes)
    tracer.graph.output(tuple(fetch_object_proxy(tracer, out).proxy.node for out in outputs))
    return torch.fx.GraphModule(tracer.root, tracer.graph)


def linear_backward(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.mm(x.t(), g), torch.where(x > 0, torch.mm(g, w.t()), 0) * torch.tensor([1.5])


def scaled_backward(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, size: torch.Tensor) -> tuple[torch.Tensor, ...]:
    grad = torch.where(x > 0, torch.mm(g, w.t()), 0)
    return torch.mm(x.t(), g), grad / size.shape[1], grad.view(-1, 4).sum(0)


SYMBOLIC = {(0, 0), (2, 0), (3, 1)}


def inputs_of(batch: int, divisor: int | None = None) -> Tensors:
    generator = torch.Generator().manual_seed(batch)
    tensors = [torch.randn(shape, generator=generator) for shape in ((batch, 16), (16, 16), (batch, 16))]
    return tensors if divisor is None else [*tensors, torch.empty(0, divisor)]


def simple() -> torch.fx.GraphModule:
    return trace(lambda x: (x * 2,), [torch.zeros(3)])


def holds(guards: dict[str, Any], inputs: Tensors) -> bool:
    """What the C++ side does with guards."""
    symbols = [inputs[i].shape[dim] for i, dim in guards["symbols"]]
    for tensor, wanted in zip(inputs, guards["inputs"], strict=True):
        sizes = [_worker.evaluate(tree, symbols) for tree in wanted["size"]]
        strides = [_worker.evaluate(tree, symbols) for tree in wanted["stride"]]
        if list(tensor.shape) != sizes or (tensor.numel() > 0 and list(tensor.stride()) != strides):
            return False
    return all(_worker.evaluate(tree, symbols) for tree in guards["conditions"])


def run(lowered: Lowered, inputs: Tensors) -> Tensors:
    return torch._C._aoti.AOTIModelContainerRunnerCpu(lowered.library, 1).run(inputs)


def the_worker() -> int:
    """The process id of the one worker, once there is one."""
    eventually(lambda: len(_lowering._pool._workers) == 1, 20)
    (worker,) = _lowering._pool._workers
    return worker._process.pid


def members(session: int) -> list[int]:
    """Processes of a session that are alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] not in "ZX":
                    found.append(int(entry.name))
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def eventually(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.02)


def folders() -> set[str]:
    return set(glob.glob(os.path.join(tempfile.gettempdir(), "retrograd-worker-*")))


@pytest.fixture(scope="module")
def out_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def compiled(out_dir: Path) -> dict[str, Future[Lowered]]:
    """Compiles that several tests look at, by one worker one after the other."""
    _lowering.shutdown()
    graphs = {
        "static": trace(linear_backward, inputs_of(8)),
        "symbolic": trace(scaled_backward, inputs_of(8, 9), SYMBOLIC),
    }
    return {name: _lowering.submit(g, threads=1, name=name, out_dir=str(out_dir)) for name, g in graphs.items()}


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Workers started in the test fail as told at the job of the given name."""

    def set_fault(what: str) -> None:
        _lowering.shutdown()
        monkeypatch.setenv(_worker.FAULT, what)

    yield set_fault
    _lowering.shutdown()


def script(code: str, **environment: str) -> subprocess.Popen[str]:
    """A user's program, whose preamble has a graph and the module at hand."""
    preamble = f"""
        import os, sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import torch
        from retrograd import _lowering
        from test_lowering import simple, the_worker, trace
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(preamble) + "\n".join(line.strip() for line in code.splitlines())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def read_pid(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.strip().isdigit(), line + (process.communicate()[1] if not line else "")
    return int(line)


# What comes out -----------------------------------------------------------------------------------------------------


def test_static_plan_gives_the_eager_result(compiled: dict[str, Future[Lowered]], out_dir: Path) -> None:
    lowered = compiled["static"].result(300)
    inputs = inputs_of(8)
    for got, wanted in zip(run(lowered, inputs), linear_backward(*inputs), strict=True):
        torch.testing.assert_close(got, wanted)
    assert Path(lowered.library).parent == out_dir
    assert lowered.seconds > 0
    assert lowered.guards["symbols"] == lowered.guards["conditions"] == []
    assert holds(lowered.guards, inputs)
    assert not holds(lowered.guards, inputs_of(9))
    assert not holds(lowered.guards, [inputs[0], inputs[1].t(), inputs[2]])


def test_symbolic_plan_gives_the_eager_result_wherever_its_guards_hold(compiled: dict[str, Future[Lowered]]) -> None:
    lowered = compiled["symbolic"].result(300)
    assert len(lowered.guards["symbols"]) == 2
    for batch, divisor in ((8, 9), (5, 3), (200, 77), (256, 2)):
        inputs = inputs_of(batch, divisor)
        assert holds(lowered.guards, inputs), (batch, divisor)
        for got, wanted in zip(run(lowered, inputs), scaled_backward(*inputs), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_guards_of_tracing_and_of_lowering_reject(compiled: dict[str, Future[Lowered]]) -> None:
    guards, large = compiled["symbolic"].result(300).guards, inputs_of(5000, 9)
    assert not holds(guards, inputs_of(1, 9))  # symbols are never 1
    graph = trace(scaled_backward, inputs_of(8, 9), SYMBOLIC)
    assert holds(_worker.export_guards([node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]), large)
    assert not holds(guards, large)  # lowering's own, like 16 * s <= 4096
    assert not holds(guards, [inputs_of(8)[0], *inputs_of(9, 9)[1:]])  # one symbol, two inputs
    assert not holds(guards, [*inputs_of(8)[:1], torch.randn(16, 17), *inputs_of(8, 9)[2:]])


def test_only_libraries_are_left_behind(compiled: dict[str, Future[Lowered]], out_dir: Path) -> None:
    libraries = {Path(future.result(300).library) for future in compiled.values()}
    assert set(out_dir.iterdir()) == libraries
    (worker,) = _lowering._pool._workers
    assert worker._folder in folders()
    assert set(os.listdir(worker._folder)) == {"lock", "log"}
    _lowering.shutdown()
    assert worker._folder not in folders()


# Guards as trees ----------------------------------------------------------------------------------------------------

A, B = sympy.symbols("a b", positive=True, integer=True)


@pytest.mark.parametrize(
    "expr",
    [
        3 * A + B - 7,
        A * B * 2,
        A**3 - 2 * B,
        torch_sympy.FloorDiv(A + 3, B + 1),
        torch_sympy.FloorDiv(A - 20, 7),
        torch_sympy.CleanDiv(A * B, B),
        torch_sympy.PythonMod(A - 20, 7),
        torch_sympy.Mod(A * B, 5),
        torch_sympy.ModularIndexing(A * B, 3, 4),
        torch_sympy.PowByNatural(A, 2),
        torch_sympy.Max(A, B, 5),
        torch_sympy.Min(A, B + 2),
        torch_sympy.Identity(A + B),
        sympy.And(A < B, B <= 2 * A),
        sympy.Or(A > B, sympy.Eq(B, 4)),
        sympy.Not(sympy.And(A >= B, sympy.Ne(A, 3))),
        sympy.Ge(16 * A, 64),
    ],
    ids=str,
)
def test_a_tree_has_its_expressions_value(expr: sympy.Basic) -> None:
    tree = _worker._Trees({A: 0, B: 1})(expr)
    for a in (2, 3, 7, 12):
        for b in (2, 4, 5, 9):
            wanted = expr.subs({A: a, B: b})
            wanted = wanted.doit() if not isinstance(wanted, sympy.logic.boolalg.BooleanAtom) else wanted
            assert _worker.evaluate(tree, [a, b]) == int(bool(wanted) if wanted in (True, False) else wanted), (a, b)


@pytest.mark.parametrize(
    "expr",
    [sympy.Symbol("u0", integer=True) + A, torch_sympy.IntTrueDiv(A, 3), A / 2, A**20, sympy.Integer(2) ** 63, A > 2.5],
    ids=str,
)
def test_what_cannot_be_checked_at_run_time_is_refused(expr: sympy.Basic) -> None:
    with pytest.raises(_worker.RefusedError):
        _worker._Trees({A: 0})(expr)


def test_specialized_and_merged_symbols_become_conditions() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert z.shape[0] == 7 and (x.shape[0] * 2) % 3 != 2
        return (x + y,)

    inputs = [torch.zeros(5), torch.zeros(5), torch.zeros(7)]
    graph = trace(function, inputs, {(0, 0), (1, 0), (2, 0)})
    guards = _worker.export_guards([node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")])
    assert holds(guards, inputs)
    assert holds(guards, [torch.zeros(8), torch.zeros(8), torch.zeros(7)])
    assert not holds(guards, [torch.zeros(5), torch.zeros(5), torch.zeros(8)])
    assert not holds(guards, [torch.zeros(5), torch.zeros(6), torch.zeros(7)])
    assert not holds(guards, [torch.zeros(7), torch.zeros(7), torch.zeros(7)])


def test_sizes_that_depend_on_values_are_refused() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.nonzero(x),)

    mode = FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True))
    fake = mode.from_tensor(torch.zeros(4), static_shapes=True)
    with mode:
        function(fake)
    with pytest.raises(_worker.RefusedError, match="values of tensors"):
        _worker.export_guards([fake])


# Graphs that cannot go ----------------------------------------------------------------------------------------------


def test_an_operator_that_only_this_process_has_is_a_clear_error() -> None:
    library = torch.library.Library("retrograd_test_lowering", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
    graph = trace(lambda x: (torch.ops.retrograd_test_lowering.double(x),), [torch.zeros(3)])
    future = _lowering.submit(graph, threads=1, name="custom")
    with pytest.raises(LoweringError, match="retrograd_test_lowering"):
        future.result(0)


@pytest.mark.parametrize("cxx", [None, "no-such-compiler"])
def test_no_compiler_is_said_at_once_with_the_way_out(monkeypatch: pytest.MonkeyPatch, cxx: str | None) -> None:
    if cxx is None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", "/nonexistent")
    else:
        monkeypatch.setenv("CXX", cxx)
    future = _lowering.submit(simple(), threads=1, name="simple")
    with pytest.raises(NoCompiler, match=r"install.*CXX|Install.*CXX"):
        future.result(0)
    _lowering.warm_up()  # nothing happens, nothing is raised
    assert _lowering.wait(0)
    monkeypatch.undo()
    assert os.path.isabs(_lowering.check_compiler())


# Workers that go wrong ----------------------------------------------------------------------------------------------


def test_a_killed_worker_fails_its_job_and_takes_its_compilers_along(fault: Callable[[str], None]) -> None:
    fault("")
    graph = trace(lambda x: (torch.softmax(x, 0), x.sum()), [torch.zeros(64)])
    future = _lowering.submit(graph, threads=1, name="killed")
    pid = the_worker()
    eventually(lambda: any("wrapper.cpp" in command(member) for member in members(pid)), 60)  # seconds of g++
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LoweringError, match="died while it compiled killed"):
        future.result(20)
    eventually(lambda: not members(pid), 0.5)


def test_a_hanging_worker_is_stopped_and_the_next_job_gets_a_fresh_one(
    fault: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault("hang:hung")
    monkeypatch.setenv("RETROGRAD_COMPILE_TIMEOUT", "6")
    future = _lowering.submit(simple(), threads=1, name="hung")
    pid = the_worker()
    monkeypatch.setenv(_worker.FAULT, "disk:next")
    following = _lowering.submit(simple(), threads=1, name="next")
    with pytest.raises(LoweringError, match="took more than 6 s"):
        future.result(30)
    monkeypatch.delenv("RETROGRAD_COMPILE_TIMEOUT")
    with pytest.raises(LoweringError, match="disk is full") as caught:
        following.result(60)
    assert "\n" not in caught.value.why
    assert the_worker() != pid
    assert not members(pid)


def test_a_worker_that_died_between_jobs_costs_no_job(fault: Callable[[str], None]) -> None:
    fault("disk:job")
    with pytest.raises(LoweringError, match="disk is full"):
        _lowering.submit(simple(), threads=1, name="job").result(60)
    os.kill(the_worker(), signal.SIGKILL)
    with pytest.raises(LoweringError, match="disk is full"):  # so it got to a worker
        _lowering.submit(simple(), threads=1, name="job").result(60)


@pytest.mark.parametrize(("what", "why"), [("garbage", "nonsense"), ("die", "killed")])
def test_garbage_and_death_in_a_job_are_that_jobs_error(
    fault: Callable[[str], None], what: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(f"{what}:job")
    started: list[str] = []
    worker = _lowering._Worker
    monkeypatch.setattr(_lowering, "_Worker", lambda compiler: (started.append(compiler), worker(compiler))[1])
    others = folders()
    future = _lowering.submit(simple(), threads=1, name="job")
    pid = the_worker()
    with pytest.raises(LoweringError, match=why) as caught:
        future.result(60)
    assert f"fault: {what}" in caught.value.output  # what it printed last
    assert len(started) == 1  # it would only go wrong again
    assert not members(pid)
    eventually(lambda: folders() <= others, 5)


def test_a_job_right_after_a_shutdown_gets_a_fresh_worker(fault: Callable[[str], None]) -> None:
    fault("disk:job")
    with pytest.raises(LoweringError, match="disk is full"):
        _lowering.submit(simple(), threads=1, name="job").result(60)
    pool, pid = _lowering._pool, the_worker()
    eventually(lambda: pool._waiting == 1, 5)
    with pool._changed:  # the worker's thread does not get to know of one before the other
        for worker in pool._workers:
            worker.kill("shut down")
        pool._generation += 1
        future = _lowering.submit(simple(), threads=1, name="job")
    with pytest.raises(LoweringError, match="disk is full"):
        future.result(60)
    assert the_worker() != pid


def test_shutdown_fails_what_runs_and_what_waits(fault: Callable[[str], None]) -> None:
    fault("hang:first")
    futures = [_lowering.submit(simple(), threads=1, name=name) for name in ("first", "second")]
    pid = the_worker()
    assert not _lowering.wait(0.1)
    start = time.monotonic()
    _lowering.shutdown()
    assert time.monotonic() - start < 4  # 5: it gave up waiting for a thread
    for future in futures:
        with pytest.raises(LoweringError, match="shut down"):
            future.result(5)
    assert _lowering.wait(0)
    assert not members(pid)


def test_a_forked_child_leaves_the_workers_to_its_parent(fault: Callable[[str], None]) -> None:
    fault("slow:job")
    future = _lowering.submit(simple(), threads=1, name="job")
    pid = the_worker()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(LoweringError, match="forked"):
                future.result(0)
            assert _lowering.wait(0)
            with pytest.raises(LoweringError, match="disk is full"):
                _lowering.submit(simple(), threads=1, name="job").result(60)
            assert the_worker() != pid
            _lowering.shutdown()
            code = 0
        finally:
            os._exit(code)
    with pytest.raises(LoweringError, match="disk is full"):
        future.result(60)
    assert os.waitpid(child, 0)[1] == 0
    assert the_worker() == pid


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("refused", "the graph cannot become a compiled plan: a reason"),
        ("disk", f"the disk is full: the compiler needs some megabytes in {tempfile.gettempdir()}"),
        ("memory", "the compiler ran out of memory"),
        ("compiler", "the compiler failed (a reason)"),
    ],
)
def test_what_a_worker_answers_is_said_in_a_sentence(kind: str, why: str) -> None:
    error = _lowering._explained({"ok": False, "kind": kind, "why": "a reason"}, "its output")
    assert error.why == why
    assert error.output == ("" if kind == "refused" else "its output")


@pytest.mark.parametrize(("text", "seconds"), [("2.5", 2.5), ("", 600), ("0", 600), ("-1", 600), ("soon", 600)])
def test_the_limit_from_the_environment_counts(
    text: str, seconds: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RETROGRAD_COMPILE_TIMEOUT", text)
    assert _lowering.compile_timeout() == seconds
    said = [record.getMessage() for record in caplog.records]
    wrong = f"RETROGRAD_COMPILE_TIMEOUT={text!r} is no positive number: 600 is used"
    assert said == ([wrong] if text in ("0", "-1", "soon") else [])


# Libraries on their way to the receiver ------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """What a worker has made: a library and the list of operators next to it."""
    library = tmp_path / "job" / "made.so"
    library.parent.mkdir()
    (tmp_path / "out").mkdir()
    library.write_bytes(b"library")
    library.with_suffix(".json").write_bytes(b"operators")
    return library


def handed_over(library: Path, name: str) -> str:
    job = _lowering._Job(Future(), {"task": "lower"}, b"", name, str(library.parents[1] / "out"), "")
    return _lowering._hand_over(str(library), job)


@pytest.mark.parametrize("lists", [False, True], ids=["alone", "with operators"])
@pytest.mark.parametrize("far", [False, True], ids=["here", "on another file system"])
def test_a_library_moves_with_its_list_of_operators(
    far: bool, lists: bool, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if far:
        monkeypatch.setattr(_lowering.os, "replace", fails_with(errno.EXDEV))
    if not lists:
        made.with_suffix(".json").unlink()
    target = Path(handed_over(made, "../a name"))
    assert target.parent == made.parents[1] / "out" and target.name.startswith("retrograd-.._a_name-")
    assert target.read_bytes() == b"library" and target.stat().st_mode & 0o777 == 0o700
    if lists:
        assert target.with_suffix(".json").read_bytes() == b"operators"
    assert len(list(target.parent.iterdir())) == 1 + lists


@pytest.mark.parametrize("which", [".so", ".json"])
def test_a_library_that_cannot_be_put_where_it_belongs_leaves_nothing(
    which: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copyfile
    full = fails_with(errno.ENOSPC)
    monkeypatch.setattr(_lowering.os, "replace", fails_with(errno.EXDEV))
    monkeypatch.setattr(_lowering.shutil, "copyfile", lambda *a: full() if a[0].endswith(which) else copy(*a))
    with pytest.raises(LoweringError, match=r"cannot be put into .*out \(No space left on device"):
        handed_over(made, "full")
    assert list((made.parents[1] / "out").iterdir()) == []


def fails_with(number: int) -> Callable[..., None]:
    def fail(*ignored: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


# Programs that end --------------------------------------------------------------------------------------------------


def test_a_script_without_a_main_guard_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise ImportError('the user has a module of that name')")
    user = tmp_path / "user.py"
    user.write_text(
        textwrap.dedent(f"""
            import sys
            sys.path.remove({str(tmp_path)!r})  # its queue.py would hurt this process too
            import torch
            from torch.fx.experimental.proxy_tensor import make_fx
            from retrograd import _lowering
            sys.path.insert(0, {str(tmp_path)!r})
            print("started")
            graph = make_fx(lambda x: (x * 2,), tracing_mode="fake")(torch.ones(3))
            lowered = _lowering.submit(graph, threads=1, name="user", out_dir={str(tmp_path)!r}).result()
            print(torch._C._aoti.AOTIModelContainerRunnerCpu(lowered.library, 1).run([torch.ones(3)])[0].tolist())
        """)
    )
    done = subprocess.run([sys.executable, str(user)], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines() == ["started", "[2.0, 2.0, 2.0]"], done.stderr
    assert done.stderr == ""


PENDING = """
    future = _lowering.submit(simple(), threads=1, name="job")
    print(the_worker(), flush=True)
"""


def test_a_program_that_ends_with_a_job_pending_leaves_no_process() -> None:
    others = folders()
    process = script(PENDING, **{_worker.FAULT: "hang:job"})
    pid = read_pid(process)
    assert process.wait(10) == 0
    assert process.stderr is not None and process.stderr.read() == ""
    eventually(lambda: not members(pid), 5)
    assert folders() <= others


@pytest.mark.parametrize("moment", ["starting", "compiling"])
def test_a_killed_program_leaves_no_process(moment: str) -> None:
    others = folders()
    process = script(PENDING + "\ntime.sleep(100)", **{_worker.FAULT: "hang:job"})
    pid = read_pid(process)
    assert len(folders() - others) == 1
    if moment == "compiling":
        time.sleep(5)
    process.kill()
    process.communicate()
    eventually(lambda: not members(pid), 10)
    eventually(lambda: folders() <= others, 5)


def test_ctrl_c_is_prompt_and_quiet() -> None:
    process = script(PENDING + "\nfuture.result()", **{_worker.FAULT: "hang:job"})
    pid = read_pid(process)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - start < 10
    assert errors.count("Traceback") == 1 and errors.strip().endswith("KeyboardInterrupt"), errors
    eventually(lambda: not members(pid), 5)


def test_progress_is_one_line_on_a_terminal(fault: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault("slow:slow")
    ours, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        futures = [_lowering.submit(simple(), threads=1, name="slow") for _ in range(2)]
        assert not _lowering.wait(0.1)
        assert futures[0].exception(60) is not None
        shown = b""
        while select.select([ours], [], [], 0)[0]:
            shown += os.read(ours, 4096)
        _lowering.shutdown()
        monkeypatch.undo()
    os.close(ours)
    assert b"retrograd: compiling plan 1 of 2 (slow), " in shown
    assert shown.endswith(b"\r\x1b[2K")
    assert b"\n" not in shown
