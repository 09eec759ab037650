"""Walking a graph of Modules: one pass that numbers its Modules and cells and writes down its structure.

Nothing here recurses over Modules, so the depth of a model is limited by memory alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from nnx.core.errors import FOREIGN_METHOD, REGISTERED_AS_PYTREE, STATIC_HOLDS_STATE
from nnx.core.module.info import class_of, info_of, inserted_names, is_view, values_of
from nnx.core.module.kinds import ABSENT, NODE, STATIC, SUBMODULE, TREE, Absent, is_cell, is_static
from nnx.core.state.paths import join
from nnx.core.statics.keys import ForeignMethod, HoldsState, KeyMaker, OpenFunction
from nnx.core.statics.statics import Statics, detach
from nnx.core.structure.structure import ROOT, GraphKey, Parent, make_parent, module_path
from nnx.core.variables.refs import Ref
from nnx.core.variables.variables import spec_of


class Numbering(NamedTuple):
    """The distinct Modules of a graph, breadth first, children in path order."""

    modules: list[Any]
    parents: list[Parent]
    index: dict[int, int]  # the number of a Module, by its id
    owners: dict[int, list[tuple[int, str]]]  # the attributes on a Ref, as (Module, name), by the id of the Ref
    statics: list[tuple[int, str, Any]]  # the static attributes, as (Module, name, kind)
    data_kinds: set[Any]  # the kinds of all attributes that hold data, but for Refs

    def depth_first(self) -> Iterator[int]:
        """Yields the numbers of the Modules depth first, each Module's children as its attributes were set."""
        return depth_first(self.parents, [info_of(module).insertion_order() for module in self.modules])


def number_modules(roots: Iterable[Any]) -> Numbering:
    """Numbers every distinct Module that can be reached from `roots`."""
    modules: list[Any] = []
    parents: list[Parent] = []
    index: dict[int, int] = {}
    owners: dict[int, list[tuple[int, str]]] = {}
    statics: list[tuple[int, str, Any]] = []
    data_kinds: set[Any] = {NODE, TREE}  # one set lookup handles nearly every attribute, here and in `_Rows`
    for root in roots:
        if id(root) not in index:
            index[id(root)] = len(modules)
            modules.append(root)
            parents.append(ROOT)
    i = 0
    while i < len(modules):
        info, values = info_of(modules[i]), values_of(modules[i])
        kinds = info.kinds
        for name in info.sorted_names():
            kind = kinds[name]
            if kind in data_kinds:
                continue
            if kind is SUBMODULE:
                child = values[name]
                if id(child) not in index:
                    index[id(child)] = len(modules)
                    modules.append(child)
                    parents.append(make_parent((i, name)))
            elif type(kind) is Ref:
                owners.setdefault(id(kind), []).append((i, name))
            elif is_static(kind):
                statics.append((i, name, kind))
            elif is_cell(kind):
                data_kinds.add(kind)
        i += 1
    return Numbering(modules, parents, index, owners, statics, data_kinds)


def depth_first(parents: Sequence[Parent], orders: Sequence[Sequence[str] | None] = ()) -> Iterator[int]:
    """Yields the numbers of Modules depth first, from the parents of all of them.

    Args:
        parents: the parents, by number.
        orders: for each Module, the order of its attributes, or None if that is path order; by default, all are.
    """
    children: list[list[int]] = [[] for _ in parents]
    stack: list[int] = []
    for module, parent in reversed(list(enumerate(parents))):
        (stack if parent is ROOT else children[parent.module]).append(module)
    for found, order in zip(children, orders):
        if order is not None and len(found) > 1:
            places = {name: place for place, name in enumerate(order)}
            found.sort(key=lambda child: -places[parents[child].name])
    while stack:
        yield (module := stack.pop())
        stack.extend(children[module])  # in reverse, so that the first child is on top


def named_modules(root: Any) -> Iterator[tuple[str, Any]]:
    """Yields every distinct Module of the graph with its canonical path, depth first; the path of the root is `""`."""
    numbering = number_modules((root,))
    modules, parents, *_ = numbering
    paths = [""] * len(modules)
    for i in numbering.depth_first():
        parent, name = parents[i]
        if parents[i] is not ROOT:
            paths[i] = join(paths[parent], name)
        yield paths[i], modules[i]


