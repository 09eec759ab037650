"""`Conditioned`: the decoder of an encoder-decoder model together with a source, as `nnx.generate` takes it.

The *source* is what the encoder computed. It stays the same while a text is written, so the cache holds the keys and
values of every cross-attention next to those of the text, and they are projected only once.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nnx.core.module.module import Module
from nnx.core.trace import is_tracer
from nnx.nn.attention.kv_cache import DecoderCache, LayerCache

WRONG_ROWS = (
    "Conditioned.init_cache: expected a batch of {expected}, one row for each row of the source, got {got}. (In "
    "nnx.generate, `prefix` cannot be shared by different sources: put it into the prompts.)"
)
WRONG_MASK = "{model}: expected a mask of shape [batch, length] = {expected} for the source, got {got}."
WRONG_CACHE = "{model}.decode: expected a cache with {expected} rows, one per row of tokens, got {got}."


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConditionedCache:
    """The cache of a decoder that reads a source; the caller owns it, and nothing is changed in place.

    Attributes:
        text: the `DecoderCache` of the text so far.
        source: for each layer, the projected keys and values of the source.
        mask: boolean `[batch, source_length]`, which parts of the source are real, or None if all are.
    """

    text: DecoderCache
    source: tuple[LayerCache, ...]
    mask: jax.Array | None

    @property
    def lengths(self) -> jax.Array:
        """The number of tokens each row holds, int32 `[batch]`."""
        return self.text.lengths

    @property
    def max_length(self) -> int:
        """The number of tokens a row can hold."""
        return self.text.max_length

    def check(self) -> None:
        """Raises `ValueError` if a row has overflowed inside a transform; call it outside of transforms."""
        self.text.check()


class Conditional(Protocol):
    """A model whose decoder reads a source."""

    def init_cache(
        self, encoded: jax.Array, length: int, *, mask: jax.Array | None = None, dtype: DTypeLike | None = None
    ) -> ConditionedCache:
        """Returns a cache with the source and no text."""
        ...

    def decode(
        self, tokens: jax.Array, cache: ConditionedCache, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, ConditionedCache]:
        """Appends tokens."""
        ...


class Conditioned(Module):
    """A model and the source that its decoder reads; it has the methods that `nnx.generate` needs.

    Args:
        model: the model, which is shared and not copied.
        encoded: what its encoder computed, `[batch, source_length, features]`.
        mask: `[batch, source_length]`, true for what is real and false for padding; all of it by default.

    Attributes:
        model, encoded, mask: the arguments.
    """

    model: Any
    encoded: jax.Array
    mask: jax.Array | None

    def __init__(self, model: Conditional, encoded: jax.Array, mask: jax.Array | None = None) -> None:
        check_source_mask(type(model).__name__, mask, encoded)
        self.model = model
        self.encoded = encoded
        self.mask = None if mask is None else jnp.asarray(mask, bool)

    @property
    def max_length(self) -> int | None:
        """The longest text the decoder can take; None if there is no limit."""
        return getattr(self.model, "max_length", None)

    def init_cache(self, batch: int, length: int, dtype: DTypeLike | None = None) -> ConditionedCache:
        """Returns a cache with the source and no text.

        Args:
            batch: the number of rows, that of the source. Another one is an error; inside a transform, where it may be
                asked for its shape alone, the source becomes NaN.
            length: the number of tokens that each row can hold.
            dtype: the dtype in which keys and values are stored; that of the source by default.
        """
        encoded, mask = self.encoded, self.mask
        if batch != encoded.shape[0]:
            if not is_tracer(encoded):
                raise ValueError(WRONG_ROWS.format(expected=encoded.shape[0], got=batch))
            encoded = jnp.full((batch, *encoded.shape[1:]), jnp.nan, encoded.dtype)
            mask = None if mask is None else jnp.ones((batch, *mask.shape[1:]), bool)
        return self.model.init_cache(encoded, length, mask=mask, dtype=dtype)

    def decode(
        self, tokens: jax.Array, cache: ConditionedCache, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, ConditionedCache]:
        """Appends tokens to the text in a cache, and returns the logits of the token after each one.

        Args:
            tokens: integers `[batch, length]`, the next tokens of each row.
            cache: the cache, see `init_cache`.
            lengths: `[batch]`, the number of real tokens in each row, which come first; all of them by default.

        Returns:
            Logits `[batch, length, vocab_size]`, and the cache with the tokens added.
        """
        return self.model.decode(tokens, cache, lengths)


def check_source_mask(model: str, mask: jax.Array | None, encoded: jax.Array) -> None:
    """Raises `ValueError` unless a mask has a number for every part of the source."""
    if mask is not None and mask.shape != encoded.shape[:2]:
        raise ValueError(WRONG_MASK.format(model=model, expected=encoded.shape[:2], got=mask.shape))


def check_rows(model: str, tokens: jax.Array, cache: ConditionedCache) -> None:
    """Raises `ValueError` unless a cache has a row for every row of tokens."""
    if cache.lengths.shape != tokens.shape[:1]:
        raise ValueError(WRONG_CACHE.format(model=model, expected=tokens.shape[0], got=cache.lengths.shape[0]))
