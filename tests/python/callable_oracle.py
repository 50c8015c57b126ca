"""Stock compiled autograd as the oracle for compiler functions.

A program builds a model and runs backward any number of times. `compare` runs it without a compiler, then with torch's
own compiled autograd (retrograd uninstalled), then with retrograd, and wants from retrograd what stock gives: the same
captured graphs, the same inputs to each compiled call, the same number of captures, the same log bit for bit; and
proof, from `retrograd.stats()`, that every call ran compiled. What stock gives is held against eager within rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import operator
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import compiled_autograd as front_end
from torch._dynamo.utils import counters

import retrograd

Graph = list[str]
Program = Callable[["Recorder"], None]


def describe(value: Any) -> str:
    """What must be equal between stock and retrograd, as text; tensors by their bits."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(describe, value))})"
    if not isinstance(value, Tensor):
        return _without_addresses(repr(value))
    with torch.no_grad():
        plain = value.detach()
        head = f"{type(value).__name__} {plain.dtype} {tuple(plain.shape)} requires_grad={value.requires_grad}"
        if plain.layout != torch.strided:
            plain = plain.to_dense()
        else:
            head += f" strides={plain.stride()}"
        bits = plain.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return f"{head} crc={zlib.crc32(bits.numpy().tobytes()):08x} {plain.reshape(-1)[:4].tolist()}"


def _workspace(value: Any) -> Any:
    """Bytes that a kernel saved for itself, as LSTM does, are never wholly written: their number must do."""
    return f"{value.numel()} bytes" if isinstance(value, Tensor) and value.dtype == torch.uint8 else value


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def describe_error(error: BaseException) -> str:
    """Type, message and causes; not where it was raised, which differs between engines on purpose."""
    chain = f"{type(error).__name__}: {_without_addresses(str(error))}"
    return chain if error.__cause__ is None else f"{chain} <- {describe_error(error.__cause__)}"


def stand_ins(inputs: list[Any]) -> dict[int, int]:
    """Which inputs are there a second time, as retrograd gives leaves that a custom function saved; and which they are.

    The function gets the leaf, and the accumulation gets the stand-in at the end of the inputs.
    """
    places = {}
    for place, value in enumerate(inputs):
        if (
            isinstance(value, Tensor)
            and value.layout == torch.strided
            and value.is_leaf
            and value.requires_grad
            and value.numel()
        ):
            places.setdefault((value.data_ptr(), value.shape, value.stride()), []).append(place)
    return {second: first for first, second in (found for found in places.values() if len(found) == 2)}


def normalize(module: torch.fx.GraphModule, same: dict[int, int] | None = None) -> Graph:
    """The graph without what may differ from capture to capture: names, ids, addresses; and without stand-ins."""
    taken = {
        node.args[1]: node
        for node in module.graph.nodes
        if node.op == "call_function" and node.target is operator.getitem and str(node.args[0]) == "inputs"
    }
    instead = {taken[second]: taken[first] for second, first in (same or {}).items()}
    index = {node: i for i, node in enumerate(node for node in module.graph.nodes if node not in instead)}
    index.update({second: index[first] for second, first in instead.items()})

    class Ref:
        def __init__(self, node: torch.fx.Node) -> None:
            self.text = f"%{index[node]}"

        def __repr__(self) -> str:
            return self.text

    lines = []
    for node in module.graph.nodes:
        if node in instead:
            continue
        args = torch.fx.node.map_arg(node.args, Ref)
        kwargs = dict(sorted(torch.fx.node.map_arg(node.kwargs, Ref).items()))
        target = node.target if isinstance(node.target, str) else target_name(node.target)
        if node.op == "get_attr":
            target = describe(getattr(module, node.target))
        lines.append(_without_addresses(f"%{index[node]} = {node.op} {target} {args} {kwargs} [{origin(node)}]"))
    return lines


def target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    # C++ functions are bound anew for each capture, under a name with a running number.
    return re.sub(r"^(CppNode.*?)\d+$", r"\1", target.__name__)


def origin(node: torch.fx.Node) -> str:
    """The autograd node that an FX node says it comes from, without the running number of an AOT-compiled one."""
    found = re.findall(r"^ *(.+ \(NodeCall \d+\))$", node.stack_trace or "", re.MULTILINE)
    return re.sub(r"(CompiledFunctionBackward)\d+", r"\1", found[-1]) if found else ""


