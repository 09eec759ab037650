"""Our Modules as Linen modules. This file imports Flax; `nnx.bridge.to_linen` imports it when it is called."""

from collections.abc import Callable
from typing import Any

import flax.linen as linen
from flax.traverse_util import unflatten_dict

from nnx.core.context import Context, context
from nnx.core.module.dict_sequence import accepts_ctx
from nnx.core.module.module import Module
from nnx.core.state.state import State
from nnx.core.variables.variables import Node, Variable
from nnx.transforms.control.eval_shape import eval_shape

NO_COLLECTION = """{name}: apply was not given the collection {collection!r}, which the Module of NNX needs. Pass all \
variables that init returned."""
NODES = "nodes"


class ToLinen(linen.Module):
    """One of our Modules as a Linen module: its variables are in the collections of their types, at the same paths.

    Attributes:
        build: the function that makes the Module from a Context.
        streams: the streams of random numbers that a call may draw from.
    """

    build: Callable[[Context], Module]
    streams: tuple[str, ...] = ("dropout",)

    @linen.compact
    def __call__(self, *args: Any, run: str = "__call__", flags: Any = None, **kwargs: Any) -> Any:
        """Calls the Module, or its method `run`; `flags` are those of its Context."""
        if self.is_initializing():
            module = self.build(self._context(("params", *self.streams), None))
        else:
            seeds: dict[str, Any] = dict.fromkeys(("params", *self.streams), 0)
            module = eval_shape(lambda: self.build(context(**seeds)))
        state, moduledef = Module.partition(module)
        held = self._variables(state)
        module: Any = moduledef.merge(State({path: _inside(held, leaf, path) for path, leaf in state.items()}))
        function = module if run == "__call__" else getattr(module, run)
        if accepts_ctx(function) and "ctx" not in kwargs:
            kwargs["ctx"] = self._context(self.streams, flags)
        out = function(*args, **kwargs)
        for (collection, name), tree in _trees(Module.get_state(module), boxed=False).items():
            if not self.is_mutable_collection(collection):
                continue
            if (collection, name) not in held:
                self.variable(collection, name, lambda tree=tree: tree)
            elif not self.is_initializing():
                held[collection, name].value = tree
        return out

    def _context(self, streams: tuple[str, ...], flags: Any) -> Context:
        return context(**{name: self.make_rng(name) for name in streams if self.has_rng(name)}, flags=flags)

    def _variables(self, state: State) -> dict[tuple[str, str], Any]:
        """Returns Linen's variables for a State, by collection and name. They are made of it if this is `init`."""
        variables = {}
        for (collection, name), tree in _trees(state, boxed=True).items():
            if not self.is_initializing() and not self.has_variable(collection, name):
                raise ValueError(NO_COLLECTION.format(name=type(self).__name__, collection=collection))
            variables[collection, name] = self.variable(collection, name, lambda tree=tree: tree)
        return variables


def _collection(leaf: Any) -> str:
    return type(leaf).collection if isinstance(leaf, Variable) else NODES


def _trees(state: State, boxed: bool) -> dict[tuple[str, str], Any]:
    """Returns the nested values of a State by collection and first segment of the path."""
    found: dict[str, dict[str, Any]] = {}
    for path, leaf in state.items():
        value = leaf.value if isinstance(leaf, Node) else leaf
        axes = leaf.sharding if isinstance(leaf, Variable) else None
        if boxed and axes is not None:
            value = linen.Partitioned(value, tuple(axes))
        found.setdefault(_collection(leaf), {})[path] = value
    trees = {collection: unflatten_dict(flat, sep="/") for collection, flat in found.items()}
    return {(collection, first): tree for collection, nested in trees.items() for first, tree in nested.items()}


def _inside(held: dict[tuple[str, str], Any], leaf: Any, path: str) -> Any:
    """Returns the value that Linen holds for a leaf of a State."""
    first, *rest = path.split("/")
    value = held[_collection(leaf), first].value
    for segment in rest:
        value = value[segment]
    return value
