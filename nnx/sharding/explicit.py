"""Explicit mesh axes: how the result of a layer is split, given its input and its parameters.

On explicit axes the split of a value is part of its type, and JAX rejects an operation whose result could be split in
two ways: a kernel split over the axis that also splits the batch (FSDP), or two arrays split along the axis that is
summed over (tensor parallelism). Layers know the intention: the result keeps the split of the input's axes, and that of
the parameter's axes wherever the mesh axis is still free. This gathers parameters and adds up partial sums, as the
compiler does by itself on automatic axes, which these functions ignore.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

T = TypeVar("T")


def result_sharding(*parts: tuple[Any, Iterable[int]]) -> NamedSharding | None:
    """Returns how to split a result whose axes are those of its operands, one after another.

    Args:
        parts: the operands, each as an array and those of its axes that the result has. If two axes are split over the
            same mesh axis, the first keeps it.

    Returns:
        A sharding to pass as `out_sharding`; None if nothing is split on explicit axes.
    """
    shardings = [jax.typeof(array).sharding for array, _ in parts]
    split = [sharding for sharding in shardings if any(sharding.spec)]
    if not split:
        return None
    entries: list[Any] = []
    used: set[str] = set()
    for sharding, (_, axes) in zip(shardings, parts, strict=True):
        for axis in axes:
            free = tuple(name for name in _names(sharding.spec[axis]) if name not in used)
            used.update(free)
            entries.append(free or None)
    return NamedSharding(split[0].mesh, PartitionSpec(*entries))


def split_like(x: Array, other: Array, axes: Sequence[int]) -> Array:
    """Returns `x` with its axes split like these axes of `other`, so that the two can be added."""
    sharding = jax.typeof(x).sharding
    if not any(sharding.spec):
        return x
    spec = jax.typeof(other).sharding.spec
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*(spec[axis] for axis in axes))))


def split_first_by(axis: str, split: bool, x: Array) -> Array:
    """Returns `x` with a mesh axis splitting its first axis, or none of them; other mesh axes stay where they are.

    On automatic axes this is left to the compiler.
    """
    sharding = jax.typeof(x).sharding
    types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types))
    if types.get(axis) is not AxisType.Explicit:
        return x
    entries = [tuple(name for name in _names(entry) if name != axis) for entry in sharding.spec]
    if split:
        entries[0] = (axis, *entries[0])
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*(entry or None for entry in entries))))


def split_first_like(x: Array, other: Array) -> Array:
    """Returns `x` with its first axis split like that of `other`, and the others whole."""
    sharding = jax.typeof(other).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1])))


def with_automatic_axes(fn: Callable[..., T], like: T) -> Callable[..., T]:
    """Returns a function that computes as on automatic axes, if `like` is split on explicit ones.

    The result is split like `like`, an array or a tree, whose shapes it must have. This is for what JAX has no rule for
    on explicit axes, such as merging two axes of which one is split, and for functions of libraries that do not choose.
    """
    shardings = jax.tree.map(lambda x: jax.typeof(x).sharding, like)
    if not any(any(sharding.spec) for sharding in jax.tree.leaves(shardings)):
        return fn
    auto_axes: Any = jax.sharding.auto_axes
    return auto_axes(fn, out_sharding=shardings)


def with_other_axes_automatic(fn: Callable[..., tuple[Array, Any]], axis: str, like: Array) -> Callable[..., Any]:
    """Returns a function that computes as on automatic axes, except for one mesh axis.

    Args:
        fn: a function whose first result has the first axis of `like`, and whose others are whole.
        axis: the mesh axis that stays as it is.
        like: an array, whose type has the mesh and the split of its first axis.
    """
    sharding = jax.typeof(like).sharding
    types = zip(sharding.mesh.axis_names, sharding.mesh.axis_types)
    others = tuple(name for name, kind in types if kind is AxisType.Explicit and name != axis)
    if not others:
        return fn
    split, whole = (NamedSharding(sharding.mesh, PartitionSpec(*entries)) for entries in (sharding.spec[:1], ()))
    auto_axes: Any = jax.sharding.auto_axes
    return auto_axes(fn, axes=others, out_sharding=(split, whole))


def heads_like(query: Array, *others: Array) -> tuple[Array, ...]:
    """Returns keys and values that can be paired with the queries, `[..., heads, head_dim]`, on explicit axes.

    If the mesh splits the heads of the queries and cannot split the fewer ones of the keys the same way, each key head
    is repeated for its query heads, and every device keeps those of its own queries.
    """
    split = jax.typeof(query).sharding.spec[-2]
    if split is None:
        return others
    return tuple(other if jax.typeof(other).sharding.spec[-2] == split else _repeated(other, query) for other in others)


def _repeated(x: Array, query: Array) -> Array:
    sharding = jax.typeof(x).sharding
    *outer, _, last = sharding.spec
    heads = query.shape[-2]
    whole = jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*outer, None, last)))
    groups = jnp.broadcast_to(whole[..., :, None, :], (*x.shape[:-1], heads // x.shape[-2], x.shape[-1]))
    repeated = jnp.reshape(groups, (*x.shape[:-2], heads, x.shape[-1]))
    split = jax.typeof(query).sharding
    return jax.sharding.reshard(repeated, NamedSharding(split.mesh, PartitionSpec(*outer, split.spec[-2], last)))


def is_split(tree: Any) -> bool:
    """Whether an array of a tree is split over explicit axes."""
    return any(any(jax.typeof(leaf).sharding.spec) for leaf in jax.tree.leaves(tree))


def with_types(tree: Any, types: Any) -> Any:
    """Returns arrays that are split like those described by `jax.ShapeDtypeStruct`s, as a loop's carry has to be."""

    def split(x: Any, like: Any) -> Any:
        return x if like.sharding is None else jax.sharding.reshard(x, like.sharding)

    return jax.tree.map(split, tree, types)


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
