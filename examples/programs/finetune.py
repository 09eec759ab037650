"""Teaches a decoder a task from questions and answers, and writes it as a directory that `transformers` loads.

    python examples/programs/finetune.py                        a small model that knows nothing learns to add
    python examples/programs/finetune.py DIRECTORY              a published model: all of its weights
    python examples/programs/finetune.py DIRECTORY --how lora   low-rank adapters only
    python examples/programs/finetune.py DIRECTORY --how int8   the same, on weights stored in 8 bits
    python examples/programs/finetune.py DIRECTORY --chats mine.jsonl    your own data
    python examples/programs/finetune.py DIRECTORY --task reverse

DIRECTORY holds a decoder as it is published, with its tokenizer and a chat template. Without one, the program makes a
small Llama that spells its words, writes it in the published form, and reads it again. The data are made here as well:
sums of two numbers, or words to spell backward, as chats. A line of your own is {"question": "...", "answer": "..."}.
Only the tokens of the answers count in the loss. Accuracy is the share of held-out questions that the model answers
exactly, before and after.

Checkpoints and figures go to examples/output/finetune/, the model to examples/output/finetune/model/, and adapters by
themselves to examples/output/finetune/adapters/. `grpo.py` and `evaluate.py` go on from the model.
"""

import argparse
import itertools
import json
import pathlib
import shutil
import string
import time
import zlib
from typing import Any

import jax
import numpy as np
import optax
import tokenizers

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("directory", type=pathlib.Path, nargs="?", help="a published decoder")
parser.add_argument("--how", choices=("full", "lora", "int8"), default="full", help="which weights to train")
parser.add_argument("--task", choices=("add", "reverse"), default="add")
parser.add_argument("--chats", type=pathlib.Path, help="a file of questions and answers to learn from instead")
parser.add_argument("--highest", type=int, default=99, help="the largest number to add")
parser.add_argument("--steps", type=int, help="300 if not given")
parser.add_argument("--batch", type=int, default=128, help="chats per step")
parser.add_argument("--rank", type=int, default=16, help="of the adapters")
parser.add_argument("--rate", type=float, help="the highest learning rate; by default, one for the way and the size")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
parser.add_argument("--output", type=pathlib.Path, help="where everything goes")
parser.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = parser.parse_args()
args.steps = args.steps or (30 if args.smoke else 300)
name = "finetune-smoke" if args.smoke else "finetune"
output = args.output or pathlib.Path(__file__).parent.parent / "output" / name
if not args.resume:
    shutil.rmtree(output / "checkpoints", ignore_errors=True)
    (output / "metrics.jsonl").unlink(missing_ok=True)

# A model to begin with, if there is none: a tokenizer of single characters and a Llama of random weights.

TEMPLATE = (
    "<s>{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<user>", "<assistant>"]


def write_small_model(folder: pathlib.Path) -> None:
    letters = [*SPECIAL, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    config = nnx.models.DecoderConfig(
        model_type="llama",
        vocab_size=len(letters),
        features=32 if args.smoke else 128,
        hidden_features=64 if args.smoke else 384,
        num_layers=2 if args.smoke else 3,
        num_heads=4,
        max_length=128,
        tie_embeddings=True,
    )
    nnx.models.save_pretrained(nnx.models.Decoder(config, ctx=nnx.context(args.seed)), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))


directory = args.directory or output / "small"
if args.directory is None and not (args.resume and directory.exists()):
    write_small_model(directory)
tokenizer = nnx.models.Tokenizer.from_pretrained(directory)
stops = tokenizer.stop_tokens

# The data: questions and answers. One question in ten is held out, by its content, so that none occurs in both parts.

lines = args.chats.read_text(encoding="utf-8").splitlines() if args.chats else []
chats = [(chat["question"], chat["answer"]) for chat in map(json.loads, lines)]


def ask(random: np.random.Generator) -> tuple[str, str]:
    if chats:
        return chats[random.integers(len(chats))]
    if args.task == "add":
        a, b = random.integers(0, args.highest + 1, 2).tolist()
        return f"{a} + {b} = ?", str(a + b)
    word = "".join(random.choice(list(string.ascii_lowercase), random.integers(3, 8)).tolist())
    return f"Spell {word} backward.", word[::-1]


def is_held_out(question: str) -> bool:
    return zlib.crc32(question.encode()) % 10 == 0  # a hash: any rule in the digits is one that the model could learn


def questions(seed: int, count: int) -> list[tuple[str, str]]:
    """Returns questions to learn from, and their answers."""
    random = np.random.default_rng(seed)
    found = (ask(random) for _ in itertools.count())
    return list(itertools.islice((pair for pair in found if not is_held_out(pair[0])), count))


def prompt_of(question: str) -> list[int]:
    return tokenizer.chat([{"role": "user", "content": question}])


