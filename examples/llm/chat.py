"""Chats with a published model, in the terminal.

    python examples/llm/chat.py DIRECTORY
    python examples/llm/chat.py DIRECTORY --system "Answer in one sentence." --temperature 0

DIRECTORY holds a checkpoint as it is published: config.json, model.safetensors (or shards with an index),
tokenizer.json, and tokenizer_config.json with a chat template. Nothing is downloaded. An empty line ends the chat.
"""

import argparse
import pathlib
import time

import jax.numpy as jnp
import numpy as np

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("directory", type=pathlib.Path)
parser.add_argument("--system", help="instructions for the model, before the first message")
parser.add_argument("--max-new-tokens", type=int, default=512, help="the longest answer")
parser.add_argument("--temperature", type=float, default=0.7, help="0 always takes the most likely token")
parser.add_argument("--top-p", type=float, default=0.95)
parser.add_argument("--dtype", help="the dtype of the weights, such as bfloat16; by default that of the files")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

tokenizer = nnx.models.Tokenizer.from_pretrained(args.directory)
model = nnx.models.from_pretrained(args.directory, dtype=args.dtype)
ctx = nnx.context(sample=args.seed)
print(f"{nnx.count_params(model):,} parameters")


class Printer:
    """Prints an answer while its tokens arrive.

    A character can be made of several tokens, and some tokenizers join words only when they see both. So the whole
    answer is decoded each time, and what is new is printed, unless it ends within a character.
    """

    def __init__(self):
        self.tokens: list[int] = []
        self.text = ""

    def __call__(self, step: np.ndarray) -> None:
        if (token := int(step[0])) in tokenizer.stop_tokens:
            return
        self.tokens.append(token)
        text = tokenizer.decode(self.tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[len(self.text) :], end="", flush=True)
            self.text = text


messages = [{"role": "system", "content": args.system}] if args.system else []
while True:
    try:
        question = input("\n> ")
    except EOFError:
        break
    if not question:
        break
    messages.append({"role": "user", "content": question})
    prompt = jnp.array([tokenizer.chat(messages)])  # [1, length]
    printer, start = Printer(), time.perf_counter()
    nnx.generate(
        model,
        prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p if args.temperature else None,
        stop_tokens=tokenizer.stop_tokens,
        stream=printer,
        ctx=ctx,
    )
    seconds = time.perf_counter() - start
    answer = tokenizer.decode(printer.tokens)
    print(answer[len(printer.text) :])
    print(f"[{prompt.shape[1]} tokens read, {len(printer.tokens)} written in {seconds:.1f} s]")
    messages.append({"role": "assistant", "content": answer})
