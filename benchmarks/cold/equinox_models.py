"""The models of `benchmarks.cold_start` in Equinox: each takes one example, and channels come first."""

from typing import Any

import equinox as eqx
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

Key = jax.Array


class MLP(eqx.Module):
    layers: list[eqx.nn.Linear]

    def __init__(self, key: Key):
        keys = jax.random.split(key, len(WIDTHS) - 1)
        self.layers = [eqx.nn.Linear(din, dout, key=key) for din, dout, key in zip(WIDTHS, WIDTHS[1:], keys)]

    def __call__(self, x: jax.Array) -> jax.Array:
        *hidden, last = self.layers
        for layer in hidden:
            x = jax.nn.relu(layer(x))
        return last(x)


class Residual(eqx.Module):
    conv1: eqx.nn.Conv2d
    norm1: eqx.nn.GroupNorm
    conv2: eqx.nn.Conv2d
    norm2: eqx.nn.GroupNorm
    shortcut: eqx.nn.Conv2d

    def __init__(self, din: int, dout: int, key: Key):
        key1, key2, key3 = jax.random.split(key, 3)
        self.conv1 = eqx.nn.Conv2d(din, dout, 3, stride=2, padding=1, key=key1)
        self.norm1 = eqx.nn.GroupNorm(GROUPS, dout)
        self.conv2 = eqx.nn.Conv2d(dout, dout, 3, padding=1, key=key2)
        self.norm2 = eqx.nn.GroupNorm(GROUPS, dout)
        self.shortcut = eqx.nn.Conv2d(din, dout, 1, stride=2, key=key3)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jax.nn.relu(self.norm1(self.conv1(x)))
        return jax.nn.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class CNN(eqx.Module):
    stem: eqx.nn.Conv2d
    stages: list[Residual]
    head: eqx.nn.Linear

    def __init__(self, key: Key):
        stem, head, *keys = jax.random.split(key, 2 + len(STAGES))
        self.stem = eqx.nn.Conv2d(3, STEM, 3, padding=1, key=stem)
        self.stages = [Residual(din, dout, key) for din, dout, key in zip((STEM, *STAGES), STAGES, keys)]
        self.head = eqx.nn.Linear(STAGES[-1], CLASSES, key=head)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.stem(x.transpose(2, 0, 1)))
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean(axis=(1, 2)))


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: Key):
        attention, up, down = jax.random.split(key, 3)
        self.norm1 = eqx.nn.LayerNorm(FEATURES)
        self.attention = eqx.nn.MultiheadAttention(
            HEADS,
            FEATURES,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            key=attention,
        )
        self.norm2 = eqx.nn.LayerNorm(FEATURES)
        self.up = eqx.nn.Linear(FEATURES, 4 * FEATURES, key=up)
        self.down = eqx.nn.Linear(4 * FEATURES, FEATURES, key=down)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        h = jax.vmap(self.norm1)(x)
        x = x + self.attention(h, h, h, mask)
        h = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm2)(x)))
        return x + jax.vmap(self.down)(h)


class Transformer(eqx.Module):
    embed: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key: Key):
        embed, positions, head, *keys = jax.random.split(key, 3 + LAYERS)
        self.embed = eqx.nn.Embedding(VOCABULARY, FEATURES, key=embed)
        self.positions = eqx.nn.Embedding(LENGTH, FEATURES, key=positions)
        self.blocks = [Block(key) for key in keys]
        self.norm = eqx.nn.LayerNorm(FEATURES)
        self.head = eqx.nn.Linear(FEATURES, VOCABULARY, key=head)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        mask = jnp.tri(LENGTH, dtype=bool)
        x = jax.vmap(self.embed)(tokens) + jax.vmap(self.positions)(jnp.arange(LENGTH))
        for block in self.blocks:
            x = block(x, mask)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


class LSTM(eqx.Module):
    cell: eqx.nn.LSTMCell
    head: eqx.nn.Linear

    def __init__(self, key: Key):
        cell, head = jax.random.split(key)
        self.cell = eqx.nn.LSTMCell(INPUTS, HIDDEN, key=cell)
        self.head = eqx.nn.Linear(HIDDEN, CLASSES, key=head)

    def __call__(self, x: jax.Array) -> jax.Array:
        state = jnp.zeros(HIDDEN), jnp.zeros(HIDDEN)
        (h, _), _ = jax.lax.scan(lambda state, x: (self.cell(x, state), None), state, x)
        return self.head(h)


MODELS = {
    "mlp": lambda: MLP(jax.random.key(0)),
    "cnn": lambda: CNN(jax.random.key(0)),
    "transformer": lambda: Transformer(jax.random.key(0)),
    "lstm": lambda: LSTM(jax.random.key(0)),
}

tx = optax.adam(1e-3)


@eqx.filter_jit
def train_step(model: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
    def loss_fn(model: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()

    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    updates, opt_state = tx.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, loss


def first_loss(model: Any, x: jax.Array, y: jax.Array) -> float:
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    _, _, loss = train_step(model, opt_state, x, y)
    return float(loss)
