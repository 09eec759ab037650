"""A small GPT learns English, one character at a time, from the documentation that comes with every Python.

    make demo                                          about two minutes on two CPU cores
    make demo ARGS="--steps 3000 --resume"             continue training from the last checkpoint
    make demo ARGS="--size medium --steps 5000"        a larger model, for a GPU

Prints the loss on held-out text next to that of a bigram table (how well the last character alone predicts the next
one), then samples text from the model. The checkpoint, metrics and a plot of the loss go to examples/output/demo/.
"""

import argparse
import math
import os
import pathlib
import shutil
import time
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpt.model import GPT, Config

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

SIZES = {  # layers, heads, width, context, batch
    "tiny": (2, 2, 64, 32, 16),
    "small": (4, 4, 128, 64, 12),
    "medium": (6, 6, 384, 256, 64),
}
STEPS = 800

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--size", choices=SIZES, default="small")
parser.add_argument("--steps", type=int, default=STEPS)
parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
parser.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = parser.parse_args()
if args.smoke:
    args.size, args.steps = "tiny", 40
layers, heads, width, context, batch = SIZES[args.size]
output = pathlib.Path(__file__).parent / "output" / ("demo-smoke" if args.smoke else f"demo-{args.size}")
began = time.perf_counter()

# The text. Topics quote each other, so duplicate paragraphs are dropped: training never sees held-out text.

paragraphs = list(dict.fromkeys("\n\n".join(topics.values()).split("\n\n")))
np.random.default_rng(0).shuffle(paragraphs)
text = "\n\n".join(paragraphs)
alphabet = sorted(set(text))
numbers = {character: number for number, character in enumerate(alphabet)}
data = np.array([numbers[character] for character in text], np.int32)
train, valid = np.split(data, [int(0.9 * len(data))])


def windows(data: np.ndarray, starts: np.ndarray) -> jnp.ndarray:
    return jnp.asarray(data[starts[:, None] + np.arange(context + 1)])  # [batch, context + 1]


def train_batch(step: int) -> jax.Array:
    return windows(train, np.random.default_rng(step).integers(0, len(train) - context, batch))


valid_batches = min(1 if args.smoke else 20, len(valid) // (batch * context + 1))
valid_windows = windows(valid, np.arange(valid_batches * batch) * context)

# The baseline: how often each character followed each other one, with add-one smoothing.

counts = np.ones((len(alphabet), len(alphabet)))
np.add.at(counts, (train[:-1], train[1:]), 1)
bigram = counts / counts.sum(axis=1, keepdims=True)
bigram_loss = -np.log(bigram[valid_windows[:, :-1], valid_windows[:, 1:]]).mean()

# The model

model = GPT(Config(len(alphabet), context, layers, heads, width), ctx=nnx.context(0))
schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, args.steps // 20, args.steps, 1e-4)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=0.1))
optimizer = nnx.Optimizer(model, tx)


def loss_fn(model: GPT, tokens: jax.Array) -> jax.Array:
    logits = model(tokens[:, :-1])  # [batch, context, vocab]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit(donate_argnums=0)
def train_step(optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model, tokens)
    optimizer.update(grads)
    return loss


eval_loss = nnx.jit(loss_fn)


def held_out_loss(model: GPT) -> float:
    groups = valid_windows.reshape(-1, batch, context + 1)
    return float(np.mean([eval_loss(model, group) for group in groups]))


checkpoint = output / "checkpoint"
if args.resume and checkpoint.exists():
    nnx.load(checkpoint, optimizer)
else:
    shutil.rmtree(output, ignore_errors=True)
start = int(optimizer.step)
print(
    f"{len(train):,} characters to learn from, {len(valid):,} held out; {nnx.count_params(model):,} parameters in "
    f"{layers} layers; {jax.devices()[0].device_kind}; steps {start} to {args.steps}"
)

# Training

every = max(1, args.steps // 12)
first_loss = held_out_loss(model)
with nnx.TrainLog(total=args.steps, path=output, name="demo", interval=5) as log:
    for step in range(start, args.steps):
        loss = train_step(optimizer, train_batch(step))
        if (step + 1) % every == 0 or step + 1 == args.steps:
            log(step, loss=loss, held_out_loss=held_out_loss(model))
            nnx.save(checkpoint, optimizer)
        else:
            log(step, loss=loss)

# Sample text. A text can be longer than the model's context: it then continues from its last half.

half = context // 2
texts = valid_windows[:2, :half]  # [2, half]: a real beginning, which the model continues
ctx = nnx.context(sample=0)
for _ in range(2 if args.smoke else 10):
    more = nnx.generate(model, texts[:, -half:], max_new_tokens=half, temperature=0.7, ctx=ctx)
    texts = jnp.concatenate([texts, more], axis=1)
for row in np.asarray(texts):
    characters = [alphabet[number] for number in row]
    print("\n" + "".join(characters[:half]) + " ▶ " + "".join(characters[half:]) + "\n" + 60 * "-")

final_loss = held_out_loss(model)

# The same model with its matrices as integers of 8 and 4 bits

print(f"\nperplexity per character on held-out text: {math.exp(final_loss):.4f}", end="")
for bits in (8, 4):
    small = model.clone()
    nnx.quantize(small, bits)
    rounded_loss = held_out_loss(small)
    print(f", {math.exp(rounded_loss):.4f} in int{bits}", end="")
    assert rounded_loss < final_loss + {8: 0.005, 4: 0.2}[bits], (bits, rounded_loss, final_loss)
print()

blind_loss = math.log(len(alphabet))
seconds = time.perf_counter() - began
print(f"\nheld-out loss {final_loss:.3f}; bigram baseline {bigram_loss:.3f}; guessing blindly {blind_loss:.3f}")
print(f"{seconds:.0f} seconds; checkpoint, metrics and loss.png are in {os.path.relpath(output)}")
if args.smoke:
    assert final_loss < 0.9 * first_loss, (final_loss, first_loss)
elif args.steps >= STEPS:
    assert final_loss < 0.8 * bigram_loss, (final_loss, bigram_loss)
print(f"final held-out loss: {final_loss:.3f}")
