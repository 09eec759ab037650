"""Packing: the form in which the States in an attribute's value get into a compiled function, and out of it.

JAX flattens a State by calling Python, once for the State and once for every container in it, and builds it in the same
way. The state of an optimizer has a container or two for every parameter, and each training step would pay for all of
them. So States are *packed* where they meet JAX: a `PackedState` has the same arrays in the same order, but JAX takes
it apart in C and puts it together in one call. The caller packs what goes in and unpacks what comes out; the traced
function does the reverse, so neither users nor the rest of the engine ever see a packed State.

A `Packing` says where the States of a value are. It knows nothing of what the value holds: each call looks at the tree
as it is now, so it sees changes that were made in place.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import jax
from jax.tree_util import DictKey, GetAttrKey

from nnx.core.state import Layout, State, Unboxed, layout_of, unboxed
from nnx.core.trees import leaf_types
from nnx.core.variables import Spec

Shape = tuple[Layout, tuple[Spec | None, ...]]
"""Everything about a State except its values. JAX compares it to decide whether a function has to be traced again."""


class PackedState:
    """A State taken apart: a pytree whose children are the values in the State, without their containers."""

    __slots__ = ("values", "shape")

    def __init__(self, shape: Shape, values: Any):
        self.values: Sequence[Any] = values
        self.shape: Shape = shape


class _ValueKey:
    """The key of a value in JAX's messages: the way to it in the State."""

    def __init__(self, path: str, spec: Spec | None):
        self.keys = (DictKey(path),) if spec is None else (DictKey(path), GetAttrKey("value"))

    def __str__(self) -> str:
        return jax.tree_util.keystr(self.keys)


def _flatten_with_keys(packed: PackedState) -> tuple[list[Any], Shape]:
    layout, specs = packed.shape
    return list(zip(map(_ValueKey, layout.paths, specs), packed.values, strict=True)), packed.shape


# `attrgetter` returns the values and the shape without running a line of Python.
jax.tree_util.register_pytree_with_keys(PackedState, _flatten_with_keys, PackedState, attrgetter("values", "shape"))


class Packing(NamedTuple):
    """Where the States are in one of several values."""

    position: int  # of the value
    outer: Any  # the structure of the value, in which States are leaves
    states: tuple[int, ...]  # their positions among the leaves


Packings = tuple[Packing, ...]
"""A Packing for each value that has States in it."""


def packings_of(values: Sequence[Any]) -> Packings:
    """Returns where the States are in some values."""
    if all(map(leaf_types.get, set(map(type, values)))):  # the usual case: nothing but arrays
        return ()
    found = []
    for position, value in enumerate(values):
        if not leaf_types.get(type(value)):
            leaves, outer = jax.tree.flatten(value, is_leaf=_is_state)
            states = tuple([i for i, leaf in enumerate(leaves) if _is_state(leaf)])
            if states:
                found.append(Packing(position, outer, states))
    return tuple(found)


def pack(values: Sequence[Any], packings: Packings) -> list[Any]:
    """Returns the values with their States packed.

    Raises:
        ValueError: a value has a different structure than its Packing says.
    """
    packed = list(values)
    for position, outer, states in packings:
        leaves = outer.flatten_up_to(packed[position])
        for i in states:
            state = leaves[i]
            if type(state) is not State:
                raise ValueError("not a State")
            specs, inner = unboxed(state)
            leaves[i] = PackedState((layout_of(state), specs), inner)
        packed[position] = outer.unflatten(leaves)
    return packed


def unpack(values: Sequence[Any], packings: Packings) -> Sequence[Any]:
    """Returns the values that were packed, from what `pack` returned."""
    if not packings:
        return values
    unpacked = list(values)
    for position, outer, states in packings:
        leaves = outer.flatten_up_to(unpacked[position])
        for i in states:
            leaves[i] = _unpacked_leaf(leaves[i])
        unpacked[position] = outer.unflatten(leaves)
    return unpacked


def unpack_found(values: Sequence[Any]) -> list[Any]:
    """Like `unpack`, but finds the packed States by looking at everything: for use while a function is traced."""
    return [
        value if leaf_types.get(type(value)) else jax.tree.map(_unpacked_leaf, value, is_leaf=_is_packed)
        for value in values
    ]


def packed_gatherer(gather: Callable[[], list[Any]], packings: Packings) -> Callable[[], list[Any]]:
    """Returns a function that gathers the values of cells, with their States packed.

    Args:
        gather: a function that returns the values.
        packings: where their States are, most likely. If a value no longer has that structure, it is looked at again.
            States that appear in addition, inside of what was a leaf, are not packed. Such a tree is new to JAX, and so
            the call is made on the general path, which makes a new plan.
    """
    if not packings:
        return gather

    def gather_packed() -> list[Any]:
        nonlocal packings
        values = gather()
        try:
            return pack(values, packings)
        except ValueError:
            packings = found = packings_of(values)  # two names, because another thread may be here, too
            return pack(values, found)

    return gather_packed


def _is_state(value: Any) -> bool:
    return type(value) is State


def _is_packed(value: Any) -> bool:
    return type(value) is PackedState


def _unpacked_leaf(leaf: Any) -> Any:
    if type(leaf) is not PackedState:
        return leaf
    layout, specs = leaf.shape
    return State.from_unboxed(layout, Unboxed(specs, leaf.values))
