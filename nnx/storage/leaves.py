"""Anything that can be saved, as leaves by path, and how to fill it from such leaves.

A *target* is a Module, a Context, a data iterator, or any pytree of these and of arrays, numbers and strings: a State,
a TrainState, a dict of all of them. The paths of a Module are those of its State. A shared value is one *leaf*, at its
canonical path, with an *alias* (another path, or the beginning of other paths) for every other way to reach it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from nnx.core.context import Context, streams_of
from nnx.core.module.info import ModuleBase
from nnx.core.module.variable_tree import key_segments
from nnx.core.state.paths import join
from nnx.core.state.state import State
from nnx.core.state.updates import check_levels, update
from nnx.core.structure.structure import ROOT, ChildAttribute, DataAttribute
from nnx.core.structure.walk import Traversal, traverse
from nnx.core.variables.variables import Node, Spec, spec_of
from nnx.storage.checkpoints.hyperparameters import hyperparameters_of
from nnx.storage.states import methods_of, set_state, state_of

CLASS_GIVEN = "The class {cls} was given{where} in place of a Module: make one, such as {cls}(..., ctx=nnx.context(0))."
SAME_PATH = "Two leaves have the same path, {path!r}: keys of dicts must differ as text. Nothing was saved or changed."

Rebuild = Callable[[Mapping[str, Any]], Any]
"""Rebuilds a value from new leaves, given by path, and its old leaves for the other paths."""


class Leaf(NamedTuple):
    """A value in a target, and the name of the Variable type that holds it, if any."""

    value: Any
    type: str


class CellLeaves(NamedTuple):
    """The leaves in one cell of a Module, the root it is reached from, its path there, and how to rebuild its value."""

    root: Any
    path: str
    leaves: list[str]
    rebuild: Rebuild


class Leaves:
    """The leaves of a target in order, its aliases, the classes of its Modules, and how to fill it."""

    def __init__(self, target: Any):
        self.by_path: dict[str, Leaf] = {}
        self.aliases: dict[str, str] = {}
        self.modules: dict[str, str] = {}
        self._target = target
        self._order: list[str] = []
        self._iterators: dict[str, Any] = {}
        self._outside: list[str] = []  # leaves of Contexts and of pytrees that are not in a Module
        self._roots: list[tuple[str, Any]] = []
        self._contexts: list[tuple[str, Context]] = []
        self._cells: list[CellLeaves] = []
        self.hyperparameters: dict[str, list[str]] = {}
        self._walk: Traversal | None = None
        self._rebuild = self._collect("", target, "")
        self._outside = list(self._order)
        if self._roots:
            self._collect_modules()

    def _collect(self, prefix: str, tree: Any, type_name: str) -> Rebuild:
        """Adds the leaves of a pytree, and returns how to rebuild it."""
        found, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_whole)
        parts: list[Rebuild] = []
        for keys, leaf in found:
            path = "/".join(filter(None, (prefix, *key_segments(keys))))
            if isinstance(leaf, ModuleBase):
                self._roots.append((path, leaf))
                parts.append(_constant(leaf))
            elif isinstance(leaf, Context):
                self._contexts.append((path, leaf))
                for name, stream in streams_of(leaf).items():
                    self._add(_under(path, f"{name}/key"), stream.key, "Context")
                    self._add(_under(path, f"{name}/count"), stream.count, "Context")
                parts.append(_constant(leaf))
            elif isinstance(leaf, Node):
                inner = self._collect(path, leaf.value, type(leaf).__name__)
                parts.append(_boxed(spec_of(leaf), inner))
            elif isinstance(leaf, type) and issubclass(leaf, ModuleBase):
                raise TypeError(CLASS_GIVEN.format(cls=leaf.__name__, where=f" at {path!r}" if path else ""))
            else:
                self._add(path, leaf, type_name)
                if methods_of(leaf) is not None:
                    self._iterators[path] = leaf
                    parts.append(_constant(leaf))
                else:
                    parts.append(_leaf(path, leaf))
        return lambda values: treedef.unflatten([part(values) for part in parts])

    def _collect_modules(self) -> None:
        prefixes: dict[int, str] = {}
        distinct: list[Any] = []
        for prefix, module in self._roots:
            if id(module) in prefixes:
                self.aliases[prefix] = prefixes[id(module)]
            else:
                prefixes[id(module)] = prefix
                distinct.append(module)
        walk = self._walk = traverse(distinct)
        paths: list[str] = []  # by Module; a parent comes before its children
        roots: list[tuple[Any, str]] = []  # by Module, its root and the path from there
        for i, module in enumerate(walk.modules):
            parent, name = walk.parents[i]
            if walk.parents[i] is ROOT:
                paths.append(prefixes[id(module)])
                roots.append((module, ""))
            else:
                paths.append(join(paths[parent], name))
                roots.append((roots[parent][0], join(roots[parent][1], name)))
            self.modules[paths[i]] = type(module).__name__
            self.hyperparameters[paths[i]] = hyperparameters_of(module)
        for at, name, kind in walk.key.cells:
            path = join(paths[at], name)
            type_name = kind.type.__name__ if type(kind) is Spec else ""
            before = len(self._order)
            rebuild = self._collect(path, walk.modules[at].__dict__[name], type_name)
            own = self._order[before:]
            self._cells.append(CellLeaves(roots[at][0], join(roots[at][1], name), own, rebuild))
        self._collect_aliases(walk, paths)

    def _collect_aliases(self, walk: Traversal, paths: list[str]) -> None:
        for module, outline in enumerate(walk.key.structure.outlines):
            for attribute in outline.attributes:
                path = join(paths[module], attribute.name)
                if type(attribute) is ChildAttribute:
                    if walk.parents[attribute.module] != (module, attribute.name):
                        self.aliases[path] = paths[attribute.module]
                elif type(attribute) is DataAttribute:
                    home = walk.key.cells[attribute.cell]
                    if (home.module, home.name) != (module, attribute.name):
                        self.aliases[path] = join(paths[home.module], home.name)

    def _add(self, path: str, value: Any, type_name: str) -> None:
        if path in self.by_path:
            raise ValueError(SAME_PATH.format(path=path))
        self.by_path[path] = Leaf(value, type_name)
        self._order.append(path)

    def units(self) -> list[list[str]]:
        """Returns the paths that have to be filled together: those of each cell, and last those outside Modules."""
        return [*([cell.leaves for cell in self._cells]), self._outside]

    def release(self) -> None:
        """Drops the values of the target, so that each can be freed as soon as it is replaced."""
        self.by_path = {path: Leaf(None, leaf.type) for path, leaf in self.by_path.items()}

    def check_level(self) -> None:
        """Raises TraceContextError if the target cannot be changed here."""
        if self._walk is not None:
            check_levels(self._walk.modules, "loading into it")
        for _, context in self._contexts:
            context.check_level("...")

    def iterator_states(self) -> dict[str, Any]:
        """Returns the state of each data iterator as JSON, by path."""
        return {path: state_of(path, iterator) for path, iterator in self._iterators.items()}

    def set_iterators(self, states: Mapping[str, Any]) -> None:
        """Sets the states of data iterators, given by path."""
        for path, iterator in self._iterators.items():
            if path in states:
                set_state(path, iterator, states[path])

    def fill(self, values: Mapping[str, Any]) -> Any:
        """Writes values into the target, in place where it is mutable.

        Args:
            values: the new values, by path; the other leaves keep theirs.

        Returns:
            The target, or a new object in place of an immutable one.
        """
        self.check_level()
        self.fill_cells(values)
        return self.fill_outside(values)

    def fill_cells(self, values: Mapping[str, Any]) -> None:
        """Writes values into Modules, whole units only, and drops the old values of the cells."""
        states: dict[int, tuple[Any, dict[str, Any]]] = {}
        left = []
        for cell in self._cells:
            if any(name in values for name in cell.leaves):
                states.setdefault(id(cell.root), (cell.root, {}))[1][cell.path] = cell.rebuild(values)
            else:
                left.append(cell)
        for root, leaves in states.values():
            update(root, State(leaves))
        self._cells = left

    def fill_outside(self, values: Mapping[str, Any]) -> Any:
        """Writes values into Contexts, dicts and lists, and returns the target or the object that replaces it."""
        filled = self._rebuild(values)
        for prefix, context in self._contexts:
            for name, stream in streams_of(context).items():
                stream.key = values.get(_under(prefix, f"{name}/key"), stream.key)
                stream.count = values.get(_under(prefix, f"{name}/count"), stream.count)
        return _into(self._target, filled)


def fills_in_place(target: Any) -> bool:
    """Whether all of a target can be filled in place, so that its owner sees the loaded values."""
    if type(target) is tuple:
        return all(map(fills_in_place, target))
    return isinstance(target, (ModuleBase, Context, list, dict)) or methods_of(target) is not None


def _into(target: Any, filled: Any) -> Any:
    """Puts rebuilt values into the dicts and lists of the target, at any depth; returns the object to use."""
    if isinstance(target, dict) and type(filled) is type(target):
        for key in target:
            target[key] = _into(target[key], filled[key])
        return target
    if type(target) is list:
        target[:] = [_into(old, new) for old, new in zip(target, filled, strict=True)]
        return target
    if type(target) is tuple:
        return tuple([_into(old, new) for old, new in zip(target, filled, strict=True)])
    return filled


def resolve_alias(path: str, aliases: Mapping[str, str]) -> str:
    """Returns the canonical path of the leaf or entry that a path leads to."""
    # The bound ends a cycle of aliases, which a damaged or hostile manifest can contain.
    for _ in range(len(aliases) + path.count("/") + 1):
        segments = path.split("/")
        for i in range(1, len(segments) + 1):
            canonical = aliases.get("/".join(segments[:i]))
            if canonical is not None:
                path = "/".join(filter(None, (canonical, *segments[i:])))
                break
        else:
            break
    return path


def _under(prefix: str, rest: str) -> str:
    return f"{prefix}/{rest}" if prefix else rest


def _is_whole(value: Any) -> bool:
    return isinstance(value, (ModuleBase, Context, Node))


def _constant(value: Any) -> Rebuild:
    return lambda values: value


def _leaf(path: str, old: Any) -> Rebuild:
    return lambda values: values.get(path, old)


def _boxed(spec: Spec, inner: Rebuild) -> Rebuild:
    return lambda values: spec.box(inner(values))
