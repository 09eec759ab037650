"""The model that several questions share: blocks of a kernel, a bias and a counter, written in each library's style.

`raw` is the same model as nested dicts, `{"blocks": {"000": {"kernel": …, "bias": …, "counter": …}}}`.
"""

from typing import Any

import equinox as eqx
import flax.nnx
import jax
import jax.numpy as jnp

import nnx

WIDTH = 4
Raw = dict[str, Any]


def block_values(i: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    kernel = jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) / WIDTH
    return kernel, jnp.full((WIDTH,), 0.1), jnp.zeros((), jnp.int32)


class Counter(nnx.Variable):
    """The number of times a block ran."""


class Block(nnx.Module):
    def __init__(self, i: int):
        kernel, bias, counter = block_values(i)
        self.kernel = nnx.Param(kernel)
        self.bias = nnx.Param(bias)
        self.counter = Counter(counter)


class Blocks(nnx.Module):
    def __init__(self, n: int):
        self.blocks = [Block(i) for i in range(n)]


class FlaxCounter(flax.nnx.Variable):
    """The number of times a block ran."""


class FlaxBlock(flax.nnx.Module):
    def __init__(self, i: int):
        kernel, bias, counter = block_values(i)
        self.kernel = flax.nnx.Param(kernel)
        self.bias = flax.nnx.Param(bias)
        self.counter = FlaxCounter(counter)


class FlaxBlocks(flax.nnx.Module):
    def __init__(self, n: int):
        self.blocks = flax.nnx.List([FlaxBlock(i) for i in range(n)])


class EquinoxBlock(eqx.Module):
    kernel: jax.Array
    bias: jax.Array
    counter: jax.Array


class EquinoxBlocks(eqx.Module):
    blocks: list[EquinoxBlock]


def equinox_blocks(n: int) -> EquinoxBlocks:
    return EquinoxBlocks([EquinoxBlock(*block_values(i)) for i in range(n)])


def raw_blocks(n: int) -> Raw:
    names = ("kernel", "bias", "counter")
    return {"blocks": {f"{i:03}": dict(zip(names, block_values(i))) for i in range(n)}}
