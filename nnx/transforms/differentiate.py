"""What the differentiating transforms share: the differentiated part of a call, as a flat value and as the user
sees it.

The *differentiated part* is the data in the chosen arguments, and of the Modules there the cells that `wrt` selects. To
the user it has the shape of the arguments, with each Module replaced by its State; a cell that several of these
Modules share appears once, at its canonical place.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nnx.core.filters import describe, to_predicate
from nnx.core.graph import TREE_SPEC, Flat, joint_flat_of
from nnx.core.info import NODE, TREE
from nnx.core.state import State
from nnx.core.variables import Container
from nnx.transforms.arguments import Selection, leaf_flags
from nnx.transforms.lift import MODULE, Call, Outcome, run, sort_of, unique

INTEGER_LEAF = """{name} was asked for the gradient of {path!r}, {kind} of dtype {dtype}: only float and complex \
values \
have gradients. Narrow what is differentiated (wrt=..., now {wrt}), give the value another Variable type, or pass \
allow_int=True."""

NOT_A_STATE = """{name} needs for {what} a State of its {wrt} part, got {got}. Take one from the Module, \
`module.filter({wrt})`, and map over it."""


class Part:
    """The differentiated part of a call."""

    def __init__(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], argnums: Any, wrt: Any, allow_int: bool
    ):
        self.name, self.wrt = name, wrt
        self.call = Call(args, kwargs)
        self.single = isinstance(argnums, int)
        self.positions = _positions(name, argnums, len(args))
        self.arguments = [args[i] for i in self.positions]
        flags = leaf_flags(Selection(lambda: None, self.positions, None), args, kwargs)
        marks = self.call.signature.marks
        data_flags = [flag for flag, mark in zip(flags, marks) if mark == -1]
        self.data = [i for i, flag in enumerate(data_flags) if flag]
        self.roots = unique([leaf for leaf in jax.tree.leaves(self.arguments) if sort_of(leaf) == MODULE])
        self.flat: Flat | None = joint_flat_of(self.roots) if self.roots else None
        self.cells: list[int] = []  # of the call
        self.own: list[int] = []  # the same cells, numbered from the differentiated Modules alone
        if self.flat is not None:
            self._select_cells(self.flat)
        if not allow_int:
            self._check_floats()

    def _select_cells(self, flat: Flat) -> None:
        matches = to_predicate(self.wrt)
        places = _places(self.call.flat)
        for i, ((_, path), leaf) in enumerate(zip(flat.key.cell_roots(), flat.leaves())):
            if matches(path, leaf):
                self.own.append(i)
                self.cells.append(places[id(flat.dicts[i]), flat.names[i]])

    def _check_floats(self) -> None:
        assert self.flat is not None or not self.own
        for i in self.own:
            path = self.flat.key.cell_roots()[i][1]  # type: ignore[union-attr]
            value = self.flat.dicts[i][self.flat.names[i]]  # type: ignore[union-attr]
            for leaf in jax.tree.leaves(value):
                dtype = jnp.result_type(leaf)
                if not jnp.issubdtype(dtype, jnp.inexact):
                    kind = self.flat.key.kinds[i]  # type: ignore[union-attr]
                    raise TypeError(
                        INTEGER_LEAF.format(name=self.name, path=path, kind=kind, dtype=dtype, wrt=describe(self.wrt))
                    )

    def primals(self) -> tuple[list[Any], list[Any]]:
        values = self.call.cells()
        return [values[i] for i in self.cells], [self.call.data[i] for i in self.data]

    def function(self, fun: Callable[..., Any]) -> Callable[[Any], Outcome]:
        """The call as a function of its differentiated part alone."""
        cells, data, forks = self.call.cells(), list(self.call.data), self.call.forks()

        def pure(part: tuple[list[Any], list[Any]]) -> Outcome:
            all_cells, all_data = list(cells), list(data)
            for i, value in zip(self.cells, part[0]):
                all_cells[i] = value
            for i, value in zip(self.data, part[1]):
                all_data[i] = value
            return run(fun, self.call.signature, self.call.statics, all_cells, all_data, forks, self.name)

        return pure

    def pack(self, cells: Sequence[Any], data: Sequence[Any], boxed: bool = True) -> Any:
        """Values for the differentiated part, in the shape of the differentiated arguments."""
        leaves: dict[int, dict[str, Any]] = {id(root): {} for root in self.roots}
        if self.flat is not None:
            numbers = list(dict.fromkeys(self.flat.key.table[0]))
            for i, value in zip(self.own, cells):
                at, path = self.flat.key.cell_roots()[i]
                kind = self.flat.key.kinds[i]
                if boxed and kind is not NODE:
                    value = TREE_SPEC.box(value) if kind is TREE else kind.box(value)
                leaves[id(self.roots[numbers.index(at)])][path] = value
        rest = iter(data)

        def replace(leaf: Any) -> Any:
            if sort_of(leaf) == MODULE:
                return State(leaves.pop(id(leaf), {}))
            return next(rest) if sort_of(leaf) == 0 else None

        packed = tuple([jax.tree.map(replace, argument) for argument in self.arguments])
        return packed[0] if self.single else packed

    def unpack(self, trees: Any, what: str) -> tuple[list[Any], list[Any]]:
        """The inverse of `pack`, for tangents: paths that a State does not have are zero."""
        trees = (trees,) if self.single else tuple(trees)
        if len(trees) != len(self.arguments):
            raise ValueError(f"{self.name} needs one of {what} per argument, {len(self.arguments)}; got {len(trees)}.")
        given: dict[int, State] = {}
        data: list[Any] = []
        for argument, tree in zip(self.arguments, trees):
            leaves, treedef = jax.tree.flatten(argument)
            for leaf, tangent in zip(leaves, treedef.flatten_up_to(tree)):
                if sort_of(leaf) == MODULE:
                    if not isinstance(tangent, State):
                        got, kind = type(tangent).__name__, f"{what} ({type(leaf).__name__})"
                        text = NOT_A_STATE.format(name=self.name, what=kind, wrt=describe(self.wrt), got=got)
                        raise TypeError(text)
                    given.setdefault(id(leaf), tangent)
                elif sort_of(leaf) == 0:
                    data.append(tangent)
        cells = []
        numbers = list(dict.fromkeys(self.flat.key.table[0])) if self.flat is not None else []
        for i in self.own:
            at, path = self.flat.key.cell_roots()[i]  # type: ignore[union-attr]
            state = given[id(self.roots[numbers.index(at)])]
            value = self.flat.dicts[i][self.flat.names[i]]  # type: ignore[union-attr]
            tangent = state[path] if path in state else jax.tree.map(jnp.zeros_like, value)
            cells.append(tangent.value if isinstance(tangent, Container) else tangent)
        self._check_paths(given)
        return cells, data

    def require_all(self, cotangents: Sequence[Any]) -> None:
        """Raises ValueError if a State leaves a path of its Module's differentiated part out."""
        for argument, cotangent in zip(self.arguments, cotangents):
            for module, state in zip(jax.tree.leaves(argument), [cotangent]):
                if sort_of(module) == MODULE and isinstance(state, State):
                    missing = [path for path in self.known_paths(module) if path not in state]
                    if missing:
                        raise ValueError(
                            f"{self.name}: the cotangent of {type(module).__name__} has no {missing[0]!r}. It "
                            f"must be a State of the whole {describe(self.wrt)} part; zeros where there is no gradient."
                        )

    def known_paths(self, root: Any) -> list[str]:
        """The paths of a Module's differentiated part."""
        if self.flat is None:
            return []
        numbers = list(dict.fromkeys(self.flat.key.table[0]))
        places = [self.flat.key.cell_roots()[i] for i in self.own]
        return [path for at, path in places if self.roots[numbers.index(at)] is root]

    def _check_paths(self, given: dict[int, State]) -> None:
        for root in self.roots:
            known = self.known_paths(root)
            unknown = [path for path in given.get(id(root), ()) if path not in known]
            if unknown:
                raise ValueError(
                    f"{self.name}: {unknown[0]!r} is not in the part of {type(root).__name__} that is differentiated, "
                    f"{describe(self.wrt)}: {', '.join(known) or 'nothing'}."
                )


def _positions(name: str, argnums: Any, count: int) -> list[int]:
    numbers = [argnums] if isinstance(argnums, int) else list(argnums)
    for number in numbers:
        if not -count <= number < count:
            raise ValueError(f"{name}: argnums={argnums} names argument {number} of a call with {count} arguments.")
    return [number % count for number in numbers]


def _places(flat: Flat | None) -> dict[tuple[int, str], int]:
    """The cell behind every place of a flat form, further owners of Refs included."""
    assert flat is not None
    places = {(id(values), name): i for i, (values, name) in enumerate(zip(flat.dicts, flat.names))}
    for i, ref in flat.refs.items():
        places.update({(id(values), name): i for values, name in ref.targets()})
    return places
