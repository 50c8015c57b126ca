"""Random programs on the stock engine and on retrograd: what must be equal, and how a failing program is made small.

Each backend is held to what docs/architecture.md says of it. On the schedule everything is equal, bit for bit and in
order. Fused plans and compiler functions round differently; a compiler function runs hooks in an order of its own; and
where a call raises, how far it came is the schedule's promise only.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from callable_oracle import front_end, stock_compiled_autograd
from fused_oracle import TOLERANCE
from oracle import run_threads, state_left
from random_programs import (
    NESTING,
    OF_LEAVES,
    RAISING,
    Entry,
    Log,
    Program,
    Run,
    Segment,
    generate,
    make_leaves,
)
from torch import Tensor

import retrograd

BACKENDS = ("schedule", "compiler", "fused")

# The names that stats() has for them.
PATHS = {"schedule": "schedule", "compiler": "callable", "fused": "fused"}

# Why calls may run on the schedule although more was asked for, in a process where nothing else calls backward.
REASONS = {
    "schedule": set(),
    "compiler": {"create_graph", "not_capturable"},
    "fused": {"create_graph", "not_fusable", "too_many_keys"},
}
# Where other threads call backward, too.
REASONS_IN_THREADS = {"capture_in_progress", "graph_in_use", "compiling"}

# What these steps do depends on the order in which independent nodes run, or on the node that runs a hook.
NOT_PROMISED = {
    "schedule": set(),
    # In torch's captured graphs, None for a gradient cannot be added to another gradient.
    "compiler": {"hook_adds", "hook_asks", "multi_any", "nodes_everywhere", "function_without_gradient"},
    "fused": {"hook_adds"},
}


def as_captured(graph: torch.fx.GraphModule) -> Any:
    """The compiler function: runs graphs as they are."""
    return graph


@contextlib.contextmanager
def torchs_compiled_autograd() -> Iterator[None]:
    with stock_compiled_autograd(), front_end._enable(as_captured):
        yield


@contextlib.contextmanager
def running_on(backend: str) -> Iterator[None]:
    """Backward calls of this thread run on the backend; for "fused", RETROGRAD_LOWERING says how plans are made."""
    match backend:
        case "stock":
            scope: Any = retrograd.disable()
        case "schedule":
            scope = retrograd.enable("schedule")
        case "compiler":
            scope = retrograd.enable(as_captured)
        case "torch":
            scope = torchs_compiled_autograd()
        case _:
            scope = retrograd.enable("inductor", mode="blocking")
    with scope:
        yield


WATCHED = {"leaf_accumulated", "node_after", "node_after_changes"}


def comparable(program: Program, backend: str) -> Program:
    """The program without what this backend does not promise."""
    program = program.without(NOT_PROMISED[backend])
    if backend == "compiler" and program.has(WATCHED):  # what nested calls add to leaves with such hooks is lost
        program = program.without({"hook_nests"})
    # torch's captures look at all nodes, and free all, also those that inputs= leaves out.
    return program if backend != "compiler" else dataclasses.replace(program, parts=False)


@dataclasses.dataclass
class Seen:
    """What one run did: to be compared."""

    log: Log
    after: dict[str, Any]
    warnings: list[str]


def observe(program: Program, backend: str, shared: dict[int, Tensor] | None = None) -> Seen:
    # Which warnings are caught is a setting of the process.
    alone = threading.current_thread() is threading.main_thread()
    with warnings.catch_warnings(record=True) if alone else contextlib.nullcontext() as caught:
        if alone:
            warnings.simplefilter("always")
        with running_on(backend):
            log = Run(program, shared)()
        after = state_left()
    return Seen(log, after, [f"{w.category.__name__}: {w.message}" for w in caught or ()])


# --- Comparing ---


def difference(want: Seen, got: Seen, program: Program, backend: str) -> str | None:
    """The first thing in which `got`, from this backend, is not what the stock engine's `want` asks for."""
    if backend == "schedule":
        return _exact(want, got)
    found = _up_to_rounding(want.log, got.log, program, backend)
    if found is None and want.after != got.after:
        found = f"state left behind: {want.after} became {got.after}"
    return found


