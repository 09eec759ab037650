"""The GPU kernels behind `grouped`, in Pallas: products that read the matrix of each group where it is stored.

A batched product needs a copy of the matrix for every block. These kernels look up the group of a block and load from
its matrix directly. Each program computes one *tile* of an output: it walks along the *inner* axis, the one that is
summed over, in steps, and adds up in float32. A *band* is a number of adjacent rows of tiles whose programs run at
about the same time, so that what they share is read from the cache of the GPU.

Several matrices per group that multiply the same rows (the gates and the values of experts) are one call: the rows are
loaded once.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from nnx.sharding.target import lowered_on, target

Arrays = tuple[jax.Array, ...]


class Tiles(NamedTuple):
    """How a kernel divides its work.

    Attributes:
        rows: the rows of an output tile. In products and their gradients by rows, it is a block.
        columns: the columns of an output tile.
        inner: the size of a step along the inner axis, for numbers of two bytes; half of it for numbers of four.
        warps: the number of warps per program, of 32 threads each.
        stages: the number of steps whose loads are in flight at once.
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


BLOCK = 128  # the largest block
# Chosen from up to 15 settings each, by their times over three layers: 2 of 8 and 8 of 64 experts with 1,024 features
# and 1,024 or 4,096 hidden ones, 8,192 tokens in bfloat16 on an H200. There they reach 426 to 609 TFLOP/s.
# By the number of matrices that share the rows: each has its own sums, which have to fit into registers together.
PRODUCT = {1: Tiles(BLOCK, 256, 64, 8, 4), 2: Tiles(BLOCK, 128, 64, 8, 4)}
ROW_GRADIENT = Tiles(BLOCK, 256, 64, 8, 4)
KERNEL_GRADIENT = {1: Tiles(128, 256, 64, 8, 4), 2: Tiles(128, 128, 32, 8, 5)}
BAND = 4

SMALLEST = 16  # the smallest tile that matrix units take


@jax.custom_vjp
def block_products(x: jax.Array, kernels: Arrays, groups: jax.Array, bounds: jax.Array) -> Arrays:
    """Multiplies each block with the matrices of its group.

    It can be differentiated in reverse mode only.

    Args:
        x: the rows in blocks, `[blocks, size, inputs]`; the size is a power of two, at least 16.
        kernels: arrays `[groups, inputs, outputs]`, one matrix per group each; they are converted to the dtype of `x`.
        groups: int32 `[blocks]`, the group of each block, sorted.
        bounds: int32 `[groups + 1]`, the number of blocks before each group, and of all that are needed. The others
            are not read, and their products are zero.

    Returns:
        The products, `[blocks, size, outputs]`, one per array of kernels.
    """
    return _forward(x, kernels, groups, bounds)[0]


def _forward(x: jax.Array, kernels: Arrays, groups: jax.Array, bounds: jax.Array) -> tuple[Arrays, Any]:
    out = lowered_on(target(x, *kernels), product, _ordinary_product, x, kernels, groups, bounds)
    return out, (x, kernels, groups, bounds)


def _backward(kept: Any, cotangents: Arrays) -> tuple[jax.Array, Arrays, None, None]:
    x, kernels, groups, bounds = kept
    dtypes = [kernel.dtype for kernel in kernels]

    def kernel(x: jax.Array, cotangents: Arrays, kernels: Arrays, groups: jax.Array, bounds: jax.Array) -> Any:
        return row_gradient(cotangents, kernels, groups, bounds), kernel_gradient(x, cotangents, bounds, dtypes)

    at = target(x, *kernels)
    of_rows, of_kernels = lowered_on(at, kernel, _ordinary_gradients, x, cotangents, kernels, groups, bounds)
    return of_rows, of_kernels, None, None


block_products.defvjp(_forward, _backward)


# The same by ordinary operations, for programs that turn out to be lowered for another platform.


def _ordinary_product(x: jax.Array, kernels: Arrays, groups: jax.Array, bounds: jax.Array) -> Arrays:
    x = jnp.where(_needed(groups, bounds), x, 0)
    return tuple(jnp.einsum("bri,bio->bro", x, kernel.astype(x.dtype)[groups]) for kernel in kernels)


