"""Arguments of a step, as a plan needs them: abstract copies that are placed on a mesh.

Modules keep their identity among each other: an optimizer and its model that are both arguments are one model in the
copies, too. What belongs to no Module, State or TrainState is data, the *batch*: its first axis is split as the rules
say for "batch", unless it is a `jax.ShapeDtypeStruct` that has a sharding.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnx.core.context import Context
from nnx.core.module.dict_sequence import Sequence
from nnx.core.module.module import Module
from nnx.core.sizes import size_in_bytes
from nnx.core.state.pure import Pure
from nnx.core.state.state import State
from nnx.core.variables.variables import Container, Param
from nnx.sharding.placement import put_array, shard
from nnx.sharding.rules import MemoryRule, Rules, logical_to_mesh_axes
from nnx.sharding.specs import map_named
from nnx.training.optimizer_state import OptState
from nnx.training.train_state import TrainState

BATCH_IS_WHOLE = "{path}: the first axis, {size}, cannot be split over {parts} devices, so each has all of it"
NO_HOST_MEMORY = """nnx.on_host: JAX knows no host memory of GPUs that are not here, so these arrays count as memory \
of the device"""
KINDS = ("parameters", "optimizer state", "other state", "batch")

_NAMED = (Module, State, TrainState, Pure)


class Arguments(NamedTuple):
    """The arguments of a call.

    Attributes:
        args: the positional arguments.
        kwargs: the keyword arguments.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def map(self, function: Callable[[Any], Any]) -> "Arguments":
        """Returns the arguments with a function applied to each Module, State and TrainState, and other leaf."""
        return Arguments(*jax.tree.map(function, (self.args, self.kwargs), is_leaf=_is_leaf))

    def leaves(self) -> list[tuple[str, Any]]:
        """Returns the Modules, States, TrainStates and other leaves, with their paths."""
        found = jax.tree_util.tree_leaves_with_path((self.args, self.kwargs), is_leaf=_is_leaf)
        return [(jax.tree_util.keystr(path[1:]), leaf) for path, leaf in found]


def abstract(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Returns copies of arguments whose Modules have no values, and whose arrays are `jax.ShapeDtypeStruct`s."""
    given = Arguments(args, kwargs)
    leaves, tree = jax.tree.flatten(tuple(given), is_leaf=_is_leaf)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Module)]
    together = Sequence([leaves[i] for i in at]).partition()  # in one Module, what they share stays shared
    for i, copy in zip(at, jax.tree.map(_abstract, together).merge(), strict=True):
        leaves[i] = copy
    return Arguments(*tree.unflatten([leaf if isinstance(leaf, Module) else _abstract(leaf) for leaf in leaves]))


def place(arguments: Arguments, mesh: Mesh, rules: Rules) -> tuple[Arguments, tuple[str, ...]]:
    """Places abstract arguments on a mesh, Modules in place; returns them, and what deserves a look.

    Modules that are on this mesh already stay as they were split.
    """
    notes: list[str] = []
    paths = iter([path for path, _ in arguments.leaves()])

    def placed(leaf: Any) -> Any:
        path = next(paths)
        if isinstance(leaf, _NAMED):
            return leaf if _is_placed(leaf, mesh) else shard(leaf, mesh, rules)
        return _put_batch(path, leaf, mesh, rules, notes) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = arguments.map(placed)
    if any(isinstance(rule, MemoryRule) for rule in rules) and not mesh.devices.flat[0].addressable_memories():
        notes.append(NO_HOST_MEMORY)
    notes += [str(warning.message).partition("\n")[0] for warning in caught]
    return result, tuple(notes)


def parts(arguments: Arguments) -> tuple[dict[str, int], int]:
    """Returns the bytes on one device by kind, and the bytes in the memory of the host for one device."""
    sizes: dict[str, int] = dict.fromkeys(KINDS, 0)
    host = 0

    def add(path: str, names: Any, leaf: Any, container: Any) -> None:
        nonlocal host
        size = bytes_on_one(leaf)
        if getattr(leaf.sharding, "memory_kind", None) == "pinned_host":
            host += size
        else:
            sizes[_kind(path, container)] += size

    leaves = {id(leaf): leaf for _, leaf in arguments.leaves()}
    for inside in [module for leaf in leaves.values() for module in _inside(leaf)]:
        leaves.pop(id(inside), None)  # it is counted as a part of what it is in
    for leaf in leaves.values():
        if isinstance(leaf, _NAMED):
            map_named(add, leaf)
        elif isinstance(leaf, jax.ShapeDtypeStruct):
            sizes["batch"] += bytes_on_one(leaf)
    return sizes, host


def bytes_on_one(leaf: Any) -> int:
    """Returns the bytes of an abstract array on one device of its mesh."""
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return math.prod(shape) * 8
    return size_in_bytes(shape, leaf.dtype)


def _is_placed(tree: Any, mesh: Mesh) -> bool:
    """Whether somebody has placed the arrays of a Module or pytree on this very mesh."""
    state = Module.get_state(tree) if isinstance(tree, Module) else tree
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state)]
    return any(isinstance(sharding, NamedSharding) and sharding.mesh == mesh for sharding in shardings)


def _inside(leaf: Any) -> list[Any]:
    return [module for module in leaf.modules() if module is not leaf] if isinstance(leaf, Module) else []


def _kind(path: str, container: Any) -> str:
    if isinstance(container, OptState) or "opt_state" in path.split("/"):
        return "optimizer state"
    return "parameters" if isinstance(container, Param) else "other state"


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (*_NAMED, Container, Context)) or value is None


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, (State, TrainState, Pure, Container)):
        return jax.tree.map(_abstract, leaf)
    if isinstance(leaf, (jax.Array, np.ndarray)):
        sharding = getattr(leaf, "sharding", None)
        kept = sharding if isinstance(sharding, NamedSharding) else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=kept)
    return leaf


def _put_batch(path: str, leaf: Any, mesh: Mesh, rules: Rules, notes: list[str]) -> Any:
    if isinstance(leaf.sharding, NamedSharding) and set(leaf.sharding.mesh.axis_names) == set(mesh.axis_names):
        return put_array(leaf, NamedSharding(mesh, leaf.sharding.spec))
    spec = PartitionSpec()
    if leaf.ndim:
        (axes, *_) = logical_to_mesh_axes(("batch", *[None] * (leaf.ndim - 1)), rules)
        names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
        size = math.prod(mesh.shape.get(name, 1) for name in names)
        if names and leaf.shape[0] % size == 0 and all(name in mesh.shape for name in names):
            spec = PartitionSpec(axes)
        elif size > 1:
            notes.append(BATCH_IS_WHOLE.format(path=path, size=leaf.shape[0], parts=size))
    return put_array(leaf, NamedSharding(mesh, spec))
