"""Mixtures of experts next to dense layers of equal active size: cost, correctness, time.

    python -m benchmarks.gpu.moe            on a GPU, in bfloat16
    python -m benchmarks.gpu.moe --cpu      smaller, in float32
    python -m benchmarks.gpu.moe --out FILE.json    write a record (see benchmarks/record.py)

The dense layer is a `GatedMLP` with `selected * hidden` hidden features. *Needed* are the operations of its products,
which are those of the selected experts. Operations are counted in the program before it is compiled, because XLA does
not count those of the libraries it calls, such as cuBLAS. Kernels of ours say what they cost, for all blocks, needed or
not. `ragged_dot` is one product of three, for comparison.
"""

import argparse
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import nnx
from benchmarks import record


class Cost(NamedTuple):
    """What a function costs."""

    milliseconds: float
    operations: float | None  # over those needed; None where XLA does not count them before compiling, as on a GPU
    temporary: float  # GiB


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

    @property
    def name(self) -> str:
        return f"{self.selected} of {self.experts} experts, {self.features} to {self.hidden}, {self.tokens} tokens"


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


def kernel_operations(jaxpr: Any) -> int:
    """Returns the operations that the kernels in a program say they have."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            total += equation.params["cost_estimate"].flops
        else:
            inner = jax.tree.leaves(equation.params, is_leaf=lambda value: hasattr(value, "eqns"))
            total += sum(kernel_operations(getattr(p, "jaxpr", p)) for p in inner if hasattr(p, "eqns"))
    return total


def report(name: str, function: Function, needed: float, *arguments: Any) -> Cost:
    """Measures what a function costs, and prints it."""
    traced = jax.jit(function).trace(*arguments)
    lowered = traced.lower()
    compiled = lowered.compile()
    counted = (lowered.cost_analysis() or {}).get("flops", 0.0)
    if jax.default_backend() != "cpu":  # where kernels are interpreted, XLA sees their operations
        counted += kernel_operations(traced.jaxpr.jaxpr)
    analysis: Any = compiled.memory_analysis()
    taken, memory = best_time(compiled, *arguments), analysis.temp_size_in_bytes / 2**30
    rate = needed / taken / 1e9
    operations = counted / needed if counted else None
    text = "not counted" if operations is None else f"{operations:6.3f}"
    print(
        f"  {name:28} operations / needed {text:>11}   {taken:8.3f} ms   {rate:7.2f} needed TFLOP/s   "
        f"{memory:5.2f} GiB temporary",
        flush=True,
    )
    return Cost(taken, operations, memory)


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


def compare(case: Case, dtype: Any) -> record.Figures:
    """Measures a mixture of experts next to a dense layer; returns rows of figures."""
    tokens, features, hidden, experts, selected = case
    print(f"{tokens} tokens, {features} -> {hidden}, {selected} of {experts} experts, {jnp.dtype(dtype)}", flush=True)
    options: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype, "ctx": nnx.context(0)}
    moe = nnx.MoE(features, hidden, experts, selected, update_stats=False, **options)
    dense = nnx.GatedMLP(features, selected * hidden, **options)
    x = jax.random.normal(jax.random.key(0), (tokens, features), dtype)
    forward, both = {}, {}
    for name, layer in (("MoE", moe), ("GatedMLP", dense)):
        state, function = as_function(layer)
        forward[name] = report(f"{name}, forward", function, case.needed, state, x)
        if tokens > 64:
            both[name] = report(f"{name}, forward and backward", gradient(function), 3 * case.needed, state, x)
    measured = {"forward": forward, "forward and backward": both} if both else {"forward": forward}
    ratios = [f"{name} {costs['MoE'][0] / costs['GatedMLP'][0]:.2f}" for name, costs in measured.items()]
    print(f"  time of MoE / GatedMLP: {', '.join(ratios)}", flush=True)
    if tokens > 64:
        sizes = jnp.full(experts, tokens * selected // experts, jnp.int32)
        rows = jnp.repeat(x, selected, axis=0)
        forward["ragged_dot"] = report(
            "ragged_dot, one product", jax.lax.ragged_dot, case.needed / 3, rows, moe.gate, sizes
        )
    figures: record.Figures = {}
    for direction, costs in measured.items():
        by_field = zip(("ms", "operations / needed", "GiB"), zip(*costs.values()))
        for suffix, (unit, values) in zip(("", ", operations", ", temporary memory"), by_field):
            figures[f"{case.name}, {direction}{suffix}"] = record.row(unit, dict(zip(costs, values)))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="smaller sizes, in float32")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write a record of the run")
    args = parser.parse_args()
    print("jax", jax.__version__, jax.devices(), flush=True)
    check(CHECKED)
    figures: record.Figures = {}
    for case in ON_CPU if args.cpu else ON_GPU:
        figures |= compare(case, jnp.float32 if args.cpu else jnp.bfloat16)
    if args.out:
        whole = args.cpu or jax.default_backend() == "gpu"
        name, option = ("moe_cpu", " --cpu") if args.cpu else ("gpu_moe", "")
        record.write(args.out, record.make_record(name, f"python -m benchmarks.gpu.moe{option}", figures, whole=whole))


if __name__ == "__main__":
    main()
