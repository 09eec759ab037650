"""Products in which every group of rows has its own matrix, at the cost of the rows there are.

A *row* belongs to one *group*; in a mixture of experts it is a token on its way to one expert. How many rows each group
has is known only when the program runs, while XLA needs fixed shapes. So rows are sorted by group, and each group is
padded to whole *blocks* of equal size. A block belongs to one group and has a *place* for each of its rows. The product
is then a batched one: each block times the matrix of its group. A block of one row wastes nothing, so with few rows,
as in decoding, the matrices that are needed are gathered, row by row.

`jax.lax.ragged_dot` is not used: on CPUs and GPUs it multiplies every row with the matrix of every group.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike

from nnx.nn.quantized import as_operand
from nnx.nn.settings import cast, statistics_dtype

PADDING = 0.12
"""The limit of the places that may stay empty, as a fraction of the rows."""
PADDING_OF_LARGE = 0.25
"""The limit with blocks of at least `LARGE` rows. There are fewer of them, so fewer matrices are gathered."""
LARGE = 128

_LARGEST = 1024  # rows of a block; larger ones are no faster
_ALIGNED = 16  # the size of large blocks is a multiple of this, the tile of matrix units


class Blocks(NamedTuple):
    """Which row is in which place. What has no counterpart has a number past the end, each its own.

    Attributes:
        rows: int32 `[blocks, size]`, the row in each place.
        places: int32 `[rows]`, the place of each row, counted over all blocks.
        groups: int32 `[blocks]`, the group of each block.
    """

    rows: jax.Array
    places: jax.Array
    groups: jax.Array


def block_size(num_rows: int, num_groups: int) -> int:
    """Returns the largest size of blocks for which the empty places stay within the limit."""
    # Each group leaves at most size - 1 places empty.
    size = 1 + int(PADDING_OF_LARGE * num_rows / num_groups)
    if size >= LARGE:
        return min(size, _LARGEST) // _ALIGNED * _ALIGNED
    return 1 + int(PADDING * num_rows / num_groups)


def make_blocks(groups: jax.Array, num_groups: int) -> Blocks:
    """Arranges rows in blocks.

    Args:
        groups: int32 `[rows]`, the group of each row; `num_groups` for a row that belongs to none.
        num_groups: the number of groups.
    """
    num_rows = groups.shape[0]
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

    order = jnp.argsort(groups)
    sorted_row = jnp.minimum(first_rows[of_block][:, None] + within, num_rows - 1)
    beyond = num_rows + jnp.arange(num_blocks * size, dtype=jnp.int32).reshape(num_blocks, size)
    rows = jnp.where(within < counts[of_block][:, None], order[sorted_row].astype(jnp.int32), beyond)

    position = jnp.arange(num_rows, dtype=jnp.int32)
    group = groups[order]
    known = jnp.minimum(group, num_groups - 1)
    place = first_blocks[known] * size + position - first_rows[known]
    place = jnp.where(group < num_groups, place, num_blocks * size + position)
    places = jnp.zeros(num_rows, jnp.int32).at[order].set(place, unique_indices=True)
    return Blocks(rows, places, of_block)


def to_blocks(x: jax.Array, blocks: Blocks) -> jax.Array:
    """Returns rows `[rows, features]` in blocks, `[blocks, size, features]`; empty places are zero."""
    return _take(x, blocks.rows)


def from_blocks(x: jax.Array, blocks: Blocks) -> jax.Array:
    """Returns the rows of blocks in their order, `[rows, features]`; rows of no group are zero."""
    return _take(x.reshape(-1, x.shape[-1]), blocks.places)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    # No index occurs twice, and JAX may rely on it for the transpose: the gradient needs no atomic additions.
    return x.at[index].get(mode="fill", fill_value=0, unique_indices=True)


def block_dot(
    x: jax.Array,
    kernels: jax.Array,
    blocks: Blocks,
    precision: PrecisionLike = None,
    scales: jax.Array | None = None,
) -> jax.Array:
    """Multiplies each block with the matrix of its group.

    Args:
        x: the rows in blocks, `[blocks, size, inputs]`.
        kernels: one matrix per group, `[groups, inputs, outputs]`.
        blocks: the arrangement of the rows.
        precision: the precision of the product, see `jax.lax.Precision`.
        scales: the scales of quantized matrices, see `nnx.nn.quantized`; their first axis is that of `kernels`.

    Returns:
        The products, `[blocks, size, outputs]`.
    """

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

    return product(x, kernels, scales)


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
