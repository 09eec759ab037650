"""The key-value cache of autoregressive decoding.

A `KVCache` keeps, for every row of a batch, the keys and values of the tokens seen so far. Each row has its own
*index*, the number of tokens it holds, so prompts can be ragged. Token `i` of a row is in *slot* `i`; slots from the
index on are not yet written, and `mask` hides them.

**A full cache refuses.** Outside of transforms, an append that does not fit raises `ValueError`, and nothing is
written. Inside `jit`, `scan` and the like, the index is not known while tracing. There a row that overflows is
*poisoned*: its new values become NaN, so every output of that row is NaN from then on, and its index stays above
`max_length`, which `overflowed` shows and `check` raises on. Old tokens are never silently overwritten. (A chunk longer
than the whole cache raises `ValueError` even while tracing.)
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from nnx.core.module import Module
from nnx.core.trace import is_tracer
from nnx.core.variables import Cache
from nnx.nn.masks import positions_visible
from nnx.nn.parameters import AxisNames

FULL = (
    "KVCache is full: it has room for max_length={max_length} tokens per row, {details}. Nothing was written. Make a "
    "longer cache (`init_cache` with a greater length), call `reset()`, or stop generating."
)
NOT_FLOATS = "KVCache stores floating-point numbers: expected such a dtype, got {got}."
NO_ROOM = "KVCache: expected max_length >= 1, got {got}."
WRONG_SHAPE = "KVCache: expected {name} of shape {expected} (batch..., length, heads, head_dim), got {got}."
UNPAIRED = "KVCache: expected as many keys as values, got {keys} and {values}."
WRONG_LENGTHS = "KVCache: expected seq_lengths of shape {expected}, one per row, got {got}."


class KVCache(Module):
    """Keys and values of the tokens so far, with a position per row.

    Args:
        batch_shape: the leading axes, `()` for none; an int means one axis.
        max_length: the number of tokens a row can hold.
        num_heads: the number of heads of keys and values.
        head_dim: the number of features of a key.
        value_dim: the number of features of a value; `head_dim` by default.
        dtype: the dtype in which keys and values are stored, a floating-point type.

    Attributes:
        max_length: the number of tokens a row can hold.
        key: the keys, a `Cache` Variable `[batch..., max_length, num_heads, head_dim]`.
        value: the values, a `Cache` Variable `[batch..., max_length, num_heads, value_dim]`.
        index: the number of tokens in each row, a `Cache` Variable, int32 `[batch...]`. Set it to go back in a text.

    >>> cache = nnx.KVCache(2, max_length=8, num_heads=4, head_dim=16)
    >>> prompt = jnp.ones((2, 5, 4, 16))
    >>> keys, values = cache.append(prompt, prompt, jnp.array([3, 5]))  # rows of 3 and 5 tokens
    >>> keys.shape, cache.index.tolist()
    ((2, 8, 4, 16), [3, 5])
    >>> token = jnp.ones((2, 1, 4, 16))
    >>> cache.positions(1).tolist()
    [[3], [5]]
    >>> keys, values = cache.append(token, token)
    >>> cache.index.tolist()
    [4, 6]
    """

    logical_axes: ClassVar[AxisNames] = {
        **dict.fromkeys(("key", "value"), ("batch", "length", "heads", "head_dim")),
        "index": ("batch",),
    }

    max_length: int
    key: jax.Array
    value: jax.Array
    index: jax.Array

    def __init__(
        self,
        batch_shape: int | tuple[int, ...],
        max_length: int,
        num_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: DTypeLike = jnp.float32,
    ) -> None:
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(NOT_FLOATS.format(got=dtype))
        if max_length < 1:
            raise ValueError(NO_ROOM.format(got=max_length))
        batch_shape = (batch_shape,) if isinstance(batch_shape, int) else tuple(batch_shape)
        value_dim = head_dim if value_dim is None else value_dim
        self.max_length = max_length
        self.key = Cache(jnp.zeros((*batch_shape, max_length, num_heads, head_dim), dtype))
        self.value = Cache(jnp.zeros((*batch_shape, max_length, num_heads, value_dim), dtype))
        self.index = Cache(jnp.zeros(batch_shape, jnp.int32))

    def positions(self, length: int) -> jax.Array:
        """Returns the positions of the next `length` tokens, `[batch..., length]`."""
        return self.index[..., None] + jnp.arange(length, dtype=jnp.int32)

    def append(
        self, key: jax.Array, value: jax.Array, seq_lengths: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Adds one or more tokens to each row.

        Args:
            key: the keys, `[batch..., length, num_heads, head_dim]`.
            value: the values, `[batch..., length, num_heads, value_dim]`.
            seq_lengths: `[batch...]`, the number of real tokens in each row; they come first, and the others are not
                kept.

        Returns:
            All keys and all values, `[batch..., max_length, num_heads, …]`; hide unwritten slots with `mask`.

        Raises:
            ValueError: if shapes do not fit, or a row would overflow. While tracing, an overflow poisons the row
                instead: its outputs become NaN, and `check` raises later.
        """
        length = self._check_shapes(key, value, seq_lengths)
        self._check_room(length, seq_lengths)
        self.key, self.value, self.index = _append(self.key, self.value, self.index, key, value, seq_lengths)
        return self.key, self.value

    def mask(self, positions: jax.Array, window: int | None = None) -> jax.Array:
        """Returns which slots the tokens at `positions` see: themselves and the past.

        Args:
            positions: `[batch..., length]`, as returned by `positions` before the append.
            window: the number of most recent tokens to see, including the token itself; all by default.

        Returns:
            A boolean mask of shape `[batch..., 1, length, max_length]`.
        """
        slots = jnp.arange(self.max_length, dtype=jnp.int32)
        # The query of an overflowing row sees the last slot even through a window, because the NaN is there. If it saw
        # nothing, its output would be zeros, and the overflow would go unnoticed.
        positions = jnp.minimum(positions, self.max_length - 1)
        return positions_visible(positions[..., None, :, None], slots, causal=True, window=window)

    @property
    def overflowed(self) -> jax.Array:
        """The rows that got more tokens than they can hold, boolean `[batch...]`."""
        return self.index > self.max_length

    def check(self) -> None:
        """Raises `ValueError` if a row has overflowed inside a transform; call it outside of transforms."""
        self._check_room(0, None)

    def reset(self) -> None:
        """Empties every row."""
        self.key, self.value, self.index = (jnp.zeros_like(held) for held in (self.key, self.value, self.index))

    def _check_shapes(self, key: jax.Array, value: jax.Array, seq_lengths: jax.Array | None) -> int:
        batch = self.index.shape
        for name, held, given in (("keys", self.key, key), ("values", self.value, value)):
            length = given.shape[-3] if given.ndim >= 3 else 0
            expected = (*batch, length, *held.shape[-2:])
            if given.shape != expected:
                raise ValueError(WRONG_SHAPE.format(name=name, expected=_with_length(held.shape), got=given.shape))
        if key.shape[-3] != value.shape[-3]:
            raise ValueError(UNPAIRED.format(keys=key.shape, values=value.shape))
        if seq_lengths is not None and seq_lengths.shape != batch:
            raise ValueError(WRONG_LENGTHS.format(expected=batch, got=seq_lengths.shape))
        return key.shape[-3]

    def _check_room(self, length: int, seq_lengths: jax.Array | None) -> None:
        if seq_lengths is None and length > self.max_length:
            raise ValueError(FULL.format(max_length=self.max_length, details=f"got {length} tokens at once"))
        added = length if seq_lengths is None else seq_lengths
        if not (_is_known(self.index) and _is_known(added)):
            return
        held = np.asarray(self.index)
        needed = held + np.asarray(added)
        if (needed > self.max_length).any():
            row = np.unravel_index(int(needed.argmax()), needed.shape)
            where = f"row {', '.join(map(str, row))}" if row else "it"
            details = f"{where} holds {held[row]} tokens and would come to {needed[row]}"
            raise ValueError(FULL.format(max_length=self.max_length, details=details))


