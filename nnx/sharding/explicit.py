"""Explicit mesh axes: how what a layer computes from its input and its parameters is split.

On explicit axes the split of a value is part of its type, and JAX refuses an operation whose result could be split in
two ways: a kernel split over the axis that also splits the batch (FSDP), or two arrays split along the axis that is
summed over (tensor parallelism). Layers know what is meant: the result keeps the split of the input's axes, and that of
the parameter's wherever the mesh axis is still free. Parameters are gathered for that, and partial sums added up, as
the compiler does it on automatic axes, of which nothing is said here.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec


def result_sharding(*parts: tuple[Any, Iterable[int]]) -> NamedSharding | None:
    """How a result is split whose axes are those of its operands, one after another.

    Args:
      parts: each an array and the axes of it that the result has. Of two that are split over one mesh axis, the first
        keeps it.

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
    """`x`, each of its axes split as the one of `other` in `axes` is, so that the two can be added."""
    sharding = jax.typeof(x).sharding
    if not any(sharding.spec):
        return x
    spec = jax.typeof(other).sharding.spec
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*(spec[axis] for axis in axes))))


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
