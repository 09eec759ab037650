"""Entering: rebuilds the Modules of a call at the current trace level, and notes what is needed to see changes later.

The body gets its own copies of everything that can change in place, containers and numpy arrays, so the caller's are
never touched. An attribute that is a Ref outside is a Ref inside, and *entered* Refs are known by the number of their
cell: any other Ref found when the body has ended was made by the body.
"""

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import jax
import numpy as np

from nnx.core.module.info import info_of
from nnx.core.statics.keys import OpenFunction
from nnx.core.statics.statics import Statics
from nnx.core.structure.build import Graph, build
from nnx.core.structure.structure import GraphKey
from nnx.core.structure.walk import traverse
from nnx.core.variables.refs import Ref
from nnx.core.variables.ties import NO_TIES, Ties, alias_groups, mutable_tree_cells, own_values
from nnx.core.variables.trees import KeyOrder, can_change, is_leaf, key_order
from nnx.transforms.engine.call import Signature


class Tree(NamedTuple):
    """What a cell that holds a pytree had on entry."""

    leaves: list[Any]
    treedef: Any
    order: KeyOrder | None


class Entered:
    """The Modules of a call, rebuilt at the current trace level, and what their cells held on entry."""

    __slots__ = ("key", "graph", "ties", "refs", "before", "trees", "arrays", "functions", "baseline")

    key: GraphKey | None
    graph: Graph
    ties: Ties
    refs: dict[int, Ref]  # by cell, those with one owner included
    before: list[Any]
    trees: dict[int, Tree]  # by cell
    arrays: dict[int, list[tuple[int, np.ndarray]]]  # copies of the numpy arrays in a cell, each with its leaf's number
    # Those whose keys were open outside. One that changes its own closure in the body is still the same function.
    functions: tuple[OpenFunction, ...]
    baseline: Any  # the walk over the Modules on entry, if a static value could be changed in place

    @property
    def roots(self) -> list[Any]:
        if self.key is None:
            return []
        return [self.graph.modules[i] for i in self.key.roots]

    def value(self, cell: int) -> Any:
        """Returns what a cell holds now; valid only while the structure is unchanged."""
        assert self.key is not None, "only a graph has cells"
        return self.graph.dicts[cell][self.key.cells[cell].name]

    def is_changed(self, cell: int, value: Any) -> bool:
        """Whether a value differs from what the cell held on entry, in-place changes included."""
        if cell in self.trees:
            leaves, treedef = jax.tree.flatten(value)
            old = self.trees[cell]
            if treedef != old.treedef or not all(map(is_, leaves, old.leaves)) or key_order(value) != old.order:
                return True
        elif value is not self.before[cell]:
            return True
        else:
            leaves = [value]
        return any(not _is_same_array(leaves[i], copy) for i, copy in self.arrays.get(cell, ()))

    def is_restructured(self) -> bool:
        modules = self.graph.modules
        if any(info_of(module).restructured for module in modules):
            return True
        if self.baseline is None:
            return False
        # No version counts a static value that was changed in place, so the structure is compared with what it was.
        walk = traverse(modules, self.functions)
        return walk.key is not self.baseline.key or not all(map(is_, walk.mutables, self.baseline.mutables))

    def regrouped(self, origins: Sequence[int], values: Sequence[Any]) -> tuple[Any, list[int]]:
        """Compares which cells share a container now with which did on entry.

        Args:
            origins: for each value, the cell it was in on entry, or -1.
            values: what the cells hold now.

        Returns:
            The groups of values that are one container, and the positions of those whose group has changed.
        """
        cells = mutable_tree_cells(values)
        groups = alias_groups(cells, [values[i] for i in cells])
        if not groups and not self.ties.aliases:
            return (), []
        # A value that was in no cell gets its own negative number, so that it matches no group on entry.
        numbers = [origin if origin >= 0 else -1 - i for i, origin in enumerate(origins)]
        now = {tuple(sorted([numbers[i] for i in group])) for group in groups}
        others = {number for group in now ^ set(self.ties.aliases) for number in group}
        return groups, [i for i, number in enumerate(numbers) if number in others]

    def write(self, cell: int, value: Any) -> None:
        """Writes a value to a cell, through its Ref if it has one."""
        assert self.key is not None, "only a graph has cells"
        ref = self.refs.get(cell)
        targets = [(self.graph.dicts[cell], self.key.cells[cell].name)] if ref is None else ref.targets()
        for values, name in targets:
            values[name] = value


def enter(key: GraphKey | None, statics: Statics, cells: Sequence[Any], ties: Ties = NO_TIES) -> Entered:
    """Builds the Modules of a graph around the given values, with copies of those that can change in place."""
    entered = Entered()
    entered.key, entered.ties, entered.functions = key, ties, statics.functions
    entered.before, entered.trees, entered.arrays, entered.refs = [], {}, {}, {}
    if key is None:
        entered.graph, entered.baseline = Graph([], [], {}, []), None
        return entered
    entered.graph = build(key, statics, own_values(cells, ties))
    entered.refs = dict(entered.graph.refs)
    for cell in ties.refs:
        at, name, spec = key.cells[cell]
        entered.refs[cell] = Ref.around(entered.graph.modules[at], name, spec)
    entered.before = [values[name] for (_, name, _), values in zip(key.cells, entered.graph.dicts)]
    for i, value in enumerate(entered.before):
        if can_change(value):
            _remember(entered, i, value)
    entered.baseline = traverse(entered.graph.modules, entered.functions) if statics.can_change else None
    return entered


def enter_call(signature: Signature, statics: Any, cells: Any, data: Any, contexts: Any) -> tuple[Entered, Any, Any]:
    """Rebuilds the Modules of a split call; returns them, and its arguments with them in place."""
    entered = enter(signature.key, statics, cells, signature.ties)
    if signature.key is not None:
        for module, path in zip(entered.graph.modules, signature.key.module_paths()):
            info_of(module).path = path
    args, kwargs = signature.fill(entered.roots, contexts, data)
    return entered, args, kwargs


def _remember(entered: Entered, cell: int, value: Any) -> None:
    """Notes what is needed to detect a change in place."""
    leaves = [value]
    if not is_leaf(value):
        tree = entered.trees[cell] = Tree(*jax.tree.flatten(value), key_order(value))
        leaves = tree.leaves
    arrays = [(i, leaf.copy()) for i, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray)]
    if arrays:
        entered.arrays[cell] = arrays


def _is_same_array(array: np.ndarray, copy: np.ndarray) -> bool:
    """Whether two numpy arrays agree bit for bit, so that a NaN equals itself and 0.0 differs from -0.0."""
    return array.shape == copy.shape and array.dtype == copy.dtype and array.tobytes() == copy.tobytes()
