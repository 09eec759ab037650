"""Embeddings: vectors looked up by token and by position.

`Embed` holds one vector per token. Positions are either learned (`LearnedPositionEmbed`, a fixed number of them, one
vector each) or computed (`SinusoidalPositionEmbed`, any number); both add them to their input. Rotary positions are in
`rotary`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.module import Module
from nnx.nn.quantized.quantized import as_operand, to_weight, weight_dtype
from nnx.nn.quantized.quantized_product import quantized_product
from nnx.nn.support.checks import check_last_axis, check_sizes, shape_of
from nnx.nn.support.draws import fan_in_initializer, normal_initializer
from nnx.nn.support.parameters import NO_METADATA, AxisNames, InitializerLike, make_param
from nnx.nn.support.settings import (
    PromoteDtype,
    as_dtype,
    as_optional_dtype,
    cast,
    default_promote_dtype,
    promote_dtype,
    statistics_dtype,
)
from nnx.sharding.explicit import result_sharding, split_like
from nnx.sharding.target import target

# A lookup selects one row instead of summing over the vocabulary, so the rows, not the features, are the output axis:
# the fan-in is then `features`, and each vector has a norm of about 1.
default_embedding_init: InitializerLike = fan_in_initializer(1.0, "normal", out_axis=0)
default_position_init: InitializerLike = normal_initializer(0.02)

NOT_INTEGERS = "{layer} looks vectors up by number: expected an array of integers, got dtype {dtype}, shape {shape}."
NO_LENGTH = "{layer}: expected an input of shape [batch..., length, features], got {shape}."
WRONG_POSITIONS = "{layer}: expected positions of shape {tokens} or {length} for an input of shape {shape}, got {got}."
TOO_LONG = (
    "LearnedPositionEmbed has vectors for max_length={max_length} positions, got an input of length {length} "
    "(shape {shape}). Build it with a greater `max_length`, or shorten the input."
)
ODD_FEATURES = "Sinusoidal positions are pairs of sine and cosine: expected an even number of features, got {got}."


class Embed(Module):
    """A table of vectors, one per token.

    Args:
        num_embeddings: the size of the vocabulary.
        features: the number of features of each vector.
        dtype: the dtype of the result; by default, that of the table.
        param_dtype: the dtype of the table.
        embedding_init: the initializer of the table.
        promote_dtype: a replacement for the function that converts query and table to one dtype.
        ctx: the Context; its stream "params" initializes the table.
        embedding_metadata: metadata of the table's Variable.

    Attributes:
        embedding: the table, `[num_embeddings, features]`.

    >>> layer = nnx.Embed(10, 4, ctx=nnx.context(0))
    >>> x = layer(jnp.array([[1, 2, 3]]))
    >>> x.shape
    (1, 3, 4)
    >>> layer.attend(x).shape  # a logit for every token
    (1, 3, 10)
    """

    logical_axes: ClassVar[AxisNames] = {"embedding": ("vocab", "embed")}

    num_embeddings: int
    features: int
    dtype: np.dtype | None
    param_dtype: np.dtype
    promote_dtype: PromoteDtype
    embedding: jax.Array
    embedding_scale: jax.Array | None = None

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        embedding_init: InitializerLike = default_embedding_init,
        promote_dtype: PromoteDtype = default_promote_dtype,
        ctx: Context,
        embedding_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        check_sizes(self, num_embeddings=num_embeddings, features=features)
        self.num_embeddings = num_embeddings
        self.features = features
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.promote_dtype = promote_dtype
        self.embedding = make_param(self, embedding_init, ctx, (num_embeddings, features), embedding_metadata)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Looks up tokens.

        Args:
            inputs: integers of any shape, within `0..num_embeddings - 1`. Negative ones count from the end; those
                outside the table return NaN, never a wrong vector.
            out_sharding: the sharding of the result on explicit mesh axes, see `jax.Array.at`.

        Returns:
            An array of shape `[*inputs.shape, features]`.
        """
        vectors = _looked_up(self, self.embedding, inputs, out_sharding)
        if self.embedding_scale is not None:
            # The integers of a token outside the table are wrong, but its scale is NaN.
            scales = _looked_up(self, self.embedding_scale, inputs)
            vectors = to_weight(vectors, scales, (vectors.ndim - 1,), weight_dtype(scales, self.param_dtype))
        (vectors,) = self.promote_dtype((vectors,), dtype=self.dtype)
        return vectors

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Multiplies `query` with every vector: logits over the vocabulary, when the table is also the last layer.

        Args:
            query: an array of shape `[..., features]`.
            out_sharding: the sharding of the result on explicit mesh axes, see `jax.lax.dot_general`.

        Returns:
            An array of shape `[..., num_embeddings]`.
        """
        check_last_axis(self, query, self.features, "features")
        table, scale = self.embedding, self.embedding_scale
        if scale is None:
            query, table = self.promote_dtype((query, table), dtype=self.dtype)
        else:
            query, _ = self.promote_dtype((query, cast(scale, weight_dtype(scale, self.param_dtype))), dtype=self.dtype)
            if out_sharding is None:
                logits = quantized_product(query, table, scale, transposed=True)
                if logits is not None:
                    return logits
            table, scale = as_operand(table, scale, (1,), query.dtype)
        if out_sharding is None:
            out_sharding = result_sharding((query, range(query.ndim - 1)), (table, (0,)))
        options: dict[str, Any] = {} if out_sharding is None else {"out_sharding": out_sharding}
        if scale is not None:
            options["preferred_element_type"] = statistics_dtype(query.dtype)
        logits = lax.dot_general(query, table, (((query.ndim - 1,), (1,)), ((), ())), **options)
        return logits if scale is None else cast(logits * split_like(scale, logits, (-1,)), query.dtype)


class LearnedPositionEmbed(Module):
    """Adds a learned vector per position.

    Args:
        max_length: the number of positions.
        features: the number of features of the input.
        dtype: the dtype of the result; by default, the dtype that input and table promote to.
        param_dtype: the dtype of the table.
        embedding_init: the initializer of the table.
        ctx: the Context; its stream "params" initializes the table.
        embedding_metadata: metadata of the table's Variable.

    Attributes:
        embedding: the table, `[max_length, features]`.

    >>> layer = nnx.LearnedPositionEmbed(16, 4, ctx=nnx.context(0))
    >>> layer(jnp.zeros((2, 5, 4))).shape
    (2, 5, 4)
    >>> layer(jnp.zeros((2, 1, 4)), positions=jnp.array([[3], [7]])).shape  # while decoding
    (2, 1, 4)
    """

    logical_axes: ClassVar[AxisNames] = {"embedding": (None, "embed")}

    max_length: int
    features: int
    dtype: np.dtype | None
    param_dtype: np.dtype
    embedding: jax.Array

    def __init__(
        self,
        max_length: int,
        features: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        embedding_init: InitializerLike = default_position_init,
        ctx: Context,
        embedding_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        check_sizes(self, max_length=max_length, features=features)
        self.max_length = max_length
        self.features = features
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.embedding = make_param(self, embedding_init, ctx, (max_length, features), embedding_metadata)

    def __call__(self, inputs: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Adds the vectors of the positions.

        Args:
            inputs: an array of shape `[batch..., length, features]`.
            positions: `[batch..., length]` or `[length]`; 0, 1, 2 … by default. Positions outside the table, negative
                ones included, return NaN.

        Returns:
            An array with the shape of `inputs`.
        """
        length = _checked_length(self, inputs, positions)
        if positions is None:
            if length > self.max_length:
                raise ValueError(TOO_LONG.format(max_length=self.max_length, length=length, shape=inputs.shape))
            vectors = lax.slice_in_dim(self.embedding, 0, length)
            if inputs.ndim > 2 and target(inputs).platform == "gpu":
                # Looked up for each text, though they are all the same. Otherwise the gradient is a sum over texts, and
                # XLA lays out every activation of the model to suit that one sum: a step of GPT-2 takes 7 % longer.
                vectors = _looked_up(self, vectors, jnp.broadcast_to(jnp.arange(length), inputs.shape[:-1]))
        else:
            vectors = _looked_up(self, self.embedding, positions, from_end=False)
        inputs, vectors = promote_dtype((inputs, vectors), dtype=self.dtype)
        return inputs + split_like(vectors, inputs, range(-vectors.ndim, 0))


