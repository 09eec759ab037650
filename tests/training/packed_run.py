"""Training on documents that Grain packs into rows: `packed_run.py DIRECTORY STEPS KILL_AFTER`.

The run saves after every step, together with the state of the prefetched loader. It prints the losses, and kills itself
after a step, with a save on the way and more batches read ahead than used.
"""

import os
import signal
import sys
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import nnx

DOCUMENTS = [np.arange(1, length, dtype=np.int32) for length in (4, 6, 3, 7, 5, 6, 2, 4, 7, 3)]


def packed_batches() -> Any:
    documents = grain.MapDataset.source(DOCUMENTS).seed(0).shuffle().repeat(4).map(lambda tokens: {"tokens": tokens})
    rows = grain.experimental.FirstFitPackIterDataset(
        documents.to_iter_dataset(), length_struct={"tokens": 8}, num_packing_bins=2
    )
    return rows.batch(2, drop_remainder=True)


class Model(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.embed = nnx.Embed(8, 8, ctx=ctx)
        self.place = nnx.Embed(8, 8, ctx=ctx)
        self.attention = nnx.MultiHeadAttention(2, 8, ctx=ctx)

    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        x = self.embed(batch["tokens"]) + self.place(batch["tokens_positions"])
        documents = nnx.make_segment_mask(batch["tokens_segment_ids"])
        mask = nnx.combine_masks(documents, nnx.make_causal_mask(batch["tokens"]))
        return self.embed.attend(x + self.attention(x, mask=mask))


@nnx.jit
def train_step(optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
    def loss_fn(model: Model) -> jax.Array:
        logits, segments = model(batch)[:, :-1], batch["tokens_segment_ids"]
        inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
        return jnp.sum(losses * inside) / jnp.maximum(1, inside.sum())

    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model)
    optimizer.update(grads)
    return loss


def train(directory: str, steps: int, kill_after: int | None = None) -> dict[int, float]:
    optimizer = nnx.Optimizer(Model(ctx=nnx.context(0)), optax.adam(1e-2))
    batches = nnx.prefetch(packed_batches(), size=3)
    losses = {}
    with nnx.CheckpointManager(directory, keep_last=2) as manager:
        run = {"optimizer": optimizer, "data": batches}
        last = manager.resume(run)
        for step in range(0 if last is None else last + 1, steps):
            losses[step] = float(train_step(optimizer, next(batches)))
            manager.save(step, run)
            if step == kill_after:
                manager.wait()
                train_step(optimizer, next(batches))  # a step of which nothing is left
                os.kill(os.getpid(), signal.SIGKILL)
    return losses


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
