"""The models of `benchmarks.cold_start` by hand: dicts of arrays, and functions of them."""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.cold.batches import (
    CLASSES,
    FEATURES,
    GROUPS,
    HEADS,
    HIDDEN,
    INPUTS,
    LAYERS,
    LENGTH,
    STAGES,
    STEM,
    VOCABULARY,
    WIDTHS,
)

Params = Any
Keys = Iterator[jax.Array]


def make_keys() -> Keys:
    return (jax.random.fold_in(jax.random.key(0), i) for i in itertools.count())


# Layers


def make_dense(keys: Keys, *shape: int) -> Params:
    kernel = jax.random.normal(next(keys), shape) / math.sqrt(math.prod(shape[:-1]))
    return {"kernel": kernel, "bias": jnp.zeros(shape[-1])}


def make_norm(size: int) -> Params:
    return {"scale": jnp.ones(size), "bias": jnp.zeros(size)}


def dense(params: Params, x: jax.Array) -> jax.Array:
    return x @ params["kernel"] + params["bias"]


def conv(params: Params, x: jax.Array, stride: int = 1) -> jax.Array:
    dimensions = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(x, params["kernel"], (stride, stride), "SAME", dimension_numbers=dimensions)
    return x + params["bias"]


def centered(x: jax.Array, axes: int | tuple[int, ...]) -> jax.Array:
    return (x - x.mean(axes, keepdims=True)) * jax.lax.rsqrt(x.var(axes, keepdims=True) + 1e-6)


def norm(params: Params, x: jax.Array) -> jax.Array:
    return centered(x, -1) * params["scale"] + params["bias"]


def group_norm(params: Params, x: jax.Array) -> jax.Array:
    groups = x.reshape(*x.shape[:-1], GROUPS, -1)
    return centered(groups, (1, 2, 4)).reshape(x.shape) * params["scale"] + params["bias"]


# Models


def make_mlp(keys: Keys) -> Params:
    return [make_dense(keys, din, dout) for din, dout in zip(WIDTHS, WIDTHS[1:])]


def mlp(params: Params, x: jax.Array) -> jax.Array:
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(dense(layer, x))
    return dense(last, x)


def make_residual(keys: Keys, din: int, dout: int) -> Params:
    return {
        "conv1": make_dense(keys, 3, 3, din, dout),
        "norm1": make_norm(dout),
        "conv2": make_dense(keys, 3, 3, dout, dout),
        "norm2": make_norm(dout),
        "shortcut": make_dense(keys, 1, 1, din, dout),
    }


def make_cnn(keys: Keys) -> Params:
    return {
        "stem": make_dense(keys, 3, 3, 3, STEM),
        "stages": [make_residual(keys, din, dout) for din, dout in zip((STEM, *STAGES), STAGES)],
        "head": make_dense(keys, STAGES[-1], CLASSES),
    }


def cnn(params: Params, x: jax.Array) -> jax.Array:
    x = jax.nn.relu(conv(params["stem"], x))
    for stage in params["stages"]:
        h = jax.nn.relu(group_norm(stage["norm1"], conv(stage["conv1"], x, 2)))
        x = jax.nn.relu(group_norm(stage["norm2"], conv(stage["conv2"], h)) + conv(stage["shortcut"], x, 2))
    return dense(params["head"], x.mean(axis=(1, 2)))


def make_block(keys: Keys) -> Params:
    return {
        "norm1": make_norm(FEATURES),
        "qkv": make_dense(keys, FEATURES, 3 * FEATURES),
        "out": make_dense(keys, FEATURES, FEATURES),
        "norm2": make_norm(FEATURES),
        "up": make_dense(keys, FEATURES, 4 * FEATURES),
        "down": make_dense(keys, 4 * FEATURES, FEATURES),
    }


def make_transformer(keys: Keys) -> Params:
    return {
        "embed": jax.random.normal(next(keys), (VOCABULARY, FEATURES)),
        "positions": jax.random.normal(next(keys), (LENGTH, FEATURES)),
        "blocks": [make_block(keys) for _ in range(LAYERS)],
        "norm": make_norm(FEATURES),
        "head": make_dense(keys, FEATURES, VOCABULARY),
    }


def transformer(params: Params, tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens] + params["positions"]
    for block in params["blocks"]:
        qkv = dense(block["qkv"], norm(block["norm1"], x))
        query, key, value = jnp.split(qkv.reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
        h = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + dense(block["out"], h.reshape(x.shape))
        x = x + dense(block["down"], jax.nn.gelu(dense(block["up"], norm(block["norm2"], x))))
    return dense(params["head"], norm(params["norm"], x))


def make_lstm(keys: Keys) -> Params:
    return {
        "input": make_dense(keys, INPUTS, 4 * HIDDEN),
        "recurrent": make_dense(keys, HIDDEN, 4 * HIDDEN),
        "head": make_dense(keys, HIDDEN, CLASSES),
    }


def lstm(params: Params, x: jax.Array) -> jax.Array:
    def step(carry: Any, x: jax.Array) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(dense(params["input"], x) + dense(params["recurrent"], h), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    zeros = jnp.zeros((len(x), HIDDEN))
    (h, _), _ = jax.lax.scan(step, (zeros, zeros), x.swapaxes(0, 1))
    return dense(params["head"], h)


MODELS = {
    "mlp": lambda: (mlp, make_mlp(make_keys())),
    "cnn": lambda: (cnn, make_cnn(make_keys())),
    "transformer": lambda: (transformer, make_transformer(make_keys())),
    "lstm": lambda: (lstm, make_lstm(make_keys())),
}

tx = optax.adam(1e-3)


@functools.partial(jax.jit, static_argnums=0)
def train_step(forward: Any, params: Params, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
    def loss_fn(params: Params) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(forward(params, x), y).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


def first_loss(model: Any, x: jax.Array, y: jax.Array) -> float:
    forward, params = model
    _, _, loss = train_step(forward, params, tx.init(params), x, y)
    return float(loss)
