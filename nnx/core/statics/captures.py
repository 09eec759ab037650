"""Finding state that hides in a static value: in a closure, a partial or an attribute of any object."""

import collections
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from nnx.core.module.info import ModuleBase
from nnx.core.statics.contents import content_of, member_names

_LEAVES = (int, float, complex, str, bytes, bool, type(None), type, types.ModuleType, jax.Array, np.ndarray, np.generic)
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
_plain: frozenset[type] = frozenset({int, float, complex, str, bytes, bool, type(None)})


def find_captured_module(value: Any) -> tuple[Any, str] | None:
    """Returns the first Module that a function, partial or plain object holds, with the route to it, or None."""
    return find_captured(value, ModuleBase)


def find_captured(value: Any, types: type | tuple[type, ...]) -> tuple[Any, str] | None:
    """Returns the first object of these types that a static value holds, with the route to it, or None.

    Bound methods of Modules do not count at the top level or in lists, tuples and dicts, because a rebuilt graph binds
    them to its own Modules. The search covers everything the value can reach: a Module behind a thousand other objects
    is as much of a frozen constant as one in plain sight.
    """
    seen: set[int] = set()
    stack: list[tuple[Any, str, bool]] = [(value, "it", False)]
    while stack:
        item, route, inside = stack.pop()
        if id(item) in seen or isinstance(item, _LEAVES):
            continue
        seen.add(id(item))
        if isinstance(item, types):
            return item, route
        stack.extend(step for step in _holds(item, route, inside) if type(step[0]) not in _plain)
    return None


def find_array(value: Any) -> tuple[Any, str] | None:
    """Returns the first array that is part of the content of a static value, with the route to it, or None."""
    seen: set[int] = set()
    stack: list[tuple[Any, str]] = [(value, "it")]
    while stack:
        item, route = stack.pop()
        if isinstance(item, _ARRAYS):
            return item, route
        content = None if isinstance(item, _LEAVES) or id(item) in seen else content_of(type(item))
        if content is not None:
            seen.add(id(item))
            parts = content.parts(item)
            if not _plain.issuperset(map(type, parts)):
                stack += [(part, route + name) for part, name in zip(parts, content.routes(item), strict=True)]
    return None


def _holds(item: Any, route: str, inside: bool) -> Iterable[tuple[Any, str, bool]]:
    """Yields what an object holds, each with the route to it and whether a rebuild cannot replace it there."""
    if isinstance(item, types.MethodType):
        if inside or not isinstance(item.__self__, ModuleBase):
            yield item.__self__, f"self of {route}", True
    elif isinstance(item, (list, tuple, set, frozenset, collections.deque)):
        yield from ((x, f"{route}[{i}]", inside) for i, x in enumerate(item))
    elif isinstance(item, dict):
        yield from ((key, f"a key of {route}", True) for key in item)
        yield from ((x, f"{route}[{key!r}]", inside) for key, x in item.items())
    elif isinstance(item, types.FunctionType):
        yield from _captures(item)
    elif isinstance(item, functools.partial):
        yield from ((x, f"an argument of {route}", True) for x in (item.func, *item.args, *item.keywords.values()))
    for name, x in _attributes(item):
        yield x, f"{route}.{name}", True


def _attributes(item: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of what an object holds in its `__dict__` and its slots."""
    if isinstance(item, (types.FunctionType, types.MethodType)):
        return
    yield from list(getattr(item, "__dict__", {}).items())
    for name in member_names(type(item)):
        try:
            yield name, object.__getattribute__(item, name)  # a `__getattr__` might compute the value and store it
        except AttributeError:  # a slot that was never set
            continue


def _captures(function: types.FunctionType) -> Iterator[tuple[Any, str, bool]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield cell.cell_contents, f"{name!r} in the closure of {function.__qualname__}", True
        except ValueError:  # a cell that was never filled
            continue
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield value, f"a default of {function.__qualname__}", True
    for name, value in function.__dict__.items():
        yield value, f"{function.__qualname__}.{name}", True
