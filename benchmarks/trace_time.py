"""How long do tracing and compiling take with user-defined Modules?

Traces the gradient of 48 transformer blocks, compared with the same function over dicts; an Adam step over 64 blocks
with `remat` around each, compared with `jax.checkpoint` over dicts; and a donated step, compared with the same step
without donation. Compiles a scanned stack, which must not take longer with more layers. Times are in seconds of
processor time.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import nnx
from benchmarks.harness import OURS, Contender, Row, Settings, interleave, ratio_row
from benchmarks.transformer import (
    Block,
    Raw,
    Stack,
    causal_mask,
    inputs,
    raw_block,
    raw_block_params,
    raw_loss,
    raw_params,
)

DEPTHS = (4, 16, 64)
REMAT_LAYERS = 64


def measure(settings: Settings) -> Iterator[Row]:
    contenders = {OURS: trace_ours(lambda: Stack(raw_params())), "dicts": trace_raw()}
    timings = interleave(contenders, seconds=settings.seconds(80), clock=time.process_time)
    yield ratio_row("trace the gradient of 48 blocks, own Modules", timings, "dicts", 1.05)

    contenders = {OURS: _trace_remat(), "dicts": _trace_raw_remat()}
    timings = interleave(contenders, seconds=settings.seconds(40), clock=time.process_time)
    yield ratio_row(f"trace an Adam step, {REMAT_LAYERS} unrolled remat blocks", timings, "dicts", 1.15)

    contenders = {OURS: _trace_step(donate_argnums=0), "not donated": _trace_step()}
    timings = interleave(contenders, seconds=settings.seconds(40), clock=time.process_time)
    yield ratio_row("trace a donated step of 48 blocks", timings, "not donated", 1.1)

    compiling = {f"{n} layers": _compile_scanned(n) for n in DEPTHS}
    depths = interleave(compiling, seconds=settings.seconds(90), clock=time.process_time, compared=len(DEPTHS))
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


class _RematStack(nnx.Module):
    def __init__(self, params: list[Raw]):
        self.blocks = [Block(block) for block in params]

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = causal_mask()
        for block in self.blocks:
            x = nnx.remat(block)(x, mask)
        return x


def _trace_remat() -> Contender:
    model, x = _RematStack(raw_params(REMAT_LAYERS)), inputs()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3))

    def run() -> None:
        def step(optimizer: Any, x: jax.Array) -> None:
            optimizer.update(nnx.grad(lambda model: jnp.mean(model(x) ** 2))(optimizer.model))

        nnx.jit(step).trace(optimizer, x)

    return run


def _trace_raw_remat() -> Contender:
    params, x, adam = raw_params(REMAT_LAYERS), inputs(), optax.adam(1e-3)
    opt_state = adam.init(params)

    def run() -> None:
        def block(
            params: Raw, x: jax.Array, mask: jax.Array
        ) -> jax.Array:  # new each time: JAX caches traces by function
            return raw_block(params, x, mask)

        def loss(params: list[Raw], x: jax.Array) -> jax.Array:
            mask = causal_mask()
            for layer in params:
                x = jax.checkpoint(block)(layer, x, mask)
            return jnp.mean(x**2)

        def step(params: list[Raw], opt_state: Any, x: jax.Array) -> Any:
            updates, opt_state = adam.update(jax.grad(loss)(params, x), opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        jax.jit(step).trace(params, opt_state, x)

    return run


def _trace_step(**options: Any) -> Contender:
    """Traces a step of gradient descent, as a new function each time."""
    model, x = Stack(raw_params()), inputs()

    def run() -> None:
        def step(model: Any, x: jax.Array) -> None:
            grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
            model.update_state(jax.tree.map(lambda w, g: w - 0.1 * g, model.filter(nnx.Param), grads))

        nnx.jit(step, **options).trace(model, x)

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
