"""Captured weights: arrays that a traced function reads from Modules that are not among its arguments.

JAX makes every array that a function reads by closure, global or any other way a constant of the traced program. The
constants of the program *are* those arrays, so they can be recognized among the cells of live Modules: first of the
Modules that the function reaches by name (`routes`), then of whoever holds the array. These cells become *hidden*
arguments, gathered on every call like the others, so the program sees their current values and is compiled once.

A program is traced again if what it captured is no longer where it was: a name on any way to it was bound to another
Module, a list or dict on the way has gained or lost Modules, the structure of a Module changed, or a Module is gone. An
array stays a constant, and its cell is *watched*, if it cannot become an argument (it is a constant of `jax.jit` in the
body of a loop), if nothing says which of several holders the function read it from, or if no name leads to it. The
program is traced again once such a cell changes.

A derivative rule of the user's own (`custom_vjp`, `custom_jvp`) may read weights that are in no program until it is
used, by whoever differentiates the compiled function. JAX keeps what it has made of the rule, so a call from inside
another transform needs a new trace if any weight of the Modules that the function reaches has changed.
"""

import gc
import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import getitem
from typing import Any, NamedTuple

import jax

from nnx.core.module.info import ModuleBase
from nnx.core.statics.reach import HOLD_NOTHING, held_by
from nnx.core.structure.flat import flat_of
from nnx.core.structure.structure import GraphKey
from nnx.core.trace import is_eager, is_tracer
from nnx.transforms.engine.inner_traces import outdate_traces
from nnx.transforms.engine.programs import constants_of, equations, identity, is_inlined, is_rule, programs_in
from nnx.transforms.engine.routes import Reach, Route

_JAX = os.path.dirname(jax.__file__)
_DEPTH = 3  # containers between a Module and an array that is found by who holds it


class Root:
    """A Module with captured cells, in its state when the function was traced.

    Args:
        module: the Module.
        route: how the function reaches it; None if that is unknown.
        cells: the dicts that hold the captured cells, by the number of the cell in the Module's flat form.
    """

    def __init__(self, module: Any, route: Route | None, cells: dict[int, Any], when_gone: Callable[[], Any]):
        flat = flat_of(module)
        self.module = weakref.ref(module, lambda _: when_gone())
        self.route = route
        self.structure: GraphKey = flat.key
        self.cells = cells
        self._flat = weakref.ref(flat)

    def is_current(self, functions: Sequence[Any]) -> bool:
        module = self.module()
        if module is None or (self.route is not None and self.route.follow(functions) is not module):
            return False
        flat = flat_of(module)
        if flat is not self._flat():  # something changed, but maybe nothing that matters
            if flat.key is not self.structure or any(flat.dicts[i] is not values for i, values in self.cells.items()):
                return False
            self._flat = weakref.ref(flat)
        return True


class Roster:
    """The Modules in a list or dict that a function reads: a loop over it sees those that come later, too.

    Args:
        container: the list or dict.
        route: how the function reaches it.
    """

    def __init__(self, container: Any, route: Route):
        self._route = route
        self._modules = [*map(weakref.ref, _modules_in(container))]
        self._is_done = False  # once something else fills a list that was empty

    def is_current(self, functions: Sequence[Any]) -> bool:
        if self._is_done:
            return True
        container = self._route.follow(functions)
        if type(container) not in (list, dict):
            return False
        modules = _modules_in(container)
        if not modules and not self._modules:
            self._is_done = not _is_vacant(container)
        return len(modules) == len(self._modules) and all([m is was() for m, was in zip(modules, self._modules)])


class Place(NamedTuple):
    """A leaf of a cell that holds a captured array."""

    module: "weakref.ref[Any]"
    cell: int
    leaf: int
    route: Route | None

    def path(self) -> str:
        module = self.module()
        return f"{type(module).__name__}.{flat_of(module).key.cell_roots()[self.cell].path.replace('/', '.')}"

    def holds(self, array: Any) -> bool:
        """Whether the array is still there, or the Module is gone, so that no function can read from it."""
        module = self.module()
        if module is None:
            return True
        values = flat_of(module).values()
        leaves = jax.tree.leaves(values[self.cell]) if self.cell < len(values) else []
        return self.leaf < len(leaves) and identity(leaves[self.leaf]) == identity(array)


