"""Scan over layers by hand: many layers as one Module with stacked parameters, run by `jax.lax.scan`.

This is what `nnx.Scan` does, spelled out with partition and merge. The linear layers differ, so their parameters are
stacked and scanned over. All of them share one batch norm, so its parameters are the same in every step and its running
averages are passed from layer to layer. Every layer gets its own dropout key. Classifies handwritten digits, and checks
that the scan agrees with a Python loop over the layers.
"""

import argparse
import pathlib

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

args = argparse.ArgumentParser(description=__doc__)
args.add_argument("--steps", type=int, default=400)
args.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = args.parse_args()
steps = 100 if args.smoke else args.steps
LAYERS, WIDTH = 4, 64

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = digits.data[order].astype(np.float32) / 16.0  # [1797, 64]
labels = digits.target[order].astype(np.int32)  # [1797]
train_images, train_labels, test_images, test_labels = images[:1400], labels[:1400], images[1400:], labels[1400:]


class Block(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.linear = nnx.Linear(WIDTH, WIDTH, ctx=ctx)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, ctx=ctx)
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, x: jax.Array, *, ctx: nnx.Context) -> jax.Array:  # [batch, WIDTH]
        # a small step: the layers then see similar inputs, and one set of running averages fits them all
        return x + self.dropout(nnx.gelu(self.linear(self.norm(x, ctx=ctx))), ctx=ctx) / LAYERS


stacked = nnx.All(nnx.Param, nnx.PathMatches("linear/*"))
parts = (stacked, nnx.BatchStat, ...)  # one per layer; passed from layer to layer; the same in all layers


class DeepClassifier(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        keys, ctxdef = ctx.split(LAYERS)

        def make(keys):
            return Block(ctx=ctxdef.merge(keys)).partition(*parts)

        axes = nnx.Pure((0, None, None), None)  # pyright: ignore[reportArgumentType]  (the axes of a Pure)
        pure = jax.vmap(make, out_axes=axes)(keys)  # kernel: [LAYERS, WIDTH, WIDTH]
        self.blocks = pure.merge()
        self.embed = nnx.Linear(64, WIDTH, ctx=ctx)
        self.out = nnx.Linear(WIDTH, 10, ctx=ctx)

    def __call__(self, x: jax.Array, *, ctx: nnx.Context) -> jax.Array:  # [batch, 64] -> [batch, 10]
        (params, batch_stats, shared), moduledef = self.blocks.partition(*parts)
        keys, ctxdef = ctx.split(LAYERS)

        def layer(carry, scanned):
            x, batch_stats = carry
            params, keys = scanned
            block = moduledef.merge(params, batch_stats, shared)
            x = block(x, ctx=ctxdef.merge(keys))
            return (x, block.filter(nnx.BatchStat)), None

        (x, batch_stats), _ = jax.lax.scan(layer, (self.embed(x), batch_stats), (params, keys))
        self.blocks.update_state(batch_stats)
        return self.out(x)

    def unrolled(self, x: jax.Array, *, ctx: nnx.Context) -> jax.Array:
        """Computes the same without a scan, for use after training."""
        (params, rest), moduledef = self.blocks.partition(stacked, ...)
        x = self.embed(x)
        for i in range(LAYERS):
            x = moduledef.merge(jax.tree.map(lambda value, i=i: value[i], params), rest)(x, ctx=ctx)
        return self.out(x)


def loss_fn(classifier: DeepClassifier, x: jax.Array, y: jax.Array, ctx: nnx.Context) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(classifier(x, ctx=ctx), y).mean()


@nnx.jit
def train_step(optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array, ctx: nnx.Context) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model, x, y, ctx)
    optimizer.update(grads)
    return loss


model = DeepClassifier(ctx=nnx.context(0))
assert model.blocks.linear.kernel.shape == (LAYERS, WIDTH, WIDTH)
assert model.blocks.norm.scale is not None and model.blocks.norm.scale.shape == (WIDTH,)
optimizer = nnx.Optimizer(model, optax.adam(1e-3))
training = nnx.context(dropout=1, flags={"deterministic": False, "use_running_average": False})
testing = nnx.context(flags={"deterministic": True, "use_running_average": True})
draw = np.random.default_rng(1)
records = []
for step in range(steps):
    batch = draw.integers(0, len(train_labels), 64)
    loss = train_step(optimizer, train_images[batch], train_labels[batch], training)
    records.append({"step": step, "loss": float(loss)})
    if step % (steps // 10) == 0:
        print(f"step {step:4d}  loss {records[-1]['loss']:.4f}")

logits = model(test_images, ctx=testing)  # [397, 10]
np.testing.assert_allclose(logits, model.unrolled(test_images, ctx=testing), rtol=1e-3, atol=1e-3)
assert not np.allclose(model.blocks.norm.mean, 0.0), "the running averages did not move"
assert records[-1]["loss"] < 0.5 * records[0]["loss"], "the loss did not fall"
test_accuracy = float(np.mean(logits.argmax(-1) == test_labels))
assert test_accuracy > (0.8 if args.smoke else 0.95), test_accuracy

nnx.plot_metrics(records, pathlib.Path(__file__).parent / "output" / "06_scan_over_layers.png", title="digits")
print(f"final test accuracy: {test_accuracy:.4f}")
