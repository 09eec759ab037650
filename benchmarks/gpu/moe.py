"""Mixtures of experts next to dense layers of equal active size: cost, correctness, time.

    python -m benchmarks.gpu.moe            on a GPU, in bfloat16
    python -m benchmarks.gpu.moe --cpu      smaller, in float32

The dense layer is a `GatedMLP` with `selected * hidden` hidden features. *Needed* are the operations of its products,
which are those of the selected experts. Operations are counted in the program before it is compiled, because XLA does
not count those of the libraries it calls, such as cuBLAS. `ragged_dot` is one product of three, for comparison.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import nnx


class Case(NamedTuple):
    """The sizes of one comparison."""

    tokens: int
    features: int
    hidden: int  # of each expert
    experts: int
    selected: int

    @property
    def needed(self) -> int:
        return self.tokens * self.selected * 6 * self.features * self.hidden


CHECKED = Case(512, 64, 96, 8, 2)
ON_GPU = (
    Case(8192, 1024, 4096, 8, 2),
    Case(8192, 1024, 1024, 64, 8),
    Case(8192, 1024, 4096, 64, 8),
    Case(8, 1024, 4096, 64, 2),
)
ON_CPU = (Case(2048, 256, 512, 8, 2), Case(1024, 256, 256, 64, 8), Case(4, 256, 512, 64, 2))

Function = Callable[..., Any]


def best_time(function: Function, *arguments: Any) -> float:
    """Returns milliseconds: those of the best of five turns."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([function(*arguments) for _ in range(3)])
        times.append((time.perf_counter() - start) / 3 * 1e3)
    return min(times)


def report(name: str, function: Function, needed: float, *arguments: Any) -> float:
    """Prints what a function costs, and returns its time."""
    lowered = jax.jit(function).lower(*arguments)
    compiled = lowered.compile()
    counted = (lowered.cost_analysis() or {}).get("flops", 0.0)
    analysis: Any = compiled.memory_analysis()
    taken, memory = best_time(compiled, *arguments), analysis.temp_size_in_bytes / 2**30
    rate = needed / taken / 1e9
    print(
        f"  {name:28} operations / needed {counted / needed:6.3f}   {taken:8.3f} ms   {rate:7.2f} needed TFLOP/s   "
        f"{memory:5.2f} GiB temporary",
        flush=True,
    )
    return taken


def as_function(layer: nnx.MoE | nnx.GatedMLP) -> tuple[nnx.State, Function]:
    state, moduledef = layer.partition()
    return state, lambda state, x: moduledef.merge(state)(x)


def gradient(function: Function) -> Function:
    return jax.value_and_grad(lambda state, x: jnp.mean(function(state, x).astype(jnp.float32) ** 2), argnums=(0, 1))


def check(case: Case) -> None:
    """Compares output and gradients with a loop over the experts, in float32."""

    def loop(state: nnx.State, x: jax.Array) -> jax.Array:
        scores = jax.nn.softmax(x @ state["router"].value)
        least = jnp.sort(scores, axis=-1)[:, -case.selected, None]
        weights = jnp.where(scores >= least, scores, 0.0)
        weights = weights / weights.sum(-1, keepdims=True)
        out = jnp.zeros_like(x)
        for e in range(case.experts):
            hidden = jax.nn.silu(x @ state["gate"].value[e]) * (x @ state["up"].value[e])
            out = out + weights[:, e, None] * (hidden @ state["down"].value[e])
        return out

    with jax.default_matmul_precision("highest"):
        layer = nnx.MoE(*case[1:], update_stats=False, ctx=nnx.context(0))
        x = jax.random.normal(jax.random.key(0), (case.tokens, case.features))
        state, function = as_function(layer)
        ours, theirs = (jax.jit(lambda s, x, f=f: (f(s, x), gradient(f)(s, x)))(state, x) for f in (function, loop))
    errors = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / (jnp.abs(b).max() + 1e-30)), ours, theirs)
    print(f"next to a loop: output {errors[0]:.1e}, gradients {max(jax.tree.leaves(errors[1])):.1e}", flush=True)


def compare(case: Case, dtype: Any) -> None:
    tokens, features, hidden, experts, selected = case
    print(f"{tokens} tokens, {features} -> {hidden}, {selected} of {experts} experts, {jnp.dtype(dtype)}", flush=True)
    options: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype, "ctx": nnx.context(0)}
    moe = nnx.MoE(features, hidden, experts, selected, update_stats=False, **options)
    dense = nnx.GatedMLP(features, selected * hidden, **options)
    x = jax.random.normal(jax.random.key(0), (tokens, features), dtype)
    forward, both = [], []
    for name, layer in (("MoE", moe), ("GatedMLP", dense)):
        state, function = as_function(layer)
        forward.append(report(f"{name}, forward", function, case.needed, state, x))
        if tokens > 64:
            both.append(report(f"{name}, forward and backward", gradient(function), 3 * case.needed, state, x))
    ratios = [f"{name} {times[0] / times[1]:.2f}" for name, times in (("forward", forward), ("both", both)) if times]
    print(f"  time of MoE / GatedMLP: {', '.join(ratios)}", flush=True)
    if tokens > 64:
        sizes = jnp.full(experts, tokens * selected // experts, jnp.int32)
        rows = jnp.repeat(x, selected, axis=0)
        report("ragged_dot, one product", jax.lax.ragged_dot, case.needed / 3, rows, moe.gate, sizes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="smaller sizes, in float32")
    on_cpu = parser.parse_args().cpu
    print("jax", jax.__version__, jax.devices(), flush=True)
    check(CHECKED)
    for sizes in ON_CPU if on_cpu else ON_GPU:
        compare(sizes, jnp.float32 if on_cpu else jnp.bfloat16)
