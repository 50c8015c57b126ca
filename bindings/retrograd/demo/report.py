"""Running one job on both engines, and showing what came out."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import matplotlib as mpl
from matplotlib.figure import Figure
from tqdm import tqdm

import retrograd

EnterEngine = Callable[[], contextlib.AbstractContextManager[Any]]

ROUNDS = 20

# Fused plans round in other places than the stock engine's kernels, and training multiplies any difference, so losses
# are compared over the first steps only.
COMPARED_STEPS = 20
TOLERANCE = 1e-3

LEGEND = """\
steps/s: optimizer steps a second, forward and optimizer included, over all models of a job; the ratio is retrograd's
over the stock engine's, and noisy for short runs. losses: identical in every bit, or how far apart at most, relative,
in the first 20 steps. fused and schedule: backward calls that ran compiled plans, and that ran the graph's own nodes.
misses: calls that had to make their plan, or ran without one. nested: backward calls inside another one, here by
reentrant checkpoint."""


class Trainer(Protocol):
    """One job's models and optimizers, which learn the same from the same seeds whatever runs the backward."""

    models: int  # trained at the same time, one optimizer step each per step of the job
    backward_calls_per_step: int  # over all models, nested ones included
    nested_calls_per_step: int  # backward calls made inside another one

    def advance(self, steps: int, enter_engine: EnterEngine) -> None:
        """Train for some steps, entering the engine's context in every thread that calls backward."""

    def losses(self) -> list[list[float]]:
        """Give the training loss of every step so far, one list for each model."""

    def summary(self) -> str:
        """Say in one line what was learned."""

    def close(self) -> None:
        """End the job's threads."""


@dataclass
class Side:
    """What one engine did."""

    seconds: float = 0.0
    steps: int = 0
    losses: list[list[float]] = field(default_factory=list)

    @property
    def steps_per_second(self) -> float:
        """Optimizer steps of all models per second."""
        return self.steps / self.seconds


@dataclass
class Comparison:
    """One job on both engines."""

    job: str
    title: str
    stock: Side
    ours: Side
    backend: str
    stats: dict[str, Any]
    expected_calls: int
    expected_nested: int
    summary: str

    @property
    def same_losses(self) -> bool:
        """Whether every loss of every step is equal bit for bit."""
        return self.stock.losses == self.ours.losses

    @property
    def distance(self) -> float:
        """The largest relative difference between losses in the first steps."""
        pairs = zip(self.stock.losses, self.ours.losses, strict=True)
        return max(abs(x - y) / abs(x) for a, b in pairs for x, y in zip(a[:COMPARED_STEPS], b, strict=False))

    def problem(self) -> str | None:
        """Give a sentence about what went wrong, or None."""
        calls = self.stats["calls"]["schedule"] + self.stats["calls"]["fused"]
        if self.distance > (TOLERANCE if self.backend == "inductor" else 0.0):
            model, step = _first_difference(self.stock.losses, self.ours.losses)
            return (
                f"{self.job}: the losses differ from the stock engine's, first at step {step} of model {model}; "
                "please report this as a bug."
            )
        if self.backend == "inductor" and self.stats["calls"]["fused"] < self.expected_calls:
            reasons = {k: v for k, v in self.stats["schedule_reasons"].items() if v}
            return (
                f"{self.job}: {self.stats['calls']['fused']} of {self.expected_calls} backward calls ran compiled "
                f"plans; the others did not, reasons: {reasons or 'none given'}."
            )
        if calls < self.expected_calls or self.stats["nested_calls"] < self.expected_nested:
            reasons = {k: v for k, v in self.stats["previous_reasons"].items() if v}
            return (
                f"{self.job}: retrograd ran {calls} of {self.expected_calls} backward calls "
                f"({self.stats['nested_calls']} of {self.expected_nested} nested ones); "
                f"the previous engine ran the others, reasons: {reasons or 'none given'}."
            )
        if self.stats["hits"] == 0:
            return f"{self.job}: no backward call found its plan in the cache; please report this as a bug."
        return None


def _first_difference(a: list[list[float]], b: list[list[float]]) -> tuple[int, int]:
    for model, (left, right) in enumerate(zip(a, b, strict=True)):
        for step, (x, y) in enumerate(zip(left, right, strict=True)):
            if x != y:
                return model, step
    raise AssertionError("no difference")


