"""Checkpoints: save a run, load it into the objects of a new process, and continue as if nothing had happened.

Trains a digit classifier with dropout, keeping the latest checkpoints and the best one. Then builds a new model,
optimizer and Context, as a new process would, resumes from the middle, and ends with exactly the same weights.
"""

import argparse
import pathlib
import shutil

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

args = argparse.ArgumentParser(description=__doc__)
args.add_argument("--epochs", type=int, default=12)
args.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = args.parse_args()
epochs = 4 if args.smoke else args.epochs
output = pathlib.Path(__file__).parent / "output" / "08_checkpoints"
shutil.rmtree(output, ignore_errors=True)

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = digits.data[order].astype(np.float32) / 16.0  # [1797, 64]
labels = digits.target[order].astype(np.int32)  # [1797]
batches = list(zip(images[:1400].reshape(28, 50, 64), labels[:1400].reshape(28, 50), strict=True))
test_images, test_labels = images[1400:], labels[1400:]


def make_mlp(ctx: nnx.Context) -> nnx.MLP:
    return nnx.MLP(64, 128, 10, dropout_rate=0.2, ctx=ctx)


def loss_fn(mlp: nnx.MLP, x: jax.Array, y: jax.Array, ctx: nnx.Context) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(mlp(x, ctx=ctx), y).mean()


@nnx.jit
def train_step(optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array, ctx: nnx.Context) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model, x, y, ctx)
    optimizer.update(grads)
    return loss


def test_accuracy(mlp: nnx.MLP) -> float:
    return float(np.mean(mlp(test_images, deterministic=True).argmax(-1) == test_labels))


def fresh_run(seed: int) -> dict:
    """Builds everything a run consists of: the optimizer with the model, and the Context with the dropout key."""
    mlp = make_mlp(nnx.context(seed))
    ctx = nnx.context(dropout=seed, flags={"deterministic": False})
    return {"optimizer": nnx.Optimizer(mlp, optax.adam(2e-3)), "ctx": ctx}


def train(run: dict, start: int, manager: nnx.CheckpointManager | None = None) -> list[dict]:
    records = []
    for epoch in range(start, epochs):
        losses = [train_step(run["optimizer"], x, y, run["ctx"]) for x, y in batches]
        record = {"loss": float(np.mean(losses)), "accuracy": test_accuracy(run["optimizer"].model)}
        print(f"epoch {epoch:2d}  loss {record['loss']:.4f}  test accuracy {record['accuracy']:.4f}")
        records.append({"step": epoch, **record})
        if manager is not None:
            manager.save(epoch, run, metrics=record)
    return records


whole = fresh_run(seed=0)
with nnx.CheckpointManager(output / "run", keep_last=epochs // 2, keep_best=1, best_metric="loss") as manager:
    records = train(whole, 0, manager)
    manager.wait()
    print(f"kept: epochs {manager.steps()}, the best is {manager.best_step()}")

    middle = manager.steps()[0]
    resumed = fresh_run(seed=1)  # different weights and keys: everything comes from the checkpoint
    manager.load(resumed, step=middle)
print(f"resumed after epoch {middle}")
train(resumed, middle + 1)

expected, got = whole["optimizer"].model, resumed["optimizer"].model
assert all(np.array_equal(a.value, b.value) for a, b in zip(expected.get_state().values(), got.get_state().values()))
assert records[-1]["loss"] < 0.5 * records[0]["loss"], "the loss did not fall"

nnx.save(output / "model", expected)  # the model alone, without the rest of the run
served = nnx.load(output / "model", nnx.eval_shape(make_mlp, nnx.context(0)))
accuracy = test_accuracy(served)
assert accuracy > (0.85 if args.smoke else 0.95), accuracy

nnx.plot_metrics(records, output.with_suffix(".png"), title="digits, by epoch")
print(f"final test accuracy: {accuracy:.4f}")
