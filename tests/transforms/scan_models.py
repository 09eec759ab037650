"""The layers that the tests of `nnx.scan` and `nnx.Scan` share."""

import jax
import jax.numpy as jnp

import nnx
from tests.models import Count


class Block(nnx.Module):
    """A layer with a Param (stacked), a counter and a bare array (carried or broadcast)."""

    def __init__(self, features=3, *, ctx):
        self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (features, features)), ("din", "dout"))
        self.bias = nnx.Param(jnp.zeros((features,)))
        self.count = Count(jnp.zeros((), jnp.int32))
        self.node = jnp.ones((2,))

    def __call__(self, x, _=None):
        self.count += 1
        x = jnp.tanh(x @ self.kernel + self.bias)
        return x, x.sum()

    def shifted(self, x, shift, scale=1.0):
        return x @ self.kernel * scale + shift, shift

    def noisy(self, x, _, *, ctx):
        noise = jax.random.uniform(ctx.make_rng("noise"), ())
        return x + noise, noise

    def noisy_and_shared(self, x, _, *, ctx):
        return x, (jax.random.uniform(ctx.make_rng("noise")), jax.random.uniform(ctx.make_rng("shared")))


LENGTH = 4
X = jnp.array([[0.1, -0.2, 0.3]])
STACKED = {"variable_axes": {nnx.Param: 0}, "split_rngs": "params", "length": LENGTH}


def stack(seed=0, **options):
    return nnx.Scan(Block, **(STACKED | options))(3, ctx=nnx.context(seed))


def layers(seed=0):
    return stack(seed).scan_module


def unrolled(m, x, axis=0, order=range(LENGTH)):
    """What scanning over the stacked block `m` should give, one layer at a time."""
    ys = [0.0] * LENGTH
    for i in order:
        x = jnp.tanh(x @ jnp.take(m.kernel, i, axis=axis) + jnp.take(m.bias, i, axis=0))
        ys[i] = x.sum()
    return x, jnp.stack(ys)
