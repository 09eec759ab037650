"""Fine-tuning an 8B Llama on one GPU: NNX next to transformers, with LoRA and of all weights.

    python -m benchmarks.gpu.finetune                       every contender, each in a process of its own, on a GPU
    python -m benchmarks.gpu.finetune --only lora           LoRA of rank 16 on every matrix of the layers
    python -m benchmarks.gpu.finetune --only full           all weights
    python -m benchmarks.gpu.finetune --only loss           the loss of the last layer alone, with and without logits
    python -m benchmarks.gpu.finetune --without "nnx, list" leave a contender out
    python -m benchmarks.gpu.finetune --out DIRECTORY       write a record of each kind (see benchmarks/record.py)
    python -m benchmarks.gpu.finetune --tiny                the default without a GPU: a tiny model, to see that it runs

A step trains on 4 × 1024 random tokens. Weights, moments and products are in bfloat16, the optimizer is AdamW, and
layers are recomputed in the backward pass ("gradient checkpointing"). transformers computes with `torch.compile`, layer
by layer, which is how it compiles fastest. A contender runs alone on the GPU; "compile" is how much longer its first
step takes than a later one, "peak" the most memory its arrays and temporaries took. Compilation caches are not used.
Records are written after every contender.
"""

import argparse
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import nnx
from benchmarks import record
from benchmarks.llamas import EIGHT_BILLION, TINY, Sizes, decoder_config

RATE, RANK = 1e-4, 16


class Run(NamedTuple):
    """What is trained: the sizes of a Llama, and the rows and tokens of a batch."""

    sizes: Sizes
    rows: int
    length: int


WHOLE, SMALL = Run(EIGHT_BILLION, 4, 1024), Run(TINY, 2, 16)
OPTIONS = {"xla_gpu_enable_triton_gemm": False}  # cuBLAS is faster at these sizes, and needs no search for tiles


class Contender(NamedTuple):
    """What a process measures: a step, and what asks the device for the most memory it has had in use."""

    step: Callable[[], Any]
    wait: Callable[[Any], Any]
    peak: Callable[[], int]


def make_ours(run: Run, *, lora: bool, scan_layers: bool = True, bits: Any = None, product: Any = None) -> Contender:
    """Makes a step of NNX; `product` replaces the products with the matrices of the layers."""
    config = decoder_config(run.sizes)

    @nnx.jit
    def make_model() -> Any:
        options: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "remat": True}
        return nnx.models.Decoder(config, scan_layers=scan_layers, ctx=nnx.context(0), **options)

    model = make_model()
    if bits is not None:
        nnx.quantize(model, bits)
    if lora:
        nnx.add_lora(model, RANK, where="layers/**", param_dtype=jnp.bfloat16, ctx=nnx.context(1))
    for path, layer in model.named_modules():
        if product is not None and path.startswith("layers") and hasattr(layer, "dot_general"):
            layer.dot_general = product
    wrt = nnx.LoRAParam if lora else nnx.Param
    optimizer = nnx.Optimizer(model, optax.adamw(RATE), wrt=wrt)
    tokens = jax.random.randint(jax.random.key(1), (run.rows, run.length + 1), 0, run.sizes.vocab)

    def loss_fn(model: Any, tokens: jax.Array) -> jax.Array:
        return nnx.linear_cross_entropy(model.features(tokens[:, :-1]), model.head_kernel, tokens[:, 1:])

    @nnx.jit(donate_argnums=0, compiler_options=OPTIONS if jax.default_backend() == "gpu" else None)
    def step(optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn, wrt=wrt)(optimizer.model, tokens)
        optimizer.update(grads)
        return loss

    return Contender(lambda: step(optimizer, tokens), jax.block_until_ready, peak)


def make_loss(run: Run, *, logits: bool) -> Contender:
    """Makes the gradients of the loss by features and output layer, without logits or with them."""
    sizes, rows = run.sizes, run.rows * run.length
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    features, kernel = draw(jax.random.key(0), (rows, sizes.width)), draw(jax.random.key(1), (sizes.width, sizes.vocab))
    kernel *= sizes.width**-0.5
    labels = jax.random.randint(jax.random.key(2), (rows,), 0, sizes.vocab)

    def loss_fn(features: jax.Array, kernel: jax.Array) -> jax.Array:
        if logits:
            return nnx.cross_entropy(features @ kernel, labels)
        return nnx.linear_cross_entropy(features, kernel, labels)

    options = OPTIONS if jax.default_backend() == "gpu" else None
    step = jax.jit(jax.value_and_grad(loss_fn, (0, 1)), compiler_options=options)
    return Contender(lambda: step(features, kernel)[0], jax.block_until_ready, peak)