def _exact(want: Seen, got: Seen) -> str | None:
    stock, ours = (
        [*_lines(side.log), *side.warnings, *(f"{name}: {value}" for name, value in side.after.items())]
        for side in (want, got)
    )
    for number in range(max(len(stock), len(ours))):
        a, b = (side[number] if number < len(side) else "(nothing)" for side in (stock, ours))
        if a != b:
            return f"line {number}:\n  stock:     {a}\n  retrograd: {b}"
    return None


def _lines(log: Log) -> list[str]:
    lines = []
    for segment in log.segments:
        lines += [f"call: {segment.call}"] if segment.call else []
        lines += [f"{entry.label}: {entry.text}" for entry in segment.entries]
        lines += [f"error: {segment.where}"] if segment.error else []
    return lines


def _up_to_rounding(want: Log, got: Log, program: Program, backend: str) -> str | None:
    limits = Limits(want, program)
    in_order = backend == "fused" and not program.has(NESTING)
    for number, stock in enumerate(want.segments):
        if number == len(got.segments):
            return f"nothing after segment {number}; stock: {stock.call}"
        ours = got.segments[number]
        if stock.call != ours.call:
            return f"the call in segment {number}:\n  stock:     {stock.call}\n  retrograd: {ours.call}"
        if stock.after_error:
            continue
        where = f"in {stock.call or 'what came between calls'}: "
        if stock.error or ours.error:
            if not _errors_agree(stock.error, ours.error, program, backend):
                return f"{where}\n  stock:     {stock.error}\n  retrograd: {ours.error}"
            # Nodes that do not depend on the one that raised may or may not have run.
            continue
        found = _same_lines(stock, ours, limits) if in_order else _same_lines_by_label(stock, ours, limits)
        if found:
            return where + found
    return None


def _errors_agree(stock: str, ours: str, program: Program, backend: str) -> bool:
    if stock == ours:
        return True
    # A compiler function's graph has another order, so that another of several errors comes first.
    return bool(backend == "compiler" and stock and ours and program.has(RAISING))


class Limits:
    """How far values may be apart.

    Backward is linear in the gradient, so that errors are small beside the largest gradient that came by; where such
    gradients cancel, they are not small beside what is left.
    """

    def __init__(self, log: Log, program: Program) -> None:
        self._largest: dict[torch.dtype, float] = collections.defaultdict(float)
        for segment in log.segments:
            for entry in segment.entries:
                for tensor in entry.tensors:
                    if tensor.numel() and not tensor.is_complex():
                        finite = tensor.double().abs().nan_to_num(0, 0, 0).max().item()
                        self._largest[tensor.dtype] = max(self._largest[tensor.dtype], finite)
        largest = max(self._largest.values(), default=0.0)
        self.exact = program.exact and largest < 2**20
        self._scale = largest

    def apart(self, a: Tensor, b: Tensor) -> bool:
        if a.shape != b.shape or a.dtype != b.dtype:
            return True
        if self.exact:
            return not torch.equal(a, b)
        rtol, atol = TOLERANCE.get(a.dtype, (0.0, 0.0))
        return not torch.allclose(a, b, rtol=rtol, atol=atol + 2 * rtol * self._scale, equal_nan=True)


def _differs(a: Entry, b: Entry, limits: Limits) -> bool:
    if a.label != b.label or a.plain != b.plain or len(a.tensors) != len(b.tensors):
        return True
    return any(limits.apart(x, y) for x, y in zip(a.tensors, b.tensors, strict=True))


def _same_lines(stock: Segment, ours: Segment, limits: Limits) -> str | None:
    for a, b in zip(stock.entries, ours.entries, strict=False):
        if _differs(a, b, limits):
            return f"\n  stock:     {a.label}: {a.text}\n  retrograd: {b.label}: {b.text}"
    if len(stock.entries) != len(ours.entries):
        return f"\n  stock:     {[e.label for e in stock.entries]}\n  retrograd: {[e.label for e in ours.entries]}"
    return None


def _same_lines_by_label(stock: Segment, ours: Segment, limits: Limits) -> str | None:
    sides = []
    for segment in (stock, ours):
        by_label: dict[str, list[Entry]] = collections.defaultdict(list)
        for entry in segment.entries:
            by_label[entry.label].append(entry)
        sides.append(by_label)
    for label in sides[0].keys() | sides[1].keys():
        parts = (Segment(side.get(label, [])) for side in sides)
        found = _same_lines(*parts, limits)
        if found:
            return found
    return None


