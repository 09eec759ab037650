"""Trains a GPT with the shape of GPT-2 on text that comes with every Python: its documentation and library sources.

    python examples/gpt/train.py                                     GPT-2 small on a GPU, a tiny one on a CPU
    python examples/gpt/train.py --steps 2000 --resume               continue training from the last checkpoint
    python examples/gpt/train.py --size gpt2 --synthetic             random tokens and GPT-2's vocabulary: the speed
    python examples/gpt/sample.py                                    text from the last checkpoint

Tokens are bytes. Prints the loss, tokens per second and, on GPUs whose peak speed is known, the fraction of it that was
used (MFU). Checkpoints, metrics and a plot of the loss go to examples/output/gpt-SIZE/.
"""

import argparse
import dataclasses
import json
import pathlib
import shutil
import sysconfig
import time
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from model import GPT, GPU_OPTIONS, Config, decayed

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

on_gpu = jax.default_backend() == "gpu"
SIZES = {  # layers, heads, width, context, batch
    "tiny": (2, 2, 64, 64, 8),
    "mini": (6, 6, 384, 256, 64),
    "gpt2": (12, 12, 768, 1024, 32),
    "gpt2-medium": (24, 16, 1024, 1024, 16),
}
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bfloat16, from the vendor's data sheets

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--size", choices=SIZES, default="gpt2" if on_gpu else "tiny")
parser.add_argument("--batch", type=int, help="texts per step")
parser.add_argument("--length", type=int, help="tokens per text")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--rate", type=float, help="the highest learning rate")
parser.add_argument("--synthetic", action="store_true", help="random tokens and GPT-2's vocabulary, to measure speed")
parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
parser.add_argument("--no-checkpoint", action="store_true", help="save nothing")
parser.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = parser.parse_args()
if args.smoke:
    args.size, args.steps = "tiny", 60
layers, heads, width, length, batch = SIZES[args.size]
length, batch = args.length or length, args.batch or batch
rate = args.rate or min(3e-3, 0.5 / width)  # 6e-4 for GPT-2 small
name = "smoke" if args.smoke else args.size + ("-synthetic" if args.synthetic else "")
output = pathlib.Path(__file__).parent.parent / "output" / f"gpt-{name}"

# The data: bytes. Every twentieth file is held out, so that the loss is measured on text not seen in training.


def read_texts() -> tuple[bytes, bytes]:
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py"))
    if args.smoke:
        files = files[:40]
    else:
        files += sorted(path for path in library.glob("*/*.py") if path.parent.name not in ("test", "site-packages"))
    texts = [topic.encode() for _, topic in sorted(topics.items())] + [path.read_bytes() for path in files]
    return b"\n".join(t for i, t in enumerate(texts) if i % 20), b"\n".join(texts[::20])


if args.synthetic:
    vocab = 50304  # GPT-2's 50257, padded because products of whole tiles are faster
    train = np.random.default_rng(0).integers(0, vocab, 2_000_000, np.uint16)
    valid = np.random.default_rng(1).integers(0, vocab, 200_000, np.uint16)
else:
    vocab = 256
    train, valid = (np.frombuffer(text, np.uint8) for text in read_texts())


def windows(data: np.ndarray, starts: np.ndarray) -> jax.Array:
    return jnp.asarray(data[starts[:, None] + np.arange(length + 1)], jnp.int32)  # [batch, length + 1]


def train_batch(step: int) -> jax.Array:
    return windows(train, np.random.default_rng(step).integers(0, len(train) - length, batch))


valid_batches = max(1, min(2 if args.smoke else 10, len(valid) // (batch * length + 1)))
valid_starts = np.arange(valid_batches * batch) * length % (len(valid) - length)
valid_windows = [windows(valid, starts) for starts in valid_starts.reshape(-1, batch)]

# The model. On a GPU the products are bfloat16 and the attention is cuDNN's fused kernel; parameters are float32.

dtype = jnp.bfloat16 if on_gpu else None
config = Config(vocab, length, layers, heads, width, dtype=dtype, unroll=layers if on_gpu else 1)
model = GPT(config, ctx=nnx.context(0))

schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, args.steps // 20), args.steps, rate / 10)
adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=decayed)
optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), adamw))


def loss_fn(model: GPT, tokens: jax.Array) -> jax.Array:
    return nnx.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


@nnx.jit(donate_argnums=0, compiler_options=GPU_OPTIONS)  # donated: the new parameters take the memory of the old ones
def train_step(optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model, tokens)
    optimizer.update(grads)
    return loss


eval_loss = nnx.jit(loss_fn)


def held_out_loss() -> float:
    return float(np.mean([eval_loss(model, tokens) for tokens in valid_windows]))


# Speed: a token costs six operations per parameter (two of them forward), and twelve per layer, feature and position
# in attention, ignoring that causality halves it, as is customary.

flops_per_token = 6 * (nnx.count_params(model) - length * width) + 12 * layers * width * length
device = jax.devices()[0].device_kind
peak = next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in device), None)


def speed_text(tokens_per_second: float) -> str:
    mfu = f", MFU {tokens_per_second * flops_per_token / peak:.1%}" if peak else ""
    return f"{tokens_per_second:,.0f} tokens/s{mfu}"


# Training

manager = nnx.CheckpointManager(output / "checkpoints", keep_last=2)
if args.resume:
    manager.resume(optimizer)
else:
    shutil.rmtree(output, ignore_errors=True)
output.mkdir(parents=True, exist_ok=True)
settings = dataclasses.asdict(config) | {"dtype": None if dtype is None else jnp.dtype(dtype).name}
(output / "config.json").write_text(json.dumps(settings, indent=1))
start = int(optimizer.step)
print(
    f"{len(train):,} tokens to learn from, {len(valid):,} held out; {nnx.count_params(model):,} parameters in "
    f"{layers} layers; {batch} × {length} tokens a step; {device}; steps {start} to {args.steps}"
)

every = max(1, args.steps // (2 if args.smoke else 10))
first_loss = final_loss = held_out_loss()
speeds = []
began, counted = time.perf_counter(), 0  # the time since the last report, excluding the first step, which compiles
with nnx.TrainLog(total=args.steps, path=output, name="gpt", interval=5) as log:
    for step in range(start, args.steps):
        loss = train_step(optimizer, train_batch(step))
        counted += 1
        if step == start:
            loss.block_until_ready()
            began, counted = time.perf_counter(), 0
        if (step + 1) % every == 0 or step + 1 == args.steps:
            loss.block_until_ready()
            if counted:
                speeds.append(counted * batch * length / (time.perf_counter() - began))
            final_loss = held_out_loss()
            log(step, loss=loss, held_out_loss=final_loss)
            if not args.no_checkpoint:
                manager.save(step + 1, optimizer, overwrite=True)
            began, counted = time.perf_counter(), 0
        else:
            log(step, loss=loss)
manager.wait()

if speeds:
    print(f"median speed {speed_text(float(np.median(speeds)))}; best {speed_text(max(speeds))}")
if args.smoke and start == 0:
    assert final_loss < 0.8 * first_loss, (final_loss, first_loss)
print(f"final held-out loss: {final_loss:.3f}")
