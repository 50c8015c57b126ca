"""The stock engine as the oracle.

A program builds a graph, runs backward, and tells a `Recorder` what it saw. `compare` runs it on the stock engine,
then twice through retrograd (first a miss, then a hit), and wants the same observation each time: gradients bit for
bit, the log, the exception, the warnings, the state left behind. It also wants proof, from `retrograd.stats()`, that
retrograd ran every call itself, so that a silent fallback fails the test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import retrograd


@dataclasses.dataclass(frozen=True)
class Path:
    """The engine that must have run the program's calls; `reason` is retrograd's word for handing one back."""

    kind: str
    reason: str = ""


SCHEDULE = Path("schedule")
ANY = Path("any")


def previous(reason: str) -> Path:
    """All calls are handed back for this reason."""
    return Path("previous", reason)


def partly(reason: str) -> Path:
    """Some calls may be handed back, for this reason only; the others, one at least, are the schedule's."""
    return Path("partly", reason)


def content(tensor: Tensor) -> int:
    """A checksum of the values' bits: tells -0.0 from 0.0, and finds equal NaNs equal."""
    with torch.no_grad():
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        if flat.numel() == 1 and flat.stride() != (1,):  # counts as contiguous, but view() refuses it
            flat = flat.clone(memory_format=torch.contiguous_format)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        return zlib.crc32(bytes(flat.view(torch.uint8).tolist()))


def describe(value: Any) -> str:
    """What must be equal between two engines, as text; values in full only through their checksum."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(describe, value))})"
    if not isinstance(value, Tensor):
        return repr(value)
    head = f"{value.dtype} {tuple(value.shape)} {value.layout} requires_grad={value.requires_grad}"
    if value.grad_fn is not None:
        head += f" {value.grad_fn.name()}"
    if value.layout == torch.sparse_coo:
        parts = value.detach()
        return f"{head} coalesced={parts.is_coalesced()} {describe(parts._indices())} {describe(parts._values())}"
    sample = value.detach().reshape(-1)[:4].tolist()
    return f"{head} strides={value.stride()} crc={content(value):08x} {sample}"


def describe_error(error: BaseException) -> str:
    """Type, message and cause of an error, and the Python function that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = "the engine" if not frames or frames[-1].name in _ENGINE_FRAMES else frames[-1].name
    cause = f" from {type(error.__cause__).__name__}" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {error}{cause} [in {where}]"


_ENGINE_FRAMES = {"_engine_run_backward", "run_backward", "backward", "grad", "queue_callback"}


class Recorder:
    """What one run of a program saw, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._tasks: dict[int, int] = {}

    def say(self, *values: Any) -> None:
        self.log.append(" ".join(v if isinstance(v, str) else describe(v) for v in values))

    def grads(self, *leaves: Tensor) -> None:
        for index, leaf in enumerate(leaves):
            self.say(f"grad {index}:", leaf.grad)

    def module(self, module: torch.nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self.say(f"{name}:", parameter, "grad:", parameter.grad)
        for name, buffer in module.named_buffers():
            self.say(f"{name}:", buffer)

    def hook(self, name: str, result: Callable[[Tensor], Tensor | None] | None = None) -> Callable[..., Any]:
        """A hook of any kind that logs its arguments, and returns `result` of the last one."""

        def logged(*grads: Any) -> Any:
            self.say(name, [g for g in grads if not isinstance(g, torch.nn.Module)])
            return None if result is None else result(grads[-1])

        return logged

    def task(self) -> str:
        """The current graph task, numbered in order of appearance."""
        task = torch._C._current_graph_task_id()
        return "no task" if task == -1 else f"task {self._tasks.setdefault(task, len(self._tasks))}"

    @contextlib.contextmanager
    def catch(self, what: str = "error") -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.say(f"{what}:", describe_error(error))
        else:
            self.say(f"{what}: none")


Program = Callable[[Recorder], None]


@dataclasses.dataclass
class Observation:
    log: list[str]
    warnings: list[str]
    after: dict[str, Any]


@dataclasses.dataclass
class Calls:
    """How many backward calls each path took, as a difference of two `retrograd.stats()`."""

    schedule: int
    previous: int
    reasons: dict[str, int]
    hits: int
    misses: int


@contextlib.contextmanager
def counting() -> Iterator[Calls]:
    """Fills the yielded `Calls` when the block ends."""
    before = retrograd.stats()
    calls = Calls(0, 0, {}, 0, 0)
    try:
        yield calls
    finally:
        after = retrograd.stats()
        calls.schedule = after["calls"]["schedule"] - before["calls"]["schedule"]
        calls.previous = after["calls"]["previous"] - before["calls"]["previous"]
        calls.hits = after["hits"] - before["hits"]
        calls.misses = after["misses"] - before["misses"]
        was = before["previous_reasons"]
        new = {reason: count - was.get(reason, 0) for reason, count in after["previous_reasons"].items()}
        calls.reasons = {reason: count for reason, count in new.items() if count}


def state_left() -> dict[str, Any]:
    """Thread state that a backward may not leave changed, and the random numbers it used."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "graph task": torch._C._current_graph_task_id(),
        "node": torch._C._current_autograd_node(),
        "random state": content(torch.get_rng_state()),
        "multithreading": torch.autograd.is_multithreading_enabled(),
        "saved tensor hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),
    }


