"""The structure of a graph of Modules: named tuples, interned as a `GraphKey`.

A `GraphStructure` is everything about a graph except its data: which Modules there are, of which classes, what each of
their attributes is, what is static about them, and what is shared. Modules, cells and static values appear as numbers:

- *Modules* are numbered breadth first, children in path order, so the first way to a Module is its *canonical path*:
  the one with the fewest segments, and of those the first in order.
- *Cells* are numbered depth first, which is the order of their paths in a State. Attributes on one Ref share a cell.
- *Static values* are numbered in the order of the Modules that hold them.

Numbers do not depend on the order in which attributes were set, but rebuilding a graph does, so a structure has it.

A `GraphKey` is an interned GraphStructure: graphs of equal structure have one and the same key. It also caches the
answers to questions about the structure, and the *blueprints* for building such a graph again (see build).
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

from nnx.core.module.kinds import ABSENT, SUBMODULE, Absent, absent, container_spec, is_cell, is_static
from nnx.core.state.paths import join, segment_of
from nnx.core.state.state import Layout
from nnx.core.variables.variables import Spec


class DataAttribute(NamedTuple):
    """An attribute that holds data."""

    name: str
    kind: Any  # a Spec, NODE or TREE
    cell: int  # its number; several attributes of the graph have the same one if they are on one Ref


class StaticAttribute(NamedTuple):
    """An attribute that holds a static value."""

    name: str
    kind: Any  # STATIC, or the spec of an nnx.Static
    key: Any  # what the value is compared by; see statics/keys
    number: int  # of the value among the static values of the graph


class ChildAttribute(NamedTuple):
    """An attribute that holds a submodule."""

    name: str
    kind: Any  # SUBMODULE
    module: int  # its number


class AbsentAttribute(NamedTuple):
    """A variable for which no state was given."""

    name: str
    kind: Any  # ABSENT
    spec: Any  # the kind it would have


Attribute = DataAttribute | StaticAttribute | ChildAttribute | AbsentAttribute


def _attribute(row: tuple[Any, ...]) -> Attribute:
    """Returns a plain tuple as the named tuple with the same fields; the kind decides which one."""
    kind = row[1]
    if kind is SUBMODULE:
        return ChildAttribute(*row)
    if kind is ABSENT:
        return AbsentAttribute(*row)
    return StaticAttribute(*row) if is_static(kind) else DataAttribute(*row)


class Outline(NamedTuple):
    """The structure of one Module: its class, and its attributes in path order."""

    cls: type
    attributes: tuple[Attribute, ...]

    def agrees_with(self, other: "Outline") -> bool:
        """Whether two outlines are the same apart from the numbers of the cells, which depend on the roots."""
        if self.cls is not other.cls or len(self.attributes) != len(other.attributes):
            return False
        for ours, theirs in zip(self.attributes, other.attributes):
            if type(ours) is DataAttribute and type(theirs) is DataAttribute:
                if ours.name != theirs.name or ours.kind is not theirs.kind:
                    return False
            elif ours != theirs:
                return False
        return True


class GraphStructure(NamedTuple):
    """The structure of a graph: the numbers of its distinct roots, and the outline of every Module by number."""

    roots: tuple[int, ...]
    outlines: tuple[Outline, ...]
    # Per Module, the names of its attributes as they were inserted, or None if that is path order; as a whole None if
    # unknown: in ModuleDefs that were pickled by NNX 0.2.
    orders: tuple[tuple[str, ...] | None, ...] | None = None

    @staticmethod
    def from_rows(
        roots: tuple[int, ...],
        outlines: Sequence[tuple[type, tuple[Any, ...]]],
        orders: tuple[tuple[str, ...] | None, ...] | None = None,
    ) -> "GraphStructure":
        """Returns the structure of plain tuples with the same content."""
        records = [Outline(cls, tuple(map(_attribute, rows))) for cls, rows in outlines]
        return GraphStructure(roots, tuple(records), orders)

    def data_attributes(self) -> Iterator[tuple[int, DataAttribute]]:
        """Yields every attribute that holds data, with the number of its Module."""
        for module, outline in enumerate(self.outlines):
            for attribute in outline.attributes:
                if type(attribute) is DataAttribute:
                    yield module, attribute

    def mapped(self, change: Callable[[Attribute], Attribute]) -> "GraphStructure":
        """Returns the structure with every attribute replaced by what a function returns for it."""
        outlines = [Outline(cls, tuple(map(change, attributes))) for cls, attributes in self.outlines]
        return GraphStructure(self.roots, tuple(outlines), self.orders)


class Cell(NamedTuple):
    """Where a cell is: at its canonical path, if several attributes share it."""

    module: int
    name: str
    kind: Any  # a Spec, NODE or TREE


class Parent(NamedTuple):
    """The first Module that holds another one, and under which name; `ROOT` for roots."""

    module: int
    name: str


ROOT = Parent(-1, "")
make_parent: Callable[[tuple[int, str]], Parent] = partial(tuple.__new__, Parent)
"""Makes a Parent from its fields, in half the time of its constructor, which is a Python function."""


class RootedPath(NamedTuple):
    """A path, and the number of the Module it starts at."""

    root: int
    path: str


def rooted_path(parents: Sequence[Parent], module: int) -> RootedPath:
    """Returns the canonical path of a Module and the root it starts at, from the parents of all Modules."""
    segments = []
    while parents[module] is not ROOT:
        module, name = parents[module]
        segments.append(segment_of(name))
    return RootedPath(module, "/".join(reversed(segments)))


def module_path(parents: Sequence[Parent], module: int) -> str:
    """Returns the canonical path of a Module, from the parents of all Modules."""
    return rooted_path(parents, module).path


class Blueprint(NamedTuple):
    """How to build one Module of a graph: everything except the values."""

    cls: type
    kinds: dict[str, Any]
    statics: list[tuple[str, int]]  # (name, number of the static value)
    children: list[tuple[str, int]]  # (name, number of the Module)
    shared: list[tuple[str, int]]  # (name, number of the cell), for cells that several attributes share
    slots: dict[str, None]  # an instance dict without values: a copy of it holds them in order


class GraphKey:
    """An interned GraphStructure: equal structures have one GraphKey, so comparing two takes one `is`."""

    hash: int
    roots: tuple[int, ...]  # the numbers of the distinct roots
    # The fields of the cells one by one, for loops that run over all of them: these lists are faster to unpack.
    owners: list[int]
    names: list[str]
    kinds: list[Any]
    specs: list[Spec | None]  # per cell, that of its container in a State; None for bare arrays
    hooks: list[int]  # the cells whose specs have an `on_set`
    shared: tuple[int, ...]  # the cells that several attributes share
    _rows: Any  # the structure in plain tuples; see `of`
    _module_paths: list[str] | None = None

    @staticmethod
    def of(structure: GraphStructure | tuple[Any, Any, Any]) -> "GraphKey":
        """Returns the one key of all structures equal to this one.

        Args:
            structure: a GraphStructure, or the same content as plain tuples. A walk makes those: a NamedTuple takes
                eight times as long to make, but hashes and compares like the tuple it is, so plain tuples find the key
                as well. They become named tuples when somebody asks for those; `partition` does not.
        """
        key = _keys.get(structure)  # type: ignore[arg-type]
        if key is None:
            key = GraphKey()
            key._rows = structure
            key.hash = hash(structure[:2])  # without the orders, which may be unknown; see `agrees_with`
            key.roots = structure[0]
            key._number_cells()
            key = _keys.setdefault(structure, key)  # type: ignore[arg-type]
        return key

    def _number_cells(self) -> None:
        rows = self._rows[1]
        size = sum([len(attributes) for _, attributes in rows])  # there are at most as many cells as attributes
        owners: list[int] = [-1] * size
        names, kinds = [""] * size, [None] * size
        specs: dict[Any, Spec | None] = {}  # by the kinds of cells met so far
        shared = set()
        count = 0
        for module, (_, attributes) in enumerate(rows):
            for attribute in attributes:
                kind = attribute[1]
                if kind not in specs:
                    if not is_cell(kind):
                        continue
                    specs[kind] = container_spec(kind)
                cell = attribute[2]
                if owners[cell] >= 0:
                    shared.add(cell)
                else:  # Modules come in breadth-first order, so the first attribute met is at the canonical path
                    owners[cell], names[cell], kinds[cell] = module, attribute[0], kind
                    count += 1
        self.owners, self.names, self.kinds = owners[:count], names[:count], kinds[:count]
        self.specs = [*map(specs.__getitem__, self.kinds)]
        has_hooks = any([spec is not None and spec.on_set is not None for spec in specs.values()])
        self.hooks = [i for i, spec in enumerate(self.specs) if spec and spec.on_set is not None] if has_hooks else []
        self.shared = tuple(sorted(shared))

    @cached_property
    def structure(self) -> GraphStructure:
        """The structure, in named tuples."""
        return GraphStructure.from_rows(*self._rows)

    def agrees_with(self, other: "GraphKey") -> bool:
        """Whether two structures are the same, as far as the order of their attributes is known."""
        if self is other:
            return True
        return not (self.has_order and other.has_order) and self._rows[:2] == other._rows[:2]

    @property
    def has_order(self) -> bool:
        """Whether the order of the attributes is known: always, unless the structure was pickled by NNX 0.2."""
        return self._rows[2] is not None

    # Modules

    @property
    def module_count(self) -> int:
        """How many Modules the graph has."""
        return len(self._rows[1])

    def class_of(self, module: int) -> type:
        """Returns the class of a Module."""
        return self._rows[1][module][0]

    def attributes(self, module: int) -> tuple[Attribute, ...]:
        """Returns the attributes of a Module, in path order."""
        return self.structure.outlines[module].attributes

    def insertion_order(self, module: int) -> tuple[str, ...]:
        """Returns the names of the attributes of a Module in the order in which they were set."""
        orders = self.structure.orders
        found = None if orders is None else orders[module]
        return tuple([attribute.name for attribute in self.attributes(module)]) if found is None else found

    def children(self, module: int) -> Iterator[int]:
        """Yields the numbers of the submodules of a Module; one that it holds twice comes twice."""
        for attribute in self.attributes(module):
            if type(attribute) is ChildAttribute:
                yield attribute.module

    def parents(self) -> list[Parent]:
        """Returns the parent of every Module."""
        parents: list[Parent | None] = [None] * self.module_count
        for root in self.roots:
            parents[root] = ROOT
        for module, (_, attributes) in enumerate(self._rows[1]):
            for attribute in attributes:
                if attribute[1] is SUBMODULE and parents[attribute[2]] is None:
                    parents[attribute[2]] = make_parent((module, attribute[0]))
        return parents  # type: ignore[return-value]  (every Module is a root or a child)

    def module_paths(self, prefixes: Sequence[str] = ()) -> list[str]:
        """Returns the canonical path of every Module, after the prefix of its root if there is one per root."""
        if not prefixes and self._module_paths is not None:
            return self._module_paths
        paths: list[str] = [""] * self.module_count
        for root, prefix in zip(self.roots, prefixes):
            paths[root] = prefix
        for module, parent in enumerate(self.parents()):
            if parent is not ROOT:
                paths[module] = join(paths[parent.module], parent.name)  # parents have lower numbers
        if not prefixes:
            self._module_paths = paths
        return paths

    @cached_property
    def blueprints(self) -> list[Blueprint]:
        """How to build each Module."""
        shared = set(self.shared)
        outlines = enumerate(self.structure.outlines)
        return [_blueprint(outline, self.insertion_order(module), shared) for module, outline in outlines]

    # Cells

    @cached_property
    def cells(self) -> list[Cell]:
        """Where each cell is."""
        return [*map(Cell, self.owners, self.names, self.kinds)]

    @cached_property
    def cell_numbers(self) -> Mapping[tuple[int, str], int]:
        """The cell of every attribute that holds data, by Module and name; several may have one cell."""
        return {(module, attribute.name): attribute.cell for module, attribute in self.structure.data_attributes()}

    def cell_at(self, module: int, name: str) -> int | None:
        """Returns the cell of an attribute, or None if it is not there or holds no data."""
        return self.cell_numbers.get((module, name))

    def cell_roots(self) -> list[RootedPath]:
        """Returns the canonical path of every cell, with the root it starts at."""
        return self._cell_roots

    @cached_property
    def _cell_roots(self) -> list[RootedPath]:
        parents = self.parents()
        prefixes = {module: rooted_path(parents, module) for module in dict.fromkeys(self.owners)}
        starts = [prefixes[module] for module in self.owners]
        return [RootedPath(start.root, join(start.path, name)) for start, name in zip(starts, self.names, strict=True)]

    @cached_property
    def layout(self) -> Layout:
        """The paths of the cells; for graphs with one root."""
        modules = self.module_paths()  # only those that own cells get a prefix: in deep graphs, paths are long
        prefixes = {module: f"{modules[module]}/" if modules[module] else "" for module in set(self.owners)}
        segments = {name: segment_of(name) for name in set(self.names)}
        places = zip(self.owners, self.names, strict=True)
        return Layout.of(tuple([prefixes[module] + segments[name] for module, name in places]))

    def find(self, path: str) -> int | None:
        """Returns the cell that any path leads to, canonical or not; for graphs with one root."""
        cell = self.layout.index.get(path)
        if cell is not None:
            return cell
        module = self.roots[0]
        *parents, last = path.split("/")
        for segment in parents:
            child = self._attribute(module, segment)
            if type(child) is not ChildAttribute:
                return None
            module = child.module
        found = self._attribute(module, last)
        return found.cell if type(found) is DataAttribute else None

    def _attribute(self, module: int, segment: str) -> Attribute | None:
        return next((found for found in self.attributes(module) if segment_of(found.name) == segment), None)

    def with_specs(self, specs: Mapping[int, Spec]) -> "GraphKey":
        """Returns the key of the same structure with other specs for some cells."""
        if not specs:
            return self

        def replaced(attribute: Attribute) -> Attribute:
            if type(attribute) is DataAttribute and attribute.cell in specs:
                return attribute._replace(kind=specs[attribute.cell])
            return attribute

        return GraphKey.of(self.structure.mapped(replaced))


# Weak: an entry lives as long as a flat form, a ModuleDef or a compiled function uses its key.
_keys: "weakref.WeakValueDictionary[GraphStructure, GraphKey]" = weakref.WeakValueDictionary()


def _blueprint(outline: Outline, names: Sequence[str], shared_cells: set[int]) -> Blueprint:
    kinds: dict[str, Any] = dict.fromkeys(names)
    statics, children, shared = [], [], []
    for attribute in outline.attributes:
        name = attribute.name
        kinds[name] = attribute.kind
        if type(attribute) is DataAttribute:
            if attribute.cell in shared_cells:
                shared.append((name, attribute.cell))
        elif type(attribute) is StaticAttribute:
            statics.append((name, attribute.number))
        elif type(attribute) is ChildAttribute:
            children.append((name, attribute.module))
        elif type(attribute) is AbsentAttribute:
            kinds[name] = absent(outline.cls, attribute.spec)
    slots = dict.fromkeys([name for name, kind in kinds.items() if type(kind) is not Absent])
    return Blueprint(outline.cls, kinds, statics, children, shared, slots)
