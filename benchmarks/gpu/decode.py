"""Tokens written per second: nnx, hand-written JAX and PyTorch, interleaved in one process.

    python -m benchmarks.gpu.decode                        GPT-2 small at 1, 8 and 64 rows, on a GPU
    python -m benchmarks.gpu.decode --model llama          a Llama of 1.2 billion parameters
    python -m benchmarks.gpu.decode --rows 1 --seconds 60  one number of rows, measured longer
    python -m benchmarks.gpu.decode --without torch.compile
    python -m benchmarks.gpu.decode --out FILE.json        write a record (see benchmarks/record.py)
    python -m benchmarks.gpu.decode --tiny                 the default without a GPU: tiny models, to see that it runs

Weights and caches are in bfloat16 (float32 for tiny models), tokens are chosen greedily, and all JAX contenders have
the same weights. A run reads a prompt of 64 tokens and writes 512 in each row. The last table is the time to the first
token of a prompt of 512. "Bandwidth" is the fraction of the memory bandwidth (measured first, by adding 1 to a large
array) that reading the weights and the filled part of the cache once per token would take. "Drawing tokens" has
`temperature`, `top_k` and `top_p`; compare it with the greedy rows to see what they cost.
"""

import argparse
import dataclasses
import functools
import importlib.util
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.55")  # the rest of the memory is for PyTorch

import jax
import jax.numpy as jnp
import numpy as np

