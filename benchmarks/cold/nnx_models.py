"""The models of `benchmarks.cold_start` in NNX."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import nnx
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
    def __init__(self, *, ctx: nnx.Context):
        self.layers = [nnx.Linear(din, dout, ctx=ctx) for din, dout in zip(WIDTHS, WIDTHS[1:])]

    def __call__(self, x: jax.Array) -> jax.Array:
        *hidden, last = self.layers
        for layer in hidden:
            x = nnx.relu(layer(x))
        return last(x)


class Residual(nnx.Module):
    def __init__(self, din: int, dout: int, *, ctx: nnx.Context):
        self.conv1 = nnx.Conv(din, dout, (3, 3), strides=2, ctx=ctx)
        self.norm1 = nnx.GroupNorm(dout, num_groups=GROUPS, ctx=ctx)
        self.conv2 = nnx.Conv(dout, dout, (3, 3), ctx=ctx)
        self.norm2 = nnx.GroupNorm(dout, num_groups=GROUPS, ctx=ctx)
        self.shortcut = nnx.Conv(din, dout, (1, 1), strides=2, ctx=ctx)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class CNN(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        widths = (STEM, *STAGES)
        self.stem = nnx.Conv(3, STEM, (3, 3), ctx=ctx)
        self.stages = [Residual(din, dout, ctx=ctx) for din, dout in zip(widths, STAGES)]
        self.head = nnx.Linear(STAGES[-1], CLASSES, ctx=ctx)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem(x))
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean(axis=(1, 2)))


class Block(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.norm1 = nnx.LayerNorm(FEATURES, ctx=ctx)
        self.attention = nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, ctx=ctx)
        self.norm2 = nnx.LayerNorm(FEATURES, ctx=ctx)
        self.up = nnx.Linear(FEATURES, 4 * FEATURES, ctx=ctx)
        self.down = nnx.Linear(4 * FEATURES, FEATURES, ctx=ctx)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.embed = nnx.Embed(VOCABULARY, FEATURES, ctx=ctx)
        self.positions = nnx.Embed(LENGTH, FEATURES, ctx=ctx)
        self.blocks = [Block(ctx=ctx) for _ in range(LAYERS)]
        self.norm = nnx.LayerNorm(FEATURES, ctx=ctx)
        self.head = nnx.Linear(FEATURES, VOCABULARY, ctx=ctx)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        mask = jnp.tri(LENGTH, dtype=bool)[None, None]
        x = self.embed(tokens) + self.positions(jnp.arange(LENGTH))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class LSTM(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(INPUTS, HIDDEN, ctx=ctx))
        self.head = nnx.Linear(HIDDEN, CLASSES, ctx=ctx)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.rnn(x)[:, -1])


MODELS = {
    "mlp": lambda: MLP(ctx=nnx.context(0)),
    "cnn": lambda: CNN(ctx=nnx.context(0)),
    "transformer": lambda: Transformer(ctx=nnx.context(0)),
    "lstm": lambda: LSTM(ctx=nnx.context(0)),
}


@nnx.jit
def train_step(optimizer: nnx.Optimizer[Any], x: jax.Array, y: jax.Array) -> jax.Array:
    def loss_fn(model: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model)
    optimizer.update(grads)
    return loss


def first_loss(model: Any, x: jax.Array, y: jax.Array) -> float:
    return float(train_step(nnx.Optimizer(model, optax.adam(1e-3)), x, y))
