"""Draws handwritten digits by flow matching with a small diffusion transformer.

    python examples/programs/diffusion.py                    a few minutes on a laptop, seconds on a GPU
    python examples/programs/diffusion.py --resume --steps 8000    go on from the last checkpoint
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/programs/diffusion.py    on eight devices

Images are the 1,797 digits of 8 × 8 pixels that scikit-learn ships. The model learns the direction from noise to image
at every point between the two; drawing means to follow it. It is told which digit to draw, except for one image in ten,
so that at the end the difference between "any digit" and "this digit" can be exaggerated (classifier-free guidance).
Samples come from a moving average of the weights.

How good are they? A classifier, trained on the same images, turns samples and held-out images into features. Their
Fréchet distance is what "FID" measures with a larger classifier, and the share of samples read as the digit that was
asked for tells whether the label was heard. Checkpoints, samples and figures go to examples/output/diffusion/.
"""

import argparse
import math
import pathlib
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, help="4000 if not given")
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
parser.add_argument("--guidance", type=float, default=1.5, help="how much to exaggerate the label; 1 is not at all")
parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
parser.add_argument("--output", type=pathlib.Path, help="where everything goes")
parser.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = parser.parse_args()
if args.smoke:
    args.width, args.layers, args.batch = 32, 1, 64
args.steps = args.steps or (60 if args.smoke else 4000)
here = pathlib.Path(__file__).parent
output = args.output or here.parent / "output" / ("diffusion-smoke" if args.smoke else "diffusion")
SIZE, PATCH, HEADS, LABELS = 8, 2, 4, 10
ANY = LABELS  # the label of an image that may be any digit
dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else None

# The data. Batches depend on the number of the step alone, so a resumed run sees those it would have seen.

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = (digits.images[order].astype(np.float32) / 8.0 - 1.0)[..., None]  # [1797, 8, 8, 1], from -1 to 1
labels = digits.target[order].astype(np.int32)
train_images, train_labels, test_images, test_labels = images[:1400], labels[:1400], images[1400:], labels[1400:]


def batches(first: int):
    for step in range(first, args.steps):
        rows = np.random.default_rng(step).integers(0, len(train_images), args.batch)
        yield train_images[rows], train_labels[rows]


# The model


