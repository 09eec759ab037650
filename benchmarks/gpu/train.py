"""Training steps per second: nnx, hand-written JAX and PyTorch, interleaved in one process.

    python -m benchmarks.gpu.train                  GPT-2 small, batches of 32 × 1024 tokens, on a GPU
    python -m benchmarks.gpu.train --model llama    a Llama of 350 million parameters, 16 × 1024 tokens
    python -m benchmarks.gpu.train --tiny           the default without a GPU: a tiny model, to see that it runs
    python -m benchmarks.gpu.train --seconds 60     measure longer
    python -m benchmarks.gpu.train --without torch.compile  leave a contender out
    python -m benchmarks.gpu.train --autotune       PyTorch with `max_autotune` as well, which compiles for minutes
    python -m benchmarks.gpu.train --clock 1200     hold the GPU at 1,200 MHz, which takes root
    python -m benchmarks.gpu.train --out FILE.json  write a record (see benchmarks/record.py)

All contenders compute in bfloat16 with float32 parameters, and use AdamW. Tokens are random, because speed does not
depend on them. For GPT-2, the JAX steps start from the same weights, and therefore from the same loss. "The same,
tuned" is hand-written JAX with the changes that the performance page explains (see raw_train.py): any remaining
difference to nnx is the library's. PyTorch takes part if it is installed and there is a GPU.

A GPU at its power limit lowers its clock, and a step that needs more energy lowers it further. With `--clock`, all
contenders run at the same clock, far from the limit, so that only the work itself is compared.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.55")  # the rest of the memory is for PyTorch

import jax
import jax.numpy as jnp
import optax

import nnx
from benchmarks import record
from benchmarks.gpu import raw_train as raw
from benchmarks.harness import interleave
from examples.gpt.model import GPT, GPU_OPTIONS, Config, decayed

RATE, DECAY = 6e-4, 0.1


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is measured: a model and batches of `batch × context` tokens. A `base` makes it a Llama."""

    config: Config
    batch: int
    hidden: int
    base: float | None = None


SETTINGS = {
    "gpt2": Setting(Config(vocab=50304, dtype=jnp.bfloat16, unroll=12), batch=32, hidden=3072),
    "llama": Setting(Config(32000, 1024, 24, 16, 1024, dtype=jnp.bfloat16), batch=16, hidden=2816, base=10000.0),
}
TINY = Config(vocab=64, context=16, layers=1, heads=2, width=32, dtype=jnp.bfloat16)
TINY_SETTINGS = {"gpt2": Setting(TINY, batch=2, hidden=128), "llama": Setting(TINY, batch=2, hidden=64, base=10000.0)}


def random_tokens(setting: Setting) -> jax.Array:
    shape = (setting.batch, setting.config.context + 1)
    return jax.random.randint(jax.random.key(1), shape, 0, setting.config.vocab)


def adamw(mask: Any) -> optax.GradientTransformation:
    return optax.adamw(RATE, b2=0.95, weight_decay=DECAY, mask=mask)


def make_model(setting: Setting) -> Any:
    """Makes the model of examples/gpt, or a Decoder of `nnx.models`."""
    config = setting.config
    if setting.base is None:
        return GPT(config, ctx=nnx.context(0))
    llama = nnx.models.DecoderConfig(
        model_type="llama",
        vocab_size=config.vocab,
        features=config.width,
        hidden_features=setting.hidden,
        num_layers=config.layers,
        num_heads=config.heads,
        max_length=config.context,
        rotary=nnx.models.RotaryConfig(base=setting.base),
        tie_embeddings=True,
    )
    return nnx.models.Decoder(llama, dtype=config.dtype, ctx=nnx.context(0))


def make_ours(setting: Setting) -> Callable[[], jax.Array]:
    """Makes the training step of an nnx model."""
    model = make_model(setting)
    optimizer = nnx.Optimizer(model, adamw(decayed))
    tokens = random_tokens(setting)

    @nnx.jit(donate_argnums=0, compiler_options=GPU_OPTIONS)
    def train_step(optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
        def loss_fn(model: Any) -> jax.Array:
            return nnx.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

        loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model)
        optimizer.update(grads)
        return loss

    return lambda: train_step(optimizer, tokens)


def make_raw(setting: Setting, tuned: bool = False) -> Callable[[], jax.Array]:
    """Makes the step over dicts, starting from the same weights."""
    params = raw.from_model(nested_params(GPT(setting.config, ctx=nnx.context(0))))
    tx = adamw(raw.decayed)
    opt_state = tx.init(params)
    options = GPU_OPTIONS if tuned else {"xla_gpu_enable_triton_gemm": False}
    step, tokens = raw.make_step(tx, tuned, options), random_tokens(setting)

    def run() -> jax.Array:
        nonlocal params, opt_state
        params, opt_state, loss = step(params, opt_state, tokens)
        return loss

    return run


