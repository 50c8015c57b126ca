"""Which compiler functions count as the same: those that would make the same thing of a graph, and no others."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle import run_threads
from test_callable_threads import Run, eager_gradient, gradient, switched_on, tallying
from torch._dynamo import compiled_autograd as front_end
from torch.fx import GraphModule

import retrograd
from retrograd import _compilers

made: list[Any] = []  # who compiled, in order


@pytest.fixture(autouse=True)
def nothing_made() -> None:
    made.clear()
    retrograd.cache_clear()


def use(compiler: Callable[[GraphModule], Run], kind: int = 0) -> list[Any]:
    """Runs a graph under the compiler function; who compiled it, if anyone."""
    before = len(made)
    with retrograd.enable(backend=compiler), tallying() as tally:
        assert gradient(kind) == eager_gradient(kind)
    assert tally.callable == 1
    return made[before:]


def are_same(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    first, second = _compilers.from_function(one), _compilers.from_function(other)
    return bool(first.number == second.number)


def noting(value: Any) -> Callable[[GraphModule], Run]:
    def compile_(graph: GraphModule) -> Run:
        made.append(value)
        return graph

    return compile_


def in_a_loop(*values: Any) -> Iterator[Callable[[GraphModule], Run]]:
    """Functions that share a variable, which is each one's own value only until the next one is taken."""
    for value in values:

        def compile_(graph: GraphModule) -> Run:
            made.append(value)
            return graph

        yield compile_


# --- Variables that move on ---


def test_a_variable_that_moved_on_is_not_what_an_equal_function_compiles_with() -> None:
    loop = in_a_loop("a", "b")
    old = next(loop)
    assert use(old) == ["a"]
    next(loop)
    new = next(in_a_loop("a"))
    assert use(new) == [], "made by the same code from the same things"
    assert use(new, 1) == ["a"], "and this is what it is made of"


def test_what_was_compiled_after_a_variable_moved_on_is_not_shared() -> None:
    loop = in_a_loop("a", "b")
    old = next(loop)
    assert use(old) == ["a"]
    next(loop)
    assert use(old) == [], "the same function still"
    assert use(old, 1) == ["b"]
    new = next(in_a_loop("a"))
    assert use(new, 1) == ["a"]
    assert use(old, 1) == [] and use(new, 1) == []


def test_a_function_whose_variable_moved_on_is_looked_at_anew() -> None:
    """Once another function took over what it was, it is what it is now."""
    loop = in_a_loop("a", "b")
    old = next(loop)
    assert use(old) == ["a"]
    new_b = next(loop)
    new_a = next(in_a_loop("a"))
    assert use(new_a) == [] and use(new_b) == ["b"]
    assert use(old) == []
    assert use(old, 1) == ["b"] and use(new_a, 1) == ["a"]


def test_functions_of_a_loop_are_found_again_in_the_next_one() -> None:
    for turn in range(3):
        for value, compiler in zip("ab", in_a_loop("a", "b"), strict=True):
            assert use(compiler) == ([value] if turn == 0 else [])


def test_a_function_that_counts_is_one_function() -> None:
    count = 0

    def compile_(graph: GraphModule) -> Run:
        nonlocal count
        count += 1
        return graph

    for _ in range(2):
        for kind in range(4):
            use(compile_, kind)
    assert count == 4


# --- Objects ---


class Says:
    """A compiler function that says what it is equal to."""

    def __init__(self, value: Any, answer: bool | Exception = True) -> None:
        self.value = value
        self.answer = answer

    def __eq__(self, other: object) -> bool:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def __hash__(self) -> int:
        return 1

    def __call__(self, graph: GraphModule) -> Run:
        made.append(self.value)
        return graph


@pytest.mark.parametrize("answer", [True, False, LookupError("mine")])
def test_objects_are_what_they_are_and_not_what_they_say(answer: bool | Exception) -> None:
    one, other = Says("one", answer), Says("other", answer)
    for turn in range(2):
        assert use(one) == (["one"] if turn == 0 else [])
        assert use(other) == (["other"] if turn == 0 else [])


def test_an_object_in_the_place_of_one_that_is_gone_is_another() -> None:
    """It gets the address, and with it the id()."""
    places = set()
    for turn in range(40):  # more than are kept alive
        compiler = Says(turn)
        places.add(id(compiler))
        assert use(compiler) == [turn]
    del compiler
    gc.collect()
    known = len(_compilers._known)
    for turn in range(40):
        compiler = Says(turn)
        places.add(id(compiler))
        assert use(compiler) == [turn]
    assert len(_compilers._known) <= known + 1, "what is known of functions goes with them"


def test_a_factory_is_not_the_compiler_function_of_the_same_name() -> None:
    class AutogradCompilerInstance(front_end.AutogradCompilerInstance):
        def end_capture(self, *args: Any, **kwargs: Any) -> Any:
            made.append("own front end")
            return super().end_capture(*args, **kwargs)

    compiler = noting("compiled")
    assert use(compiler) == ["compiled"]
    with switched_on(functools.partial(AutogradCompilerInstance, compiler), False):
        gradient()
    assert made == ["compiled", "own front end", "compiled"]


def test_an_object_may_be_a_factory_and_a_compiler_function() -> None:
    def either(graph: GraphModule | None = None) -> Any:
        made.append("factory" if graph is None else "compiler function")
        return front_end.AutogradCompilerInstance(noting("compiled")) if graph is None else graph

    with switched_on(either, False):
        gradient()
    assert made == ["factory", "compiled"]
    assert use(either) == ["compiler function"]