class Traversal(NamedTuple):
    """One walk over the graph that starts at some roots. Short-lived: it holds the Modules."""

    modules: list[Any]
    parents: list[Parent]
    index: dict[int, int]  # the number of a Module, by its id
    key: GraphKey
    refs: list[Ref | None]  # per cell
    twins: tuple[tuple[int, ...], ...]  # groups of Modules with the same instance dict: views of one Module
    statics: list[Any]  # the live values of the static attributes
    mutables: list[Any]  # the values among and inside them that can change, by number
    watches: list[list[Any]]  # how to notice a change of each of them
    functions: list[OpenFunction]  # the functions among and inside the static values whose keys are open

    def path(self, module: int) -> str:
        """Returns the canonical path of a Module."""
        return module_path(self.parents, module)

    def detached(self) -> Statics:
        """Returns the static values as they are now, detached from the graph."""
        return detach(self.statics, self.mutables, self.functions, lambda module: self.index.get(id(module)))


def traverse(roots: Sequence[Any], functions: Iterable[OpenFunction] = ()) -> Traversal:
    """Walks the graph and writes down its structure.

    Args:
        roots: where to start.
        functions: functions whose keys are open, with the keys to use for them.

    Raises:
        ValueError: a static value has come to hold a Module or array.
    """
    numbering = number_modules(roots)
    modules, parents, index, *_ = numbering
    for module in {type(module): module for module in modules}.values():
        refuse_pytree(module)
    twins = _twins(modules)
    maker = KeyMaker(lambda module: index.get(id(module)), functions=functions)
    static_rows, statics = _static_rows(numbering, maker)
    rows = _Rows(numbering, twins, static_rows)
    root_numbers = tuple(dict.fromkeys([index[id(root)] for root in roots]))
    for root in root_numbers:
        rows.record_below(root)
    rows.record_postponed()
    outlines = [(class_of(module), tuple(found)) for module, found in zip(modules, rows.by_module, strict=True)]
    orders = tuple(map(inserted_names, modules))  # up to date, like the sorted names just used
    key = GraphKey.of((root_numbers, tuple(outlines), orders))
    functions = list(maker.functions.values())
    return Traversal(modules, parents, index, key, rows.refs, twins, statics, maker.mutables, maker.watches, functions)