def compare(job: str, title: str, make_trainer: Callable[[], Trainer], steps: int, backend: str) -> Comparison:
    """Train the same job twice, in rounds that alternate between the stock engine and retrograd."""
    sides = {"stock": Side(), "retrograd": Side()}
    trainers = {name: make_trainer() for name in sides}
    # The bars' own rate would count the other engine's rounds too.
    bars = {
        name: tqdm(
            total=steps,
            desc=f"{job:<7}{name:<9}",
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}",
            position=i,
            disable=not sys.stderr.isatty(),
        )
        for i, name in enumerate(sides)
    }
    retrograd.cache_clear()
    try:
        if backend == "inductor":
            _make_plans(job, make_trainer)
        retrograd.reset_stats()
        rounds = min(ROUNDS, steps)
        for i in range(rounds):
            count = steps * (i + 1) // rounds - steps * i // rounds
            # The order alternates too, so that a machine that slows down or speeds up favours neither.
            for name in sorted(sides, reverse=i % 2 == 0):
                side, trainer = sides[name], trainers[name]
                side.seconds += _timed_round(trainer, count, backend if name == "retrograd" else None)
                side.steps += count * trainer.models
                bars[name].set_postfix_str(f"{side.steps_per_second:.0f} steps/s", refresh=False)
                bars[name].update(count)
        stats = retrograd.stats()
        trainer = trainers["retrograd"]
        for name, side in sides.items():
            side.losses = trainers[name].losses()
        return Comparison(
            job=job,
            title=title,
            stock=sides["stock"],
            ours=sides["retrograd"],
            backend=backend,
            stats=stats,
            expected_calls=steps * trainer.backward_calls_per_step,
            expected_nested=steps * trainer.nested_calls_per_step,
            summary=trainer.summary(),
        )
    finally:
        for bar in bars.values():
            bar.close()
        for each in trainers.values():
            each.close()


def _make_plans(job: str, make_trainer: Callable[[], Trainer]) -> None:
    """Has the job's plans compiled, or found in the store on disk, by a model that is thrown away."""
    retrograd.reset_stats()
    start = time.perf_counter()
    trainer = make_trainer()
    try:
        _timed_round(trainer, 4, "inductor")  # a graph is hot from its third call on
        retrograd.wait()
        _timed_round(trainer, 4, "inductor")  # groups that only show once others are there
        retrograd.wait()
    finally:
        trainer.close()
    made = retrograd.stats()["plans"]
    print(
        f"{job}: {made['compiled']} plans compiled, {made['from_store']} found in the plan store, "
        f"in {time.perf_counter() - start:.1f} s",
        flush=True,
    )


def _timed_round(trainer: Trainer, steps: int, backend: str | None) -> float:
    if backend is None:
        enter_engine: EnterEngine = contextlib.nullcontext
    else:
        retrograd.install()

        def enter_engine() -> contextlib.AbstractContextManager[Any]:
            return retrograd.enable(backend=backend)

    try:
        start = time.perf_counter()
        trainer.advance(steps, enter_engine)
        return time.perf_counter() - start
    finally:
        if backend is not None:
            retrograd.uninstall()


def table(comparisons: list[Comparison]) -> str:
    """Give the closing table as plain text."""
    head = ["job", "steps/s stock", "steps/s retrograd", "ratio", "losses", "fused", "schedule", "misses", "nested"]
    rows = [
        [
            c.job,
            f"{c.stock.steps_per_second:.1f}",
            f"{c.ours.steps_per_second:.1f}",
            f"{c.ours.steps_per_second / c.stock.steps_per_second:.2f}",
            "identical" if c.same_losses else f"{c.distance:.0e}",
            str(c.stats["calls"]["fused"]),
            str(c.stats["calls"]["schedule"]),
            str(c.stats["misses"]),
            str(c.stats["nested_calls"]),
        ]
        for c in comparisons
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, ["-" * width for width in widths], *rows]:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *others]))
    return "\n".join(lines)


def save_curves(comparisons: list[Comparison], path: Path) -> None:
    """Draw the loss curves of both engines, the mean over a job's models, into a PNG file."""
    mpl.rcParams["font.size"] = 9
    figure = Figure(figsize=(5.2 * len(comparisons), 3.6), layout="constrained")
    for axes, comparison in zip(figure.subplots(1, len(comparisons), squeeze=False)[0], comparisons, strict=True):
        same = " (identical)" if comparison.same_losses else ""
        for label, side, style in (
            ("stock", comparison.stock, {"linewidth": 3.5, "color": "#b9c4d0"}),
            (
                "retrograd" + same,
                comparison.ours,
                {"linewidth": 1.0, "color": "#b3261e", "linestyle": "--"},
            ),
        ):
            mean = [sum(values) / len(values) for values in zip(*side.losses, strict=True)]
            axes.plot(range(1, len(mean) + 1), mean, label=label, **style)
        axes.set(title=comparison.title, xlabel="step", ylabel="training loss (nats)", ylim=(0, None))
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140, format="png")
