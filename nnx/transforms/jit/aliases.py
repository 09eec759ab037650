"""Two values of one call that share a buffer: found by comparing pointers, separated by copying."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from nnx.transforms.jit.interrupts import uninterrupted


def with_copies(given: Any, places: Sequence[int]) -> Any:
    """Returns the donated values, with copies at these positions."""
    if not places:
        return given
    copied = list(given)
    # JAX sets its current trace aside during an operation. An interrupt at the wrong moment keeps it from taking it up
    # again: nothing works after that.
    copies = uninterrupted(jax.tree.map, _copy, [given[i] for i in places])
    for i, copy in zip(places, copies, strict=True):
        copied[i] = copy
    return type(given)(copied)


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, jax.Array) else value


def aliases(given: Sequence[Any], others: Any) -> list[int]:
    """Returns which of the donated values have a buffer that also appears elsewhere in the call."""
    seen = {buffer for leaf in jax.tree.leaves(others) for buffer in _buffers(leaf)}
    found = []
    for i, value in enumerate(given):
        for leaf in jax.tree.leaves(value):
            buffers = _buffers(leaf)
            if not seen.isdisjoint(buffers):
                found.append(i)
            seen.update(buffers)
    return found


def _buffers(value: Any) -> list[Any]:
    """Returns a key per buffer behind a value, device and address; none for anything but an array."""
    if not isinstance(value, jax.Array):
        return []
    if isinstance(value, Tracer) or value.is_deleted() or is_key(value):
        return [id(value)]
    if len(value.sharding.device_set) == 1:
        return [(*value.sharding.device_set, value.unsafe_buffer_pointer())]
    return [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in value.addressable_shards]


def is_key(value: Any) -> bool:
    """Whether a value is an array of typed random keys."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended)
