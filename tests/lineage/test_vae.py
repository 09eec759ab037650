"""The VAE of the earlier versions: annotations with the class of the model, and a loss captured as a Variable."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import nnx

SIZE = 16


class Loss(nnx.Variable):
    pass


class Encoder(nnx.Module):
    def __init__(self, din: int, dmid: int, dout: int, *, ctx: nnx.Context):
        self.linear1 = nnx.Linear(din, dmid, ctx=ctx)
        self.linear_mean = nnx.Linear(dmid, dout, ctx=ctx)
        self.linear_std = nnx.Linear(dmid, dout, ctx=ctx)

    def __call__(self, x: jax.Array, *, ctx: nnx.Context) -> jax.Array:
        x = nnx.relu(self.linear1(x))
        mean, std = self.linear_mean(x), jnp.exp(self.linear_std(x))
        self.kl_loss = Loss(jnp.mean(0.5 * jnp.mean(-jnp.log(std**2) - 1.0 + std**2 + mean**2, axis=-1)))
        return mean + std * jax.random.normal(ctx.make_rng("noise"), mean.shape)


class Decoder(nnx.Module):
    def __init__(self, din: int, dmid: int, dout: int, *, ctx: nnx.Context):
        self.linear1 = nnx.Linear(din, dmid, ctx=ctx)
        self.linear2 = nnx.Linear(dmid, dout, ctx=ctx)

    def __call__(self, z: jax.Array) -> jax.Array:
        return self.linear2(nnx.relu(self.linear1(z)))


class VAE(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.encoder = Encoder(SIZE, 16, 2, ctx=ctx)
        self.decoder = Decoder(2, 16, SIZE, ctx=ctx)

    def __call__(self, x: jax.Array, *, ctx: nnx.Context) -> jax.Array:
        return self.decoder(self.encoder(x, ctx=ctx))

    def generate(self, z: jax.Array) -> jax.Array:
        return nnx.sigmoid(self.decoder(z))


@jax.jit
def train_step(state: nnx.TrainState[VAE], x: jax.Array, key: jax.Array) -> tuple[nnx.TrainState[VAE], jax.Array]:
    def loss_fn(params: nnx.State) -> jax.Array:
        logits, (updates, _) = state.apply(params)(x, ctx=nnx.context(noise=key))
        losses = updates.filter(Loss)
        assert list(losses) == ["encoder/kl_loss"]
        reconstruction = jnp.mean(optax.sigmoid_binary_cross_entropy(logits, x))
        return reconstruction + 0.01 * sum(jax.tree.leaves(losses))

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def sample(state: nnx.TrainState[VAE], z: jax.Array) -> jax.Array:
    return state.apply("params").generate(z)[0]


def test_the_loss_of_a_vae_falls():
    pattern = jax.random.bernoulli(jax.random.PRNGKey(0), 0.5, (2, SIZE))
    x = jnp.repeat(pattern, 8, axis=0).astype(jnp.float32)
    params, moduledef = VAE(ctx=nnx.context(jax.random.PRNGKey(0))).partition(nnx.Param)
    state: Any = nnx.TrainState(moduledef, params=params, tx=optax.adam(0.03))
    losses = []
    for step in range(40):
        state, loss = train_step(state, x, jax.random.PRNGKey(step))
        losses.append(loss)
    assert losses[-1] < 0.4 * losses[0]
    assert sample(state, jnp.zeros((3, 2))).shape == (3, SIZE)
