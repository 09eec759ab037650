"""Fine-tuning an encoder: a ViT that knows the digits 0 to 4 learns all ten, and beats a linear classifier.

A published checkpoint is played by a small ViT that this program first trains on half of the classes and writes with
`save_pretrained`. The part that matters starts there: `from_pretrained` opens the directory, the encoder gets a new
head for ten classes, everything is trained, and the result is written again, in the format of `transformers`. The
baseline is scikit-learn's logistic regression on the same training images; both are tested on images neither has seen.
"""

import argparse
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

args = argparse.ArgumentParser(description=__doc__)
args.add_argument("--steps", type=int, default=1000)
args.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = args.parse_args()
steps = 100 if args.smoke else args.steps

data = load_digits()
pixels, digits = data.data, data.target
order = np.random.default_rng(0).permutation(len(digits))
images = pixels[order].astype(np.float32).reshape(-1, 8, 8, 1) / 8 - 1  # [1797, height, width, channels], -1 to 1
labels = digits[order].astype(np.int32)  # [1797]
train, test = np.arange(0, 897), np.arange(897, 1797)


def shifted(x: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Moves each image by up to one pixel, so that the same digit is never seen twice in quite the same place."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-1)
    corners = draw.integers(0, 3, (len(x), 2))
    return np.stack([image[i : i + 8, j : j + 8] for image, (i, j) in zip(padded, corners, strict=True)])


@nnx.jit
def train_step(optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    def loss_fn(model: nnx.models.ViTClassifier) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model)
    optimizer.update(grads)
    return loss


def fit(model: nnx.models.ViTClassifier, examples: np.ndarray, steps: int) -> list[float]:
    """Trains a model on these examples and returns the losses."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)
    optimizer = nnx.Optimizer(model, optax.adamw(rate, weight_decay=0.05))
    draw, losses = np.random.default_rng(1), []
    for _ in range(steps):
        batch = draw.choice(examples, 128)
        losses.append(float(train_step(optimizer, jnp.asarray(shifted(images[batch], draw)), labels[batch])))
    return losses


@nnx.jit
def predicted(model: nnx.models.ViTClassifier, x: jax.Array) -> jax.Array:
    return model(x).argmax(-1)


# The checkpoint: an encoder that has seen the digits 0 to 4 only.
config = nnx.models.ViTConfig(
    image_size=8,
    patch_size=4,
    channels=1,
    features=64,
    hidden_features=128,
    num_layers=2 if args.smoke else 3,
    num_heads=4,
    norm_epsilon=1e-6,
    labels=tuple("01234"),
)
first = nnx.models.ViTClassifier(config, ctx=nnx.context(0))
fit(first, train[labels[train] < 5], steps // 2)
directory = pathlib.Path(tempfile.mkdtemp())
nnx.models.save_pretrained(first, directory / "five")

# Fine-tuning: the same encoder, a new head.
loaded: nnx.models.ViTClassifier = nnx.models.from_pretrained(directory / "five")
model = nnx.models.ViTClassifier(loaded.config.replace(labels=tuple("0123456789")), ctx=nnx.context(1))
model.encoder = loaded.encoder
model.encoder.config = model.config
losses = fit(model, train, steps)
nnx.models.save_pretrained(model, directory / "ten")

again = nnx.models.from_pretrained(directory / "ten")
answers = np.asarray(predicted(again, images[test]))
accuracy = float(np.mean(answers == labels[test]))

linear = LogisticRegression(max_iter=2000, tol=1e-2 if args.smoke else 1e-4)
linear.fit(images[train].reshape(-1, 64), labels[train])
baseline = float(linear.score(images[test].reshape(-1, 64), labels[test]))
print(f"logistic regression: {baseline:.3f}, fine-tuned ViT with {nnx.count_params(model):,} weights: {accuracy:.3f}")
assert accuracy > (0.8 if args.smoke else baseline), (accuracy, baseline)

figure = Figure(figsize=(8, 3.4), layout="constrained")
grid = figure.add_gridspec(3, 6)
title = f"accuracy {accuracy:.3f}, linear {baseline:.3f}"
axes = figure.add_subplot(grid[:, :3], xlabel="step", ylabel="loss", title=title)
axes.plot(losses)
for at, index in enumerate(np.flatnonzero(answers != labels[test])[:9]):  # some of its mistakes
    cell = figure.add_subplot(grid[at // 3, 3 + at % 3])
    cell.imshow(images[test][index, ..., 0], cmap="gray_r")
    cell.set_title(f"{labels[test][index]}, not {answers[index]}", fontsize=8)
    cell.axis("off")
output = pathlib.Path(__file__).parent / "output" / "14_finetune_encoder.png"
output.parent.mkdir(exist_ok=True)
figure.savefig(output, dpi=120)
print(f"final test accuracy: {accuracy:.3f}")
