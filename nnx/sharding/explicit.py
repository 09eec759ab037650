"""Explicit mesh axes: how the result of a layer is split, given its input and its parameters.

On explicit axes the split of a value is part of its type, and JAX rejects an operation whose result could be split in
two ways: a kernel split over the axis that also splits the batch (FSDP), or two arrays split along the axis that is
summed over (tensor parallelism). Layers know the intention: the result keeps the split of the input's axes, and that of
the parameter's axes wherever the mesh axis is still free. This gathers parameters and adds up partial sums, as the
compiler does by itself on automatic axes, which these functions ignore.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec


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


def with_automatic_axes(fn: Callable[..., Array], like: Array) -> Callable[..., Array]:
    """Returns a function that computes as on automatic axes, if `like` is split on explicit ones.

    The result is split like `like`, whose shape it must have. This is for rearrangements that JAX has no rule for on
    explicit axes, such as merging two axes of which one is split.
    """
    sharding = jax.typeof(like).sharding
    auto_axes: Any = jax.sharding.auto_axes
    return auto_axes(fn, out_sharding=sharding) if any(sharding.spec) else fn


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