def _ordinary_gradients(
    x: jax.Array, cotangents: Arrays, kernels: Arrays, groups: jax.Array, bounds: jax.Array
) -> tuple[jax.Array, Arrays]:
    needed = _needed(groups, bounds)
    cotangents = tuple(jnp.where(needed, cotangent, 0) for cotangent in cotangents)
    of_rows: Any = 0.0
    of_kernels = []
    for cotangent, kernel in zip(cotangents, kernels, strict=True):
        gathered = kernel.astype(cotangent.dtype)[groups]
        of_rows += jnp.einsum("bro,bio->bri", cotangent, gathered, preferred_element_type=jnp.float32)
        of_blocks = jnp.einsum("bri,bro->bio", x, cotangent, preferred_element_type=jnp.float32)
        summed = jnp.zeros(kernel.shape, jnp.float32).at[groups].add(of_blocks, indices_are_sorted=True)
        of_kernels.append(summed.astype(kernel.dtype))
    return of_rows.astype(x.dtype), tuple(of_kernels)


def _needed(groups: jax.Array, bounds: jax.Array) -> jax.Array:
    return (jnp.arange(groups.size) < bounds[-1])[:, None, None]


def product(
    x: jax.Array, kernels: Arrays, groups: jax.Array, bounds: jax.Array, tiles: Tiles | None = None, band: int = BAND
) -> Arrays:
    """Returns `x[block] @ kernel[groups[block]]`, for each of the kernels; see `block_products`."""
    (blocks, size, inputs), outputs = x.shape, kernels[0].shape[2]
    tiling = _fitting(tiles or PRODUCT[len(kernels)], x.dtype, size, outputs, inputs)
    out = _call(
        functools.partial(_product, size=size, blocks=blocks, tiles=tiling, band=band),
        (bounds, groups, x.reshape(-1, inputs), *(kernel.astype(x.dtype) for kernel in kernels)),
        [jax.ShapeDtypeStruct((blocks * size, outputs), x.dtype)] * len(kernels),
        tiling,
        programs=blocks * pl.cdiv(outputs, tiling.columns),
        inner=inputs,
        name="block_product",
    )
    return tuple(array.reshape(blocks, size, outputs) for array in out)


def row_gradient(
    cotangents: Arrays,
    kernels: Arrays,
    groups: jax.Array,
    bounds: jax.Array,
    tiles: Tiles | None = None,
    band: int = BAND,
) -> jax.Array:
    """Returns the sum over all kernels of `cotangent[block] @ kernel[groups[block]].T`."""
    (blocks, size, outputs), inputs, dtype = cotangents[0].shape, kernels[0].shape[1], cotangents[0].dtype
    tiling = _fitting(tiles or ROW_GRADIENT, dtype, size, inputs, outputs)
    flat = (cotangent.reshape(-1, outputs) for cotangent in cotangents)
    (out,) = _call(
        functools.partial(_row_gradient, size=size, blocks=blocks, tiles=tiling, band=band),
        (bounds, groups, *flat, *(kernel.astype(dtype) for kernel in kernels)),
        [jax.ShapeDtypeStruct((blocks * size, inputs), dtype)],
        tiling,
        programs=blocks * pl.cdiv(inputs, tiling.columns),
        inner=outputs * len(kernels),
        name="block_row_gradient",
    )
    return out.reshape(blocks, size, inputs)


def kernel_gradient(
    x: jax.Array, cotangents: Arrays, bounds: jax.Array, dtypes: Sequence[Any], tiles: Tiles | None = None
) -> Arrays:
    """Returns the sum over the blocks of each group of `x[block].T @ cotangent[block]`, for each of the cotangents.

    The sum over a group is rounded once, to its dtype in `dtypes`. A group without blocks has a sum of zero.
    """
    (blocks, size, inputs), outputs, groups = x.shape, cotangents[0].shape[2], bounds.shape[0] - 1
    tiling = _fitting(tiles or KERNEL_GRADIENT[len(cotangents)], x.dtype, inputs, outputs, size)
    return _call(
        functools.partial(_kernel_gradient, size=size, tiles=tiling),
        (bounds, x.reshape(-1, inputs), *(cotangent.reshape(-1, outputs) for cotangent in cotangents)),
        [jax.ShapeDtypeStruct((groups, inputs, outputs), dtype) for dtype in dtypes],
        tiling,
        programs=groups * pl.cdiv(inputs, tiling.rows) * pl.cdiv(outputs, tiling.columns),
        inner=blocks * size // groups,
        name="block_kernel_gradient",
    )


