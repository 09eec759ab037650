"""What a batch may hold, checked before it goes to the devices."""

from typing import Any

import jax
import numpy as np

STRINGS = """nnx.prefetch: {route} holds strings, which cannot be on a device. Turn them into numbers, or drop them: \
nnx.prefetch(({{k: v for k, v in batch.items() if k != {key!r}}} for batch in loader))."""
OBJECTS = """nnx.prefetch: {route} is {what}, which JAX cannot put on a device. Turn it into an array of numbers in \
the loader; a tensor of PyTorch with tensor.numpy()."""
NUMBERS = """nnx.prefetch: {route} is a list of Python numbers, and each becomes an array of its own on the device, \
which is slow. Make it one array in the loader: np.asarray(batch[{key!r}]), or dataset.with_format("numpy") for a data \
set of Hugging Face."""

_NUMBERS = (int, float, complex)


def check_batch(batch: Any) -> str | None:
    """Returns a warning about a batch, or None.

    Raises:
        TypeError: the batch holds something that cannot be on a device; the message names its key.
    """
    warning = None
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(batch, is_leaf=_is_list_of_numbers):
        if isinstance(leaf, (jax.Array, *_NUMBERS)) or hasattr(leaf, "__jax_array__"):
            continue
        kind = leaf.dtype.kind if isinstance(leaf, (np.ndarray, np.generic)) else type(leaf).__name__
        route, key = f"batch{jax.tree_util.keystr(key_path)}", _key_of(key_path)
        if kind == "list":
            warning = warning or NUMBERS.format(route=route, key=key)
        elif kind in ("str", "bytes", "S", "U", "T"):
            column = f"batch{jax.tree_util.keystr(key_path[:1])}"
            raise TypeError(STRINGS.format(route=column, key=key))
        elif kind == "O" or not isinstance(leaf, (np.ndarray, np.generic)):
            what = "an array of Python objects" if kind == "O" else f"a {type(leaf).__qualname__}"
            raise TypeError(OBJECTS.format(route=route, what=what))
    return warning


def _is_list_of_numbers(value: Any) -> bool:
    return (
        type(value) is list
        and len(value) > 1
        and isinstance(value[0], _NUMBERS)
        and all(isinstance(item, _NUMBERS) for item in value)
    )


def _key_of(key_path: tuple[Any, ...]) -> Any:
    """Returns the first key on the way to a leaf: the name of the column."""
    return getattr(key_path[0], "key", getattr(key_path[0], "idx", None)) if key_path else None
