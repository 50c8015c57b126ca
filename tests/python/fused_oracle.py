"""The stock engine as the oracle of fused plans: as oracle.py, but for rounding, and with proof of which path ran.

Fused nodes run operator by operator here (RETROGRAD_LOWERING=eager), which is quick to make and differs from compiled
plans in the kernels only: cutting, keys, recording, tracing, aliasing and order are the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
from oracle import Observation, Program, Recorder, observe
from torch import Tensor

import retrograd

# By dtype: the tolerance of torch.testing.assert_close, twice over, for sums in another order. A gradient in a dtype
# that is not named here must be equal.
TOLERANCE = {
    torch.float64: (1e-9, 1e-9),
    torch.complex128: (1e-9, 1e-9),
    torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5),
    torch.float16: (4e-3, 1e-3),
    torch.bfloat16: (3.2e-2, 1e-3),
}


class Values(Recorder):
    """Keeps tensors apart from the log, so that they can be compared with a tolerance."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def say(self, *values: Any) -> None:
        self.log.append(" ".join(v if isinstance(v, str) else self._describe(v) for v in values))

    def grads(self, *leaves: Tensor) -> None:
        for index, leaf in enumerate(leaves):
            strides = leaf.grad.stride() if leaf.grad is not None and leaf.grad.layout == torch.strided else None
            self.say(f"grad {index}: strides {strides}", leaf.grad)

    def _describe(self, value: Any) -> str:
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(self._describe, value))})"
        if not isinstance(value, Tensor):
            return repr(value)
        dense = value.detach()
        if value.layout != torch.strided or value.is_nested:
            dense = dense.to_padded_tensor(0.0) if value.is_nested else dense.to_dense()
        self.tensors.append(dense.resolve_conj().resolve_neg().clone())
        shape = tuple(dense.shape)
        head = f"{value.dtype} {shape} {value.layout} requires_grad={value.requires_grad}"
        return head if value.grad_fn is None else f"{head} {value.grad_fn.name()}"


@dataclasses.dataclass
class Ran:
    """What the calls of one run did, as a difference of two `retrograd.stats()`."""

    fused: int = 0
    schedule: int = 0
    previous: int = 0
    compiled: int = 0  # groups
    by_node: int = 0  # groups
    recordings: int = 0
    plans: int = 0
    fallbacks: dict[str, int] = dataclasses.field(default_factory=dict)
    previous_reasons: dict[str, int] = dataclasses.field(default_factory=dict)
    stock: Observation | None = None  # what the stock engine's run saw


@contextlib.contextmanager
def counting_fused() -> Iterator[Ran]:
    """Fills the yielded `Ran` when the block ends."""
    before, ran = retrograd.stats(), Ran()
    try:
        yield ran
    finally:
        after = retrograd.stats()
        for path in ("fused", "schedule", "previous"):
            setattr(ran, path, after["calls"][path] - before["calls"][path])
        for kind in ("compiled", "by_node"):
            setattr(ran, kind, after["groups"][kind] - before["groups"][kind])
        ran.recordings = after["recordings"] - before["recordings"]
        ran.plans = sum(after["plans"].values()) - sum(before["plans"].values())
        ran.fallbacks = _more(before["schedule_reasons"], after["schedule_reasons"])
        ran.previous_reasons = _more(before["previous_reasons"], after["previous_reasons"])


def _more(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {reason: count - before[reason] for reason, count in after.items() if count != before[reason]}


@contextlib.contextmanager
def lowering(kind: str | None) -> Iterator[None]:
    """Plans made inside run operator by operator ("eager") or compiled (None)."""
    before = os.environ.pop("RETROGRAD_LOWERING", None)
    if kind is not None:
        os.environ["RETROGRAD_LOWERING"] = kind
    try:
        yield
    finally:
        os.environ.pop("RETROGRAD_LOWERING", None)
        if before is not None:
            os.environ["RETROGRAD_LOWERING"] = before


def compare_fused(
    program: Program,
    *,
    path: str = "fused",
    reasons: tuple[str, ...] = (),
    compiled: int | None = None,
    loose: bool = False,
) -> Ran:
    """Runs `program` on the stock engine, then twice on fused plans, and returns what the last run did.

    `path` is what must have run its calls: "fused" all of them, "mixed" some (at least one) and for the others only
    `reasons`, "schedule" none, "previous" the stock engine for `reasons`. `compiled`: how many groups ran compiled in
    the last run. `loose`: values are not compared (a program whose numbers are its own affair).
    """
    retrograd.cache_clear()
    want = values = None
    expected = 0
    for run in ("stock", "first", "second"):
        rec = Values()
        with lowering("eager"), counting_fused() as ran:
            scope = retrograd.disable() if run == "stock" else retrograd.enable("inductor", mode="blocking")
            with scope:
                got = observe(program, rec)
        ran.previous -= 1  # observe() runs a call of its own at the end
        ran.previous_reasons["not_enabled"] -= 1
        ran.previous_reasons = {reason: count for reason, count in ran.previous_reasons.items() if count}
        if want is None:
            want, values, expected = got, rec.tensors, ran.previous
            assert ran.fused == ran.schedule == 0, "the oracle itself ran through retrograd"
            continue
        difference = first_difference(want, got)
        assert difference is None, f"on the {run} run, {difference}"
        assert values is not None
        if not loose:
            check_values(values, rec.tensors, run, want.log)
        _check_path(path, reasons, expected, ran, run)
    if compiled is not None:
        assert ran.compiled == compiled, ran
    ran.stock = want
    return ran


def first_difference(want: Any, got: Any) -> str | None:
    after = [[f"{name}: {value}" for name, value in side.after.items()] for side in (want, got)]
    for what, stock, ours in (("log", want.log, got.log), ("warnings", want.warnings, got.warnings), ("state", *after)):
        for line, (a, b) in enumerate(itertools.zip_longest(stock, ours, fillvalue="(nothing)")):
            if a != b:
                return f"{what}, line {line}:\n  stock:     {a}\n  retrograd: {b}"
    return None


def check_values(want: list[Tensor], got: list[Tensor], run: str = "", log: list[str] | None = None) -> None:
    assert len(want) == len(got)
    for index, (a, b) in enumerate(zip(want, got, strict=True)):
        rtol, atol = TOLERANCE.get(a.dtype, (0.0, 0.0))

        def say(text: str) -> str:
            return f"on the {run} run, tensor {index}: {text}\nlog: {log}"

        torch.testing.assert_close(b, a, rtol=rtol, atol=atol, equal_nan=True, msg=say)


def _check_path(path: str, reasons: tuple[str, ...], expected: int, ran: Ran, run: str) -> None:
    if path == "any":
        return
    if path == "previous":
        assert ran.fused == ran.schedule == 0 and set(ran.previous_reasons) == set(reasons), (run, ran)
        return
    assert ran.previous == 0, (run, ran)
    assert ran.fused + ran.schedule == expected, (run, expected, ran)
    if path == "fused":
        assert ran.schedule == 0 and ran.fused > 0, (run, ran)
        assert ran.compiled >= ran.fused, (run, ran)
    elif path == "mixed":
        assert ran.fused > 0, (run, ran)
        assert set(ran.fallbacks) <= set(reasons), (run, ran)
    else:
        assert path == "schedule" and ran.fused == 0, (run, ran)
        assert set(ran.fallbacks) == set(reasons), (run, ran)
    if run == "second":
        assert ran.plans == 0, ("plans were made anew", ran)
