"""A Transformer decoder with scan over layers and a KV cache that learns to write digits pixel by pixel.

A handwritten digit from scikit-learn is a sequence of 65 tokens: its label, then 64 pixels with 17 gray levels. The
layers are one Module with stacked parameters (`nnx.Scan`). `nnx.generate` draws new digits one token at a time, with
the keys and values of earlier tokens from a cache, and its log-probabilities are checked against a full pass.
"""

import argparse
import operator
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

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

    def __call__(self, x: jax.Array, _):  # [batch, length, WIDTH]
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.mlp(self.norm2(x)), None

    def decode(self, x: jax.Array, cache: nnx.LayerCache, held: jax.Array, added: jax.Array | None):
        attended, cache = self.attention.decode_step(self.norm1(x), cache, held, added)
        x = x + attended
        return x + self.mlp(self.norm2(x)), cache


class Decoder(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.embed = nnx.Embed(LEVELS + 10, WIDTH, ctx=ctx)
        self.position = nnx.LearnedPositionEmbed(LENGTH, WIDTH, ctx=ctx)
        stacked = {nnx.Param: 0}  # kernels: [LAYERS, ...]
        self.blocks = nnx.Scan(Block, variable_axes=stacked, split_rngs="params", length=LAYERS)(ctx=ctx)
        self.norm = nnx.LayerNorm(WIDTH, ctx=ctx)
        self.head = nnx.Linear(WIDTH, LEVELS, ctx=ctx)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # [batch, length]
        x, _ = self.blocks(self.position(self.embed(tokens)), None)
        return self.head(self.norm(x))  # logits of the next pixel: [batch, length, LEVELS]

    # What `nnx.generate` needs: a cache, a function that appends tokens to it, and the layers as a list. A scan would
    # copy the cache of all layers for each token.

    def init_cache(self, batch: int, length: int, dtype=None) -> nnx.DecoderCache:
        return nnx.DecoderCache.empty(batch, length, [(HEADS, WIDTH // HEADS)] * LAYERS, dtype=dtype or jnp.float32)

    def decode(self, tokens: jax.Array, cache: nnx.DecoderCache, lengths: jax.Array | None = None):
        x = self.position(self.embed(tokens), cache.lengths[:, None] + jnp.arange(tokens.shape[1]))
        blocks: Any = self.unscanned().blocks  # a list by now
        layers = []
        for block, layer in zip(blocks, cache.layers, strict=True):
            x, layer = block.decode(x, layer, cache.lengths, lengths)
            layers.append(layer)
        added = tokens.shape[1] if lengths is None else lengths
        return self.head(self.norm(x)), cache.advanced(layers, added)

    def unscanned(self) -> "Decoder":
        if isinstance(self.blocks, nnx.Sequence):
            return self
        stacked, block = self.blocks.scan_module.partition()
        decoder = self.clone()
        decoder.blocks = [block.merge(jax.tree.map(operator.itemgetter(i), stacked)) for i in range(LAYERS)]
        return decoder


def loss_fn(decoder: Decoder, tokens: jax.Array) -> jax.Array:  # [batch, 65]
    return optax.softmax_cross_entropy_with_integer_labels(decoder(tokens[:, :-1]), tokens[:, 1:]).mean()


@nnx.jit
def train_step(optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model, tokens)
    optimizer.update(grads)
    return loss


model = Decoder(ctx=nnx.context(0))
optimizer = nnx.Optimizer(model, optax.adam(optax.cosine_decay_schedule(3e-3, steps)))
draw = np.random.default_rng(1)
losses = []
for step in range(steps):
    losses.append(train_step(optimizer, jnp.asarray(train_tokens[draw.integers(0, len(train_tokens), 32)])))
    if step % (steps // 10) == 0:
        print(f"step {step:4d}  loss {losses[-1]:.4f}")

digit_labels = jnp.arange(10, dtype=jnp.int32).repeat(4)  # [40]
labels = LEVELS + digit_labels[:, None]  # [40, 1]: the first token of each digit
pixels, logprobs = nnx.generate(
    model, labels, max_new_tokens=LENGTH, return_logprobs=True, ctx=nnx.context(sample=2)
)  # [40, 64]
written = jnp.concatenate([labels, pixels], axis=1)  # [40, 65]
expected = jax.nn.log_softmax(nnx.jit(model)(written[:, :-1]))  # [40, 64, LEVELS]
expected = jnp.take_along_axis(expected, pixels[..., None], axis=-1)[..., 0]
np.testing.assert_allclose(logprobs, expected, rtol=1e-3, atol=1e-3)

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
