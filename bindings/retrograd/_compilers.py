"""Compiler functions: which two are the same, and the numbered objects by which the engine knows them.

What a compiler function made of a graph is kept for as long as the function is used. But programs make their compiler
function anew all the time: a lambda inside a loop, `functools.partial(compile, mode=...)`, and torch.compile itself,
which makes one at every call under `torch._dynamo.config.compiled_autograd`. So two functions count as the same when
they were made by the same code from the same things.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from retrograd._load import C as _C

_lock = threading.RLock()  # comparing keys may run code, finalizers among it, that comes here again

# Functions seen before, by identity: what a closure refers to may change, and it is the same function still. A function
# and the number of its compiler, under the function's id() and whether it is a factory, which is called with nothing,
# or a compiler function in torch's sense. Not a WeakKeyDictionary, which would ask the functions what they equal.
# Entries are taken out by `_forget`, which needs no lock: every access is one step of a dict, and none iterates.
_known: dict[tuple[int, bool], tuple[weakref.ref[Any], int]] = {}

_PLAIN = (int, bool, str, bytes, type(None))
# Of one key; what comes after them, or lies deeper, counts by identity.
_MAX_PARTS = 256
_MAX_DEPTH = 32


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
        self._depth = 0

    def of(self, value: Any) -> Any:
        self._parts += 1
        # Also ends the way through a function whose closure refers to itself.
        if self._parts > _MAX_PARTS or self._depth >= _MAX_DEPTH:
            return _Same(value)
        self._depth += 1
        try:
            return self._of(value)
        finally:
            self._depth -= 1

    def _of(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return (type(value), value)
        if type(value) in (float, complex):  # by their bits: 0.0 is not -0.0, and nan is nan
            return (type(value), struct.pack("dd", value.real, value.imag))
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


class _Maker:
    """What the engine knows a compiler function by: the key that others are compared with, and the factory it calls.

    The key says what the function was made of when it was first seen. A variable in its closure may have moved on by
    the time a graph is captured: then what is compiled is no longer what the key says.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        self.factory = factory
        self._key = key_of(factory)
        self._hash = hash(self._key)
        self._for_others = True

    def __call__(self) -> Any:
        if not self.is_as_it_was():
            self._for_others = False
        return self.factory()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Maker) and self._for_others and other._for_others and self._key == other._key

    def is_as_it_was(self) -> bool:
        """Whether the function still is what the key says."""
        return bool(key_of(self.factory) == self._key)


def intern(factory: Callable[[], Any]) -> Any:
    """The engine's object for `factory`, whose calls make what captures one graph.

    The object keeps the compiler function's graphs alive, not the other way round: hold it as long as the function is
    in use.
    """
    with _lock:
        known = _known.get(_place(factory))
        if known is not None and known[0]() is _function_in(factory):
            compiler = _C.find_compiler(known[1])
            if compiler is not None:
                return compiler
        mine = _Maker(factory)
        compiler = _C.intern_compiler(mine, mine)
        found = compiler.factory
        if found is not mine and not found.is_as_it_was():
            # Its graphs are what the key says, and this function's too. From now on this one makes them; the other
            # is looked at anew when it is used again.
            _known.pop(_place(found.factory), None)
            found.factory = factory
        _remember(factory, compiler.number)
        return compiler


def _remember(factory: Callable[[], Any], number: int) -> None:
    place = _place(factory)
    with contextlib.suppress(TypeError):  # no weak references
        _known[place] = (weakref.ref(_function_in(factory), functools.partial(_forget, place)), number)


def _forget(place: tuple[int, bool], _: Any) -> None:
    """Called when a function goes, in any thread at any point, also in the middle of intern().

    The object still has its address then, so the entry cannot be another's yet; and the weak reference of an entry that
    was replaced is gone, and calls nothing.
    """
    _known.pop(place, None)


def _function_in(factory: Any) -> Any:
    """The function whose identity counts: torch's front end is bound to it anew at every use."""
    if type(factory) is functools.partial and len(factory.args) == 1 and not factory.keywords:
        front_end = sys.modules.get("torch._dynamo.compiled_autograd")
        if front_end is not None and factory.func is getattr(front_end, "AutogradCompilerInstance", None):
            return factory.args[0]
    return factory


def _place(factory: Any) -> tuple[int, bool]:
    function = _function_in(factory)
    return (id(function), function is factory)


def from_function(compiler_fn: Callable[..., Any]) -> Any:
    """The engine's object for a compiler function in torch's sense: takes a GraphModule, returns what runs."""
    from torch._dynamo.compiled_autograd import AutogradCompilerInstance

    return intern(functools.partial(AutogradCompilerInstance, compiler_fn))


def _after_fork_in_child() -> None:
    """Another thread may have held the lock. What it guards is whole whenever its holder lets other threads run."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)
