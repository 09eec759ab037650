"""Routes: how a function reaches a Module that is not among its arguments.

The search starts at functions and follows what a person would: closure cells, defaults, the globals that the code
names, partials and bound methods, attributes of the user's objects and classes, lists, tuples and dicts. It stops at
Modules and arrays, and does not enter libraries. A route is a value rather than a closure, so it keeps nothing alive;
following it again later shows whether the same names still lead to the same Module.
"""

import collections
import contextvars
import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from nnx.core.module.info import ModuleBase
from nnx.core.statics.contents import member_names
from nnx.transforms.engine.function_keys import code_names, is_of_library

MAX_VISITED = 10_000  # objects; a trainer may hold a whole data set

_ATOMS = {int, float, complex, str, bytes, bool, type(None), types.ModuleType}
_LIBRARIES = {"builtins", "functools", "jax", "jaxlib", "nnx", "numpy", "optax", "typing"}


class Step(NamedTuple):
    """One step: a closure cell, a global, an item, an attribute, or the value of a context variable."""

    kind: str
    name: Any

    def take(self, value: Any) -> Any:
        if self.kind == "cell":
            return value.__closure__[self.name].cell_contents
        if self.kind == "global":
            return value.__globals__[self.name]
        if self.kind == "imported":
            return sys.modules[self.name]
        if self.kind == "context":
            return value.get()
        return value[self.name] if self.kind == "item" else _attribute(value, self.name)


class Route(NamedTuple):
    """The steps from one of several functions to a value."""

    start: int
    steps: tuple[Step, ...]

    def follow(self, functions: Sequence[Any]) -> Any:
        """Returns what is at the end now, or None if the route has ended before."""
        value = functions[self.start]
        try:
            for step in self.steps:
                value = step.take(value)
        except (AttributeError, LookupError, TypeError, ValueError):
            return None
        return value


Held = tuple[tuple[Step, ...], Any]
"""What something holds: the steps to it, and the value."""


def reached(functions: Sequence[Any]) -> Iterator[tuple[Any, Route]]:
    """Yields the Modules and arrays that functions reach by name, a Module once for every route to it."""
    queue = collections.deque([(function, Route(i, ())) for i, function in enumerate(functions)])
    seen: set[int] = set()
    while queue and len(seen) < MAX_VISITED:
        value, route = queue.popleft()
        if isinstance(value, (ModuleBase, jax.Array)):
            yield value, route
        elif type(value) not in _ATOMS and id(value) not in seen:
            seen.add(id(value))
            for steps, item in _held_by(value):
                if type(item) not in _ATOMS:
                    queue.append((item, Route(route.start, (*route.steps, *steps))))


def _held_by(value: Any) -> Iterable[Held]:
    """Returns what a value holds, with the steps to it."""
    if isinstance(value, types.FunctionType):
        return _held_by_function(value)
    if isinstance(value, types.MethodType):
        return _attributes(value, ("__self__", "__func__"))
    if isinstance(value, contextvars.ContextVar):
        return [((Step("context", None),), value.get(None))]
    if isinstance(value, functools.partial):
        return _attributes(value, ("func", "args", "keywords"))
    if isinstance(value, Mapping):
        return [((Step("item", key),), value[key]) for key in list(value)[:MAX_VISITED] if _is_plain(key)]
    if isinstance(value, (list, tuple, collections.deque)):
        return [((Step("item", i),), item) for i, item in zip(range(MAX_VISITED), value)]
    cls = value if isinstance(value, type) else type(value)
    if cls.__module__.partition(".")[0] in _LIBRARIES:
        return _attributes(value, ("__wrapped__",))
    return _attributes(value, _names_of(value, cls))


def _is_plain(key: Any) -> bool:
    """Whether the key of a dict can be part of a route, which keeps nothing alive."""
    return type(key) in _ATOMS or (type(key) is tuple and all(map(_is_plain, key)))


def _held_by_function(function: types.FunctionType) -> Iterator[Held]:
    yield from _attributes(function, ("__wrapped__",))
    if is_of_library(function):
        return
    yield from _attributes(function, ("__defaults__", "__kwdefaults__"))
    names, found = code_names(function.__code__), []
    for i, cell in enumerate(function.__closure__ or ()):
        try:
            found.append((Step("cell", i), cell.cell_contents))
        except ValueError:  # not assigned yet
            continue
    for name in names:
        if name in function.__globals__:
            found.append((Step("global", name), function.__globals__[name]))
        elif name in sys.modules:  # imported in the function, perhaps
            found.append((Step("imported", name), sys.modules[name]))
    for step, value in found:
        yield (step,), value
        if isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] not in _LIBRARIES:
            read = [name for name in names if name in vars(value)]  # the code names what it reads from it as well
            yield from (((step, *steps), item) for steps, item in _attributes(value, read))


def _names_of(value: Any, cls: type) -> list[str]:
    """Returns the names of a user's object or class: its own, and those of the classes it inherits from."""
    names = [*getattr(value, "__dict__", ()), *member_names(cls)]
    for parent in cls.__mro__:
        if parent.__module__.partition(".")[0] not in _LIBRARIES:
            names += [name for name in vars(parent) if not name.startswith("__")]
    return list(dict.fromkeys(names))


def _attributes(value: Any, names: Iterable[str]) -> Iterator[Held]:
    for name in names:
        try:
            yield (Step("attribute", name),), _attribute(value, name)
        except AttributeError:  # a slot that was never set
            continue


def _attribute(value: Any, name: str) -> Any:
    """Returns an attribute without running the user's code: no property, no `__getattr__`."""
    found = inspect.getattr_static(value, name)
    is_in_slot = isinstance(found, (types.MemberDescriptorType, types.GetSetDescriptorType))
    return getattr(value, name) if is_in_slot else found
