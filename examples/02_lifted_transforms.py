"""Lifted transforms: `nnx.jit` and `nnx.value_and_grad` take Modules and keep the changes made to them inside.

Classifies handwritten digits. The step returns only the loss: it updates the parameters, the running averages of the
batch norm and the call count in the model that was passed. Randomness and the mode travel in a Context.
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
args.add_argument("--steps", type=int, default=1000)
args.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = args.parse_args()
steps = 100 if args.smoke else args.steps

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = digits.data[order].astype(np.float32) / 16.0  # [1797, 64]
labels = digits.target[order].astype(np.int32)  # [1797]
train_images, train_labels, test_images, test_labels = images[:1400], labels[:1400], images[1400:], labels[1400:]


class Count(nnx.Variable):
    """The number of calls to the model: state that is not a parameter."""


class Classifier(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.hidden = nnx.Linear(64, 128, ctx=ctx)
        self.norm = nnx.BatchNorm(128, momentum=0.9, ctx=ctx)
        self.dropout = nnx.Dropout(0.3)
        self.out = nnx.Linear(128, 10, ctx=ctx)
        self.calls = Count(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array, *, ctx: nnx.Context) -> jax.Array:  # [batch, 64] -> [batch, 10]
        self.calls += 1
        x = nnx.relu(self.norm(self.hidden(x), ctx=ctx))
        return self.out(self.dropout(x, ctx=ctx))


def loss_fn(classifier: Classifier, x: jax.Array, y: jax.Array, ctx: nnx.Context) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(classifier(x, ctx=ctx), y).mean()


@nnx.jit
def train_step(classifier: Classifier, x: jax.Array, y: jax.Array, ctx: nnx.Context) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn, wrt=nnx.Param)(classifier, x, y, ctx)
    params = classifier.filter(nnx.Param)
    classifier.update_state(jax.tree.map(lambda value, grad: value - 0.1 * grad, params, grads))
    return loss


@nnx.jit
def accuracy(classifier: Classifier, x: jax.Array, y: jax.Array, ctx: nnx.Context) -> jax.Array:
    return (classifier(x, ctx=ctx).argmax(-1) == y).mean()


model = Classifier(ctx=nnx.context(0))
training = nnx.context(dropout=1, flags={"deterministic": False, "use_running_average": False})
testing = nnx.context(flags={"deterministic": True, "use_running_average": True})
draw = np.random.default_rng(1)
records = []
for step in range(steps):
    batch = draw.integers(0, len(train_labels), 64)
    loss = train_step(model, train_images[batch], train_labels[batch], training)
    records.append({"step": step, "loss": float(loss)})
    if step % (steps // 10) == 0:
        print(f"step {step:4d}  loss {records[-1]['loss']:.4f}")

assert model.calls == steps and train_step.trace_count == 1
assert records[-1]["loss"] < 0.5 * records[0]["loss"], "the loss did not fall"
test_accuracy = float(accuracy(model, test_images, test_labels, testing))
assert test_accuracy > (0.8 if args.smoke else 0.95), test_accuracy

nnx.plot_metrics(records, pathlib.Path(__file__).parent / "output" / "02_lifted_transforms.png", title="digits")
print(f"final test accuracy: {test_accuracy:.4f}")
