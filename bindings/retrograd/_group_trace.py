"""Traces recorded groups to ATen graphs, and says what must hold of the sizes that a graph leaves open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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

from retrograd._load import C as _C

# Graphs with more operators than this run by their nodes: compiling them takes minutes.
_MAX_OPERATORS = 2000


class NotTraceable(Exception):  # noqa: N818
    """The group runs by its nodes. `member`: the node that no graph can hold; -1: the graph as a whole."""

    def __init__(self, why: str, member: int) -> None:
        super().__init__(why)
        self.member = member


@dataclass
class Traced:
    graph: torch.fx.GraphModule
    inputs: list[int]  # which inputs of the group the graph takes
    outputs: list[int]  # which of its results each output of the group is, or -1
    extra: list[int]  # places of numbers that it takes as the second dimension of empty tensors, after its inputs
    alike: list[tuple[int, int]]  # pairs of places whose numbers must be equal


def trace(recording: Any) -> Traced:
    """The group's ATen graph. Numbers that the recording leaves open are symbols in it, one for each value."""
    numbers: list[int] = recording.numbers
    is_open: list[bool] = recording.open
    shape_env = ShapeEnv() if is_open else None
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    tracer = PythonKeyTracer()
    tracer.root = torch.nn.Module()
    tracer.graph = torch.fx.Graph(tracer_cls=PythonKeyTracer)
    tracer.tensor_attrs = {}
    placeholders: list[torch.fx.Node] = []
    taken: list[int] = []  # by placeholder: the input, or the place of an extra number after all inputs

    def add_placeholder(name: str, example: torch.Tensor, dims: list[DimDynamic], is_taken: int) -> torch.Tensor:
        # from_tensor() reads the value of a tensor without dimensions, to make a symbol of it; there is no value here.
        if shape_env is None or example.dim() == 0:
            with mode:
                fake = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)
        else:
            fake = mode.from_tensor(
                example, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims), source=ConstantSource(name)
            )
        fake.requires_grad_(example.requires_grad)  # some nodes look at it
        proxy = tracer.create_proxy("placeholder", name, (), {})
        proxy.node.meta["val"] = fake
        track_tensor_tree(fake, proxy, constant=None, tracer=tracer)
        placeholders.append(proxy.node)
        taken.append(is_taken)
        return fake

    fakes: list[torch.Tensor | None] = []
    first_place: dict[int, int] = {}  # by value of an open size: where it was met first
    symbol_of: dict[int, Any] = {}  # by value of an open size
    alike: list[tuple[int, int]] = []
    of_inputs: set[int] = set()
    given = recording.inputs
    with torch.no_grad():
        for i, (tensor, place) in enumerate(zip(given, recording.input_places, strict=True)):
            if tensor is None:
                fakes.append(None)
                continue
            open_dims = [d for d in range(tensor.dim()) if is_open and is_open[place + d]]
            dims = [DimDynamic.DUCK if d in open_dims else DimDynamic.STATIC for d in range(tensor.dim())]
            fake = add_placeholder(f"in{i}", tensor, dims, i)
            fakes.append(fake)
            of_inputs.update(range(place, place + 2 * tensor.dim()))
            for d in open_dims:
                size = tensor.shape[d]
                symbol_of.setdefault(size, fake.shape[d])
                alike.append((first_place.setdefault(size, place + d), place + d))
        symbols: dict[int, Any] = {}
        for place in range(len(is_open)):
            if not is_open[place] or place in of_inputs:
                continue
            size = numbers[place]
            if size not in symbol_of:
                example = torch.empty(0, size)
                dims = [DimDynamic.STATIC, DimDynamic.DUCK]
                symbol_of[size] = add_placeholder(f"size{place}", example, dims, len(given) + place).shape[1]
            alike.append((first_place.setdefault(size, place), place))
            symbols[place] = symbol_of[size]
        with mode, ProxyTorchDispatchMode(tracer, "fake" if shape_env is None else "symbolic"):
            results, failed = recording.trace(fakes, symbols)
    if failed is not None:
        # What cannot be traced with open sizes may well be with fixed ones.
        raise NotTraceable(f"{results}", failed if shape_env is None else -1)
    nodes = []
    outputs = []
    for result in results:
        outputs.append(-1 if result is None else len(nodes))
        if result is not None:
            nodes.append(fetch_object_proxy(tracer, result).proxy.node)
    tracer.graph.output(tuple(nodes))
    graph = torch.fx.GraphModule(tracer.root, tracer.graph)
    graph.graph.eliminate_dead_code()
    inputs = []
    extra = []
    for node, i in zip(placeholders, taken, strict=True):
        if not node.users and not _is_only_place_of_a_symbol(node, placeholders):
            graph.graph.erase_node(node)
        elif i < len(given):
            inputs.append(i)
        else:
            extra.append(i - len(given))
    graph.recompile()
    operators = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    if not operators:
        raise NotTraceable("there is nothing to compute", -1)
    if len(operators) > _MAX_OPERATORS:
        raise NotTraceable(f"{len(operators)} operators are too many", -1)
    for operator in operators:
        if torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()):
            raise NotTraceable(f"{operator} draws random numbers", -1)
    return Traced(graph, inputs, outputs, extra, [pair for pair in alike if pair[0] != pair[1]])