class SinusoidalPositionEmbed(Module):
    """Adds sines and cosines of the position; it has no parameters and no maximum length.

    Args:
        features: the number of features of the input, which must be even.
        max_timescale: the longest wavelength, divided by `2 pi`.
        dtype: the dtype of the result; by default, that of the input.

    >>> nnx.SinusoidalPositionEmbed(4)(jnp.zeros((2, 5, 4))).shape
    (2, 5, 4)
    """

    features: int
    max_timescale: float
    dtype: np.dtype | None

    def __init__(self, features: int, *, max_timescale: float = 10000.0, dtype: DTypeLike | None = None) -> None:
        check_sizes(self, features=features)
        _check_even(features)
        self.features = features
        self.max_timescale = float(max_timescale)
        self.dtype = as_optional_dtype(dtype)

    def __call__(self, inputs: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Adds the vectors of the positions.

        Args:
            inputs: an array of shape `[batch..., length, features]`.
            positions: `[batch..., length]` or `[length]`; 0, 1, 2 … by default.

        Returns:
            An array with the shape of `inputs`.
        """
        length = _checked_length(self, inputs, positions)
        if positions is None:
            positions = jnp.arange(length)
        vectors = sinusoidal_positions(positions, self.features, max_timescale=self.max_timescale)
        (inputs,) = promote_dtype((inputs,), dtype=self.dtype)
        return inputs + cast(vectors, inputs.dtype)


def sinusoidal_positions(positions: jax.Array, features: int, *, max_timescale: float = 10000.0) -> jax.Array:
    """Computes sines (even features) and cosines (odd ones) of each position, as in "Attention Is All You Need".

    Args:
        positions: an array of any shape.
        features: the number of features, which must be even.
        max_timescale: the longest wavelength, divided by `2 pi`.

    Returns:
        A float32 array of shape `[*positions.shape, features]`.

    >>> nnx.sinusoidal_positions(jnp.arange(2), 4)[0].tolist()
    [0.0, 1.0, 0.0, 1.0]
    """
    _check_even(features)
    frequencies = (max_timescale ** (-np.arange(0, features, 2) / features)).astype(np.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies  # [..., features / 2]
    return jnp.stack((jnp.sin(angles), jnp.cos(angles)), -1).reshape(*positions.shape, features)


def _looked_up(
    layer: Module, table: jax.Array, indices: jax.Array, out_sharding: Any = None, from_end: bool = True
) -> jax.Array:
    """Returns the vectors at `indices`; unless `from_end`, negative ones are outside the table."""
    shape_of(layer, indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(NOT_INTEGERS.format(layer=type(layer).__name__, dtype=indices.dtype, shape=indices.shape))
    if indices.dtype.itemsize < 4:
        # JAX adds the size of the table to negative indices in their own dtype, where it may not fit.
        indices = indices.astype(jnp.int32)
    if not from_end:
        indices = jnp.where(indices < 0, table.shape[0], indices)
    if out_sharding is None:
        out_sharding = result_sharding((indices, range(indices.ndim)), (table, range(1, table.ndim)))
    # "fill" returns NaN outside the table. `table[indices]` would clamp, and return the last vector for a wrong token.
    if out_sharding is not None:
        return table.at[indices].get(mode="fill", out_sharding=out_sharding)
    return jnp.take(table, indices, axis=0, mode="fill")


def _checked_length(layer: Any, inputs: jax.Array, positions: jax.Array | None) -> int:
    """Returns the length of `inputs`, after checking it and that there is one position per token."""
    check_last_axis(layer, inputs, layer.features, "features")
    name, shape = type(layer).__name__, inputs.shape
    if inputs.ndim < 2:
        raise ValueError(NO_LENGTH.format(layer=name, shape=shape))
    tokens = shape[:-1]
    if positions is not None and positions.shape not in (tokens, tokens[-1:]):
        raise ValueError(
            WRONG_POSITIONS.format(layer=name, tokens=tokens, length=tokens[-1:], shape=shape, got=positions.shape)
        )
    return tokens[-1]


def _check_even(features: int) -> None:
    if features % 2:
        raise ValueError(ODD_FEATURES.format(got=features))
