"""What a lifted function returns to JAX: an `Outcome`, a record of what the function did.

The values that changed and the output of the function are its children. Everything static is in the `Effects`: which
cells changed, what happened to the structure, what was sown.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from nnx.core.variables.trees import KeyOrder, in_order
from nnx.transforms.engine.observed import has_observations
from nnx.transforms.engine.rewrite import Rewrite


@dataclasses.dataclass(slots=True, repr=False)
class Effects:
    """Everything static about what a function did to its Modules."""

    changed: tuple[int, ...]  # the cells with new values; none if there is a Rewrite, which lists them itself
    rewrite: Rewrite | None  # the structural change, if there is one
    sown: Any  # the attributes recorded with `sow`, per Module
    returns_modules: bool  # whether there are Modules in the output
    aliases: tuple[tuple[int, ...], ...] = ()  # groups of cells that hold one container after the function
    # The cells, numbered before the function, that came to share a container or no longer do.
    regrouped: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    trees: tuple[int, ...] = ()  # the positions of values that are mutable trees, which flat forms keep track of
    # The order of the dicts in a cell after the function, unless they are sorted; -1, -2, ... stand for released Refs.
    orders: tuple[tuple[int, KeyOrder], ...] = ()
    _positions: Any = dataclasses.field(default=None, init=False, compare=False)  # see `tie`

    @property
    def simple(self) -> bool:
        """Whether values changed and nothing else did, so that a repeated call can be made from a plan."""
        return self.rewrite is None and not (self.sown or self.returns_modules or self.aliases)

    @property
    def survives_discard(self) -> bool:
        """Whether values have to come out even if all changes are discarded: returned Modules, captured outputs."""
        return self.returns_modules or has_observations(self.rewrite)

    def outputs(self) -> Sequence[int]:
        """Returns the cells whose values come out, numbered after the function if its structure changed."""
        return self.changed if self.rewrite is None else self.rewrite.outputs()

    def tie(self, values: Sequence[Any]) -> Sequence[Any]:
        """Returns the values that came out, with dicts in order and one container for all cells that shared one."""
        if not self.aliases and not self.orders:
            return values
        if self._positions is None:
            self._positions = self._find_positions()
        orders, aliases = self._positions
        values = list(values)
        for position, order in orders:
            values[position] = in_order(values[position], order)
        for first, other in aliases:
            values[other] = values[first]
        return values

    def _find_positions(self) -> tuple[list[tuple[int, KeyOrder]], list[tuple[int, int]]]:
        """Returns `orders` and `aliases`, the latter in pairs, with the positions of values in place of cells."""
        places = {cell: position for position, cell in enumerate(self.outputs())}
        released = () if self.rewrite is None else self.rewrite.released
        places.update({-1 - number: len(places) + number for number in range(len(released))})
        orders = [(places[cell], order) for cell, order in self.orders if cell in places]
        pairs = [(first, other) for first, *others in self.aliases for other in others]
        return orders, [(places[one], places[other]) for one, other in pairs if one in places and other in places]

    def __hash__(self) -> int:
        return hash(self.changed)


@dataclasses.dataclass(slots=True, eq=False)
class Outcome:
    """What a lifted function returns to JAX: the values that changed, its output, and the Effects; a pytree."""

    values: Any
    out: Any
    effects: Effects


# The Effects are the aux data: what changed is known only once a function has been traced, and JAX keeps the structure
# of a trace's output with the trace. So whichever trace a call hits, it finds the effects of that very trace.
jax.tree_util.register_pytree_node(
    Outcome,
    lambda outcome: ((outcome.values, outcome.out), outcome.effects),
    lambda effects, children: Outcome(children[0], children[1], effects),
)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Returned:
    """A Module in the output of a lifted function, as its number: a pytree without leaves.

    A Context in a carry has a negative number.
    """

    index: int
    of: type = dataclasses.field(compare=False)  # the class, for messages

    def __repr__(self) -> str:
        return f"<Module {self.index}: {self.of.__name__}>" if self.index >= 0 else f"<Context {-2 - self.index}>"


jax.tree_util.register_static(Returned)


class _Star:
    def __repr__(self) -> str:
        return "*"


def structure_text(structure: Any) -> str:
    """Returns the structure of an output as its author would write it: `(<Module 0: Linear>, {'loss': *})`."""
    try:
        return repr(jax.tree.unflatten(structure, [_Star()] * structure.num_leaves))
    except Exception:  # a user's class that cannot hold anything
        return str(structure)


def returned_modules(structure: Any) -> list[Returned]:
    """Returns the Modules and Contexts in the structure of an output."""
    is_returned = lambda x: isinstance(x, Returned)  # noqa: E731
    tree = jax.tree.unflatten(structure, [None] * structure.num_leaves)
    return list(filter(is_returned, jax.tree.leaves(tree, is_leaf=is_returned)))