import nnx
from benchmarks import record
from benchmarks.gpu import models, raw_decode
from benchmarks.harness import interleave


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is measured: `read` tokens of a prompt, then `new` tokens, in each of `rows` rows."""

    shape: models.Shape
    rows: int
    read: int
    new: int

    @property
    def prompts(self) -> np.ndarray:
        return np.random.default_rng(1).integers(0, self.shape.vocab, (self.rows, self.read)).astype(np.int32)

    @property
    def length(self) -> int:
        return -(-(self.read + self.new) // 128) * 128


def make_ours(setting: Setting, scanned: bool, **rules: Any) -> Callable[[], jax.Array]:
    model, ctx = models.make_model(setting.shape, scanned), nnx.context(sample=0)
    rules = rules or {"temperature": 0}
    return lambda: nnx.generate(model, setting.prompts, max_new_tokens=setting.new, ctx=ctx, **rules)


def make_raw(setting: Setting, rows: int | None = None) -> Callable[[], jax.Array]:
    """Makes the hand-written loop; `rows` is the number of rows to compute, of which the first ones count."""
    params = models.raw_params(setting.shape)
    prompts = np.resize(setting.prompts, (rows or setting.rows, setting.read))
    run = functools.partial(raw_decode.generate, new=setting.new, length=setting.length, base=setting.shape.base)
    return lambda: run(params, prompts)[: setting.rows]


def make_torch(setting: Setting) -> Callable[[], Any]:
    from benchmarks.gpu.torch_decode import Shape, make_contender

    shape = setting.shape
    sizes = Shape(shape.vocab, shape.layers, shape.width, shape.heads, shape.kv_heads, shape.hidden, shape.base)
    return make_contender(sizes, setting.rows, setting.read, setting.new, setting.length)


CONTENDERS: dict[str, Callable[[Setting], Callable[[], Any]]] = {
    "nnx, scanned layers": functools.partial(make_ours, scanned=True),
    "nnx, layers in a list": functools.partial(make_ours, scanned=False),
    "hand-written JAX": make_raw,
    "the same, eight rows": functools.partial(make_raw, rows=8),
    "torch.compile": make_torch,
    "nnx, drawing tokens": functools.partial(make_ours, scanned=False, temperature=0.8, top_k=50, top_p=0.95),
}


DIFFERENT = {"torch.compile", "nnx, drawing tokens"}  # their tokens are not those of the others


def contenders(setting: Setting, left_out: set[str]) -> dict[str, Callable[[], Any]]:
    """Makes every contender that takes part, and runs each once: that compiles it."""
    made = {}
    for name, make in CONTENDERS.items():
        if name in left_out or (name == "the same, eight rows" and setting.rows >= 8):
            continue
        began = time.perf_counter()
        made[name] = make(setting)
        result = made[name]()
        result.block_until_ready()
        print(f"  {name}: compiled in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return made


def agreement(runs: dict[str, Callable[[], Any]]) -> str:
    """Compares the JAX contenders: the fraction of tokens on which each agrees with hand-written JAX."""
    tokens = {name: np.asarray(run()) for name, run in runs.items() if name not in DIFFERENT}
    expected = tokens.get("hand-written JAX")
    if expected is None:
        return ""
    return ", ".join(
        f"{name} {np.mean(found == expected):.3f}" for name, found in tokens.items() if found is not expected
    )


def measured_bandwidth(size: int) -> float:
    """Returns bytes per second that adding 1 to an array of `size` bytes reads and writes."""
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = add(jnp.zeros(size // 4, jnp.float32))
    best = float("inf")
    for _ in range(5):
        x.block_until_ready()
        began = time.perf_counter()
        for _ in range(10):
            x = add(x)
        x.block_until_ready()
        best = min(best, (time.perf_counter() - began) / 10)
    return 2 * size / best


def bytes_per_step(setting: Setting) -> float:
    """Returns the bytes of weights and, on average over the run, filled cache that one step has to read."""
    shape = setting.shape
    itemsize = jnp.dtype(shape.dtype).itemsize
    cached = 2 * shape.layers * shape.kv_heads * (shape.width // shape.heads) * (setting.read + setting.new / 2)
    return itemsize * (models.num_weights(shape) + setting.rows * cached)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=models.SHAPES, default="gpt2")
    parser.add_argument("--tiny", action="store_true", help="a tiny model; the default without a GPU")
    parser.add_argument("--rows", type=int, nargs="+", default=None, help="the numbers of rows; 1 8 64 by default")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to measure each table")
    parser.add_argument("--without", action="append", default=[], choices=CONTENDERS, help="leave this one out")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write a record of the run")
    args = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    tiny = args.tiny or not on_gpu
    shape = models.TINY_SHAPES[args.model] if tiny else models.SHAPES[args.model]
    left_out = set(args.without)
    if not on_gpu or importlib.util.find_spec("torch") is None:
        left_out.add("torch.compile")

    bandwidth = measured_bandwidth(1 << (20 if tiny else 32))
    print(
        f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {bandwidth / 1e12:.2f} TB/s; {args.model}, "
        f"{models.num_weights(shape) / 1e6:,.0f} million weights"
    )
    read, new = (8, 12) if tiny else (64, 512)
    seconds, turn = (0.2, 0.001) if tiny else (args.seconds, 0.01)
    figures: record.Figures = {"memory bandwidth": record.row("TB/s", {"measured": bandwidth / 1e12})}
    for rows in args.rows or ((1, 2) if tiny else (1, 8, 64)):
        setting = Setting(shape, rows, read, new)
        runs = contenders(setting, left_out)
        print(f"\n{rows} row(s), {read} tokens read, {new} written; the same tokens as by hand: {agreement(runs)}\n")
        print(f"| {'':<21} | tokens/s, median | best turn | ms per token | bandwidth |")
        print(f"|{'-' * 23}|-----------------:|----------:|-------------:|----------:|")
        speeds, fractions = {}, {}
        for name, timing in interleave(runs, seconds=seconds, turn=turn, compared=len(runs)).items():
            speeds[name] = rows * new / timing.median
            fractions[name] = fraction = bytes_per_step(setting) * new / timing.best / bandwidth
            print(
                f"| {name:<21} | {speeds[name]:>16,.0f} | {rows * new / timing.best:>9,.0f} "
                f"| {1e3 * timing.best / new:>12.3f} | {fraction:>9.2f} |"
            )
        figures[f"rows: {rows}"] = record.row("tokens/s", speeds)
        figures[f"rows: {rows}, part of the memory bandwidth"] = record.row("1", fractions)

    setting = Setting(shape, 1, 16 if tiny else 512, 1)
    runs = contenders(setting, left_out | {"the same, eight rows"})
    print(f"\nTime to the first token of a prompt of {setting.read}, 1 row\n\n| {'':<21} | ms, median |   best |")
    print(f"|{'-' * 23}|-----------:|-------:|")
    times = {}
    for name, timing in interleave(runs, seconds=seconds / 2, turn=turn, compared=len(runs)).items():
        times[name] = 1e3 * timing.best
        print(f"| {name:<21} | {1e3 * timing.median:>10.2f} | {1e3 * timing.best:>6.2f} |")
    figures[f"first token of a prompt of {setting.read}"] = record.row("ms", times)
    if args.out:
        command = f"python -m benchmarks.gpu.decode --model {args.model}"
        whole = not (tiny or args.without or args.rows)
        record.write(args.out, record.make_record(f"gpu_decode_{args.model}", command, figures, whole=whole))
    return 0


if __name__ == "__main__":
    sys.exit(main())
