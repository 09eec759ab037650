"""What do the built-in layers cost to build and to trace? Uses a stack of 48 transformer blocks made of them.

Building is measured warm, against flax. Tracing the gradient is measured in seconds of processor time, against the same
function over dicts.
"""

import time
from collections.abc import Iterator
from typing import Any

import flax.nnx
import jax
import jax.numpy as jnp

import nnx
from benchmarks.harness import OURS, Contender, Row, Settings, interleave, ratio_row
from benchmarks.trace_time import trace_ours, trace_raw
from benchmarks.transformer import FEATURES, HEADS, HIDDEN, LAYERS, causal_mask, inputs


class Block(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.norm1 = nnx.LayerNorm(FEATURES, ctx=ctx)
        self.attention = nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, ctx=ctx)
        self.norm2 = nnx.LayerNorm(FEATURES, ctx=ctx)
        self.up = nnx.Linear(FEATURES, HIDDEN, ctx=ctx)
        self.down = nnx.Linear(HIDDEN, FEATURES, ctx=ctx)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Stack(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.blocks = [Block(ctx=ctx) for _ in range(LAYERS)]

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = causal_mask()
        for block in self.blocks:
            x = block(x, mask)
        return x


class FlaxBlock(flax.nnx.Module):
    def __init__(self, *, rngs: flax.nnx.Rngs):
        self.norm1 = flax.nnx.LayerNorm(FEATURES, rngs=rngs)
        self.attention = flax.nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=rngs)
        self.norm2 = flax.nnx.LayerNorm(FEATURES, rngs=rngs)
        self.up = flax.nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.down = flax.nnx.Linear(HIDDEN, FEATURES, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(flax.nnx.gelu(self.up(self.norm2(x))))


class FlaxStack(flax.nnx.Module):
    def __init__(self, *, rngs: flax.nnx.Rngs):
        self.blocks = flax.nnx.List([FlaxBlock(rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = causal_mask()
        for block in self.blocks:
            x = block(x, mask)
        return x


def measure(settings: Settings) -> Iterator[Row]:
    building = {OURS: lambda: Stack(ctx=nnx.context(0)), "flax": lambda: FlaxStack(rngs=flax.nnx.Rngs(0))}
    timings = interleave(building, seconds=settings.seconds(15))
    yield ratio_row("build 48 blocks of built-in layers, warm", timings, "flax", 0.5)

    tracing = {OURS: trace_ours(lambda: Stack(ctx=nnx.context(0))), "dicts": trace_raw(), "flax": _trace_flax()}
    timings = interleave(tracing, seconds=settings.seconds(40), clock=time.process_time)
    yield ratio_row("trace the gradient of 48 blocks, built-in layers", timings, "dicts", 1.2)


def _trace_flax() -> Contender:
    model, x = FlaxStack(rngs=flax.nnx.Rngs(0)), inputs()
    graphdef, state = flax.nnx.split(model)

    def run() -> None:
        def loss(model: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(model(x) ** 2)

        def gradient(state: Any, x: jax.Array) -> Any:
            return flax.nnx.grad(loss)(flax.nnx.merge(graphdef, state), x)

        jax.jit(gradient).trace(state, x)

    return run
