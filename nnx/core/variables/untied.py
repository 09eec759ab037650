"""Warnings about one array in two Variables, where a tie may have been intended.

`head.kernel = embed.embedding` reads an array and stores it in a second Variable. Both start equal and are then trained
separately, without an error. A tie is one Variable in two places, an `nnx.Ref`.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax

from nnx.core.module.freezing import is_frozen
from nnx.core.module.info import info_of
from nnx.core.user_warnings import warn_user
from nnx.core.variables.variables import Variable

UNTIED = """{name}: {paths} are {number} Variables that hold one array. They are equal now, and each is then trained \
separately: an assignment such as `b.kernel = a.kernel` passes on a value and ties nothing. If they are meant to be \
one, share one Variable:

    ref = nnx.Ref({owner}.variable({attribute!r}))
    {places} = ref

If they should only start equal, store a copy: {last} = jnp.copy({last})."""

_warned: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # by ModuleInfo of the root: who has warned of it


class _Tracing(threading.local):
    """The first of the tracers made for one array, by the id of the others; set while a function is traced."""

    same: Mapping[int, Any] = {}


_tracing = _Tracing()


def warn_of_untied(name: str, root: Any, leaves: Iterable[tuple[str, Any]]) -> None:
    """Warns if Variables of a Module hold one array; once for each `name` and Module.

    Args:
        name: what trains the Variables, or shows them.
        root: the Module.
        leaves: the Variables, by path.
    """
    arrays: dict[str, int] = {}
    first: dict[int, str] = {}
    others: dict[str, list[str]] = {}  # by the first path of the same array
    same = _tracing.same
    for path, leaf in leaves:
        if isinstance(leaf, Variable) and isinstance(leaf.value, jax.Array) and not is_frozen(leaf):
            key = id(same.get(id(leaf.value), leaf.value))
            arrays[path] = key
            if first.setdefault(key, path) != path:
                others.setdefault(first[key], []).append(path)
    warned = _warned.setdefault(info_of(root), set()) if others else set()
    if name in warned:
        return
    for path, rest in others.items():
        paths = [path, *(other for other in rest if not _is_clone(path, other, arrays))]
        if len(paths) > 1:
            prefix, _, attribute = path.rpartition("/")
            *heads, last = map(repr, paths)
            places = [_expression(path) for path in paths]
            text = {"paths": f"{', '.join(heads)} and {last}", "number": "two" if len(paths) == 2 else len(paths)}
            text |= {"owner": _expression(prefix), "attribute": attribute}
            warn_user(UNTIED.format(name=name, places=" = ".join(places), last=places[-1], **text))
            warned.add(name)


def _is_clone(path: str, other: str, arrays: Mapping[str, int]) -> bool:
    """Whether two paths are the same place in two Modules that hold the same arrays throughout: clones, not ties."""
    while path and other and path.rpartition("/")[2] == other.rpartition("/")[2]:
        path, other = path.rpartition("/")[0], other.rpartition("/")[0]
        below = _below(path, arrays)
        if path and other and len(below) > 1 and below == _below(other, arrays):
            return True
    return False


def _below(prefix: str, arrays: Mapping[str, int]) -> dict[str, int]:
    start = f"{prefix}/"
    return {path[len(start) :]: key for path, key in arrays.items() if path.startswith(start)}


def _expression(path: str) -> str:
    """Returns how to write what is at a path of `model`."""
    text = "model"
    for segment in filter(None, path.split("/")):
        text += f".{segment}" if segment.isidentifier() else f"[{segment}]" if segment.isdecimal() else f"[{segment!r}]"
    return text


@contextlib.contextmanager
def inputs_traced_as(arrays: Sequence[Any], tracers: Sequence[Any]) -> Iterator[None]:
    """Remembers, while a function is traced, which of its inputs are one array: the tracers do not show it."""
    first: dict[int, Any] = {}
    outer = _tracing.same
    pairs = [(outer.get(id(x), x), tracer) for x, tracer in zip(arrays, tracers) if isinstance(x, jax.Array)]
    same = {id(tracer): kept for array, tracer in pairs if (kept := first.setdefault(id(array), tracer)) is not tracer}
    # A function traced inside another one adds its inputs; those of the outer one may be captured by it.
    _tracing.same = {**outer, **same} if same else outer
    try:
        yield
    finally:
        _tracing.same = outer
