"""How long do tracing and compiling take with user-defined Modules?

Traces the gradient of 48 transformer blocks, compared with the same function over dicts, and compiles a scanned stack,
which must not take longer with more layers. Times are in seconds of processor time.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import nnx
from benchmarks.harness import OURS, Contender, Row, Settings, interleave, ratio_row
from benchmarks.transformer import Block, Stack, causal_mask, inputs, raw_block_params, raw_loss, raw_params

DEPTHS = (4, 16, 64)


def measure(settings: Settings) -> Iterator[Row]:
    contenders = {OURS: trace_ours(lambda: Stack(raw_params())), "dicts": trace_raw()}
    timings = interleave(contenders, seconds=settings.seconds(40), clock=time.process_time)
    yield ratio_row("trace the gradient of 48 blocks, own Modules", timings, "dicts", 1.05)

    compiling = {f"{n} layers": _compile_scanned(n) for n in DEPTHS}
    depths = interleave(compiling, seconds=settings.seconds(150), clock=time.process_time, compared=len(DEPTHS))
    shortest = min(depths.items(), key=lambda item: item[1].best)
    longest = max(depths.items(), key=lambda item: item[1].best)
    timings = {OURS: longest[1], **depths}
    yield ratio_row("compile a scanned stack, slowest depth", timings, shortest[0], 1.1, goal="≤ 1.1 × fastest depth")


def trace_ours(make: Callable[[], Any]) -> Contender:
    """Traces the gradient of `mean(model(x) ** 2)`, as a new function each time, so that no cache applies."""
    model, x = make(), inputs()

    def run() -> None:
        def loss(model: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(model(x) ** 2)

        nnx.jit(lambda model, x: nnx.grad(loss)(model, x)).trace(model, x)

    return run


def trace_raw() -> Contender:
    params, x = raw_params(), inputs()

    def run() -> None:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            return raw_loss(params, x)

        jax.jit(lambda params, x: jax.grad(loss)(params, x)).trace(params, x)

    return run


class _Step(nnx.Module):
    """One scanned step: a block with its input as the carry."""

    def __init__(self, *, ctx: nnx.Context):
        self.block = Block(raw_block_params(ctx.make_rng("params")))

    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return self.block(x, causal_mask()), None


def _compile_scanned(layers: int) -> Contender:
    make = nnx.Scan(_Step, variable_axes={nnx.Param: 0}, split_rngs="params", length=layers)
    model, x = make(ctx=nnx.context(0)), inputs()

    def run() -> None:
        def step(model: Any, x: jax.Array) -> nnx.State:
            return nnx.grad(lambda model, x: jnp.mean(model(x, None)[0] ** 2))(model, x)

        nnx.jit(step).lower(model, x).compile()

    return run
