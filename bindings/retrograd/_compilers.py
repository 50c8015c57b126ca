"""Compiler functions: which two are the same, and the numbered objects by which the engine knows them.

What a compiler function made of a graph is kept for as long as the function is used. But programs make their compiler
function anew all the time: a lambda inside a loop, `functools.partial(compile, mode=...)`, and torch.compile itself, which
makes one at every call under `torch._dynamo.config.compiled_autograd`. So two functions count as the same when they were
made by the same code from the same things.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from retrograd._load import C as _C

_lock = threading.Lock()
# Functions seen before, by identity: what a closure refers to may change, and it is the same function still.
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_MAX_DEPTH = 8


class _Same:
    """Equal to itself only. Holds the object, so that its identity is not given to another."""

    __slots__ = ("object",)

    def __init__(self, object_: Any) -> None:
        self.object = object_

    def __hash__(self) -> int:
        return id(self.object)

    def __eq__(self, other: object) -> bool:
        return type(other) is _Same and other.object is self.object


class _Equal:
    """For objects that say themselves what they are equal to, but have no hash."""

    __slots__ = ("object",)

    def __init__(self, object_: Any) -> None:
        self.object = object_

    def __hash__(self) -> int:
        return hash(type(self.object))

    def __eq__(self, other: object) -> bool:
        return type(other) is _Equal and type(other.object) is type(self.object) and bool(other.object == self.object)


def key_of(value: Any, depth: int = 0) -> Any:
    """A hashable object that is equal for two compiler functions, or parts of them, that count as the same."""
    if depth > _MAX_DEPTH:
        return _Same(value)
    deeper = depth + 1
    if type(value) in _PLAIN:
        return (type(value), value)
    if type(value) in (tuple, list):
        return (type(value), tuple(key_of(item, deeper) for item in value)) if type(value) is tuple else _Same(value)
    if isinstance(value, types.FunctionType):
        return _function_key(value, deeper)
    if isinstance(value, types.MethodType):
        return (types.MethodType, key_of(value.__func__, deeper), _Same(value.__self__))
    if type(value) is functools.partial:
        keywords = tuple((name, key_of(item, deeper)) for name, item in sorted(value.keywords.items()))
        return (
            functools.partial,
            key_of(value.func, deeper),
            tuple(key_of(item, deeper) for item in value.args),
            keywords,
        )
    if _is_optimize_context(value):
        return _optimize_context_key(value, deeper)
    if type(value).__eq__ is not object.__eq__ and type(value).__hash__ is None:
        return _Equal(value) if type(value).__module__.startswith("torch.") else _Same(value)
    return _Same(value)


def _function_key(function: types.FunctionType, depth: int) -> Any:
    if vars(function):  # carries state of its own
        return _Same(function)
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(key_of(cell.cell_contents, depth))
        except ValueError:  # empty
            cells.append(_Same(cell))
    defaults = tuple(key_of(value, depth) for value in function.__defaults__ or ())
    keywords = tuple((name, key_of(value, depth)) for name, value in sorted((function.__kwdefaults__ or {}).items()))
    return (
        types.FunctionType,
        _Same(function.__code__),
        _Same(function.__globals__),
        tuple(cells),
        defaults,
        keywords,
    )


def _is_optimize_context(value: Any) -> bool:
    """Whether it is what torch.compile makes inside, told without importing Dynamo."""
    cls = type(value)
    return cls.__module__ == "torch._dynamo.eval_frame" and cls.__name__ == "OptimizeContext"


def _optimize_context_key(context: Any, depth: int) -> Any:
    from torch._dynamo.eval_frame import innermost_backend

    return (
        type(context),
        key_of(innermost_backend(context.callback), depth),
        context.fullgraph,
        context.error_on_graph_break,
        context.export,
        context._dynamic,
        repr(context.compiler_config),
    )


def intern(factory: Callable[[], Any]) -> Any:
    """The engine's object for `factory`, whose calls make what captures one graph.

    The object keeps the compiler function's graphs alive, not the other way round: hold it as long as the function is in
    use.
    """
    with _lock:
        number = None
        try:
            number = _numbers.get(_identity(factory))
        except TypeError:  # no weak references, or no hash
            pass
        compiler = _C.find_compiler(number) if number is not None else None
        if compiler is None:
            compiler = _C.intern_compiler(key_of(factory), factory)
            try:
                _numbers[_identity(factory)] = compiler.number
            except TypeError:
                pass
        return compiler


def _identity(factory: Any) -> Any:
    """The function whose identity counts: torch's front end is bound to it anew at every use."""
    if type(factory) is functools.partial and len(factory.args) == 1 and not factory.keywords:
        if getattr(factory.func, "__name__", "") == "AutogradCompilerInstance":
            return factory.args[0]
    return factory


def from_function(compiler_fn: Callable[..., Any]) -> Any:
    """The engine's object for a compiler function in torch's sense: takes a GraphModule, returns what runs."""
    from torch._dynamo.compiled_autograd import AutogradCompilerInstance

    return intern(functools.partial(AutogradCompilerInstance, compiler_fn))
