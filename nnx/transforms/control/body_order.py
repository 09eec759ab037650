"""Order in bodies that run many times, or never: what a body leaves has the order that it had before.

A loop carries its Modules from step to step, and branches must all return the same structure, so the order of
attributes and of dict items cannot depend on the step or the branch. Order alone is never a reason to refuse a body:
nobody who deletes an attribute and sets it again has order in mind. So existing attributes keep their places, and new
ones come in the order in which the first body made them. The same goes for the dicts in static values, as far as Python
takes them for equal: the order of an `OrderedDict` is a part of its value.
"""

from collections import deque
from operator import call
from typing import Any

import jax

from nnx.core.module.info import arrange, info_of, values_of
from nnx.core.module.kinds import is_cell, is_static
from nnx.core.statics.contents import content_of, put_in_order
from nnx.core.structure.walk import number_modules
from nnx.core.trace import same_level
from nnx.core.variables.refs import Ref
from nnx.core.variables.trees import KeyOrder, in_order, key_order, leaf_types
from nnx.transforms.engine.call import is_module
from nnx.transforms.engine.enter import Entered


class BodyOrder:
    """The order in which the Modules of one call were first seen."""

    def __init__(self) -> None:
        self.names: dict[int, list[str]] = {}  # the attributes, by the number of their Module
        self.keys: dict[tuple[int, str], KeyOrder | None] = {}  # the items of the dicts in an attribute
        self.static_keys: dict[tuple[Any, ...], list[Any]] = {}  # likewise in a static one, by the place of each dict

    def keep(self, entered: Entered, out: Any = None) -> None:
        """Puts everything in the order in which it was first seen, and notes the order of what was not seen before.

        Args:
            entered: the Modules of a body.
            out: what the body returned, perhaps with new Modules in it.
        """
        rebuilt: dict[int, tuple[Any, Any]] = {}  # by id: a value, and what takes its place
        returned = [leaf for leaf in jax.tree.leaves(out) if is_module(leaf)]
        # The numbers that `leave` finds for them as well.
        for number, module in enumerate(number_modules([*entered.graph.modules, *returned]).modules):
            if same_level(info_of(module).level):  # otherwise it comes from outside, and `leave` refuses it
                self._keep_names(number, module)
                self._keep_keys(number, module, rebuilt)
                self._keep_static_keys(number, module)

    def _keep_names(self, number: int, module: Any) -> None:
        info, held = info_of(module), module.__dict__
        known = self.names.setdefault(number, [])
        known += [name for name in info.kinds if name not in known]
        names = [name for name in known if name in info.kinds]
        if names != [*info.kinds]:
            steps = [*arrange(info.kinds, names), *arrange(held, [name for name in names if name in held])]
            deque(map(call, steps), maxlen=0)
            info.changed()

    def _keep_keys(self, number: int, module: Any, rebuilt: dict[int, tuple[Any, Any]]) -> None:
        for name, kind in info_of(module).kinds.items():
            value = module.__dict__.get(name)
            if leaf_types.get(type(value)) or not (type(kind) is Ref or is_cell(kind)):
                continue
            order = self.keys.setdefault((number, name), key_order(value, complete=True))
            _, found = rebuilt.setdefault(id(value), (value, in_order(value, order)))  # a tree in two cells stays one
            if found is not value:
                for values, place in kind.targets() if type(kind) is Ref else [(module.__dict__, name)]:
                    values[place] = found

    def _keep_static_keys(self, number: int, module: Any) -> None:
        values, seen = values_of(module), set()
        stack = [((number, name), values[name]) for name, kind in info_of(module).kinds.items() if is_static(kind)]
        while stack:
            place, value = stack.pop()
            content = None if id(value) in seen else content_of(type(value))
            if content is not None:
                seen.add(id(value))
                for i, held in enumerate(content.unordered(value)):
                    put_in_order(held, self.static_keys.setdefault((*place, i), [*dict.keys(held)]))
                stack += [((*place, i), part) for i, part in enumerate(content.parts(value))]
