"""Ring attention on one device: what it computes with its block of queries while the blocks of keys pass by.

A *partial* result is the attention to the keys seen so far: the largest logit, and the sums of weights and of weighted
values relative to it. Two of them are merged as in an online softmax, so that no row of logits is ever complete. The
backward pass goes around the ring once more and recomputes the logits; the gradients of keys and values travel along.

Within a device, long blocks of the ring are computed in smaller blocks of queries, so that memory grows linearly with
the length (see `blocks`).

Letters in the products: t queries, s keys, k key heads, g query heads per key head, h features.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike

from nnx.nn.attention.blocks import block_size, is_long, over_blocks
from nnx.nn.attention.weights import MASKED
from nnx.nn.support.settings import statistics_dtype
from nnx.sharding.target import target


@dataclasses.dataclass(frozen=True)
class Ring:
    """The settings of one call.

    Attributes:
        axes: the mesh axes along which the text is split.
        is_causal, scale, window, soft_cap, precision: as in `dot_product_attention`.
    """

    axes: tuple[str, ...]
    is_causal: bool
    scale: float
    window: tuple[int, int] | None
    soft_cap: float | None
    precision: PrecisionLike

    @property
    def size(self) -> int:
        return math.prod(lax.axis_size(axis) for axis in self.axes)

    def steps(self, queries: int, keys: int) -> int:
        """Returns how many blocks of keys a block of queries can see, its own included."""
        if self.is_causal and self.window is not None and queries == keys:
            return min(self.size, 1 + -(-self.window[0] // keys))
        return self.size

    def passed_on(self, blocks: Any, by: int = 1) -> Any:
        """Sends blocks to the device that is `by` places further along the ring."""
        pairs = [(i, (i + by) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda block: lax.ppermute(block, self.axes, pairs), blocks)

    def logits(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Returns the logits of a block, `[batch..., kv_heads, groups, queries, keys]`, in at least float32."""
        wide = jnp.promote_types(query.dtype, jnp.float32)
        logits = self.scale * self.product("...tkgh,...skh->...kgts", query, key, wide)
        return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)

    def visible(
        self, mask: jax.Array | None, lengths: jax.Array | None, step: Any, counts: tuple[int, int], rows: jax.Array
    ) -> Any:
        """Returns which keys of the block that arrives at a step these rows of queries see; True for all of them."""
        queries, keys = counts
        device = lax.axis_index(self.axes)
        source = (device - step) % self.size
        query_positions = device * queries + rows[:, None]
        key_positions = source * keys + jnp.arange(keys)
        visible: Any = True
        if mask is not None:
            part = lax.dynamic_slice_in_dim(mask, source * keys, keys, axis=-1) if mask.shape[-1] > 1 else mask
            if mask.shape[-2] > 1:
                part = lax.dynamic_slice_in_dim(part, rows[0], rows.size, axis=-2)
            visible = visible & part
        if lengths is not None:
            visible = visible & (key_positions < lengths[..., None, None, None, None])
        if self.is_causal:
            visible = visible & (key_positions <= query_positions)
        if self.window is not None:
            left, right = self.window
            distance = query_positions - key_positions
            visible = visible & (distance <= left) & (-distance <= right)
        return visible

    def product(self, letters: str, a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
        return jnp.einsum(letters, a, b, precision=self.precision, preferred_element_type=dtype)


class Partial(NamedTuple):
    """The attention to some of the keys.

    Attributes:
        largest: the largest logit of each query, `[batch..., kv_heads, groups, queries]`.
        weights: the sum of `exp(logit - largest)`, of the same shape.
        values: the sum of the values with these weights, `[batch..., queries, kv_heads, groups, value_dim]`.
    """

    largest: jax.Array
    weights: jax.Array
    values: jax.Array

    def merged(self, other: "Partial") -> "Partial":
        largest = jnp.maximum(self.largest, other.largest)
        mine, others = jnp.exp(self.largest - largest), jnp.exp(other.largest - largest)
        return Partial(
            largest,
            mine * self.weights + others * other.weights,
            _by_query(mine) * self.values + _by_query(others) * other.values,
        )


def _by_query(rows: jax.Array) -> jax.Array:
    """Turns `[batch..., kv_heads, groups, queries]` into `[batch..., queries, kv_heads, groups, 1]`."""
    return jnp.moveaxis(rows, -1, -3)[..., None]


def forward(ring: Ring, queries: Any, rows: Any, keys: Any, mask: Any, lengths: Any) -> Any:
    """Returns the output of the device's queries, and the logarithm of the sum of their weights.

    Args:
        ring: the settings.
        queries: a tuple of the queries, `[batch..., queries, kv_heads, groups, head_dim]`.
        rows: an empty tuple.
        keys: the device's keys and values, `[batch..., keys, kv_heads, features]`.
        mask: the mask for these queries and all keys, `[batch..., kv_heads, groups, queries, all keys]`, or None.
        lengths: the number of real keys in each row, `[batch...]`, or None.
    """
    (query,) = queries
    counts = (query.shape[-4], keys[0].shape[-3])

    def partial(step: Any, key: jax.Array, value: jax.Array) -> Partial:
        def attend(_: None, start: Any, query: jax.Array) -> tuple[None, Any]:
            visible = ring.visible(mask, lengths, step, counts, start + jnp.arange(query.shape[-4]))
            logits = jnp.where(visible, ring.logits(query, key), MASKED)
            largest = logits.max(-1)
            weights = jnp.where(visible, jnp.exp(logits - largest[..., None]), 0.0)
            values = ring.product("...kgts,...skh->...tkgh", weights.astype(value.dtype), value, weights.dtype)
            return None, (_by_query(largest), _by_query(weights.sum(-1)), values)

        _, (largest, total, values) = _over_blocks(attend, None, counts, (query,))
        return Partial(_by_row(largest), _by_row(total), values)

    def body(carry: Any, step: Any) -> Any:
        seen, blocks = carry
        blocks = ring.passed_on(blocks)
        return (seen.merged(partial(step, *blocks)), blocks), None

    # The device's own block comes first, outside of the loop: there is nothing to send yet.
    (seen, _), _ = lax.scan(body, (partial(0, *keys), keys), jnp.arange(1, ring.steps(*counts)))
    weights = jnp.where(seen.weights == 0.0, 1.0, seen.weights)  # a query that sees no key returns zeros
    out = (seen.values / _by_query(weights)).astype(query.dtype)
    return (out,), (seen.largest + jnp.log(weights),), ()


def backward(ring: Ring, queries: Any, rows: Any, keys: Any, mask: Any, lengths: Any) -> Any:
    """Returns the gradients of queries, and of keys and values.

    The arguments are those of `forward`, but `queries` also has the output and its gradient, and `rows` what `forward`
    returned for them.
    """
    query, out, grad_out = queries
    (log_weights,) = rows
    counts = (query.shape[-4], keys[0].shape[-3])
    wide = log_weights.dtype
    inner = jnp.moveaxis(jnp.sum(grad_out.astype(wide) * out.astype(wide), axis=-1), -3, -1)

    def gradients(step: Any, key: jax.Array, value: jax.Array) -> Any:
        def differentiate(sums: Any, start: Any, query: Any, grad_out: Any, log_weights: Any, inner: Any) -> Any:
            logits, pull = jax.vjp(ring.logits, query, key)
            visible = ring.visible(mask, lengths, step, counts, start + jnp.arange(query.shape[-4]))
            weights = jnp.where(visible, jnp.exp(logits - _by_row(log_weights)[..., None]), 0.0)
            grad_weights = ring.product("...tkgh,...skh->...kgts", grad_out, value, wide)
            grad_query, grad_key = pull(weights * (grad_weights - _by_row(inner)[..., None]))
            grad_value = ring.product("...kgts,...tkgh->...skh", weights.astype(value.dtype), grad_out, wide)
            more = grad_key.astype(wide), grad_value
            return more if sums is None else jax.tree.map(jnp.add, sums, more), grad_query.astype(wide)

        by_query = query, grad_out, _by_query(log_weights), _by_query(inner)
        grad_keys, grad_query = _over_blocks(differentiate, (key, value), counts, by_query)
        return grad_query, grad_keys

    def body(carry: Any, step: Any) -> Any:
        grad_query, grad_keys, blocks = carry
        grad_keys, blocks = ring.passed_on((grad_keys, blocks))
        more_query, more_keys = gradients(step, *blocks)
        return (grad_query + more_query, jax.tree.map(jnp.add, grad_keys, more_keys), blocks), None

    steps = ring.steps(*counts)
    (grad_query, grad_keys, _), _ = lax.scan(body, (*gradients(0, *keys), keys), jnp.arange(1, steps))
    grad_key, grad_value = ring.passed_on(grad_keys, by=1 - steps)  # home, to the device that has the block
    return (grad_query.astype(query.dtype),), (), (grad_key.astype(keys[0].dtype), grad_value.astype(keys[1].dtype))


def _over_blocks(step: Any, like: Any, counts: tuple[int, int], by_query: tuple[jax.Array, ...]) -> Any:
    """Runs `step(sums, start, *parts) -> sums, out` on blocks of queries, or on all of them if they are few.

    The sums are None at first, or have the shapes of `like`, in float32.
    """
    if not is_long(*counts):
        return step(None, 0, *by_query)
    sums = jax.tree.map(lambda array: jnp.zeros_like(array, statistics_dtype(array.dtype)), like)
    size = block_size(counts[1], target(*by_query).platform)
    return over_blocks(step, sums, size, [(array, -4) for array in by_query], -4)


def _by_row(by_query: jax.Array) -> jax.Array:
    """The inverse of `_by_query`."""
    return jnp.moveaxis(by_query[..., 0], -3, -1)
