"""Writes text with a model trained by train.py, one byte at a time, with `nnx.generate`.

    python examples/gpt/sample.py
    python examples/gpt/sample.py --size mini --prompt "class " --length 500 --temperature 0.7

The text after ▶ is written by the model. A text can be longer than the model's context: it then continues from its
last half.
"""

import argparse
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from model import GPT, Config

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--size", default="gpt2" if jax.default_backend() == "gpu" else "tiny", help="as in train.py")
parser.add_argument("--prompt", default="def ")
parser.add_argument("--length", type=int, default=300, help="how many bytes to write")
parser.add_argument("--number", type=int, default=2, help="how many texts")
parser.add_argument("--temperature", type=float, default=0.8, help="values below 1 favor likely bytes")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--smoke", action="store_true", help="use the checkpoint of train.py --smoke")
args = parser.parse_args()
if args.smoke:
    args.length = 96
folder = pathlib.Path(__file__).parent.parent / "output" / ("gpt-smoke" if args.smoke else f"gpt-{args.size}")

# The checkpoint holds the optimizer, which contains the model. Only the model is needed.

config = Config(**json.loads((folder / "config.json").read_text()))
model = GPT(config, ctx=nnx.context(0))
manager = nnx.CheckpointManager(folder / "checkpoints")
report = nnx.LoadReport()
manager.load({"model": model}, strict=False, report=report)
assert not report.missing and not report.mismatched, report

half = config.context // 2
prompt = np.frombuffer(args.prompt.encode()[-half:], np.uint8).astype(np.int32)
texts = jnp.tile(prompt, (args.number, 1))  # [number, length so far]
ctx = nnx.context(sample=args.seed)
while texts.shape[1] < len(prompt) + args.length:
    more = nnx.generate(model, texts[:, -half:], max_new_tokens=half, temperature=args.temperature, ctx=ctx)
    texts = jnp.concatenate([texts, more], axis=1)
texts = texts[:, : len(prompt) + args.length]

for row in np.asarray(texts):
    written = bytes(row[len(prompt) :].tolist()).decode(errors="replace")
    print(f"{args.prompt}▶{written}\n{60 * '-'}")
print(f"final step of the checkpoint: {manager.latest_step()}")
