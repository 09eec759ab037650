"""How the kernel for products of a few rows with a quantized matrix divides its work (see `quantized_kernel`)."""

from typing import NamedTuple

MOST_ROWS = 64
"""The most rows for which the kernel is used; it was not measured with more."""

# Chosen from up to 30 settings for each matrix of a Llama with 1.2 billion parameters, 8 rows, on an H200. They suit
# three of its matrices; the fastest settings for 512 outputs and for the head have narrower tiles.
COLUMNS = 128
DEPTH = 128
PROGRAMS = 1000  # more than run at the same time, so that some load while others compute
MOST_SPLITS = 16
WARPS = 4
STAGES = 4

SMALLEST = 32  # columns and depth: a row of a tile of 4-bit integers is then 16 bytes, which one thread loads at once


class Tiling(NamedTuple):
    """The division of a product: the output columns of a tile, the inputs of a step, and the splits of the inputs.

    `warps` and `stages` are settings of Triton's compiler: how many times 32 threads compute a tile, and how many steps
    are loaded ahead of the one that is computed.
    """

    columns: int
    depth: int
    splits: int
    warps: int = WARPS
    stages: int = STAGES


def make_tiling(inputs: int, outputs: int, group_size: int) -> Tiling | None:
    """Returns the division of a product; None if no power of two divides its sizes well.

    Args:
        inputs: the number of inputs.
        outputs: the number of outputs.
        group_size: the number of inputs that share a scale.
    """
    columns, depth = _power_of_two(outputs, COLUMNS), _power_of_two(group_size, DEPTH)
    if min(columns, depth) < SMALLEST:
        return None
    splits = 1
    while splits < MOST_SPLITS and outputs // columns * splits < PROGRAMS and inputs // depth % (2 * splits) == 0:
        splits *= 2
    return Tiling(columns, depth, splits)


def _power_of_two(size: int, most: int) -> int:
    """Returns the largest power of two that divides a size, up to `most`."""
    return min(size & -size, most)