def modulate(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    return x * (1 + scale[:, None]) + shift[:, None]  # [batch, patches, width]


class Block(nnx.Module):
    """Attention and MLP whose inputs are shifted and scaled, and whose outputs are gated, by time and label."""

    def __init__(self, width: int, *, ctx: nnx.Context):
        plain = {"use_bias": False, "use_scale": False, "dtype": dtype, "ctx": ctx}
        self.norm1, self.norm2 = nnx.LayerNorm(width, **plain), nnx.LayerNorm(width, **plain)
        self.attention = nnx.MultiHeadAttention(HEADS, width, dtype=dtype, ctx=ctx)
        self.mlp = nnx.MLP(width, 4 * width, width, activation=nnx.gelu, dtype=dtype, ctx=ctx)
        # Zeros, so that every block starts as the identity.
        self.settings = nnx.Linear(width, 6 * width, kernel_init=nnx.initializers.zeros, ctx=ctx)

    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(self.settings(nnx.silu(condition)), 6, axis=-1)
        x = x + gate1[:, None] * self.attention(modulate(self.norm1(x), shift1, scale1))
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


class DiT(nnx.Module):
    def __init__(self, width: int, layers: int, *, ctx: nnx.Context):
        patches, pixels = (SIZE // PATCH) ** 2, PATCH**2
        self.enter = nnx.Linear(pixels, width, ctx=ctx)
        self.positions = nnx.LearnedPositionEmbed(patches, width, ctx=ctx)
        self.time = nnx.MLP(64, width, width, activation=nnx.silu, ctx=ctx)
        self.label = nnx.Embed(LABELS + 1, width, ctx=ctx)
        self.blocks = nnx.Sequence(Block(width, ctx=ctx) for _ in range(layers))
        self.norm = nnx.LayerNorm(width, ctx=ctx)
        self.leave = nnx.Linear(width, pixels, kernel_init=nnx.initializers.zeros, ctx=ctx)

    def __call__(self, images: jax.Array, times: jax.Array, labels: jax.Array) -> jax.Array:
        """Returns the direction to move in, of the shape of the images; times are `[batch]`, from 0 to 1."""
        n = SIZE // PATCH
        cut = images.reshape(-1, n, PATCH, n, PATCH).swapaxes(2, 3).reshape(-1, n * n, PATCH**2)
        frequencies = jnp.exp(jnp.arange(32) * (math.log(1000.0) / 31))
        angles = times[:, None] * frequencies
        condition = self.time(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)) + self.label(labels)
        x = self.positions(self.enter(cut))
        for block in self.blocks:
            x = block(x, condition)
        x = self.leave(self.norm(x))  # [batch, patches, pixels]
        return x.reshape(-1, n, n, PATCH, PATCH).swapaxes(2, 3).reshape(images.shape)


# Training: between noise and image lies a straight line, and its direction is the same all along.


def loss_fn(model: DiT, images: jax.Array, labels: jax.Array, ctx: nnx.Context) -> jax.Array:
    noise_key, time_key, label_key = jax.random.split(ctx.make_rng("noise"), 3)
    noise = jax.random.normal(noise_key, images.shape)
    times = nnx.sigmoid(jax.random.normal(time_key, labels.shape))  # the middle matters most
    at = times[:, None, None, None]
    labels = jnp.where(jax.random.bernoulli(label_key, 0.1, labels.shape), ANY, labels)
    direction = model(at * images + (1 - at) * noise, times, labels)
    return ((direction - (images - noise)) ** 2).mean()


class Training(nnx.Module):
    """All that a checkpoint holds."""

    def __init__(self, *, ctx: nnx.Context):
        model = DiT(args.width, args.layers, ctx=ctx)
        schedule = optax.warmup_cosine_decay_schedule(0.0, args.rate, args.steps // 20, args.steps)
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
        self.optimizer = nnx.Optimizer(model, tx)
        self.ema = nnx.EMA(model, lambda step: jnp.minimum(0.999, (1 + step) / (10 + step)))


@nnx.jit(donate_argnums=0)
def train_step(training: Training, images: jax.Array, labels: jax.Array, ctx: nnx.Context) -> jax.Array:
    optimizer = training.optimizer
    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model, images, labels, ctx)
    optimizer.update(grads)
    training.ema.update(optimizer.model)
    return loss


# Drawing: from noise to image in small steps of the midpoint rule.


@nnx.jit(static_argnames=("steps", "guidance"))
def draw(model: DiT, labels: jax.Array, key: jax.Array, *, steps: int = 25, guidance: float = 1.0) -> jax.Array:
    def direction(x: jax.Array, time: jax.Array) -> jax.Array:
        times = jnp.full(labels.shape, time)
        if guidance == 1.0:
            return model(x, times, labels)
        both = model(
            jnp.tile(x, (2, 1, 1, 1)), jnp.tile(times, 2), jnp.concatenate([labels, jnp.full_like(labels, ANY)])
        )
        this, any_digit = jnp.split(both, 2)
        return any_digit + guidance * (this - any_digit)

    def move(x: jax.Array, time: jax.Array) -> tuple[jax.Array, None]:
        middle = x + 0.5 / steps * direction(x, time)
        return x + direction(middle, time + 0.5 / steps) / steps, None

    x = jax.random.normal(key, (len(labels), SIZE, SIZE, 1))
    return jnp.clip(jax.lax.scan(move, x, jnp.arange(steps) / steps)[0], -1, 1)


# The judge: a small classifier, whose last hidden layer are the features.


class Judge(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.conv1 = nnx.Conv(1, 32, (3, 3), ctx=ctx)
        self.conv2 = nnx.Conv(32, 64, (3, 3), strides=2, ctx=ctx)
        self.hidden = nnx.Linear(64 * 16, 64, ctx=ctx)
        self.classes = nnx.Linear(64, LABELS, ctx=ctx)

    def features(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.conv2(nnx.relu(self.conv1(images))))
        return nnx.relu(self.hidden(x.reshape(len(x), -1)))

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.classes(self.features(images))


def trained_judge() -> Judge:
    optimizer = nnx.Optimizer(Judge(ctx=nnx.context(1)), optax.adam(2e-3))

    @nnx.jit
    def step(optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> None:
        grads = nnx.grad(lambda model: nnx.cross_entropy(model(images), labels))(optimizer.model)
        optimizer.update(grads)

    for seed in range(20 if args.smoke else 600):
        rows = np.random.default_rng(seed).integers(0, len(train_images), 128)
        step(optimizer, train_images[rows], train_labels[rows])
    return optimizer.model


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """The Fréchet distance between two sets of features, each taken as a normal distribution."""
    covariances = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    # The trace of the square root of a product of two positive matrices is the sum of the roots of its eigenvalues.
    mixed = np.sqrt(np.maximum(np.linalg.eigvals(covariances[0] @ covariances[1]).real, 0)).sum()
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + sum(np.trace(c) for c in covariances) - 2 * mixed)


# On however many devices there are: each takes its part of every batch.

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
split = jax.sharding.NamedSharding(mesh, PartitionSpec("data"))
training = nnx.init_sharded(lambda ctx: Training(ctx=ctx), mesh, [("batch", "data")], nnx.context(0))
manager = nnx.CheckpointManager(output / "checkpoints", every_steps=max(1, args.steps // 4), keep_last=2)
first = 0
if args.resume:
    first = manager.resume(training) or 0
else:
    shutil.rmtree(output / "checkpoints", ignore_errors=True)
    (output / "metrics.jsonl").unlink(missing_ok=True)
print(f"{nnx.count_params(training.optimizer.model):,} parameters, {mesh.size} devices, steps {first} to {args.steps}")
began, losses = time.perf_counter(), []
with manager, nnx.TrainLog(args.steps, output, name="diffusion", interval=5) as log:
    for step, batch in enumerate(nnx.prefetch(batches(first), sharding=split), first):
        loss = train_step(training, *batch, nnx.context(noise=jax.random.fold_in(jax.random.key(2), step)))
        losses.append(loss)
        log(step, loss=loss)
        manager.save(step + 1, training, force=step + 1 == args.steps)
seconds = time.perf_counter() - began
losses = [float(loss) for loss in losses]
if losses:
    per_second = len(losses) * args.batch / seconds
    print(f"{len(losses)} steps in {seconds:.0f} s, {per_second:,.0f} images/s; the last loss is {losses[-1]:.6f}")

model = training.ema.averaged(training.optimizer.model)
judge = trained_judge()
read = nnx.jit(lambda judge, images: (judge.features(images), judge(images).argmax(-1)))
real, real_read = map(np.asarray, read(judge, test_images))
asked = jnp.resize(jnp.arange(LABELS), (40 if args.smoke else 1000,))
draws = {
    name: draw(model, asked, jax.random.key(3), guidance=by) for name, by in (("plain", 1.0), ("guided", args.guidance))
}
draws["noise"] = jax.random.uniform(jax.random.key(4), draws["plain"].shape, minval=-1, maxval=1)
print(f"the judge reads {(real_read == test_labels).mean():.1%} of held-out images as they are labeled")
print(f"{'':<14} Fréchet distance   read as asked")
shown = {"training set": read(judge, train_images), **{name: read(judge, images) for name, images in draws.items()}}
distances = {}
for name, (features, found) in shown.items():
    distances[name] = frechet(np.asarray(features), real)
    wanted = train_labels if name == "training set" else asked
    print(f"{name:<14} {distances[name]:>16.2f} {float((found == wanted).mean()):>15.1%}")

figure = Figure(figsize=(5, 5.2), layout="constrained")
grid = np.asarray(draws["guided"])[: 10 * min(10, len(asked) // 10), ..., 0]
grid = np.pad(grid, ((0, 0), (1, 1), (1, 1)), constant_values=-1)
axes = figure.add_subplot(xticks=[], yticks=[])
axes.imshow(np.concatenate(np.concatenate(grid.reshape(-1, 10, *grid.shape[1:]), axis=1), axis=1), cmap="gray_r")
axes.set_title("drawn, 0 to 9", fontsize=9)
figure.savefig(output / "samples.png", dpi=150)
if first == 0 and args.steps >= 40:
    assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:10]), "the loss did not fall"
    assert args.smoke or distances["guided"] < 0.2 * distances["noise"], distances
print(f"final Fréchet distance: {distances['plain']:.2f}")