def _is_only_place_of_a_symbol(node: torch.fx.Node, placeholders: list[torch.fx.Node]) -> bool:
    """Whether a symbol can be read from this input only, so that it must stay though nothing computes with it."""
    for size in node.meta["val"].shape:
        if not isinstance(size, torch.SymInt):
            continue
        name = str(size)
        others = (n for n in placeholders if n is not node and (n.users or n.name < node.name))
        if not any(name == str(other) for n in others for other in n.meta["val"].shape):
            return True
    return False


_OPERATORS = {
    "add": 3, "mul": 4, "floordiv": 5, "mod": 6, "min": 7, "max": 8, "eq": 9, "ne": 10, "lt": 11, "le": 12, "and": 13,
    "or": 14, "not": 15,
}  # fmt: skip


def _program(tree: Any) -> list[int]:
    """A guard's tree (see _worker.export_guards) as a program of engine/shape_guards.h."""
    if isinstance(tree, int):
        return [0, tree]
    operator, *operands = tree
    if operator == "sym":
        return [1, operands[0]]
    if operator == "number":
        return [2, operands[0]]
    program = _program(operands[0])
    if operator == "not":
        return [*program, _OPERATORS["not"], 0]
    for operand in operands[1:]:
        program += [*_program(operand), _OPERATORS[operator], 0]
    return program


def guards_of(recording: Any, traced: Traced, exported: dict[str, Any] | None) -> Any:
    """What must hold of the group's numbers. `exported`: what lowering said of the graph's inputs; None: nothing."""
    if not recording.open:
        return _C.ShapeGuards([], [], [])
    conditions: list[Any] = [["eq", ["number", a], ["number", b]] for a, b in traced.alike]
    symbols: list[int] = []
    if exported is not None:
        places = [recording.input_places[i] for i in traced.inputs]
        rank = [recording.inputs[i].dim() for i in traced.inputs]
        for i, dim in exported["symbols"]:
            symbols.append(places[i] + dim if i < len(places) else traced.extra[i - len(places)])
        for place, dims, trees in zip(places, rank, exported["inputs"], strict=False):
            for d in range(dims):
                if recording.open[place + d]:
                    conditions.append(["eq", ["number", place + d], trees["size"][d]])
                if recording.open[place + dims + d]:
                    conditions.append(["eq", ["number", place + dims + d], trees["stride"][d]])
        conditions += exported["conditions"]
    return _C.ShapeGuards(symbols, [_program(condition) for condition in conditions], traced.extra)