def _fitting(tiles: Tiles, dtype: Any, rows: int, columns: int, inner: int) -> Tiles:
    """Returns tiles that are no larger than the axes they divide."""

    def fit(tile: int, size: int) -> int:
        return max(SMALLEST, min(tile, pl.next_power_of_2(size)))

    narrow = tiles.inner * 2 // jnp.dtype(dtype).itemsize  # the same number of bytes in shared memory
    return tiles._replace(rows=fit(tiles.rows, rows), columns=fit(tiles.columns, columns), inner=fit(narrow, inner))


def _call(
    kernel: Any,
    operands: Arrays,
    out: list[jax.ShapeDtypeStruct],
    tiles: Tiles,
    *,
    programs: int,
    inner: int,
    name: str,
) -> Arrays:
    """Runs a kernel whose refs are those of whole arrays: each program finds its own tiles in them.

    Args:
        kernel: the kernel, a function of the refs of all operands and outputs.
        operands: the arrays it reads.
        out: the shapes and dtypes of the arrays it writes.
        tiles: how it divides the work.
        programs: the number of its programs.
        inner: the number of products that are summed for one entry of an output, on average.
        name: the name of the kernel in profiles.
    """
    entries = sum(math.prod(array.shape) for array in out)
    moved = sum(math.prod(array.shape) * array.dtype.itemsize for array in (*operands, *out))
    call = pl.pallas_call(
        kernel,
        grid=(programs,),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        cost_estimate=pl.CostEstimate(flops=2 * entries * inner, bytes_accessed=moved, transcendentals=0),
        interpret=target(*operands).interpreted,
        name=name,
    )
    return tuple(call(*operands))


