"""Captured weights: arrays that a traced function reads from Modules that are not among its arguments.

JAX makes every array that a function reads by closure, global or any other way a constant of the traced program. The
constants of the program *are* those arrays, so they can be recognized among the cells of live Modules: first of the
Modules that the function reaches by name (`routes`), then of whoever holds the array. These cells become *hidden*
arguments, gathered on every call like the others, so the program sees their current values and is compiled once.

A program is traced again if what it captured is no longer where it was: a name on the route was bound to another
Module, the structure of a Module changed, or a Module is gone. An array that cannot become an argument, because it is a
constant of something inside the program (`jax.jit` in the body of a loop), is *embedded*: the program is traced again
once its cell holds another array.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import getitem
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import eval_jaxpr

from nnx.core.flat import flat_of
from nnx.core.module_info import ModuleBase
from nnx.core.structure import GraphKey
from nnx.core.trace import is_tracer
from nnx.transforms.routes import Route, reached

_DEPTH = 3  # containers between a Module and an array that is found by who holds it


class Root:
    """A Module with captured cells, as it was when the function was traced.

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
        self._cells = cells
        self._flat = weakref.ref(flat)

    def is_current(self, functions: Sequence[Any]) -> bool:
        module = self.module()
        if module is None or not (self.route is None or self.route.follow(functions) is module):
            return False
        flat = flat_of(module)
        if flat is not self._flat():  # something changed, but maybe nothing that matters
            if flat.key is not self.structure or any(flat.dicts[i] is not values for i, values in self._cells.items()):
                return False
            self._flat = weakref.ref(flat)
        return True


class Place(NamedTuple):
    """A leaf of a captured cell."""

    cell: int
    leaf: int
    path: str


class Captured:
    """The cells that a function reads besides its arguments.

    It holds instance dicts but no Module. When one is gone, `when_gone` is called, to drop all that refers to its dict.

    Attributes:
        dicts, names: the cells: `dicts[i][names[i]]` is the value of cell i.
    """

    def __init__(self, when_gone: Callable[[], Any]):
        self.dicts: list[dict[str, Any]] = []
        self.names: list[str] = []
        self._numbers: dict[tuple[int, str], int] = {}
        self._roots: list[Root] = []
        self._tied: list[list[Place]] = []  # leaves that were one array: while they are, any of them will do
        self._embedded: list[tuple[Place, Any]] = []  # with a weak reference to the array inside the program
        self._when_gone = when_gone

    def __bool__(self) -> bool:
        return bool(self.names)

    def values(self) -> list[Any]:
        """Returns the hidden arguments."""
        return [*map(getitem, self.dicts, self.names)]

    def is_current(self, functions: Sequence[Any]) -> bool:
        """Whether the program still reads what it read when it was traced, given its functions."""
        if not all([root.is_current(functions) for root in self._roots]):
            return False
        return self.changed_inside() is None and all([self._is_one_array(places) for places in self._tied])

    def changed_inside(self) -> str | None:
        """Returns the path of a cell that no longer holds the array that is embedded in the program, or None."""
        for place, array in self._embedded:
            if self._leaf(place) is not array():
                return place.path
        return None

    def add(self, functions: Sequence[Any], closed: Any) -> bool:
        """Notes which constants of a program are held by cells; returns whether there are new ones."""
        outer, inner = _constants(closed)
        wanted = {**outer, **inner}
        if not wanted:
            return False
        before, found = len(self.names), {}
        for module, route in _modules_with(wanted, functions):
            for key, place in self._cells_of(module, route, wanted):
                found.setdefault(key, []).append(place)
        self._tied += [places for places in found.values() if len(places) > 1]
        self._embedded += [(found[key][0], weakref.ref(inner[key])) for key in inner if key in found]
        return len(self.names) > before

    def inputs(self, hidden: Sequence[Any]) -> dict[Any, Any]:
        """Returns what takes the place of each constant: a leaf of the hidden arguments, by the array it is now."""
        keys = [identity(leaf) for value in self.values() for leaf in jax.tree.leaves(value)]
        return dict(zip(keys, jax.tree.leaves(hidden), strict=True))

    def _cells_of(self, module: Any, route: Route | None, wanted: Any) -> Iterator[tuple[Any, Place]]:
        flat, cells = flat_of(module), {}
        for i, value in enumerate(flat.values()):
            for leaf, array in enumerate(jax.tree.leaves(value)):
                key = identity(array)
                if key in wanted:
                    cells[i] = flat.dicts[i]
                    path = f"{type(module).__name__}.{flat.key.cell_roots()[i].path.replace('/', '.')}"
                    yield key, Place(self._number(flat.dicts[i], flat.names[i]), leaf, path)
        if cells:
            self._roots.append(Root(module, route, cells, self._when_gone))

    def _number(self, values: dict[str, Any], name: str) -> int:
        number = self._numbers.setdefault((id(values), name), len(self.names))
        if number == len(self.names):
            self.dicts.append(values)
            self.names.append(name)
        return number

    def _leaf(self, place: Place) -> Any:
        leaves = jax.tree.leaves(self.dicts[place.cell].get(self.names[place.cell]))
        return leaves[place.leaf] if place.leaf < len(leaves) else None

    def _is_one_array(self, places: Sequence[Place]) -> bool:
        return len({identity(self._leaf(place)) for place in places}) == 1


