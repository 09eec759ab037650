"""Whether new tokens fit into a cache: errors outside of transforms, and the mark of an overflow inside.

Every cache of decoding has room for `max_length` tokens per row, and refuses more: keys and values, their compressed
form, and a state of fixed size alike. What can be known is checked when the call is made. Inside a transform, a row
that overflows gets a length above `max_length`, and its cache writes NaN there.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.trace import is_tracer

FULL = (
    "{cache} is full: it has room for max_length={max_length} tokens per row, {details}. Nothing was written. Make a "
    "longer cache (`init_cache` with a greater length){or_reset}, or stop generating."
)
IMPOSSIBLE_LENGTHS = (
    "{cache}: expected seq_lengths from 0 to {length}, the number of tokens in each row of the keys, got {got}. "
    "Nothing was written."
)
BELOW_ZERO = (
    "{cache}: expected {name} of 0 or more, the number of tokens in each row, got {got}. Nothing was written. To go "
    "back to the start of a text, use 0."
)
POISONED = (
    "{cache}: row {row} got more tokens than max_length={max_length} inside a transform, and the NaN that marks it is "
    "still in the cache. Start again with a {longer}cache of enough room."
)
WRONG_LENGTHS = "{cache}: expected {name} of shape {expected}, one per row, got {got}."


def check_room(
    cache: str,
    max_length: int,
    index: jax.Array,
    length: int,
    seq_lengths: jax.Array | None,
    batch: tuple[int, ...] | None = None,
) -> None:
    """Raises `ValueError` unless new tokens fit, as far as is known.

    Args:
        cache: the name of the cache's class, for errors.
        max_length: the number of tokens a row can hold.
        index: `[batch...]`, the number of tokens each row holds.
        length: the number of new tokens of each row.
        seq_lengths: `[batch...]`, how many of them are real.
        batch: the leading axes of the cache, if those of the two arrays are to be checked as well.
    """
    for name, given in (("lengths", index), ("seq_lengths", seq_lengths)):
        if batch is not None and given is not None and given.shape != batch:
            raise ValueError(WRONG_LENGTHS.format(cache=cache, name=name, expected=batch, got=given.shape))
    if seq_lengths is not None and is_known(seq_lengths):
        given = np.asarray(seq_lengths)
        if ((given < 0) | (given > length)).any():
            raise ValueError(IMPOSSIBLE_LENGTHS.format(cache=cache, length=length, got=given.tolist()))
    if is_known(index) and (np.asarray(index) < 0).any():
        name = "an index" if cache == "KVCache" else "lengths"
        raise ValueError(BELOW_ZERO.format(cache=cache, name=name, got=np.asarray(index).tolist()))
    or_reset = ", call `reset()`" if cache == "KVCache" else ""
    options = {"cache": cache, "max_length": max_length, "or_reset": or_reset}
    if seq_lengths is None and length > max_length:
        raise ValueError(FULL.format(**options, details=f"got {length} tokens at once"))
    added = length if seq_lengths is None else seq_lengths
    if not (is_known(index) and is_known(added)):
        return
    held = np.asarray(index)
    needed = held + np.asarray(added)
    if (needed > max_length).any():
        row = np.unravel_index(int(needed.argmax()), needed.shape)
        where = f"row {', '.join(map(str, row))}" if row else "it"
        details = f"{where} holds {held[row]} tokens and would come to {needed[row]}"
        raise ValueError(FULL.format(**options, details=details))


def grown(index: jax.Array, length: int, seq_lengths: jax.Array | None, max_length: int) -> tuple[jax.Array, jax.Array]:
    """Returns the number of tokens that each row comes to, and which rows were given impossible numbers.

    The former is above `max_length` in every row that must not go on: those that overflow, and those of the latter.
    """
    added: Any = length if seq_lengths is None else seq_lengths.astype(jnp.int32)
    impossible = index < 0
    if seq_lengths is not None:
        impossible |= (added < 0) | (added > length)
    return jnp.where(impossible, max_length + 1, index + added), impossible


def is_known(value: Any) -> bool:
    """Returns whether a value can be read now, outside of any trace."""
    return not (is_tracer(value) or isinstance(value, jax.ShapeDtypeStruct))