def peak() -> int:
    """Returns the most memory that this process had in use on the device."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def make_theirs(run: Run, *, lora: bool) -> Contender:
    """Makes a step of transformers."""
    from benchmarks.gpu import torch_finetune

    return Contender(*torch_finetune.make(run, RATE, RANK if lora else None))


CONTENDERS: dict[str, dict[str, Callable[[Run], Contender]]] = {
    "lora": {
        "nnx": functools.partial(make_ours, lora=True),
        "nnx, list": functools.partial(make_ours, lora=True, scan_layers=False),
        "nnx, int8 weights": functools.partial(make_ours, lora=True, bits=8),
        "transformers": functools.partial(make_theirs, lora=True),
    },
    "full": {
        "nnx": functools.partial(make_ours, lora=False),
        "nnx, fp8": functools.partial(make_ours, lora=False, product=nnx.fp8_dot_general),
        "transformers": functools.partial(make_theirs, lora=False),
    },
    "loss": {
        "nnx": functools.partial(make_loss, logits=False),
        "nnx, logits": functools.partial(make_loss, logits=True),
    },
}


def measure(contender: Contender, seconds: float) -> dict[str, float]:
    """Returns the seconds of a step and of compiling, the peak of memory in bytes, and the first and the last loss."""

    def timed(count: int) -> tuple[float, Any]:
        began, loss = time.perf_counter(), None
        for _ in range(count):
            loss = contender.step()
        contender.wait(loss)
        return (time.perf_counter() - began) / count, loss

    first, first_loss = timed(1)
    first_loss = float(first_loss)
    once, _ = timed(2)
    turns = [timed(max(1, round(seconds / 4 / once))) for _ in range(4)]
    step = sorted(turn for turn, _ in turns)[1]
    found = {"step": step, "compile": first - step, "peak": float(contender.peak())}
    return found | {"first_loss": first_loss, "last_loss": float(turns[-1][1])}


def measured_alone(kind: str, name: str, tiny: bool, seconds: float) -> dict[str, float] | None:
    """Measures a contender in a process of its own; None, with what it said, if that failed."""
    command = [sys.executable, "-m", "benchmarks.gpu.finetune", "--alone", kind, name, "--seconds", str(seconds)]
    done = subprocess.run(command + ["--tiny"] * tiny, capture_output=True, text=True)
    if done.returncode:
        print(f"{kind}, {name}: failed\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CONTENDERS, help="one kind of fine-tuning")
    parser.add_argument("--without", action="append", default=[], help="leave this contender out")
    parser.add_argument("--tiny", action="store_true", help="a tiny model; the default without a GPU")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long to measure each contender")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIRECTORY", help="write a record of each kind")
    parser.add_argument("--alone", nargs=2, metavar=("KIND", "NAME"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        os.environ.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)
        kind, name = args.alone
        print(json.dumps(measure(CONTENDERS[kind][name](SMALL if args.tiny else WHOLE), args.seconds)))
        return 0
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # this process names the GPU in records and leaves it alone
    ask = "import jax; print(jax.default_backend())"  # in this process, the answer would take the GPU's memory
    asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    has_gpu = asked.stdout.strip() == "gpu"
    tiny = args.tiny or not has_gpu
    run, seconds = (SMALL, min(args.seconds, 0.2)) if tiny else (WHOLE, args.seconds)
    has_peer = has_gpu and all(importlib.util.find_spec(package) for package in ("torch", "transformers"))
    left_out = {*args.without, *(() if has_peer else ("transformers",))}
    for kind, contenders in CONTENDERS.items():
        if args.only not in (None, kind):
            continue
        print(f"\n{kind}, {run.sizes.layers} layers of {run.sizes.width}, {run.rows} × {run.length} tokens\n")
        print("| contender         | tokens/s | ms per step | compile, s | peak GiB | first loss | last loss |")
        print("|-------------------|---------:|------------:|-----------:|---------:|-----------:|----------:|")
        rows: dict[str, dict[str, float]] = {}
        for name in contenders:
            found = None if name in left_out else measured_alone(kind, name, tiny, seconds)
            if found is None:
                continue
            speed = run.rows * run.length / found["step"]
            rows[name] = {**found, "speed": speed, "peak": found["peak"] / 2**30}
            print(
                f"| {name:<17} | {speed:>8,.0f} | {1e3 * found['step']:>11.1f} | {found['compile']:>10.1f} "
                f"| {rows[name]['peak']:>8.1f} | {found['first_loss']:>10.3f} | {found['last_loss']:>9.3f} |",
                flush=True,
            )
            if args.out:
                write(args.out, kind, rows, whole=not tiny and len(rows) == len(contenders))
    return 0


def write(out: pathlib.Path, kind: str, rows: dict[str, dict[str, float]], whole: bool) -> None:
    figures = {
        entry: record.row(unit, {name: row[entry] for name, row in rows.items()})
        for entry, unit in {"speed": "tokens/s", "compile": "s", "peak": "GiB"}.items()
    }
    name, command = f"gpu_finetune_{kind}", f"python -m benchmarks.gpu.finetune --only {kind}"
    record.write(out / f"{name}.json", record.make_record(name, command, figures, whole=whole))


if __name__ == "__main__":
    sys.exit(main())
