"""Random autograd programs: a program is a list of steps, made from a seed, that anything may be dropped from.

A step makes a tensor, puts a hook on one, or calls backward. It names the steps whose results it takes by their
numbers, and takes the nearest earlier result where such a step is missing; so any part of a program is a program, and a
failing one can be shrunk. All tensors that steps hand to one another have the shape (rows, 4) and the program's dtype.

A program runs in rounds. Between rounds the number of rows and a constant may change, and leaves keep their `.grad`.
What it does is told to a `Log`; `fuzz_oracle.py` compares the logs of two engines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from oracle import describe, describe_error
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import (
    get_gradient_edge,
    register_multi_grad_hook,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

COLUMNS = 4

# Leaves, by the numbers that steps know them by. The first three have the shape that steps take.
ROWS_A, ROWS_B, CONSTANT, WEIGHT, BIAS, TABLE, COMPLEX = range(-1, -8, -1)


@dataclasses.dataclass(frozen=True)
class Step:
    """One thing that a program does; `choice` is below 1000 and means what the kind makes of it."""

    number: int
    kind: str
    a: int
    b: int
    choice: int

    def __str__(self) -> str:
        return f"{self.number:3} {self.kind:20} a={self.a:<3} b={self.b:<3} choice={self.choice}"


@dataclasses.dataclass(frozen=True)
class Program:
    seed: int
    dtype: torch.dtype
    exact: bool  # all values are integers, so that no sum depends on its order
    rounds: tuple[tuple[int, int], ...]  # rows, and which constant
    steps: tuple[Step, ...]
    parts: bool = True  # whether results are used further whose graph has been freed in part

    def keep(self, steps: set[int] | None = None, rounds: int | None = None) -> Program:
        """The program with these steps, by number, and this many rounds."""
        kept = self.steps if steps is None else tuple(step for step in self.steps if step.number in steps)
        return dataclasses.replace(self, steps=kept, rounds=self.rounds[:rounds])

    def without(self, kinds: set[str]) -> Program:
        return dataclasses.replace(self, steps=tuple(step for step in self.steps if step.kind not in kinds))

    def has(self, kinds: set[str]) -> bool:
        return any(step.kind in kinds for step in self.steps)

    def __str__(self) -> str:
        head = (
            f"seed {self.seed}, {self.dtype}, {'integers' if self.exact else 'reals'}, (rows, constant): {self.rounds}"
        )
        return "\n".join([head, *map(str, self.steps)])


class Deliberate(Exception):
    """Raised by steps that are there to raise."""


@dataclasses.dataclass
class Entry:
    label: str
    text: str  # to the last bit
    plain: str  # without what rounding and memory layout decide
    tensors: list[Tensor]


@dataclasses.dataclass
class Segment:
    """What was said during one backward call of the program, or between two."""

    entries: list[Entry] = dataclasses.field(default_factory=list)
    call: str = ""  # the step, if this is a call
    error: str = ""  # what it raised: type and message
    where: str = ""  # the same with the function that raised it
    after_error: bool = False  # depends on how far a call got that raised


class Log:
    def __init__(self) -> None:
        self.segments = [Segment()]

    def say(self, label: str, *values: Any) -> None:
        tensors: list[Tensor] = []
        plain = _plain(values, tensors)
        self.segments[-1].entries.append(Entry(label, describe(values), plain, tensors))

    @contextlib.contextmanager
    def call(self, label: str) -> Iterator[Segment]:
        """A segment for one call; an error ends it and goes no further."""
        segment = Segment(call=label)
        self.segments.append(segment)
        try:
            yield segment
        except Exception as error:
            segment.error, segment.where = f"{type(error).__name__}: {error}", describe_error(error)
        self.segments.append(Segment())

    def failed(self) -> bool:
        return any(segment.error for segment in self.segments)


def _plain(value: Any, tensors: list[Tensor]) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_plain(part, tensors) for part in value)})"
    if not isinstance(value, Tensor):
        return repr(value)
    dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
    tensors.append(dense.resolve_conj().resolve_neg().clone())
    name = "" if value.grad_fn is None else value.grad_fn.name()
    return f"{value.dtype} {tuple(value.shape)} {value.layout} requires_grad={value.requires_grad} {name}"


def make_leaves(program: Program, rows: int) -> dict[int, Tensor]:
    values = torch.Generator().manual_seed(program.seed)

    def make(*shape: int, dtype: torch.dtype = program.dtype) -> Tensor:
        if program.exact:
            return torch.randint(-2, 3, shape, generator=values).to(dtype)
        return torch.randn(shape, generator=values, dtype=torch.float64).to(dtype)

    complex_dtype = torch.complex128 if program.dtype == torch.float64 else torch.complex64
    leaves = {
        WEIGHT: make(COLUMNS, COLUMNS),
        BIAS: make(COLUMNS),
        TABLE: make(5, COLUMNS),
        COMPLEX: torch.complex(make(COLUMNS, dtype=torch.float64), make(COLUMNS, dtype=torch.float64)).to(
            complex_dtype
        ),
        ROWS_A: make(rows, COLUMNS),
        ROWS_B: make(rows, COLUMNS),
        CONSTANT: make(rows, COLUMNS),
    }
    for number, tensor in leaves.items():
        tensor.requires_grad_(number != CONSTANT)
    return leaves


class Run:
    """One run of a program.

    `shared` are leaves that other threads use at the same time; what is in their `.grad` is not told then.
    """

    def __init__(self, program: Program, shared: dict[int, Tensor] | None = None) -> None:
        self.program = program
        self.log = Log()
        self.shared = shared
        self.leaves: dict[int, Tensor] = {}
        self.pool: dict[int, Tensor] = {}
        self.roots: list[Tensor] = []
        self.handles: dict[int, list[Any]] = {}
        self.constant: float = 0
        self.nodes: list[Any] = []
        self.parts: list[Tensor] = []  # outputs that may go unused; they retain their gradient
        self.depth = 0  # of backward calls that hooks make

    def __call__(self) -> Log:
        before = 0
        for rows, constant in self.program.rounds:
            self.constant = (2, -1, 3, -2)[constant] if self.program.exact else (0.37, -0.8, 1.3, 0.5)[constant]
            if self.shared is not None:
                self.leaves = self.shared
            elif rows != before:
                # Weights live on, with their `.grad`.
                self.leaves = make_leaves(self.program, rows) | {
                    n: t for n, t in self.leaves.items() if n not in (ROWS_A, ROWS_B, CONSTANT)
                }
            before = rows
            self.start_anew()
            for step in self.program.steps:
                try:
                    self.do(step)
                except Exception as error:  # of a forward: all engines have the same
                    self.log.say(f"{step.number} error", f"{type(error).__name__}: {error}")
            self.tell_gradients("after the round")
            self.remove_hooks()
        self.forget_results()
        if self.shared is None:
            for leaf in self.leaves.values():
                leaf.grad = None
        return self.log

    def do(self, step: Step) -> None:
        if step.kind in OPERATIONS:
            self.pool[step.number] = OPERATIONS[step.kind].make(self, step, self.take(step.a), self.take(step.b))
        elif step.kind in HOOKS:
            target = self.leaves.get(step.a) if step.a < CONSTANT else self.take(step.a)
            assert target is not None
            if target.requires_grad and (self.shared is None or not target.is_leaf):
                self.handles.setdefault(step.number, []).extend(HOOKS[step.kind](self, step, target))
        else:
            CALLS[step.kind](self, step)

    def take(self, number: int) -> Tensor:
        return self.pool[max(known for known in self.pool if known <= number)]

    def forget_results(self) -> None:
        """Ends what would keep graphs, which refer to this object, through hooks and functions, for ever.

        A gradient that has a graph, after `create_graph`, can refer to the tensor that it is the gradient of, where no
        garbage collection sees it; in any engine.
        """
        for tensor in (*self.pool.values(), *self.parts):
            if tensor.retains_grad:  # false for leaves
                tensor.grad = None
        for results in (self.pool, self.roots, self.parts):
            results.clear()

    def start_anew(self) -> None:
        """Forgets all results but the leaves."""
        self.forget_results()
        # Threads that index a tensor that they share can deadlock in PyTorch (the tensor's mutex and the GIL).
        self.pool = {
            n: self.leaves[n] if self.shared is None else self.leaves[n] * 1 for n in (CONSTANT, ROWS_B, ROWS_A)
        }

    def freed(self, kept: bool) -> None:
        """After a call that has freed its graph, unless it kept it."""
        if not kept and not self.program.parts:
            self.start_anew()

    def remove_hooks(self) -> None:
        for handles in self.handles.values():
            for handle in handles:
                handle.remove()
        self.handles.clear()
        self.nodes.clear()

    def tell_gradients(self, label: str) -> None:
        if self.shared is None:
            self.log.say(label, [tensor.grad for _, tensor in sorted(self.leaves.items())])
        kept = [tensor.grad for _, tensor in sorted(self.pool.items()) if not tensor.is_leaf and tensor.retains_grad]
        self.log.say(f"{label}, retained", kept, [part.grad for part in self.parts])

    def call(self, step: Step, backward: Callable[[], Any]) -> None:
        """Makes a backward call. After an error, nothing that depends on how far it got goes on."""
        with self.log.call(str(step)):
            result = backward()
            self.log.say(f"{step.number} result", result)
            self.tell_gradients(f"{step.number} gradients")
            return
        with self.log.call(f"what the error left behind, {step}") as after:
            self.tell_gradients("partial")
            if step.choice % 2:
                try:
                    backward()
                except Exception as error:
                    self.log.say("again", f"{type(error).__name__}: {error}")
                self.tell_gradients("partial")
            after.after_error = True
        self.remove_hooks()
        for tensor in self.leaves.values():
            tensor.grad = None
        self.start_anew()

    # For steps

    def sayer(self, step: Step, what: str = "") -> Callable[..., None]:
        return lambda *values: self.log.say(f"{step.number} {step.kind}{what}", *values)

    def fail(self, step: Step) -> Any:
        raise Deliberate(f"step {step.number}")

    def scale(self, grad: Any) -> Any:
        return grad * (2 if self.program.exact else 1.25)

    def bounded(self, value: Tensor) -> Tensor:
        """For results that might grow from step to step."""
        return value.clamp(-8, 8) if self.program.exact else value.tanh()

    def retain_part(self, part: Tensor) -> None:
        if part.requires_grad:
            part.retain_grad()
            self.parts.append(part)

    def factor(self, value: Tensor) -> Tensor:
        """Something small to multiply by."""
        return value.clamp(-2, 2) if self.program.exact else (value * 0.5).sin()


# --- Custom functions ---


class Told(torch.autograd.Function):
    """Tells its gradient; saves what it takes and what it gives."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, say: Callable[..., None]) -> Tensor:
        result = a * b
        ctx.save_for_backward(a, b, result)
        ctx.say = say
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b, result = ctx.saved_tensors
        ctx.say(grad, result, ctx.needs_input_grad[:2])
        return grad * b, grad * a, None


