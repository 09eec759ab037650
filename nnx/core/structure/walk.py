"""Walking a graph of Modules: one traversal that numbers its Modules and cells and writes down its structure.

Nothing here recurses over Modules, so the depth of a model is limited by memory alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from nnx.core.errors import FOREIGN_METHOD, REGISTERED_AS_PYTREE, STATIC_HOLDS_STATE
from nnx.core.module.info import class_of, info_of, inserted_names, is_view, values_of
from nnx.core.module.kinds import ABSENT, NODE, STATIC, SUBMODULE, TREE, Absent, is_cell, is_static
from nnx.core.state.paths import join
from nnx.core.statics.keys import ForeignMethod, Freezer, HoldsState, OpenFunction
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
    data_kinds: set[Any] = {NODE, TREE}  # one look in a set settles nearly all attributes, here and in `traverse`
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


class Traversal:
    """One walk over the graph that starts at some roots. Short-lived: it holds the Modules."""

    __slots__ = ("modules", "parents", "index", "key", "refs", "twins", "statics", "mutables", "watches", "functions")

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

    def index_of(self, module: Any) -> int | None:
        """Returns the number of a Module, or None if it is not in the graph."""
        return self.index.get(id(module))

    def detached(self) -> Statics:
        """Returns the static values as they are now, detached from the graph."""
        return detach(self.statics, self.mutables, self.functions, self.index_of)


def traverse(roots: Sequence[Any], functions: Iterable[OpenFunction] = ()) -> Traversal:
    """Walks the graph and writes down its structure.

    Args:
        roots: where to start.
        functions: functions whose keys are open, with the keys to use for them.

    Raises:
        ValueError: a static value has come to hold a Module or array.
    """
    modules, parents, index, owners, static_attributes, data_kinds = number_modules(roots)
    for module in {type(module): module for module in modules}.values():
        refuse_pytree(module)
    walk = Traversal()
    walk.modules, walk.parents, walk.index = modules, parents, index
    walk.refs = refs = []
    walk.twins = _twins(modules)
    elder = {younger: group[0] for group in walk.twins for younger in group[1:]}  # the twin that is numbered first
    statics = _freeze_statics(walk, static_attributes, functions)
    plain_kinds = set() if elder else data_kinds  # with twins, attributes have to be looked at one by one
    attributes: list[list[Any]] = [[] for _ in modules]  # plain tuples with the fields of the records
    shared_cells: dict[Any, int] = {}  # by the id of the Ref, or by Module and name for a Module that has twins
    # Attributes that may be met before the one that has their cell: where each belongs, and what it shares.
    ahead: list[tuple[list[Any], int, str, Any, Any]] = []
    stack: list[tuple[int, Iterator[str]]] = []
    root_numbers = tuple(dict.fromkeys([index[id(root)] for root in roots]))
    for root in root_numbers:
        stack.append((root, iter(info_of(modules[root]).sorted_names())))
        while stack:
            module, names = stack[-1]
            kinds, values, found = info_of(modules[module]).kinds, values_of(modules[module]), attributes[module]
            for name in names:
                kind = kinds[name]
                if kind in plain_kinds:
                    found.append((name, kind, len(refs)))
                    refs.append(None)
                elif is_static(kind):
                    found.append(statics[module, name])
                elif kind is SUBMODULE:
                    child = index[id(values[name])]
                    found.append((name, SUBMODULE, child))
                    if parents[child] == (module, name):
                        # Down into the child. The rest of `names` is taken up again when its names are used up.
                        stack.append((child, iter(info_of(modules[child]).sorted_names())))
                        break
                elif type(kind) is Absent:
                    found.append((name, ABSENT, kind.spec))
                elif type(kind) is Ref:
                    # The cell of a Ref is at its canonical path, which this walk may reach after the others: Modules
                    # are numbered breadth first, but visited depth first.
                    if owners[id(kind)][0] == (module, name):
                        shared_cells[id(kind)] = len(refs)
                        found.append((name, spec_of(kind), len(refs)))
                        refs.append(kind)
                    else:
                        ahead.append((found, len(found), name, spec_of(kind), id(kind)))
                        found.append(None)
                elif module in elder:
                    ahead.append((found, len(found), name, kind, (elder[module], name)))
                    found.append(None)
                else:
                    if elder:
                        shared_cells[module, name] = len(refs)
                    found.append((name, kind, len(refs)))
                    refs.append(None)
            else:
                stack.pop()
    for found, position, name, spec, shared in ahead:
        found[position] = (name, spec, shared_cells[shared])
    outlines = [(class_of(module), tuple(found)) for module, found in zip(modules, attributes, strict=True)]
    orders = tuple(map(inserted_names, modules))  # up to date, like the sorted names just used
    walk.key = GraphKey.of((root_numbers, tuple(outlines), orders))
    return walk


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


def _freeze_statics(
    walk: Traversal, attributes: Iterable[tuple[int, str, Any]], functions: Iterable[OpenFunction]
) -> dict[tuple[int, str], tuple[Any, ...]]:
    """Returns every static attribute, as a StaticAttribute in plain tuples, by Module and name.

    Modules are taken in the order of their numbers, which unlike the depth-first order is the same for every choice
    of roots: a body that changes nothing must find mutable values under the numbers they had when it was entered.
    """
    freezer = Freezer(walk.index_of, functions=functions)
    walk.statics = []
    found: dict[tuple[int, str], tuple[Any, ...]] = {}
    for number, name, kind in attributes:
        value = values_of(walk.modules[number])[name]
        freezer.arrays_inside = kind is not STATIC  # arrays in an nnx.Static are meant to be there
        key = _static_key(freezer, walk, number, name, value)
        found[number, name] = (name, kind, key, len(walk.statics))
        walk.statics.append(value)
    walk.mutables, walk.watches, walk.functions = freezer.mutables, freezer.watches, list(freezer.functions.values())
    return found


def _static_key(freezer: Freezer, walk: Traversal, module: int, name: str, value: Any) -> Any:
    try:
        return freezer.key(value)
    except HoldsState as found:
        path = join(walk.path(module), name)
        route = found.route.replace("it[", f"{path}[", 1)
        raise ValueError(STATIC_HOLDS_STATE.format(path=path, name=name, what=found.what, route=route)) from None
    except ForeignMethod as found:
        path = join(walk.path(module), name)
        raise ValueError(FOREIGN_METHOD.format(path=path, method=found.what)) from None
