"""Filters: short descriptions of a part of a State, and the predicates they are turned into.

A *predicate* is `f(path, value) -> bool`, where `value` is the container or the bare array at that path.
"""

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import EllipsisType
from typing import Any as AnyValue
from typing import TypeVar, cast

import jax
import numpy as np

from nnx.core.module.info import ModuleBase
from nnx.core.old_names import old_names
from nnx.core.repr import short
from nnx.core.state.paths import listing
from nnx.core.variables.collection_names import known_collections
from nnx.core.variables.variables import Variable

Predicate = Callable[[str, AnyValue], bool]
Filter = type | str | EllipsisType | None | Predicate | Sequence["Filter"]
"""What selects a part of a State: a type, a collection name, `...`, None, a predicate, or several of these."""

S = TypeVar("S")

NON_EXHAUSTIVE = """Non-exhaustive filters, got a non-empty remainder: {paths}.
Every node must match one of the filters {filters}. Add a filter for these, or `...` at the end to match the rest."""

ELLIPSIS_NOT_LAST = "Ellipsis `...` can only be used as the last filter, got it at position {at} of {filters}."

NOT_A_FILTER = """Invalid filter {value}. A filter is a type (nnx.Param), a collection name ("params"), `...`, None, a \
function f(path, value) -> bool, a tuple or list of filters, or one of nnx.Not, nnx.All, nnx.Any, nnx.OfType, \
nnx.PathMatches, nnx.buffers."""

TUPLE_PATH = """Invalid filter {value}: a tuple is a union of filters here, and paths are strings. To filter by path, \
use nnx.PathMatches({path!r})."""

UNKNOWN_COLLECTION = """Unknown collection {name!r} as a filter.{hint} No Variable type has that name; the known ones \
are: {known}. To filter by path, use nnx.PathMatches({name!r})."""

MANY_TYPES = """{name}: wrt={wrt} names no Variable type, and it selects Variables of {count} types: {listing}.
That is rarely what a path or a function is meant to select. Name the type as well, nnx.All(nnx.Param, {wrt}), or list \
all the types you mean: nnx.All(({types}), {wrt})."""


class Matcher:
    """The base of filters that are objects. They compare by their arguments, so they can be static values."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), repr(self)))


class OfType(Matcher):
    """Matches nodes that are instances of a type.

    This is the explicit form of the type itself, for places where a type would be misread.

    >>> model = nnx.Linear(2, 3, ctx=nnx.context(0))
    >>> list(model.filter(nnx.OfType(nnx.Param)))
    ['bias', 'kernel']
    """

    def __init__(self, type: type):
        self.type = type

    def __call__(self, path: str, value: AnyValue) -> bool:
        return isinstance(value, self.type)

    def __repr__(self) -> str:
        return f"OfType({self.type.__name__})"


class InCollection(Matcher):
    """Matches Variables whose type, or a base of it, has this collection name."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, path: str, value: AnyValue) -> bool:
        return isinstance(value, Variable) and any(
            getattr(cls, "collection", None) == self.name for cls in type(value).__mro__
        )

    def __repr__(self) -> str:
        return repr(self.name)


class PathMatches(Matcher):
    """Matches paths by glob: `*` within a segment, `**` for any number of segments, including none.

    >>> match = nnx.PathMatches("encoder/**/kernel")
    >>> match("encoder/kernel", None), match("encoder/a/b/kernel", None), match("decoder/kernel", None)
    (True, True, False)
    """

    def __init__(self, pattern: str):
        if not isinstance(pattern, str):
            raise TypeError(f'nnx.PathMatches takes a glob such as "encoder/**/kernel", got {short(pattern)}.')
        self.pattern = pattern
        self._segments = pattern.split("/")

    def __call__(self, path: str, value: AnyValue) -> bool:
        return _matches(self._segments, path.split("/"))

    def __repr__(self) -> str:
        return f"PathMatches({self.pattern!r})"


class Not(Matcher):
    """Matches everything that its filter does not match.

    >>> model = nnx.BatchNorm(3, ctx=nnx.context(0))
    >>> list(model.filter(nnx.Not(nnx.Param)))
    ['mean', 'var']
    """

    @old_names(collection_filter="filter")
    def __init__(self, filter: Filter):
        self.filter = filter
        self._predicate = to_predicate(filter)

    def __call__(self, path: str, value: AnyValue) -> bool:
        return not self._predicate(path, value)

    def __repr__(self) -> str:
        return f"Not({describe(self.filter)})"


class _Several(Matcher):
    """The base of filters that are made of others."""

    def __init__(self, *filters: Filter):
        self.filters = filters
        self._predicates = [to_predicate(f) for f in filters]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(describe, self.filters))})"


class All(_Several):
    """Matches entries that match all of its filters.

    >>> model = nnx.Linear(2, 3, ctx=nnx.context(0))
    >>> list(model.filter(nnx.All(nnx.Param, nnx.PathMatches("**/kernel"))))
    ['kernel']
    """

    def __call__(self, path: str, value: AnyValue) -> bool:
        return all(predicate(path, value) for predicate in self._predicates)


class Any(_Several):
    """Matches entries that match any of its filters; a tuple of filters means the same.

    >>> model = nnx.BatchNorm(3, ctx=nnx.context(0))
    >>> list(model.filter(nnx.Any(nnx.BatchStat, nnx.PathMatches("bias"))))
    ['bias', 'mean', 'var']
    """

    def __call__(self, path: str, value: AnyValue) -> bool:
        return any(predicate(path, value) for predicate in self._predicates)


