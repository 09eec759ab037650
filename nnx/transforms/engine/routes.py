"""Routes: how a function reaches a Module that is not among its arguments.

The search starts at functions, and at the classes of the Modules that are passed to them, whose methods they may call.
It follows what a person would: closure cells, defaults, the globals that the code names, partials and bound methods,
attributes of the user's objects and classes, the methods and properties of those, lists, tuples and dicts. Of a Module,
only the classes in its graph are searched, because all its arrays are known. The search does not enter libraries. A
route is a value rather than a closure, so it keeps nothing alive; following it again later shows whether the same names
still lead to the same Module.
"""

import collections
import contextvars
import functools
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import jax

from nnx.core.module.info import ModuleBase
from nnx.core.statics.reach import (
    HOLD_NOTHING,
    NOT_THERE,
    Step,
    attribute,
    closure_of,
    code_names,
    globals_of,
    held_by,
)
from nnx.core.structure.flat import Flat, flat_of
from nnx.transforms.engine.function_keys import is_of_library

MAX_VISITED = 10_000  # objects; a trainer may hold a whole data set

# Built-in types whose contents are the user's.
_ALWAYS_ENTERED = (types.MethodType, functools.partial, dict, types.MappingProxyType, list, tuple, collections.deque)
_METHODS = (types.FunctionType, property, functools.cached_property, classmethod, staticmethod)
# What a class has for its methods and slots: the former are looked up once, the latter are found with the object.
_LEAD_NOWHERE = (*_METHODS, types.MemberDescriptorType, types.GetSetDescriptorType)
_LIBRARIES = {"builtins", "functools", "jax", "jaxlib", "nnx", "numpy", "optax", "typing"}


