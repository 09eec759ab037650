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
import os
import sys
import sysconfig
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
_WRAPPED = ("__wrapped__", "fget", "func", "fwd", "bwd", "jvp")  # the last three are rules of a custom derivative
_NOT_CALLED = ("__init__", "__new__", "__dict__")  # where an object is used; they mention all its attributes
# A function that mentions one of these may read attributes whose names its code does not show.
_READ_ANY_NAME = {
    *("getattr", "vars", "attrgetter", "methodcaller", "getmembers", "__dict__", "__getattribute__"),
    *("asdict", "astuple", "eval", "exec"),
}
_LIBRARIES = {"_pytest", "builtins", "functools", "jax", "jaxlib", "nnx", "numpy", "optax", "typing"}
_STANDARD = sysconfig.get_path("stdlib") + os.sep


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
        except NOT_THERE:
            return None
        return value

    def then(self, *steps: Step) -> "Route":
        return Route(self.start, (*self.steps, *steps))


Found = tuple[tuple[Step, ...], Any]
"""A value, with the steps to it."""

_Members = dict[type, list[str]]  # the names of what the objects of a class have through it, without methods


class Reach:
    """What functions reach by name: a graph of objects, each with the first route to it.

    Args:
        functions: where to start.
        only_read: whether to leave out the attributes that no function on the way mentions, and so what only methods
            that are never called lead to.

    Attributes:
        modules, arrays: the Modules, and the arrays outside of them.
        containers: the lists and dicts.
    """

    def __init__(self, functions: Sequence[Any], only_read: bool = False):
        self.modules: list[tuple[Any, Route]] = []
        self.arrays: list[tuple[Any, Route]] = []
        self.containers: list[tuple[Any, Route]] = []
        self._first: dict[int, tuple[Any, Route]] = {}  # with the object, whose identity must not be used again
        self._again: list[tuple[int, Route]] = []  # the objects that another route leads to
        self._from: dict[int, list[int]] = {}  # the objects that lead to an object directly
        self._mentioned: set[str] = set()
        self._waiting: dict[str, list[Any]] = {}  # attributes, for a function that mentions their name
        self._takes_all = not only_read
        self._search(functions)

    def leading_to(self, modules: Iterable[Any]) -> set[int]:
        """Returns the identities of the objects that routes to some of the Modules go through, theirs included."""
        leading: set[int] = set()
        stack = [*map(id, modules)]
        while stack:
            if (key := stack.pop()) not in leading:
                leading.add(key)
                stack += self._from.get(key, ())
        return leading

    def other_ways(self, leading: set[int]) -> list[tuple[Route, Route]]:
        """Returns pairs of routes that end at one object, one pair for each further way to an object in a set."""
        return [(route, self._first[key][1]) for key, route in self._again if key in leading]

    def _search(self, functions: Sequence[Any]) -> None:
        queue = collections.deque[Any]([(function, Route(i, ()), None, None) for i, function in enumerate(functions)])
        members: _Members = {}
        places: set[Any] = set()
        while queue and len(self._first) < MAX_VISITED:
            value, route, owner, place = queue.popleft()
            if isinstance(value, jax.Array):
                self.arrays.append((value, route))
                continue
            key = id(value)
            if owner is not None:
                self._from.setdefault(key, []).append(owner)
            if key in self._first:
                if place is not None and place not in places:
                    self._again.append((key, route))
            else:
                self._first[key] = value, route
                for steps, item in islice(self._from_here(value, route, members), MAX_VISITED):
                    if type(item) not in HOLD_NOTHING:
                        found = item, route.then(*steps), key, _place_of(value, steps)
                        (queue if self._is_read(steps[-1]) else self._waiting.setdefault(steps[-1].name, [])).append(
                            found
                        )
                if not self._takes_all and isinstance(value, types.FunctionType) and not is_of_library(value):
                    queue += self._mention(code_names(value.__code__))
            places.add(place)

    def _from_here(self, value: Any, route: Route, members: _Members) -> Iterator[Found]:
        """Yields what an object that the search sees for the first time leads to, and notes the object."""
        if isinstance(value, ModuleBase):
            self.modules.append((value, route))
            return (((Step("class", weakref.ref(cls)),), cls) for cls in classes_of(flat_of(value)))
        if type(value) in (list, dict):  # not their subclasses: no user code runs here
            self.containers.append((value, route))
        return _reached_from(value, members)

    def _is_read(self, step: Step) -> bool:
        if self._takes_all or step.kind != "attribute" or step.name in self._mentioned or step.name in _WRAPPED:
            return True
        return step.name.startswith("__") and step.name not in _NOT_CALLED  # an operator, which no name shows

    def _mention(self, names: Iterable[str]) -> list[Any]:
        """Notes the names in a function's code; returns the attributes that waited for them."""
        self._mentioned.update(names)
        if not _READ_ANY_NAME.isdisjoint(self._mentioned):
            self._takes_all = True
        read = [*self._waiting] if self._takes_all else [name for name in names if name in self._waiting]
        return [found for name in read for found in self._waiting.pop(name)]