class _Rows:
    """Writes down the attributes of every Module, and numbers the cells in the order in which it meets them.

    Args:
        numbering: the Modules, numbered.
        twins: the groups of Modules with the same instance dict.
        statics: the rows of the static attributes, by Module and name.
    """

    def __init__(self, numbering: Numbering, twins: Iterable[Sequence[int]], statics: dict[tuple[int, str], Any]):
        self.modules, self.parents, self.index = numbering.modules, numbering.parents, numbering.index
        self.owners = numbering.owners
        self.statics = statics
        # Plain tuples with the fields of the named ones, which take eight times as long to make: see GraphKey.of.
        self.by_module: list[list[Any]] = [[] for _ in numbering.modules]
        self.refs: list[Ref | None] = []  # per cell
        self.elder = {younger: group[0] for group in twins for younger in group[1:]}  # the twin numbered first
        self.unshared = set() if self.elder else numbering.data_kinds  # the kinds of attributes with cells of their own
        self.cells: dict[tuple[int, str], int] = {}  # those that may be shared, by the attribute at the canonical path
        # Attributes met before the one at the canonical path of their cell: the rows and the place in them, the name,
        # the kind, and the attribute at the canonical path.
        self.postponed: list[tuple[list[Any], int, str, Any, tuple[int, str]]] = []

    def record_below(self, root: int) -> None:
        """Writes down a Module and those below it, depth first."""
        stack = [self._opened(root)]
        while stack:
            child = self._record_up_to_child(*stack[-1])
            if child is None:
                stack.pop()
            else:
                stack.append(self._opened(child))

    def _opened(self, module: int) -> tuple[int, Iterator[str], dict[str, Any], dict[str, Any], list[Any]]:
        """Returns what it takes to write down a Module: its number, the names to come, kinds, values and rows."""
        live = self.modules[module]
        info = info_of(live)
        return module, iter(info.sorted_names()), info.kinds, values_of(live), self.by_module[module]

    def _record_up_to_child(
        self, module: int, names: Iterator[str], kinds: dict[str, Any], values: dict[str, Any], found: list[Any]
    ) -> int | None:
        """Takes attributes from `names` until one leads down to a child, and returns its number; None at the end."""
        refs, unshared = self.refs, self.unshared
        for name in names:
            kind = kinds[name]
            if kind in unshared:
                found.append((name, kind, len(refs)))
                refs.append(None)
            elif kind is SUBMODULE:
                child = self.index[id(values[name])]
                found.append((name, SUBMODULE, child))
                if self.parents[child] == (module, name):
                    return child
            elif is_static(kind):
                found.append(self.statics[module, name])
            elif type(kind) is Absent:
                found.append((name, ABSENT, kind.spec))
            else:
                self._record_shared(module, name, kind)
        return None

    def _record_shared(self, module: int, name: str, kind: Any) -> None:
        """Writes down an attribute that is on a Ref, or that a twin may have as well."""
        found, is_on_ref = self.by_module[module], type(kind) is Ref
        first = self.owners[id(kind)][0] if is_on_ref else (self.elder.get(module, module), name)
        spec = spec_of(kind) if is_on_ref else kind
        if first == (module, name):
            self.cells[first] = len(self.refs)
            found.append((name, spec, len(self.refs)))
            self.refs.append(kind if is_on_ref else None)
        else:
            # Modules are numbered breadth first and visited depth first, so the first attribute may come later.
            self.postponed.append((found, len(found), name, spec, first))
            found.append(None)

    def record_postponed(self) -> None:
        """Completes the rows of attributes that were met before the one at the canonical path of their cell."""
        for found, place, name, spec, first in self.postponed:
            found[place] = (name, spec, self.cells[first])


def _twins(modules: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    if not any(map(is_view, modules)):
        return ()
    groups: dict[int, list[int]] = {}
    for number, module in enumerate(modules):
        groups.setdefault(id(module.__dict__), []).append(number)
    return tuple([tuple(group) for group in groups.values() if len(group) > 1])


def refuse_pytree(module: Any) -> None:
    """Raises ValueError if the class of a Module is registered with JAX as a pytree."""
    if not jax.tree_util.all_leaves((module,)):
        raise ValueError(REGISTERED_AS_PYTREE.format(name=type(module).__name__))


def _static_rows(numbering: Numbering, maker: KeyMaker) -> tuple[dict[tuple[int, str], tuple[Any, ...]], list[Any]]:
    """Returns the rows of the static attributes, by Module and name, and their values.

    Modules are taken in the order of their numbers, which unlike the depth-first order is the same for every choice
    of roots: a body that changes nothing must find mutable values under the numbers they had when it was entered.
    """
    rows: dict[tuple[int, str], tuple[Any, ...]] = {}
    values: list[Any] = []
    for module, name, kind in numbering.statics:
        value = values_of(numbering.modules[module])[name]
        maker.arrays_inside = kind is not STATIC  # arrays in an nnx.Static are meant to be there
        try:
            key = maker.key(value)
        except (HoldsState, ForeignMethod) as found:
            raise ValueError(_why_no_key(found, module_path(numbering.parents, module), name)) from None
        rows[module, name] = (name, kind, key, len(values))
        values.append(value)
    return rows, values


def _why_no_key(found: HoldsState | ForeignMethod, owner: str, name: str) -> str:
    path = join(owner, name)
    if isinstance(found, ForeignMethod):
        return FOREIGN_METHOD.format(path=path, method=found.what)
    route = found.route.replace("it[", f"{path}[", 1)
    return STATIC_HOLDS_STATE.format(path=path, name=name, what=found.what, route=route)
