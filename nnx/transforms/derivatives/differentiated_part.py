"""What the differentiating transforms share: the differentiated part of a call, as a flat value and as the user
sees it.

The *differentiated part* is the data in the chosen arguments and, of the Modules there, the cells that `wrt` selects.
To the user it has the shape of the arguments, with each Module replaced by a State.

One cell may be reached from several of these Modules, or from one that is passed twice. Three rules follow:

- A result (`pack`: gradients, cotangents from `vjp`) has the cell once, at its canonical place. The sum over all
  differentiated arguments is then the whole gradient.
- What the user supplies (`unpack`: tangents for `jvp`, cotangents from a custom backward pass) counts every time:
  contributions to one cell are added, and any path that leads to the cell can name it.
- A custom forward rule (`spread`) sees every Module with its complete tangent, because each of them moves.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.module.freezing import is_frozen
from nnx.core.module.kinds import box
from nnx.core.state.filters import check_wrt, describe, to_predicate
from nnx.core.state.paths import listing
from nnx.core.state.state import State
from nnx.core.structure.flat import Flat, flat_of, joint_flat_of
from nnx.core.variables.untied import warn_of_untied
from nnx.core.variables.variables import Container, raw_value
from nnx.transforms.engine.call import DATA_MARK, Call, is_data, is_module, unique, with_values
from nnx.transforms.engine.leave import run
from nnx.transforms.engine.outcome import Outcome, Returned
from nnx.transforms.engine.selected_arguments import Selection, leaf_flags

INTEGER_LEAF = """{name} was asked for the gradient of {path!r}, {kind} of dtype {dtype}: only float and complex \
values have gradients. Narrow what is differentiated (wrt=..., now {wrt}), give the value another Variable type, or \
pass allow_int=True."""

NOTHING_SELECTED = """{name}: wrt={wrt} matches nothing in {modules}, so there is nothing to differentiate. {holds} \
Choose another filter (wrt=...) or another argument (argnums=...)."""

WRONG_NUMBER = "{name} needs one of {what} per argument, {count}; got {given}."

NO_SUCH_ARGUMENT = "{name}: {option}={numbers} names argument {number} of a call with {count} arguments."

NOT_A_STATE = """{name} needs a State of the {wrt} part for {what}, got {got}. Take one from the Module, \
`module.filter({wrt})`, and map over it."""

UNKNOWN_PATH = """{name}: {path!r} in {what} is not in the part of {module} that is differentiated, {wrt}: {known}."""

OTHER_SHAPE = """{name}: {what} for {path!r} have the shape {got}, but the variable has the shape {expected}."""

MISSING_COTANGENT = """{name}: the cotangent of {module} has no {path!r}. It must be a State of the whole {wrt} part, \
with zeros where there is no gradient; None means zeros everywhere."""


class DifferentiatedPart:
    """The differentiated part of a call.

    Args:
        name: the transform with the function's name, for errors.
        args, kwargs: the call.
        argnums: the differentiated arguments; one position, or several.
        wrt: a filter for the Variables of the Modules among them.
        allow_int: whether integer values may be selected.
        allow_empty: whether it may select nothing at all.
        trained_only: whether the rest is trained: frozen Variables are left out, and ties that are none are reported.
    """

    def __init__(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        argnums: Any,
        wrt: Any,
        *,
        allow_int: bool = False,
        allow_empty: bool = False,
        trained_only: bool = False,
    ):
        self.name, self.wrt, self.trained_only = name, wrt, trained_only
        self.call: Call = Call(args, kwargs)
        self.single: bool = isinstance(argnums, int)
        self.positions: list[int] = positions_of(name, "argnums", argnums, len(args))
        self.arguments: list[Any] = [args[i] for i in self.positions]
        self.data: list[int] = _data_in(self.call, self.positions, args, kwargs)
        self.roots: list[Any] = unique([leaf for leaf in jax.tree.leaves(self.arguments) if is_module(leaf)])
        self.flat: Flat | None = joint_flat_of(self.roots) if self.roots else None
        self.own: list[int] = []  # the differentiated cells, as `flat` numbers them
        self.cells: list[int] = []  # the same cells, as the call numbers them
        self.paths: list[dict[str, int]] = []  # per root: the path of each cell that it reaches, and its index in `own`
        if self.flat is not None:
            self._select_cells(self.flat)
        if self.flat is not None and not (self.own or self.data or allow_empty):
            raise ValueError(self._nothing_selected())
        if not allow_int:
            self._check_floats()

    def _select_cells(self, flat: Flat) -> None:
        places = _places(flat)
        chosen = [self._chosen_cells(root, places) for root in self.roots]
        self.own = sorted({cell for cells in chosen for cell in cells.values()})
        indices = {cell: n for n, cell in enumerate(self.own)}
        self.paths = [{path: indices[cell] for path, cell in cells.items()} for cells in chosen]
        self.cells = self.own
        if self.call.flat is not flat:
            places = _places(self.call.flat)
            self.cells = [places[id(flat.dicts[i]), flat.names[i]] for i in self.own]

    def _chosen_cells(self, root: Any, places: Mapping[tuple[int, str], int]) -> dict[str, int]:
        """Returns the cells of one Module that `wrt` selects, by path.

        The filter sees the paths of each Module on its own, so that `module.filter(wrt)` is always a valid tangent.
        """
        flat, matches = flat_of(root), to_predicate(self.wrt)
        entries = list(zip(flat.key.layout.paths, flat.leaves()))
        check_wrt(self.wrt, entries, self.name)
        # By instance dict and name, because this Module numbers its cells differently from the whole call.
        cells = (places[id(values), name] for values, name in zip(flat.dicts, flat.names))
        chosen = [(path, leaf, cell) for (path, leaf), cell in zip(entries, cells) if matches(path, leaf)]
        if self.trained_only:
            chosen = [(path, leaf, cell) for path, leaf, cell in chosen if not is_frozen(leaf)]
            warn_of_untied("nnx.grad", root, [(path, leaf) for path, leaf, _ in chosen])
        return {path: cell for path, _, cell in chosen}

    def _nothing_selected(self) -> str:
        by_type: dict[str, list[str]] = {}
        for root in self.roots:
            for path, leaf in flat_of(root).state().items():
                kind = type(leaf).__name__ if isinstance(leaf, Container) else "bare array"
                kind = f"frozen {kind}" if is_frozen(leaf) else kind
                by_type.setdefault(kind, []).append(path)
        found = "; ".join(f"{kind}: {listing(dict.fromkeys(paths))}" for kind, paths in by_type.items())
        return NOTHING_SELECTED.format(
            name=self.name,
            wrt=describe(self.wrt),
            modules=", ".join(type(root).__name__ for root in self.roots),
            holds=f"There are {found}." if found else "There are no variables in it at all.",
        )

    def _check_floats(self) -> None:
        for i in self.own:
            for leaf in jax.tree.leaves(self._value(i)):
                if _is_integer(leaf):
                    key: Any = self.flat.key  # type: ignore[union-attr]
                    text = {"path": key.cell_roots()[i].path, "kind": key.kinds[i], "dtype": jnp.result_type(leaf)}
                    raise TypeError(INTEGER_LEAF.format(name=self.name, wrt=describe(self.wrt), **text))

    def _value(self, cell: int) -> Any:
        """Returns the value of a cell, numbered within the differentiated Modules."""
        flat: Any = self.flat
        return flat.dicts[cell][flat.names[cell]]

    def primals(self) -> tuple[list[Any], list[Any]]:
        values = self.call.cells()
        return [values[i] for i in self.cells], [self.call.data[i] for i in self.data]

    def function(self, fun: Callable[..., Any]) -> Callable[[Any], Outcome]:
        """Returns the call as a function of its differentiated part alone."""
        cells, data, forks = self.call.cells(), list(self.call.data), self.call.forks()

        def pure(part: tuple[list[Any], list[Any]]) -> Outcome:
            all_cells, all_data = with_values(cells, (self.cells, part[0])), with_values(data, (self.data, part[1]))
            return run(fun, self.call.signature, self.call.statics, all_cells, all_data, forks, self.name)

        return pure

    # To the user

    def pack(self, cells: Sequence[Any], data: Sequence[Any], boxed: bool = True) -> Any:
        """Returns values for the differentiated part in the shape of its arguments; a shared cell appears once."""
        leaves: dict[int, dict[str, Any]] = {id(root): {} for root in self.roots}
        if self.flat is not None:
            numbers = self.flat.key.roots
            for i, value in zip(self.own, cells):
                at, path = self.flat.key.cell_roots()[i]
                leaves[id(self.roots[numbers.index(at)])][path] = self._box(i, value) if boxed else value
        return self._fill(data, lambda module: leaves.pop(id(module), {}))

    def spread(self, cells: Sequence[Any], data: Sequence[Any]) -> Any:
        """Like `pack`, but with every cell in the State of every Module that reaches it."""
        boxed = [self._box(i, value) for i, value in zip(self.own, cells)]
        return self._fill(data, lambda module: {path: boxed[n] for path, n in self._paths_of(module).items()})

    def _fill(self, data: Sequence[Any], leaves_of: Callable[[Any], dict[str, Any]]) -> Any:
        rest = iter(data)

        def replace(leaf: Any) -> Any:
            if is_module(leaf):
                return State(leaves_of(leaf))
            return next(rest) if is_data(leaf) else None

        packed = tuple([jax.tree.map(replace, argument) for argument in self.arguments])
        return packed[0] if self.single else packed

    def _box(self, cell: int, value: Any) -> Any:
        kind = self.flat.key.kinds[cell]  # type: ignore[union-attr]
        return box(kind, value)

    # From the user

    def unpack(self, trees: Any, what: str, complete: bool = False) -> tuple[list[Any], list[Any]]:
        """Returns flat values from what the user supplies for each differentiated argument.

        Contributions to one cell are added. Paths that no State has are zero.

        Args:
            trees: one tree per differentiated argument, with a State for each Module.
            what: the name for these values in errors.
            complete: whether the States must cover all differentiated cells; None in place of an argument, or of a
                Module, then means zeros.

        Raises:
            TypeError: something other than a State was given for a Module.
            ValueError: a path is unknown or missing, or the number of trees or the shape of a leaf is wrong.
        """
        trees = tuple(trees)
        if len(trees) != len(self.arguments):
            raise ValueError(
                WRONG_NUMBER.format(name=self.name, what=what, count=len(self.arguments), given=len(trees))
            )
        sums: list[Any] = [None] * len(self.own)
        data: list[Any] = []
        zero: set[int] = set()  # the cells for which None was given
        for argument, tree in zip(self.arguments, trees):
            leaves, treedef = jax.tree.flatten(argument)
            given = [None] * len(leaves) if tree is None and complete else treedef.flatten_up_to(tree)
            for leaf, value in zip(leaves, given):
                if is_data(leaf):
                    data.append(value)
                elif is_module(leaf) and value is None and complete:
                    zero.update(self._paths_of(leaf).values())
                elif is_module(leaf):
                    self._add_state(leaf, value, sums, what)
        if complete:
            self._require_all(sums, zero)
        values = map(self._value, self.own)
        cells = [jax.tree.map(zero_tangent, value) if total is None else total for total, value in zip(sums, values)]
        return cells, data

    def _add_state(self, module: Any, state: Any, sums: list[Any], what: str) -> None:
        if not isinstance(state, State):
            got, kind = type(state).__name__, f"{what} ({type(module).__name__})"
            raise TypeError(NOT_A_STATE.format(name=self.name, what=kind, wrt=describe(self.wrt), got=got))
        paths = self._paths_of(module)
        for path, leaf in state.items():
            n = paths.get(path)
            if n is None:
                n = self._find_alias(module, path)
            if n is None:
                text = {"path": path, "what": what, "module": type(module).__name__, "wrt": describe(self.wrt)}
                raise ValueError(UNKNOWN_PATH.format(name=self.name, known=listing(paths) or "nothing", **text))
            given = raw_value(leaf)
            value = self._value(self.own[n])
            if _shape(given) != _shape(value):
                text = {"what": what, "path": path, "got": _shape_text(given), "expected": _shape_text(value)}
                raise ValueError(OTHER_SHAPE.format(name=self.name, **text))
            given = jax.tree.map(lambda g, v: zero_tangent(v) if _is_integer(v) else g, given, value)
            sums[n] = given if sums[n] is None else jax.tree.map(_add, sums[n], given)

    def _paths_of(self, module: Any) -> dict[str, int]:
        return next(paths for root, paths in zip(self.roots, self.paths) if root is module)

    def _find_alias(self, module: Any, path: str) -> int | None:
        """Returns the index in `own` of the cell that a path other than the canonical one leads to."""
        key = flat_of(module).key
        cell = key.find(path)
        return self._paths_of(module).get(key.layout.paths[cell]) if cell is not None else None

    def _require_all(self, sums: Sequence[Any], zero: set[int]) -> None:
        for root, paths in zip(self.roots, self.paths):
            for path, n in paths.items():
                if sums[n] is None and n not in zero:
                    text = {"module": type(root).__name__, "path": path, "wrt": describe(self.wrt)}
                    raise ValueError(MISSING_COTANGENT.format(name=self.name, **text))


# Values


def zero_tangent(primal: Any) -> Any:
    """Returns the zero tangent of a value; for integers, JAX's `float0`."""
    if _is_integer(primal):
        return np.zeros(jnp.shape(primal), jax.dtypes.float0)
    return jnp.zeros(jnp.shape(primal), jnp.result_type(primal))


