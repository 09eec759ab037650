"""Donation: giving away exactly the buffers that a lifted function replaces.

Which ones these are is known only after tracing, so a function is traced once to see, then compiled with them donated.
"""

import functools
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import jax

from nnx.core.graph import GraphKey
from nnx.core.trees import leaf_types
from nnx.transforms.arguments import leaf_flags
from nnx.transforms.lift import Call


class OtherChangeSet(Exception):
    """While tracing a donated function for other shapes, other cells changed than before."""


class Variant:
    """A function compiled with certain of its values, the cells and then the data, donated."""

    __slots__ = ("jitted", "given", "kept")

    def __init__(self, jitted: Any, is_given: list[bool]):
        self.jitted = jitted
        self.given = _picker([i for i, given in enumerate(is_given) if given])
        self.kept = _picker([i for i, given in enumerate(is_given) if not given])

    def arrange(self, cells: list[Any], data: tuple[Any, ...], forks: Any) -> tuple[Any, ...]:
        """The arguments of the function: what is donated, what is kept, and forks of the Contexts if there are any."""
        values = [*cells, *data]
        given, kept = self.given(values), self.kept(values)
        if _may_share(values):
            given = _without_aliases(given, kept)
        return (given, kept, forks) if forks else (given, kept)


class Donation:
    """How an entry donates: exactly the buffers that the function replaces, found by tracing first."""

    def __init__(self, entry: Any, call: Call, args: Any, kwargs: Any):
        self.entry = entry
        flags = leaf_flags(entry.owner.donated, args, kwargs)
        marks = entry.signature.marks
        self.data = [flag for flag, mark in zip(flags, marks) if mark == -1]
        donated = {mark for flag, mark in zip(flags, marks) if flag and mark >= 0}
        kept = {mark for flag, mark in zip(flags, marks) if not flag and mark >= 0}
        self.donatable = _cells_of_only(entry.signature.key, donated - kept) if entry.owner.stateful else set()
        self.by_avals = False
        self.compiled: dict[Any, Variant] = {}

    def run(self, cells: list[Any], data: tuple[Any, ...], forks: Any) -> Any:
        """Runs the function on Modules of the running trace level, whose changes can be written back."""
        try:
            return self._run(cells, data, forks)
        except OtherChangeSet:
            self.by_avals = True  # shapes decide what changes: from now on one variant per set of shapes
            self.compiled.clear()
            return self._run(cells, data, forks)

    def _run(self, cells: list[Any], data: tuple[Any, ...], forks: Any) -> Any:
        variant = self.variant(cells, data, forks)
        return variant.jitted(*variant.arrange(cells, data, forks))

    def variant(self, cells: list[Any], data: Any, forks: Any) -> Variant:
        """The function compiled with all that may be donated for these arguments."""
        key = _avals((cells, data)) if self.by_avals else None
        found = self.compiled.get(key)
        if found is None:
            result = jax.eval_shape(self.entry.traced, cells, data, forks)
            replaced = frozenset(self._replaced(result, len(cells)) & self.donatable)
            traced = functools.partial(self.traced, replaced)
            jitted = jax.jit(traced, donate_argnums=0, **self.entry.owner.options)
            found = self.compiled[key] = Variant(jitted, [*(i in replaced for i in range(len(cells))), *self.data])
            self.entry.owner.count_trace(-1)  # the look ahead and the compilation are one trace to the user
        return found

    def traced(self, replaced: frozenset[int], given: Any, kept: Any, forks: Any = ()) -> Any:
        given, kept = iter(given), iter(kept)
        count = len(self.entry.signature.key.cells) if self.entry.signature.key is not None else 0
        cells = [next(given) if i in replaced else next(kept) for i in range(count)]
        data = tuple([next(given) if flag else next(kept) for flag in self.data])
        result = self.entry.traced(cells, data, forks)
        if self._replaced(result, count) & self.donatable != replaced:
            raise OtherChangeSet
        return result

    def _replaced(self, result: Any, count: int) -> set[int]:
        """The cells whose values the function replaced or removed."""
        effects = self.entry.effects_of(result)
        return set(effects.changed) if effects.rewrite is None else effects.rewrite.replaced(count)


def _picker(places: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple([values[i] for i in places])


def _may_share(values: list[Any]) -> bool:
    """Whether one array may stand twice among these, alone or inside of others."""
    are_leaves = all(map(leaf_types.get, set(map(type, values))))
    return not are_leaves or len(set(map(id, values))) < len(values)


def _cells_of_only(key: GraphKey | None, roots: set[int]) -> set[int]:
    """The cells that can be reached from these roots of a call and from no other."""
    if key is None:
        return set()
    starts = list(dict.fromkeys(key.table[0]))
    children = [[at for _, at in plan.children] for plan in key.plans]
    shared = {cell: number for number, cell in enumerate(key.table[2])}

    def reach(numbers: Any) -> set[int]:
        seen, stack = set(), [starts[n] for n in numbers]
        while stack:
            at = stack.pop()
            if at not in seen:
                seen.add(at)
                stack.extend(children[at])
        return seen

    inside, outside = reach(roots), reach(set(range(len(starts))) - roots)
    tied_outside = {number for at in outside for _, number in key.plans[at].shared}
    return {
        i
        for i, (at, _, _) in enumerate(key.cells)
        if at in inside and at not in outside and shared.get(i) not in tied_outside
    }


def _without_aliases(given: Any, kept: Any) -> Any:
    """The donated values with a copy in place of every array that also stands elsewhere in the call."""
    leaves, treedef = jax.tree.flatten(given)
    ids = [id(leaf) for leaf in leaves]
    seen = {id(leaf) for leaf in jax.tree.leaves(kept)}
    if len(set(ids)) == len(ids) and seen.isdisjoint(ids):
        return given
    for i, leaf in enumerate(leaves):
        if id(leaf) in seen and isinstance(leaf, jax.Array):
            leaves[i] = leaf.copy()
        seen.add(id(leaf))
    return jax.tree.unflatten(treedef, leaves)


def _avals(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple([str(jax.typeof(leaf)) for leaf in leaves])
