"""Random programs on all backends for as long as one likes: `make soak MINUTES=30 THREADS=8`.

Every wave starts new threads, each with programs of its own, first on the stock engine, then on retrograd; then one
model that all threads share, and a few programs alone in the process, where the path of every call is checked. After
each wave memory, threads and open files are read with the caches cleared. Ctrl-C ends it, with the summary. The exit
status is 1 after a mismatch, 2 after a leak.

With `--compile`, parts of the programs, one at a time, on plans that are really compiled. With `--seed`, one program
alone, as a failing test or soak says how to.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import faulthandler
import functools
import gc
import linecache
import os
import random
import re
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from xml.etree import ElementTree

# Before retrograd and torch are imported.
if __name__ == "__main__":
    os.environ["RETROGRAD_CACHE"] = "0"
    # oneDNN keeps what it makes for a shape: by default 1,024 of them, which takes longer than a warm-up and 22 MiB.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")

import torch
from fused_oracle import lowering
from fuzz_oracle import (
    BACKENDS,
    DIFFERS,
    TORCHS,
    Paths,
    check,
    check_shared,
    check_threads,
    check_torchs,
    check_torchs_sharable,
    prepare_thread,
    report,
)
from random_programs import Program, generate

import retrograd

SHARE = {"schedule": 6, "compiler": 1, "fused": 1}  # of the programs of a wave; a capture takes a hundred times a run
PROGRAMS_A_THREAD = 10
COMPILED_STEPS = 10  # of a program whose plans are compiled
WARM_UP = 0.3  # of the time
# A leak: more MiB/min after warming up, and more MiB in all. Resident memory also has what lies free between what is in
# use, and that grows for long: so its bound is wide.
LEAK = {"resident memory": (1.0, 12.0), "allocated memory": (0.25, 4.0)}


class Stopped(Exception):
    """Raised in the threads after Ctrl-C."""


class Journal:
    """A file with what each thread is at, for the case that the process dies."""

    WIDTH = 64

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="retrograd-soak-", suffix=".txt")
        self._file, self.path = handle, Path(name)
        self.stop = False

    def __call__(self, thread: int, begins: str) -> None:
        if self.stop:
            raise Stopped
        os.pwrite(self._file, f"{begins:<{self.WIDTH - 1}}\n".encode(), thread * self.WIDTH)

    def close(self) -> None:
        os.close(self._file)
        self.path.unlink()


def forget_what_torch_keeps() -> None:
    """Empties the caches that tracing fills without bound, a few kilobytes for each graph, in torch and sympy."""
    torch.fx.graph_module._loader.eval_cache.clear()  # the source of every graph module
    linecache.clearcache()
    torch._dynamo.reset()
    torch._subclasses.FakeTensorMode.cache_clear()
    # Those around the operators of symbolic numbers say that they are of the module _operator.
    symbolic = ("torch.fx.experimental.", "torch.utils._sympy.", "sympy.", "_operator", "torch._inductor.codecache")
    for function in gc.get_objects():
        if type(function) is functools._lru_cache_wrapper and function.__module__.startswith(symbolic):
            function.cache_clear()


def settle_interned_strings() -> list[str]:
    """Gives CPython's table of interned strings the size that it keeps as long as the result lives.

    Tracing interns names without end, most of which go again. When the table is full, of them and of what went, it is
    made anew for three times as many as live, rounded up to a power of two. With what torch interns that came close to
    where the size doubles, to 7.3 MiB, so that it did at some time or other; with these strings it is past that.
    """
    strings = [sys.intern(f"soak, interned string {i}") for i in range(200_000)]
    return strings[:40_000]


def allocated() -> float:
    """MiB that malloc() has given out; Python's, too, with PYTHONMALLOC=malloc."""
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    root = ElementTree.fromstring(text.value or b"")
    libc.free(text)
    entries = [*root.findall("total"), *root.findall("system")]
    totals = {entry.get("type"): int(entry.get("size", 0)) for entry in entries}
    return (totals["current"] - totals["fast"] - totals["rest"] + totals["mmap"]) / 2**20


