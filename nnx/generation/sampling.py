"""How the next token is chosen from logits.

A *rule* changes which tokens can be drawn, or how likely they are. Rules apply in this order: repetition penalty, the
user's `logits_fn`, temperature, then `top_k`, `top_p` and `min_p`, each on what the rules before it left. The last
three are one idea: each of them has a *threshold*, and tokens whose logit is below it cannot be drawn. Tokens with
equal logits are therefore kept or dropped together.

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
        logits: `[rows, vocab]` in float32.
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
    kept = jnp.ones(logits.shape, bool)
    if sampling.top_k is not None:
        kept = _most_likely(logits, jnp.ones_like(logits), jnp.minimum(sampling.top_k, logits.shape[-1]))
    if sampling.top_p is not None:
        probabilities = jax.nn.softmax(jnp.where(kept, logits, -jnp.inf), axis=-1)
        # Rounding can bring the sum to 1 before the last token; `top_p=1` keeps every token nevertheless.
        kept &= _most_likely(logits, probabilities, sampling.top_p) | (sampling.top_p >= 1)
    if sampling.min_p is not None:
        kept &= logits >= jnp.max(logits, axis=-1, keepdims=True) + jnp.log(sampling.min_p)
    return jnp.where(kept, logits, -jnp.inf)


def _at_temperature(logits: jax.Array, temperature: Any) -> jax.Array:
    # Relative to the maximum, so that a tiny temperature overflows to -inf only. The maximum itself is 0 at every
    # temperature, including 0, where 0 / 0 would be NaN.
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(below == 0, 0, below / temperature)


def _most_likely(logits: jax.Array, weights: jax.Array, target: Any) -> jax.Array:
    """Returns where the logits are at least the highest threshold that keeps a total weight of `target`.

    With weights of 1, these are the `target` most likely tokens; with probabilities, the fewest tokens that add up to
    `target`. Sorting would do, but takes much longer: in 32 passes, the threshold is found bit by bit, highest first.
    """
    bits = jax.lax.bitcast_convert_type(logits, jnp.uint32)
    # As unsigned numbers in the order of the floats: positive ones get the highest bit, negative ones are reversed.
    ordered = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))

    def set_bit(index: jax.Array, threshold: jax.Array) -> jax.Array:
        higher = threshold | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
        kept = jnp.sum(jnp.where(ordered >= higher, weights, 0), axis=-1, keepdims=True)
        return jnp.where(kept >= target, higher, threshold)

    threshold = jnp.zeros((*logits.shape[:-1], 1), jnp.uint32)
    return ordered >= jax.lax.fori_loop(0, 32, set_bit, threshold)
