"""The key-value cache of autoregressive decoding.

A `KVCache` keeps, for every row of a batch, the keys and values of the tokens seen so far. Each row has its own
*index*, the number of tokens it holds, so prompts can be ragged. Token `i` of a row is in *slot* `i`; slots from the
index on are not yet written, and `mask` hides them.

The same as plain data, for a caller that owns the cache: `LayerCache` holds the keys and values of one layer, and
`DecoderCache` those of a whole model, with one count of tokens (*lengths*) for all layers.

**A full cache refuses.** Outside of transforms, an append that does not fit raises `ValueError`, and nothing is
written. Inside `jit`, `scan` and the like, the index is not known while tracing. There a row that overflows is
*poisoned*: its new values become NaN, so every output of that row is NaN from then on, and its index stays above
`max_length`, which `overflowed` shows and `check` raises on. Old tokens are never silently overwritten. (A chunk longer
than the whole cache raises `ValueError` even while tracing.) `seq_lengths` below zero or above the number of given
tokens, and an index below zero, are refused in the same two ways.

A poisoned row stays one. The NaN takes the slots of the new tokens and the last slot, where a token of the text may
have been, so setting the index back cannot bring all of the text back. A key of zeros goes with each NaN and marks it,
so the row counts as overflowed until it is reset, or until a token is written to every marked slot again.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from nnx.core.module.module import Module
from nnx.core.variables.variables import Cache
from nnx.nn.attention.masks import positions_visible
from nnx.nn.attention.room import POISONED, check_room, grown, is_known
from nnx.nn.support.checks import check_sizes
from nnx.nn.support.parameters import AxisNames
from nnx.sharding.target import lowered_on, target

NOT_FLOATS = "{cache} stores floating-point numbers: expected such a dtype, got {got}."
NO_ROOM = "{cache}: expected max_length >= 1, got {got}."
WRONG_SHAPE = "{cache}: expected {name} of shape {expected} (batch..., length, heads, head_dim), got {got}."
UNPAIRED = "{cache}: expected as many keys as values, got {keys} and {values}."


LANES = 128  # of a TPU's vector unit
MOST_ROWS = 64  # that are written one by one on a TPU; with more, the whole cache is


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
        index: the number of tokens in each row, a `Cache` Variable, int32 `[batch...]`. Set it to go back in a text,
            unless the row has overflowed: then the text is lost, and only `reset` helps.

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
        check_sizes(self, max_length=max_length, num_heads=num_heads, head_dim=head_dim)
        _check_settings("KVCache", max_length, dtype)
        batch_shape = (batch_shape,) if isinstance(batch_shape, int) else tuple(batch_shape)
        value_dim = head_dim if value_dim is None else value_dim
        self.max_length = max_length
        self.key = Cache(jnp.zeros((*batch_shape, max_length, num_heads, head_dim), dtype))
        self.value = Cache(jnp.zeros((*batch_shape, max_length, num_heads, value_dim), dtype))
        self.index = Cache(jnp.zeros(batch_shape, jnp.int32))

    def positions(self, length: int) -> jax.Array:
        """Returns the positions of the next `length` tokens, `[batch..., length]`."""
        return next_positions(self.index, length)

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
            ValueError: if shapes do not fit, a row would overflow, or its index or `seq_lengths` are impossible. While
                tracing, all but the first poison the row instead: its outputs become NaN, and `check` raises later.
        """
        _check_append("KVCache", self.key, self.value, self.index, key, value, seq_lengths)
        self.key, self.value, self.index = _append(self.key, self.value, self.index, key, value, seq_lengths)
        return self.key, self.value

    def mask(self, positions: jax.Array, window: int | None = None, section: int | None = None) -> jax.Array:
        """Returns which slots the tokens at `positions` see: themselves and the past.

        Args:
            positions: `[batch..., length]`, as returned by `positions` before the append.
            window: the number of most recent tokens to see, including the token itself; all by default.
            section: the number of slots in a section, if a token sees only its own section.

        Returns:
            A boolean mask of shape `[batch..., 1, length, max_length]`.
        """
        return visible_slots(positions, self.max_length, window, section)

    @property
    def overflowed(self) -> jax.Array:
        """The rows that got more tokens than they can hold, boolean `[batch...]`; setting `index` back changes nothing.

        After an overflow, the slots of the last tokens hold NaN. The row counts as overflowed as long as one of them
        does: until `reset`, or until tokens are written there again.
        """
        return (self.index > self.max_length) | _poisoned(self.key, self.value)

    def check(self) -> None:
        """Raises `ValueError` if a row has overflowed inside a transform; call it outside of transforms."""
        _check_rows("KVCache", self.key, self.value, self.index)

    def reset(self) -> None:
        """Empties every row."""
        self.key, self.value, self.index = (jnp.zeros_like(held) for held in (self.key, self.value, self.index))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """The keys and values of one layer, as a pytree that the caller owns; nothing is ever changed in place.

    Attributes:
        key: the keys, `[batch..., max_length, num_heads, head_dim]`.
        value: the values, `[batch..., max_length, num_heads, value_dim]`.
        aligned: whether all rows always hold equally many tokens, which is the caller's promise. A single token then
            goes into one slot of all rows, and is written faster on a GPU.
        is_empty: whether no row holds a token, which is the caller's promise for the next append. The tokens then
            attend to each other alone, instead of to every slot.

    >>> cache = nnx.LayerCache.empty(2, 8, num_heads=4, head_dim=16)
    >>> prompt = jnp.ones((2, 5, 4, 16))
    >>> lengths = jnp.array([0, 0])
    >>> cache = cache.append(prompt, prompt, lengths)
    >>> cache.key[0, :, 0, 0].tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    """

    key: jax.Array
    value: jax.Array
    aligned: bool = dataclasses.field(default=False, metadata={"static": True})
    is_empty: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def empty(
        cls,
        batch_shape: int | tuple[int, ...],
        max_length: int,
        num_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: DTypeLike = jnp.float32,
    ) -> "LayerCache":
        """Returns a cache with room for `max_length` tokens per row; the arguments are those of `KVCache`."""
        _check_settings("LayerCache", max_length, dtype)
        batch_shape = (batch_shape,) if isinstance(batch_shape, int) else tuple(batch_shape)
        value_dim = head_dim if value_dim is None else value_dim
        return cls(
            jnp.zeros((*batch_shape, max_length, num_heads, head_dim), dtype),
            jnp.zeros((*batch_shape, max_length, num_heads, value_dim), dtype),
        )

    @property
    def max_length(self) -> int:
        """The number of tokens a row can hold."""
        return self.key.shape[-3]

    def append(
        self, key: jax.Array, value: jax.Array, lengths: jax.Array, seq_lengths: jax.Array | None = None
    ) -> "LayerCache":
        """Returns the cache with one or more tokens added to each row.

        Args:
            key: the keys, `[batch..., length, num_heads, head_dim]`.
            value: the values, `[batch..., length, num_heads, value_dim]`.
            lengths: `[batch...]`, the number of tokens each row holds before the append.
            seq_lengths: `[batch...]`, the number of real tokens in each row; they come first, and the others are not
                kept.

        Raises:
            ValueError: if shapes do not fit, a row would overflow, or `lengths` or `seq_lengths` are impossible. While
                tracing, all but the first poison the row instead: its outputs become NaN.
        """
        _check_append("LayerCache", self.key, self.value, lengths, key, value, seq_lengths)
        aligned = self.aligned and seq_lengths is None
        keys, values, _ = _append(self.key, self.value, lengths, key, value, seq_lengths, aligned=aligned)
        return dataclasses.replace(self, key=keys, value=values, is_empty=False)

    def check(self, lengths: jax.Array, cache: str = "LayerCache") -> None:
        """Raises `ValueError` if a row has overflowed inside a transform; call it outside of transforms.

        Args:
            lengths: `[batch...]`, the number of tokens each row holds.
            cache: the name to use in the error.
        """
        _check_rows(cache, self.key, self.value, lengths)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderCache:
    """The cache of a decoder: what `init_cache` returns, and what `decode` takes and returns.

    Each layer has its own arrays. A stack of all layers would be copied whole for each token when a loop updates it.

    Attributes:
        layers: one cache per layer: a `LayerCache`, or whatever else its mixer makes (`make_cache`).
        lengths: int32 `[batch]`, the number of tokens each row holds. A row that overflowed inside a transform has a
            length above `max_length`, and its outputs are NaN.

    >>> cache = nnx.DecoderCache.empty(2, 8, [(4, 16)] * 3)  # three layers of 4 heads with 16 features
    >>> len(cache.layers), cache.max_length, cache.lengths.tolist()
    (3, 8, [0, 0])
    """

    layers: tuple[Any, ...]
    lengths: jax.Array

    @classmethod
    def empty(
        cls, batch: int, max_length: int, heads: Iterable[tuple[int, int]], *, dtype: DTypeLike = jnp.float32
    ) -> "DecoderCache":
        """Returns a cache with room for `max_length` tokens per row.

        Args:
            batch: the number of rows.
            max_length: the number of tokens a row can hold.
            heads: for each layer, the number of heads of keys and values and the number of features of a head.
            dtype: the dtype in which keys and values are stored, a floating-point type.
        """
        layers = tuple(LayerCache.empty(batch, max_length, number, dim, dtype=dtype) for number, dim in heads)
        return cls(layers, jnp.zeros((batch,), jnp.int32))

    @property
    def max_length(self) -> int:
        """The number of tokens a row can hold."""
        return self.layers[0].max_length

    def advanced(self, layers: Iterable[Any], added: int | jax.Array) -> "DecoderCache":
        """Returns a cache with these layers, whose rows hold `added` tokens more: one number, or one per row."""
        return DecoderCache(tuple(layers), self.lengths + jnp.asarray(added, jnp.int32))

    def check(self) -> None:
        """Raises `ValueError` if a row has overflowed inside a transform; call it outside of transforms."""
        self.layers[0].check(self.lengths, "DecoderCache")