def as_tangents(tangents: Any, primals: Any) -> Any:
    """Returns tangents with the dtypes that JAX wants for these primals."""
    return jax.tree.map(lambda t, p: zero_tangent(p) if _is_integer(p) else t, tangents, primals)


def _is_integer(primal: Any) -> bool:
    dtype = getattr(primal, "dtype", None)
    return not _is_inexact(jnp.result_type(primal) if dtype is None else dtype)


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _add(a: Any, b: Any) -> Any:
    return a if getattr(a, "dtype", None) == jax.dtypes.float0 else a + b


def _shape(value: Any) -> Any:
    leaves, treedef = jax.tree.flatten(value)
    return treedef, [jnp.shape(leaf) for leaf in leaves]


def _shape_text(value: Any) -> str:
    return str(jax.tree.map(lambda leaf: list(jnp.shape(leaf)), value))


# Modules in outputs


def without_modules(out: Any) -> Any:
    """Returns a tangent or cotangent of an output, with None in place of Modules."""
    return jax.tree.map(lambda x: None if _is_returned(x) else x, out, is_leaf=_is_returned)


def with_modules(out: Any, given: Any) -> Any:
    """Inverts `without_modules`: returns `given` in the structure of `out`; what it has for Modules is ignored."""
    leaves, treedef = jax.tree.flatten(out, is_leaf=_is_returned)
    pairs = zip(leaves, treedef.flatten_up_to(given))
    return jax.tree.unflatten(treedef, [leaf if _is_returned(leaf) else value for leaf, value in pairs])