# --- One program, alone in the process ---


@dataclasses.dataclass
class Paths:
    """Which path calls took, as a difference of two `retrograd.stats()`."""

    calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    previous: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # by reason
    schedule: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # by reason
    made: int = 0  # schedules, plans and captures

    def __iadd__(self, other: Paths) -> Paths:
        self.calls += other.calls
        self.previous += other.previous
        self.schedule += other.schedule
        self.made += other.made
        return self

    def __isub__(self, other: Paths) -> Paths:
        self.calls.subtract(other.calls)
        self.previous.subtract(other.previous)
        self.schedule.subtract(other.schedule)
        self.made -= other.made
        return self


def paths_so_far() -> Paths:
    stats = retrograd.stats()
    return Paths(
        collections.Counter(stats["calls"]),
        collections.Counter(stats["previous_reasons"]),
        collections.Counter(stats["schedule_reasons"]),
        stats["misses"] + stats["captures"] + sum(stats["plans"].values()),
    )


@contextlib.contextmanager
def counting_paths() -> Iterator[Paths]:
    """Fills the yielded `Paths` when the block ends."""
    before, paths = paths_so_far(), Paths()
    try:
        yield paths
    finally:
        paths += paths_so_far()
        paths -= before


def check(program: Program, backend: str, paths: Paths | None = None) -> str | None:
    """Runs a program on the stock engine and twice on a backend; says what is wrong, if anything is.

    Nothing else in the process may call backward. Adds to `paths` what the runs on the backend did.
    """
    program = comparable(program, backend)
    retrograd.cache_clear()
    with counting_paths() as stock:
        want = observe(program, "stock")
    if stock.calls["previous"] != stock.calls.total():
        return f"the oracle itself ran through retrograd: {stock}"
    for run in ("first", "second"):
        with counting_paths() as ran:
            got = observe(program, backend)
        if paths is not None:
            paths += ran
        found = difference(want, got, program, backend) or wrong_path(stock, ran, backend, want.log.failed())
        if found:
            return f"on the {run} run, {found}"
        if run == "second" and backend == "schedule" and ran.made:
            return f"schedules were made anew on the second run: {ran}"
    return None


def wrong_path(stock: Paths, ran: Paths, backend: str, failed: bool) -> str | None:
    """Calls that ran elsewhere than they should, or not at all."""
    expected = stock.calls["previous"]
    took = f"{expected} calls of the stock engine became {ran}"
    if set(+ran.previous) - {"irregular_call"}:
        return f"calls were handed back: {took}"
    if set(+ran.schedule) - REASONS[backend]:
        return f"calls ran on the schedule: {took}"
    # After an error elsewhere than in the stock engine, there may be more or fewer nested calls.
    if ran.calls.total() != expected and (backend == "schedule" or not failed):
        return f"calls are missing: {took}"
    elsewhere = ran.calls.total() - ran.calls[PATHS[backend]] - ran.calls["previous"]
    if elsewhere != (+ran.schedule).total():
        return f"calls ran on the schedule for no reason: {took}"
    return None


# --- In threads ---

Job = tuple[Program, str]  # with its backend
Watch = Callable[[int, str], None]  # which thread, and what it begins


@dataclasses.dataclass
class InThreads:
    failures: list[tuple[Program, str, str]] = dataclasses.field(default_factory=list)  # with backend and difference
    stock: Paths = dataclasses.field(default_factory=Paths)
    ran: Paths = dataclasses.field(default_factory=Paths)

    def wrong_path(self) -> str | None:
        took = f"{self.stock} became {self.ran}"
        if set(+self.stock.previous) - {"not_enabled"} or self.stock.calls["previous"] != self.stock.calls.total():
            return f"the oracle itself ran through retrograd: {took}"
        if set(+self.ran.previous) - {"irregular_call"}:
            return f"calls were handed back: {took}"
        if set(+self.ran.schedule) - REASONS["compiler"] - REASONS["fused"] - REASONS_IN_THREADS:
            return f"calls ran on the schedule: {took}"
        return None


