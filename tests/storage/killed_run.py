"""A training run that saves at every step, to be killed: `killed_run.py DIRECTORY STEPS`.

The imports are made once. For each number n read, a child is forked that trains from the last checkpoint on; when its
n-th save has begun, it says "saving" and how many seconds its last save took. The parent kills it by its id.
"""

import itertools
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tensorstore  # noqa: F401  (so that the children need not)

import nnx

DATA = np.random.default_rng(0).normal(size=(16, 4, 3)).astype(np.float32)


class Noisy(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.w = nnx.Param(jax.random.normal(ctx.make_rng("params"), (3, 3)))
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x, *, ctx: nnx.Context):
        self.seen += 1
        return (x + jax.random.normal(ctx.make_rng("noise"), x.shape)) @ self.w


@nnx.jit
def train_step(model, optimizer, x, ctx):
    loss, grads = nnx.value_and_grad(lambda model, ctx: jnp.mean((model(x, ctx=ctx) - x) ** 2))(model, ctx)
    optimizer.update(grads)
    return loss


def train(directory: str | None, steps: int, on_save=lambda seconds: None) -> np.ndarray:
    """Trains up to a number of steps and returns the losses; saves at every step if there is a directory."""
    model = Noisy(ctx=nnx.context(0))
    run = {
        "model": model,
        "optimizer": nnx.Optimizer(model, optax.adam(1e-2)),
        "ctx": nnx.context(noise=1),
        "position": 0,
        "losses": np.zeros(steps, np.float32),
    }
    manager = nnx.CheckpointManager(directory, keep_last=2) if directory else None
    start = manager.resume(run) if manager else None
    if start is not None and run["position"] != start + 1:
        raise SystemExit(f"step {start} has position {run['position']}")
    begun = time.monotonic()
    while run["position"] < steps:
        step = run["position"]
        loss = train_step(model, run["optimizer"], DATA[step % len(DATA)], run["ctx"])
        run["losses"][step] = loss
        run["position"] = step + 1
        if manager:
            manager.save(step, run)  # waits for the one before
            before, begun = begun, time.monotonic()
            on_save(begun - before)
    return run["losses"]


def speak_at(count: int):
    """Says "saving" when it is called the count-th time."""
    calls = itertools.count(1)

    def on_save(seconds: float) -> None:
        if next(calls) == count:
            print(f"saving {seconds}", flush=True)

    return on_save


def main() -> None:
    directory, steps = sys.argv[1], int(sys.argv[2])
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                train(directory, steps, speak_at(int(line)))
            except BaseException as error:
                print(f"failed: {type(error).__name__}: {error}", flush=True)
            os._exit(0)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    main()
