"""TrainState: parameters, batch statistics and optimizer state in one immutable record, for steps in plain JAX.

Classifies handwritten digits with a small convolutional network. The step is a pure function under `jax.jit` that maps
one TrainState to the next; `state.apply("params", "batch_stats")` assembles the model from fields of the record.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

args = argparse.ArgumentParser(description=__doc__)
args.add_argument("--steps", type=int, default=500)
args.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = args.parse_args()
steps = 60 if args.smoke else args.steps

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = digits.images[order, ..., None].astype(np.float32) / 16.0  # [1797, 8, 8, 1]
labels = digits.target[order].astype(np.int32)  # [1797]
train_images, train_labels, test_images, test_labels = images[:1400], labels[:1400], images[1400:], labels[1400:]


class ConvNet(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.conv1 = nnx.Conv(1, 16, (3, 3), ctx=ctx)
        self.norm = nnx.BatchNorm(16, momentum=0.9, ctx=ctx)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, ctx=ctx)
        self.out = nnx.Linear(4 * 4 * 32, 10, ctx=ctx)

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:  # [batch, 8, 8, 1]
        x = nnx.relu(self.norm(self.conv1(x), use_running_average=not train))  # [batch, 8, 8, 16]
        x = nnx.relu(self.conv2(x))  # [batch, 4, 4, 32]
        return self.out(x.reshape(x.shape[0], -1))  # [batch, 10]


(params, batch_stats), moduledef = ConvNet(ctx=nnx.context(0)).partition(nnx.Param, nnx.BatchStat)
state = nnx.TrainState(moduledef, params=params, batch_stats=batch_stats, tx=optax.adam(2e-3))


@jax.jit
def train_step(state: nnx.TrainState, x: jax.Array, y: jax.Array):
    def loss_fn(params: nnx.State):
        logits, (updates, _) = state.apply(params, "batch_stats")(x, train=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, updates.filter(nnx.BatchStat)

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads, batch_stats=batch_stats), loss


@jax.jit
def accuracy(state: nnx.TrainState, x: jax.Array, y: jax.Array) -> jax.Array:
    logits, _ = state.apply("params", "batch_stats")(x, train=False)
    return jnp.mean(logits.argmax(-1) == y)


draw = np.random.default_rng(1)
records = []
for step in range(steps):
    batch = draw.integers(0, len(train_labels), 64)
    state, loss = train_step(state, train_images[batch], train_labels[batch])
    records.append({"step": step, "loss": float(loss)})
    if step % (steps // 10) == 0:
        print(f"step {step:4d}  loss {records[-1]['loss']:.4f}")

assert state.step == steps
assert records[-1]["loss"] < 0.5 * records[0]["loss"], "the loss did not fall"
test_accuracy = float(accuracy(state, test_images, test_labels))
assert test_accuracy > (0.8 if args.smoke else 0.97), test_accuracy

nnx.plot_metrics(records, pathlib.Path(__file__).parent / "output" / "03_train_state.png", title="digits")
print(f"final test accuracy: {test_accuracy:.4f}")
