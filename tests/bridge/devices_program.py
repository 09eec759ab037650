"""A Linen and a Flax model on eight devices: `devices_program.py` exits with an error if one is wrong."""

import flax.linen as linen
import flax.nnx as flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import nnx
from nnx import bridge

RULES = [("embed", "data"), ("mlp", "model")]
X = jax.random.normal(jax.random.key(0), (8, 16))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        init = linen.initializers.lecun_normal()
        x = linen.Dense(32, kernel_init=linen.with_logical_partitioning(init, ("embed", "mlp")), name="up")(x)
        x = linen.BatchNorm(use_running_average=not train, name="norm")(x)
        return linen.Dense(16, kernel_init=linen.with_logical_partitioning(init, ("mlp", "embed")), name="down")(x)


class Flax(flax.Module):
    def __init__(self, rngs: flax.Rngs):
        def init(*axes: str):
            return flax.with_partitioning(flax.initializers.lecun_normal(), axes, eager_sharding=False)

        self.up = flax.Linear(16, 32, kernel_init=init("embed", "mlp"), rngs=rngs)
        self.norm = flax.BatchNorm(32, rngs=rngs)
        self.down = flax.Linear(32, 16, kernel_init=init("mlp", "embed"), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.norm(self.up(x)))


def from_linen(ctx: nnx.Context) -> bridge.Foreign:
    return bridge.from_linen(Linen(), jnp.zeros((8, 16)), ctx=ctx)


def from_flax(ctx: nnx.Context) -> bridge.Foreign:
    return bridge.from_flax(Flax(flax.Rngs(ctx.make_rng("params"))))


@nnx.jit
def step(optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model, x: jnp.mean((model(x) - x) ** 2))(optimizer.model, x)
    optimizer.update(grads)
    return loss


def main() -> None:
    assert jax.device_count() == 8
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for make in (from_linen, from_flax):
        one_device = nnx.Optimizer(make(nnx.context(0)).train(), optax.adam(1e-2))
        expected = [float(step(one_device, X)) for _ in range(3)]

        model = nnx.init_sharded(make, mesh, RULES, nnx.context(0))
        specs = {path: getattr(leaf, "value", leaf).sharding.spec for path, leaf in model.filter(nnx.Param).items()}
        assert specs["up/kernel"] == P("data", "model") and specs["down/kernel"] == P("model", "data"), specs
        optimizer = nnx.Optimizer(model.train(), optax.adam(1e-2))
        rows = jax.device_put(X, jax.NamedSharding(mesh, P("data")))
        with jax.set_mesh(mesh):
            losses = [float(step(optimizer, rows)) for _ in range(3)]
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
        assert losses[-1] < losses[0]
        assert model["up"]["kernel"].sharding.spec == P("data", "model")
        assert np.abs(model["norm"]["mean"]).max() > 0
    print("two models on eight devices")


if __name__ == "__main__":
    main()
