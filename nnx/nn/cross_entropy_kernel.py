"""The GPU kernel behind `nnx.cross_entropy`, in Pallas.

One program per row. It walks over the row twice in *blocks*: first for the sum of exponentials, then to replace every
logit by its gradient. By the second walk the row is in the cache of the GPU, so device memory is read once and written
once, where separate operations for the maximum, the sum and the gradient read it three times.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

# The fastest of ten settings for 32,768 rows of 50,304 classes in bfloat16 on an H200: 2.6 ms, where XLA takes 4.0.
BLOCK = 2048
WARPS = 8
LOWEST = -1e30  # below every logit, but finite: the difference of two infinities would be NaN


def losses_and_gradient(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted loss of each row and the gradient of their sum, in the memory of the logits.

    Args:
        logits: `[rows, classes]`.
        targets: int32 `[rows]`; outside of the classes, the loss and the gradient of the row are NaN.
        weights: float32 `[rows]`; where 0, loss and gradient are 0.
        interpret: whether to run the kernel as ordinary operations, on any device.
    """
    rows, classes = logits.shape
    if not rows:
        return jnp.zeros(0, jnp.float32), logits
    per_row = pl.BlockSpec((None,), lambda row: (row,))
    whole_row = pl.BlockSpec((None, classes), lambda row: (row, 0))
    block = min(BLOCK, 1 << (classes - 1).bit_length())
    call = pl.pallas_call(
        functools.partial(_kernel, classes=classes, block=block),
        grid=(rows,),
        in_specs=[whole_row, per_row, per_row],
        out_specs=[per_row, whole_row],
        out_shape=[jax.ShapeDtypeStruct((rows,), jnp.float32), jax.ShapeDtypeStruct(logits.shape, logits.dtype)],
        input_output_aliases={0: 1},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=2),
        interpret=interpret,
        name="cross_entropy",
    )
    losses, gradient = call(logits, targets, weights)
    return losses, gradient


def _kernel(
    logits_ref: Any, target_ref: Any, weight_ref: Any, loss_ref: Any, gradient_ref: Any, *, classes: int, block: int
) -> None:
    target, weight = target_ref[...], weight_ref[...]
    blocks = pl.cdiv(classes, block)
    columns = jnp.arange(block)

    def load(index: Any, policy: str) -> jax.Array:
        inside = index * block + columns < classes
        part = logits_ref.at[pl.ds(index * block, block)]
        return plgpu.load(part, mask=inside, other=-jnp.inf, eviction_policy=policy).astype(jnp.float32)

    def add_block(index: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        highest, sums = carry
        part = load(index, "evict_last")
        higher = jnp.maximum(highest, jnp.max(part))
        return higher, sums * jnp.exp(highest - higher) + jnp.exp(part - higher)

    start = jnp.float32(LOWEST), jnp.zeros(block, jnp.float32)
    highest, sums = jax.lax.fori_loop(0, blocks, add_block, start)
    total = jnp.sum(sums)

    known = (target >= 0) & (target < classes)
    chosen = plgpu.load(logits_ref.at[jnp.clip(target, 0, classes - 1)]).astype(jnp.float32)
    loss = highest + jnp.log(total) - jnp.where(known, chosen, jnp.nan)
    loss_ref[...] = jnp.where(weight == 0, 0, loss * weight)
    scale = jnp.where(known, weight / total, jnp.nan)

    def write_block(index: Any, _: None) -> None:
        part = load(index, "evict_first")
        at = index * block + columns
        gradient = jnp.exp(part - highest) * scale
        gradient = jnp.where(at == target, gradient - weight, gradient)
        gradient = jnp.where(weight == 0, 0, gradient)
        plgpu.store(
            gradient_ref.at[pl.ds(index * block, block)], gradient.astype(gradient_ref.dtype), mask=at < classes
        )

    jax.lax.fori_loop(0, blocks, write_block, None)
