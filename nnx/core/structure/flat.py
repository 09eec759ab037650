"""The flat form of a graph: its key and its cells in order, cached until the structure changes.

A flat form owns no Module and no array. It holds the instance dicts of the Modules, which is where the values are, and
weak references to the Modules themselves.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, getitem
from typing import Any

from nnx.core.module.info import cached_flat, info_of
from nnx.core.state.state import Layout, State
from nnx.core.statics.keys import settle
from nnx.core.statics.statics import Statics
from nnx.core.statics.watches import comparison, watched_unchanged
from nnx.core.structure.structure import GraphKey
from nnx.core.structure.versions import STRUCTURE, Revision, Version
from nnx.core.structure.walk import Traversal, traverse
from nnx.core.variables.refs import Ref
from nnx.core.variables.ties import NO_TIES, Ties, alias_groups, mutable_tree_cells, orders_of
from nnx.core.variables.trees import fresh, holds_dicts, key_order, leaf_types
from nnx.core.variables.variables import box_all

_revision = attrgetter("revision")


class Flat:
    """The cells of a graph in order, valid until its structure changes.

    `dicts[i][names[i]]` is the value of cell i. If the cell is on a Ref, `refs[i]` is that Ref, and a write must reach
    all of its owners.
    """

    __slots__ = (
        "key", "statics", "mutables", "modules", "dicts", "names", "refs", "ties", "level", "sown",  # the graph
        "ready", "versions", "revisions", "unchanged", "_unchanged_once_settled",  # whether it is still valid
        "writers", "plans", "last_plan", "_indices", "__weakref__",  # what others cache here
    )  # fmt: skip

    def __init__(self, walk: Traversal):
        stamp = STRUCTURE.stamp  # read before the revisions, so that no change is missed
        infos = [info_of(module) for module in walk.modules]
        instance_dicts = [module.__dict__ for module in walk.modules]
        self.key: GraphKey = walk.key
        self.statics: Statics = walk.detached()
        self.mutables: list[Any] = walk.mutables  # the live mutable static values, by number
        self.modules: list[weakref.ref[Any]] = [weakref.ref(module) for module in walk.modules]
        self.dicts: list[Any] = [instance_dicts[module] for module in self.key.owners]
        self.names: list[str] = self.key.names
        # The Refs, not the dicts they write to: an owner outside the graph must remain free to be collected.
        self.refs: dict[int, Ref] = {i: ref for i, ref in enumerate(walk.refs) if ref is not None}
        values = self.values()
        trees, with_dicts = _tree_cells(values)
        self.ties: Ties = _ties(self.key, self.refs, walk.twins, values, trees, with_dicts)
        levels = {id(info.level): info.level for info in infos}
        self.level: Any = next(iter(levels.values())) if len(levels) == 1 else None  # None: there are several levels
        self.sown: bool = any(info.sown and not info.sown.isdisjoint(info.kinds) for info in infos)

        # What a call checks, in this order. `ready` is the stamp at which the revisions were last compared: while it is
        # the global one, they are the same. `unchanged` asks what no stamp tells, and is None if there is nothing to
        # ask. The versions are those of the Modules by number, then those of the Refs.
        self.ready: Any = stamp
        self.versions: list[Version] = [info.watch() for info in infos] + [ref.version for ref in self.refs.values()]
        self.revisions: list[Revision] = list(map(_revision, self.versions))
        checks = _checks(self, walk, values, trees, with_dicts)
        self._unchanged_once_settled: Callable[[], bool] | None = _all_of(checks)
        watches = [watch for function in walk.functions for watch in function.watches]
        self.unchanged = _all_of([functools.partial(watched_unchanged, watches), *checks] if watches else checks)

        self.writers: dict[tuple[int, ...], Any] = {}  # how transforms write their changes back
        self.plans: dict[Any, Any] = {}  # how jitted functions repeat a call
        self.last_plan: Any = None  # the one used last, which is usually the next one, too
        self._indices: dict[Layout, list[int]] = {}

    def is_valid(self) -> bool:
        """Whether the graph still has the structure it had when this form was made."""
        stamp = STRUCTURE.stamp
        if self.ready is not stamp:
            if list(map(_revision, self.versions)) != self.revisions:
                return False
            self.ready = stamp
        unchanged = self.unchanged
        return unchanged is None or unchanged()

    def settle_functions(self) -> None:
        """Settles the keys of the functions among the static values: a call with this form is about to be compiled."""
        if self.unchanged is not self._unchanged_once_settled:
            settle(self.statics.functions)
            self.unchanged = self._unchanged_once_settled

    def may_come_back(self) -> bool:
        """Whether this form is valid, or would be after some plain variables were added or removed again."""
        return all(map(Revision.can_lead_to, map(_revision, self.versions), self.revisions))

    def starts_at(self, roots: Sequence[Any]) -> bool:
        """Whether these are the roots of the graph."""
        numbers = self.key.roots
        return len(numbers) == len(roots) and all(self.modules[n]() is root for n, root in zip(numbers, roots))

    def values(self) -> list[Any]:
        """Returns the value of every cell."""
        return [*map(getitem, self.dicts, self.names)]

    def write(self, i: int, value: Any) -> None:
        """Writes a value to a cell, and to every owner of its Ref."""
        self.dicts[i][self.names[i]] = value
        if i in self.refs:
            for values, name in self.refs[i].targets():
                values[name] = value

    def state(self) -> State:
        """Returns all data as a State; for graphs with one root."""
        return State.from_layout(self.key.layout, self.leaves())

    def leaves(self) -> list[Any]:
        """Returns the State leaf of every cell: a new container around the current value, or the bare array."""
        values = self.values()
        if not all(map(leaf_types.get, set(map(type, values)))):
            values = [value if leaf_types.get(type(value)) else fresh(value) for value in values]
        return box_all(self.key.specs, values)

    def indices(self, layout: Layout) -> list[int]:
        """Returns for each path of a layout, canonical or not, the cell it leads to, or -1."""
        found = self._indices.get(layout)
        if found is None:
            cells = map(self.key.find, layout.paths)
            found = self._indices[layout] = [-1 if cell is None else cell for cell in cells]
        return found


def _tree_cells(values: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Returns the cells that hold mutable trees, and those that hold dicts."""
    if all(map(leaf_types.get, set(map(type, values)))):  # the usual case: nothing but arrays
        return [], []
    return mutable_tree_cells(values), [i for i, value in enumerate(values) if holds_dicts(value)]