class Several(torch.autograd.Function):
    """Several outputs, one that has no gradient; gradients that are missing stay None."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, say: Callable[..., None]) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.say = say
        sign = a.sign()
        ctx.mark_non_differentiable(sign)
        return a + b, a - b, sign

    @staticmethod
    def backward(ctx: Any, plus: Tensor | None, minus: Tensor | None, _: Any) -> tuple[Any, Any, None]:
        ctx.say(plus, minus)
        if minus is None:
            return plus, plus, None
        return (minus, -minus, None) if plus is None else (plus + minus, plus - minus, None)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, factor: float) -> Tensor:
        ctx.mark_dirty(a)
        ctx.factor = factor
        return a.mul_(factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class OnlySecond(torch.autograd.Function):
    """No gradient for its first input."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


class Calls(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.function = function
        return a.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.function(grad), None


class NestedCall(torch.autograd.Function):
    """Computes its gradient by a backward call of its own, as reentrant checkpoint does."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.function = function
        return function(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            result = ctx.function(a, b)
        torch.autograd.backward(result, grad)
        return a.grad, b.grad, None


# --- Steps that make a tensor ---

Make = Callable[[Run, Step, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Operation:
    make: Make
    integers: bool  # whether integers stay integers, in both directions
    weight: float


OPERATIONS: dict[str, Operation] = {}


def operation(weight: float = 1, *, integers: bool = True) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        OPERATIONS[make.__name__] = Operation(make, integers, weight)
        return make

    return register


def _pointwise(name: str, function: Callable[[Tensor], Tensor]) -> None:
    OPERATIONS[name] = Operation(lambda run, step, a, b: function(a), False, 0.5)


_pointwise("sin", torch.sin)
_pointwise("tanh", torch.tanh)
_pointwise("exp", lambda a: (a * 0.1).clamp(-3, 3).exp())
_pointwise("sqrt", lambda a: (a * a + 1).sqrt())
_pointwise("softmax", lambda a: a.softmax(1))
_pointwise("logsumexp", lambda a: a - a.logsumexp(1, keepdim=True))
_pointwise("gelu", F.gelu)
_pointwise("std", lambda a: a / (a.std(1, keepdim=True) + 1))
_pointwise("norm", lambda a: a / (a.norm() + 1))


@operation(3)
def add(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return a + b * run.constant


@operation()
def twice(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return a + a


@operation(3)
def mul(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return a * run.factor(b)


@operation(2)
def linear(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return run.bounded(F.linear(a, run.leaves[WEIGHT], run.leaves[BIAS] if step.choice % 2 else None))


@operation()
def batched_matmul(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return run.bounded((a.unsqueeze(1) @ run.leaves[WEIGHT].unsqueeze(0)).squeeze(1))


@operation(integers=False)
def layer_norm(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(a, (COLUMNS,), weight=run.leaves[BIAS])


@operation(0.5, integers=False)
def convolution(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return F.conv1d(a.unsqueeze(1), run.leaves[WEIGHT][:1, :3].unsqueeze(1), padding=1).squeeze(1).tanh()


@operation()
def relu(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return a.relu()


@operation()
def view(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    match step.choice % 4:
        case 0:
            return a.t().reshape(-1).view(a.shape)
        case 1:
            return a.view_as(a)
        case 2:
            return a.unsqueeze(0).transpose(1, 2).transpose(2, 1).squeeze(0)
    return a.narrow(1, 1, 3)[:, :1].expand_as(a)


@operation()
def cut(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a[:, :2], b[:, 2:]], 1)


@operation()
def split(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    first, second = a.split([1, COLUMNS - 1], 1)
    if step.choice % 5 == 0:
        run.retain_part(first)
    return torch.cat([second, first], 1) if step.choice % 2 else torch.cat([second, b[:, :1]], 1)


@operation()
def unbind(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    parts = a.unbind(1)
    if step.choice % 5 == 0:
        run.retain_part(parts[2])
    return torch.stack([parts[step.choice % 4], b[:, 0], parts[1] if step.choice % 3 else parts[3], parts[0]], 1)


@operation()
def largest(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    values, _ = a.max(1, keepdim=True)
    return values + b


@operation()
def sort(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    values, _ = a.sort(dim=1, stable=True)
    return values


@operation(0.5, integers=False)
def mean_and_variance(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    variance, mean = torch.var_mean(a, 1, keepdim=True)
    return (b - mean if step.choice % 2 else b) / (variance + 1)


@operation()
def total(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return run.bounded(a.sum(step.choice % 2, keepdim=True).expand_as(a))


@operation()
def running_total(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return run.bounded(a.cumsum(1))


@operation()
def index(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return a[:, [2, 0, 2, 3]] if step.choice % 2 else a.index_select(1, torch.tensor([3, 3, 0, 1]))


@operation()
def gather(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return a.gather(1, (torch.arange(a.numel()).view(a.shape) * 7 + step.choice) % COLUMNS)


@operation()
def index_put(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    rows = torch.tensor([0, a.shape[0] - 1])
    return a.index_put((rows,), b[:2] if b.shape[0] > 1 else b, accumulate=step.choice % 2 == 0)


@operation()
def where(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return torch.where((torch.arange(a.numel()).view(a.shape) + step.choice) % 3 == 0, a, b)


@operation(0.7)
def embedding(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    rows = (torch.arange(a.shape[0]) + step.choice) % 5
    table = run.leaves[TABLE]
    # Whether torch can add sparse gradients of bfloat16 depends on their strides, which plans do not promise.
    return a + F.embedding(rows, table, sparse=step.choice % 3 == 0 and table.dtype != torch.bfloat16)


@operation(0.7)
def conjugate(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return _as_complex(a, b).conj().imag.to(a.dtype)


@operation(0.7)
def complex_product(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    product = _as_complex(a, b).to(run.leaves[COMPLEX].dtype) * run.leaves[COMPLEX]
    return run.bounded((torch.view_as_real(product)[..., 0] if step.choice % 2 else product.imag).to(a.dtype))


def _as_complex(a: Tensor, b: Tensor) -> Tensor:
    return torch.complex(a, b) if a.dtype != torch.bfloat16 else torch.complex(a.float(), b.float())


@operation(0.5, integers=False)
def cast(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    other = torch.float32 if a.dtype == torch.float64 else torch.float64
    return (a.to(other) * 2).to(a.dtype) if step.choice % 2 else (a.to(other) * b).tanh().to(a.dtype)


@operation()
def copy_slices(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    result = a.clone()
    result[:, 1:3] = b[:, 1:3] * run.constant
    return result


@operation()
def in_place_through_views(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    result = a * 1
    other = result.t()
    other[step.choice % 4].mul_(run.constant)
    result.view(-1)[1:].add_(b.reshape(-1)[1:])
    return result if step.choice % 2 else other.t()


@operation(0.4)
def in_place(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    """Of a tensor that other nodes may have saved, or of a leaf, which is an error."""
    return a.mul_(run.constant) if step.choice % 2 else a.add_(b)


@operation(0.5)
def detach(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    if step.choice % 2:
        return a.detach() + b
    with torch.no_grad():
        return a * 2


@operation()
def elsewhere(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    """Made by another thread, which numbers its nodes by itself."""
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda: made.append(a * run.constant + run.factor(b)))
    thread.start()
    thread.join()
    return made[0]


@operation(1.5)
def function(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return Told.apply(a, run.factor(b), run.sayer(step))


@operation()
def function_of_several(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    plus, minus, sign = Several.apply(a, b, run.sayer(step))
    return (plus * sign, minus, plus + minus)[step.choice % 3]


@operation(0.7)
def function_in_place(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return InPlace.apply(a * 1, run.constant)


@operation(0.5)
def function_without_gradient(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return OnlySecond.apply(a, b)


@operation()
def function_nested(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return NestedCall.apply(a, b, lambda a, b: a * 2 + run.factor(b))


@operation(0.3)
def function_raises(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return Calls.apply(a, lambda grad: run.fail(step))


@operation(0.3)
def function_wrong(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return Calls.apply(a, (lambda grad: grad[0, :2], lambda grad: 3)[step.choice % 2])


@operation(0.2)
def raises(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return run.fail(step)


def _block(run: Run, step: Step) -> Callable[[Tensor, Tensor], Tensor]:
    def block(a: Tensor, b: Tensor) -> Tensor:
        inner = a * run.constant
        if step.choice % 5 == 0 and inner.requires_grad:
            inner.register_hook(run.sayer(step, " inside"))
        return run.bounded(F.linear(inner, run.leaves[WEIGHT])) + run.factor(b)

    return block


@operation(1.5)
def checkpoint_reentrant(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return _checkpoint(_block(run, step), a, b, reentrant=True)


@operation(1.5)
def checkpoint_not_reentrant(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    return _checkpoint(_block(run, step), a, b, reentrant=False)


@operation(0.5)
def checkpoint_twice(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    """One inside the other, in any combination."""
    outer, inner = step.choice // 2 % 2 == 0, step.choice // 4 % 2 == 0
    block = _block(run, step)
    return _checkpoint(lambda a, b: _checkpoint(block, a * 2, b, reentrant=inner) + a, a, b, reentrant=outer)


@operation(0.3)
def checkpoint_raises(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    """In the recomputation."""
    ran = []

    def block(a: Tensor, b: Tensor) -> Tensor:
        ran.append(True)
        return a * b if len(ran) == 1 else run.fail(step)

    return _checkpoint(block, a, b, reentrant=step.choice % 2 == 0)


def _checkpoint(block: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, *, reentrant: bool) -> Tensor:
    # Random numbers belong to the process, and programs run in several threads.
    return checkpoint(block, a, b, use_reentrant=reentrant, preserve_rng_state=False)


@operation(1.5)
def saved_with_hooks(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    say = run.sayer(step)

    def unpack(packed: tuple[str, Tensor]) -> Tensor:
        say(packed)
        return packed[1]

    if step.choice % 3 == 0:
        with save_on_cpu():
            return a * run.factor(b)
    # A packed result that is not detached would refer to its own node.
    with saved_tensors_hooks(lambda t: ("packed", t.detach()), unpack):
        return (a * run.factor(b)).relu()


@operation(0.3)
def saved_raises(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    fail = lambda t: run.fail(step)  # noqa: E731
    pack, unpack = (fail, lambda t: t) if step.choice % 4 == 0 else (lambda t: t, fail)
    with saved_tensors_hooks(pack, unpack):
        return a * run.factor(b)


@operation(0.7)
def saved_tensor_with_hooks(run: Run, step: Step, a: Tensor, b: Tensor) -> Tensor:
    """Hooks on one saved tensor of a node."""
    result = a.relu()
    if result.requires_grad:
        say = run.sayer(step)
        saved = result.grad_fn._raw_saved_result  # type: ignore[union-attr]
        saved.register_hooks(lambda t: t.detach() * 2, lambda t: say(t) or t / 2)
    return result


# --- Steps that put hooks on tensors ---

# Each gives the handles to take the hooks off again.
Hook = Callable[[Run, Step, Tensor], list[Any]]
HOOKS: dict[str, Hook] = {}
_HOOK_WEIGHTS: dict[str, float] = {}


def hook(weight: float = 1) -> Callable[[Hook], Hook]:
    def register(put: Hook) -> Hook:
        HOOKS[put.__name__] = put
        _HOOK_WEIGHTS[put.__name__] = weight
        return put

    return register


def _node(run: Run, tensor: Tensor) -> Any:
    """The node that makes the tensor's gradient; for a leaf, the one that accumulates it.

    That one would go, with its hooks, when nothing refers to it, which may be a matter of garbage collection.
    """
    run.nodes.append(node := get_gradient_edge(tensor).node)
    return node


@hook(2)
def hook_tells(run: Run, step: Step, target: Tensor) -> list[Any]:
    return [target.register_hook(run.sayer(step))]


@hook(0.5)
def hook_asks(run: Run, step: Step, target: Tensor) -> list[Any]:
    """A hook that asks the engine what is going on."""
    say = run.sayer(step)
    other = _node(run, run.take(step.b)) if run.take(step.b).requires_grad else None

    def ask(grad: Tensor) -> None:
        say(torch._C._current_autograd_node().name(), torch._C._current_graph_task_id() == -1, torch.is_grad_enabled())
        if other is not None:
            say(torch._C._will_engine_execute_node(run, other))

    return [target.register_hook(ask)]


@hook(1.5)
def hook_changes(run: Run, step: Step, target: Tensor) -> list[Any]:
    return [target.register_hook(run.scale)]


@hook(0.7)
def hook_nests(run: Run, step: Step, target: Tensor) -> list[Any]:
    def nested(grad: Tensor) -> Tensor:
        if run.depth == 2:  # the leaf may have such a hook itself
            return run.scale(grad)
        run.depth += 1
        try:
            with torch.enable_grad():
                inner = grad.detach().requires_grad_()
                product = inner * run.constant
                other = run.leaves[WEIGHT] * 2
                torch.autograd.backward([product, other], [grad.detach(), torch.ones_like(other)])
        finally:
            run.depth -= 1
        run.log.say(f"{step.number} nested", inner.grad)
        return run.scale(grad)

    return [target.register_hook(nested)]


@hook(0.3)
def hook_raises(run: Run, step: Step, target: Tensor) -> list[Any]:
    return [target.register_hook(lambda grad: run.fail(step))]


@hook(0.2)
def hook_wrong(run: Run, step: Step, target: Tensor) -> list[Any]:
    return [target.register_hook(lambda grad: grad.reshape(-1)[:1])]


@hook(0.5)
def hook_queues(run: Run, step: Step, target: Tensor) -> list[Any]:
    """A callback for the end of the call."""
    say = run.sayer(step)
    queue = Variable._execution_engine.queue_callback
    return [target.register_hook(lambda grad: queue(lambda: say(torch.is_grad_enabled())))]


@hook(0.4)
def hook_adds(run: Run, step: Step, target: Tensor) -> list[Any]:
    """A hook that puts one on another node, which may have run by then."""
    other = run.take(step.b)
    added: list[Any] = []

    def add_one(grad: Tensor) -> None:
        if other.requires_grad and not added:
            say = lambda grads: run.log.say(f"{step.number} added", grads)  # noqa: E731
            added.append(_node(run, other).register_prehook(say))
            run.handles.setdefault(step.number, []).extend(added)

    return [target.register_hook(add_one)]


@hook(1.5)
def retain(run: Run, step: Step, target: Tensor) -> list[Any]:
    if not target.is_leaf:
        target.retain_grad()
    return []


@hook()
def node_before(run: Run, step: Step, target: Tensor) -> list[Any]:
    return [_node(run, target).register_prehook(run.sayer(step))]


@hook(0.7)
def node_before_changes(run: Run, step: Step, target: Tensor) -> list[Any]:
    return [_node(run, target).register_prehook(lambda grads: tuple(g if g is None else run.scale(g) for g in grads))]


@hook()
def node_after(run: Run, step: Step, target: Tensor) -> list[Any]:
    return [_node(run, target).register_hook(run.sayer(step))]


@hook(0.7)
def node_after_changes(run: Run, step: Step, target: Tensor) -> list[Any]:
    def change(results: Any, grads: Any) -> Any:
        return tuple(g if g is None else run.scale(g) for g in results)

    return [_node(run, target).register_hook(change)]


@hook(0.2)
def node_raises(run: Run, step: Step, target: Tensor) -> list[Any]:
    node = _node(run, target)
    if step.choice % 2:
        return [node.register_prehook(lambda grads: run.fail(step))]
    return [node.register_hook(lambda results, grads: run.fail(step))]


@hook(0.4)
def nodes_everywhere(run: Run, step: Step, target: Tensor) -> list[Any]:
    """Every node says when it runs."""
    nodes = [_node(run, target)]
    seen = {nodes[0]}
    for node in nodes:
        following = {later: None for later, _ in node.next_functions if later is not None and later not in seen}
        seen.update(following)
        nodes += following
    run.nodes += nodes
    return [
        node.register_prehook(lambda _, n=n: run.log.say(f"{step.number} node {n}")) for n, node in enumerate(nodes)
    ]


@hook(2)
def leaf_accumulated(run: Run, step: Step, target: Tensor) -> list[Any]:
    leaf = run.leaves[_leaf(step)]
    say = run.sayer(step)
    if step.choice % 9 == 0:
        return [leaf.register_post_accumulate_grad_hook(lambda leaf: run.fail(step))]
    if step.choice % 5 == 0:
        return [leaf.register_post_accumulate_grad_hook(lambda leaf: say(leaf.grad) or setattr(leaf, "grad", None))]
    return [leaf.register_post_accumulate_grad_hook(lambda leaf: say(leaf.grad))]


def _leaf(step: Step) -> int:
    """Any leaf that has a gradient."""
    return (ROWS_A, ROWS_B, WEIGHT, BIAS, TABLE, COMPLEX)[step.choice % 6]


def _multi(mode: str) -> Hook:
    def put(run: Run, step: Step, target: Tensor) -> list[Any]:
        tensors = [t for t in (target, run.take(step.b), run.leaves[WEIGHT]) if t.requires_grad]
        # One number for all: the hook is for sets of tensors.
        return [register_multi_grad_hook(list({id(t): t for t in tensors}.values()), run.sayer(step), mode=mode)]

    return put


HOOKS["multi_all"], _HOOK_WEIGHTS["multi_all"] = _multi("all"), 0.7
HOOKS["multi_any"], _HOOK_WEIGHTS["multi_any"] = _multi("any"), 0.3


@hook(0.5)
def remove(run: Run, step: Step, target: Tensor) -> list[Any]:
    """Takes hooks of an earlier step off."""
    earlier = [number for number in run.handles if number <= step.choice % max(step.number, 1)]
    for handle in run.handles.pop(max(earlier), []) if earlier else []:
        handle.remove()
    return []


# --- Steps that call backward ---


def _roots(run: Run, step: Step) -> list[Tensor]:
    roots = [run.take(step.a)]
    if step.choice % 3 == 0:
        roots.append(run.take(step.b))
    run.roots = roots = [root for root in roots if root.requires_grad]
    return roots


def _gradients(step: Step, roots: list[Tensor]) -> tuple[list[Tensor], list[Tensor] | None]:
    """Roots as they are, with gradients for them; or their sums."""
    if step.choice % 4 == 0:
        return roots, [torch.ones_like(root) * 2 for root in roots]
    return [root.sum() for root in roots], None


def backward(run: Run, step: Step) -> None:
    roots = _roots(run, step)
    if not roots:
        return
    keep = step.choice % 5 < 2
    ends, grads = _gradients(step, roots)
    run.call(step, lambda: torch.autograd.backward(ends, grads, retain_graph=keep))
    if not keep and step.choice % 7:
        run.start_anew()
    run.freed(keep)


def backward_again(run: Run, step: Step) -> None:
    if run.roots:
        ends, grads = _gradients(step, run.roots)
        keep = step.choice % 2 == 0
        run.call(step, lambda: torch.autograd.backward(ends, grads, retain_graph=keep))
        run.freed(keep)


def _inputs(run: Run, step: Step) -> list[Tensor]:
    inputs = [run.leaves[_leaf(step)], run.take(step.b)]
    return [t for t in inputs[: 1 + step.choice % 2] if t.requires_grad]


def backward_inputs(run: Run, step: Step) -> None:
    roots, inputs = _roots(run, step), _inputs(run, step)
    if roots and inputs:
        ends, grads = _gradients(step, roots)
        keep = step.choice % 5 < 4
        run.call(step, lambda: torch.autograd.backward(ends, grads, inputs=inputs, retain_graph=keep))
        run.freed(keep)


def grad(run: Run, step: Step) -> None:
    roots, inputs = _roots(run, step), _inputs(run, step)
    if roots and inputs:
        ends, grads = _gradients(step, roots)
        unused, keep = step.choice % 9 != 0, step.choice % 5 < 4
        run.call(step, lambda: torch.autograd.grad(ends, inputs, grads, retain_graph=keep, allow_unused=unused))
        run.freed(keep)


def grad_of_grad(run: Run, step: Step) -> None:
    roots, inputs = _roots(run, step), _inputs(run, step)
    if not roots or not inputs:
        return

    def twice() -> list[Tensor | None]:
        ends = [root * run.factor(root) for root in roots]
        grads = [torch.ones_like(end) for end in ends]
        first = torch.autograd.grad(ends, inputs, grads, create_graph=True, allow_unused=True)
        again = [g for g in first if g is not None and g.requires_grad and not g.is_complex()]
        if again:
            torch.autograd.backward([g.sum() for g in again], retain_graph=True)
        return [None if g is None else g.detach() for g in first]

    run.call(step, twice)


def forget_gradients(run: Run, step: Step) -> None:
    leaf = run.leaves[_leaf(step)]
    if step.choice % 4 == 0 and leaf.grad is not None:
        leaf.grad.zero_()
    else:
        leaf.grad = None


CALLS: dict[str, Callable[[Run, Step], None]] = {
    "backward": backward,
    "backward_again": backward_again,
    "backward_inputs": backward_inputs,
    "grad": grad,
    "grad_of_grad": grad_of_grad,
    "forget_gradients": forget_gradients,
}
_CALL_WEIGHTS = {
    "backward": 6,
    "backward_again": 2,
    "backward_inputs": 1.5,
    "grad": 1.5,
    "grad_of_grad": 0.5,
    "forget_gradients": 1,
}

# --- What kinds have in common ---

RAISING = {
    *("function_raises", "function_wrong", "raises", "checkpoint_raises", "saved_raises", "in_place"),
    *("hook_raises", "hook_wrong", "node_raises"),
}
# Another backward runs inside the call.
NESTING = {"checkpoint_reentrant", "checkpoint_twice", "function_nested", "hook_nests", "checkpoint_raises"}
# Steps that look at or change the `.grad` of leaves, or put hooks on them whatever `a` is.
OF_LEAVES = {"leaf_accumulated", "forget_gradients", "multi_all", "multi_any", "nodes_everywhere"}


def generate(seed: int) -> Program:
    choose = random.Random(seed)
    exact = choose.random() < 0.35
    dtypes = [torch.float64] if exact else [torch.float32] * 6 + [torch.float64] * 4 + [torch.bfloat16]
    dtype = choose.choice(dtypes)
    first = choose.randint(1, 4)
    rounds = [(first, 0)]
    for _ in range(choose.choice([0, 1, 1, 2, 3])):
        rows, constant = rounds[-1]
        change = choose.random()
        rounds.append(
            (choose.randint(1, 6) if change < 0.5 else rows, choose.randrange(4) if change > 0.3 else constant)
        )
    quiet = choose.random() < 0.6  # nothing is there to raise

    def weights(kinds: dict[str, float]) -> tuple[list[str], list[float]]:
        names = [name for name in kinds if not (quiet and name in RAISING)]
        return names, [kinds[name] for name in names]

    groups = (
        weights({name: op.weight for name, op in OPERATIONS.items() if op.integers or not exact}),
        weights(_HOOK_WEIGHTS),
        weights(_CALL_WEIGHTS),
    )
    hooks = choose.choice([0, 0, 2, 5])
    length = choose.choice([6, 12, 25, 40])
    steps = []
    made = [CONSTANT, ROWS_B, ROWS_A, ROWS_A]

    def pick() -> int:
        # What was made last, mostly.
        return choose.choice(made[-8:]) if choose.random() < 0.7 else choose.choice(made)

    for number in range(length):
        names, weight = choose.choices(groups, (10, hooks, 1.5))[0] if number < length - 1 else groups[2]
        kind = choose.choices(names, weight)[0] if number < length - 1 else "backward"
        a, b = pick(), pick()
        if kind in HOOKS and choose.random() < 0.25:
            a = choose.choice([ROWS_A, ROWS_B, WEIGHT, BIAS, TABLE, COMPLEX])
        if number == length - 1:
            a = made[-1]
        steps.append(Step(number, kind, a, b, choose.randrange(1000)))
        if kind in OPERATIONS:
            made.append(number)
    return Program(seed, dtype, exact, tuple(rounds), tuple(steps))