def nested_params(model: GPT) -> dict[str, Any]:
    return model.filter(nnx.Param).map(lambda _, param: param.value).to_nested()


def make_torch(setting: Setting, **options: Any) -> Callable[[], Any]:
    """Makes the step in PyTorch."""
    from benchmarks.gpu.torch_train import Sizes, make_contender

    config = setting.config
    sizes = Sizes(config.vocab, config.context, config.layers, config.heads, config.width, setting.hidden, setting.base)
    return make_contender(sizes, setting.batch, RATE, DECAY, **options)


CONTENDERS: dict[str, Callable[[Setting], Callable[[], Any]]] = {
    "nnx": make_ours,
    "hand-written JAX": make_raw,
    "the same, tuned": functools.partial(make_raw, tuned=True),
    "torch.compile": make_torch,
    "torch, cuDNN": functools.partial(make_torch, cudnn=True),
    "torch, autotune": functools.partial(make_torch, options={"max_autotune": True}),
}
HAND_WRITTEN = {"hand-written JAX", "the same, tuned"}  # for GPT-2 only
TORCH = {"torch.compile", "torch, cuDNN", "torch, autotune"}


@contextlib.contextmanager
def held_clock(clock: int | None) -> Iterator[None]:
    """Holds the GPU at a clock in MHz until the block ends."""
    if clock is None:
        yield
        return
    subprocess.run(["nvidia-smi", f"--lock-gpu-clocks={clock},{clock}"], check=True)
    try:
        yield
    finally:
        subprocess.run(["nvidia-smi", "--reset-gpu-clocks"], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SETTINGS, default="gpt2")
    parser.add_argument("--tiny", action="store_true", help="a tiny model; the default without a GPU")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to measure, in all")
    parser.add_argument("--without", action="append", default=[], choices=CONTENDERS, help="leave this one out")
    parser.add_argument("--autotune", action="store_true", help="PyTorch with max_autotune as well")
    parser.add_argument("--clock", type=int, metavar="MHZ", help="hold the GPU at this clock")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write a record of the run")
    args = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    tiny = args.tiny or not on_gpu
    setting = (TINY_SETTINGS if tiny else SETTINGS)[args.model]
    left_out = set(args.without) | (set() if args.autotune else {"torch, autotune"})
    if not on_gpu or importlib.util.find_spec("torch") is None:
        left_out |= TORCH
    if setting.base is not None:
        left_out |= HAND_WRITTEN

    contenders = {name: make(setting) for name, make in CONTENDERS.items() if name not in left_out}
    first_losses = {name: float(run()) for name, run in contenders.items()}
    seconds = min(args.seconds, 0.5) if tiny else args.seconds
    with held_clock(args.clock):
        timings = interleave(contenders, seconds=seconds, turn=0.01 if tiny else 1.0, compared=len(contenders))

    config, tokens = setting.config, setting.batch * setting.config.context
    print(
        f"jax {jax.__version__}, {jax.devices()[0].device_kind}; {config.layers} layers, width {config.width}, "
        f"{setting.batch} × {config.context} tokens"
    )
    print(f"| {'':<18} | tokens/s, median turn | best turn | ms per step, median | first loss |")
    print(f"|{'-' * 20}|----------------------:|----------:|--------------------:|-----------:|")
    for name, timing in timings.items():
        median, best = tokens / timing.median, tokens / timing.best
        milliseconds, loss = 1e3 * timing.median, first_losses[name]
        print(f"| {name:<18} | {median:>21,.0f} | {best:>9,.0f} | {milliseconds:>19.2f} | {loss:>10.4f} |")
    if args.out:
        figures = {
            "tokens per second, median": record.row("tokens/s", {n: tokens / t.median for n, t in timings.items()}),
            "tokens per second, best": record.row("tokens/s", {n: tokens / t.best for n, t in timings.items()}),
            "first loss": record.row("nats", first_losses),
        }
        command = f"python -m benchmarks.gpu.train --model {args.model}{' --autotune' if args.autotune else ''}"
        name = f"gpu_train_{args.model}"
        if args.clock:
            command, name = f"{command} --clock {args.clock}", f"{name}_{args.clock}_mhz"
        whole = not tiny and not args.without
        record.write(args.out, record.make_record(name, command, figures, whole=whole))
    return 0


if __name__ == "__main__":
    sys.exit(main())
