"""Parameter surgery: take a pretrained backbone, give it a new head, and train only the head.

A convolutional network learns to read digits. Then its head is replaced by one that tells even digits from odd ones,
for which there are only 40 examples; a filter over paths selects the part to train. A network trained from scratch on
the same 40 examples shows what the backbone is worth.
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

nnx.compilation_cache()  # the next run finds the programs that this one compiles

args = argparse.ArgumentParser(description=__doc__)
args.add_argument("--steps", type=int, default=400)
args.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = args.parse_args()
steps = 250 if args.smoke else args.steps

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = digits.images[order, ..., None].astype(np.float32) / 16.0  # [1797, 8, 8, 1]
labels = digits.target[order].astype(np.int32)  # [1797]
few, test = slice(1000, 1040), slice(1040, None)


class Backbone(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.conv1 = nnx.Conv(1, 16, (3, 3), ctx=ctx)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, ctx=ctx)
        self.features = nnx.Linear(512, 32, ctx=ctx)

    def __call__(self, x: jax.Array) -> jax.Array:  # [batch, 8, 8, 1] -> [batch, 32]
        x = nnx.relu(self.conv2(nnx.relu(self.conv1(x))))  # [batch, 4, 4, 32]
        return nnx.relu(self.features(x.reshape(x.shape[0], -1)))


class Classifier(nnx.Module):
    def __init__(self, classes: int, *, ctx: nnx.Context):
        self.backbone = Backbone(ctx=ctx)
        self.head = nnx.Linear(32, classes, ctx=ctx)

    def __call__(self, x: jax.Array) -> jax.Array:  # [batch, 8, 8, 1] -> [batch, classes]
        return self.head(self.backbone(x))


def loss_fn(classifier: Classifier, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(classifier(x), y).mean()


@nnx.jit
def train_step(optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn, wrt=optimizer.wrt)(optimizer.model, x, y)
    optimizer.update(grads)
    return loss


def train(classifier: Classifier, x: np.ndarray, y: np.ndarray, wrt: nnx.Filter = nnx.Param) -> list[float]:
    optimizer = nnx.Optimizer(classifier, optax.adam(2e-3), wrt=wrt)
    draw = np.random.default_rng(1)
    losses = []
    for _ in range(steps):
        batch = draw.integers(0, len(y), 32)
        losses.append(float(train_step(optimizer, jnp.asarray(x[batch]), jnp.asarray(y[batch]))))
    assert losses[-1] < 0.7 * losses[0], "the loss did not fall"
    return losses


def accuracy(classifier: Classifier) -> float:
    return float(np.mean(classifier(images[test]).argmax(-1) == labels[test] % 2))


pretrained = Classifier(10, ctx=nnx.context(0))
pretrained_losses = train(pretrained, images[:1000], labels[:1000])
print(f"pretrained on 1000 digits: loss {pretrained_losses[-1]:.4f}")

# The surgery, on a copy
model = pretrained.clone()
model.head = nnx.Linear(32, 2, ctx=nnx.context(1))

head = nnx.All(nnx.Param, nnx.PathMatches("head/*"))
head_losses = train(model, images[few], labels[few] % 2, wrt=head)
before, after = pretrained.backbone.get_state(), model.backbone.get_state()
assert all(np.array_equal(before[path].value, after[path].value) for path in before), "the backbone was not frozen"

scratch = Classifier(2, ctx=nnx.context(1))
scratch_losses = train(scratch, images[few], labels[few] % 2)

transferred, from_scratch = accuracy(model), accuracy(scratch)
print(f"even or odd, from 40 examples: {transferred:.3f} with the backbone, {from_scratch:.3f} from scratch")
assert transferred > (0.65 if args.smoke else max(0.8, from_scratch)), (transferred, from_scratch)

figure = Figure(figsize=(7, 3.2), layout="constrained")
axes = figure.add_subplot(xlabel="step", ylabel="loss", yscale="log")
axes.plot(pretrained_losses, label="backbone and head, ten digits")
axes.plot(head_losses, label=f"new head, even or odd: test accuracy {transferred:.2f}")
axes.plot(scratch_losses, label=f"from scratch, even or odd: test accuracy {from_scratch:.2f}")
axes.legend()
output = pathlib.Path(__file__).parent / "output" / "09_parameter_surgery.png"
output.parent.mkdir(exist_ok=True)
figure.savefig(output, dpi=120)
print(f"final test accuracy: {transferred:.4f}")
