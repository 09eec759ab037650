"""How a mesh splits the arrays of attention: its batch axes and its heads, while texts and features are whole.

A kernel that XLA cannot partition runs inside of a `shard_map`, which has to be told. On explicit axes the types of the
arrays say how they are split, and elsewhere the rules for the names "batch", "length" and "heads" do.
"""

from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from nnx.core.trace import is_tracer
from nnx.sharding.meshes import current_mesh
from nnx.sharding.rules import current_rules, resolve


def names_of_heads(ndim: int) -> tuple[Any, ...]:
    """Returns the axis names of queries, keys and values with so many axes."""
    batch_axes = ndim - 3
    return (*["batch"][:batch_axes], *[None] * (batch_axes - 1), "length", "heads", None)


def splits_of_heads(query: Any, key: Any) -> PartitionSpec | None:
    """Returns how queries, keys and values are split; an empty spec for not at all.

    None if this is not known, or if texts or features are split, or query and key heads differently.
    """
    mesh = current_mesh()
    if mesh is None:
        return None
    if mesh.size == 1 or all(kind is AxisType.Manual for kind in mesh.axis_types):
        return PartitionSpec()
    if any(kind is AxisType.Manual for kind in mesh.axis_types):
        return None
    if AxisType.Explicit in mesh.axis_types:
        specs = [tuple(jax.typeof(array).sharding.spec) for array in (query, key) if is_tracer(array)]
    else:
        rules = current_rules()
        if not rules:
            return None
        resolutions = [resolve(names_of_heads(array.ndim), rules, array.shape, mesh.shape) for array in (query, key)]
        if any(resolution.errors for resolution in resolutions):
            return None
        specs = [tuple(resolution.spec) for resolution in resolutions]
    full = [(*spec, *[None] * (len(query.shape) - len(spec))) for spec in specs]
    if len(full) != 2 or full[0] != full[1] or full[0][-3] is not None or full[0][-1] is not None:
        return None
    return PartitionSpec(*full[0])


def is_whole(spec: PartitionSpec) -> bool:
    """Whether a spec splits nothing."""
    return not any(spec)
