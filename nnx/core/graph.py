"""The graph of Modules: one traversal, the key of its structure, its cached flat form, and the way back.

Nouns. A *cell* is a place that holds one State entry: `(instance dict, name)`. The *canonical path* of what is shared
has the fewest segments, then comes first in order: Modules are numbered breadth first, children in order, so the first
way to a Module is its canonical one. Cells are numbered depth first, which is the order of paths. A *table* is the
whole structure as flat tuples; its interned form is a `GraphKey`, shared by all graphs of equal structure, together
with the *plan* for building such a graph again. Nothing here recurses over Modules: depth is limited by memory alone.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, getitem
from typing import Any, NamedTuple

import jax

from nnx.core.errors import FOREIGN_METHOD, REGISTERED_AS_PYTREE, STATIC_HOLDS_STATE
from nnx.core.info import (
    MODULE,
    NODE,
    STATIC,
    STRUCTURE,
    TREE,
    Absent,
    ModuleInfo,
    absent,
    join,
    new_module,
    segment_of,
)
from nnx.core.refs import Ref
from nnx.core.state import Layout, State
from nnx.core.statics import ForeignMethod, Freezer, HoldsState, Statics, comparison, detach
from nnx.core.ties import NO_TIES, Ties, alias_groups, container_cells
from nnx.core.trace import current_level
from nnx.core.trees import fresh, leaf_types
from nnx.core.variables import Node, Spec, Static

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>", "__slots__": ()})()

TREE_SPEC = Spec.of(Node, {})  # the container in which a State holds a pytree that is no Variable
SHARED = "shared"  # in a table: a variable whose cell has several owners in the graph
ABSENT = "absent"


def is_static(kind: Any) -> bool:
    """Whether an attribute of this kind is part of the structure and no data; `nnx.Static` makes such ones too."""
    return kind is STATIC or (type(kind) is Spec and kind.type is Static)


# Traversal


class Traversal:
    """One walk over the graph that starts at some roots. Short-lived: it holds the Modules."""

    __slots__ = ("modules", "parents", "index", "roots", "cells", "refs", "table", "statics", "mutables", "watches")

    modules: list[Any]
    parents: list[tuple[int, str]]  # (index of the parent, attribute name); -1 for roots
    index: dict[int, int]  # of a Module, by its id
    roots: tuple[int, ...]
    cells: list[tuple[int, str, Any]]  # (index of the Module, attribute name, kind)
    refs: list[Any]  # the Ref of a cell, or None
    table: tuple[Any, ...]
    statics: list[Any]  # the live values of the static attributes
    mutables: list[Any]  # the values among and inside of them that can change, by number
    watches: list[list[Any]]  # how to notice a change of each of them

    def path(self, index: int) -> str:
        return module_path(self.parents, index)

    def index_of(self, module: Any) -> int | None:
        return self.index.get(id(module))

    def detached(self) -> Statics:
        """The static values as they are now, detached from the graph."""
        return detach(self.statics, self.mutables, self.index_of)


def module_path(parents: Sequence[tuple[int, str]], index: int) -> str:
    """The canonical path of a Module, from the parents of all of them."""
    segments = []
    while parents[index][0] >= 0:
        index, name = parents[index]
        segments.append(segment_of(name))
    return "/".join(reversed(segments))


def depth_first(parents: Sequence[tuple[int, str]]) -> Iterator[int]:
    """The numbers of Modules in the order of their canonical paths, from the parents of all of them."""
    children: list[list[int]] = [[] for _ in parents]
    stack: list[int] = []
    for index, (parent, _) in reversed(list(enumerate(parents))):
        (children[parent] if parent >= 0 else stack).append(index)
    while stack:
        yield (index := stack.pop())
        stack.extend(children[index])  # the last child lies lowest


def number_modules(
    roots: Iterable[Any],
) -> tuple[list[Any], list[tuple[int, str]], dict[int, int], dict[int, list[Any]]]:
    """Every distinct Module reachable from `roots`, breadth first; with parents, index by id, and the Refs found."""
    modules: list[Any] = []
    parents: list[tuple[int, str]] = []
    index: dict[int, int] = {}
    refs: dict[int, list[Any]] = {}  # id -> [ref, number of owners in this graph, first owner, its name]
    for root in roots:
        if id(root) not in index:
            index[id(root)] = len(modules)
            modules.append(root)
            parents.append((-1, ""))
    i = 0
    while i < len(modules):
        info, values = modules[i]._nnx_info, modules[i].__dict__
        kinds = info.kinds
        for name in info.sorted_names():
            kind = kinds[name]
            if kind is MODULE:
                child = values[name]
                if id(child) not in index:
                    index[id(child)] = len(modules)
                    modules.append(child)
                    parents.append((i, name))
            elif type(kind) is Ref:
                seen = refs.get(id(kind))
                if seen is None:
                    refs[id(kind)] = [kind, 1, i, name]
                else:
                    seen[1] += 1
        i += 1
    return modules, parents, index, refs


def traverse(roots: Sequence[Any]) -> Traversal:
    """Walks the graph and writes down its structure.

    Raises:
      ValueError: a static value has come to hold a Module or array.
    """
    modules, parents, index, refs = number_modules(roots)
    for module in {type(module): module for module in modules}.values():
        refuse_pytree(module)
    shared = {key: number for number, key in enumerate(k for k, seen in refs.items() if seen[1] > 1)}
    walk = Traversal()
    walk.modules, walk.parents, walk.index = modules, parents, index
    walk.roots = tuple([index[id(root)] for root in roots])
    walk.cells, walk.refs = [], []
    static_keys = _freeze_statics(walk)
    entries: list[list[Any]] = [[] for _ in modules]
    ref_cells = [0] * len(shared)
    stack: list[tuple[int, Iterator[str]]] = []
    for start in dict.fromkeys(walk.roots):
        stack.append((start, iter(modules[start]._nnx_info.sorted_names())))
        while stack:
            at, names = stack[-1]
            kinds, values, attrs = modules[at]._nnx_info.kinds, modules[at].__dict__, entries[at]
            for name in names:
                kind = kinds[name]
                cls = type(kind)
                if is_static(kind):
                    attrs.append((name, kind, *static_keys[at, name]))
                elif kind is MODULE:
                    child = index[id(values[name])]
                    attrs.append((name, MODULE, child))
                    if parents[child] == (at, name):
                        stack.append((child, iter(modules[child]._nnx_info.sorted_names())))
                        break
                elif cls is Absent:
                    attrs.append((name, ABSENT, kind.spec))
                elif cls is Ref and id(kind) in shared:
                    attrs.append((name, SHARED, kind._spec, shared[id(kind)]))
                    if refs[id(kind)][2:] == [at, name]:
                        ref_cells[shared[id(kind)]] = len(walk.cells)
                        walk.cells.append((at, name, kind._spec))
                        walk.refs.append(kind)
                else:
                    ref = kind if cls is Ref else None
                    kind = ref._spec if ref is not None else kind
                    attrs.append((name, kind, len(walk.cells)))
                    walk.cells.append((at, name, kind))
                    walk.refs.append(ref)
            else:
                stack.pop()
    walk.table = (
        walk.roots,
        tuple([(type(module), tuple(attrs)) for module, attrs in zip(modules, entries, strict=True)]),
        tuple(ref_cells),
    )
    return walk


def refuse_pytree(module: Any) -> None:
    """Raises ValueError if the class of a Module is registered with JAX as a pytree."""
    if not jax.tree_util.all_leaves((module,)):
        raise ValueError(REGISTERED_AS_PYTREE.format(name=type(module).__name__))


def _freeze_statics(walk: Traversal) -> dict[tuple[int, str], tuple[Any, int]]:
    """The key and the number of every static attribute, by Module and name.

    Modules are taken in the order of their numbers, which unlike the depth-first order is the same for every choice
    of roots: a body that changes nothing must find mutable values under the numbers they had when it was entered.
    """
    freezer = Freezer(walk.index_of)
    walk.statics = []
    found = {}
    for at, module in enumerate(walk.modules):
        kinds, values = module._nnx_info.kinds, module.__dict__
        for name in module._nnx_info.sorted_names():
            kind = kinds[name]
            if is_static(kind):
                freezer.arrays_inside = kind is not STATIC  # arrays in an nnx.Static are meant to be there
                found[at, name] = (_static_key(freezer, walk, at, name, values[name]), len(walk.statics))
                walk.statics.append(values[name])
    walk.mutables, walk.watches = freezer.mutables, freezer.watches
    return found


def _static_key(freezer: Freezer, walk: Traversal, at: int, name: str, value: Any) -> Any:
    try:
        return freezer.key(value)
    except HoldsState as found:
        path = join(walk.path(at), name)
        route = found.route.replace("it[", f"{path}[", 1)
        raise ValueError(STATIC_HOLDS_STATE.format(path=path, name=name, what=found.what, route=route)) from None
    except ForeignMethod as found:
        path = join(walk.path(at), name)
        raise ValueError(FOREIGN_METHOD.format(path=path, method=found.what)) from None


# Structure


class Plan(NamedTuple):
    """How to build one Module of a graph: all but the values."""

    cls: type
    kinds: dict[str, Any]
    statics: list[tuple[str, int]]  # (name, number of the static value)
    children: list[tuple[str, int]]
    shared: list[tuple[str, int]]  # (name, number of the shared cell)


class GraphKey:
    """An interned table, and what follows from it: equal structures have one GraphKey."""

    __slots__ = ("table", "hash", "_plans", "_paths", "_layout", "cells", "kinds", "hooks", "__weakref__")

    table: tuple[Any, ...]
    hash: int

    @staticmethod
    def of(table: tuple[Any, ...]) -> "GraphKey":
        key = _keys.get(table)
        if key is None:
            key = GraphKey()
            key.table = table
            key.hash = hash(table)
            key._plans = key._paths = key._layout = None
            key.cells = key._number_cells()
            key.kinds = [kind for _, _, kind in key.cells]
            key.hooks = [i for i, kind in enumerate(key.kinds) if type(kind) is Spec and kind.on_set is not None]
            key = _keys.setdefault(table, key)
        return key

    def _number_cells(self) -> list[tuple[int, str, Any]]:
        cells: dict[int, tuple[int, str, Any]] = {}
        ref_cells = self.table[2]
        shared: dict[int, tuple[int, str, Any]] = {}
        for at, (_, attrs) in enumerate(self.table[1]):
            for name, kind, *rest in attrs:
                if kind is SHARED:
                    shared.setdefault(rest[1], (at, name, rest[0]))
                elif kind is NODE or kind is TREE or (type(kind) is Spec and not is_static(kind)):
                    cells[rest[0]] = (at, name, kind)
        for number, cell in shared.items():
            cells[ref_cells[number]] = cell
        return [cells[i] for i in range(len(cells))]

    def parents(self) -> list[tuple[int, str]]:
        parents: list[tuple[int, str]] = [(-2, "")] * len(self.table[1])
        for root in self.table[0]:
            parents[root] = (-1, "")
        for at, (_, attrs) in enumerate(self.table[1]):
            for name, kind, *rest in attrs:
                if kind is MODULE and parents[rest[0]][0] == -2:
                    parents[rest[0]] = (at, name)
        return parents

    @property
    def plans(self) -> list[Plan]:
        plans = self._plans
        if plans is None:
            plans = self._plans = [_plan(cls, attrs) for cls, attrs in self.table[1]]
        return plans

    def cell_roots(self) -> list[tuple[int, str]]:
        """For each cell the Module number of its root, and the path from there."""
        paths = self._paths
        if paths is None:
            parents = self.parents()
            prefixes: dict[int, tuple[int, str]] = {}
            paths = []
            for at, name, _ in self.cells:
                if at not in prefixes:
                    root, segments = at, []
                    while parents[root][0] >= 0:
                        root, segment = parents[root]
                        segments.append(segment_of(segment))
                    prefixes[at] = (root, "/".join(reversed(segments)))
                root, prefix = prefixes[at]
                paths.append((root, join(prefix, name)))
            self._paths = paths
        return paths

    def find(self, path: str) -> int | None:
        """The cell that any path leads to, canonical or not; for graphs with one root."""
        cell = self.layout.index.get(path)
        if cell is not None:
            return cell
        at = self.table[0][0]
        *parents, last = path.split("/")
        for segment in parents:
            entry = self._entry(at, segment)
            if entry is None or entry[1] is not MODULE:
                return None
            at = entry[2]
        entry = self._entry(at, last)
        if entry is None:
            return None
        if entry[1] is SHARED:
            return self.table[2][entry[3]]
        is_cell = entry[1] is NODE or entry[1] is TREE or (type(entry[1]) is Spec and len(entry) == 3)
        return entry[2] if is_cell else None

    def _entry(self, at: int, segment: str) -> Any:
        return next((entry for entry in self.table[1][at][1] if segment_of(entry[0]) == segment), None)

    @property
    def layout(self) -> Layout:
        """The paths of the cells; for graphs with one root."""
        layout = self._layout
        if layout is None:
            layout = self._layout = Layout.of(tuple([path for _, path in self.cell_roots()]))
        return layout


_keys: "weakref.WeakValueDictionary[tuple[Any, ...], GraphKey]" = weakref.WeakValueDictionary()


def _plan(cls: type, attrs: Sequence[Any]) -> Plan:
    kinds: dict[str, Any] = {}
    statics, children, shared = [], [], []
    for name, kind, *rest in attrs:
        kinds[name] = kind
        if is_static(kind):
            statics.append((name, rest[1]))
        elif kind is MODULE:
            children.append((name, rest[0]))
        elif kind is SHARED:
            shared.append((name, rest[1]))
        elif kind is ABSENT:
            kinds[name] = absent(cls, rest[0])
    return Plan(cls, kinds, statics, children, shared)


class Graph(NamedTuple):
    """A graph that was just built: its Modules by number, and the instance dict of each cell."""

    modules: list[Any]
    dicts: list[dict[str, Any]]
    refs: list[Any]
    mutables: list[Any]  # its mutable static values, by number


def build(key: GraphKey, statics: Statics, values: Sequence[Any]) -> Graph:
    """Makes the Modules of a graph anew, around the given values (`MISSING` for those there are none for)."""
    level = current_level()
    plans = key.plans
    modules = [new_module(plan.cls, dict(plan.kinds), level) for plan in plans]
    instance_dicts = [module.__dict__ for module in modules]
    static_values, mutables = statics.attach(modules)
    for values_of, plan in zip(instance_dicts, plans, strict=True):
        for name, at in plan.statics:
            values_of[name] = static_values[at]
        for name, at in plan.children:
            values_of[name] = modules[at]
    if key.hooks:
        values = list(values)
        for i in key.hooks:
            if values[i] is not MISSING:
                spec = key.kinds[i]
                values[i] = spec.on_set(values[i], spec.metadata)
    dicts = []
    for (at, name, kind), value in zip(key.cells, values, strict=True):
        values_of = instance_dicts[at]
        dicts.append(values_of)
        if value is MISSING:
            modules[at]._nnx_info.kinds[name] = absent(type(modules[at]), kind)
        else:
            values_of[name] = value
    refs = _build_refs(key, modules, values, level) if key.table[2] else []
    return Graph(modules, dicts, refs, mutables)


def _build_refs(key: GraphKey, modules: list[Any], values: Sequence[Any], level: Any) -> list[Any]:
    refs = []
    for cell in key.table[2]:
        value = values[cell]
        refs.append(None if value is MISSING else Ref.rebuilt(key.kinds[cell], value, level))
    for module, plan in zip(modules, key.plans, strict=True):
        for name, number in plan.shared:
            ref = refs[number]
            if ref is None:
                module._nnx_info.kinds[name] = absent(type(module), key.kinds[key.table[2][number]])
            else:
                module._nnx_info.kinds[name] = ref
                module.__dict__[name] = ref.__dict__["value"]
                ref._owners.append((weakref.ref(module), name))
    return refs


# The cached flat form

_count = attrgetter("count")


class Flat:
    """The cells of a graph in order, valid until its structure changes. Owns no Module.

    `dicts[i][names[i]]` is the value of cell i; `refs[i]`, if it is shared, is the Ref that a write to it
    must reach.
    """

    __slots__ = (
        "key", "statics", "mutables", "dicts", "names", "refs", "ties", "modules", "level", "sown", "writers", "plans",
        "last_plan", "ready", "watched", "unchanged", "_versions", "_counts", "_stamp", "_watch", "_containers",
        "_indices", "__weakref__",
    )  # fmt: skip

    def __init__(self, walk: Traversal):
        self._stamp = STRUCTURE.stamp
        self.key: GraphKey = GraphKey.of(walk.table)
        self.statics: Statics = walk.detached()
        self.mutables: list[Any] = walk.mutables  # the live ones
        self.modules: list[weakref.ref[Any]] = [weakref.ref(module) for module in walk.modules]
        instance_dicts = [module.__dict__ for module in walk.modules]
        self.dicts: list[Any] = [instance_dicts[at] for at, _, _ in walk.cells]
        self.names: list[str] = [name for _, name, _ in walk.cells]
        self.refs: dict[int, Ref] = {}  # not the places it writes to: a tied Module outside must be free to go
        self._versions = [module._nnx_info.watch() for module in walk.modules]
        for i, ref in enumerate(walk.refs):
            if ref is not None:
                self.refs[i] = ref
                self._versions.append(ref.version)
        self._counts = list(map(_count, self._versions))
        self._watch = [watch for watches in walk.watches for watch in watches]
        # cells that hold containers; with two or more, every call has to ask which of them hold the same one
        self._containers = container_cells(self.values())
        if len(self._containers) < 2:
            self._containers = []
        shared = set(walk.table[2])
        lone = tuple([i for i, ref in enumerate(walk.refs) if ref is not None and i not in shared])
        aliases = self._aliases()
        self.ties: Ties = Ties(lone, aliases) if lone or aliases else NO_TIES
        levels = {id(module._nnx_info.level): module._nnx_info.level for module in walk.modules}
        self.level: Any = next(iter(levels.values())) if len(levels) == 1 else None  # None: they are of several levels
        self.sown: bool = any(module._nnx_info.sown for module in walk.modules)
        self.writers: dict[tuple[int, ...], Any] = {}  # how transforms write their changes back; filled by them
        self.plans: dict[Any, Any] = {}  # how jitted functions repeat a call; filled by them
        self.last_plan: Any = None  # the one used last, which is mostly the next one, too
        # the stamp at which nothing needs a look: no watched static value, no container to compare, nothing sown
        self.ready: Any = None if self._watch or self._containers or self.sown else self._stamp
        # the stamp at which only watched static values need a look, and the function that takes it
        self.watched: Any = self._stamp if self._watch and not self._containers and not self.sown else None
        self.unchanged = comparison(self._watch)
        self._indices: dict[Layout, list[int]] = {}

    def is_valid(self) -> bool:
        stamp = STRUCTURE.stamp
        if self._stamp is not stamp:
            if list(map(_count, self._versions)) != self._counts:
                return False
            self._stamp = stamp
        if self._containers and self._aliases() != self.ties.aliases:
            return False
        if not self._watch:
            if not self.sown and not self._containers:
                self.ready = stamp
            return True
        if not self.sown and not self._containers:
            self.watched = stamp
        return self.unchanged()

    def _aliases(self) -> tuple[tuple[int, ...], ...]:
        cells = self._containers
        return alias_groups(cells, [self.dicts[i][self.names[i]] for i in cells]) if cells else ()

    def is_ready(self) -> bool:
        """Whether it is valid, watched static values included, and nothing sown has to be warned of."""
        return self.is_valid() and not self.sown

    def values(self) -> list[Any]:
        return [*map(getitem, self.dicts, self.names)]

    def write(self, i: int, value: Any) -> None:
        self.dicts[i][self.names[i]] = value
        if i in self.refs:
            for values, name in self.refs[i].targets():
                values[name] = value

    def state(self) -> State:
        return State.from_layout(self.key.layout, self.leaves())

    def leaves(self) -> list[Any]:
        """The State leaves: containers made anew around the current values, and bare arrays."""
        is_leaf = leaf_types.get
        leaves = []
        for kind, values, name in zip(self.key.kinds, self.dicts, self.names, strict=True):
            value = values[name]
            if not is_leaf(type(value)):
                value = fresh(value)
            if kind is not NODE:
                value = TREE_SPEC.box(value) if kind is TREE else kind.box(value)
            leaves.append(value)
        return leaves

    def indices(self, layout: Layout) -> list[int]:
        """For each path of a layout the cell it names, canonical or not, or -1."""
        found = self._indices.get(layout)
        if found is None:
            cells = map(self.key.find, layout.paths)
            found = self._indices[layout] = [-1 if cell is None else cell for cell in cells]
        return found


def flat_of(module: Any) -> Flat:
    """The flat form of the graph that starts at `module`, from the cache if it is still true."""
    info: ModuleInfo = module._nnx_info
    flat = info.flat
    if flat is None or not flat.is_valid():
        flat = Flat(traverse((module,)))
        info.remember(flat)
    return flat


def joint_flat_of(roots: Sequence[Any]) -> Flat:
    """Like `flat_of`, for the graph that starts at several distinct Modules; cells are numbered over all of them."""
    if len(roots) == 1:
        return flat_of(roots[0])
    flat = joint_flat_if_cached(roots)
    if flat is None or not flat.is_valid():
        flat = Flat(traverse(roots))
        roots[0]._nnx_info.remember_joint(tuple(roots[1:]), flat)
    return flat


def joint_flat_if_cached(roots: Sequence[Any]) -> Flat | None:
    """The flat form that was last made of these Modules; it may no longer be valid."""
    if len(roots) == 1:
        return roots[0]._nnx_info.flat
    cached = roots[0]._nnx_info.joint if roots else None
    if cached is None or len(cached[0]) != len(roots) - 1:
        return None
    return cached[1] if all(map(_is_same, cached[0], roots[1:])) else None


def _is_same(weak: Any, module: Any) -> bool:
    return weak() is module
