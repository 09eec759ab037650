"""Quantized weights on a GPU: tokens written per second, memory, and single products in bfloat16, int8 and int4.

    python -m benchmarks.gpu.quantize              a Llama of 1.2 billion parameters at 8, 1 and 64 rows, on a GPU
    python -m benchmarks.gpu.quantize --rows 8     one number of rows
    python -m benchmarks.gpu.quantize --products   products of a few rows with the matrices of an MLP, in several forms
    python -m benchmarks.gpu.quantize --out FILE.json    write a record (see benchmarks/record.py)
    python -m benchmarks.gpu.quantize --tiny       the default without a GPU: tiny sizes, to see that it runs

Decoding is that of `benchmarks.gpu.decode`: 64 tokens read and 512 written in each row, greedily, with the same weights
for all contenders. "Bandwidth" is the fraction of the memory bandwidth (measured first) that reading the weights, as
they are stored, and the filled part of the cache once per token would take. "Weights" is what they take on the device;
"peak" is the most memory that was in use up to then, by all contenders together. No table is begun after `--limit`
seconds, of which compilation takes most.
"""

import argparse
import functools
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import nnx
from benchmarks import record
from benchmarks.gpu import decode, models
from benchmarks.harness import interleave

Bits = Literal[8, 4] | None
BITS: dict[str, Bits] = {"bfloat16": None, "int8": 8, "int4": 4}
GROUP = 128


@functools.cache
def make_model(shape: models.Shape, bits: Bits) -> Any:
    model = models.make_model(shape, scanned=False).clone()
    if bits is not None:
        nnx.quantize(model, bits, min(GROUP, shape.width) if bits == 4 else None)
    return model


def device_bytes(tree: Any) -> int:
    """Returns the bytes that the arrays of a tree take on a device, where two 4-bit numbers share a byte."""
    return sum(leaf.nbytes // (2 if leaf.dtype == jnp.int4 else 1) for leaf in jax.tree.leaves(tree))


def peak_memory() -> str:
    stats = jax.devices()[0].memory_stats() or {}
    return f"{stats['peak_bytes_in_use'] / 2**30:.2f}" if "peak_bytes_in_use" in stats else "-"


def logits_error(shape: models.Shape, bits: int) -> float:
    """Returns the relative error of the logits that quantization makes, for random weights and tokens."""
    tokens = np.random.default_rng(0).integers(0, shape.vocab, (2, 32))
    compute = nnx.jit(lambda model, tokens: model(tokens).astype(jnp.float32))
    expected, found = (compute(make_model(shape, given), tokens) for given in (None, bits))
    return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))