# --- Values ---


NAN = float("nan")
DIFFERENT = [(0.0, -0.0), (1, True), (1, 1.0), (0j, -0j), (0j, complex(0.0, -0.0)), ("1", b"1"), ((0.0,), (-0.0,))]
EQUAL = [(1.5, 1.5), (NAN, float("nan")), (complex(NAN, 1), complex(float("nan"), 1)), ((1, "a"), (1, "a"))]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_values_that_differ(one: Any, other: Any) -> None:
    assert not are_same(noting(one), noting(other))
    assert use(noting(one)) == [one]
    (got,) = use(noting(other))
    assert repr(got) == repr(other)


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_values_that_are_equal(one: Any, other: Any) -> None:
    assert are_same(noting(one), noting(other))


def nested(depth: int) -> tuple[Any, ...]:
    value: tuple[Any, ...] = ()
    for _ in range(depth):
        value = (value,)
    return value


def at_depth(depth: int, function: Callable[[], None]) -> None:
    at_depth(depth - 1, function) if depth else function()


def test_values_of_any_depth() -> None:
    assert are_same(noting(nested(10)), noting(nested(10)))
    assert not are_same(noting(nested(10)), noting(nested(11)))
    deep = nested(100_000)
    assert are_same(noting(deep), noting(deep))
    at_depth(500, lambda: pytest.fail("differ") if not are_same(noting(deep), noting(deep)) else None)


def test_values_of_many_parts() -> None:
    value: tuple[Any, ...] = ()
    for _ in range(100):
        value = (value, value)
    assert are_same(noting(value), noting(value))


def test_a_function_that_refers_to_itself() -> None:
    def make() -> Callable[[GraphModule], Run]:
        def compile_(graph: GraphModule) -> Run:
            made.append(compile_)
            return graph

        return compile_

    compiler = make()
    assert use(compiler) == [compiler] and use(compiler) == []
    other = make()
    assert use(other) == [other]


# --- Whatever else a function is made of ---


class Has:
    def compile_(self, graph: GraphModule) -> Run:
        return graph


def method_of(value: Any) -> Callable[..., Any]:
    return Has().compile_


def with_default(value: Any) -> Callable[..., Any]:
    def compile_(graph: GraphModule, value: Any = value) -> Run:
        made.append(value)
        return graph

    return compile_


def with_keyword(value: Any) -> Callable[..., Any]:
    def compile_(graph: GraphModule, *, value: Any = value) -> Run:
        made.append(value)
        return graph

    return compile_


def with_attribute(value: Any) -> Callable[..., Any]:
    def compile_(graph: GraphModule) -> Run:
        return graph

    compile_.value = value  # type: ignore[attr-defined]
    return compile_


def with_global(value: Any) -> Callable[..., Any]:
    def compile_(graph: GraphModule) -> Run:
        return graph

    return types.FunctionType(compile_.__code__, {"value": value})


def with_empty_variable(value: Any) -> Callable[..., Any]:
    def compile_(graph: GraphModule) -> Run:
        return graph if value else later  # type: ignore[has-type]

    if value is None:
        later = None
    return compile_


def with_torch_compile(**options: Any) -> Callable[..., Any]:
    """What torch.compile hands to compiled autograd."""
    return torch._dynamo.optimize("eager", **options)


def compile_with(graph: GraphModule, value: Any = None) -> Run:
    made.append(value)
    return graph


MADE_OF: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "method": (method_of, [1, 2]),
    "default": (with_default, [1, 2]),
    "keyword": (with_keyword, [1, 2]),
    "attribute": (with_attribute, [1, 2]),
    "globals": (with_global, [1, 2]),
    "partial": (lambda value: functools.partial(compile_with, value=value), [1, 2]),
    "empty variable": (with_empty_variable, [1, 1]),
    "fullgraph": (lambda value: with_torch_compile(nopython=value), [True, False]),
    "dynamic": (lambda value: with_torch_compile(dynamic=value), [True, False]),
    "backend": (lambda value: torch._dynamo.optimize(value), ["eager", "aot_eager"]),
}
MADE_ANEW = ["default", "keyword", "partial", "fullgraph", "dynamic", "backend"]


@pytest.mark.parametrize("kind", MADE_OF)
def test_functions_made_of_different_things(kind: str) -> None:
    make, (one, other) = MADE_OF[kind]
    assert not are_same(make(one), make(other))


@pytest.mark.parametrize("kind", MADE_ANEW)
def test_functions_made_anew_of_the_same_things(kind: str) -> None:
    make, values = MADE_OF[kind]
    for value in values:
        assert are_same(make(value), make(value))


def test_threads_that_make_the_same_function_at_a_time() -> None:
    """There is something to compare with, that is not equal any more: comparing lets other threads in."""
    numbers: list[int] = []

    def work(value: int, found: list[Any]) -> None:
        found.append(_compilers.from_function(next(in_a_loop(value))))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for value in range(30):
            loop = in_a_loop(value, -1)
            old, found = next(loop), list[Any]()
            use(old)
            next(loop)
            use(old, 1)
            run_threads([lambda: work(value, found)] * 8)
            numbers.append(len({compiler.number for compiler in found}))
    finally:
        sys.setswitchinterval(interval)
    assert numbers == [1] * 30
