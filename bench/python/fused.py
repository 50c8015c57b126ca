"""Fused plans: other engines and retrograd in turn, in one process; medians and their ratio.

Every row asserts from retrograd.stats() that all of its groups ran compiled and that nothing was compiled inside the
timed calls. Above 1, retrograd is faster. Plans come from a plan store of this run's own, so every figure for compiling
is a true one.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
STORE = os.environ.setdefault("RETROGRAD_CACHE_DIR", tempfile.mkdtemp(prefix="retrograd-bench-"))

import suite  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._dynamo import compiled_autograd  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import retrograd  # noqa: E402

Loss = Callable[[], Tensor]
_row = "{:52}  {:>10}  {:>12}  {:>6}"


def checkpointed_encoder() -> Loss:
    layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True) for _ in range(2))
    x = torch.randn(8, 16, 64, requires_grad=True)

    def loss() -> Tensor:
        layers.zero_grad()
        h = x
        for layer in layers:
            h = checkpoint(layer, h, use_reentrant=True)
        return h.pow(2).mean()

    return loss


def convolutional() -> Loss:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    x, y = torch.rand(32, 1, 8, 8), torch.randint(10, (32,))

    def loss() -> Tensor:
        model.zero_grad()
        return nn.functional.cross_entropy(model(x), y)

    return loss


def with_plain_ends(kind: str) -> Loss:
    """Three blocks under checkpoint or save_on_cpu between plain layers, with activations larger than the weights."""
    front, back = suite.layers_of(2, 64), suite.layers_of(2, 64)
    blocks = nn.ModuleList(suite.layers_of(3, 64) for _ in range(3))
    x = torch.randn(512, 64)

    def loss() -> Tensor:
        for module in (front, blocks, back):
            module.zero_grad()
        h = front(x)
        for block in blocks:
            if kind == "save_on_cpu":
                with torch.autograd.graph.save_on_cpu():
                    h = block(h)
            else:
                h = checkpoint(block, h, use_reentrant=kind == "reentrant checkpoint")
        return back(h).sum()

    return loss


def check_all_compiled(calls: int) -> None:
    stats = retrograd.stats()
    assert stats["calls"]["fused"] - stats["nested_calls"] == calls, stats
    assert stats["calls"]["schedule"] == stats["groups"]["by_node"] == stats["recordings"] == 0, stats


def compile_now(loss: Loss) -> None:
    """Until a call compiles nothing any more."""
    with retrograd.enable(backend="inductor", mode="blocking"):
        for _ in range(6):
            retrograd.reset_stats()
            loss().backward()
    check_all_compiled(1)


def print_row(name: str, other: list[float], ours: list[float]) -> None:
    a, b = statistics.median(other), statistics.median(ours)
    print(_row.format(name, f"{a:.1f}", f"{b:.1f}", f"{a / b:.2f}"), flush=True)


def against_eager(name: str, loss: Loss, rounds: int) -> None:
    compile_now(loss)
    retrograd.reset_stats()
    other, ours = [], []
    for _ in range(rounds):
        other.append(suite.timed(loss()))
        y = loss()
        with retrograd.enable(backend="inductor"):
            ours.append(suite.timed(y))
    check_all_compiled(rounds)
    print_row(f"{name}, eager engine", other, ours)


def peak_bytes(loss: Tensor) -> float:
    """CPU memory of tensors at the highest point of a backward, over what was in use before it."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        loss.backward()
    now = most = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return float(most)


def peak_memory(name: str, loss: Loss) -> None:
    """One call on each side: memory does not vary. The profiler's own lines on stderr cannot be turned off."""
    compile_now(loss)
    retrograd.reset_stats()
    other = peak_bytes(loss()) / 1e3
    y = loss()
    with retrograd.enable(backend="inductor"):
        ours = peak_bytes(y) / 1e3
    check_all_compiled(1)
    print_row(name, [other], [ours])


def against_stock_compiled(name: str, loss: Loss, rounds: int) -> None:
    compile_now(loss)
    runs = 0

    def compiler(graph: torch.fx.GraphModule) -> Callable[..., Any]:
        compiled = torch.compile(graph)

        def run(*args: Any) -> Any:
            nonlocal runs
            runs += 1
            return compiled(*args)

        return run

    def stock(y: Tensor) -> float:
        retrograd.uninstall()
        try:
            with compiled_autograd._enable(compiler, dynamic=False):
                return suite.timed(y)
        finally:
            retrograd.install()

    for _ in range(10):
        stock(loss())
    runs = 0
    retrograd.reset_stats()
    other, ours = [], []
    for _ in range(rounds):
        other.append(stock(loss()))
        y = loss()
        with retrograd.enable(backend="inductor"):
            ours.append(suite.timed(y))
    check_all_compiled(rounds)
    assert runs == rounds, "the stock side did not run compiled"
    print_row(f"{name}, stock compiled autograd + Inductor", other, ours)


def threads(count: int, rounds: int, calls: int) -> None:
    """Wall time per training step with `count` threads, each on a model of its own."""
    models = [nn.Sequential(*(l for _ in range(10) for l in (nn.Linear(64, 64), nn.ReLU()))) for _ in range(count)]  # noqa: E741
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    x = torch.randn(8, 64)

    def step(k: int) -> None:
        optimizers[k].zero_grad()
        models[k](x).sum().backward()
        optimizers[k].step()

    with retrograd.enable(backend="inductor", mode="blocking"):
        for _ in range(3):
            step(0)

    def run(backend: str | None) -> float:
        def work(gate: threading.Barrier, k: int) -> None:
            torch.set_num_threads(1)
            with retrograd.enable(backend=backend) if backend else retrograd.disable():
                gate.wait()
                for _ in range(calls):
                    step(k)
                gate.wait()

        return suite.timed_threads([functools.partial(work, k=k) for k in range(count)]) / (count * calls)

    run("inductor")
    retrograd.reset_stats()
    other, ours = [], []
    for _ in range(rounds):
        other.append(run(None))
        ours.append(run("inductor"))
    check_all_compiled(rounds * count * calls)
    print_row(f"mlp10x64, {count} Python threads, training step", other, ours)


