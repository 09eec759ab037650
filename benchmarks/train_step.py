"""What does a lifted step cost, compared with the same step written by hand with raw `jax.jit` over nested dicts?

The step runs every block and changes its kernel and its counter. There are two hand-written versions: one whose dicts
are split so that only what changes is returned, and one in which the biases change too, so that everything is returned.
More cases follow: donated steps, a step with two Modules, keyword arguments and a Context, and a Module made between
calls.

The computation is deliberately tiny, so that what remains is the library's overhead.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import flax.nnx
import jax
import jax.numpy as jnp

import nnx
from benchmarks.blocks import (
    WIDTH,
    Blocks,
    EquinoxBlock,
    EquinoxBlocks,
    FlaxBlocks,
    Raw,
    equinox_blocks,
    raw_blocks,
)
from benchmarks.harness import OURS, Contender, Row, Settings, interleave, ratio_row

GOALS = {3: 1.15, 30: 1.05, 300: 1.05}  # Variables: limit
DONATED_GOALS = {3: 1.40, 30: 1.12, 300: 1.08}
RATE = 1e-3
PAIRS = 5  # of models with and without a config


def measure(settings: Settings) -> Iterator[Row]:
    for variables, limit in GOALS.items():
        for everything in (False, True):
            timings = interleave(_steps(variables // 3, everything), seconds=settings.seconds(15))
            changed = "every Variable changes" if everything else "kernels and counters change"
            yield ratio_row(f"step over {variables} Variables, {changed}", timings, "raw", limit)
    for variables, limit in DONATED_GOALS.items():
        yield _row(f"step over {variables} Variables, donated", _donated(variables // 3), limit, settings)
    yield _row("step with two Modules, kwargs, Context, 30 Variables", _with_context(), 1.25, settings)
    yield _row("step with a Module made between calls, 30 Variables", _with_module_between(), 1.2, settings)
    yield _config_row(settings)
    yield _row("step over 300 Variables, a mutable config in every Module", _with_configs(100), 1.10, settings)


def _row(measure: str, contenders: dict[str, Contender], limit: float, settings: Settings) -> Row:
    timings = interleave(contenders, seconds=settings.seconds(10))
    return ratio_row(measure, timings, "raw", limit)


# Static values that can change are compared on every call: dataclass instances of five fields.


@dataclasses.dataclass
class Config:
    width: int = 4
    rate: float = 0.1
    name: str = "block"
    axes: tuple[int, ...] = (0, 1)
    bias: bool = True


def _with_configs(blocks: int) -> dict[str, Contender]:
    x, model = jnp.ones((WIDTH,)), Blocks(blocks)
    for block in model.blocks:
        block.config = Config()
    return {OURS: _ours(model, x, False), "raw": _raw_what_changes(raw_blocks(blocks), x)}


def _config_row(settings: Settings) -> Row:
    """How much longer a step takes for one mutable config that all of its Modules share.

    The step is a small one: the difference would drown in the noise of a large one. Two equal models differ by up to
    0.2 µs as well, depending on where their objects lie in memory, so this is the median of several pairs.
    """
    pairs = sorted(_with_and_without_config(settings.seconds(2)) for _ in range(PAIRS))
    added, without = pairs[PAIRS // 2]
    return Row("added by one mutable config that all Modules share", added, added, 5e-7, "≤ 500 ns", "s", without)


def _with_and_without_config(seconds: float) -> tuple[float, dict[str, float]]:
    x, plain, shared, config = jnp.ones((WIDTH,)), Blocks(1), Blocks(1), Config()
    for module in shared.modules():
        module.config = config
    timings = interleave({OURS: _ours(shared, x, False), "without": _ours(plain, x, False)}, seconds=seconds)
    without = timings["without"].best
    return timings[OURS].best - without, {"without": without}


# The step, once per library. `everything` changes the biases, too.


def _steps(blocks: int, everything: bool) -> dict[str, Contender]:
    x = jnp.ones((WIDTH,))
    raw = _raw_everything(raw_blocks(blocks), x) if everything else _raw_what_changes(raw_blocks(blocks), x)
    return {
        OURS: _ours(Blocks(blocks), x, everything),
        "raw": raw,
        "equinox": _equinox(equinox_blocks(blocks), x, everything),
        "flax cached_partial": _flax(FlaxBlocks(blocks), x, everything, cached=True),
        "flax": _flax(FlaxBlocks(blocks), x, everything, cached=False),
    }


def _run(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    return x @ kernel + bias


def _ours(model: Blocks, x: jax.Array, everything: bool, donate: bool = False) -> Contender:
    @nnx.jit(donate_argnums=0 if donate else None)
    def step(model: Blocks, x: jax.Array) -> jax.Array:
        for block in model.blocks:
            x = _run(x, block.kernel, block.bias)
            block.kernel -= RATE * block.kernel
            block.counter += 1
            if everything:
                block.bias -= RATE * block.bias
        return x

    return lambda: step(model, x)


def _raw_what_changes(params: Raw, x: jax.Array, donate: bool = False) -> Contender:
    changing = {name: {k: b[k] for k in ("kernel", "counter")} for name, b in params["blocks"].items()}
    constant = {name: {"bias": b["bias"]} for name, b in params["blocks"].items()}

    @functools.partial(jax.jit, donate_argnums=0 if donate else None)
    def step(changing: Raw, constant: Raw, x: jax.Array) -> tuple[Raw, jax.Array]:
        new = {}
        for name, block in changing.items():
            x = _run(x, block["kernel"], constant[name]["bias"])
            new[name] = {"kernel": block["kernel"] - RATE * block["kernel"], "counter": block["counter"] + 1}
        return new, x

    def run() -> jax.Array:
        nonlocal changing
        changing, out = step(changing, constant, x)
        return out

    return run


def _raw_everything(params: Raw, x: jax.Array) -> Contender:
    @jax.jit
    def step(params: Raw, x: jax.Array) -> tuple[Raw, jax.Array]:
        new = {}
        for name, block in params["blocks"].items():
            x = _run(x, block["kernel"], block["bias"])
            new[name] = {
                "kernel": block["kernel"] - RATE * block["kernel"],
                "bias": block["bias"] - RATE * block["bias"],
                "counter": block["counter"] + 1,
            }
        return {"blocks": new}, x

    def run() -> jax.Array:
        nonlocal params
        params, out = step(params, x)
        return out

    return run


def _flax(model: FlaxBlocks, x: jax.Array, everything: bool, cached: bool) -> Contender:
    @flax.nnx.jit
    def step(model: FlaxBlocks, x: jax.Array) -> jax.Array:
        for block in model.blocks:
            x = _run(x, block.kernel[...], block.bias[...])
            block.kernel[...] -= RATE * block.kernel[...]
            block.counter[...] += 1
            if everything:
                block.bias[...] -= RATE * block.bias[...]
        return x

    if cached:
        cached_step = flax.nnx.cached_partial(step, model)
        return lambda: cached_step(x)
    return lambda: step(model, x)


def _equinox(model: EquinoxBlocks, x: jax.Array, everything: bool) -> Contender:
    @eqx.filter_jit
    def step(model: EquinoxBlocks, x: jax.Array) -> tuple[EquinoxBlocks, jax.Array]:
        blocks = []
        for block in model.blocks:
            x = _run(x, block.kernel, block.bias)
            bias = block.bias - RATE * block.bias if everything else block.bias
            blocks.append(EquinoxBlock(block.kernel - RATE * block.kernel, bias, block.counter + 1))
        return EquinoxBlocks(blocks), x

    def run() -> jax.Array:
        nonlocal model
        model, out = step(model, x)
        return out

    return run


# Variations of the step.


def _donated(blocks: int) -> dict[str, Contender]:
    x = jnp.ones((WIDTH,))
    ours = _ours(Blocks(blocks), x, everything=False, donate=True)
    return {OURS: ours, "raw": _raw_what_changes(raw_blocks(blocks), x, donate=True)}


def _with_context() -> dict[str, Contender]:
    x = jnp.ones((WIDTH,))

    @nnx.jit
    def step(first: Blocks, x: jax.Array, *, second: Blocks, scale: jax.Array, ctx: nnx.Context) -> jax.Array:
        x = x + scale * jax.random.normal(ctx.make_rng("noise"), x.shape)
        for model in (first, second):
            for block in model.blocks:
                x = _run(x, block.kernel, block.bias)
                block.kernel -= RATE * block.kernel
                block.counter += 1
        return x

    first, second, scale, ctx = Blocks(5), Blocks(5), jnp.float32(0.1), nnx.context(noise=0)

    @jax.jit
    def raw_step(changing: Raw, constant: Raw, x: jax.Array, *, scale: jax.Array, key: jax.Array, count: int) -> Any:
        x = x + scale * jax.random.normal(jax.random.fold_in(key, count), x.shape)
        new: Raw = {}
        for model, blocks in changing.items():
            new[model] = {}
            for name, block in blocks.items():
                x = _run(x, block["kernel"], constant[model][name]["bias"])
                new[model][name] = {"kernel": block["kernel"] - RATE * block["kernel"], "counter": block["counter"] + 1}
        return new, x

    models = {"first": raw_blocks(5)["blocks"], "second": raw_blocks(5)["blocks"]}
    changing = {m: {n: {k: b[k] for k in ("kernel", "counter")} for n, b in bs.items()} for m, bs in models.items()}
    constant = {m: {n: {"bias": b["bias"]} for n, b in bs.items()} for m, bs in models.items()}
    key, count = jax.random.key(0), 0

    def run_raw() -> jax.Array:
        nonlocal changing, count
        changing, out = raw_step(changing, constant, x, scale=scale, key=key, count=count)
        count += 1
        return out

    return {OURS: lambda: step(first, x, second=second, scale=scale, ctx=ctx), "raw": run_raw}


class _Small(nnx.Module):
    def __init__(self, value: jax.Array):
        self.value = nnx.Param(value)


class _SmallPlain:
    def __init__(self, value: jax.Array):
        self.value = value


def _with_module_between() -> dict[str, Contender]:
    x = jnp.ones((WIDTH,))

    def between(make: Callable[[jax.Array], Any], step: Contender) -> Contender:
        def run() -> Any:
            make(x)
            return step()

        return run

    return {
        OURS: between(_Small, _ours(Blocks(10), x, everything=False)),
        "raw": between(_SmallPlain, _raw_what_changes(raw_blocks(10), x)),
    }
