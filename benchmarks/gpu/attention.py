"""Attention on a GPU: the rate of the fused kernel, and the form in blocks for what it does not take.

    python -m benchmarks.gpu.attention                 under two minutes on a GPU
    python -m benchmarks.gpu.attention --tiny          the default without a GPU: short texts, to see that it runs
    python -m benchmarks.gpu.attention --out FILE.json write a record (see benchmarks/record.py)

*Fused* is cuDNN's kernel for causal attention in bfloat16; backward is the gradient without the forward pass that it
contains. `nnx.plan` takes its rate from here (see `Chip.attention`). *In blocks* is the form of
`nnx/nn/attention/blocks.py`, for blocks of several numbers of queries.
"""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import nnx
from benchmarks import record
from benchmarks.harness import interleave
from nnx.nn.attention import blocks

FUSED = ((16, 1024, 16, 64), (4, 2048, 32, 64), (4, 2048, 16, 128), (2, 8192, 16, 128))  # batch, length, heads, size
LONG = ((4, 2048, 16, 64), (2, 4096, 16, 64), (2, 4096, 16, 128))
SIZES = (128, 256)  # queries of a block
TURN = 0.02  # seconds


def attention(**options: Any) -> Callable[[jax.Array], jax.Array]:
    """Returns causal self-attention with some options."""
    return lambda x: nnx.dot_product_attention(x, x, x, is_causal=True, **options)


def gradient(attend: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Returns the gradient of a sum of the outputs."""
    return jax.grad(lambda x: attend(x).astype(jnp.float32).sum())


def compiled(run: Callable[[jax.Array], jax.Array], x: jax.Array) -> Callable[[], jax.Array]:
    """Compiles a function for an array now, so that what is patched meanwhile takes effect."""
    jax.clear_caches()
    program = jax.jit(run).lower(x).compile()
    return lambda: program(x)


def fused(tiny: bool) -> record.Figures:
    """Times the kernel that the target chooses, forward and backward."""
    figures: record.Figures = {}
    for batch, length, heads, features in ((1, 256, 2, 64),) if tiny else FUSED:
        x = jax.random.normal(jax.random.key(0), (batch, length, heads, features), jnp.bfloat16)
        runs = {"forward": compiled(attention(), x), "both": compiled(gradient(attention()), x)}
        times = interleave(runs, seconds=0.02 if tiny else 0.5, turn=TURN)
        forward, both = times["forward"].best, times["both"].best
        product = batch * heads * length**2 * features  # operations of a causal product
        rates = {"forward": 2 * product / forward, "backward": 5 * product / max(both - forward, 1e-9)}
        name = f"fused, {batch} × {length} tokens, {heads} heads of {features}"
        figures[name] = record.row("TFLOP/s", {side: rate / 1e12 for side, rate in rates.items()})
        print(name, figures[name]["values"], flush=True)
    return figures


def in_blocks(tiny: bool) -> record.Figures:
    """Times the form in blocks of several sizes."""
    figures: record.Figures = {}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "float32": (jnp.float32, {}),
        "bfloat16, soft cap": (jnp.bfloat16, {"logits_soft_cap": 50.0}),
    }
    for shape in ((1, 512, 2, 8),) if tiny else LONG:
        for kind, (dtype, options) in cases.items():
            x = jax.random.normal(jax.random.key(0), shape, dtype)
            for side in ("forward", "gradient"):
                runs = {}
                for size in SIZES:
                    run = attention(implementation="xla", **options)
                    with mock.patch.multiple(blocks, LONG=1, block_size=lambda keys, size=size: size):
                        runs[str(size)] = compiled(run if side == "forward" else gradient(run), x)
                times = interleave(runs, seconds=0.05 if tiny else 0.3, turn=TURN)
                batch, length, heads, features = shape
                name = f"in blocks, {kind}, {batch} × {length} tokens, {heads} heads of {features}, {side}"
                figures[name] = record.row("s", {size: timing.best for size, timing in times.items()})
                print(name, {size: f"{1e3 * timing.best:.3f} ms" for size, timing in times.items()}, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", default=jax.default_backend() != "gpu", help="short texts")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="where to write a record")
    arguments = parser.parse_args()
    figures = {**fused(arguments.tiny), **in_blocks(arguments.tiny)}
    if arguments.out is not None:
        made = record.make_record(
            "gpu_attention", "python -m benchmarks.gpu.attention", figures, whole=not arguments.tiny
        )
        record.write(arguments.out, made)


if __name__ == "__main__":
    main()