def identity(value: Any) -> Any:
    """Returns what tells an array from any other: itself, or the memory of one that belongs to NumPy."""
    if isinstance(value, jax.Array):
        return id(value)
    if hasattr(value, "__array__") and hasattr(value, "dtype"):  # JAX wraps the arrays of NumPy
        array = np.asarray(value)
        return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype
    return None


def _constants(closed: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Returns the array constants of a program, and those of programs inside it that cannot be passed to them."""
    outer = {identity(const): const for const in closed.consts}
    inner: dict[Any, Any] = {}
    stack, seen, kinds = [(closed.jaxpr, True)], set(), (type(closed), type(closed.jaxpr))
    while stack:
        jaxpr, can_inline = stack.pop()
        for eqn in jaxpr.eqns:
            for value in eqn.params.values():
                for program in value if type(value) in (tuple, list) else (value,):
                    if isinstance(program, kinds) and id(program) not in seen:
                        seen.add(id(program))
                        inlined = can_inline and is_inlined(eqn)
                        consts = {identity(const): const for const in getattr(program, "consts", ())}
                        (outer if inlined else inner).update(consts)
                        stack.append((getattr(program, "jaxpr", program), inlined))
    return outer, {key: const for key, const in inner.items() if key not in outer and _is_array(const)}


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array) and not is_tracer(value)


def is_inlined(eqn: Any) -> bool:
    """Whether an equation calls a program in a way that can be replaced by the program itself."""
    return eqn.primitive.name in ("jit", "pjit") and bool(eqn.params["jaxpr"].consts)


def _modules_with(wanted: Any, functions: Sequence[Any]) -> Iterator[tuple[Any, Route | None]]:
    """Yields the Modules that hold these arrays, with the routes to them, as far as there are any."""
    missing = dict(wanted)
    for value, route in reached(functions):
        if isinstance(value, ModuleBase):
            yield value, route
            for cell in flat_of(value).values():
                for leaf in jax.tree.leaves(cell):
                    missing.pop(identity(leaf), None)
        else:
            missing.pop(identity(value), None)  # a constant with a name of its own
    yield from ((module, None) for module in _holders(list(filter(_is_array, missing.values()))))


def _holders(arrays: list[Any]) -> Iterable[Any]:
    """Returns the Modules that hold arrays, whatever route leads to them; slow, since it looks at every object."""
    found: dict[int, Any] = {}
    level, seen = arrays, {id(arrays)}
    for _ in range(_DEPTH if arrays else 0):
        holders = [x for x in gc.get_referrers(*level) if type(x) in (dict, list, tuple) and id(x) not in seen]
        seen.update(map(id, holders), [id(holders)])
        # Not the globals of a Python module: they hold too much, and a Module among them is found by its own dict.
        level = [x for x in holders if not (type(x) is dict and "__builtins__" in x)]
        owners = [x for x in gc.get_referrers(*level) if isinstance(x, ModuleBase)] if level else []
        found.update({id(owner): owner for owner in owners})
        seen.add(id(level))
    return found.values()


class Program(NamedTuple):
    """A traced function. The fields are named as in `jax.stages.Traced`, which is one, too."""

    jaxpr: Any
    out_tree: Any


def trace_program(fun: Callable[..., Any], *operands: Any) -> Program:
    """Traces a function. Unlike in `jax.jit(fun).trace`, tracers that it captures are constants of the program."""
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*operands)
    return Program(closed, jax.tree.structure(shapes))


def evaluate(program: Any, inputs: dict[Any, Any], operands: Any) -> Any:
    """Runs a program with inputs in place of its captured constants."""
    return jax.tree.unflatten(program.out_tree, _evaluate(program.jaxpr, inputs, jax.tree.leaves(operands)))


def _evaluate(closed: Any, inputs: dict[Any, Any], args: Sequence[Any]) -> list[Any]:
    consts = [inputs.get(identity(const), const) for const in closed.consts]
    if not any(map(is_inlined, closed.jaxpr.eqns)):
        return eval_jaxpr(closed.jaxpr, consts, *args)
    values = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*consts, *args], strict=True))

    def read(variable: Any) -> Any:
        return variable.val if hasattr(variable, "val") else values[variable]

    for eqn in closed.jaxpr.eqns:
        operands = [read(variable) for variable in eqn.invars]
        if is_inlined(eqn):
            outs = _evaluate(eqn.params["jaxpr"], inputs, operands)
        else:
            functions, params = eqn.primitive.get_bind_params(eqn.params)
            with jax.named_scope(str(eqn.source_info.name_stack)):
                outs = eqn.primitive.bind(*functions, *operands, **params)
        values.update(zip(eqn.outvars, outs if eqn.primitive.multiple_results else [outs]))
    return [read(variable) for variable in closed.jaxpr.outvars]
