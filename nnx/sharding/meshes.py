"""Meshes: which mesh is current at this point of the program.

It is the one of `jax.set_mesh`, or else the one of a `with mesh:` block, the older form that JAX has deprecated;
`jax.lax.with_sharding_constraint` looks in the same order. Such a block does not change the types of arrays, so its
axes are automatic, even if `jax.make_mesh` made them explicit.
"""

from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from nnx.core.trace import block_mesh
from nnx.sharding.rules import AnyMesh


def current_mesh(mesh: AnyMesh | None = None) -> Any:
    """Returns the mesh that names of mesh axes refer to, with the axis types it has at this point of the program.

    Args:
        mesh: the mesh that was given; by default the one the program is under.

    Returns:
        The mesh; None if there is none. That of `jax.set_mesh` is abstract: see `mesh_with_devices`.
    """
    around = jax.sharding.get_abstract_mesh()
    if mesh is None:
        return _of_block() if around.empty else around
    # Inside a shard_map only the mesh of the surroundings knows which axes are manual.
    return around if not around.empty and dict(around.shape) == dict(mesh.shape) else mesh


def mesh_with_devices() -> Mesh | None:
    """Returns the mesh the program is under, with its devices; None if there is none.

    Raises:
        ValueError: something is being traced. JAX hides the devices of `jax.set_mesh` there.
    """
    mesh = jax.sharding.get_mesh()
    return _of_block() if mesh.empty else mesh


def _of_block() -> Mesh | None:
    mesh = block_mesh()
    if mesh is None:
        return None
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