def prepare_thread() -> None:
    """Threads number their nodes from zero. Nodes that a program makes elsewhere must come out below its own."""
    torch.set_num_threads(1)
    advance = torch.ones((), requires_grad=True)
    for _ in range(1000):
        advance = advance * 1


def check_threads(
    jobs: Sequence[Job], threads: int, *, timeout: float = 120.0, watch: Watch = lambda thread, begins: None
) -> InThreads:
    """Runs separate programs in several threads at once: all on the stock engine first, then all on their backends.

    `watch` is told, in the thread, what begins, and may raise to end the run.
    """
    result = InThreads()
    before, between = paths_so_far(), Paths()

    def remember() -> None:
        nonlocal between
        between = paths_so_far()

    gate = threading.Barrier(threads, remember)

    def work(index: int) -> None:
        try:
            prepare_thread()
            mine = [(comparable(program, backend), backend) for program, backend in jobs[index::threads]]
            want = []
            for program, _ in mine:
                watch(index, f"{program.seed} stock")
                want.append(observe(program, "stock"))
            gate.wait()
            for (program, backend), stock in zip(mine, want, strict=True):
                watch(index, f"{program.seed} {backend}")
                found = difference(stock, observe(program, backend), program, backend)
                if found:
                    result.failures.append((program, backend, found))
        except BaseException:
            gate.abort()
            raise

    run_threads([lambda i=i: work(i) for i in range(threads)], timeout)
    result.stock += between
    result.stock -= before
    result.ran += paths_so_far()
    result.ran -= between
    return result


def sharable(seed: int) -> Program:
    """A program whose leaves several threads may use at once: integers, no errors, nothing that looks at `.grad`."""
    for number in range(seed * 1000, seed * 1000 + 1000):
        program = generate(number)
        if not program.exact:
            continue
        program = program.without(OF_LEAVES | RAISING | NOT_PROMISED["compiler"]).keep(rounds=1)
        program = dataclasses.replace(program, parts=False)
        log = observe(program, "stock", make_leaves(program, program.rounds[0][0])).log
        if not log.failed() and sum(bool(segment.call) for segment in log.segments) > 2:
            return program
    raise AssertionError("no such program")


def _observe_in_thread(program: Program, backend: str, leaves: dict[int, Tensor]) -> Seen:
    """In a new thread, as threads number their nodes from zero."""
    seen: list[Seen] = []
    run_threads([lambda: prepare_thread() or seen.append(observe(program, backend, leaves))])
    return seen[0]


def _wrong_gradients(leaves: dict[int, Tensor], single: dict[int, Tensor], times: int) -> str | None:
    """Whether the leaves do not have what one run gave `single`, so many times."""
    for number, leaf in leaves.items():
        one = single[number].grad
        expected = None if one is None else one.to_dense() * times
        got = None if leaf.grad is None else leaf.grad.to_dense()
        if (expected is None) != (got is None) or (got is not None and not torch.equal(got, expected)):
            return f"leaf {number}: {got} instead of {expected}"
    return None


def _sharable_alone(program: Program, backend: str, want: Seen, single: dict[int, Tensor]) -> str | None:
    """How a run in one thread differs from the stock engine's `want`, which left its gradients on `single`."""
    for _ in range(2):
        leaves = make_leaves(program, program.rounds[0][0])
        found = difference(want, _observe_in_thread(program, backend, leaves), program, backend)
        if found := found or _wrong_gradients(leaves, single, 1):
            return found
    return None


def check_shared(
    seed: int,
    threads: int,
    calls: int,
    paths: Paths | None = None,
    *,
    timeout: float = 120.0,
    watch: Watch = lambda thread, begins: None,
) -> str | None:
    """One model for all threads; every fourth is on the stock engine. Gradients are integers, so sums are exact.

    Adds to `paths` what the calls in threads did.
    """
    program = sharable(seed)
    rows = program.rounds[0][0]
    single, shared = make_leaves(program, rows), make_leaves(program, rows)
    want = _observe_in_thread(program, "stock", single)
    failures: list[str] = []
    assert Limits(want.log, program).exact, program

    backends = ("stock", *BACKENDS)
    if found := _sharable_alone(program, "compiler", want, single):
        if ask_torchs(["--seed", str(seed), "--shared"]) is None:
            return f"{program}\non compiler, in one thread, {found}"
        backends = ("stock", "schedule", "schedule", "fused")  # no capture of this program can be right

    def work(index: int) -> None:
        prepare_thread()
        backend = backends[index % 4]
        for _ in range(calls):
            watch(index, f"{program.seed} {backend}, shared")
            got = observe(program, backend, shared)
            found = difference(want, got, program, "schedule" if backend == "stock" else backend)
            if found:
                failures.append(f"on {backend}, {found}")

    with counting_paths() as ran:
        run_threads([lambda i=i: work(i) for i in range(threads)], timeout)
    if found := _wrong_gradients(shared, single, threads * calls):
        failures.append(found)
    if set(+ran.previous) - {"irregular_call", "not_enabled"}:
        failures.append(f"calls were handed back: {ran}")
    if paths is not None:
        paths += ran
    return "\n".join([str(program), *failures]) if failures else None


