"""The flat form of a graph: its key and its cells in order, cached until the structure changes.

A flat form owns no Module and no array. It holds the instance dicts of the Modules, which is where the values are, and
weak references to the Modules themselves.
"""

import weakref
from collections.abc import Sequence
from operator import attrgetter, getitem
from typing import Any

from nnx.core.module_info import ModuleInfo, cached_flat, info_of
from nnx.core.refs import Ref
from nnx.core.state import Layout, State
from nnx.core.statics import Statics
from nnx.core.structure import GraphKey
from nnx.core.ties import NO_TIES, Ties, alias_groups, mutable_tree_cells
from nnx.core.trees import fresh, leaf_types
from nnx.core.versions import STRUCTURE
from nnx.core.walk import Traversal, traverse
from nnx.core.watches import comparison

_count = attrgetter("count")


class Flat:
    """The cells of a graph in order, valid until its structure changes.

    `dicts[i][names[i]]` is the value of cell i. If the cell is on a Ref, `refs[i]` is that Ref, and a write must reach
    all of its owners.
    """

    __slots__ = (
        "key", "statics", "mutables", "dicts", "names", "refs", "ties", "modules", "level", "sown", "writers", "plans",
        "last_plan", "ready", "watched", "unchanged", "_versions", "_counts", "_stamp", "_watch", "_mutable_trees",
        "_indices", "__weakref__",
    )  # fmt: skip

    def __init__(self, walk: Traversal):
        self._stamp = STRUCTURE.stamp
        self.key: GraphKey = walk.key
        self.statics: Statics = walk.detached()
        self.mutables: list[Any] = walk.mutables  # the live mutable static values, by number
        self.modules: list[weakref.ref[Any]] = [weakref.ref(module) for module in walk.modules]
        instance_dicts = [module.__dict__ for module in walk.modules]
        self.dicts: list[Any] = [instance_dicts[module] for module in self.key.owners]
        self.names: list[str] = self.key.names
        # The Refs, not the places they write to: an owner outside the graph must remain free to be collected.
        self.refs: dict[int, Ref] = {}
        infos = [info_of(module) for module in walk.modules]
        self._versions = [info.watch() for info in infos]
        for i, ref in enumerate(walk.refs):
            if ref is not None:
                self.refs[i] = ref
                self._versions.append(ref.version)
        self._counts = list(map(_count, self._versions))
        self._watch = [watch for watches in walk.watches for watch in watches]
        # Cells that hold containers. With two or more, every call has to ask which of them hold the same one.
        self._mutable_trees = mutable_tree_cells(self.values())
        if len(self._mutable_trees) < 2:
            self._mutable_trees = []
        shared = set(self.key.shared)
        lone = tuple([i for i, ref in enumerate(walk.refs) if ref is not None and i not in shared])
        aliases = self._aliases()
        self.ties: Ties = Ties(lone, aliases, walk.twins) if lone or aliases or walk.twins else NO_TIES
        levels = {id(info.level): info.level for info in infos}
        self.level: Any = next(iter(levels.values())) if len(levels) == 1 else None  # None: there are several levels
        self.sown: bool = any(info.sown for info in infos)
        self.writers: dict[tuple[int, ...], Any] = {}  # how transforms write their changes back; filled by them
        self.plans: dict[Any, Any] = {}  # how jitted functions repeat a call; filled by them
        self.last_plan: Any = None  # the one used last, which is usually the next one, too
        # A call compares one of the next two with the global stamp, and skips `is_valid` if it is the same object.
        # `ready` is the stamp at which there is nothing to check: no watched static value, no container to compare.
        # `watched` is the stamp at which only watched static values have to be checked, by `unchanged`.
        self.ready: Any = None if self._watch or self._mutable_trees else self._stamp
        self.watched: Any = self._stamp if self._watch and not self._mutable_trees else None
        self.unchanged = comparison(self._watch)
        self._indices: dict[Layout, list[int]] = {}

    def is_valid(self) -> bool:
        """Whether the graph still has the structure it had when this form was made."""
        stamp = STRUCTURE.stamp
        if self._stamp is not stamp:
            if list(map(_count, self._versions)) != self._counts:
                return False
            self._stamp = stamp
        if self._mutable_trees and self._aliases() != self.ties.aliases:
            return False
        if not self._watch:
            if not self._mutable_trees:
                self.ready = stamp
            return True
        if not self._mutable_trees:
            self.watched = stamp
        return self.unchanged()

    def _aliases(self) -> tuple[tuple[int, ...], ...]:
        cells = self._mutable_trees
        return alias_groups(cells, [self.dicts[i][self.names[i]] for i in cells]) if cells else ()

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
        is_leaf = leaf_types.get
        leaves = []
        for spec, values, name in zip(self.key.specs, self.dicts, self.names, strict=True):
            value = values[name]
            if not is_leaf(type(value)):
                value = fresh(value)
            leaves.append(value if spec is None else spec.box(value))
        return leaves

    def indices(self, layout: Layout) -> list[int]:
        """Returns for each path of a layout, canonical or not, the cell it leads to, or -1."""
        found = self._indices.get(layout)
        if found is None:
            cells = map(self.key.find, layout.paths)
            found = self._indices[layout] = [-1 if cell is None else cell for cell in cells]
        return found


def flat_of(module: Any) -> Flat:
    """Returns the flat form of the graph that starts at `module`, from the cache if it is still valid."""
    info: ModuleInfo = info_of(module)
    flat = info.flat
    if flat is None or not flat.is_valid():
        flat = Flat(traverse((module,)))
        info.remember(flat)
    return flat


def joint_flat_of(roots: Sequence[Any]) -> Flat:
    """Like `flat_of`, for the graph that starts at several distinct Modules; cells are numbered across all of them."""
    if len(roots) == 1:
        return flat_of(roots[0])
    flat = joint_flat_if_cached(roots)
    if flat is None or not flat.is_valid():
        flat = Flat(traverse(roots))
        info_of(roots[0]).remember_joint(tuple(roots[1:]), flat)
    return flat


def joint_flat_if_cached(roots: Sequence[Any]) -> Flat | None:
    """Returns the flat form that was last made of these Modules, or None; it may no longer be valid."""
    if len(roots) == 1:
        return cached_flat(roots[0])
    cached = info_of(roots[0]).joint if roots else None
    if cached is None or len(cached[0]) != len(roots) - 1:
        return None
    return cached[1] if all(map(_is_same, cached[0], roots[1:])) else None


def _is_same(weak: Any, module: Any) -> bool:
    return weak() is module
