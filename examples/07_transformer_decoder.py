"""A Transformer decoder with scan over layers and a KV cache that learns to write digits pixel by pixel.

A handwritten digit from scikit-learn is a sequence of 65 tokens: its label, then 64 pixels with 17 gray levels. The
layers are one Module with stacked parameters (`nnx.Scan`). New digits are drawn one token at a time, with the keys and
values of earlier tokens from the cache, and the results of the cache are checked against a full pass.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import nnx

args = argparse.ArgumentParser(description=__doc__)
args.add_argument("--steps", type=int, default=600)
args.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = args.parse_args()
steps = 30 if args.smoke else args.steps
LEVELS, LENGTH = 17, 64  # gray levels, pixels
LAYERS, HEADS, WIDTH = (2, 2, 32) if args.smoke else (3, 4, 64)

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
tokens = np.concatenate([LEVELS + digits.target[:, None], digits.data], axis=1).astype(np.int32)[order]  # [1797, 65]
train_tokens, test_tokens = tokens[:1600], tokens[1600:]


class Block(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.norm1 = nnx.LayerNorm(WIDTH, ctx=ctx)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, ctx=ctx)
        self.norm2 = nnx.LayerNorm(WIDTH, ctx=ctx)
        self.mlp = nnx.MLP(WIDTH, 4 * WIDTH, WIDTH, activation=nnx.gelu, ctx=ctx)

    def __call__(self, x: jax.Array, _, decode: bool):  # [batch, length, WIDTH]
        x = x + self.attention(self.norm1(x), is_causal=True, decode=decode)
        return x + self.mlp(self.norm2(x)), None


class Decoder(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.embed = nnx.Embed(LEVELS + 10, WIDTH, ctx=ctx)
        self.position = nnx.LearnedPositionEmbed(LENGTH, WIDTH, ctx=ctx)
        stacked = {(nnx.Param, nnx.Cache): 0}  # kernels: [LAYERS, ...]
        self.blocks = nnx.Scan(Block, variable_axes=stacked, split_rngs="params", length=LAYERS)(ctx=ctx)
        self.norm = nnx.LayerNorm(WIDTH, ctx=ctx)
        self.head = nnx.Linear(WIDTH, LEVELS, ctx=ctx)

    def __call__(self, tokens: jax.Array, *, decode: bool = False) -> jax.Array:  # [batch, length]
        cache = self.blocks.scan_module.attention.cache if decode else None
        positions = None if cache is None else cache.positions(tokens.shape[1])[0]  # [batch, length]
        x = self.position(self.embed(tokens), positions)
        x, _ = self.blocks(x, None, decode)
        return self.head(self.norm(x))  # logits of the next pixel: [batch, length, LEVELS]

    def init_cache(self, batch: int) -> None:
        self.blocks.scan_module.attention.init_cache((LAYERS, batch, LENGTH, WIDTH))


def loss_fn(decoder: Decoder, tokens: jax.Array) -> jax.Array:  # [batch, 65]
    return optax.softmax_cross_entropy_with_integer_labels(decoder(tokens[:, :-1]), tokens[:, 1:]).mean()


@nnx.jit
def train_step(optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model, tokens)
    optimizer.update(grads)
    return loss


@nnx.jit(stateful=False)
def write(decoder: Decoder, digit_labels: jax.Array, ctx: nnx.Context):
    """Returns the pixels and logits of one digit per label: [batch, 64], [batch, 64, LEVELS]."""
    decoder.init_cache(len(digit_labels))

    @nnx.scan(variable_broadcast=nnx.Param, split_rngs="sample", length=LENGTH)
    def draw(decoder, token, _, ctx):  # [batch]
        logits = decoder(token[:, None], decode=True)[:, 0]
        pixel = jax.random.categorical(ctx.make_rng("sample"), logits)
        return pixel, (pixel, logits)

    _, (pixels, logits) = draw(decoder, LEVELS + digit_labels, None, ctx)
    return pixels.T, logits.swapaxes(0, 1)


model = Decoder(ctx=nnx.context(0))
optimizer = nnx.Optimizer(model, optax.adam(optax.cosine_decay_schedule(3e-3, steps)))
draw = np.random.default_rng(1)
losses = []
for step in range(steps):
    losses.append(train_step(optimizer, jnp.asarray(train_tokens[draw.integers(0, len(train_tokens), 32)])))
    if step % (steps // 10) == 0:
        print(f"step {step:4d}  loss {losses[-1]:.4f}")

digit_labels = jnp.arange(10, dtype=jnp.int32).repeat(4)  # [40]
pixels, logits = write(model, digit_labels, nnx.context(sample=2))
written = jnp.concatenate([LEVELS + digit_labels[:, None], pixels], axis=1)  # [40, 65]
np.testing.assert_allclose(logits, nnx.jit(model)(written[:, :-1]), rtol=1e-3, atol=1e-3)

test_loss = float(nnx.jit(loss_fn)(model, jnp.asarray(test_tokens)))
counts = 0.1 + np.stack([np.bincount(column, minlength=LEVELS) for column in train_tokens[:, 1:].T])  # [64, LEVELS]
frequencies = counts / counts.sum(axis=1, keepdims=True)
baseline = -np.log(frequencies[np.arange(LENGTH), test_tokens[:, 1:]]).mean()
print(f"held out: {test_loss:.3f} nats a pixel; each pixel by itself: {baseline:.3f}")
assert test_loss < 0.8 * losses[0], "the loss did not fall"
assert args.smoke or test_loss < 0.85 * baseline, (test_loss, baseline)

grid = np.pad(pixels.reshape(10, 4, 8, 8), [(0, 0), (0, 0), (1, 1), (1, 1)])  # label, example, row, column
figure = Figure(figsize=(8, 3.6), layout="constrained")
axes = figure.add_subplot(xticks=np.arange(10) * 10 + 4.5, xticklabels=np.arange(10), yticks=[])
axes.imshow(grid.transpose(1, 2, 0, 3).reshape(40, 100), cmap="gray_r")
axes.set_title("digits written by the decoder, four of each label")
output = pathlib.Path(__file__).parent / "output" / "07_transformer_decoder.png"
output.parent.mkdir(exist_ok=True)
figure.savefig(output, dpi=120)
print(f"final test loss: {test_loss:.4f}")
