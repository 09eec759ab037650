"""The GPU kernel behind products of a few rows with a quantized matrix, in Pallas.

One program per *tile* of output columns, and per *split* of the inputs where too few tiles would leave a GPU idle. A
program walks over its inputs in *steps*. It loads the integers of a step, converts them in registers, multiplies, and
applies the scales of their group. The matrix is read once, and nothing of its size is written.

Two neighboring 8-bit integers, or four of 4 bits, are loaded as one *word* of 16 bits, which costs nothing: to XLA the
words are a view of the same memory. The integers at one place of every word are a *plane*: every fourth column of a
4-bit matrix. Planes are multiplied one by one, so integers are never rearranged, which would take longer than reading
them. What a thread converts are pairs of words: a few instructions place the bits of two integers into the mantissas of
two floating-point numbers, and subtract what that adds to them (see `_instructions`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from nnx.nn.quantized.quantized_tiling import WORD, Tiling


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
    columns, splits = tiling.columns, tiling.splits
    words = _as_words(integers)
    places = integers.shape[1] // words.shape[1]
    grouped = scale.ndim == 2
    group_size = inputs // scale.shape[1 if transposed else 0] if grouped else 0
    if transposed:
        # A plane holds every second or fourth input, so the rows are sorted in the same way.
        x = jnp.swapaxes(jnp.reshape(x, (rows, inputs // places, places)), 1, 2)
        matrix = pl.BlockSpec((columns, inputs // places), lambda tile, split, band: (tile, 0))
        scales = pl.BlockSpec((columns, *scale.shape[1:]), lambda tile, split, band: (tile, 0)[: scale.ndim])
        out_places = 1
    else:
        x = x[:, None]
        matrix = pl.BlockSpec((inputs, columns // places), lambda tile, split, band: (0, tile))
        scale = jnp.reshape(scale, (*scale.shape[:-1], outputs // places, places))
        scales = pl.BlockSpec(
            (*scale.shape[:-2], columns // places, places), lambda tile, split, band: (0, tile, 0)[-scale.ndim :]
        )
        out_places = places
    call = pl.pallas_call(
        functools.partial(
            _kernel,
            rows=rows,
            places=places,
            depth=tiling.depth,
            steps=inputs // tiling.depth // splits,
            steps_per_group=group_size // tiling.depth,
            transposed=transposed,
            interpret=interpret,
        ),
        grid=(outputs // columns, splits, pl.cdiv(rows, tiling.rows)),
        in_specs=[
            pl.BlockSpec((tiling.rows, *x.shape[1:]), lambda tile, split, band: (band, 0, 0)),
            matrix,
            scales,
        ],
        out_specs=pl.BlockSpec(
            (None, tiling.rows, columns // out_places, out_places), lambda tile, split, band: (split, band, tile, 0)
        ),
        # The partial sums of several splits are rounded only after they are added.
        out_shape=jax.ShapeDtypeStruct(
            (splits, rows, outputs // out_places, out_places), dtype if splits == 1 else jnp.float32
        ),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name="quantized_product",
    )
    parts = jnp.reshape(call(x, words, scale), (splits, rows, outputs))
    return parts[0] if splits == 1 else jnp.sum(parts, axis=0).astype(dtype)


def _as_words(integers: jax.Array) -> jax.Array:
    places = WORD // (4 if integers.dtype == jnp.int4 else 8)
    rows, columns = integers.shape
    return lax.bitcast_convert_type(jnp.reshape(integers, (rows, columns // places, places)), jnp.uint16)


def _kernel(
    x_ref: Any,
    matrix_ref: Any,
    scale_ref: Any,
    out_ref: Any,
    *,
    rows: int,
    places: int,
    depth: int,
    steps: int,
    steps_per_group: int,
    transposed: bool,
    interpret: bool,
) -> None:
    padded, columns, out_places = out_ref.shape
    is_row = pl.program_id(2) * padded + jnp.arange(padded)[:, None] < rows
    first = pl.program_id(1) * steps
    width = depth // places if transposed else depth  # of the rows that a plane is multiplied with

    def load_rows(at: Any, place: int) -> jax.Array:
        return plgpu.load(x_ref.at[:, jnp.int32(place), pl.ds(at * width, width)], mask=is_row, other=0)

    def load_scales(at: Any) -> tuple[jax.Array, ...]:
        if not steps_per_group:
            return ()
        group = lax.div(at, jnp.int32(steps_per_group))
        if transposed:
            return (scale_ref[:, group].astype(jnp.float32),)
        return tuple(scale_ref[group, :, jnp.int32(place)].astype(jnp.float32) for place in range(places))

    def add_step(step: Any, carry: tuple[tuple[jax.Array, ...], ...]) -> tuple[tuple[jax.Array, ...], ...]:
        sums, scales = carry
        at = first + step
        # A step ahead: the products of this one take as long as the scales of the next one to arrive.
        next_scales = load_scales(first + lax.min(step + 1, jnp.int32(steps - 1)))
        words = matrix_ref[:, pl.ds(at * width, width)] if transposed else matrix_ref[pl.ds(at * depth, depth), :]
        x = None if transposed else load_rows(at, 0)
        products = []
        for place in range(places):
            left = load_rows(at, place) if x is None else x
            products.append(_dot(left, _plane(words, place, places, left.dtype, interpret), transposed))
        if transposed:
            products = [sum(products[1:], products[0])]
        if scales:
            products = [y * scale[None] for y, scale in zip(products, scales, strict=True)]
        return tuple(total + y for total, y in zip(sums, products, strict=True)), next_scales

    zeros = (jnp.zeros((padded, columns), jnp.float32),) * out_places
    sums, _ = lax.fori_loop(0, steps, add_step, (zeros, load_scales(first)))
    for place, total in enumerate(sums):
        if not steps_per_group:
            total *= (scale_ref[...] if transposed else scale_ref[:, jnp.int32(place)]).astype(jnp.float32)[None]
        plgpu.store(out_ref.at[:, :, jnp.int32(place)], total.astype(out_ref.dtype), mask=is_row)


def _dot(x: jax.Array, plane: jax.Array, transposed: bool) -> jax.Array:
    return lax.dot_general(
        x,
        plane,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST,  # of float32; there is only one of narrower dtypes
        preferred_element_type=jnp.float32,
    )


def _plane(words: jax.Array, place: int, places: int, dtype: Any, interpret: bool) -> jax.Array:
    """Returns the integers at one place of the words."""
    bits = WORD // places
    if interpret or dtype not in (jnp.bfloat16, jnp.float16):
        signed = lax.bitcast_convert_type(words, jnp.int16)
        highest = lax.shift_left(signed, jnp.int16(WORD - bits - bits * place))
        return lax.shift_right_arithmetic(highest, jnp.int16(WORD - bits)).astype(dtype)
    (plane,) = plgpu.elementwise_inline_asm(
        _instructions(bits, place, dtype),
        args=[words],
        constraints="=r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, dtype)],
    )
    return plane


def _instructions(bits: int, place: int, dtype: Any) -> str:
    """Returns the instructions that convert the integers at one place of two words, `$1`, to two numbers, `$0`.

    A number of 4 bits with its sign flipped, 0 to 15, replaces the lowest bits of 128 (1024 in float16), whose mantissa
    is then the number: 128 + 8 + n. An 8-bit number has one bit more than the mantissa of bfloat16. Its lower seven
    bits make 128 + (n & 127), and its sign the last bit of the exponent of -128, which makes -128 or -256: their sum
    is n.
    """
    half = dtype == jnp.float16
    unpack = f"{{ .reg .b32 t, m, p, q, one; shr.b32 t, $1, {bits * place}; "
    kind, one = ("f16x2", 0x3C003C00) if half else ("bf16x2", 0x3F803F80)
    # `lop3` with 0x6A is (a & b) ^ c.
    if bits == 8 and not half:
        parts = (
            "mov.b32 m, 0x43004300; lop3.b32 p, t, 0x007F007F, m, 0x6A; "
            "mov.b32 m, 0xC300C300; lop3.b32 q, t, 0x00800080, m, 0x6A; "
        )
    else:
        mask = 0x000F000F if bits == 4 else 0x00FF00FF
        offset = (0x6408 if bits == 4 else 0x6480) if half else 0x4308
        pair = offset << 16 | offset
        parts = f"mov.b32 m, {pair:#x}; lop3.b32 p, t, {mask:#x}, m, 0x6A; mov.b32 q, {pair | 0x80008000:#x}; "
    return f"{unpack}{parts}mov.b32 one, {one:#x}; fma.rn.{kind} $0, p, one, q; }}"