class Samples:
    """What the process holds, wave by wave."""

    def __init__(self) -> None:
        self.minutes: list[float] = []
        self.resident: list[float] = []  # MiB that are no file's: libtorch's code comes in as it is used
        self.allocated: list[float] = []  # MiB
        self.threads: list[int] = []
        self.files: list[int] = []
        self._start = time.monotonic()

    def take(self) -> None:
        retrograd.cache_clear()
        forget_what_torch_keeps()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        (anonymous,) = re.findall(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
        self.minutes.append((time.monotonic() - self._start) / 60)
        self.resident.append(int(anonymous) / 1024)
        self.allocated.append(allocated())
        self.threads.append(len(os.listdir("/proc/self/task")))
        self.files.append(len(os.listdir("/proc/self/fd")))

    def warm(self) -> int:
        """The first sample after warming up."""
        return int(len(self.minutes) * WARM_UP)

    def slope(self, memory: list[float]) -> float:
        """MiB/min after warming up, by least squares."""
        x, y = (torch.tensor(values[self.warm() :], dtype=torch.float64) for values in (self.minutes, memory))
        if len(x) < 3:
            return 0.0
        x = x - x.mean()
        return float((x @ (y - y.mean())) / (x @ x))

    def leaks(self) -> list[str]:
        found, first = [], self.warm()
        if len(self.minutes) - first < 3:
            return found
        for (name, (rate, in_all)), memory in zip(LEAK.items(), (self.resident, self.allocated), strict=True):
            grown = memory[-1] - memory[first]
            if self.slope(memory) > rate and grown > in_all:
                found.append(f"{name}: {self.slope(memory):.1f} MiB/min, {grown:.0f} MiB in all")
        for name, counts in (("threads", self.threads), ("open files", self.files)):
            if min(counts[-3:]) > max(counts[first : first + 3]) + 2:
                found.append(f"{name}: {counts[first]} to {counts[-1]}")
        return found

    def curve(self, memory: list[float], points: int = 12) -> str:
        step = max(len(memory) // points, 1)
        return " ".join(f"{m:.1f}:{mib:.0f}" for m, mib in zip(self.minutes[::step], memory[::step], strict=True))


def soak(minutes: float, threads: int, first_seed: int, backends: tuple[str, ...]) -> int:
    journal, samples, total = Journal(), Samples(), Paths()
    interned = settle_interned_strings()
    choose, counts = random.Random(first_seed), collections.Counter[str]()
    mismatches: list[str] = []
    signal.signal(signal.SIGINT, lambda *_: _interrupt(journal))
    end = time.monotonic() + minutes * 60
    print(f"{threads} threads, {minutes:g} minutes, seeds from {first_seed}; if the process dies: {journal.path}")
    seed, wave = first_seed, 0
    shares = [SHARE[backend] for backend in backends]

    def mismatch(text: str) -> None:
        if TORCHS in text:  # a limit of torch's captures
            counts["torch's own compiled autograd differs"] += 1
            print(f"torch's own compiled autograd differs, too:\n{text}", flush=True)
            return
        mismatches.append(text)
        print(f"MISMATCH {len(mismatches)}\n{text}", flush=True)

    try:
        while time.monotonic() < end:
            wave += 1
            faulthandler.dump_traceback_later(600)
            number = threads * PROGRAMS_A_THREAD
            jobs = [(generate(s), choose.choices(backends, shares)[0]) for s in range(seed, seed + number)]
            seed += number
            got = check_threads(jobs, threads, timeout=500, watch=journal)
            counts.update(backend for _, backend in jobs)
            total += got.ran
            for program, backend, found in got.failures:
                mismatch("in threads: " + report(program, backend, found))
            if wrong := got.wrong_path():
                mismatch(wrong)
            if len(backends) == len(BACKENDS) and wave % 2 == 0:
                shared = check_shared(seed, threads, 4, total, timeout=500, watch=journal)
                counts["shared model"] += threads * 4
                if shared:
                    mismatch(f"one model in threads, check_shared({seed}, {threads}, 4):\n{shared}")
            for backend in backends:
                journal(0, f"{seed} {backend}, alone")
                program = generate(seed)
                if found := check(program, backend, total):
                    mismatch(report(program, backend, found))
                counts[f"{backend} alone"] += 1
                seed += 1
            samples.take()
            print(
                f"{samples.minutes[-1]:7.1f} min  {counts.total():7} programs  {len(mismatches)} mismatches  "
                f"{samples.resident[-1]:6.0f} MiB resident  {samples.allocated[-1]:6.1f} MiB allocated  "
                f"{samples.threads[-1]} threads  {samples.files[-1]} files",
                flush=True,
            )
    except Stopped:
        print("stopped")
    faulthandler.cancel_dump_traceback_later()
    del interned
    leaks = samples.leaks()
    print(f"\nprograms: {dict(counts)}, seeds {first_seed} to {seed - 1}")
    print(f"calls: {dict(+total.calls)}; on the schedule instead: {dict(+total.schedule)}")
    print(f"handed back: {dict(+total.previous)}; plans, schedules and captures made: {total.made}")
    for name, memory in (("resident", samples.resident), ("allocated", samples.allocated)):
        print(f"{name} memory, minute:MiB with caches cleared: {samples.curve(memory)}")
        print(f"  slope after warming up: {samples.slope(memory):+.2f} MiB/min")
    print(f"threads {samples.threads[:1]} to {samples.threads[-1:]}, files {samples.files[:1]} to {samples.files[-1:]}")
    print(f"mismatches: {len(mismatches)}; leaks: {', '.join(leaks) or 'none'}")
    journal.close()
    return 1 if mismatches else 2 if leaks else 0


def soak_compiled(minutes: float, first_seed: int) -> int:
    """Parts of random programs, one after the other, whose plans are really compiled: some seconds each."""
    end, seed, mismatches, total = time.monotonic() + minutes * 60, first_seed, 0, Paths()
    groups = retrograd.stats()["groups"]["compiled"]
    while time.monotonic() < end:
        program, choose = generate(seed), random.Random(seed)
        by_kind: dict[bool, list[int]] = {False: [], True: []}
        for step in program.steps:
            by_kind["backward" in step.kind].append(step.number)
        steps = {*choose.sample(by_kind[False], min(len(by_kind[False]), COMPILED_STEPS)), *by_kind[True][-1:]}
        if found := check(program.keep(steps, 2), "fused", total):
            mismatches += 1
            numbers = ",".join(map(str, sorted(steps)))
            arguments = f"--seed {seed} --backend fused --steps {numbers} --rounds 2 --compile"
            print(f"MISMATCH {mismatches}\n{found}\nmake soak SOAK_ARGS='{arguments}'", flush=True)
        seed += 1
        ran = retrograd.stats()["groups"]["compiled"] - groups
        print(f"{seed - first_seed:5} programs  {ran:6} compiled groups ran  {mismatches} mismatches", flush=True)
    print(f"\nseeds {first_seed} to {seed - 1}; calls: {dict(+total.calls)}; mismatches: {mismatches}")
    return 1 if mismatches else 0


def _interrupt(journal: Journal) -> None:
    journal.stop = True
    signal.signal(signal.SIGINT, signal.default_int_handler)


def one(program: Program, backend: str) -> int:
    print(program)
    return tell(check_torchs(program) if backend == "torch" else check(program, backend), backend)


def tell(found: str | None, backend: str) -> int:
    print(f"{DIFFERS}{found}" if found else f"no difference on {backend}")
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument(
        "--backend", choices=(*BACKENDS, "torch"), help="this one only; with --seed also torch's own compiled autograd"
    )
    parser.add_argument("--first-seed", type=int, default=100_000)
    parser.add_argument("--seed", type=int, help="run one program alone")
    parser.add_argument("--steps", help="with --seed: these steps only, by number, separated by commas")
    parser.add_argument("--rounds", type=int, help="with --seed: this many rounds only")
    parser.add_argument("--shared", action="store_true", help="with --seed and torch: the program that threads share")
    parser.add_argument("--compile", action="store_true", help="compile plans, of one program at a time")
    options = parser.parse_args()
    if options.seed is None and options.backend == "torch":
        parser.error("--backend torch is for one program: give its --seed.")
    if options.shared and (options.seed is None or options.backend != "torch"):
        parser.error("--shared goes with --seed and --backend torch.")

    faulthandler.enable()
    torch.set_warn_always(True)
    warnings.simplefilter("ignore")
    retrograd.install()
    prepare_thread()
    with lowering(None if options.compile else "eager"):
        if options.seed is None and options.compile:
            return soak_compiled(options.minutes, options.first_seed)
        if options.seed is None:
            backends = (options.backend,) if options.backend else BACKENDS
            return soak(options.minutes, options.threads, options.first_seed, backends)
        if options.shared:
            return tell(check_torchs_sharable(options.seed), "torch")
        steps = None if options.steps is None else {int(number) for number in options.steps.split(",")}
        return one(generate(options.seed).keep(steps, options.rounds), options.backend or "schedule")


if __name__ == "__main__":
    sys.exit(main())
