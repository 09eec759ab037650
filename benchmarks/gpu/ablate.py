"""What each optimization of the GPT-2 step is worth: the step of `benchmarks.gpu.train` with one of them undone.

    python -m benchmarks.gpu.ablate                  GPT-2 small, batches of 32 × 1024 tokens, on a GPU
    python -m benchmarks.gpu.ablate --tiny           the default without a GPU: a tiny model, to see that it runs
    python -m benchmarks.gpu.ablate --out FILE.json  write a record (see benchmarks/record.py)

All of them take turns in one process. The performance page explains the optimizations.
"""

import argparse
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import nnx
from benchmarks import record
from benchmarks.gpu.train import SETTINGS, TINY_SETTINGS, Setting, adamw, random_tokens
from benchmarks.harness import interleave
from examples.gpt import model as gpt


class AddedOnce(nnx.Module):
    """Positions that are added once for all texts; their gradient is a sum over the batch."""

    def __init__(self, position: nnx.LearnedPositionEmbed):
        self.embedding = nnx.Param(position.embedding)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.embedding[: x.shape[1]].astype(x.dtype)


def plain_cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The usual formula, which is left to XLA."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def make(
    setting: Setting,
    *,
    added_once: bool = False,
    gelu: Callable[[jax.Array], jax.Array] = gpt.gelu,
    cross_entropy: Callable[..., jax.Array] = nnx.cross_entropy,
    options: dict[str, Any] | None = gpt.GPU_OPTIONS,
) -> Callable[[], jax.Array]:
    """Makes a training step, and runs it once, which compiles it."""
    model: Any = gpt.GPT(setting.config, ctx=nnx.context(0))
    if added_once:
        model.position = AddedOnce(model.position)
    optimizer, tokens = nnx.Optimizer(model, adamw(gpt.decayed)), random_tokens(setting)

    @nnx.jit(donate_argnums=0, compiler_options=options)
    def train_step(optimizer: Any, tokens: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]))(
            optimizer.model
        )
        optimizer.update(grads)
        return loss

    with mock.patch.object(gpt, "gelu", gelu):  # the blocks look it up while they are traced
        train_step(optimizer, tokens)
    return lambda: train_step(optimizer, tokens)


CONTENDERS: dict[str, Callable[[Setting], Callable[[], jax.Array]]] = {
    "nnx": make,
    "cross-entropy by XLA": functools.partial(make, cross_entropy=plain_cross_entropy),
    "positions added once": functools.partial(make, added_once=True),
    "gelu stored": functools.partial(make, gelu=nnx.gelu),
    "default compiler options": functools.partial(make, options=None),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model; the default without a GPU")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to measure, in all")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write a record of the run")
    args = parser.parse_args()
    tiny = args.tiny or jax.default_backend() != "gpu"
    setting = (TINY_SETTINGS if tiny else SETTINGS)["gpt2"]
    contenders = {name: make(setting) for name, make in CONTENDERS.items()}
    seconds, turn = (0.5, 0.01) if tiny else (args.seconds, 1.0)
    timings = interleave(contenders, seconds=seconds, turn=turn, compared=len(contenders))
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}\n\n| {'':<24} | ms per step, median | × nnx |")
    print(f"|{'-' * 26}|--------------------:|------:|")
    for name, timing in timings.items():
        print(f"| {name:<24} | {1e3 * timing.median:>19.2f} | {timing.median / timings['nnx'].median:>5.3f} |")
    if args.out:
        figures = {"time per step": record.row("s", {name: timing.median for name, timing in timings.items()})}
        command = "python -m benchmarks.gpu.ablate"
        record.write(args.out, record.make_record("gpu_ablate_gpt2", command, figures, whole=not tiny))
    return 0


if __name__ == "__main__":
    sys.exit(main())
