"""Ties between cells: which of them are one object. A graph's key leaves this out; a call has to know it.

A `Ref` that one attribute of a graph holds may have other owners outside the graph. To the key it is an ordinary
Variable, so that two models built by the same code stay equal; inside a transform it must be a Ref, or untying it could
not be told from writing through it. And one list or dict may be the value of several cells: changed through one of
them, it has changed for all.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from nnx.core.trees import can_change, constant_types, is_leaf, leaf_types, own


class Ties(NamedTuple):
    """What the cells of a graph have in common with each other, or with attributes outside of the graph."""

    refs: tuple[int, ...]  # the cells of Refs that have one owner in the graph
    aliases: tuple[tuple[int, ...], ...]  # groups of cells that hold one and the same container


NO_TIES = Ties((), ())


def is_container(value: Any) -> bool:
    """Whether a value is a pytree whose identity matters. Tuples cannot change, and Python shares them at will."""
    return not is_leaf(value) and not isinstance(value, tuple)


def container_cells(values: Sequence[Any]) -> list[int]:
    """The numbers of the values that are containers."""
    if all(map(leaf_types.get, set(map(type, values)))):  # the usual case: nothing but arrays
        return []
    return [i for i, value in enumerate(values) if is_container(value)]


def own_values(values: Sequence[Any], ties: Ties, buffers: bool = False) -> list[Any]:
    """The values of cells with copies of all that can change in place; what was one container is one copy.

    Args:
      values: one per cell.
      ties: the ties of the graph.
      buffers: whether to copy JAX arrays as well.
    """
    if not buffers and all(map(constant_types.get, set(map(type, values)))):  # the usual case: nothing but arrays
        return list(values)
    copies: dict[int, Any] = {}
    copied = [own(value, copies, buffers) if buffers or can_change(value) else value for value in values]
    for first, *others in ties.aliases:
        for cell in others:
            copied[cell] = copied[first]
    return copied


def alias_groups(cells: Sequence[int], values: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    """The groups of cells, two or more each, whose values are one object."""
    found: dict[int, list[int]] = {}
    for cell, value in zip(cells, values, strict=True):
        found.setdefault(id(value), []).append(cell)
    if len(found) == len(cells):
        return ()
    return tuple([tuple(group) for group in found.values() if len(group) > 1])
