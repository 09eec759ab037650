"""Who else holds an array: CPython's reference counts, compared with what they are if nobody does.

At the moment a compiled step asks, the value of a cell is held by the instance dict of its Module, by the list of all
cells that were gathered, and by the list of those to be donated. `ALONE` is the count of such a value. A higher count
means another holder: a clone, a State, a variable, an element of a list, an attribute of another Module.
"""

import sys
from collections.abc import Sequence
from operator import getitem
from typing import Any

import jax

getrefcount: Any = getattr(sys, "getrefcount", None)  # CPython has it; PyPy does not


def measure_alone() -> int | None:
    """Returns the count of a value that only its Module holds, or None if counts do not show who holds a value.

    The number depends on the interpreter, and not every interpreter has one: PyPy counts nothing, and a free-threaded
    build counts late. So one stand-in per kind of holder is counted here, and every holder has to make a difference of
    exactly one.
    """
    if getrefcount is None or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    names = ["module", "list", "dict", "tuple", "variable", "argument", "attribute", "closure"]
    instance_dict = {name: object() for name in names}
    in_list, in_dict, in_tuple = [instance_dict["list"]], {"x": instance_dict["dict"]}, (instance_dict["tuple"],)
    variable, captured = instance_dict["variable"], instance_dict["closure"]
    holder: Any = type("Holder", (), {})()
    holder.attribute = instance_dict["attribute"]

    def count(_: Any) -> list[int]:
        cells = [*map(getitem, [instance_dict] * len(names), names)]
        given = cells[:]
        return [*map(getrefcount, given)]

    def closure() -> Any:
        return captured

    alone, *held = count(instance_dict["argument"])
    # Used after the count, so that every holder still is one while counting.
    all_hold = (in_list, in_dict, in_tuple, variable, closure, holder.attribute)
    # A closure and the frame that it closes over share one reference.
    return alone if all_hold and held == [alone + 1] * len(held) else None


ALONE: int | None = measure_alone()


def counts_tell() -> bool:
    """Whether the reference counts of this interpreter show if somebody else holds a value."""
    return ALONE is not None


class TreeHolders:
    """What the counts inside pytrees are if nobody else holds a part of them, measured on trees of plain objects."""

    def __init__(self) -> None:
        self._alone: dict[Any, list[int] | None] = {}  # by the structure of the tree

    def are_inside(self, tree: Any) -> bool:
        """Whether somebody else holds an array of a tree, or a container in it."""
        treedef, nodes = _nodes(tree)
        counts = [*map(getrefcount, nodes)]
        if treedef not in self._alone:
            self._alone[treedef] = _counts_alone(treedef)
        alone = self._alone[treedef]
        if alone is None:
            return True
        more = [i for i, (count, least) in enumerate(zip(counts, alone, strict=True)) if count > least]
        return any(holds_array(nodes[i]) for i in more)


def _nodes(tree: Any) -> tuple[Any, list[Any]]:
    """Returns the structure of a tree, and every container and leaf inside it."""
    nodes: list[Any] = []
    # JAX calls `is_leaf` for every node. `append` returns None, which is false, so it collects them all.
    treedef = jax.tree.structure(tree, is_leaf=nodes.append)  # type: ignore[arg-type]
    del nodes[0]  # the tree itself
    return treedef, nodes


def _counts_alone(treedef: Any) -> list[int] | None:
    """Returns the counts inside a tree of this structure that nobody holds a part of; None if it cannot be built."""
    try:
        tree = jax.tree.unflatten(treedef, [object() for _ in range(treedef.num_leaves)])
        _, nodes = _nodes(tree)
    except Exception:  # a node of the user's that takes nothing but arrays
        return None
    return [*map(getrefcount, nodes)]  # while `tree` holds them, too


def holds_array(value: Any) -> bool:
    """Whether a value is an array on a device, or a tree with one."""
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))


def held_elsewhere(given: Sequence[Any], counts: Sequence[int], alone: Sequence[int]) -> list[int]:
    """Returns which values somebody else holds. Numbers, which Python shares, do not matter."""
    return [i for i, (count, least) in enumerate(zip(counts, alone)) if count > least and holds_array(given[i])]
