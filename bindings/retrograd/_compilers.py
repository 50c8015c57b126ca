"""Compiler functions: which two are the same, and the numbered objects by which the engine knows them.

What a compiler function made of a graph is kept for as long as the function is used. But programs make their compiler
function anew all the time: a lambda inside a loop, `functools.partial(compile, mode=...)`, and torch.compile itself,
which makes one at every call under `torch._dynamo.config.compiled_autograd`. So two functions count as the same when
they were made by the same code from the same things.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from retrograd._load import C as _C

_lock = threading.RLock()  # comparing keys may run code, finalizers among it, that comes here again
# Functions seen before, by identity: what a closure refers to may change, and it is the same function still.
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_MAX_PARTS = 256  # of one key; what comes after them counts by identity


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


def key_of(value: Any) -> Any:
    """A hashable object that is equal for two compiler functions that count as the same."""
    return _Keys().of(value)


class _Keys:
    def __init__(self) -> None:
        self._parts = 0

    def of(self, value: Any) -> Any:
        self._parts += 1
        if self._parts > _MAX_PARTS:  # also ends the way through a function whose closure refers to itself
            return _Same(value)
        if type(value) in _PLAIN:
            return (type(value), value)
        if type(value) is tuple:
            return (tuple, self._each(value))
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, types.MethodType):
            return (types.MethodType, self.of(value.__func__), _Same(value.__self__))
        if type(value) is functools.partial:
            return (functools.partial, self.of(value.func), self._each(value.args), self._named(value.keywords))
        if _is_optimize_context(value):
            return self._of_optimize_context(value)
        says_what_is_equal = type(value).__eq__ is not object.__eq__ and type(value).__hash__ is None
        if says_what_is_equal and type(value).__module__.partition(".")[0] == "torch":
            return _Equal(value)
        return _Same(value)

    def _each(self, values: Iterable[Any]) -> Any:
        return tuple(self.of(value) for value in values)

    def _named(self, values: Mapping[str, Any] | None) -> Any:
        return tuple((name, self.of(value)) for name, value in sorted((values or {}).items()))

    def _of_function(self, function: types.FunctionType) -> Any:
        if vars(function):  # carries state of its own
            return _Same(function)
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(self.of(cell.cell_contents))
            except ValueError:  # empty
                cells.append(_Same(cell))
        return (
            types.FunctionType,
            _Same(function.__code__),
            _Same(function.__globals__),
            tuple(cells),
            self._each(function.__defaults__ or ()),
            self._named(function.__kwdefaults__),
        )

    def _of_optimize_context(self, context: Any) -> Any:
        from torch._dynamo.eval_frame import innermost_backend

        return (
            type(context),
            self.of(innermost_backend(context.callback)),
            context.fullgraph,
            context.error_on_graph_break,
            context.export,
            context._dynamic,
            repr(context.compiler_config),
        )


def _is_optimize_context(value: Any) -> bool:
    """Whether it is what torch.compile makes inside, told without importing Dynamo."""
    cls = type(value)
    return cls.__module__ == "torch._dynamo.eval_frame" and cls.__name__ == "OptimizeContext"


def intern(factory: Callable[[], Any]) -> Any:
    """The engine's object for `factory`, whose calls make what captures one graph.

    The object keeps the compiler function's graphs alive, not the other way round: hold it as long as the function is
    in use.
    """
    function = _function_in(factory)
    with _lock:
        number = None
        with contextlib.suppress(TypeError):  # no weak references, or no hash
            number = _numbers.get(function)
        compiler = _C.find_compiler(number) if number is not None else None
        if compiler is None:
            compiler = _C.intern_compiler(key_of(factory), factory)
            with contextlib.suppress(TypeError):
                _numbers[function] = compiler.number
        return compiler


def _function_in(factory: Any) -> Any:
    """The function whose identity counts: torch's front end is bound to it anew at every use."""
    is_partial = type(factory) is functools.partial and len(factory.args) == 1 and not factory.keywords
    if is_partial and getattr(factory.func, "__name__", "") == "AutogradCompilerInstance":
        return factory.args[0]
    return factory


def from_function(compiler_fn: Callable[..., Any]) -> Any:
    """The engine's object for a compiler function in torch's sense: takes a GraphModule, returns what runs."""
    from torch._dynamo.compiled_autograd import AutogradCompilerInstance

    return intern(functools.partial(AutogradCompilerInstance, compiler_fn))
