"""PureModule: a model as one pytree, so that JAX can carry it through anything.

`model.partition()` returns a `Pure`, which holds state and structure together. Here a whole epoch of training on
handwritten digits is one `jax.lax.scan` whose carry is the model itself. `pure.apply` runs the model and also returns
its new state; `pure.call` returns only the output.
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
args.add_argument("--epochs", type=int, default=40)
args.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = args.parse_args()
epochs = 8 if args.smoke else args.epochs

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = digits.data[order].astype(np.float32) / 16.0  # [1797, 64]
labels = digits.target[order].astype(np.int32)  # [1797]
batches = (images[:1400].reshape(28, 50, 64), labels[:1400].reshape(28, 50))
test_images, test_labels = images[1400:], labels[1400:]


class Count(nnx.Variable):
    """The number of calls to the model."""


class Classifier(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.mlp = nnx.MLP(64, 64, 10, ctx=ctx)
        self.calls = Count(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:  # [batch, 64] -> [batch, 10]
        self.calls += 1
        return self.mlp(x)


def train_step(pure: nnx.PureModule[Classifier], batch: tuple[jax.Array, jax.Array]):
    x, y = batch  # [50, 64], [50]

    def loss_fn(params: nnx.State):
        logits, new_pure = pure.update_state(params).apply(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new_pure

    params = pure.filter(nnx.Param)
    (loss, pure), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return pure.update_state(jax.tree.map(lambda value, grad: value - 0.2 * grad, params, grads)), loss


@jax.jit
def train_epoch(pure: nnx.PureModule[Classifier], batches):
    return jax.lax.scan(train_step, pure, batches)


@jax.jit
def accuracy(pure: nnx.PureModule[Classifier], x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean(pure.call(x).argmax(-1) == y)


pure = Classifier(ctx=nnx.context(0)).partition()
records = []
for epoch in range(epochs):
    pure, losses = train_epoch(pure, batches)  # losses: [28]
    records.append({"step": epoch, "loss": float(losses.mean())})
    if epoch % max(1, epochs // 10) == 0:
        print(f"epoch {epoch:3d}  loss {records[-1]['loss']:.4f}")

model = pure.merge()
assert model.calls == epochs * 28
assert records[-1]["loss"] < 0.5 * records[0]["loss"], "the loss did not fall"
test_accuracy = float(accuracy(pure, test_images, test_labels))
assert test_accuracy > (0.8 if args.smoke else 0.95), test_accuracy

nnx.plot_metrics(records, pathlib.Path(__file__).parent / "output" / "04_pure_module.png", title="digits, by epoch")
print(f"final test accuracy: {test_accuracy:.4f}")
