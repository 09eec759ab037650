"""Devices that are not here, for which programs can only be compiled: those of `jax.experimental.topologies`."""

import jax
from jax.sharding import Mesh

NOT_HERE = """{caller}: the devices of this mesh ({kind}) are not here, so they can hold no arrays. Programs can be \
compiled for them, from an abstract model:
    model = nnx.shard(nnx.eval_shape(lambda: Model(..., ctx=nnx.context(0))), mesh, rules)
    compiled = nnx.jit(step).lower(model, ...).compile()"""


def is_here(mesh: Mesh) -> bool:
    """Whether the devices of a mesh can hold arrays."""
    device = mesh.devices.flat[0]
    try:
        return device in jax.devices(device.platform)
    except RuntimeError:  # there is no such backend
        return False


def check_is_here(caller: str, mesh: Mesh) -> None:
    """Raises `ValueError` if the devices of a mesh can hold no arrays."""
    if not mesh.empty and not is_here(mesh):
        raise ValueError(NOT_HERE.format(caller=caller, kind=mesh.devices.flat[0].device_kind))
