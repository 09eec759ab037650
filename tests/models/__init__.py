"""The small Modules that tests share, so that a test file defines only what is special about its subject."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import nnx


class Count(nnx.Variable):
    pass


class Box(nnx.Module):
    """Holds the attributes it is given."""

    def __init__(self, **attributes: Any):
        for name, value in attributes.items():
            setattr(self, name, value)


class Scale(nnx.Module):
    """One parameter, and a call that uses it."""

    def __init__(self, s: float = 1.0):
        self.s = nnx.Param(jnp.asarray(s))

    def __call__(self, x):
        return x * self.s


class Linear(nnx.Module):
    """Two parameters with axis names, a variable that every call changes, and a static value."""

    def __init__(self, din: int = 2, dout: int = 3, *, ctx: nnx.Context):
        self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (din, dout)), ("din", "dout"))
        self.bias = nnx.Param(jnp.zeros((dout,)))
        self.count = Count(jnp.zeros((), jnp.int32))
        self.mode = "train"

    def __call__(self, x, *, ctx: nnx.Context | None = None):
        self.count += 1
        if ctx is not None:
            x = x + jax.random.normal(ctx.make_rng("noise"), x.shape)
        return x @ self.kernel + self.bias

    def shifted(self, x, by):
        self.count += 10
        return self(x) + by


class Net(nnx.Module):
    """Two layers and a mutable static value."""

    def __init__(
        self, din: int = 2, hidden: int = 2, dout: int = 3, *, layer: Callable[..., Any] = Linear, ctx: nnx.Context
    ):
        self.encoder = layer(din, hidden, ctx=ctx)
        self.decoder = layer(hidden, dout, ctx=ctx)
        self.tags = ["a"]

    def __call__(self, x):
        return self.decoder(jnp.tanh(self.encoder(x)))


def linear(seed: int = 0, din: int = 2, dout: int = 3) -> Linear:
    return Linear(din, dout, ctx=nnx.context(seed))


def net(seed: int = 0, **options: Any) -> Net:
    return Net(**options, ctx=nnx.context(seed))


class Block(nnx.Module):
    """A parameter, a statistic and a mutable static value."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(2), ("in",))
        self.stat = nnx.BatchStat(jnp.zeros(2))
        self.sizes = [1]


class Tree(nnx.Module):
    """Submodules in every place: an attribute, a dict, a list. And a bare array."""

    def __init__(self):
        self.enc = Block()
        self.heads = {"a": Block()}
        self.seq = [Block()]
        self.table = jnp.arange(2.0)