class Captured:
    """The cells that a function reads besides its arguments.

    It holds instance dicts but no Module. When one is gone, `when_gone` is called, to drop all that refers to its dict.

    Attributes:
        dicts, names: the hidden arguments: `dicts[i][names[i]]` is the value of cell i.
    """

    def __init__(self, when_gone: Callable[[], Any]):
        self.dicts: list[dict[str, Any]] = []
        self.names: list[str] = []
        self._numbers: dict[tuple[int, str], int] = {}
        # By what they look at: the program is traced for other shapes, too, and mostly finds the same again.
        self._checks: dict[Any, Any] = {}
        self._ways: dict[tuple[Route, Route], None] = {}  # pairs that lead to one object, on the way to a Module
        self._watched: list[tuple[Place, Any]] = []  # with a weak reference to the array, a constant of the program
        self._rules_read: list[tuple[Any, list[Any]]] = []  # Modules and their arrays, weakly
        self._when_gone = when_gone

    def __bool__(self) -> bool:
        return bool(self._checks or self._watched)

    def values(self) -> list[Any]:
        """Returns the hidden arguments."""
        return [*map(getitem, self.dicts, self.names)]

    def is_current(self, functions: Sequence[Any]) -> bool:
        """Whether the program still reads what it read when it was traced, given its functions."""
        if not all([check.is_current(functions) for check in self._checks.values()]) or self.changed():
            return False
        if not all([one.follow(functions) is other.follow(functions) for one, other in self._ways]):
            return False
        return not self._rules_read or is_eager() or all([_holds(*noted) for noted in self._rules_read])

    def changed(self) -> list[str]:
        """Returns the paths of watched cells whose arrays have changed."""
        return [place.path() for place, array in self._watched if not place.holds(array())]

    def watched(self) -> list[str]:
        """Returns the paths of all watched cells."""
        return [place.path() for place, _ in self._watched if place.module() is not None]

    def add(self, functions: Sequence[Any], closed: Any) -> bool:
        """Notes which constants of a program are held by cells; returns whether there are new hidden arguments."""
        outer, inner = _constants(closed)
        wanted = {**outer, **inner}
        read, reach = Reach(functions, only_read=True), Reach(functions)
        before, held = len(self.names), dict[int, tuple[Any, Route | None, dict[int, Any]]]()
        for key, places, has_name in _places_of(wanted, read, reach) if wanted else ():
            first = places[0][0]
            is_hidden = key in outer and len(places) == 1 and first.route is not None and not has_name
            if is_hidden:
                self._hide(first)
            # Both, if it is read on the outside and inside a program.
            if (key in inner or not is_hidden) and not is_tracer(wanted[key]):
                self._watched += [(ways[0], _reference(wanted[key])) for ways in places]
            for place in itertools.chain(*places):
                if place.route is not None or len(places) == 1:
                    module = place.module()
                    _, _, cells = held.setdefault(id(module), (module, place.route, {}))
                    cells[place.cell] = flat_of(module).dicts[place.cell]
        if held:
            outdate_traces()
        if held and _has_own_rules(closed):
            self._rules_read = [(weakref.ref(m), [*map(weakref.ref, _arrays(m))]) for m, _ in reach.modules]
        for module, route in read.modules:  # of which the function may have read static attributes
            held.setdefault(id(module), (module, route, {}))
        for module, route, cells in held.values():
            root = self._checks.setdefault(id(module), Root(module, route, cells, self._when_gone))
            root.cells.update(cells)
        leading = read.leading_to([module for module, _, _ in held.values()])
        self._ways.update(dict.fromkeys(read.other_ways(leading)))
        for container, route in read.containers:
            if _modules_in(container) if id(container) in leading else _is_vacant(container):
                self._checks.setdefault(route, Roster(container, route))
        return len(self.names) > before

    def inputs(self, hidden: Sequence[Any]) -> dict[Any, Any]:
        """Returns what takes the place of each constant: a leaf of the hidden arguments, by the array it is now."""
        keys = [identity(leaf) for value in self.values() for leaf in jax.tree.leaves(value)]
        return dict(zip(keys, jax.tree.leaves(hidden), strict=True))

    def _hide(self, place: Place) -> None:
        flat = flat_of(place.module())
        values, name = flat.dicts[place.cell], flat.names[place.cell]
        if self._numbers.setdefault((id(values), name), len(self.names)) == len(self.names):
            self.dicts.append(values)
            self.names.append(name)


