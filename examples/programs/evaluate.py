"""Measures a published decoder: perplexity of texts, and multiple choice by likelihood.

    python examples/programs/evaluate.py DIRECTORY --text book.txt notes.md
    python examples/programs/evaluate.py DIRECTORY --choices questions.jsonl
    python examples/programs/evaluate.py DIRECTORY --dtype bfloat16 --bits 8      as it would be served
    python examples/programs/evaluate.py        the model of finetune.py, on sums that it has not seen

*Perplexity* is the exponential of the mean loss per token. A long text is read in windows; each token is counted once,
with at least half a window before it. Bits per byte compare models whose tokenizers differ.

*Multiple choice* takes one question per line, `{"question": "...", "choices": ["...", "..."], "answer": 0}`. The model
answers with the choice that it finds most likely after the question, in sum or per character ("normalized"), as is
customary. Choices are continuations of a plain text, or with `--chat` the answers in the model's chat template.
"""

import argparse
import json
import math
import pathlib
import time
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

here = pathlib.Path(__file__).parent
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("directory", type=pathlib.Path, nargs="?", default=here.parent / "output" / "finetune" / "model")
parser.add_argument("--text", type=pathlib.Path, nargs="+", default=[], help="files whose perplexity to measure")
parser.add_argument("--choices", type=pathlib.Path, help="a file of questions, one JSON object per line")
parser.add_argument("--chat", action="store_true", help="ask in the chat template; always so for the default sums")
parser.add_argument("--window", type=int, default=1024, help="tokens of a text to read at once")
parser.add_argument("--batch", type=int, default=32, help="windows or choices to read at once")
parser.add_argument("--dtype", help="the dtype of the weights; by default that of the files")
parser.add_argument("--bits", type=int, choices=(4, 8), help="quantize the weights")
parser.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = parser.parse_args()

tokenizer = nnx.models.Tokenizer.from_pretrained(args.directory)
model = nnx.models.from_pretrained(args.directory, dtype=args.dtype)
if args.bits:
    nnx.quantize(model, args.bits)
window = min(args.window, model.max_length or args.window)
print(f"{nnx.count_params(model):,} parameters, {jax.devices()[0].device_kind}")


@nnx.jit
def losses(model: nnx.models.Decoder, tokens: Any, counted: Any) -> jax.Array:
    """Returns the sum of the losses of the counted tokens of each row; `[rows, length]` both."""
    features, kernel, cap = model.features(tokens[:, :-1]), model.head_kernel, model.config.logits_soft_cap

    def mean(features: jax.Array, targets: jax.Array, counted: jax.Array) -> jax.Array:
        return nnx.linear_cross_entropy(features, kernel, targets, mask=counted, soft_cap=cap)

    return jax.vmap(mean)(features, tokens[:, 1:], counted[:, 1:]) * counted[:, 1:].sum(-1)


def summed(rows: list[list[int]], starts: list[int], length: int) -> Iterator[float]:
    """Yields for each row the loss of its tokens from a start on; rows are padded, so that all have one shape."""
    place = np.arange(length)
    for first in range(0, len(rows), args.batch):
        part = rows[first : first + args.batch]
        tokens = np.zeros((args.batch, length), np.int32)
        counted = np.zeros((args.batch, length), bool)
        for i, row in enumerate(part):
            tokens[i, : len(row)] = row
            counted[i] = (place >= starts[first + i]) & (place < len(row))
        yield from np.asarray(losses(model, tokens, counted), np.float64)[: len(part)]


def perplexity(file: pathlib.Path) -> None:
    text = file.read_text(encoding="utf-8", errors="replace")
    tokens = tokenizer.encode(text)
    assert len(tokens) > 1, f"{file} is empty"
    length = min(window, len(tokens))
    step = max(1, length // 2)
    rows, starts, end = [], [], 0
    while end < len(tokens):  # each window counts what the one before it did not reach
        begin = max(0, min(end - length + step, len(tokens) - length)) if end else 0
        rows.append(tokens[begin : begin + length])
        starts.append(max(1, end - begin))
        end = begin + length
    total = sum(summed(rows, starts, length))
    count, size = len(tokens) - 1, len(text.encode())
    bits = total / size / math.log(2)
    print(f"{file.name:<24} {math.exp(total / count):>10.3f} {bits:>14.4f} {count:>10,} tokens")


def sums(count: int) -> list[dict]:
    """Returns sums with three wrong results each, of the questions that finetune.py holds out."""
    random, found = np.random.default_rng(0), []
    while len(found) < count:
        a, b = random.integers(0, 100, 2).tolist()
        question = f"{a} + {b} = ?"
        if zlib.crc32(question.encode()) % 10 == 0:
            choices = {a + b: None} | {max(0, a + b + d): None for d in random.permutation([-10, -1, 1, 10]).tolist()}
            choices = random.permutation(list(choices)[:4]).tolist()
            answer = choices.index(a + b)
            found.append({"question": question, "choices": [str(choice) for choice in choices], "answer": answer})
    return found


def multiple_choice(questions: list[dict], chat: bool) -> float:
    rows, starts, sizes = [], [], []
    for each in questions:
        if chat:
            before = tokenizer.chat([{"role": "user", "content": each["question"]}])
        else:
            before = tokenizer.encode(each["question"])
        for choice in each["choices"]:
            after = tokenizer.encode(choice if chat else " " + choice, add_special_tokens=False)
            after += tokenizer.stop_tokens[:1] if chat else []  # an answer that goes on is another answer
            rows.append(before + after)
            starts.append(len(before))
            sizes.append(len(choice))
    longest = max(map(len, rows))
    assert longest <= (model.max_length or longest), f"a question of {longest} tokens is too long for this model"
    found = -np.array(list(summed(rows, starts, 32 * -(-longest // 32))))  # [choices of all questions]
    splits = np.cumsum([len(each["choices"]) for each in questions])[:-1]
    answers = [each["answer"] for each in questions]
    results = {}
    for name, scores in (("likeliest", found), ("likeliest, normalized", found / np.array(sizes))):
        chosen = [int(part.argmax()) for part in np.split(scores, splits)]
        results[name] = float(np.mean([c == a for c, a in zip(chosen, answers)]))
        print(f"{name:<24} {results[name]:>10.1%} of {len(questions):,} questions")
    chance = np.mean([1 / len(each["choices"]) for each in questions])
    print(f"{'by chance':<24} {chance:>10.1%}")
    return results["likeliest"]


began, result = time.perf_counter(), None
if args.text:
    print(f"{'':<24} {'perplexity':>10} {'bits per byte':>14}")
    for file in args.text:
        perplexity(file)
if args.choices:
    result = multiple_choice([json.loads(line) for line in args.choices.read_text().splitlines() if line], args.chat)
elif not args.text:
    result = multiple_choice(sums(40 if args.smoke else 500), chat=True)
print(f"{time.perf_counter() - began:.1f} s")
if result is not None:
    print(f"final accuracy: {result:.3f}")
