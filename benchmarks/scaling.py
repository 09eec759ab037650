"""How do costs grow from 100 over 1,000 to 10,000 Variables?

Everything NNX does should take time in proportion to the number of Variables: ten times as many should take about ten
times as long, and the goal leaves a fifth for caches that no longer fit. JAX's own share of a call grows faster than
that, in dispatch and in XLA's compiler, so a call is compared with the same step written by hand at 10,000.

A profile of that call, 10.0 ms of processor time: gathering 10,000 values takes 0.3 ms, writing 3,333 back takes 0.1,
and the rest is JAX's call of the compiled function, which includes 0.3 ms for flattening the list of values.

Times are processor time: the longer an operation, the more of its wall-clock time belongs to other programs.
"""

import functools
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import nnx
from benchmarks.harness import OURS, Contender, Row, Settings, Timing, interleave, ratio_row

TINY, SMALL, LARGE = 100, 1_000, 10_000  # Variables; the first for information
GROWTH = 12.0
CALL, FIRST_CALL = 1.15, 1.25  # times as long as by hand; XLA's time to compile varies more
KERNEL, BIAS, COUNT = jnp.ones((4, 4)), jnp.ones((4,)), jnp.zeros((), jnp.int32)


def measure(settings: Settings) -> Iterator[Row]:
    growing = {"build": _build, "partition()": _partition, "partition() after a structural change": _partition_changed}
    for name, contenders in growing.items():
        yield _growth_row(name, _timings(contenders, settings))
    rounds = 2 if settings.quick else 4
    yield _growth_row("trace a step", _once_each(lambda variables: {OURS: _traced(variables)}, rounds))
    yield _raw_row("call a compiled step", _timings(_steps, settings), CALL)
    yield _raw_row("first call of a step: trace and compile", _once_each(_steps, rounds), FIRST_CALL)


def _timings(contenders: Callable[[int], dict[str, Contender]], settings: Settings) -> dict[str, Timing]:
    return interleave(_by_size(contenders), seconds=settings.seconds(5), clock=time.process_time)


def _growth_row(name: str, timings: dict[str, Timing]) -> Row:
    measure = f"{name}, growth from {SMALL:,} to {LARGE:,} Variables"
    return ratio_row(measure, timings, f"nnx {SMALL:,}", GROWTH, f"≤ {GROWTH:g} × at {SMALL:,}")


def _raw_row(name: str, timings: dict[str, Timing], limit: float) -> Row:
    return ratio_row(f"{name}, {LARGE:,} Variables", timings, f"raw {LARGE:,}", limit)


def _by_size(contenders: Callable[[int], dict[str, Contender]]) -> dict[str, Contender]:
    """Returns the contenders at all sizes: ours at the large one first, then what it is compared with."""
    named = {OURS if name == OURS else f"{name} {LARGE:,}": run for name, run in contenders(LARGE).items()}
    for variables in (SMALL, TINY):
        named |= {f"{name} {variables:,}": run for name, run in contenders(variables).items()}
    return named


class Block(nnx.Module):
    def __init__(self) -> None:
        self.kernel = nnx.Param(KERNEL)
        self.bias = nnx.Param(BIAS)
        self.counter = nnx.Variable(COUNT)


class Blocks(nnx.Module):
    def __init__(self, variables: int):
        self.blocks = [Block() for _ in range(variables // 3)]


def _build(variables: int) -> dict[str, Contender]:
    return {OURS: functools.partial(Blocks, variables)}


def _partition(variables: int) -> dict[str, Contender]:
    return {OURS: Blocks(variables).partition}


def _partition_changed(variables: int) -> dict[str, Contender]:
    model, numbers = Blocks(variables), itertools.cycle((0, 1))

    def run() -> Any:
        model.number = next(numbers)
        return model.partition()

    return {OURS: run}


def _steps(variables: int) -> dict[str, Contender]:
    """Returns new steps, not yet traced, that change a third of the Variables."""
    model = Blocks(variables)
    blocks = [{"kernel": KERNEL, "bias": BIAS} for _ in range(variables // 3)]
    counters = [COUNT for _ in blocks]

    @nnx.jit
    def step(model: Blocks) -> jax.Array:
        for block in model.blocks:
            block.counter += 1
        return model.blocks[0].bias

    @jax.jit
    def raw_step(counters: Any, blocks: Any) -> Any:
        return [counter + 1 for counter in counters], blocks[0]["bias"]

    def run_raw() -> Any:
        nonlocal counters
        counters, out = raw_step(counters, blocks)
        return out

    return {OURS: lambda: step(model), "raw": run_raw}


def _traced(variables: int) -> Contender:
    model = Blocks(variables)

    @nnx.jit
    def step(model: Blocks) -> None:
        for block in model.blocks:
            block.counter += 1

    def run() -> None:
        step.trace(model)

    return run


def _once_each(contenders: Callable[[int], dict[str, Contender]], rounds: int) -> dict[str, Timing]:
    """Times contenders that have to be made for every call, because a call takes less time the second time."""
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, run in _by_size(contenders).items():
            gc.collect()
            gc.disable()  # as in `interleave`: how often Python looks for garbage depends on everything else alive
            try:
                start = time.process_time()
                jax.block_until_ready(run())
                times.setdefault(name, []).append(time.process_time() - start)
            finally:
                gc.enable()
    return {name: Timing(min(values), sorted(values)[len(values) // 2]) for name, values in times.items()}
