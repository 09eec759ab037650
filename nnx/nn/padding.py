"""Padding of spatial dimensions, as convolutions and pooling take it.

A *padding* is a name ("SAME", "VALID", …), an int for all sides, or one entry per spatial dimension, each an int for
both sides or a pair `(low, high)`. It is brought to a name or a tuple of pairs once, in the constructor.
"""

from collections.abc import Collection, Sequence

import numpy as np

PaddingLike = str | int | Sequence[int | tuple[int, int]]
Padding = str | tuple[tuple[int, int], ...]

UNKNOWN_PADDING = (
    "{layer}: unknown padding {got!r}. Use one of {names}, an int, or one int or (low, high) pair per spatial "
    "dimension, {dimensions} here."
)


def normalize_padding(layer: str, padding: PaddingLike, dimensions: int, names: Collection[str]) -> Padding:
    """`padding` as one of `names` or as one `(low, high)` pair per dimension.

    >>> normalize_padding("Conv", (1, (0, 2)), 2, ("SAME",))
    ((1, 1), (0, 2))
    """
    error = ValueError(
        UNKNOWN_PADDING.format(
            layer=layer, got=padding, names=", ".join(repr(name) for name in names), dimensions=dimensions
        )
    )
    if isinstance(padding, str):
        if padding.upper() not in names:
            raise error
        return padding.upper()
    if isinstance(padding, int | np.integer):
        return ((int(padding), int(padding)),) * dimensions
    if len(padding) != dimensions:
        raise error
    pairs = []
    for entry in padding:
        pair = (entry, entry) if isinstance(entry, int | np.integer) else tuple(entry)
        if len(pair) != 2 or not all(isinstance(side, int | np.integer) for side in pair):
            raise error
        pairs.append((int(pair[0]), int(pair[1])))
    return tuple(pairs)
