"""Improves a decoder by reinforcement learning with rewards that a program can check (GRPO).

    python examples/programs/finetune.py --steps 240        first: a small model that can add a little
    python examples/programs/grpo.py                        and then: it gets better by trying
    python examples/programs/grpo.py DIRECTORY --steps 400 --prompts 256 --samples 16

Each step draws some sums, samples eight answers to each with `nnx.generate`, and rewards those that are exactly right.
An answer that is better than the mean of its group becomes more likely, a worse one less so. The policy is all that is
trained: a reward is computed, and the group says what was to be expected. The distance to the model it began with (KL)
is held small. Sampling and learning share one model and one memory: `generate` reads the same arrays that the optimizer
changes, and nothing is copied between them.

Curves of reward and KL, checkpoints and the model go to examples/output/grpo/.
"""

import argparse
import collections
import pathlib
import shutil
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

here = pathlib.Path(__file__).parent
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("directory", type=pathlib.Path, nargs="?", default=here.parent / "output" / "finetune" / "model")
parser.add_argument("--highest", type=int, default=99, help="the largest number to add, as it was in finetune.py")
parser.add_argument("--steps", type=int, help="160 if not given")
parser.add_argument("--prompts", type=int, default=64, help="questions per step")
parser.add_argument("--samples", type=int, default=8, help="answers to each of them")
parser.add_argument("--updates", type=int, default=2, help="parts of the answers to learn from one after the other")
parser.add_argument("--rate", type=float, default=3e-4, help="the highest learning rate")
parser.add_argument("--kl", type=float, default=0.02, help="the weight of the distance to the model at the beginning")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
parser.add_argument("--output", type=pathlib.Path, help="where everything goes")
parser.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = parser.parse_args()
args.steps = args.steps or (3 if args.smoke else 160)
output = args.output or here.parent / "output" / ("grpo-smoke" if args.smoke else "grpo")
if not args.resume:
    shutil.rmtree(output / "checkpoints", ignore_errors=True)
    (output / "metrics.jsonl").unlink(missing_ok=True)
NEW, CLIP = 8, 0.2  # tokens of an answer, and how far one step may move its probability

tokenizer = nnx.models.Tokenizer.from_pretrained(args.directory)
stops = tokenizer.stop_tokens

# The task, as in finetune.py: sums of two numbers. The check of an answer is the whole reward.


def ask(random: np.random.Generator, held_out: bool) -> tuple[list[int], str]:
    """Returns the tokens of a question, and the answer."""
    while True:
        a, b = random.integers(0, args.highest + 1, 2).tolist()
        question = f"{a} + {b} = ?"
        if (zlib.crc32(question.encode()) % 10 == 0) == held_out:
            return tokenizer.chat([{"role": "user", "content": question}]), str(a + b)


def draw(seed: int, count: int, held_out: bool = False) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Returns questions `[count, LENGTH]`, their lengths, and their answers."""
    random = np.random.default_rng(seed)
    prompts, answers = zip(*(ask(random, held_out) for _ in range(count)))
    tokens = np.array([prompt + [0] * (LENGTH - len(prompt)) for prompt in prompts], np.int32)
    return tokens, np.array([len(prompt) for prompt in prompts]), list(answers)


LENGTH = 8 * -(-max(len(ask(np.random.default_rng(i), False)[0]) for i in range(200)) // 8)


def rewards_of(tokens: np.ndarray, answers: list[str]) -> np.ndarray:
    """Returns 1 for each answer `[questions, samples, NEW]` that is exactly right, and ends."""
    right = [
        [tokenizer.decode(row).strip() == answer and bool(np.isin(row, stops).any()) for row in rows]
        for rows, answer in zip(tokens, answers)
    ]
    return np.array(right, np.float32)


# The model, and the one it began with, whose weights stay.

model = nnx.models.from_pretrained(args.directory)
reference = nnx.models.from_pretrained(args.directory)
total = args.steps * args.updates
schedule = optax.warmup_cosine_decay_schedule(0.0, args.rate, total // 10, total)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=0.0))
optimizer = nnx.Optimizer(model, tx)


def log_probabilities(model: nnx.models.Decoder, texts: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the log-probability of the token at each place `[rows, NEW]` of texts `[rows, length]`."""
    features = jnp.take_along_axis(model.features(texts), (places - 1)[..., None], axis=1)  # of the tokens before
    logits = nnx.log_softmax(model.logits(features).astype(jnp.float32))
    tokens = jnp.take_along_axis(texts, places, axis=1)
    return jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]


