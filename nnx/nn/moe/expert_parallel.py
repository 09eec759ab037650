"""Expert parallelism: each device of a mesh axis holds some experts, and rows travel to the device of theirs.

This runs inside `shard_map`. Every device sorts its rows by *destination*. In one *round* it sends up to `capacity` of
them to each destination (`all_to_all`), applies its experts to what it received, and sends the results back. If some
device has more rows for one destination, all devices go through further rounds until none is left. The buffers have
the size of one round, so no row is ever dropped, and memory does not have to be planned for the worst distribution.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from nnx.sharding.explicit import split_first_by, split_first_like, with_other_axes_automatic
from nnx.sharding.meshes import current_mesh


class Destinations(NamedTuple):
    """The rows of a device, sorted by destination.

    Attributes:
        order: int32 `[rows]`, the numbers of the rows, sorted.
        first: int32 `[devices]`, where the rows of each destination begin in `order`.
        counts: int32 `[devices]`, their numbers.
    """

    order: jax.Array
    first: jax.Array
    counts: jax.Array


def manual_axis(axis: str | None) -> tuple[int, bool]:
    """Returns the size of an axis of the current mesh (1 if there is none), and whether we are inside its shard_map."""
    mesh = current_mesh()
    if axis is None or mesh is None or axis not in mesh.axis_names:
        return 1, False
    kind = mesh.axis_types[mesh.axis_names.index(axis)]
    return mesh.shape[axis], kind == AxisType.Manual


def on_each_device(
    body: Callable[..., tuple[jax.Array, Any]], axis: str, arguments: tuple[Any, ...], split: tuple[bool, ...]
) -> tuple[jax.Array, Any]:
    """Runs a function on every device of a mesh axis, with its part of the arguments.

    Args:
        body: a function whose first result is that of the device's rows, and whose others are the same on all devices.
        axis: the name of the mesh axis.
        arguments: the arguments, of which the first has the rows.
        split: for each argument, whether the mesh axis splits the first axis of its arrays; else they are whole.
    """
    specs = tuple(P(axis) if is_split else P() for is_split in split)

    def mapped(*arguments: Any) -> tuple[jax.Array, Any]:
        options: dict[str, Any] = {"in_specs": specs, "out_specs": (P(axis), P()), "axis_names": {axis}}
        return jax.shard_map(body, mesh=current_mesh(), **options)(*arguments)

    # On explicit axes the types of the arrays have to agree, and rules can have split them in any way.
    placed = [
        jax.tree.map(functools.partial(split_first_by, axis, is_split), argument)
        for argument, is_split in zip(arguments, split, strict=True)
    ]
    out, others = with_other_axes_automatic(mapped, axis, placed[0])(*placed)
    return split_first_like(out, arguments[0]), others


def exchange(
    run: Callable[[jax.Array, jax.Array], jax.Array],
    rows: jax.Array,
    experts: jax.Array,
    experts_per_device: int,
    axis: str,
    capacity_factor: float,
) -> jax.Array:
    """Applies to each row its expert, wherever that is.

    Args:
        run: a function that applies the experts of this device to rows: `run(rows, experts)`, where the numbers of the
            experts begin at 0, and rows with a number past the last are ignored.
        rows: the rows of this device, `[rows, features]`.
        experts: int32 `[rows]`, the expert of each row, among those of all devices.
        experts_per_device: the number of experts on each device.
        axis: the name of the mesh axis.
        capacity_factor: the size of a round relative to an even distribution.

    Returns:
        The outputs, `[rows, features]`.
    """
    size, num_rows = lax.axis_size(axis), rows.shape[0]
    capacity = min(num_rows, math.ceil(capacity_factor * num_rows / size))
    destination = experts // experts_per_device
    counts = jnp.zeros(size, jnp.int32).at[destination].add(1)
    sorted_rows = Destinations(jnp.argsort(destination), jnp.cumsum(counts) - counts, counts)

    def one_round(number: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Returns the numbers of the rows of one round, and their outputs."""
        chosen = _rows_of_round(sorted_rows, number * capacity, capacity)  # [devices, capacity]
        sent = rows.at[chosen].get(mode="fill", fill_value=0, unique_indices=True)
        numbers = experts.at[chosen].get(mode="fill", fill_value=-1) % experts_per_device
        numbers = jnp.where(chosen < num_rows, numbers, experts_per_device)  # an empty place has no expert
        received = lax.all_to_all(sent, axis, 0, 0)
        out = run(received.reshape(-1, rows.shape[1]), lax.all_to_all(numbers, axis, 0, 0).reshape(-1))
        returned = lax.all_to_all(out.reshape(size, capacity, -1), axis, 0, 0)
        return chosen.reshape(-1), returned.reshape(size * capacity, -1)

    chosen, returned = one_round(0)
    out = _placed(jnp.zeros((num_rows, returned.shape[1]), returned.dtype), chosen, returned)
    rounds = math.ceil(num_rows / capacity)
    if rounds == 1:
        return out
    most = lax.pmax(jnp.max(counts), axis)  # the same on all devices, so all take the same branch

    # Recomputed in the backward pass: keeping what every possible round needs would take the memory of the worst case.
    @jax.checkpoint
    def further(out: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        return lax.cond(
            number * capacity < most, lambda out: _placed(out, *one_round(number)), lambda out: out, out
        ), None

    return lax.scan(further, out, jnp.arange(1, rounds))[0]


def _placed(out: jax.Array, chosen: jax.Array, values: jax.Array) -> jax.Array:
    return out.at[chosen].set(values, mode="drop", unique_indices=True)


def _rows_of_round(rows: Destinations, start: jax.Array | int, capacity: int) -> jax.Array:
    """Returns the rows to send, `[devices, capacity]`; a place without a row has a number past the last, each its own.

    Args:
        rows: the rows by destination.
        start: the number of rows that went to each destination in earlier rounds.
        capacity: the size of a round.
    """
    num_rows, devices = rows.order.shape[0], rows.counts.shape[0]
    within = start + jnp.arange(capacity, dtype=jnp.int32)
    at = jnp.minimum(rows.first[:, None] + within, num_rows - 1)
    beyond = num_rows + jnp.arange(devices * capacity, dtype=jnp.int32).reshape(devices, capacity)
    return jnp.where(within < rows.counts[:, None], rows.order[at], beyond)