def _is_returned(x: Any) -> bool:
    return isinstance(x, Returned)


# Places


def _data_in(call: Call, positions: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Returns which of a call's data are in the arguments at these positions."""
    flags = leaf_flags(Selection(lambda: None, positions, None), args, kwargs)
    in_positions = [flag for flag, mark in zip(flags, call.signature.marks) if mark == DATA_MARK]
    return [i for i, flag in enumerate(in_positions) if flag]


def positions_of(name: str, option: str, numbers: Any, count: int) -> list[int]:
    """Returns the argument positions that an option names in a call with `count` arguments.

    Raises:
        ValueError: there is no such argument.
    """
    chosen = [numbers] if isinstance(numbers, int) else list(numbers)
    for number in chosen:
        if not -count <= number < count:
            raise ValueError(
                NO_SUCH_ARGUMENT.format(name=name, option=option, numbers=numbers, number=number, count=count)
            )
    return [number % count for number in chosen]


def _places(flat: Flat | None) -> dict[tuple[int, str], int]:
    """Returns the cell of every `(dict, name)` of a flat form, with all owners of Refs."""
    assert flat is not None
    places = {(id(values), name): i for i, (values, name) in enumerate(zip(flat.dicts, flat.names))}
    for i, ref in flat.refs.items():
        places.update({(id(values), name): i for values, name in ref.targets()})
    return places
