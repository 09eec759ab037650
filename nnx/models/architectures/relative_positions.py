"""`RelativePositionBias`: attention that depends on how far apart two tokens are, as in T5."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.module import Module
from nnx.nn.initializers import normal
from nnx.nn.support.parameters import AxisNames, make_param
from nnx.nn.support.settings import as_dtype, as_optional_dtype, cast

FEW_BUCKETS = (
    "RelativePositionBias: expected at least 4 buckets and a max_distance above num_buckets // 2, got "
    "num_buckets={buckets} and max_distance={distance}."
)


class RelativePositionBias(Module):
    """A learned number for each head and *bucket* of distances, to be added to the logits of attention.

    Half of the buckets hold one distance each, from 0. The others hold more and more distances, up to `max_distance`;
    everything beyond is in the last one.

    Args:
        num_buckets: the number of buckets, at least 4.
        max_distance: the distance from which all distances share a bucket.
        num_heads: the number of heads.
        bidirectional: whether keys after the query have their own half of the buckets. Otherwise they share the bucket
            of distance 0, which is for causal attention.
        dtype: the dtype of the result; by default, that of the table.
        param_dtype: the dtype of the table.
        ctx: the Context; its stream "params" initializes the table.

    Attributes:
        embedding: the table, `[num_buckets, num_heads]`.

    >>> positions = nnx.models.RelativePositionBias(8, 16, num_heads=4, bidirectional=True, ctx=nnx.context(0))
    >>> positions(jnp.arange(5), jnp.arange(7)).shape  # heads, queries, keys
    (4, 5, 7)
    >>> positions.buckets(jnp.array([0]), jnp.arange(7)).tolist()
    [[0, 5, 6, 6, 6, 6, 7]]
    """

    logical_axes: ClassVar[AxisNames] = {"embedding": (None, "heads")}

    num_buckets: int
    max_distance: int
    bidirectional: bool
    dtype: np.dtype | None
    param_dtype: np.dtype
    embedding: jax.Array

    def __init__(
        self,
        num_buckets: int,
        max_distance: int,
        num_heads: int,
        *,
        bidirectional: bool,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ctx: Context,
    ) -> None:
        if num_buckets < 4 or max_distance <= num_buckets // 2:
            raise ValueError(FEW_BUCKETS.format(buckets=num_buckets, distance=max_distance))
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.embedding = make_param(self, normal(0.02), ctx, (num_buckets, num_heads))

    def __call__(self, query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
        """Returns the bias of every query for every key.

        Args:
            query_positions: integers `[batch..., query_length]`.
            key_positions: integers `[key_length]`.

        Returns:
            An array of shape `[batch..., heads, query_length, key_length]`.
        """
        table = cast(self.embedding, self.embedding.dtype if self.dtype is None else self.dtype)
        bias = jnp.take(table, self.buckets(query_positions, key_positions), axis=0)
        return jnp.moveaxis(bias, -1, -3)

    def buckets(self, query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
        """Returns the bucket of every pair, integers `[batch..., query_length, key_length]`."""
        ahead = key_positions - query_positions[..., None]
        size = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        distance = jnp.abs(ahead) if self.bidirectional else jnp.maximum(-ahead, 0)
        # NumPy makes the table: XLA may round the logarithm differently, and put a distance into another bucket.
        table = jnp.asarray(bucket_of_distances(size, self.max_distance))
        bucket = jnp.take(table, jnp.minimum(distance, self.max_distance), axis=0)
        return bucket + size * (ahead > 0) if self.bidirectional else bucket


def bucket_of_distances(num_buckets: int, max_distance: int) -> np.ndarray:
    """Returns the bucket of each distance from 0 to `max_distance`, int32."""
    exact = num_buckets // 2  # the number of buckets with one distance each
    distances = np.arange(max_distance + 1)
    ratio = np.maximum(distances, 1).astype(np.float32) / np.float32(exact)
    steps = np.log(ratio) / np.float32(math.log(max_distance / exact)) * np.float32(num_buckets - exact)
    wide = np.minimum(exact + steps.astype(np.int32), num_buckets - 1)
    return np.where(distances < exact, distances, wide).astype(np.int32)
