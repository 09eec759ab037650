"""Checks of tokens, for all models that take text."""

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.trace import is_tracer

WRONG_TOKENS = "{model}: expected tokens of shape [batch, length], got an array of shape {shape}."
NOT_INTEGERS = "{model}: expected integer tokens, got dtype {dtype}."
OUTSIDE = "{model}: expected tokens within 0..{last} (vocab_size={size}), got {got} at index {index}."
TOO_LONG = (
    "{model}: this model has learned positions for max_length={max_length} tokens, and the text has {length}. Shorten "
    "the text, or use a model with a longer context."
)


def check_tokens(model: str, tokens: jax.Array, size: int) -> None:
    """Raises `ValueError` unless tokens are integers `[batch, length]` and, as far as is known, in the vocabulary.

    Args:
        model: the name of the model, for errors.
        tokens: the tokens; inside a transform, their values are unknown.
        size: the size of the vocabulary.
    """
    if getattr(tokens, "ndim", None) != 2:
        raise ValueError(WRONG_TOKENS.format(model=model, shape=np.shape(tokens)))
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(NOT_INTEGERS.format(model=model, dtype=tokens.dtype))
    if is_tracer(tokens) or tokens.size == 0 or (isinstance(tokens, jax.Array) and not tokens.is_fully_addressable):
        return
    known = np.asarray(tokens)
    wrong = (known < 0) | (known >= size)
    if wrong.any():
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(OUTSIDE.format(model=model, last=size - 1, size=size, got=int(known[index]), index=index))


def without_negatives(tokens: jax.Array, size: int) -> jax.Array:
    """Moves negative tokens past the vocabulary, so that they become NaN like any other token outside of it.

    `Embed` would count them from the end of the table.
    """
    return jnp.where(tokens < 0, size, tokens)


def too_long(model: str, max_length: int, length: int) -> ValueError:
    """Returns the error for a text with more tokens than there are learned positions."""
    return ValueError(TOO_LONG.format(model=model, max_length=max_length, length=length))