def _ties(
    key: GraphKey,
    refs: dict[int, Ref],
    twins: tuple[tuple[int, ...], ...],
    values: Sequence[Any],
    trees: Sequence[int],
    with_dicts: Sequence[int],
) -> Ties:
    shared = set(key.shared)
    lone = tuple([cell for cell in refs if cell not in shared])
    aliases = alias_groups(trees, [values[i] for i in trees])
    orders = orders_of([(i, values[i]) for i in with_dicts])
    return Ties(lone, aliases, twins, orders) if lone or aliases or twins or orders else NO_TIES


def _checks(
    flat: Flat, walk: Traversal, values: Sequence[Any], trees: Sequence[int], with_dicts: Sequence[int]
) -> list[Callable[[], bool]]:
    """Returns what a call has to ask because no stamp tells, as functions that do not refer to the flat form.

    That would be a cycle: the form would not be freed together with its Module.
    """
    checks: list[Callable[[], bool]] = []
    if with_dicts:
        read_dicts, orders = _reader(flat, with_dicts), [key_order(values[i]) for i in with_dicts]
        checks.append(lambda: [*map(key_order, read_dicts())] == orders)
    if len(trees) > 1:  # two of them can come to be one object, or stop being one
        read_trees, aliases = _reader(flat, trees), flat.ties.aliases
        checks.append(lambda: alias_groups(trees, read_trees()) == aliases)
    watches = [watch for watches in walk.watches for watch in watches]
    if watches:
        checks.append(comparison(watches))
    return checks


def _reader(flat: Flat, cells: Sequence[int]) -> Callable[[], Iterator[Any]]:
    """Returns a function that yields the current values of some cells."""
    dicts, names = [flat.dicts[i] for i in cells], [flat.names[i] for i in cells]
    return lambda: map(getitem, dicts, names)


def _all_of(checks: Sequence[Callable[[], bool]]) -> Callable[[], bool] | None:
    if len(checks) < 2:  # the usual case: nothing to ask, or one config
        return checks[0] if checks else None
    return lambda: all(check() for check in checks)


def flat_of(module: Any) -> Flat:
    """Returns the flat form of the graph that starts at `module`, from the cache if it is still valid."""
    flat = info_of(module).flat
    if flat is None or not flat.is_valid():
        flat = flat_that_came_back((module,)) or _walk((module,))
    return flat


def joint_flat_of(roots: Sequence[Any]) -> Flat:
    """Like `flat_of`, for the graph that starts at several distinct Modules; cells are numbered across all of them."""
    if len(roots) == 1:
        return flat_of(roots[0])
    flat = joint_flat_if_cached(roots)
    if flat is None or not flat.is_valid():
        flat = flat_that_came_back(roots) or _walk(roots)
    return flat


def flat_that_came_back(roots: Sequence[Any]) -> Flat | None:
    """Returns an earlier flat form of these Modules that is valid again, and makes it the one in use."""
    for flat in info_of(roots[0]).flats if roots else ():
        if flat.starts_at(roots) and flat.is_valid():
            use(flat, roots)
            return flat
    return None


def use(flat: Flat, roots: Sequence[Any]) -> None:
    """Makes a flat form of these Modules the first one that will be looked at."""
    info = info_of(roots[0])
    if len(roots) == 1:
        info.flat = flat
    elif info.joint is not None:
        info.joint = (info.joint[0], flat)


def _walk(roots: Sequence[Any]) -> Flat:
    for _ in range(_ATTEMPTS):
        stamp = STRUCTURE.stamp
        flat = Flat(traverse(roots))
        if STRUCTURE.stamp is stamp:
            info = info_of(roots[0])
            info.remember(flat) if len(roots) == 1 else info.remember_joint(tuple(roots[1:]), flat)
            return flat
    # Other threads keep changing Modules. If one of ours was among them, the walk may have seen it before the change,
    # and its revision after: such a form must not be kept.
    return flat


_ATTEMPTS = 3


def joint_flat_if_cached(roots: Sequence[Any]) -> Flat | None:
    """Returns the flat form that was last made of these Modules, or None; it may no longer be valid."""
    if len(roots) == 1:
        return cached_flat(roots[0])
    cached = info_of(roots[0]).joint if roots else None
    if cached is None or len(cached[0]) != len(roots) - 1:
        return None
    return cached[1] if all(weak() is root for weak, root in zip(cached[0], roots[1:])) else None