def _is_known(value: Any) -> bool:
    """Returns whether a value can be read now, outside of any trace."""
    return not (is_tracer(value) or isinstance(value, jax.ShapeDtypeStruct))


def _with_length(shape: tuple[int, ...]) -> str:
    """Returns the text of a shape with the word "length" in place of the number of slots."""
    return str((*shape[:-3], "length", *shape[-2:])).replace("'length'", "length")


@jax.jit
def _append(
    keys: jax.Array,
    values: jax.Array,
    index: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seq_lengths: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the arrays of a cache after an append, with overflowing rows poisoned."""
    length, max_length = key.shape[-3], keys.shape[-3]
    tokens = jnp.arange(length, dtype=jnp.int32)
    added = length if seq_lengths is None else seq_lengths.astype(jnp.int32)
    new_index = index + added
    full = (new_index > max_length)[..., None]  # [batch..., 1]

    slots = index[..., None] + tokens  # [batch..., length]
    if seq_lengths is not None:
        slots = jnp.where(tokens < seq_lengths[..., None], slots, max_length)  # out of range: not written
    # A row that overflows must not fail silently: a NaN goes into its last slot, which every later query sees. Without
    # the clamp, all its tokens could be out of range and be dropped.
    slots = jnp.where(full, jnp.minimum(slots, max_length - 1), slots)
    value = jnp.where(full[..., None, None], jnp.nan, value)

    put = _put  # of one row; mapped over every batch axis
    for _ in index.shape:
        put = jax.vmap(put)
    return put(keys, slots, key.astype(keys.dtype)), put(values, slots, value.astype(values.dtype)), new_index


def _put(held: jax.Array, slots: jax.Array, given: jax.Array) -> jax.Array:
    return held.at[slots].set(given, mode="drop")
