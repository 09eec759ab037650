"""What a lifted function returns to JAX: an `Outcome`, which says what the function did.

The values that changed and the output of the function are its children. Everything static is in the `Effects`: which
cells changed, what happened to the structure, what was sown.
"""

from collections.abc import Sequence
from typing import Any

import jax

from nnx.core.variables.trees import KeyOrder, in_order
from nnx.transforms.engine.observed import has_observations
from nnx.transforms.engine.rewrite import Rewrite


class Effects:
    """Everything static about what a function did to its Modules.

    Attributes:
        changed: the cells with new values, if the structure is unchanged; otherwise empty, and the Rewrite lists them.
        rewrite: the structural change, if there is one.
        sown: the attributes recorded with `sow`, per Module.
        returns_modules: whether there are Modules in the output.
        aliases: groups of cells that hold one container after the function.
        regrouped: cells, numbered before the function, that came to share a container or no longer do.
        trees: the values that come out as mutable trees, by position. A flat form has to know of these.
        orders: the order of the dicts in a cell after the function, unless they are sorted; those of released Refs
            have the numbers -1, -2, ...
        simple: whether values changed and nothing else did, so that a repeated call can be made from a plan.
    """

    __slots__ = (
        "changed", "rewrite", "sown", "returns_modules", "aliases", "regrouped", "trees", "orders", "simple",
        "_positions",
    )  # fmt: skip

    def __init__(
        self,
        changed: tuple[int, ...],
        rewrite: Rewrite | None,
        sown: Any,
        returns_modules: bool,
        aliases: tuple[tuple[int, ...], ...] = (),
        regrouped: tuple[int, ...] = (),
        trees: tuple[int, ...] = (),
        orders: tuple[tuple[int, KeyOrder], ...] = (),
    ):
        self.changed: tuple[int, ...] = changed
        self.rewrite: Rewrite | None = rewrite
        self.sown: Any = sown
        self.returns_modules: bool = returns_modules
        self.aliases = aliases
        self.regrouped: tuple[int, ...] = regrouped
        self.trees: tuple[int, ...] = trees
        self.orders = orders
        self._positions: tuple[list[tuple[int, KeyOrder]], list[tuple[int, int]]] | None = None  # see `tie`
        self.simple: bool = rewrite is None and not sown and not returns_modules and not aliases

    def replace(self, **parts: Any) -> "Effects":
        """Returns the same effects with some parts replaced."""
        names = ("changed", "rewrite", "sown", "returns_modules", "aliases", "regrouped", "trees", "orders")
        return Effects(**{name: parts[name] if name in parts else getattr(self, name) for name in names})

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

    def _parts(self) -> Any:
        return self.changed, self.rewrite, self.sown, self.returns_modules, self.aliases, self.trees, self.orders

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Effects) and self._parts() == other._parts())

    def __hash__(self) -> int:
        return hash(self.changed)


class Outcome:
    """What a lifted function returns to JAX: the values that changed, its output, and the Effects; a pytree."""

    __slots__ = ("values", "out", "effects")

    def __init__(self, values: Any, out: Any, effects: Effects):
        self.values: Any = values
        self.out: Any = out
        self.effects: Effects = effects


# The Effects are the aux data: what changed is known only once a function has been traced, and JAX keeps the structure
# of a trace's output with the trace. So whichever trace a call hits, it finds the effects of that very trace.
jax.tree_util.register_pytree_node(
    Outcome,
    lambda outcome: ((outcome.values, outcome.out), outcome.effects),
    lambda effects, children: Outcome(children[0], children[1], effects),
)


class Returned:
    """A Module in the output of a lifted function, as its number: a pytree without leaves.

    A Context that is handed on has a negative number. The class is for messages only.
    """

    __slots__ = ("index", "of")

    def __init__(self, index: int, of: type):
        self.index: int = index
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Returned) and self.index == other.index

    def __hash__(self) -> int:
        return hash((Returned, self.index))

    def __repr__(self) -> str:
        return f"<Module {self.index}: {self.of.__name__}>" if self.index >= 0 else f"<Context {-2 - self.index}>"


jax.tree_util.register_static(Returned)


class _Leaf:
    def __repr__(self) -> str:
        return "*"


def structure_text(structure: Any) -> str:
    """Returns the structure of an output as its author would write it: `(<Module 0: Linear>, {'loss': *})`."""
    try:
        return repr(jax.tree.unflatten(structure, [_Leaf()] * structure.num_leaves))
    except Exception:  # a user's class that cannot hold anything
        return str(structure)


def returned_modules(structure: Any) -> list[Returned]:
    """Returns the Modules and Contexts in the structure of an output."""
    is_returned = lambda x: isinstance(x, Returned)  # noqa: E731
    tree = jax.tree.unflatten(structure, [None] * structure.num_leaves)
    return list(filter(is_returned, jax.tree.leaves(tree, is_leaf=is_returned)))
