"""How the next token is chosen from logits.

A *rule* changes which tokens can be drawn, or how likely they are. Rules apply in this order: repetition penalty, the
user's `logits_fn`, temperature, then `top_k`, `top_p` and `min_p`, each on what the rules before it left. The last
three are one idea: each of them computes a *threshold*, and tokens whose logit is below the highest threshold cannot be
drawn. Tokens with equal logits are therefore kept or dropped together.

The values of the rules are arrays, so other values use the same compiled function. A rule that is not used is None and
costs nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LOGITS_FN_SHAPE = (
    "nnx.generate: expected logits_fn to return logits of shape {expected}, as it received them, got {got}."
)


class Sampling(NamedTuple):
    """The values of the sampling rules, each a number or None.

    Attributes:
        temperature: what logits are divided by; None for greedy decoding, which takes the most likely token.
        top_k: the number of most likely tokens to keep.
        top_p: the total probability of the tokens to keep, most likely first.
        min_p: the lowest probability to keep, as a fraction of the highest one.
        repetition_penalty: what the logits of tokens that already occurred are divided by, or multiplied if negative.
    """

    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    repetition_penalty: Any = None


class Choice(NamedTuple):
    """One chosen token per row.

    Attributes:
        token: int32 `[rows]`.
        valid: boolean `[rows]`, false where the logits were NaN, infinite or ruled out every token.
    """

    token: jax.Array
    valid: jax.Array


def choose(
    logits: jax.Array,
    sampling: Sampling,
    keys: jax.Array | None,
    seen: jax.Array | None = None,
    logits_fn: Callable[[jax.Array], jax.Array] | None = None,
) -> Choice:
    """Chooses the next token of each row.

    Args:
        logits: `[rows, vocab]`, at least float32.
        sampling: the values of the rules.
        keys: one random key per row; None for greedy decoding.
        seen: boolean `[rows, vocab]`, the tokens that a repetition penalty applies to.
        logits_fn: the user's function from logits to logits.
    """
    if seen is not None:
        logits = penalize_repetition(logits, seen, sampling.repetition_penalty)
    if logits_fn is not None:
        shape, logits = logits.shape, logits_fn(logits)
        if jnp.shape(logits) != shape:
            raise ValueError(LOGITS_FN_SHAPE.format(expected=shape, got=jnp.shape(logits)))
    if keys is None:
        token = jnp.argmax(logits, axis=-1)
        highest = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    else:
        token = jax.vmap(jax.random.categorical)(keys, keep_likely(logits, sampling))
        highest = jnp.max(logits, axis=-1)
    # The highest logit is NaN if any is, and infinite if one is, or if every token is ruled out.
    return Choice(token.astype(jnp.int32), jnp.isfinite(highest))


def penalize_repetition(logits: jax.Array, seen: jax.Array, penalty: Any) -> jax.Array:
    """Makes the tokens in `seen` less likely (for a penalty above 1), as in Keskar et al., 2019."""
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_likely(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Applies temperature and thresholds; the tokens that cannot be drawn get the logit -inf."""
    logits = _at_temperature(logits, sampling.temperature)
    threshold = jnp.full((*logits.shape[:-1], 1), -jnp.inf, logits.dtype)
    if sampling.min_p is not None:
        threshold = jnp.log(sampling.min_p) + jnp.max(logits, axis=-1, keepdims=True)
    if sampling.top_k is not None or sampling.top_p is not None:
        ranked = jnp.sort(logits, axis=-1, descending=True)
        if sampling.top_k is not None:
            last = jnp.minimum(sampling.top_k, logits.shape[-1]) - 1
            kth = jnp.take(ranked, last, axis=-1)[..., None]
            ranked = jnp.where(ranked >= kth, ranked, -jnp.inf)
            threshold = jnp.maximum(threshold, kth)
        if sampling.top_p is not None:
            threshold = jnp.maximum(threshold, _nucleus(ranked, sampling.top_p))
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def _at_temperature(logits: jax.Array, temperature: Any) -> jax.Array:
    # Relative to the maximum, so that a tiny temperature overflows to -inf only. The maximum itself is 0 at every
    # temperature, including 0, where 0 / 0 would be NaN.
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(below == 0, 0, below / temperature)


def _nucleus(ranked: jax.Array, top_p: Any) -> jax.Array:
    """Returns the lowest logit of the smallest set of tokens whose probabilities add up to `top_p`."""
    probabilities = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities  # the total of all more likely tokens
    # Rounding can bring the sum to 1 before the last token; `top_p=1` keeps every token nevertheless.
    inside = (before < top_p) | (top_p >= 1)
    return jnp.min(jnp.where(inside, ranked, jnp.inf), axis=-1, keepdims=True)
