"""Argument forms: how the fast path of `nnx.jit` reads the arguments of a call without splitting it.

The *form* of a call is what the types and names of its arguments show: which of them are Modules, Contexts, data,
static, or pytrees that have to be flattened first. A form is made by a call on the general path, and recognizes later
calls like it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from nnx.core.statics.keys import ATOMS
from nnx.transforms.engine.call import cached_positions, data_types, is_context, is_data, is_module
from nnx.transforms.engine.selected_arguments import Selection, StaticArgument

_flatten = jax.tree.flatten


class Reading(NamedTuple):
    """The arguments of one call, read."""

    arguments: Any  # what plans for calls like this one are found by
    positions: Any  # the positions of Modules, Contexts and data in `values`
    values: Sequence[Any]


class ArgumentForm:
    """The form of a call, for arguments of certain types.

    Attributes:
        modules, contexts, data: their positions among the arguments, in the order of the call as a pytree. If there are
            trees among the arguments, positions are found among their leaves instead.
        is_plain: whether these positions are all there is to know, so that `read` is not needed.
    """

    __slots__ = ("modules", "contexts", "data", "is_plain", "_static", "_trees")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: Selection):
        values, names, count = (*args, *kwargs.values()), list(kwargs), len(args)
        by_name = sorted(range(len(names)), key=names.__getitem__)
        in_order = [*range(count), *(count + i for i in by_name)]
        chosen = {*static.positions(count), *(count + i for i, name in enumerate(names) if name in static.argnames)}
        dynamic = [i for i in in_order if i not in chosen]
        self.modules: list[int] = [i for i in dynamic if is_module(values[i])]
        self.contexts: list[int] = [i for i in dynamic if is_context(values[i])]
        self.data: list[int] = [i for i in dynamic if is_data(values[i])]
        self._static = [i for i in in_order if i in chosen]
        self._trees = dynamic if any(type(values[i]) not in data_types for i in self.data) else None
        self.is_plain: bool = not self._static and self._trees is None

    def read(self, values: Sequence[Any]) -> Reading | None:
        """Reads the arguments of a call of this form; returns None if that cannot be done quickly."""
        arguments: tuple[Any, ...] = (self, *[static_key(values[i]) for i in self._static])
        if self._trees is None:
            return Reading(arguments, self, values)
        leaves, treedef = _flatten([values[i] for i in self._trees])
        types = tuple(map(type, leaves))
        positions = cached_positions(types)
        return None if positions is None else Reading((*arguments, treedef, types), positions, leaves)

    def can_repeat(self, values: Sequence[Any], compiled: Sequence[StaticArgument]) -> bool:
        """Whether `read` can distinguish the static arguments of a call from any others.

        Args:
            values: the arguments.
            compiled: the static arguments that the function was compiled with. They are alive as long as it is, so one
                of them can be recognized by its id.
        """
        found = {id(argument.value) for argument in compiled if not argument.watched}
        return all(type(values[i]) in ATOMS or id(values[i]) in found for i in self._static)


def static_key(value: Any) -> Any:
    """Returns what a static argument is recognized by: a number or string by its value, anything else by identity.

    Two values with equal keys are the same static argument if their types are the same, which a form guarantees.
    """
    return value if type(value) in ATOMS else id(value)