def next_positions(index: jax.Array, length: int) -> jax.Array:
    """Returns the positions of the next `length` tokens in rows that hold `index` tokens, `[batch..., length]`."""
    start = index[..., None]
    # A chunk that starts below zero could reach slot 0 and up, where there is text. All its tokens stay below zero, and
    # so go to the last slot, and see only that.
    return jnp.where(start < 0, start, start + jnp.arange(length, dtype=jnp.int32))


def causal_options(
    positions: jax.Array, max_length: int, window: int | None, section: int | None = None
) -> dict[str, Any]:
    """Returns the options of `dot_product_attention` with which tokens at `positions` see the slots up to their own.

    Args:
        positions: `[batch..., length]`, the slots of the tokens.
        max_length: the number of slots.
        window: the number of slots that a token sees, if not all.
        section: the number of slots in a section, if a token sees only its own section.
    """
    # For a single token, the number of filled slots is enough, and a fused kernel skips the others.
    whole = (window is None or window >= max_length) and (section is None or section >= max_length)
    if positions.shape[-1] == 1 and whole:
        return {"key_value_seq_lengths": _last_visible(positions[..., 0], max_length) + 1}
    return {"mask": visible_slots(positions, max_length, window, section)}


def visible_part(
    cache: LayerCache, positions: jax.Array, window: int | None, section: int | None = None
) -> tuple[LayerCache, dict[str, Any]]:
    """Returns the part of a cache that tokens at `positions` can see, and the options to attend to it causally."""
    # Cutting the window out of each row moves its slots three times: read, write, read. A mask reads every slot.
    if positions.shape[-1] != 1 or window is None or 3 * window > cache.max_length or section is not None:
        return cache, causal_options(positions, cache.max_length, window, section)
    end = _last_visible(positions[..., 0], cache.max_length) + 1

    def cut(held: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(held, start, window)

    for _ in end.shape:
        cut = jax.vmap(cut)
    start = jnp.maximum(end - window, 0)
    seen = LayerCache(cut(cache.key, start), cut(cache.value, start))
    return seen, {"key_value_seq_lengths": end - start}


def visible_slots(positions: jax.Array, max_length: int, window: int | None, section: int | None = None) -> jax.Array:
    """Returns which slots the tokens at `positions` see, as a mask `[batch..., 1, length, max_length]`."""
    slots = jnp.arange(max_length, dtype=jnp.int32)
    positions = _last_visible(positions, max_length)
    return positions_visible(positions[..., None, :, None], slots, causal=True, window=window, section=section)


def _last_visible(positions: jax.Array, max_length: int) -> jax.Array:
    """Returns the last slot that the tokens at `positions` see: their own, or the last one for those that have none."""
    # The query of a poisoned row sees the last slot, even through a window, because the NaN is there. If it saw
    # nothing, its output would be zeros, and the overflow would go unnoticed.
    return jnp.where((positions < 0) | (positions >= max_length), max_length - 1, positions)


def _check_settings(cache: str, max_length: int, dtype: DTypeLike) -> None:
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(NOT_FLOATS.format(cache=cache, got=dtype))
    if max_length < 1:
        raise ValueError(NO_ROOM.format(cache=cache, got=max_length))


def _check_append(
    cache: str,
    keys: jax.Array,
    values: jax.Array,
    index: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seq_lengths: jax.Array | None,
) -> None:
    """Raises `ValueError` unless the new tokens fit the arrays of the cache and, as far as is known, its room."""
    batch = keys.shape[:-3]
    for name, held, given in (("keys", keys, key), ("values", values, value)):
        length = given.shape[-3] if given.ndim >= 3 else 0
        if given.shape != (*batch, length, *held.shape[-2:]):
            expected = _with_length(held.shape)
            raise ValueError(WRONG_SHAPE.format(cache=cache, name=name, expected=expected, got=given.shape))
    if key.shape[-3] != value.shape[-3]:
        raise ValueError(UNPAIRED.format(cache=cache, keys=key.shape, values=value.shape))
    check_room(cache, keys.shape[-3], index, key.shape[-3], seq_lengths, batch)


def _check_rows(cache: str, keys: jax.Array, values: jax.Array, index: jax.Array) -> None:
    """Raises `ValueError` if a row has overflowed, as far as is known."""
    max_length = keys.shape[-3]
    check_room(cache, max_length, index, 0, None)
    if is_known(keys) and is_known(values) and (poisoned := np.asarray(_poisoned(keys, values))).any():
        row = ", ".join(map(str, np.argwhere(poisoned)[0]))
        longer = "reset or a longer " if cache == "KVCache" else "new "
        raise ValueError(POISONED.format(cache=cache, row=row, max_length=max_length, longer=longer))


def ends_poisoned(cache: KVCache) -> jax.Array:
    """Returns which rows are poisoned in their last slot; unlike `overflowed`, it does not read the other slots."""
    return (cache.index > cache.max_length) | _poisoned(cache.key[..., -1:, :, :], cache.value[..., -1:, :, :])


def _poisoned(keys: jax.Array, values: jax.Array) -> jax.Array:
    """Returns which rows have the mark of an overflow in one of these slots: a value of NaN with a key of zeros."""
    return (jnp.isnan(values).all((-2, -1)) & (keys == 0).all((-2, -1))).any(-1)


def _with_length(shape: tuple[int, ...]) -> str:
    """Returns the text of a shape with the word "length" in place of the number of slots."""
    return str((*shape[:-3], "length", *shape[-2:])).replace("'length'", "length")


@functools.partial(jax.jit, static_argnames="aligned")
def _append(
    keys: jax.Array,
    values: jax.Array,
    index: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seq_lengths: jax.Array | None,
    *,
    aligned: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the arrays of a cache after an append, with rows poisoned that overflow or have impossible lengths."""
    length, max_length = key.shape[-3], keys.shape[-3]
    slots = next_positions(index, length)
    new_index, impossible = grown(index, length, seq_lengths, max_length)
    if seq_lengths is not None:
        tokens = jnp.arange(length, dtype=jnp.int32)
        # A poisoned row is poisoned at all its tokens.
        real = (tokens < seq_lengths.astype(jnp.int32)[..., None]) | impossible[..., None]
        slots = jnp.where(real, slots, max_length)  # out of range: not written
    full = (new_index > max_length)[..., None]  # [batch..., 1]
    # A row that overflows must not fail silently: a NaN goes into its last slot, which every later query sees. All of
    # its tokens could be out of range and be dropped; one below zero would count slots from the end.
    slots = jnp.where(full, _last_visible(slots, max_length), slots)
    key = jnp.where(full[..., None, None], 0, key)  # the mark that tells this NaN from one that the model computed
    value = jnp.where(full[..., None, None], jnp.nan, value)
    if length > 1 or not index.size:
        return _scattered(keys, slots, key), _scattered(values, slots, value), new_index
    at = target(keys)
    put = _written_together if aligned else _scattered
    on_tpu = functools.partial(_written_on_tpu, aligned=aligned, drops=seq_lengths is not None, devices=at.devices)
    keys = lowered_on(at, on_tpu, put, keys, slots, key, platform="tpu")
    values = lowered_on(at, on_tpu, put, values, slots, value, platform="tpu")
    return keys, values, new_index


def _scattered(held: jax.Array, slots: jax.Array, given: jax.Array) -> jax.Array:
    """Writes tokens `[batch..., length, heads, features]` into the slots `[batch..., length]` of an array."""
    put = _put  # of one row; mapped over every batch axis
    for _ in slots.shape[:-1]:
        put = jax.vmap(put)
    return put(held, slots, given.astype(held.dtype))


def _written_together(held: jax.Array, slots: jax.Array, given: jax.Array) -> jax.Array:
    """Writes a token per row into the slot that they share; that of full rows is within range."""
    start = (*(0,) * (slots.ndim - 1), jnp.reshape(slots, -1)[0], 0, 0)
    return jax.lax.dynamic_update_slice(held, given.astype(held.dtype), start)


def _written_on_tpu(
    held: jax.Array, slots: jax.Array, given: jax.Array, *, aligned: bool, drops: bool, devices: int
) -> jax.Array:
    """Writes a token per row in the layout that attention reads, so that no loop copies the cache.

    A TPU lays out the features of a head along its 128 lanes. Attention reads smaller heads with the slots along the
    lanes; a scatter would have them laid out anew, twice for each token, and other writes do so with larger heads.
    """
    if held.shape[-1] % LANES == 0:
        return _scattered(held, slots, given)
    if aligned:
        return _written_together(held, slots, given)
    given = given.astype(held.dtype)
    if devices > 1 or slots.size > MOST_ROWS:  # a mesh may split the rows, and each row is an operation of its own
        hit = slots == jnp.arange(held.shape[-3])
        return jnp.where(hit[..., None, None], given, held)
    shape = held.shape
    held, given = (array.reshape(-1, *array.shape[-3:]) for array in (held, given))
    for row, slot in enumerate(jnp.reshape(slots, -1)):
        token = given[row][None]
        start = (row, slot, 0, 0)
        if drops:  # a slot out of range is not written, where XLA would choose the last one
            old = jax.lax.dynamic_slice(held, start, token.shape)
            token = jnp.where(slot < held.shape[1], token, old)
        held = jax.lax.dynamic_update_slice(held, token, start)
    return held.reshape(shape)


def _put(held: jax.Array, slots: jax.Array, given: jax.Array) -> jax.Array:
    # Only the tokens of an overflowing row share a slot. A single token never does, and XLA writes it without atomics.
    return held.at[slots].set(given, mode="drop", unique_indices=slots.shape == (1,))
