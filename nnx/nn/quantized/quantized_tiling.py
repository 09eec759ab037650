"""How the kernel for products of a few rows with a quantized matrix divides its work (see `quantized_kernel`)."""

from typing import NamedTuple

WORD = 16
"""The bits that are loaded together."""
MOST_ROWS = 64
"""The most rows for which the kernel is used; it was not measured with more."""
SMALLEST_DOT = 16
"""The fewest rows that a product in Triton can have."""

# Chosen from up to 57 settings for each matrix of a Llama with 8 billion parameters on an H200, for 8 and 64 rows.
DEPTH = 128
PROGRAMS = {8: 200, 4: 400}
"""The programs that keep a GPU busy, by the bits of the integers: fewer bits are loaded sooner."""
MOST_SPLITS = 16

SMALLEST = 32  # columns and depth: fewer would be loaded in pieces that are smaller than the memory's


class Tiling(NamedTuple):
    """The division of a product: the output columns of a tile, the inputs of a step, and the splits of the inputs.

    `rows` is the number of rows that a program multiplies. `warps` and `stages` are settings of Triton's compiler: how
    many times 32 threads compute a tile, and how many steps are loaded ahead of the one that is computed.
    """

    columns: int
    depth: int
    splits: int
    rows: int = SMALLEST_DOT
    warps: int = 4
    stages: int = 4


def make_tiling(
    rows: int, inputs: int, outputs: int, group_size: int, bits: int, transposed: bool = False
) -> Tiling | None:
    """Returns the division of a product; None if no power of two divides its sizes well.

    Args:
        rows: the number of rows.
        inputs: the number of inputs.
        outputs: the number of outputs.
        group_size: the number of inputs that share a scale.
        bits: the bits of the integers.
        transposed: whether the inputs are the last axis of the matrix.
    """
    many = rows > 32
    wide = many and bits == 4
    columns, depth = _power_of_two(outputs, 256 if wide else 128), _power_of_two(group_size, DEPTH)
    planes = SMALLEST_DOT * WORD // bits  # the last axis, of which each plane has a part
    smallest_columns, smallest_depth = (SMALLEST, max(SMALLEST, planes)) if transposed else (planes, SMALLEST)
    if columns < smallest_columns or depth < smallest_depth:
        return None
    padded = max(SMALLEST_DOT, 1 << (rows - 1).bit_length())
    tile_rows = min(padded, 32 if bits == 4 else 64)
    programs = outputs // columns * -(-rows // tile_rows)
    enough = PROGRAMS[8] if many else PROGRAMS[bits]
    splits = 1
    while splits < MOST_SPLITS and programs * splits < enough and inputs // depth % (2 * splits) == 0:
        splits *= 2
    return Tiling(columns, depth, splits, tile_rows, 8 if columns == 256 else 4, 3 if many else 4)


def _power_of_two(size: int, most: int) -> int:
    """Returns the largest power of two that divides a size, up to `most`."""
    return min(size & -size, most)
