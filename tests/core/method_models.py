"""A Module of several levels, shared by the tests of a Module's methods."""

import jax.numpy as jnp

import nnx
from tests.models import Count


class Linear(nnx.Module):
    def __init__(self, din=2, dout=3, *, ctx=None):
        self.w = nnx.Param(jnp.ones((din, dout)), ("in", "out"))
        self.b = nnx.Param(jnp.zeros((dout,)))
        self.count = Count(0)
        self.dout = dout

    def __call__(self, x):
        self.count += 1
        return x @ self.w + self.b

    def halve(self, x):
        self.b = self.b / 2
        return x / 2


class Encoder(nnx.Module):
    def __init__(self):
        self.layers = [Linear(2, 2), Linear(2, 2)]
        self.mean = nnx.BatchStat(jnp.zeros(2))
        self.table = jnp.arange(3.0)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        self.mean = self.mean + 1
        return x


class Model(nnx.Module):
    def __init__(self):
        self.enc = Encoder()
        self.heads = {"a": Linear(2, 1), "b": Linear(2, 1)}
        self.name = "model"

    def __call__(self, x):
        return self.heads["a"](self.enc(x))


PATHS = [
    "enc/layers/0/b",
    "enc/layers/0/count",
    "enc/layers/0/w",
    "enc/layers/1/b",
    "enc/layers/1/count",
    "enc/layers/1/w",
    "enc/mean",
    "enc/table",
    "heads/a/b",
    "heads/a/count",
    "heads/a/w",
    "heads/b/b",
    "heads/b/count",
    "heads/b/w",
]
PARAM_PATHS = [p for p in PATHS if p.endswith(("/b", "/w"))]
COUNT_PATHS = [p for p in PATHS if p.endswith("/count")]