class Compiled:
    """One captured graph: what stands for it in comparisons, and how often it ran."""

    def __init__(self, module: torch.fx.GraphModule, run: Callable[..., Any], calls: list[str]) -> None:
        self.module = module
        self.graph = normalize(module)
        self.targets = [target_name(node.target) for node in module.graph.nodes if node.op == "call_function"]
        self._run = run
        self._calls = calls

    def __call__(self, inputs: list[Any], sizes: Any, scalars: Any, hooks: Any, packed: Any) -> Any:
        same = stand_ins(inputs)
        if same:
            self.graph = normalize(self.module, same)
        # A size is a dimension of an empty tensor, or an int where it is zero or negative.
        plain_sizes = [size.shape[1] if isinstance(size, Tensor) else size for size in sizes]
        hook_names = [getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks]
        own = [_workspace(value) for i, value in enumerate(inputs) if i not in same]
        self._calls.append(
            f"inputs={describe(own)} sizes={plain_sizes} scalars={list(scalars)} "
            f"hooks={hook_names} packed={describe(tuple(packed))}"
        )
        return self._run(inputs, sizes, scalars, hooks, packed)


class Recorder:
    """What one run of a program said, in order."""

    def __init__(self, engine: str, off: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self.log: list[tuple[str, list[Any]]] = []
        self.engine = engine
        self.switched_off = 0
        self._off = off

    def say(self, label: str, *values: Any) -> None:
        self.log.append((label, [v.detach().clone() if isinstance(v, Tensor) else v for v in values]))

    def grads(self, *leaves: Tensor, label: str = "grad") -> None:
        for index, leaf in enumerate(leaves):
            self.say(f"{label} {index}", leaf.grad)

    def module(self, module: torch.nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self.say(f"{name} grad", parameter.grad)
        for name, buffer in module.named_buffers():
            self.say(name, buffer)

    def hook(self, label: str, result: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
        """A hook of any kind that logs its arguments, and returns `result` of the last one."""

        def logged(*args: Any) -> Any:
            for arg in args:
                self.say(label, *(arg if isinstance(arg, (tuple, list)) else [arg]))
            return None if result is None else result(args[-1])

        return logged

    @contextlib.contextmanager
    def catch(self, label: str = "error") -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.say(label, describe_error(error))
        else:
            self.say(label, "none")

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Switches the compiler off, for exactly one backward call inside."""
        self.switched_off += 1
        with self._off():
            yield


@dataclasses.dataclass
class Run:
    """What a program did on one engine."""

    name: str
    log: list[tuple[str, list[Any]]] = dataclasses.field(default_factory=list)
    compiled: list[Compiled] = dataclasses.field(default_factory=list)
    calls: list[str] = dataclasses.field(default_factory=list)
    captures: int = 0
    stats: dict[str, Any] = dataclasses.field(default_factory=dict)
    switched_off: int = 0
    transform: Callable[[torch.fx.GraphModule], Any] = lambda module: module

    def compile(self, module: torch.fx.GraphModule) -> Any:
        """The compiler function: keeps the graph and runs it as it is."""
        made = Compiled(module, self.transform(module), self.calls)
        self.compiled.append(made)
        return made

    @property
    def graphs(self) -> list[Graph]:
        return [compiled.graph for compiled in self.compiled]

    def targets(self, graph: int = 0) -> list[str]:
        """The names of the functions that a graph calls, in order."""
        return self.compiled[graph].targets

    def said(self, label: str) -> list[list[Any]]:
        return [values for name, values in self.log if name == label]


@dataclasses.dataclass
class Runs:
    eager: Run
    stock: Run
    retrograd: Run


@contextlib.contextmanager
def stock_compiled_autograd() -> Iterator[None]:
    """torch's own compiled autograd with an empty cache; retrograd is back afterwards."""
    retrograd.uninstall()
    front_end.reset()
    try:
        yield
    finally:
        front_end.reset()
        # After a failed capture torch leaves its compile context entered.
        torch._guards._TLS.compile_context = None
        retrograd.install()


def run(
    name: str,
    program: Program,
    *,
    dynamic: bool | None = None,
    transform: Callable[[torch.fx.GraphModule], Any] = lambda module: module,
    dynamo: bool = False,
) -> Run:
    """Runs a program on one engine: "eager", "stock" or "retrograd"."""
    result = Run(name, transform=transform)
    with contextlib.ExitStack() as stack:
        off: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        if name == "stock":
            stack.enter_context(stock_compiled_autograd())
            off = front_end._disable
            enter = front_end._enable(result.compile, dynamic=bool(dynamic))
        elif name == "retrograd":
            assert retrograd.is_installed()
            retrograd.cache_clear()
            retrograd.reset_stats()
            off = retrograd.disable
            enter = retrograd.enable(backend=result.compile, dynamic=dynamic)
        else:
            enter = retrograd.disable()
        if dynamo:
            torch._dynamo.reset()
        recorder = Recorder(name, off)
        torch.manual_seed(0)
        before = counters["compiled_autograd"]["captures"]
        with enter:
            program(recorder)
        result.captures = counters["compiled_autograd"]["captures"] - before
        result.stats = retrograd.stats()
    result.log = recorder.log
    result.switched_off = recorder.switched_off
    return result


def compare(
    program: Program,
    *,
    captures: int,
    dynamic: bool | None = None,
    transform: Callable[[torch.fx.GraphModule], Any] = lambda module: module,
    against_eager: bool = True,
    dynamo: bool = False,
) -> Runs:
    """Runs `program` three ways and compares; `captures` is how many graphs must be captured.

    Args:
        against_eager: whether stock must say what eager says. Each label's lines are compared in their order, but lines
            of different labels may come in another order, as compiled graphs run their nodes in an order of their own.
        dynamo: whether the program uses torch.compile, which must forget between runs.
    """
    eager = run("eager", program, dynamo=dynamo)
    stock = run("stock", program, dynamic=dynamic, transform=transform, dynamo=dynamo)
    ours = run("retrograd", program, dynamic=dynamic, transform=transform, dynamo=dynamo)
    assert stock.calls, "the program never ran compiled"
    if against_eager:
        check_against_eager(eager, stock)
    check_against_stock(stock, ours)
    assert ours.captures == captures
    check_path(ours, calls=len(stock.calls), captures=captures, dynamo=dynamo)
    return Runs(eager, stock, ours)


def check_against_stock(stock: Run, ours: Run) -> None:
    assert ours.captures == stock.captures
    assert len(ours.graphs) == len(stock.graphs)
    for number, (a, b) in enumerate(zip(stock.graphs, ours.graphs, strict=True)):
        _check_equal(f"captured graph {number}", a, b)
    _check_equal("the compiled calls", stock.calls, ours.calls)
    _check_equal("the log", _lines(stock.log), _lines(ours.log))


def check_path(ours: Run, *, calls: int, captures: int, dynamo: bool = False) -> None:
    """All calls ran compiled, but for those for which the program, or AOTAutograd, switched the compiler off."""
    stats = ours.stats
    assert (stats["calls"]["schedule"], stats["calls"]["callable"]) == (0, calls), stats
    assert stats["calls"]["previous"] == stats["previous_reasons"]["not_enabled"], stats
    assert stats["calls"]["previous"] == ours.switched_off or dynamo, stats
    assert not any(stats["schedule_reasons"].values()), stats
    assert (stats["captures"], stats["misses"], stats["hits"]) == (captures, captures, calls - captures), stats


def check_against_eager(eager: Run, other: Run) -> None:
    want, got = _by_label(eager.log), _by_label(other.log)
    assert want.keys() == got.keys()
    for label in want:
        assert len(want[label]) == len(got[label]), label
        for a, b in zip(want[label], got[label], strict=True):
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                torch.testing.assert_close(b, a, equal_nan=True, msg=lambda text, label=label: f"{label}: {text}")
            else:
                assert describe(a) == describe(b), label


def _by_label(log: list[tuple[str, list[Any]]]) -> dict[str, list[Any]]:
    lines = defaultdict(list)
    for label, values in log:
        lines[label].extend([*values, "(end of line)"])
    return lines


def _lines(log: list[tuple[str, list[Any]]]) -> list[str]:
    return [f"{label}: {describe(values)}" for label, values in log]


def _check_equal(what: str, stock: list[str], ours: list[str]) -> None:
    if stock != ours:
        lines = difflib.unified_diff(stock, ours, "stock", "retrograd", lineterm="", n=1)
        raise AssertionError(f"{what}:\n" + "\n".join(lines))
