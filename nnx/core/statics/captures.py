"""Finding state that hides in a static value: in a closure, a partial or an attribute of any object."""

import types
from typing import Any

import jax
import numpy as np

from nnx.core.module.info import ModuleBase
from nnx.core.statics.contents import content_of
from nnx.core.statics.reach import held_by

_LEAVES = (int, float, complex, str, bytes, bool, type(None), type, types.ModuleType, jax.Array, np.ndarray, np.generic)
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


def find_captured(value: Any, wanted: tuple[type, ...]) -> tuple[Any, str] | None:
    """Returns the first object of these types that a static value holds, with the route to it, or None.

    Bound methods of Modules do not count at the top level or in lists, tuples and dicts, because a rebuilt graph binds
    them to its own Modules. The search covers everything the value can reach: a Module behind a thousand other objects
    is as much of a constant as one in plain sight.
    """
    seen: set[int] = set()
    stack: list[tuple[Any, str, bool]] = [(value, "it", True)]
    while stack:
        item, route, can_rebuild = stack.pop()
        if id(item) in seen or isinstance(item, _LEAVES):
            continue
        seen.add(id(item))
        if isinstance(item, wanted):
            return item, route
        if isinstance(item, types.MethodType):
            if not (can_rebuild and isinstance(item.__self__, ModuleBase)):
                stack.append((item.__self__, f"self of {route}", False))
            continue
        for step, held in held_by(item):
            stack.append((held, step.text(item, route), can_rebuild and step.kind in ("item", "element")))
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
            stack += [
                (held, step.text(item, route))
                for step, held in held_by(item)
                if step.kind != "key" and not (step.kind == "attribute" and step.name in content.derived)
            ]
    return None