def _place_of(value: Any, steps: Sequence[Step]) -> Any:
    """Returns where steps from a value read the last thing; None if nothing else can ever be there.

    Functions share their globals and the cells of their closures, so the same place may be read through many of them.
    """
    first, last = steps[0], steps[-1]
    if len(steps) > 1:  # an attribute of a Python module that the function names
        return id(first.take(value)), last
    if first.kind == "global":
        return id(value.__globals__), last
    if first.kind == "cell":
        return id(value.__closure__[value.__code__.co_freevars.index(first.name)])
    if first.kind in ("class", "function", "self", "argument") or type(value) is tuple:
        return None
    return id(value), last


def classes_of(flat: Flat | None) -> list[type]:
    """Returns the user's classes of the Modules in a flat form."""
    modules = () if flat is None else [weak() for weak in flat.modules]
    return [cls for cls in dict.fromkeys(map(type, modules)) if not _is_library(cls)]


def _reached_from(value: Any, members: _Members) -> Iterator[Found]:
    """Yields what the user's code reaches directly from a value; from a library's object, only what that wraps."""
    if isinstance(value, types.FunctionType):
        if is_of_library(value):
            yield from _wrapped_by(value)
        else:  # one of Python's own may be around the user's, but no global of it is
            yield from _held_by(value) if _is_standard(value.__code__.co_filename) else _reached_from_function(value)
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


def _is_of_library(module: types.ModuleType) -> bool:
    return module.__name__.partition(".")[0] in _LIBRARIES or _is_standard(getattr(module, "__file__", None) or "")


def _is_standard(file: str) -> bool:
    """Whether a file belongs to Python's standard library."""
    return file.startswith(_STANDARD) and not file.startswith(
        (_STANDARD + "site-packages", _STANDARD + "dist-packages")
    )


def _held_by(value: Any) -> Iterator[Found]:
    """Yields what a value holds, by steps that can be taken again later and keep nothing alive."""
    for step, item in held_by(value):
        if step.kind not in ("key", "element") and _is_plain(step.name):
            yield (step,), item


def _is_plain(key: Any) -> bool:
    return type(key) in HOLD_NOTHING or (type(key) is tuple and all(map(_is_plain, key)))


def _wrapped_by(value: Any) -> Iterator[Found]:
    return _attributes(value, ("__wrapped__", "fwd", "bwd", "jvp"))


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
        if isinstance(value, types.ModuleType) and not _is_of_library(value):
            # The code also names what it reads from the module: `weights.table` mentions both names.
            read = [name for name in names if name in vars(value)]
            yield from (((step, *steps), item) for steps, item in _attributes(value, read))


def _attributes(value: Any, names: Iterable[str]) -> Iterator[Found]:
    for name in dict.fromkeys(names):
        try:
            yield (Step("attribute", name),), attribute(value, name)
        except AttributeError:  # a slot that was never set
            continue
