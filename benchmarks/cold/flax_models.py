"""The models of `benchmarks.cold_start` in Flax NNX."""

from typing import Any

import flax.nnx as nnx
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


class MLP(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(din, dout, rngs=rngs) for din, dout in zip(WIDTHS, WIDTHS[1:])])

    def __call__(self, x: jax.Array) -> jax.Array:
        *hidden, last = self.layers
        for layer in hidden:
            x = nnx.relu(layer(x))
        return last(x)


class Residual(nnx.Module):
    def __init__(self, din: int, dout: int, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(din, dout, (3, 3), strides=2, rngs=rngs)
        self.norm1 = nnx.GroupNorm(dout, num_groups=GROUPS, rngs=rngs)
        self.conv2 = nnx.Conv(dout, dout, (3, 3), rngs=rngs)
        self.norm2 = nnx.GroupNorm(dout, num_groups=GROUPS, rngs=rngs)
        self.shortcut = nnx.Conv(din, dout, (1, 1), strides=2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class CNN(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        widths = (STEM, *STAGES)
        self.stem = nnx.Conv(3, STEM, (3, 3), rngs=rngs)
        self.stages = nnx.List([Residual(din, dout, rngs=rngs) for din, dout in zip(widths, STAGES)])
        self.head = nnx.Linear(STAGES[-1], CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem(x))
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean(axis=(1, 2)))


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.up = nnx.Linear(FEATURES, 4 * FEATURES, rngs=rngs)
        self.down = nnx.Linear(4 * FEATURES, FEATURES, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, FEATURES, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, FEATURES, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.head = nnx.Linear(FEATURES, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        mask = jnp.tri(LENGTH, dtype=bool)[None, None]
        x = self.embed(tokens) + self.positions(jnp.arange(LENGTH))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class LSTM(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(INPUTS, HIDDEN, rngs=rngs))
        self.head = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        outputs: Any = self.rnn(x)
        return self.head(outputs[:, -1])


MODELS = {
    "mlp": lambda: MLP(rngs=nnx.Rngs(0)),
    "cnn": lambda: CNN(rngs=nnx.Rngs(0)),
    "transformer": lambda: Transformer(rngs=nnx.Rngs(0)),
    "lstm": lambda: LSTM(rngs=nnx.Rngs(0)),
}


@nnx.jit
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    def loss_fn(model: nnx.Module) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def first_loss(model: nnx.Module, x: jax.Array, y: jax.Array) -> float:
    return float(train_step(model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), x, y))
