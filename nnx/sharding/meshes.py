"""Meshes: which mesh the program is under at this point.

It is that of `jax.set_mesh`. Without one, it is that of a `with mesh:` block, the older form, which JAX has deprecated;
this is the order of `jax.lax.with_sharding_constraint`. Such a block leaves the types of arrays alone, so its axes are
automatic, whatever type `jax.make_mesh` gave them.
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
