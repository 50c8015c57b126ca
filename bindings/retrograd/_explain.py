"""What would run a backward call, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from retrograd._load import C as _C

_ALONE = {
    "fusable": "too few nodes beside it that could be compiled with it",
    "not_needed": "not needed for the given inputs",
    "captured": "its gradient is a result of the call",
    "user_code": "it runs Python or custom C++ code, or has hooks",
    "kind": "not a node made from a derivative formula, or too wide",
    "found_out": "it saved tensors with hooks, or could not be traced or compiled",
}


@dataclass(frozen=True)
class Group:
    """Nodes that are compiled together."""

    nodes: tuple[str, ...]
    plans: int  # that are ready, for different constants and sizes
    dynamic_plans: int  # of these, plans that leave some sizes open
    compiling: int
    warming_up: int  # keys that are not hot yet
    refused: int  # keys that cannot be compiled

    @property
    def state(self) -> str:
        """One word for it: "ready", "compiling", "refused" or "cold"."""
        if self.plans:
            return "ready"
        if self.compiling:
            return "compiling"
        return "refused" if self.refused and not self.warming_up else "cold"


@dataclass(frozen=True)
class Explanation:
    """What would run a backward call, and why; `print()` shows it.

    Attributes:
        path: "fused", "schedule", "callable" or "previous", as `stats()["calls"]` names it. "callable" where a compiler
            function would be asked; "fused" where at least one group has a plan.
        reason: why the previous engine would run it, by the names of `stats()["previous_reasons"]`; else None.
        known: whether the graph's schedule was in the cache.
        nodes: the graph's nodes in the order in which they run, and for each the number of its group, or None.
        alone: how many nodes run by themselves, by reason.
        groups: what is, or would be, compiled together, in any case as for backend "inductor".
    """

    path: str
    reason: str | None
    known: bool
    nodes: tuple[tuple[str, int | None], ...]
    alone: dict[str, int]
    groups: tuple[Group, ...] = field(default=())

    def __str__(self) -> str:
        lines = [f"{len(self.nodes)} nodes; would run on: {self.path}" + (f" ({self.reason})" if self.reason else "")]
        if not self.known and self.nodes:
            lines[0] += "; a graph not seen before"
        for i, group in enumerate(self.groups):
            names = ", ".join(f"{n} x {name}" if n > 1 else name for name, n in Counter(group.nodes).items())
            lines.append(f"group {i}: {len(group.nodes)} nodes, {group.state} ({_plans(group)}): {names}")
        for reason, count in self.alone.items():
            lines.append(f"alone: {count} node{'s' * (count != 1)}, {_ALONE[reason]}")
        return "\n".join(lines)


def _plans(group: Group) -> str:
    parts = [f"{group.plans} plan{'s' * (group.plans != 1)}"]
    if group.dynamic_plans:
        parts.append(f"{group.dynamic_plans} with open sizes")
    for count, what in ((group.compiling, "compiling"), (group.warming_up, "warming up"), (group.refused, "refused")):
        if count:
            parts.append(f"{count} {what}")
    return ", ".join(parts)


def explain(*tensors: torch.Tensor, inputs: Iterable[torch.Tensor] | None = None) -> Explanation:
    """Says what would run `torch.autograd.backward(tensors, inputs=inputs)` on the calling thread at this moment.

    No node and no hook runs, and the graph can be used afterwards.

    Args:
        tensors: what backward would be called of, any shapes; at least one, each of which requires a gradient.
        inputs: as for backward; None for all leaves.

    Raises:
        TypeError: for anything but tensors.
        RuntimeError: where no tensor is given or one has no graph.
    """
    named = tuple(inputs or ())
    for tensor in (*tensors, *named):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"retrograd.explain() takes tensors, not {type(tensor).__name__}.")
        if not tensor.requires_grad:
            raise RuntimeError("retrograd.explain(): a tensor that does not require a gradient has no backward graph.")
    if not tensors:
        raise RuntimeError("retrograd.explain() needs a tensor that backward would be called of, such as the loss.")
    found = _C.explain(list(tensors), list(named))
    members: list[list[str]] = [[] for _ in found["groups"]]
    alone: Counter[str] = Counter()
    for name, group, reason in found["nodes"]:
        if group is None:
            alone[reason] += 1
        else:
            members[group].append(name)
    groups = tuple(
        Group(
            nodes=tuple(names),
            plans=counts["ready"],
            dynamic_plans=counts["ready_open"],
            compiling=counts["making"],
            warming_up=counts["cold"],
            refused=counts["refused"],
        )
        for names, counts in zip(members, found["groups"], strict=True)
    )
    if found["previous_reason"] is not None:
        path = "previous"
    elif found["has_compiler"]:
        path = "callable"
    elif found["backend"] == _C.BACKEND_INDUCTOR and any(group.plans for group in groups):
        path = "fused"
    else:
        path = "schedule"
    return Explanation(
        path=path,
        reason=found["previous_reason"],
        known=found["known"],
        nodes=tuple((name, group) for name, group, _ in found["nodes"]),
        alone=dict(alone),
        groups=groups,
    )