def _constants(closed: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Returns the array constants of a program, and those of programs inside it that cannot be passed to them."""
    outer = {identity(const): const for const in constants_of(closed)}
    inner: dict[Any, Any] = {}
    stack, seen = [(closed, True)], set[Any]()
    while stack:
        program, can_inline = stack.pop()
        for eqn in program.eqns:
            for called in programs_in(eqn):
                inlined = can_inline and is_inlined(eqn)
                if (id(called), inlined) not in seen:
                    seen.add((id(called), inlined))
                    (outer if inlined else inner).update({identity(const): const for const in constants_of(called)})
                    stack.append((called, inlined))
    return outer, inner


def _has_own_rules(closed: Any) -> bool:
    """Whether a program uses a derivative rule other than those of JAX, which capture nothing."""
    files = [_file_of(program) for eqn in filter(is_rule, equations(closed)) for program in programs_in(eqn)]
    return not all(file.startswith(_JAX) for file in files)


def _file_of(program: Any) -> str:
    """Returns the file of the function that a program was traced from."""
    opened = getattr(program, "jaxpr", program)
    return getattr(getattr(opened, "debug_info", None), "func_filename", None) or ""


def _modules_in(container: Any) -> list[Any]:
    """Returns the Modules in a list or dict, and those in the tuples, containers and objects that it holds."""
    found = []
    for value in container.values() if type(container) is dict else container:
        if isinstance(value, ModuleBase):
            found.append(value)
        elif type(value) not in HOLD_NOTHING:
            found += [held for _, held in held_by(value) if isinstance(held, ModuleBase)]
    return found


def _is_vacant(container: Any) -> bool:
    """Whether a list or dict has nothing in it yet."""
    return all(value is None for value in (container.values() if type(container) is dict else container))


def _arrays(module: Any) -> list[Any]:
    return [*filter(_is_array, jax.tree.leaves(flat_of(module).values()))]


def _holds(weak: Any, arrays: Sequence[Any]) -> bool:
    """Whether a Module still has these arrays."""
    module = weak()
    now = [] if module is None else _arrays(module)
    return len(now) == len(arrays) and all(array is was() for array, was in zip(now, arrays))


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array) and not is_tracer(value)


def _reference(array: Any) -> Any:
    """Returns what returns an array as long as it is there; one of NumPy's stays, because another could follow it."""
    return weakref.ref(array) if isinstance(array, jax.Array) else lambda: array


def _places_of(wanted: Mapping[Any, Any], read: Reach, reach: Reach) -> Iterator[tuple[Any, list[list[Place]], bool]]:
    """Yields the wanted arrays that cells hold, and where.

    Args:
        wanted: the arrays, by key.
        read: what the function probably reads.
        reach: all that it reaches.

    Yields:
        The key; for each cell, its places in the Modules that lead to it; whether a name leads to the array as well.
    """
    found: dict[Any, dict[Any, list[Place]]] = {}
    for cell, key, place in _cells_with(wanted, read.modules):
        found.setdefault(key, {}).setdefault(cell, []).append(place)
    for cell, key, place in _cells_with(wanted, reach.modules):
        found.setdefault(key, {}).setdefault(cell, [place])
    named = {identity(array) for array, _ in reach.arrays}
    missing = {
        key: array for key, array in wanted.items() if key not in found and key not in named and _is_array(array)
    }
    for cell, key, place in _cells_with(missing, [(module, None) for module in _holders([*missing.values()])]):
        found.setdefault(key, {}).setdefault(cell, [place])
    for key, cells in found.items():
        yield key, list(cells.values()), key in named


def _cells_with(wanted: Mapping[Any, Any], modules: Iterable[tuple[Any, Route | None]]) -> Iterator[Any]:
    """Yields what identifies a cell of a Module that holds a wanted array, the array's key, and its place."""
    for module, route in modules:
        flat = flat_of(module)
        for i, value in enumerate(flat.values()):
            for leaf, array in enumerate(jax.tree.leaves(value)):
                if (key := identity(array)) in wanted:
                    yield (id(flat.dicts[i]), flat.names[i], leaf), key, Place(weakref.ref(module), i, leaf, route)


def _holders(arrays: list[Any]) -> Iterable[Any]:
    """Returns the Modules that hold arrays, by any route; slow, because the garbage collector looks at every object."""
    found: dict[int, Any] = {}
    level, seen = arrays, {id(arrays)}
    for _ in range(_DEPTH if arrays else 0):
        # The lists made here refer to the arrays as well, so `seen` has them, too.
        holders = [x for x in gc.get_referrers(*level) if type(x) in (dict, list, tuple) and id(x) not in seen]
        seen.update(map(id, holders), [id(holders)])
        # Not the globals of a Python module: they hold too much, and a Module among them is found by its own dict.
        level = [x for x in holders if not (type(x) is dict and "__builtins__" in x)]
        owners = [x for x in gc.get_referrers(*level) if isinstance(x, ModuleBase)] if level else []
        found.update({id(owner): owner for owner in owners})
        seen.add(id(level))
    return found.values()
