"""Ties between cells: which of them are one object. The key of a graph leaves this out, but transforms need it.

Transforms also need the order of the items in its dicts, which can change in place.

A `Ref` on one attribute of a graph may have other owners outside the graph. In the key it is an ordinary Variable, so
that two models built by the same code are equal; inside a transform it must be a Ref, because otherwise untying the
attribute would look the same as writing through the Ref.

A *mutable tree* is a list, dict or other pytree whose identity matters. One of them can be the value of several cells:
a change through one of the cells is then a change of all.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from nnx.core.variables.trees import (
    KeyOrder,
    can_change,
    constant_types,
    holds_dicts,
    in_order,
    is_leaf,
    key_order,
    leaf_types,
    own,
)


class Ties(NamedTuple):
    """What the cells of a graph share with each other, or with attributes outside the graph."""

    refs: tuple[int, ...]  # the cells of Refs that have one owner in the graph
    aliases: tuple[tuple[int, ...], ...]  # groups of cells that hold the same mutable tree
    twins: tuple[tuple[int, ...], ...]  # groups of Modules with one instance dict; see views
    orders: tuple[tuple[int, KeyOrder], ...] = ()  # the order of the dicts in a cell, unless all are sorted


NO_TIES = Ties((), (), ())


def is_mutable_tree(value: Any) -> bool:
    """Whether a value is a pytree whose identity matters. That of tuples does not: they cannot change."""
    return not isinstance(value, tuple) and not is_leaf(value)


def is_news(value: Any, before: Any) -> bool:
    """Whether flat forms have to know that a value replaces another one.

    A flat form remembers which cells hold mutable trees, because every call asks which of those are one object, and
    which cells hold dicts, because it asks for the order of their items.
    """
    if is_leaf(value):
        return False
    return (is_mutable_tree(value) and not is_mutable_tree(before)) or (holds_dicts(value) and not holds_dicts(before))


def mutable_tree_cells(values: Sequence[Any]) -> list[int]:
    """Returns the numbers of the values that are mutable trees."""
    if all(map(leaf_types.get, set(map(type, values)))):  # the usual case: nothing but arrays
        return []
    return [i for i, value in enumerate(values) if is_mutable_tree(value)]


def orders_of(values: Iterable[tuple[int, Any]]) -> tuple[tuple[int, KeyOrder], ...]:
    """Returns the order of the dicts in the values of cells, for those in which they are not sorted."""
    found = [(cell, key_order(value)) for cell, value in values if not leaf_types.get(type(value))]
    return tuple([(cell, order) for cell, order in found if order is not None])


def own_values(values: Sequence[Any], ties: Ties, buffers: bool = False) -> list[Any]:
    """Returns the values of cells with copies of everything that can change in place; one tree has one copy.

    Args:
        values: the values, one per cell.
        ties: the ties of the graph.
        buffers: whether to copy JAX arrays as well.
    """
    if not buffers and all(map(constant_types.get, set(map(type, values)))):  # the usual case: nothing but arrays
        return list(values)
    copies: dict[int, Any] = {}
    copied = [own(value, copies, buffers) if buffers or can_change(value) else value for value in values]
    for cell, order in ties.orders:  # the values may have been through JAX, which sorts the items of dicts
        copied[cell] = in_order(copied[cell], order)
    for first, *others in ties.aliases:
        for cell in others:
            copied[cell] = copied[first]
    return copied


def alias_groups(cells: Sequence[int], values: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of cells, two or more each, whose values are the same object."""
    found: dict[int, list[int]] = {}
    for cell, value in zip(cells, values, strict=True):
        found.setdefault(id(value), []).append(cell)
    if len(found) == len(cells):
        return ()
    return tuple([tuple(group) for group in found.values() if len(group) > 1])
