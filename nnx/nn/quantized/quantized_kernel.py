"""The GPU kernel behind products of a few rows with a quantized matrix, in Pallas.

One program per *tile* of output columns, and per *split* of the inputs where too few tiles would leave a GPU idle. A
program walks over its inputs in *steps*. It loads the integers of a step as they are stored, converts them in
registers, multiplies, and applies the scales of their group. The matrix is read once, and nothing of its size is
written.

Two 4-bit integers share a byte on a GPU, and Pallas unpacks them as it loads them. Viewing them as bytes outside of the
kernel would not be free: XLA expands a bitcast between widths into arithmetic that writes a copy of the matrix.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from nnx.nn.quantized.quantized_tiling import Tiling

SMALLEST_DOT = 16  # the fewest rows that a product in Triton can have


def multiply(
    x: jax.Array,
    integers: jax.Array,
    scale: jax.Array,
    tiling: Tiling,
    *,
    transposed: bool,
    dtype: Any,
    interpret: bool,
) -> jax.Array:
    """Returns the product of a few rows with a quantized matrix, `[rows, outputs]`.

    Args:
        x: the rows, `[rows, inputs]`.
        integers: the matrix, `[inputs, outputs]`, or `[outputs, inputs]` if `transposed`.
        scale: the scales, `[outputs]`, or one more axis of groups in the place of the inputs.
        tiling: the division of the work.
        transposed: whether the inputs are the last axis of the matrix.
        dtype: the dtype of the result.
        interpret: whether to run the kernel as ordinary operations, on any device.
    """
    rows, inputs = x.shape
    outputs = integers.shape[0 if transposed else 1]
    columns, depth, splits = tiling.columns, tiling.depth, tiling.splits
    padded = max(SMALLEST_DOT, 1 << (rows - 1).bit_length())
    groups = 0 if scale.ndim == 1 else scale.shape[1 if transposed else 0]
    if transposed:
        # The step has its own axis, because Pallas loads 4-bit integers by whole bytes only if the index on their last
        # axis is known when the kernel is compiled.
        integers = jnp.reshape(integers, (outputs, inputs // depth, depth))
        matrix = pl.BlockSpec((columns, inputs // depth, depth), lambda tile, split: (tile, 0, 0))
        grouped = pl.BlockSpec((columns, groups), lambda tile, split: (tile, 0))
    else:
        matrix = pl.BlockSpec((inputs, columns), lambda tile, split: (0, tile))
        grouped = pl.BlockSpec((groups, columns), lambda tile, split: (0, tile))
    call = pl.pallas_call(
        functools.partial(
            _kernel,
            rows=rows,
            depth=depth,
            steps=inputs // depth // splits,
            steps_per_group=inputs // groups // depth if groups else 0,
            transposed=transposed,
        ),
        grid=(outputs // columns, splits),
        in_specs=[
            pl.BlockSpec((padded, inputs), lambda tile, split: (0, 0)),
            matrix,
            grouped if groups else pl.BlockSpec((columns,), lambda tile, split: (tile,)),
        ],
        out_specs=pl.BlockSpec((None, padded, columns), lambda tile, split: (split, 0, tile)),
        # The partial sums of several splits are rounded only after they are added.
        out_shape=jax.ShapeDtypeStruct((splits, rows, outputs), dtype if splits == 1 else jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name="quantized_product",
    )
    parts = call(x, integers, scale)
    return parts[0] if splits == 1 else jnp.sum(parts, axis=0).astype(dtype)


def _kernel(
    x_ref: Any,
    matrix_ref: Any,
    scale_ref: Any,
    out_ref: Any,
    *,
    rows: int,
    depth: int,
    steps: int,
    steps_per_group: int,
    transposed: bool,
) -> None:
    padded, columns = out_ref.shape
    is_row = jnp.arange(padded)[:, None] < rows
    first = pl.program_id(1) * steps

    def add_step(step: Any, sums: jax.Array) -> jax.Array:
        at = first + step
        x = plgpu.load(x_ref.at[:, pl.ds(at * depth, depth)], mask=is_row, other=0)
        integers = matrix_ref[:, at, :] if transposed else matrix_ref[pl.ds(at * depth, depth), :]
        products = lax.dot_general(
            x,
            _converted(integers, x.dtype),
            (((1,), (1 if transposed else 0,)), ((), ())),
            precision=lax.Precision.HIGHEST,  # of float32; there is only one of narrower dtypes
            preferred_element_type=jnp.float32,
        )
        if steps_per_group:
            group = lax.div(at, jnp.int32(steps_per_group))
            scales = scale_ref[:, group] if transposed else scale_ref[group, :]
            products = products * scales.astype(jnp.float32)[None]
        return sums + products

    sums = lax.fori_loop(0, steps, add_step, jnp.zeros((padded, columns), jnp.float32))
    if not steps_per_group:
        sums = sums * scale_ref[...].astype(jnp.float32)[None]
    plgpu.store(out_ref, sums.astype(out_ref.dtype), mask=is_row)


def _converted(integers: jax.Array, dtype: Any) -> jax.Array:
    if integers.dtype == jnp.int4:
        integers = integers.astype(jnp.int8)  # from which Triton converts four numbers at a time
    return integers.astype(dtype)
