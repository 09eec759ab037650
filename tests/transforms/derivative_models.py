"""A small Module, shared by the tests of derivatives."""

import jax
import jax.numpy as jnp

import nnx
from tests.models import Count


class Affine(nnx.Module):
    def __init__(self, seed=0):
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(seed), (2, 2)), ("din", "dout"))
        self.bias = nnx.Param(jnp.array([0.5, -0.5]))
        self.mean = nnx.BatchStat(jnp.ones(2))
        self.count = Count(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.count += 1
        return jnp.tanh(x @ self.kernel + self.bias) * self.mean