def tokens_of(answer: str) -> list[int]:
    return [*tokenizer.encode(answer, add_special_tokens=False), stops[0]]


some = chats or questions(args.seed, 200)
ANSWER = max(len(tokens_of(answer)) for _, answer in some) + 3  # tokens, with room
LENGTH = 8 * -(-(max(len(prompt_of(question)) for question, _ in some) + ANSWER) // 8)


def padded(rows: list[list[int]], length: int) -> np.ndarray:
    assert max(map(len, rows)) <= length, f"a chat of {max(map(len, rows))} tokens does not fit into {length}"
    return np.array([row + [0] * (length - len(row)) for row in rows], np.int32)


def batch_of(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns chats `[batch, LENGTH]`, and where the tokens of answers are, with the one that ends them."""
    asked = questions((args.seed + 1) * 1_000_003 + step, args.batch)
    pairs = [(prompt_of(question), tokens_of(answer)) for question, answer in asked]
    tokens = padded([prompt + answer for prompt, answer in pairs], LENGTH)
    place = np.arange(LENGTH)
    starts, ends = np.array([[len(p), len(p) + len(a)] for p, a in pairs]).T[..., None]
    return tokens, (place >= starts) & (place < ends)


# The model. With adapters, the optimizer's state covers the adapters only.

model = nnx.models.from_pretrained(directory, scan_layers=True, remat=args.directory is not None)
if args.how == "int8":
    nnx.quantize(model, 8)
if args.how != "full":
    nnx.add_lora(model, args.rank, where="layers/**", ctx=nnx.context(args.seed))
wrt = nnx.Param if args.how == "full" else nnx.LoRAParam
rate = args.rate or (min(2e-3, 0.25 / model.config.features) if args.how == "full" else 1e-3)
schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, args.steps // 20), args.steps)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.01))
optimizer = nnx.Optimizer(model, tx, wrt=wrt)
print(f"{nnx.count_params(model, wrt):,} of {nnx.count_params(model):,} parameters learn, in chats of {LENGTH} tokens")


def loss_fn(model: nnx.models.Decoder, tokens: jax.Array, answers: jax.Array) -> jax.Array:
    features = model.features(tokens[:, :-1])  # [batch, length, features]; the logits are never all in memory
    cap = model.config.logits_soft_cap
    return nnx.linear_cross_entropy(features, model.head_kernel, tokens[:, 1:], mask=answers[:, 1:], soft_cap=cap)


@nnx.jit(donate_argnums=0)
def train_step(optimizer: nnx.Optimizer, tokens: Any, answers: Any) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn, wrt=optimizer.wrt)(optimizer.model, tokens, answers)
    optimizer.update(grads)
    return loss


random = np.random.default_rng(args.seed)
asked = chats or [ask(random) for _ in range(640 if args.smoke else 5120)]
held_out = [pair for pair in asked if is_held_out(pair[0])]
assert held_out, "no question is held out: it takes a few dozen"


def accuracy() -> float:
    """Returns the share of held-out questions that the model answers exactly."""
    prompts = [prompt_of(question) for question, _ in held_out]
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = nnx.generate(
        model, padded(prompts, LENGTH), lengths=lengths, max_new_tokens=ANSWER, temperature=0, stop_tokens=stops
    )
    answers = [tokenizer.decode(row).strip() for row in np.asarray(tokens)]
    return float(np.mean([found == answer for found, (_, answer) in zip(answers, held_out)]))


manager = nnx.CheckpointManager(output / "checkpoints", every_steps=max(1, args.steps // 3), keep_last=1)
first = (manager.resume(optimizer) or 0) if args.resume else 0
before, began = accuracy(), time.perf_counter()
losses = []
with manager, nnx.TrainLog(args.steps, output, name="finetune", interval=5) as log:
    batches = (batch_of(step) for step in range(first, args.steps))
    for step, batch in enumerate(nnx.prefetch(batches), first):
        loss = train_step(optimizer, *batch)
        losses.append(loss)
        log(step, loss=loss)
        manager.save(step + 1, optimizer, force=step + 1 == args.steps)
losses = [float(loss) for loss in losses]
seconds, after = time.perf_counter() - began, accuracy()
print(f"{len(losses)} steps in {seconds:.0f} s; accuracy {before:.1%} before, {after:.1%} after")
for question, answer in held_out[:3]:
    print(f"  {question}  {answer}")

# The result in the published form. Adapters are multiplied into the weights, which takes full ones.

if args.how == "int8":
    nnx.dequantize(model)
if args.how != "full":
    nnx.save(output / "adapters", model.filter(nnx.LoRAParam))
    nnx.merge_lora(model)
nnx.models.save_pretrained(model, output / "model", files_from=directory)
print(f"written to {output / 'model'}")
assert first or len(losses) < 20 or np.mean(losses[-5:]) < np.mean(losses[:5]), "the loss did not fall"
print(f"final accuracy: {after:.3f}")
