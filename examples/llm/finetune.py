"""Fine-tunes a published model on text with LoRA, and writes it again as a directory that `transformers` loads.

    python examples/llm/finetune.py DIRECTORY
    python examples/llm/finetune.py DIRECTORY --text mine.txt --output tuned --rank 16 --steps 500

Low-rank adapters are added to attention and MLP of every layer, and only those are trained; the published weights stay
as they are, in the dtype of the files. The adapters are saved by themselves, which takes little space, then merged into
the weights, and the whole model is written with `save_pretrained`, next to its tokenizer. The default text is Python's
own documentation.
"""

import argparse
import pathlib
import shutil
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("directory", type=pathlib.Path)
parser.add_argument("--text", type=pathlib.Path, help="a file to learn from")
parser.add_argument("--output", type=pathlib.Path, help="where the result goes; DIRECTORY-finetuned by default")
parser.add_argument("--rank", type=int, default=8, help="of the adapters")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=8, help="texts per step")
parser.add_argument("--length", type=int, default=256, help="tokens per text")
parser.add_argument("--rate", type=float, default=1e-3, help="the highest learning rate")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
output = args.output or args.directory.with_name(args.directory.name + "-finetuned")

# The data: one long row of tokens. The last tenth is held out.

tokenizer = nnx.models.Tokenizer.from_pretrained(args.directory)
text = args.text.read_text() if args.text else "\n".join(topic for _, topic in sorted(topics.items()))
tokens = np.array(tokenizer.encode(text), np.int32)
split = len(tokens) * 9 // 10
train, held_out = tokens[:split], tokens[split:]
assert len(held_out) > args.length, f"{len(tokens):,} tokens are too few for texts of {args.length}"


def batch_of(data: np.ndarray, seed: int) -> jax.Array:
    starts = np.random.default_rng(seed).integers(0, len(data) - args.length, args.batch)
    return jnp.asarray(data[starts[:, None] + np.arange(args.length + 1)])  # [batch, length + 1]


# The model. The optimizer's state covers the adapters only.

model = nnx.models.from_pretrained(args.directory)
whole = nnx.count_params(model)
paths = nnx.add_lora(model, args.rank, where="layers/**", ctx=nnx.context(args.seed))
small = nnx.count_params(model, nnx.LoRAParam)
print(f"{len(train):,} tokens to learn from; {small:,} parameters in {len(paths)} adapters next to {whole:,}")

schedule = optax.warmup_cosine_decay_schedule(0.0, args.rate, max(1, args.steps // 20), args.steps)
optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=0.0), wrt=nnx.LoRAParam)


def loss_fn(model: nnx.models.Decoder, tokens: jax.Array) -> jax.Array:
    features = model.features(tokens[:, :-1])  # [batch, length, features]; the logits are never all in memory
    cap = model.config.logits_soft_cap
    return nnx.linear_cross_entropy(features, model.head_kernel, tokens[:, 1:], soft_cap=cap)


@nnx.jit(donate_argnums=0)
def train_step(optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn, wrt=optimizer.wrt)(optimizer.model, tokens)
    optimizer.update(grads)
    return loss


eval_loss = nnx.jit(loss_fn)
held_out_batches = [batch_of(held_out, seed) for seed in range(4)]


def held_out_loss() -> float:
    return float(np.mean([eval_loss(model, tokens) for tokens in held_out_batches]))


before = held_out_loss()
every = max(1, args.steps // 10)
for step in range(args.steps):
    loss = train_step(optimizer, batch_of(train, step))
    if (step + 1) % every == 0:
        print(f"step {step + 1:5}   loss {float(loss):.3f}", flush=True)
after = held_out_loss()
print(f"held-out loss: {before:.3f} before, {after:.3f} after")
assert after < before, "the loss did not fall"

# The adapters by themselves, then the whole model in its published form. `transformers` and `chat.py` read the result.

nnx.save(output / "adapters", model.filter(nnx.LoRAParam))
nnx.merge_lora(model)
nnx.models.save_pretrained(model, output)
for pattern in ("tokenizer*", "special_tokens_map.json", "chat_template.jinja", "generation_config.json"):
    for file in args.directory.glob(pattern):
        shutil.copy(file, output)
print(f"written to {output}")
print(f"final held-out loss: {after:.3f}")