def loss_fn(model: nnx.models.Decoder, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    now = log_probabilities(model, batch["texts"], batch["places"])
    ratio = jnp.exp(now - batch["sampled"])
    better = batch["better"][:, None]
    gain = jnp.minimum(ratio * better, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * better)
    gap = batch["reference"] - now
    kl = jnp.exp(gap) - gap - 1  # never negative, and right on average
    used = batch["used"] / batch["used"].sum()
    return -(used * (gain - args.kl * kl)).sum(), (used * kl).sum()


look_up = nnx.jit(log_probabilities)


@nnx.jit(donate_argnums=0)
def train_step(optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    (loss, kl), grads = nnx.value_and_grad(loss_fn, has_aux=True)(optimizer.model, batch)
    optimizer.update(grads)
    return loss, kl


def accuracy() -> float:
    prompts, lengths, answers = draw(args.seed, 64 if args.smoke else 512, held_out=True)
    tokens = nnx.generate(model, prompts, lengths=lengths, max_new_tokens=NEW, temperature=0, stop_tokens=stops)
    return float(rewards_of(np.asarray(tokens)[:, None], answers).mean())


# One step: sample, score, learn. What each takes is counted, without the first step, which compiles.

manager = nnx.CheckpointManager(output / "checkpoints", every_steps=max(1, args.steps // 3), keep_last=1)
first = (manager.resume(optimizer) or 0) if args.resume else 0
before = accuracy()
spent: collections.Counter[str] = collections.Counter()
history: dict[str, list[float]] = {"reward": [], "KL": []}
with manager, nnx.TrainLog(args.steps, output, name="grpo", interval=5) as log:
    for step in range(first, args.steps):
        times = [time.perf_counter()]
        prompts, lengths, answers = draw((args.seed + 1) * 1_000_003 + step, args.prompts)
        tokens, sampled = nnx.generate(
            model,
            prompts,
            lengths=lengths,
            num_samples=args.samples,
            max_new_tokens=NEW,
            stop_tokens=stops,
            return_logprobs=True,
            ctx=nnx.context(sample=jax.random.fold_in(jax.random.key(args.seed), step)),
        )
        tokens = np.asarray(tokens)  # [prompts, samples, NEW]
        times.append(time.perf_counter())

        rewards = rewards_of(tokens, answers)
        better = rewards - rewards.mean(axis=1, keepdims=True)
        texts = np.zeros((*tokens.shape[:2], LENGTH + NEW), np.int32)
        texts[..., :LENGTH] = prompts[:, None]
        places = np.broadcast_to((lengths[:, None] + np.arange(NEW))[:, None], tokens.shape)
        np.put_along_axis(texts, places, tokens, axis=-1)
        ended = np.isin(tokens, stops)
        used = ended.cumsum(axis=-1) - ended == 0  # up to the first token that ends an answer
        batch = {"texts": texts, "places": places, "sampled": np.asarray(sampled), "better": better, "used": used}
        batch = {name: each.reshape(-1, *each.shape[2:]) for name, each in batch.items()}
        batch["reference"] = np.asarray(look_up(reference, batch["texts"], batch["places"]))
        times.append(time.perf_counter())

        parts = np.array_split(np.random.default_rng(step).permutation(rewards.size), args.updates)
        found = [train_step(optimizer, {name: each[rows] for name, each in batch.items()}) for rows in parts]
        loss, kl = np.mean(jax.block_until_ready(found), axis=0)
        times.append(time.perf_counter())
        if step > first:
            spent.update(dict(zip(("sampling", "scoring", "learning"), np.diff(times).tolist())))
        history["reward"].append(float(rewards.mean()))
        history["KL"].append(float(kl))
        log(step, loss=loss, reward=history["reward"][-1], kl=kl)
        manager.save(step + 1, optimizer, force=step + 1 == args.steps)

after, counted = accuracy(), max(1, len(history["KL"]) - 1)
print(", ".join(f"{phase} {1e3 * seconds / counted:.0f} ms" for phase, seconds in spent.items()), "per step")
print(f"accuracy on held-out questions: {before:.1%} before, {after:.1%} after")
nnx.models.save_pretrained(model, output / "model")

figure = Figure(figsize=(7, 2.6), layout="constrained")
for i, (name, values) in enumerate(history.items()):
    figure.add_subplot(1, 2, i + 1, xlabel="step", ylabel=name).plot(first + 1 + np.arange(len(values)), values)
figure.savefig(output / "curves.png", dpi=150)
assert args.smoke or after > 0.9 * before, (before, after)
print(f"final accuracy: {after:.3f}")