def decoding(setting: decode.Setting, bandwidth: float, seconds: float, turn: float) -> record.Figures:
    """Measures how fast each model writes, and prints a table; returns its rows as figures."""
    runs: dict[str, Callable[[], Any]] = {}
    for name, bits in BITS.items():
        began, model = time.perf_counter(), make_model(setting.shape, bits)
        runs[name] = functools.partial(nnx.generate, model, setting.prompts, max_new_tokens=setting.new, temperature=0)
        runs[name]().block_until_ready()
        print(f"  {name}: compiled in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print(f"\n{setting.rows} row(s), {setting.read} tokens read, {setting.new} written\n")
    print("|          | tokens/s, median | best turn | ms per token | bandwidth | weights GiB | peak GiB |")
    print("|----------|-----------------:|----------:|-------------:|----------:|------------:|---------:|")
    stored = {name: device_bytes(make_model(setting.shape, bits).get_state()) for name, bits in BITS.items()}
    itemsize = jnp.dtype(setting.shape.dtype).itemsize
    cached = decode.bytes_per_step(setting) - itemsize * models.num_weights(setting.shape)
    speeds, fractions = {}, {}
    for name, timing in interleave(runs, seconds=seconds, turn=turn, compared=len(runs)).items():
        speeds[name] = setting.rows * setting.new / timing.median
        fractions[name] = fraction = (stored[name] + cached) * setting.new / timing.best / bandwidth
        print(
            f"| {name:<8} | {speeds[name]:>16,.0f} "
            f"| {setting.rows * setting.new / timing.best:>9,.0f} | {1e3 * timing.best / setting.new:>12.3f} "
            f"| {fraction:>9.2f} | {stored[name] / 2**30:>11.3f} | {peak_memory():>8} |",
            flush=True,
        )
    return {
        f"rows: {setting.rows}": record.row("tokens/s", speeds),
        f"rows: {setting.rows}, part of the memory bandwidth": record.row("1", fractions),
        "weights": record.row("GiB", {name: size / 2**30 for name, size in stored.items()}),
    }


# Single products


def plain(x: Any, kernel: Any) -> Any:
    return x @ kernel[0]


def scaled_after(x: Any, kernel: Any) -> Any:
    integers, scale = kernel
    y = jnp.matmul(x, integers.astype(x.dtype), preferred_element_type=jnp.float32)
    return (y * scale[0]).astype(x.dtype)


def scaled_before(x: Any, kernel: Any) -> Any:
    integers, scale = kernel
    groups = integers.reshape(len(scale), -1, integers.shape[-1]).astype(x.dtype) * scale[:, None]
    return x @ groups.reshape(integers.shape)


def summed_by_group(x: Any, kernel: Any) -> Any:
    """Sums each group on its own, so that its scale can follow the product, and adds up the groups at the end."""
    integers, scale = kernel
    x, weights = x.reshape(len(x), len(scale), -1), integers.reshape(len(scale), -1, integers.shape[-1])
    dimensions = (((2,), (1,)), ((1,), (0,)))
    parts = jax.lax.dot_general(x, weights.astype(x.dtype), dimensions, preferred_element_type=jnp.float32)
    return (parts * scale[:, None]).sum(0).astype(x.dtype)


class Form(NamedTuple):
    """A way to multiply with a quantized matrix: how it is stored, and how the product is written."""

    dtype: Any
    multiply: Callable[..., Any]
    grouped: bool = False
    options: dict[str, Any] | None = None


FORMS = {
    "bfloat16": Form(jnp.bfloat16, plain),
    "int8, scaled after": Form(jnp.int8, scaled_after),
    "int8 groups, scaled before": Form(jnp.int8, scaled_before, True),
    "int4, scaled after": Form(jnp.int4, scaled_after),
    "int4 groups, scaled before": Form(jnp.int4, scaled_before, True),
    "the same, with XLA's option": Form(
        jnp.int4, scaled_before, True, {"xla_gpu_experimental_enable_subchannel_dequantisation_fusion": True}
    ),
    "int4 groups, summed by group": Form(jnp.int4, summed_by_group, True),
}


def products(rows: int, width: int, hidden: int, layers: int, bandwidth: float, seconds: float, turn: float) -> None:
    """Multiplies rows with the matrices of several MLPs, one after another, so that no cache holds all of them."""
    runs, stored, size = {}, {}, min(GROUP, width)
    x = jax.random.normal(jax.random.key(0), (rows, width), jnp.bfloat16)
    for name, form in FORMS.items():
        kernels = _kernels(form, width, hidden, layers, size)
        run = jax.jit(functools.partial(_chain, form.multiply), compiler_options=form.options)
        try:
            run(x, kernels).block_until_ready()
        except Exception as error:  # an option or a dtype that this version of XLA does not have
            print(f"  {name}: {str(error).splitlines()[0][:150]}", file=sys.stderr, flush=True)
            continue
        runs[name] = functools.partial(run, x, kernels)
        stored[name] = device_bytes(kernels)
    print(f"\nProducts of {rows} row(s) with {2 * layers} matrices of {width} x {hidden}\n")
    print(f"| {'':<28} |    ms | bandwidth |\n|{'-' * 30}|------:|----------:|")
    for name, timing in interleave(runs, seconds=seconds, turn=turn, compared=len(runs)).items():
        print(
            f"| {name:<28} | {1e3 * timing.best:>5.3f} | {stored[name] / timing.best / bandwidth:>9.2f} |", flush=True
        )


def _kernels(form: Form, width: int, hidden: int, layers: int, size: int) -> list[Any]:
    @functools.partial(jax.jit, static_argnums=(1, 2))
    def make(key: jax.Array, inputs: int, outputs: int) -> Any:
        if form.dtype == jnp.bfloat16:
            return (jax.random.normal(key, (inputs, outputs), jnp.bfloat16) / inputs**0.5,)
        integers = jax.random.randint(key, (inputs, outputs), -7, 8).astype(form.dtype)
        return integers, jnp.full((inputs // size if form.grouped else 1, outputs), 0.25 / inputs**0.5, jnp.bfloat16)

    keys = jax.random.split(jax.random.key(1), 2 * layers)
    return [make(key, *((width, hidden) if i % 2 == 0 else (hidden, width))) for i, key in enumerate(keys)]


def _chain(multiply: Callable[..., Any], x: Any, kernels: Any) -> Any:
    for kernel in kernels:
        x = multiply(x, kernel)
    return x


def main() -> int:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model; the default without a GPU")
    parser.add_argument("--products", action="store_true", help="measure single products instead of decoding")
    parser.add_argument("--rows", type=int, nargs="+", default=None, help="the numbers of rows; 8 1 64 by default")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to measure each table")
    parser.add_argument("--limit", type=float, default=110.0, help="begin no table after so many seconds")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write a record of the run")
    args = parser.parse_args()
    tiny = args.tiny or jax.default_backend() != "gpu"
    shape = models.TINY_SHAPES["llama"] if tiny else models.SHAPES["llama"]
    bandwidth = decode.measured_bandwidth(1 << (20 if tiny else 32))
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {bandwidth / 1e12:.2f} TB/s", flush=True)
    seconds, turn = (0.1, 0.001) if tiny else (args.seconds, 0.01)
    figures: record.Figures = {"memory bandwidth": record.row("TB/s", {"measured": bandwidth / 1e12})}
    whole = not (tiny or args.products or args.rows)
    if not args.products:
        errors = {name: logits_error(shape, bits) for name, bits in BITS.items() if bits}
        figures["relative error of the logits"] = record.row("1", errors)
        text = ", ".join(f"{name} {error:.4f}" for name, error in errors.items())
        print(
            f"{models.num_weights(shape) / 1e6:,.0f} million weights; relative error of the logits: {text}",
            flush=True,
        )
    for rows in args.rows or ((2, 1) if tiny else (8, 1, 64)):
        if time.perf_counter() - began > args.limit:
            print(f"\n{rows} row(s): left out, {args.limit:.0f} seconds have passed")
            whole = False
        elif args.products:
            products(rows, shape.width, shape.hidden, 2 if tiny else 8, bandwidth, seconds / 2, turn)
        else:
            setting = decode.Setting(shape, rows, *((8, 12) if tiny else (64, 512)))
            figures |= decoding(setting, bandwidth, seconds, turn)
    if args.out:
        command = "python -m benchmarks.gpu.quantize"
        record.write(args.out, record.make_record("gpu_quantize", command, figures, whole=whole))
    return 0


if __name__ == "__main__":
    sys.exit(main())
