"""Products in which every group of rows has its own matrix, at the cost of the rows there are.

A *row* belongs to one *group*; in a mixture of experts it is a token on its way to one expert. How many rows each group
has is known only when the program runs, while XLA needs fixed shapes. So rows are sorted by group, and each group is
padded to whole *blocks* of equal size. A block belongs to one group and has a *place* for each of its rows. The product
is then a batched one: each block times the matrix of its group. A block of one row wastes nothing, so with few rows,
as in decoding, the matrices that are needed are gathered, row by row.

There are two *implementations* of the product. "xla" gathers the matrix of every block. "triton" is a GPU kernel that
reads the matrices where they are stored (`grouped_kernel`); its blocks have the size of its tiles.

`jax.lax.ragged_dot` is not used: on CPUs and GPUs it multiplies every row with the matrix of every group.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike
from jax.sharding import AxisType

from nnx.nn.quantized.quantized import as_operand
from nnx.nn.support.settings import cast, statistics_dtype
from nnx.sharding.meshes import current_mesh
from nnx.sharding.target import target

PADDING = 0.12
"""The limit of the places that may stay empty, as a fraction of the rows."""
PADDING_OF_LARGE = 0.25
"""The limit with blocks of at least `LARGE` rows. There are fewer of them, so fewer matrices are gathered."""
LARGE = 128

TILES = (128, 64, 32, 16)
"""The sizes of blocks for the kernel. Larger tiles read the matrices fewer times; 16 is the tile of matrix units."""

_LARGEST = 1024  # rows of a block; larger ones are no faster
_ALIGNED = 16  # the size of large blocks is a multiple of this, the tile of matrix units

# Compute capabilities of the GPUs whose shared memory (227 KiB) holds the tiles of the kernel: H100, H200, B200, B300.
_CAPABLE = ("9.0", "10.0", "10.3")
_KERNEL_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_DEFAULT_PRECISIONS = (None, "default", "fastest", "bfloat16", lax.Precision.DEFAULT)

Implementation = Literal["triton", "xla"]

NO_KERNEL = "MoE: implementation='triton' is not possible here: {obstacle}."


class Blocks(NamedTuple):
    """Which row is in which place. What has no counterpart has a number past the end, each its own.

    Attributes:
        rows: int32 `[blocks, size]`, the row in each place.
        places: int32 `[rows]`, the place of each row, counted over all blocks.
        groups: int32 `[blocks]`, the group of each block.
        bounds: int32 `[groups + 1]`, the number of blocks before each group, and the number of blocks that are needed.
    """

    rows: jax.Array
    places: jax.Array
    groups: jax.Array
    bounds: jax.Array


def choose_implementation(
    x: jax.Array,
    kernels: Sequence[jax.Array],
    precision: PrecisionLike,
    scales: Sequence[jax.Array | None],
    wanted: Implementation | None = None,
) -> Implementation:
    """Returns the implementation for rows `[rows, inputs]`, and for what `block_dots` is going to multiply them by.

    The kernel pays on a single GPU (XLA cannot split its work over several), unless there are so few rows that it would
    pad them to a multiple of their number. Quantized matrices and float64 need the batched product in any case.

    Args:
        x: the rows.
        kernels: all matrices, each array `[groups, inputs, outputs]`.
        precision: the precision of the products.
        scales: the scales of quantized matrices, or None for each array.
        wanted: the implementation that was asked for, if any.
    """
    possible = all(array.dtype in _KERNEL_DTYPES for array in (x, *kernels)) and all(scale is None for scale in scales)
    if not possible:
        return "xla"
    if wanted is not None:
        obstacle = target(x, *kernels).triton_obstacle if wanted == "triton" else None
        if obstacle is not None:
            raise ValueError(NO_KERNEL.format(obstacle=obstacle))
        return wanted
    # Products of two numbers in half precision are exact in float32; those of float32 are rounded, unless asked not to.
    config: Any = jax.config
    asked = config.jax_default_matmul_precision if precision is None else precision
    exact = x.dtype == jnp.float32 and asked not in _DEFAULT_PRECISIONS
    enough = tile_size(x.shape[0], kernels[0].shape[0]) is not None
    return "triton" if enough and not exact and _has_one_gpu(x, *kernels) else "xla"


def _has_one_gpu(*arrays: jax.Array) -> bool:
    at = target(*arrays)
    if at.platform != "gpu" or at.devices != 1 or at.triton_obstacle is not None:
        return False
    # On axes that are not automatic (a mesh can have one device), JAX wants to know how the output is distributed.
    mesh = current_mesh()
    if mesh is not None and any(kind != AxisType.Auto for kind in mesh.axis_types):
        return False
    return at.capability in _CAPABLE


def tile_size(num_rows: int, num_groups: int) -> int | None:
    """Returns the largest tile for which the empty places stay within the limit; None if there are too few rows."""
    return next((tile for tile in TILES if num_groups * (tile - 1) <= PADDING_OF_LARGE * num_rows), None)


def block_size(num_rows: int, num_groups: int) -> int:
    """Returns the largest size of blocks for which the empty places stay within the limit."""
    # Each group leaves at most size - 1 places empty.
    size = 1 + int(PADDING_OF_LARGE * num_rows / num_groups)
    if size >= LARGE:
        return min(size, _LARGEST) // _ALIGNED * _ALIGNED
    return 1 + int(PADDING * num_rows / num_groups)


def make_blocks(groups: jax.Array, num_groups: int, implementation: Implementation = "xla") -> Blocks:
    """Arranges rows in blocks.

    For example, rows of the groups `[1, 0, 1, 1]` in blocks of two: block 0 has row 1 and an empty place, block 1 has
    rows 0 and 2, block 2 has row 3 and an empty place. The groups of the blocks are `[0, 1, 1]`, the places of the rows
    `[2, 0, 3, 4]`, and the bounds `[0, 1, 3]`.

    Args:
        groups: int32 `[rows]`, the group of each row; `num_groups` for a row that belongs to none.
        num_groups: the number of groups.
        implementation: the implementation of the products, which decides the size of the blocks.
    """
    num_rows = groups.shape[0]
    if implementation == "triton":
        size = tile_size(num_rows, num_groups) or TILES[-1]
    else:
        size = block_size(num_rows, num_groups)
    num_blocks = (num_rows + min(num_rows, num_groups) * (size - 1)) // size
    counts = jnp.zeros(num_groups, jnp.int32).at[groups].add(1, mode="drop")
    needed = -(-counts // size)
    last_blocks, last_rows = jnp.cumsum(needed), jnp.cumsum(counts)
    first_blocks, first_rows = last_blocks - needed, last_rows - counts

    block = jnp.arange(num_blocks, dtype=jnp.int32)
    of_block = jnp.sum(block[:, None] >= last_blocks, axis=1, dtype=jnp.int32)
    of_block = jnp.minimum(of_block, num_groups - 1)  # for blocks after the last one needed, which stay empty
    within = (block - first_blocks[of_block])[:, None] * size + jnp.arange(size, dtype=jnp.int32)

    order = jnp.argsort(groups)  # rows of one group follow each other, in their own order
    sorted_row = jnp.minimum(first_rows[of_block][:, None] + within, num_rows - 1)
    beyond = num_rows + jnp.arange(num_blocks * size, dtype=jnp.int32).reshape(num_blocks, size)
    rows = jnp.where(within < counts[of_block][:, None], order[sorted_row].astype(jnp.int32), beyond)

    # The other direction: the row at each position of this order is that many places into the blocks of its group.
    position = jnp.arange(num_rows, dtype=jnp.int32)
    group = groups[order]
    known = jnp.minimum(group, num_groups - 1)
    place = first_blocks[known] * size + position - first_rows[known]
    place = jnp.where(group < num_groups, place, num_blocks * size + position)
    places = jnp.zeros(num_rows, jnp.int32).at[order].set(place, unique_indices=True)
    return Blocks(rows, places, of_block, jnp.concatenate([first_blocks[:1], last_blocks]))


def to_blocks(x: jax.Array, blocks: Blocks, implementation: Implementation = "xla") -> jax.Array:
    """Returns rows `[rows, features]` in blocks, `[blocks, size, features]`; empty places are zero."""
    return _take(x, blocks.rows) if implementation == "xla" else _move(x, blocks.rows, blocks.places)


def from_blocks(x: jax.Array, blocks: Blocks, implementation: Implementation = "xla") -> jax.Array:
    """Returns the rows of blocks in their order, `[rows, features]`; rows of no group are zero."""
    x = x.reshape(-1, x.shape[-1])
    return _take(x, blocks.places) if implementation == "xla" else _move(x, blocks.places, blocks.rows)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    # No index occurs twice, and JAX may rely on it for the transpose: the gradient needs no atomic additions.
    return x.at[index].get(mode="fill", fill_value=0, unique_indices=True)


# A gather from the other side is its transpose, and reads and writes less than the scatter that JAX would use. Like the
# product of the kernel, it has no derivative in forward mode, so only the kernel uses it.
@jax.custom_vjp
def _move(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns the rows of `x` at `index`; `inverse` is where each row of `x` is in the output."""
    del inverse
    return _take(x, index)


