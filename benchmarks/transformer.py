"""The transformer that the tracing questions share: pre-norm blocks, over dicts and as user-defined Modules.

Both are written the way a careful user would write them, line by line the same, so any difference in time comes from
the library.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import nnx

LAYERS, FEATURES, HEADS, HIDDEN = 48, 64, 4, 256
BATCH, LENGTH = 2, 16
Raw = dict[str, Any]


def inputs() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (BATCH, LENGTH, FEATURES))


def causal_mask() -> jax.Array:
    return jnp.tri(LENGTH, dtype=bool)[None, None]  # (1, 1, T, T)


def shapes() -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Returns the layer, parameter name and shape of everything in one block."""
    for norm in ("norm1", "norm2"):
        yield norm, "scale", (FEATURES,)
        yield norm, "bias", (FEATURES,)
    for projection in ("query", "key", "value"):
        yield projection, "kernel", (FEATURES, HEADS, FEATURES // HEADS)
        yield projection, "bias", (HEADS, FEATURES // HEADS)
    yield "out", "kernel", (HEADS, FEATURES // HEADS, FEATURES)
    yield "out", "bias", (FEATURES,)
    yield "up", "kernel", (FEATURES, HIDDEN)
    yield "up", "bias", (HIDDEN,)
    yield "down", "kernel", (HIDDEN, FEATURES)
    yield "down", "bias", (FEATURES,)


def initial(layer: str, name: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    if name == "kernel":
        return 0.05 * jax.random.normal(key, shape)
    return jnp.ones(shape) if name == "scale" else jnp.zeros(shape)


# Over dicts.


def raw_block_params(key: jax.Array) -> Raw:
    params: Raw = {}
    for i, (layer, name, shape) in enumerate(shapes()):
        params.setdefault(layer, {})[name] = initial(layer, name, shape, jax.random.fold_in(key, i))
    return params


def raw_params(layers: int = LAYERS) -> list[Raw]:
    return [raw_block_params(jax.random.key(i)) for i in range(layers)]


def raw_norm(params: Raw, x: jax.Array) -> jax.Array:
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.maximum(0.0, jnp.mean(jax.lax.square(x), -1, keepdims=True) - jax.lax.square(mean))
    return (x - mean) * (jax.lax.rsqrt(variance + 1e-6) * params["scale"]) + params["bias"]


def raw_dense(params: Raw, x: jax.Array, axes: int = 1) -> jax.Array:
    contracted = tuple(range(x.ndim - axes, x.ndim)), tuple(range(axes))
    return jax.lax.dot_general(x, params["kernel"], (contracted, ((), ()))) + params["bias"]


def raw_block(params: Raw, x: jax.Array, mask: jax.Array) -> jax.Array:
    h = raw_norm(params["norm1"], x)
    query, key, value = (raw_dense(params[name], h) for name in ("query", "key", "value"))  # (B, T, H, D)
    attended = jax.nn.dot_product_attention(query, key, value, mask=mask)
    x = x + raw_dense(params["out"], attended, axes=2)
    h = jax.nn.gelu(raw_dense(params["up"], raw_norm(params["norm2"], x)))
    return x + raw_dense(params["down"], h)


def raw_loss(params: list[Raw], x: jax.Array) -> jax.Array:
    mask = causal_mask()
    for block in params:
        x = raw_block(block, x, mask)
    return jnp.mean(x**2)


# As user-defined Modules.


class Norm(nnx.Module):
    def __init__(self, params: Raw):
        self.scale = nnx.Param(params["scale"])
        self.bias = nnx.Param(params["bias"])

    def __call__(self, x: jax.Array) -> jax.Array:
        mean = jnp.mean(x, -1, keepdims=True)
        variance = jnp.maximum(0.0, jnp.mean(jax.lax.square(x), -1, keepdims=True) - jax.lax.square(mean))
        return (x - mean) * (jax.lax.rsqrt(variance + 1e-6) * self.scale) + self.bias


class Dense(nnx.Module):
    def __init__(self, params: Raw, axes: int = 1):
        self.kernel = nnx.Param(params["kernel"])
        self.bias = nnx.Param(params["bias"])
        self.axes = axes

    def __call__(self, x: jax.Array) -> jax.Array:
        contracted = tuple(range(x.ndim - self.axes, x.ndim)), tuple(range(self.axes))
        return jax.lax.dot_general(x, self.kernel, (contracted, ((), ()))) + self.bias


class Block(nnx.Module):
    def __init__(self, params: Raw):
        self.norm1, self.norm2 = Norm(params["norm1"]), Norm(params["norm2"])
        self.query, self.key, self.value = (Dense(params[name]) for name in ("query", "key", "value"))
        self.out = Dense(params["out"], axes=2)
        self.up, self.down = Dense(params["up"]), Dense(params["down"])

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        h = self.norm1(x)
        query, key, value = self.query(h), self.key(h), self.value(h)  # (B, T, H, D)
        attended = jax.nn.dot_product_attention(query, key, value, mask=mask)
        x = x + self.out(attended)
        h = jax.nn.gelu(self.up(self.norm2(x)))
        return x + self.down(h)


class Stack(nnx.Module):
    def __init__(self, params: list[Raw]):
        self.blocks = [Block(block) for block in params]

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = causal_mask()
        for block in self.blocks:
            x = block(x, mask)
        return x