# --- Making a failing program small ---


def shrink(program: Program, fails: Callable[[Program], bool], seconds: float = 60.0) -> Program:
    """The smallest program that still fails, as far as dropping steps and rounds gets within the time."""
    end = time.monotonic() + seconds

    def still(smaller: Program) -> bool:
        return time.monotonic() < end and fails(smaller)

    for rounds in range(1, len(program.rounds)):
        if still(program.keep(rounds=rounds)):
            program = program.keep(rounds=rounds)
            break
    size = max(len(program.steps) // 2, 1)
    while True:
        start, smaller_found = 0, False
        while start < len(program.steps):
            numbers = [step.number for step in program.steps]
            smaller = program.keep(set(numbers[:start] + numbers[start + size :]))
            if still(smaller):
                program, smaller_found = smaller, True
            else:
                start += size
        if size == 1 and not smaller_found:
            return program
        size = size if size == 1 else size // 2


def how_to_replay(program: Program, backend: str, whole: Program) -> str:
    """The command that runs this part of a whole program again."""
    return f"make soak SOAK_ARGS='--backend {backend} {' '.join(_options(program, whole))}'"


def _options(program: Program, whole: Program) -> list[str]:
    """With these, soak.py runs this part of a whole program."""
    options = ["--seed", str(program.seed)]
    if program.steps != whole.steps:
        options += ["--steps", ",".join(str(step.number) for step in program.steps)]
    if program.rounds != whole.rounds:
        options += ["--rounds", str(len(program.rounds))]
    return options


TORCHS = "torch's own compiled autograd:"


def report(program: Program, backend: str, found: str, fails: Callable[[Program], str | None] | None = None) -> str:
    """What is wrong, the smallest program that shows it, and how to run that again."""
    fails = fails or (lambda smaller: check(smaller, backend))
    small = shrink(program, lambda smaller: fails(smaller) is not None)
    again = fails(small)
    torchs = ask_torchs(_options(small, program)) if backend == "compiler" else None
    return "\n".join(
        [
            f"seed {program.seed} on {backend}: {found}",
            "the smallest program that fails:" if again else "the program, which did not fail when run again:",
            str(small),
            *([again] if again else []),
            *([f"{TORCHS} {torchs}"] if torchs else []),
            how_to_replay(small, backend, program),
        ]
    )


# --- torch's own compiled autograd, which may differ where a compiler function does ---

DIFFERS = "DIFFERS "


def ask_torchs(options: Sequence[str]) -> str | None:
    """How torch's own compiled autograd differs from the stock engine on what these options of soak.py name.

    In a process of its own, as torch never lets go of what it captures.
    """
    command = [sys.executable, str(Path(__file__).with_name("soak.py")), "--backend", "torch", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, start_new_session=True)
    _, differs, found = done.stdout.partition(DIFFERS)
    if done.returncode not in (0, 1) or bool(differs) != (done.returncode == 1):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return found.strip() if differs else None


def check_torchs(program: Program) -> str | None:
    """What `ask_torchs()` asks, in this process."""
    program = comparable(program, "compiler")
    return difference(observe(program, "stock"), observe(program, "torch"), program, "compiler")


def check_torchs_sharable(seed: int) -> str | None:
    """The same for the program of `check_shared()`, in one thread."""
    program = sharable(seed)
    single = make_leaves(program, program.rounds[0][0])
    return _sharable_alone(program, "torch", _observe_in_thread(program, "stock", single), single)