def _move_forward(x: jax.Array, index: jax.Array, inverse: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _take(x, index), inverse


def _move_backward(inverse: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    return _take(cotangent.reshape(-1, cotangent.shape[-1]), inverse.reshape(-1)), None, None


_move.defvjp(_move_forward, _move_backward)


def block_dots(
    x: jax.Array,
    kernels: Sequence[jax.Array],
    blocks: Blocks,
    precision: PrecisionLike = None,
    scales: Sequence[jax.Array | None] | None = None,
    implementation: Implementation = "xla",
) -> tuple[jax.Array, ...]:
    """Multiplies each block with the matrices of its group.

    Args:
        x: the rows in blocks, `[blocks, size, inputs]`.
        kernels: arrays of one shape `[groups, inputs, outputs]`, each with one matrix per group.
        blocks: the arrangement of the rows.
        precision: the precision of the products, see `jax.lax.Precision`.
        scales: the scales of quantized matrices (see nn/quantized); their first axis is that of `kernels`.
        implementation: the implementation, with which the blocks were made. "triton" ignores `precision`, has no
            scales, and can be differentiated in reverse mode only.

    Returns:
        The products, `[blocks, size, outputs]`, one per array of kernels.
    """
    if implementation == "triton":
        from nnx.nn.moe.grouped_kernel import block_products  # Pallas takes long to import

        return block_products(x, tuple(kernels), blocks.groups, blocks.bounds)

    # There are several blocks per group, so the gathered matrices are larger than the parameters. The checkpoint
    # gathers them again in the backward pass instead of keeping them. (The product is not repeated: nothing needs it.)
    @jax.checkpoint
    def product(x: jax.Array, kernels: jax.Array, scales: jax.Array | None) -> jax.Array:
        if scales is None:
            gathered = cast(_gather(kernels, blocks.groups), x.dtype)
            return jnp.einsum("bri,bio->bro", x, gathered, precision=precision)
        gathered, scale = (_of_groups(array, blocks.groups) for array in (kernels, scales))
        operand, scale = as_operand(gathered, scale, (1,), x.dtype)
        # Sums of products with integers can be large, so they are not rounded before they are scaled.
        wide = None if scale is None else statistics_dtype(x.dtype)
        out = jnp.einsum("bri,bio->bro", x, operand, precision=precision, preferred_element_type=wide)
        return out if scale is None else cast(out * scale[:, None], x.dtype)

    return tuple(product(x, *pair) for pair in zip(kernels, scales or [None] * len(kernels), strict=True))


@jax.custom_jvp
def _gather(kernels: jax.Array, groups: jax.Array) -> jax.Array:
    """Returns the matrix of each group in a sorted list."""
    return _of_groups(kernels, groups)


@_gather.defjvp
def _gather_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    # The gradient of gathering is a sum over the blocks of a group. The conversions make it a sum in float32.
    (kernels, groups), (tangent, _) = primals, tangents
    wide = cast(tangent, statistics_dtype(tangent.dtype))
    return _gather(kernels, groups), cast(_gather(wide, groups), tangent.dtype)


def _of_groups(array: jax.Array, groups: jax.Array) -> jax.Array:
    return array.at[groups].get(mode="promise_in_bounds", indices_are_sorted=True)
