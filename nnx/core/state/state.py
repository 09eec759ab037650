"""State: a flat, typed, immutable mapping from paths to leaves.

A *path* joins attribute names with `/`. A *leaf* is a Variable or Node, or a bare array. A *layout* is the tuple of
paths of a State, interned together with everything that is computed from the paths. A State is a layout and a list of
leaves.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, overload

import jax

from nnx.core.hints.hints import NO_STATE_ARITHMETIC, add_hints, refuse_arithmetic
from nnx.core.hints.table import STATE as HINTS
from nnx.core.repr import short
from nnx.core.state.filters import Filter, classify
from nnx.core.state.paths import listing, path_order
from nnx.core.variables.variables import Container, values_equal

OTHER_PATHS = """State.map takes States with the same paths: {differences}. Select a common part first, with \
filter(), sub() or `-`."""


class Layout:
    """The paths of a State in order; equal layouts are one object."""

    def __init__(self, paths: tuple[str, ...]):
        self.paths = paths
        self.index = {path: i for i, path in enumerate(paths)}

    @staticmethod
    def of(paths: tuple[str, ...]) -> "Layout":
        """Returns the layout of paths that are already in order."""
        layout = _layouts.get(paths)
        return _layouts.setdefault(paths, Layout(paths)) if layout is None else layout

    @functools.cached_property
    def keys(self) -> list[Any]:
        """The paths as JAX's keys, which its error messages show."""
        return [jax.tree_util.DictKey(path) for path in self.paths]

    def __repr__(self) -> str:
        return f"[{', '.join(self.paths)}]"

    def __reduce__(self) -> Any:
        return (Layout.of, (self.paths,))


_layouts: "weakref.WeakValueDictionary[tuple[str, ...], Layout]" = weakref.WeakValueDictionary()