class Route(NamedTuple):
    """The steps from one of several functions to a value."""

    start: int
    steps: tuple[Step, ...]

    def follow(self, functions: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Returns what is at the end now, or None if the route has ended before, and the lists and dicts on the way."""
        value, containers = functions[self.start], []
        try:
            for step in self.steps:
                if step.kind == "item" and type(value) in (list, dict):  # not their subclasses: no user code runs here
                    containers.append(value)
                value = step.take(value)
        except NOT_THERE:
            return None, []
        return value, containers


Found = tuple[tuple[Step, ...], Any]
"""A value, with the steps to it."""

_Members = dict[type, list[str]]  # the names of what the objects of a class have through it, without methods


def reached(functions: Sequence[Any]) -> Iterator[tuple[Any, Route]]:
    """Yields the Modules and arrays that functions reach by name, a Module once for every route to it."""
    queue = collections.deque([(function, Route(i, ())) for i, function in enumerate(functions)])
    seen: set[int] = set()
    members: _Members = {}
    while queue and len(seen) < MAX_VISITED:
        value, route = queue.popleft()
        if isinstance(value, jax.Array):
            yield value, route
        elif isinstance(value, ModuleBase):
            yield value, route
            for cls in classes_of(flat_of(value)):
                queue.append((cls, Route(route.start, (*route.steps, Step("class", weakref.ref(cls))))))
        elif id(value) not in seen:
            seen.add(id(value))
            for steps, item in islice(_reached_from(value, members), MAX_VISITED):
                if type(item) not in HOLD_NOTHING:
                    queue.append((item, Route(route.start, (*route.steps, *steps))))


def named(functions: Sequence[Any]) -> Iterator[tuple[Any, Route]]:
    """Yields the Modules that functions name themselves, as `model` or `self.model`, and none that a helper names."""
    queue = collections.deque([(function, Route(i, ())) for i, function in enumerate(functions)])
    names: set[str] = set()
    seen: set[int] = set()
    members: _Members = {}
    while queue and len(seen) < MAX_VISITED:
        value, route = queue.popleft()
        if isinstance(value, ModuleBase):
            yield value, route
        elif id(value) not in seen and not isinstance(value, type):
            seen.add(id(value))
            if isinstance(value, types.FunctionType) and not is_of_library(value):
                names.update(code_names(value.__code__))
            for steps, item in islice(_reached_from(value, members), MAX_VISITED):
                step = steps[-1]
                is_named = step.kind != "attribute" or step.name in names
                is_helper = isinstance(item, types.FunctionType) and step.kind != "function"
                if is_named and not is_helper and type(item) not in HOLD_NOTHING:
                    queue.append((item, Route(route.start, (*route.steps, *steps))))


def classes_of(flat: Flat | None) -> list[type]:
    """Returns the user's classes of the Modules in a flat form."""
    modules = () if flat is None else [weak() for weak in flat.modules]
    return [cls for cls in dict.fromkeys(map(type, modules)) if not _is_library(cls)]


def _reached_from(value: Any, members: _Members) -> Iterator[Found]:
    """Yields what the user's code reaches directly from a value; from a library's object, only what that wraps."""
    if isinstance(value, types.FunctionType):
        yield from _wrapped_by(value) if is_of_library(value) else _reached_from_function(value)
    elif isinstance(value, contextvars.ContextVar):
        yield (Step("context"),), value.get(None)
    elif isinstance(value, _ALWAYS_ENTERED):
        yield from _held_by(value)
    elif isinstance(value, (property, functools.cached_property)):
        yield from _attributes(value, ("fget" if isinstance(value, property) else "func",))
    elif _is_library(cls := value if isinstance(value, type) else type(value)):
        yield from _wrapped_by(value)
    else:
        yield from _held_by(value)
        yield from _attributes(value, _names_to_look_up(cls, members))


def _names_to_look_up(cls: type, members: _Members) -> Iterator[str]:
    """Yields the names of what an object has through its class; those of methods only for the first of its objects."""
    if cls not in members:
        own = [item for parent in cls.__mro__ if not _is_library(parent) for item in vars(parent).items()]
        yield from (name for name, member in own if isinstance(member, _METHODS))
        members[cls] = [
            name for name, member in own if not (name.startswith("__") or isinstance(member, _LEAD_NOWHERE))
        ]
    yield from members[cls]


def _is_library(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in _LIBRARIES


def _held_by(value: Any) -> Iterator[Found]:
    """Yields what a value holds, by steps that can be taken again later and keep nothing alive."""
    for step, item in held_by(value):
        if step.kind not in ("key", "element") and _is_plain(step.name):
            yield (step,), item


def _is_plain(key: Any) -> bool:
    return type(key) in HOLD_NOTHING or (type(key) is tuple and all(map(_is_plain, key)))


def _wrapped_by(value: Any) -> Iterator[Found]:
    return _attributes(value, ("__wrapped__", "fwd", "bwd", "jvp"))  # the last three are rules of a custom derivative


def _reached_from_function(function: types.FunctionType) -> Iterator[Found]:
    """Yields what a function holds, and the globals that its code names."""
    yield from _held_by(function)
    names = code_names(function.__code__)
    cells = zip(function.__code__.co_freevars, closure_of(function), strict=True)
    imported = [name for name in names if name not in function.__globals__ and name in sys.modules]  # inside, perhaps
    named = [
        *((Step("cell", name), value) for name, value in cells),
        *globals_of(function),
        *((Step("imported", name), sys.modules[name]) for name in imported),
    ]
    for step, value in named:
        yield (step,), value
        if isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] not in _LIBRARIES:
            # The code also names what it reads from the module: `weights.table` mentions both names.
            read = [name for name in names if name in vars(value)]
            yield from (((step, *steps), item) for steps, item in _attributes(value, read))


def _attributes(value: Any, names: Iterable[str]) -> Iterator[Found]:
    for name in dict.fromkeys(names):
        try:
            yield (Step("attribute", name),), attribute(value, name)
        except AttributeError:  # a slot that was never set
            continue
