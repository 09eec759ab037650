"""The Modules that the tests of `nnx.jit` share."""

import typing

import jax.numpy as jnp

import nnx
from tests.models import Count


class Counter(nnx.Module):
    def __init__(self, start=0):
        self.count = Count(jnp.asarray(start))

    @nnx.jit
    def bump(self, by):
        self.count += by
        return self.count

    @nnx.jit(static_argnums=1)
    def repeat(self, times):
        for _ in range(times):
            self.count += 1

    @nnx.jit
    def __call__(self, x, *, scale=1):
        self.count += 1
        return x * scale


class Pair(nnx.Module):
    def __init__(self, left=1, right=2):
        self.left = Counter(left)
        self.right = Counter(right)
        self.mode = "train"


class Batch(typing.NamedTuple):
    model: typing.Any
    x: typing.Any


def increment(model):
    model.count += 1