def observe(program: Program, rec: Recorder | None = None) -> Observation:
    rec = rec or Recorder()
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program(rec)  # an error that it does not expect, and catch, fails the test
    left = state_left()
    rec.say(retrograd_is_usable())
    return Observation(rec.log, [f"{w.category.__name__}: {w.message}" for w in caught], left)


def retrograd_is_usable() -> str:
    """A small backward after the tested one; says nothing of which engine ran it."""
    with retrograd.disable():
        leaf = torch.ones(2, requires_grad=True)
        (leaf * 3).sum().backward()
        return f"next call: {leaf.grad.tolist() if leaf.grad is not None else None}"


def on_retrograd() -> contextlib.AbstractContextManager[None]:
    return retrograd.enable("schedule")


def compare(program: Program, *, path: Path = SCHEDULE, always_miss: bool = False) -> Observation:
    """Runs `program` on both engines and returns the stock engine's observation.

    `always_miss` is for programs whose graph differs from run to run.
    """
    retrograd.cache_clear()
    want = expected = None
    for run in ("stock", "miss", "hit"):
        with counting() as calls, retrograd.disable() if run == "stock" else on_retrograd():
            got = observe(program)
        # `retrograd_is_usable` runs one stock call each time.
        calls.previous -= 1
        calls.reasons["not_enabled"] -= 1
        calls.reasons = {reason: count for reason, count in calls.reasons.items() if count}
        if want is None:
            want, expected = got, calls
            assert calls.schedule == 0, "the oracle itself ran through retrograd"
            assert calls.previous > 0 or path is ANY, "the program made no backward call"
            continue
        assert expected is not None
        difference = first_difference(want, got)
        assert difference is None, f"on a {run}, {difference}"
        check_path(path, run, expected.previous, calls, always_miss)
    assert want is not None
    return want


def first_difference(want: Observation, got: Observation) -> str | None:
    after = [[f"{name}: {value}" for name, value in side.after.items()] for side in (want, got)]
    for what, stock, ours in (
        ("log", want.log, got.log),
        ("warnings", want.warnings, got.warnings),
        ("state left behind", *after),
    ):
        for line, (a, b) in enumerate(itertools.zip_longest(stock, ours, fillvalue="(nothing)")):
            if a != b:
                return f"{what}, line {line}:\n  stock:     {a}\n  retrograd: {b}"
    return None


def check_path(path: Path, run: str, expected: int, calls: Calls, always_miss: bool) -> None:
    if path.kind == "any":
        return
    if path.kind == "previous":
        assert calls.schedule == 0, (run, calls)
        assert calls.reasons == {path.reason: expected}, (run, calls)
        return
    if path.kind == "partly":
        assert set(calls.reasons) <= {path.reason}, (run, calls)
        assert 0 < calls.schedule <= expected, (run, calls)
        assert run == "miss" or calls.hits == calls.schedule, (run, calls)
        return
    assert calls.previous == 0, f"{run}: calls fell back to the previous engine: {calls.reasons}"
    assert calls.schedule == expected, (run, calls)
    assert calls.hits + calls.misses == expected, (run, calls)
    if run == "miss":
        assert calls.misses > 0, (run, calls)
    elif not always_miss:
        assert calls.hits == expected, (run, calls)


def run_threads(works: Sequence[Callable[[], None]], timeout: float = 120.0) -> None:
    """Runs each in a thread of its own, started together; raises the first error; a hang fails."""
    gate = threading.Barrier(len(works))
    errors: list[BaseException] = []

    def body(work: Callable[[], None]) -> None:
        gate.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A leaf that requires a gradient, with fixed random values."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).requires_grad_()
