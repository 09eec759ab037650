"""A recurrent network that reads a digit row by row, and guesses after each row which digit it is.

An image of 8 rows is a sequence of 8 steps of 8 pixels, and `nnx.RNN` runs an LSTM cell over it. Because the network is
trained to answer after every step, it shows how much of a digit you need to see to recognize it.
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
args.add_argument("--steps", type=int, default=1000)
args.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = args.parse_args()
steps = 120 if args.smoke else args.steps
ROWS, HIDDEN = 8, 64

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = digits.images[order].astype(np.float32) / 16.0  # [1797, 8, 8]
labels = digits.target[order].astype(np.int32)  # [1797]
train_images, train_labels, test_images, test_labels = images[:1400], labels[:1400], images[1400:], labels[1400:]


class Reader(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(8, HIDDEN, ctx=ctx))
        self.out = nnx.Linear(HIDDEN, 10, ctx=ctx)

    def __call__(self, x: jax.Array) -> jax.Array:  # [batch, rows, 8] -> [batch, rows, 10]
        return self.out(self.rnn(x))


def loss_fn(reader: Reader, x: jax.Array, y: jax.Array) -> jax.Array:
    logits = reader(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.repeat(y[:, None], ROWS, axis=1)).mean()


@nnx.jit
def train_step(optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model, x, y)
    optimizer.update(grads)
    return loss


model = Reader(ctx=nnx.context(0))
optimizer = nnx.Optimizer(model, optax.adam(3e-3))
draw = np.random.default_rng(1)
losses = []
for step in range(steps):
    batch = draw.integers(0, len(train_labels), 64)
    losses.append(float(train_step(optimizer, train_images[batch], train_labels[batch])))
    if step % (steps // 10) == 0:
        print(f"step {step:4d}  loss {losses[-1]:.4f}")

answers = nnx.jit(model)(test_images).argmax(-1)  # [397, rows]
accuracy = np.mean(answers == test_labels[:, None], axis=0)  # [rows]
print("accuracy after each row: " + " ".join(f"{share:.2f}" for share in accuracy))
assert losses[-1] < 0.7 * losses[0], "the loss did not fall"
assert accuracy[-1] > accuracy[2] > accuracy[0], accuracy
assert accuracy[-1] > (0.6 if args.smoke else 0.93), accuracy

figure = Figure(figsize=(6, 3.2), layout="constrained")
axes = figure.add_subplot(xlabel="rows seen", ylabel="test accuracy", ylim=(0, 1))
axes.plot(np.arange(1, ROWS + 1), accuracy, marker="o")
axes.grid(alpha=0.3)
output = pathlib.Path(__file__).parent / "output" / "12_rnn.png"
output.parent.mkdir(exist_ok=True)
figure.savefig(output, dpi=120)
print(f"final test accuracy: {accuracy[-1]:.4f}")
