"""Saves a sharded model with eight devices and loads it on four: `sharded_run.py DIRECTORY`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx
from nnx.storage.checkpoints import saving

SHAPES = {"big": (16, 8), "wide": (8, 16), "bias": (16,)}


class Arrays(nnx.Module):
    def __init__(self, value: float):
        for i, (name, shape) in enumerate(SHAPES.items()):
            setattr(self, name, nnx.Param(value * (jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape) + i)))
        self.half = nnx.Param(jnp.full((8, 8), value, jnp.bfloat16))
        self.scale = nnx.Param(jnp.array(value))


def make(value: float):
    model = Arrays(value)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2))
    return {"model": model, "optimizer": optimizer, "ctx": nnx.context(int(value), noise=3)}


def place(things, mesh, axis_of):
    """Puts each array, concrete or abstract, on the mesh: sharded along one axis where that is possible."""

    def sharding(shape):
        axis = axis_of(shape)
        names = [None] * len(shape)
        if shape and shape[axis] % mesh.size == 0:
            names[axis] = "data"
        return NamedSharding(mesh, P(*names))

    def move(leaf):
        value = leaf.value
        if isinstance(value, jax.ShapeDtypeStruct):
            return leaf.replace(value=jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding(value.shape)))
        return leaf.replace(value=jax.device_put(value, sharding(value.shape)))

    for name in ("model", "optimizer"):
        module = things[name]
        module.update_state(module.get_state().map(lambda path, leaf: move(leaf)))


def expected():
    things = make(2.0)
    things["optimizer"].update(jax.tree.map(jnp.ones_like, things["model"].filter(nnx.Param)))
    return things


def save(directory: str, devices: int) -> None:
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    things = expected()
    place(things, mesh, lambda shape: 0)
    assert len(things["model"].big.sharding.device_set) == devices
    assert things["model"].big.addressable_shards[0].data.shape == (16 // devices, 8)
    saving.LARGE = 32  # bytes: arrays with files of their own, and packed ones
    nnx.save(directory, things)


def load(directory: str, devices: int) -> None:
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    abstract = nnx.eval_shape(lambda: make(0.0)["optimizer"])
    target = {"model": abstract.model, "optimizer": abstract, "ctx": nnx.context(0, noise=0)}
    place(target, mesh, lambda shape: len(shape) - 1)  # another layout than that of the files
    loaded, wanted = nnx.load(directory, target), expected()
    for name in ("model", "optimizer"):
        for path, leaf in loaded[name].get_state().items():
            other = wanted[name].get_state()[path]
            assert leaf.value.dtype == other.value.dtype, path
            assert np.array_equal(np.asarray(leaf.value), np.asarray(other.value)), path  # not a program for each
            assert type(leaf) is type(other), path
    kernel = loaded["model"].big
    assert kernel.sharding == NamedSharding(mesh, P(None, "data"))
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(16, 8 // devices)}
    assert len(loaded["optimizer"].opt_state["0"]["mu"]["big"].sharding.device_set) == devices
    keys = [jax.random.key_data(things["ctx"].make_rng("noise")) for things in (loaded, wanted)]
    assert (keys[0] == keys[1]).all()


if __name__ == "__main__":
    save(sys.argv[1], 8)
    load(sys.argv[1], 4)
