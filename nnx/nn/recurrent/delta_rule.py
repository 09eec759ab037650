"""The gated delta rule: a linear recurrence whose state is a matrix per head, corrected by every token.

The state maps keys to values. With each token it decays, is read at the token's key, and is corrected there toward the
token's value; then it is read at the query:

    state = exp(decay) * state
    state = state + key ⊗ (beta * (value - keyᵀ state))
    out = queryᵀ state

A token at a time, that is `_one_token`, for decoding. Whole texts are cut into *chunks*. Within a chunk the corrections
depend on each other through the triangular matrix `I + A`, where `A[i, j]` says how much the correction of token `j`
changes what is read at the key of token `i`. Its inverse turns them into matrix products, and only the state at the
start of each chunk is left to a scan. The arithmetic is that of float32, whatever the inputs are.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nnx.nn.support.settings import cast, compiled_body

NOT_HEADS = (
    "gated_delta_rule: expected query, key and value of shape [batch..., length, heads, features], got {shapes}."
)
DO_NOT_FIT = (
    "gated_delta_rule: expected queries and keys of one shape, values for a multiple of their heads, and decay and "
    "beta of shape {expected} (batch..., length, value heads), got {shapes}."
)
WRONG_STATE = (
    "gated_delta_rule: expected a state of shape {expected} (batch..., value heads, key features, value features), "
    "got {got}."
)
WRONG_CHUNK = "gated_delta_rule: expected chunk to be a power of two, got {got!r}."


def gated_delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    state: jax.Array | None = None,
    *,
    chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """Runs the gated delta rule over texts, a linear recurrence whose state is a matrix per head.

    With each token, the state decays, its value at the token's key is corrected toward the token's value, and it is
    read at the query. The work per token does not depend on the length of the text.

    Args:
        query, key: `[batch..., length, key_heads, key_features]`. Keys should have length 1, or less.
        value: `[batch..., length, heads, value_features]`, where `heads` is a multiple of `key_heads`; the first heads
            share the first key head.
        decay: `[batch..., length, heads]`, the logarithm of what remains of the state; 0 or less.
        beta: `[batch..., length, heads]`, the part of the error that is corrected, from 0 to 1. A token with
            a decay and a beta of 0 leaves the state as it is.
        state: `[batch..., heads, key_features, value_features]`, the state before the first token; zeros by default.
        chunk: the number of tokens that are computed together, a power of two.

    Returns:
        What is read, `[batch..., length, heads, value_features]` in the dtype of the values, and the last state, in
        float32 (or float64).

    >>> key = jnp.eye(2)[:, None]  # two tokens, one head
    >>> value = jnp.array([[[3.0]], [[5.0]]])
    >>> out, state = nnx.gated_delta_rule(key, key, value, jnp.zeros((2, 1)), jnp.ones((2, 1)))
    >>> out[:, 0, 0].tolist(), state[0, :, 0].tolist()
    ([3.0, 5.0], [3.0, 5.0])
    """
    _check(query, key, value, decay, beta, state)
    if not isinstance(chunk, int) or chunk < 1 or chunk & (chunk - 1):
        raise ValueError(WRONG_CHUNK.format(got=chunk))
    return _rule(query, key, value, decay, beta, state, chunk=chunk)


def _check(
    query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array, beta: jax.Array, state: jax.Array | None
) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if min(query.ndim, key.ndim, value.ndim) < 3:
        raise ValueError(NOT_HEADS.format(shapes=shapes))
    per_head = value.shape[:-1]
    fits = query.shape == key.shape and key.shape[:-2] == value.shape[:-2] and value.shape[-2] % key.shape[-2] == 0
    if not fits or not decay.shape == beta.shape == per_head:
        shapes += f", decay {decay.shape}, beta {beta.shape}"
        raise ValueError(DO_NOT_FIT.format(expected=per_head, shapes=shapes))
    expected = (*value.shape[:-3], value.shape[-2], key.shape[-1], value.shape[-1])
    if state is not None and state.shape != expected:
        raise ValueError(WRONG_STATE.format(expected=expected, got=state.shape))


@compiled_body
def _rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    state: jax.Array | None,
    *,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    *batch, length, heads, width = value.shape
    key_heads, depth = key.shape[-2:]
    dtype = jnp.result_type(query, key, value)
    wide = jnp.promote_types(dtype, jnp.float32)
    rows, group = math.prod(batch), heads // key_heads
    query, key = (cast(x, wide).reshape(rows, length, key_heads, depth) for x in (query, key))
    value = cast(value, wide).reshape(rows, length, key_heads, group, width)
    decay, beta = (cast(x, wide).reshape(rows, length, key_heads, group) for x in (decay, beta))
    shape = (rows, key_heads, group, depth, width)
    before = jnp.zeros(shape, wide) if state is None else cast(state, wide).reshape(shape)
    if length == 1:
        out, after = _one_token(query[:, 0], key[:, 0], value[:, 0], decay[:, 0], beta[:, 0], before)
    elif length:
        out, after = _chunked(query, key, value, decay, beta, before, min(chunk, 1 << (length - 1).bit_length()))
    else:
        out, after = value, before
    return cast(out, dtype).reshape(*batch, length, heads, width), after.reshape(*batch, heads, depth, width)


def _one_token(
    query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes one token: the definition, in an order that passes over the state twice.

    Queries and keys are `[rows, key_heads, depth]`; values have axes for the heads that share a key and their width.
    """
    kept, key_column, query_column = jnp.exp(decay)[..., None], key[:, :, None, :, None], query[:, :, None, :, None]
    # Sums, not products of matrices: one pass over the state computes both.
    at_key, at_query = (state * key_column).sum(-2), (state * query_column).sum(-2)
    correction = beta[..., None] * (value - kept * at_key)
    agreement = (query * key).sum(-1)[:, :, None, None]
    # Reads the new state without waiting for it.
    out = kept * at_query + agreement * correction
    return out, kept[..., None] * state + key_column * correction[..., None, :]