def buffers(path: str, value: AnyValue) -> bool:
    """Matches bare arrays: nodes that are a `jax.Array` or `np.ndarray` without a container.

    >>> model = nnx.Dict(w=nnx.Param(jnp.ones(2)), table=jnp.zeros(3))
    >>> list(model.filter(nnx.buffers))
    ['table']
    """
    return isinstance(value, (jax.Array, np.ndarray))


def everything(path: str, value: AnyValue) -> bool:
    """The predicate of `...`."""
    return True


def nothing(path: str, value: AnyValue) -> bool:
    """The predicate of `None`."""
    return False


def to_predicate(filter: AnyValue) -> Predicate:
    """Returns a filter as a predicate.

    Raises:
        TypeError: `filter` is not a filter.
        ValueError: `filter` is a string, but no Variable type has that collection name.
    """
    if filter is ...:
        return everything
    if filter is None:
        return nothing
    if isinstance(filter, str):
        _check_collection(filter)
        return InCollection(filter)
    if isinstance(filter, type):
        return OfType(filter)
    if isinstance(filter, (tuple, list)):
        _refuse_path(filter)
        return Any(*filter)
    if callable(filter) and not isinstance(filter, ModuleBase):
        return cast(Predicate, filter)
    raise TypeError(NOT_A_FILTER.format(value=f"{short(filter)} of type {type(filter).__name__}"))


def to_predicates(filters: Sequence[AnyValue]) -> list[Predicate]:
    """Returns each filter as a predicate.

    Raises:
        ValueError: `...` is not the last filter.
    """
    for at, filter in enumerate(filters[:-1]):
        if filter is ...:
            raise ValueError(ELLIPSIS_NOT_LAST.format(at=at, filters=describe(filters)))
    return [to_predicate(filter) for filter in filters]


def classify(items: Iterable[tuple[str, AnyValue]], filters: Sequence[AnyValue], exhaustive: bool) -> list[int]:
    """Returns for each item the index of the first filter that matches, or -1.

    Raises:
        ValueError: `exhaustive` is set and an item matches no filter.
    """
    predicates = list(enumerate(to_predicates(filters)))
    found, rest = [], []
    for path, value in items:
        for i, predicate in predicates:
            if predicate(path, value):
                found.append(i)
                break
        else:
            found.append(-1)
            rest.append(path)
    if rest and exhaustive:
        raise ValueError(NON_EXHAUSTIVE.format(paths=listing(rest), filters=describe(filters)))
    return found


def check_wrt(wrt: AnyValue, entries: Iterable[tuple[str, AnyValue]], name: str) -> None:
    """Checks that a `wrt` that selects several types of Variable does so explicitly.

    `nnx.PathMatches("head/**")` reads like "train the head", yet it also selects the head's batch statistics. Filters
    that name types or collections, and `...`, which asks for everything, are accepted.

    Args:
        wrt: the filter.
        entries: `(path, leaf)` pairs to select from, containers as leaves.
        name: the transform or class that was given `wrt`, for the error.

    Raises:
        ValueError: `wrt` contains a path filter or a function that selects Variables of more than one type.
    """
    untyped = list(untyped_parts(wrt))
    if not untyped:
        return
    entries = list(entries)
    for part in untyped:
        matches = to_predicate(part)
        examples: dict[type, str] = {}  # the first path of every type
        for path, leaf in entries:
            if isinstance(leaf, Variable) and matches(path, leaf):
                examples.setdefault(type(leaf), path)
        if len(examples) > 1:
            listing = ", ".join(f"{cls.__name__} ({path!r})" for cls, path in examples.items())
            types = ", ".join(cls.__name__ for cls in examples)
            text = {"wrt": describe(part), "count": len(examples), "listing": listing, "types": types}
            raise ValueError(MANY_TYPES.format(name=name, **text))


def untyped_parts(filter: AnyValue) -> Iterator[AnyValue]:
    """Yields the alternatives of a filter that name no type or collection."""
    if isinstance(filter, (tuple, list)):
        for part in filter:
            yield from untyped_parts(part)
    elif isinstance(filter, Any):
        yield from untyped_parts(filter.filters)
    elif filter is not ... and filter is not None and not _names_type(filter):
        yield filter


def _names_type(filter: AnyValue) -> bool:
    if isinstance(filter, Not):
        return _names_type(filter.filter)
    if isinstance(filter, All):  # one typed part narrows the whole
        return any(map(_names_type, filter.filters))
    if isinstance(filter, (tuple, list, Any)):
        return not list(untyped_parts(filter))
    return isinstance(filter, (type, str, OfType, InCollection))


def describe(filter: AnyValue) -> str:
    """Returns a filter as the user would write it."""
    if filter is ...:
        return "..."
    if isinstance(filter, type):
        return filter.__name__
    if isinstance(filter, (tuple, list)):
        return f"({', '.join(map(describe, filter))})"
    return getattr(filter, "__name__", None) or repr(filter)


def _refuse_path(filters: Sequence[AnyValue]) -> None:
    """Raises ValueError if a tuple of filters is a path as Flax writes it, `("layers", 0, "kernel")`."""
    is_path = len(filters) > 1 and all(isinstance(part, (str, int)) for part in filters)
    if is_path and not set(filters) & set(known_collections()):
        raise ValueError(TUPLE_PATH.format(value=describe(filters), path="/".join(map(str, filters))))


def _check_collection(name: str) -> None:
    known = known_collections()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(UNKNOWN_COLLECTION.format(name=name, hint=hint, known=", ".join(known)))


def _matches(pattern: list[str], path: list[str]) -> bool:
    if not pattern:
        return not path
    head, rest = pattern[0], pattern[1:]
    if head == "**":
        return any(_matches(rest, path[i:]) for i in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], head) and _matches(rest, path[1:])