class State(Mapping[str, Any]):
    """An immutable mapping from path to leaf, sorted by path; a pytree.

    Args:
        items: a mapping from path to leaf, or pairs of them.

    >>> state = nnx.State({"b": jnp.ones(2), "a/w": nnx.Param(jnp.zeros(3))})
    >>> list(state)
    ['a/w', 'b']
    >>> state["a", "w"]
    Param(float32[3])
    """

    __slots__ = ("_layout", "_leaves", "__weakref__")

    _layout: Layout
    _leaves: Sequence[Any]

    def __init__(self, items: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()):
        leaves = dict(items)
        for path in leaves:
            if not isinstance(path, str):
                raise TypeError(_bad_path(path))
        paths = tuple(sorted(leaves, key=path_order))
        self._layout = Layout.of(paths)
        self._leaves = [leaves[path] for path in paths]

    @staticmethod
    def from_layout(layout: Layout, leaves: Any) -> "State":
        state = _new(State)
        state._layout = layout
        state._leaves = leaves
        return state

    # Mapping

    def __getitem__(self, path: str | tuple[str, ...]) -> Any:
        name = _as_text(path)
        try:
            return self._leaves[self._layout.index[name]]
        except KeyError:
            raise KeyError(f"{name!r} is not in the State; its paths are {listing(self._layout.paths)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.paths)

    def __len__(self) -> int:
        return len(self._layout.paths)

    def __contains__(self, path: object) -> bool:
        return _as_text(path) in self._layout.index

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, State):
            return NotImplemented
        return self._layout is other._layout and all(map(values_equal, self._leaves, other._leaves))

    __hash__ = None

    # Algebra

    def __or__(self, other: "State") -> "State":
        """Returns the entries of both; for a path that is in both, the entry on the right wins."""
        if not isinstance(other, State):
            return NotImplemented
        return State({**dict(self.items()), **dict(other.items())})

    def __sub__(self, other: "State") -> "State":
        """Returns the entries whose paths `other` does not have."""
        if not isinstance(other, State):
            return NotImplemented
        return self._select([i for i, path in enumerate(self._layout.paths) if path not in other])

    @staticmethod
    def merge(*states: "State") -> "State":
        """Returns all States merged into one; later ones win."""
        merged: dict[str, Any] = {}
        for state in states:
            if not isinstance(state, State):
                raise TypeError(f"State.merge takes States, got {type(state).__name__}.")
            merged.update(zip(state._layout.paths, state._leaves, strict=True))
        return State(merged)

    @overload
    def partition(self, filter: Filter = ..., /) -> "State": ...
    @overload
    def partition(self, first: Filter, second: Filter, /, *more: Filter) -> "tuple[State, ...]": ...
    def partition(self, *filters: Filter) -> "State | tuple[State, ...]":
        """Returns one State per filter; the first match wins, and every entry must match one.

        Raises:
            ValueError: an entry matches no filter.
        """
        return self._split(filters, exhaustive=True)

    @overload
    def filter(self, filter: Filter = ..., /) -> "State": ...
    @overload
    def filter(self, first: Filter, second: Filter, /, *more: Filter) -> "tuple[State, ...]": ...
    def filter(self, *filters: Filter) -> "State | tuple[State, ...]":
        """Returns one State per filter; entries that match no filter are left out."""
        return self._split(filters, exhaustive=False)

    def _split(self, filters: tuple[Any, ...], exhaustive: bool) -> "State | tuple[State, ...]":
        found = classify(zip(self._layout.paths, self._leaves, strict=True), filters or (...,), exhaustive)
        states = tuple(
            self._select([i for i, group in enumerate(found) if group == which]) for which in range(len(filters) or 1)
        )
        return states[0] if len(states) == 1 else states

    def _select(self, indices: list[int]) -> "State":
        paths = self._layout.paths
        if len(indices) == len(paths):
            return self
        return State.from_layout(Layout.of(tuple([paths[i] for i in indices])), [self._leaves[i] for i in indices])

    def map(self, fn: Callable[..., Any], *others: "State") -> "State":
        """Returns a State with `fn(path, leaf, *leaves_of_others)` in place of each leaf.

        Args:
            fn: the function.
            *others: further States with the same paths, e.g. gradients next to parameters.

        Raises:
            TypeError: one of `others` is not a State.
            ValueError: the paths differ.

        >>> params, grads = nnx.State({"w": jnp.ones(2)}), nnx.State({"w": jnp.full(2, 10.0)})
        >>> params.map(lambda path, p, g: p - 0.1 * g, grads)["w"].tolist()
        [0.0, 0.0]
        """
        for other in others:
            if not isinstance(other, State):
                raise TypeError(f"State.map takes a function and further States, got {short(other)}.")
            if other._layout is not self._layout:
                raise ValueError(OTHER_PATHS.format(differences=_path_differences(self, other)))
        leaves = [other._leaves for other in others]
        return State.from_layout(self._layout, list(map(fn, self._layout.paths, self._leaves, *leaves)))

    def sub(self, path: str | tuple[str, ...]) -> "State":
        """Returns the entries below a path, with that prefix removed; an empty State if there are none.

        >>> state = nnx.State({"layers/0/w": jnp.ones(2), "layers/1/w": jnp.ones(3)})
        >>> list(state.sub("layers/1"))
        ['w']
        """
        path = _as_text(path)
        if path == "":
            return self
        prefix = f"{path}/"
        return State({name[len(prefix) :]: leaf for name, leaf in self.items() if name.startswith(prefix)})

    def arrays(self) -> dict[str, Any]:
        """Returns a dict from path to array, without the containers."""
        return {path: leaf.value if isinstance(leaf, Container) else leaf for path, leaf in self.items()}

    # Nested dicts

    def to_nested(self) -> dict[str, Any]:
        """Returns the same leaves in plain nested dicts, one level per segment."""
        nested: dict[str, Any] = {}
        for path, leaf in self.items():
            *parents, last = path.split("/")
            inner = nested
            for segment in parents:
                inner = inner.setdefault(segment, {})
            inner[last] = leaf
        return nested

    @staticmethod
    def from_nested(nested: Mapping[str, Any]) -> "State":
        """Makes a State from nested dicts; everything that is not a dict is a leaf."""
        leaves: dict[str, Any] = {}
        stack: list[tuple[str, Mapping[str, Any]]] = [("", nested)]
        while stack:
            prefix, inner = stack.pop()
            for key, value in inner.items():
                if not isinstance(key, str) or not key or "/" in key:
                    raise ValueError(f"Keys are path segments: non-empty strings without '/', got {key!r}.")
                path = f"{prefix}/{key}" if prefix else key
                if isinstance(value, dict):
                    stack.append((path, value))
                else:
                    leaves[path] = value
        return State(leaves)

    def __repr__(self) -> str:
        if not self:
            return "State({})"
        lines = [f"  {path!r}: {short(leaf)}," for path, leaf in self.items()]
        return "\n".join(["State({", *lines, "})"])

    def __reduce__(self) -> Any:
        return (State.from_layout, (self._layout, list(self._leaves)))


_new = object.__new__


def _as_text(path: Any) -> Any:
    return "/".join(map(str, path)) if isinstance(path, tuple) else path


def _bad_path(path: Any) -> str:
    text = f"The paths of a State are strings such as 'encoder/kernel', got {path!r}."
    return f"{text} Write {'/'.join(map(str, path))!r}." if isinstance(path, tuple) else text


def _path_differences(a: State, b: State) -> str:
    lacking, extra = [path for path in a if path not in b], [path for path in b if path not in a]
    parts = [f"the other one has no {listing(lacking)}"] if lacking else []
    return "; ".join([*parts, f"only the other one has {listing(extra)}"] if extra else parts)


parts_of: Callable[[State], tuple[Layout, Sequence[Any]]] = attrgetter("_layout", "_leaves")
"""Returns the layout and the leaves of a State."""

_flatten: Callable[[State], tuple[Sequence[Any], Layout]] = attrgetter("_leaves", "_layout")  # runs in C


def _flatten_with_keys(state: State) -> tuple[list[Any], Layout]:
    return list(zip(state._layout.keys, state._leaves, strict=True)), state._layout


jax.tree_util.register_pytree_with_keys(State, _flatten_with_keys, State.from_layout, _flatten)

States = State | tuple[State, ...]
"""What partition and filter return: one State, or one per filter."""
add_hints(State, HINTS)
refuse_arithmetic(State, NO_STATE_ARITHMETIC)
