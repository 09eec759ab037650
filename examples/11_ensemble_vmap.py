"""An ensemble by vmap: eight networks trained at once as one Module, better together than individually.

`nnx.Vmap` builds a Module whose parameters have a leading axis of members, and one step trains all of them. The members
see the same handwritten digits and differ only in their initial weights. Where they disagree, the ensemble is unsure:
its mistakes are among the digits with the least agreement.
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
args.add_argument("--steps", type=int, default=600)
args.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = args.parse_args()
steps = 80 if args.smoke else args.steps
MEMBERS = 8

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = digits.data[order].astype(np.float32) / 16.0  # [1797, 64]
labels = digits.target[order].astype(np.int32)  # [1797]
train_images, train_labels, test_images, test_labels = images[:700], labels[:700], images[700:], labels[700:]

make_ensemble = nnx.Vmap(nnx.MLP, variable_axes={nnx.Param: 0}, split_rngs="params", axis_size=MEMBERS, in_axes=None)
ensemble = make_ensemble(64, 64, 10, ctx=nnx.context(0))
assert ensemble.vmap_module.layers[0].kernel.shape == (MEMBERS, 64, 64)


def loss_fn(ensemble, x: jax.Array, y: jax.Array) -> jax.Array:
    logits = ensemble(x)  # [MEMBERS, batch, 10]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.broadcast_to(y, logits.shape[:-1]))
    return losses.mean(axis=-1).sum()  # a sum over members: each gets the gradient it would get alone


@nnx.jit
def train_step(optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model, x, y)
    optimizer.update(grads)
    return loss / MEMBERS


optimizer = nnx.Optimizer(ensemble, optax.adam(2e-3))
draw = np.random.default_rng(1)
losses = []
for step in range(steps):
    batch = draw.integers(0, len(train_labels), 64)
    losses.append(float(train_step(optimizer, train_images[batch], train_labels[batch])))
    if step % (steps // 10) == 0:
        print(f"step {step:4d}  loss {losses[-1]:.4f}")
assert losses[-1] < 0.5 * losses[0], "the loss did not fall"

probabilities = nnx.softmax(ensemble(test_images))  # [MEMBERS, 1097, 10]
member_accuracies = np.mean(probabilities.argmax(-1) == test_labels, axis=-1)  # [MEMBERS]
together = np.asarray(probabilities.mean(axis=0))  # [1097, 10]
right = together.argmax(-1) == test_labels
print(f"members {member_accuracies.min():.4f} to {member_accuracies.max():.4f}, mean {member_accuracies.mean():.4f}")
assert right.mean() >= member_accuracies.mean(), "the ensemble is worse than its members"
assert right.mean() > (0.8 if args.smoke else 0.95), right.mean()
agreement = np.mean(probabilities.argmax(-1) == together.argmax(-1), axis=0)  # [1097]
assert agreement[~right].mean() < agreement[right].mean(), "disagreement is not informative"

figure = Figure(figsize=(8, 2.6), layout="constrained")
for i, number in enumerate(np.argsort(agreement, kind="stable")[:8]):
    axes = figure.add_subplot(1, 8, i + 1, xticks=[], yticks=[])
    axes.imshow(test_images[number].reshape(8, 8), cmap="gray_r")
    axes.set_title(f"{test_labels[number]}, read as {together[number].argmax()}", fontsize=7)
    axes.set_xlabel(f"{agreement[number]:.0%} agree", fontsize=7)
figure.suptitle("what the members agree on least", fontsize=9)
output = pathlib.Path(__file__).parent / "output" / "11_ensemble_vmap.png"
output.parent.mkdir(exist_ok=True)
figure.savefig(output, dpi=120)
print(f"final test accuracy: {right.mean():.4f}")