def _product(
    bounds_ref: Any, groups_ref: Any, x_ref: Any, *refs: Any, size: int, blocks: int, tiles: Tiles, band: int
) -> None:
    kernel_refs, out_refs = refs[: len(refs) // 2], refs[len(refs) // 2 :]
    inputs, outputs = x_ref.shape[1], out_refs[0].shape[1]
    block, column = _in_bands(pl.program_id(0), blocks, pl.cdiv(outputs, tiles.columns), band)
    group = groups_ref[block]
    rows, columns = _whole(block * size, size), _part(column, tiles.columns, outputs)

    def step(index: Any, sums: Arrays) -> Arrays:
        inner = _part(index, tiles.inner, inputs)
        x = _load(x_ref, rows, inner)
        return tuple(
            total + _dot(x, _load(kernel_ref, inner, columns, group), 1, 0)
            for total, kernel_ref in zip(sums, kernel_refs, strict=True)
        )

    sums = tuple(jnp.zeros((size, tiles.columns), jnp.float32) for _ in out_refs)
    sums = lax.fori_loop(0, _steps(bounds_ref, block, inputs, tiles), step, sums)
    for out_ref, total in zip(out_refs, sums, strict=True):
        _store(out_ref, total, rows, columns)


def _row_gradient(
    bounds_ref: Any, groups_ref: Any, *refs: Any, size: int, blocks: int, tiles: Tiles, band: int
) -> None:
    half, out_ref = len(refs) // 2, refs[-1]
    cotangent_refs, kernel_refs = refs[:half], refs[half:-1]
    inputs, outputs = out_ref.shape[1], cotangent_refs[0].shape[1]
    block, column = _in_bands(pl.program_id(0), blocks, pl.cdiv(inputs, tiles.columns), band)
    group = groups_ref[block]
    rows, columns = _whole(block * size, size), _part(column, tiles.columns, inputs)
    steps = _steps(bounds_ref, block, outputs, tiles)

    total = jnp.zeros((size, tiles.columns), jnp.float32)
    for cotangent_ref, kernel_ref in zip(cotangent_refs, kernel_refs, strict=True):

        def step(index: Any, total: jax.Array, refs: Any = (cotangent_ref, kernel_ref)) -> jax.Array:
            inner = _part(index, tiles.inner, outputs)
            return total + _dot(_load(refs[0], rows, inner), _load(refs[1], columns, inner, group), 1, 1)

        total = lax.fori_loop(0, steps, step, total)
    _store(out_ref, total, rows, columns)


def _kernel_gradient(bounds_ref: Any, x_ref: Any, *refs: Any, size: int, tiles: Tiles) -> None:
    cotangent_refs, out_refs = refs[: len(refs) // 2], refs[len(refs) // 2 :]
    _, inputs, outputs = out_refs[0].shape
    row_tiles = pl.cdiv(inputs, tiles.rows)
    index, row = _split(pl.program_id(0), row_tiles)
    group, column = _split(index, pl.cdiv(outputs, tiles.columns))
    rows, columns = _part(row, tiles.rows, inputs), _part(column, tiles.columns, outputs)
    first, end = bounds_ref[group], bounds_ref[group + 1]

    def step(index: Any, sums: Arrays) -> Arrays:
        inner = _whole(first * size + index * tiles.inner, tiles.inner)
        x = _load(x_ref, inner, rows)
        return tuple(
            total + _dot(x, _load(cotangent_ref, inner, columns), 0, 0)
            for total, cotangent_ref in zip(sums, cotangent_refs, strict=True)
        )

    sums = tuple(jnp.zeros((tiles.rows, tiles.columns), jnp.float32) for _ in out_refs)
    sums = lax.fori_loop(0, (end - first) * (size // tiles.inner), step, sums)
    for out_ref, total in zip(out_refs, sums, strict=True):
        _store(out_ref, total, rows, columns, group)


def _in_bands(index: Any, rows: int, columns: int, band: int) -> tuple[Any, Any]:
    """Returns row and column of a tile by its number: band after band, and within a band column after column."""
    number, within = _split(index, band * columns)
    height = jnp.minimum(rows - number * band, band)  # the last band can be lower
    return number * band + lax.rem(within, height), lax.div(within, height)


def _split(index: Any, size: int) -> tuple[Any, Any]:
    # The operators round toward minus infinity, which takes more operations; nothing here is negative.
    return lax.div(index, jnp.int32(size)), lax.rem(index, jnp.int32(size))


def _steps(bounds_ref: Any, block: Any, size: int, tiles: Tiles) -> jax.Array:
    """Returns the number of steps along an axis; for a block that is not needed, none, so that its sums stay zero."""
    needed = block < bounds_ref[bounds_ref.shape[0] - 1]
    # Not a `where` of two Python numbers: Pallas lowers it to a boolean, which XLA refuses as the bound of a loop.
    return needed.astype(jnp.int32) * pl.cdiv(size, tiles.inner)


# Parts of axes: a slice, and a mask of what is inside of the array, or None if all of it is.


def _part(index: Any, tile: int, size: int) -> tuple[Any, Any]:
    start = index * tile
    # Without a mask, loads are wider.
    return pl.ds(start, tile), start + jnp.arange(tile, dtype=jnp.int32) < size if size % tile else None


def _whole(start: Any, size: int) -> tuple[Any, None]:
    return pl.ds(start, size), None


def _mask(shape: tuple[int, ...], rows: Any, columns: Any) -> Any:
    masks = [
        jnp.broadcast_to(jnp.expand_dims(mask, axis), shape)
        for mask, axis in ((rows, 1), (columns, 0))
        if mask is not None
    ]
    return functools.reduce(jnp.logical_and, masks) if masks else None


def _load(ref: Any, rows: Any, columns: Any, *group: Any) -> jax.Array:
    mask = _mask((rows[0].size, columns[0].size), rows[1], columns[1])
    part = ref.at[*group, rows[0], columns[0]]
    return plgpu.load(part) if mask is None else plgpu.load(part, mask=mask, other=0)


def _store(ref: Any, value: jax.Array, rows: Any, columns: Any, *group: Any) -> None:
    part = ref.at[*group, rows[0], columns[0]]
    plgpu.store(part, value.astype(ref.dtype), mask=_mask(value.shape, rows[1], columns[1]))


def _dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    axes = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, axes, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32)
