"""A small Module and a check, shared by the tests of derivatives."""

import jax
import jax.numpy as jnp

import nnx


class Count(nnx.Variable):
    pass


class Affine(nnx.Module):
    def __init__(self, seed=0):
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(seed), (2, 2)), ("din", "dout"))
        self.bias = nnx.Param(jnp.array([0.5, -0.5]))
        self.mean = nnx.BatchStat(jnp.ones(2))
        self.count = Count(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.count += 1
        return jnp.tanh(x @ self.kernel + self.bias) * self.mean


def assert_no_tracers(model):
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(model.get_state()))