def _chunked(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Computes whole texts. Axes: n chunks, b rows, k key heads, r heads that share a key, i and j tokens, d, w."""
    length = value.shape[1]
    query, key, value, decay, beta = (
        _in_chunks(x, chunk, heads) for x, heads in ((query, 1), (key, 1), (value, 2), (decay, 2), (beta, 2))
    )
    remaining = jnp.cumsum(decay, axis=-1)  # of the state at the start of the chunk, as a logarithm: [n, b, k, r, i]
    since = remaining[..., :, None] - remaining[..., None, :]  # of what was written at token j, at token i
    seen = jnp.tril(jnp.ones((chunk, chunk), bool))
    since = jnp.exp(jnp.where(seen, since, -jnp.inf))  # hidden before the exponential, which could overflow

    overlap = jnp.einsum("nbkid,nbkjd->nbkij", key, key)[:, :, :, None] * since
    inverse = _inverse(jnp.where(seen & ~jnp.eye(chunk, dtype=bool), beta[..., None] * overlap, 0))
    # The corrections are `values - keys @ state`, with the state at the start of the chunk.
    values = jnp.einsum("nbkrij,nbkrjw->nbkriw", inverse, beta[..., None] * value)
    keys = jnp.einsum("nbkrij,nbkjd->nbkrid", inverse * (beta * jnp.exp(remaining))[..., None, :], key)

    def step(state: jax.Array, of_chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
        values, keys, key, remaining = of_chunk
        corrections = values - jnp.einsum("bkrid,bkrdw->bkriw", keys, state)
        last = remaining[..., -1:]
        written = jnp.exp(last - remaining)[..., None] * corrections
        after = jnp.exp(last)[..., None] * state + jnp.einsum("bkid,bkriw->bkrdw", key, written)
        return after, (state, corrections)

    state, (starts, corrections) = lax.scan(step, state, (values, keys, key, remaining))
    # Outside of the scan, because only the states depend on each other.
    before = jnp.exp(remaining)[..., None] * jnp.einsum("nbkid,nbkrdw->nbkriw", query, starts)
    weights = jnp.einsum("nbkid,nbkjd->nbkij", query, key)[:, :, :, None] * since
    out = before + jnp.einsum("nbkrij,nbkrjw->nbkriw", weights, corrections)
    out = jnp.moveaxis(out, (0, -2), (1, 2))  # [b, n, i, k, r, w]
    return lax.collapse(out, 1, 3)[:, :length], state


def _in_chunks(x: jax.Array, chunk: int, heads: int) -> jax.Array:
    """Returns `[rows, length, heads..., rest...]` as `[chunks, rows, heads..., i, rest...]`; `heads` is how many axes.

    The last chunk is filled up with zeros, which leave the state as it is.
    """
    rows, length = x.shape[:2]
    if padding := -length % chunk:
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(rows, x.shape[1] // chunk, chunk, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 2 + heads)


@jax.custom_jvp
def _inverse(lower: jax.Array) -> jax.Array:
    """Returns the inverses of `I + lower`, for strictly lower triangular matrices whose size is a power of two.

    The inverse of a triangular matrix of two by two blocks has the inverses of its diagonal blocks, and below them the
    product `-D C B` of these with the block between. So blocks of twice the size follow from two products, for all
    blocks at once, which is as stable as substitution. (A product of powers of the matrix is not: they grow like
    binomial coefficients if all keys of a chunk agree.)
    """
    size = lower.shape[-1]
    numbers = jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    multiply = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    block = 1
    while block < size:
        same_pair, same = (numbers // n == (numbers // n)[:, None] for n in (2 * block, block))
        between = jnp.where(same_pair & ~same, lower, 0)
        inverse = inverse - (between if block == 1 else multiply(multiply(inverse, between), inverse))
        block *= 2
    return inverse


@_inverse.defjvp
def _inverse_jvp(primals: Any, tangents: Any) -> Any:
    inverse = _inverse(*primals)
    # Two products, where the derivative of each step above would take four.
    return inverse, -jnp.matmul(jnp.matmul(inverse, tangents[0]), inverse)
