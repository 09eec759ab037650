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
import numpy as np

from nnx.sharding.target import target

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
        logits: `[rows, vocab]`, as the model computed them: the fewer bits they have, the sooner thresholds are found.
        sampling: the values of the rules.
        keys: one random key per row; None for greedy decoding.
        seen: boolean `[rows, vocab]`, the tokens that a repetition penalty applies to.
        logits_fn: the user's function from logits to logits.
    """
    if seen is not None or logits_fn is not None or not jnp.issubdtype(logits.dtype, jnp.floating):
        logits = logits.astype(jnp.float32)
    if seen is not None:
        logits = penalize_repetition(logits, seen, sampling.repetition_penalty)
    if logits_fn is not None:
        shape, logits = logits.shape, logits_fn(logits)
        if jnp.shape(logits) != shape:
            raise ValueError(LOGITS_FN_SHAPE.format(expected=shape, got=jnp.shape(logits)))
        logits = jnp.asarray(logits, jnp.float32)
    if keys is None:
        highest, token = _highest(logits)
    else:
        token = jax.vmap(jax.random.categorical)(keys, keep_likely(logits, sampling))
        highest = jnp.max(logits, axis=-1)
    # The highest logit is NaN if any is, and infinite if one is, or if every token is ruled out.
    return Choice(token.astype(jnp.int32), jnp.isfinite(highest))


def _highest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the highest logit of each row and its first position, as `jnp.max` and `jnp.argmax` do.

    This is one reduction, and so one kernel, where those are two. A NaN counts as the highest.
    """

    def higher(one: Any, other: Any) -> Any:
        (x, i), (y, j) = one, other
        x_is_nan, y_is_nan = x != x, y != y
        keeps = (x > y) | (x_is_nan & ~y_is_nan) | (((x == y) | (x_is_nan & y_is_nan)) & (i < j))
        return jnp.where(keeps, x, y), jnp.where(keeps, i, j)

    positions = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    first = (np.array(-np.inf, logits.dtype), np.array(np.iinfo(np.int32).max, np.int32))
    highest, token = jax.lax.reduce((logits, positions), first, higher, (1,))
    return highest, token


def penalize_repetition(logits: jax.Array, seen: jax.Array, penalty: Any) -> jax.Array:
    """Makes the tokens in `seen` less likely (for a penalty above 1), as in Keskar et al., 2019."""
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_likely(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Applies temperature and thresholds, in float32; the tokens that cannot be drawn get the logit -inf."""
    scaled = _at_temperature(logits.astype(jnp.float32), sampling.temperature)
    # Temperature keeps the order, so thresholds are found among the logits themselves.
    ordered = _in_order(logits)
    lowest = jnp.zeros((*logits.shape[:-1], 1), ordered.dtype)
    if sampling.top_k is not None:
        ones = jnp.ones(logits.shape, jnp.float32)
        lowest = _threshold(ordered, ones, jnp.minimum(sampling.top_k, logits.shape[-1]))
    if sampling.top_p is not None:
        weights = jnp.where(ordered >= lowest, jnp.exp(scaled), 0)  # the most likely token has 1
        total = jnp.sum(weights, axis=-1, keepdims=True)
        # Rounding can bring the sum to 1 before the last token; `top_p=1` keeps every token nevertheless.
        found = jnp.where(sampling.top_p >= 1, 0, _threshold(ordered, weights, sampling.top_p * total))
        lowest = jnp.maximum(lowest, found)
    kept = ordered >= lowest
    if sampling.min_p is not None:
        kept &= scaled >= jnp.log(sampling.min_p)
    return jnp.where(kept, scaled, -jnp.inf)


def _at_temperature(logits: jax.Array, temperature: Any) -> jax.Array:
    # Relative to the maximum, so that a tiny temperature overflows to -inf only. The maximum itself is 0 at every
    # temperature, including 0, where 0 / 0 would be NaN.
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(below == 0, 0, below / temperature)


def _in_order(logits: jax.Array) -> jax.Array:
    """Returns unsigned integers in the order of the logits; equal logits have equal ones."""
    bits = 8 * logits.dtype.itemsize
    dtype = jnp.dtype(f"uint{bits}")
    # The two zeros are equal, but their bits are not.
    number = jax.lax.bitcast_convert_type(jnp.where(logits == 0, jnp.zeros_like(logits), logits), dtype)
    sign = np.array(1 << (bits - 1), dtype)
    # Positive numbers get the highest bit, negative ones are reversed.
    return jnp.where(number >= sign, ~number, number | sign)


def _threshold(ordered: jax.Array, weights: jax.Array, wanted: Any) -> jax.Array:
    """Returns the highest threshold for each row, `[..., 1]`, that keeps a total weight of `wanted`.

    With weights of 1, it keeps the `wanted` most likely tokens; with probabilities, the fewest tokens that add up to
    `wanted`. Sorting would do, but takes much longer. The threshold is found in digits of a few bits, highest first:
    one pass over a row adds up what each possible digit would keep.
    """
    # A pass costs a GPU more than the additions do, and a CPU less.
    digit_bits = 1 if target().platform == "cpu" else 2
    passes = 8 * ordered.dtype.itemsize // digit_bits

    def append_digit(index: jax.Array, threshold: jax.Array) -> jax.Array:
        shift = (digit_bits * (passes - 1 - index)).astype(ordered.dtype)
        higher = [threshold + (np.array(digit, ordered.dtype) << shift) for digit in range(1, 1 << digit_bits)]
        kept = _sums([jnp.where(ordered >= least, weights, 0) for least in higher])
        # The higher the digit, the less is kept.
        digit = sum((total[..., None] >= wanted).astype(ordered.dtype) for total in kept)
        return threshold + (digit << shift)

    return jax.lax.fori_loop(0, passes, append_digit, jnp.zeros((*ordered.shape[:-1], 1), ordered.dtype))


def _sums(arrays: list[jax.Array]) -> list[jax.Array]:
    """Returns the sums of arrays over their last axis, which one kernel computes while it reads their operands once."""
    zero = np.zeros((), arrays[0].dtype)

    def add(one: Any, other: Any) -> list[Any]:
        return [x + y for x, y in zip(one, other, strict=True)]

    return jax.lax.reduce(arrays, [zero] * len(arrays), add, (arrays[0].ndim - 1,))