def two_cpp_threads() -> None:
    """Throughput of two C++ threads over one, on the plan that mlp10x64 has in the store by now."""
    program = os.path.join(os.path.dirname(HERE), "..", "build", "release", "bench", "bench_backward")
    command = [program, "--benchmark_filter=^two_threads_fused", "--benchmark_format=json"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (row,) = json.loads(out)["benchmarks"]
    assert not row.get("error_occurred"), row
    scaling = [f"{row[side]:.2f}" for side in ("stock_scaling", "retrograd_scaling")]
    print(_row.format("mlp10x64, throughput of 2 C++ threads over one", *scaling, ""))


_CHILD = """
import sys, time, torch
sys.path.insert(0, {here!r})
import retrograd, suite
torch.manual_seed(0); torch.set_num_threads(1)
retrograd.install()
if {mode!r} == "blocking":  # what is imported at the first capture does not count
    with retrograd.enable(backend="inductor", mode="blocking"):
        for batch in (3, 4):
            suite.mlp(2, 4, batch)().backward()
    retrograd.reset_stats()
with retrograd.enable(backend="inductor", mode={mode!r}) if {mode!r} else retrograd.disable():
    for batch in {batches}:
        y = suite.encoder(batch)()
        start = time.perf_counter()
        y.backward()
        elapsed, stats = time.perf_counter() - start, retrograd.stats()
        print(elapsed * 1e3, stats["plans"]["from_store"], stats["recordings"])
    sys.stdout.flush()
    import os; os._exit(0)  # not waiting for what is being compiled
"""


def child(mode: str, batches: list[int], store: str, **variables: str) -> list[tuple[float, int, int]]:
    """Per backward of an encoder in a fresh process: milliseconds, plans found in the store so far, recordings so far.

    `mode`: "background", "blocking" or, for the eager engine, "".
    """
    code = _CHILD.format(here=HERE, mode=mode, batches=batches)
    environment = {**os.environ, "RETROGRAD_CACHE_DIR": store, **variables}
    out = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    rows = [line.split() for line in out.stdout.splitlines()]
    return [(float(ms), int(found), int(recorded)) for ms, found, recorded in rows]


def fresh_processes(rounds: int) -> None:
    compile_now(suite.encoder())
    print(_row.format("fresh process, 2-layer encoder", "eager ms", "retrograd ms", "ratio"))
    eager, cold, stored = [], [], []
    recording: dict[str, list[float]] = {"fixed sizes": [], "an open size": []}
    capture: dict[str, list[float]] = {"fixed sizes": [], "an open size": []}
    for _ in range(rounds):
        eager.append(child("", [8], STORE)[0][0])
        with tempfile.TemporaryDirectory() as empty:
            calls = child("background", [8] * 4 + [6] * 4, empty)
        assert [recorded for _, _, recorded in calls] == [0, 0, 1, 1, 1, 1, 2, 2], calls
        cold.append(calls[0][0])
        recording["fixed sizes"].append(calls[2][0] - calls[1][0])
        recording["an open size"].append(calls[6][0] - calls[5][0])
        first = child("background", [8], STORE)[0]
        assert first[1:] == (1, 0), first
        stored.append(first[0])
        with tempfile.TemporaryDirectory() as empty:
            calls = child("blocking", [8, 8, 6, 6], empty, RETROGRAD_LOWERING="eager")
        assert [recorded for _, _, recorded in calls] == [1, 1, 2, 2], calls
        capture["fixed sizes"].append(calls[0][0] - calls[1][0])
        capture["an open size"].append(calls[2][0] - calls[3][0])
    print_row("first backward, background, no plan yet", eager, cold)
    print_row("first backward, plan in the store", eager, stored)
    for name, measured in (
        ("recording, {}: a call over the one before, ms", recording),
        ("blocking capture without compile, {}, ms", capture),
    ):
        for sizes, times in measured.items():
            print(_row.format(name.format(sizes), "", f"{statistics.median(times):.1f}", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000, help="calls on each side for the smallest models")
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    retrograd.install()
    print(_row.format("backward, one intra-op thread; against", "other us", "retrograd us", "ratio"))
    mlp = suite.mlp(10, 64, 8)
    against_eager("mlp10x64", mlp, rounds)
    against_stock_compiled("mlp10x64", mlp, max(rounds // 10, 20))
    against_eager("encoder, 2 layers", suite.encoder(), max(rounds // 10, 20))
    against_eager("encoder, reentrant checkpoint", checkpointed_encoder(), max(rounds // 10, 20))
    against_eager("4 x Linear(512, 512), batch 64", suite.mlp(4, 512, 64, relu=False), max(rounds // 20, 20))
    against_eager("convolutional net on 8x8 images", convolutional(), max(rounds // 10, 20))
    threads(2, 5, max(rounds // 10, 20))
    threads(8, 5, max(rounds // 40, 20))
    two_cpp_threads()
    print(_row.format("peak tensor memory of a backward", "eager KB", "retrograd KB", "ratio"))
    for kind in ("reentrant checkpoint", "non-reentrant checkpoint", "save_on_cpu"):
        peak_memory(f"blocks under {kind}", with_plain_ends(kind))
    fresh_processes(5)


if __name__ == "__main__":
    main()
