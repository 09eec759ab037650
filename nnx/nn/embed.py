"""Embeddings: vectors looked up by token, and by position.

`Embed` holds one vector per token. Positions are either learned (`LearnedPositionEmbed`, one vector each, a fixed
number of them) or computed (`SinusoidalPositionEmbed`, any number); both add them to their input. Rotary positions are
in `rotary.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nnx.core.context import Context
from nnx.core.module import Module
from nnx.core.variables import Param
from nnx.nn.checks import check_last_axis
from nnx.nn.dtypes import PromoteDtype, as_dtype, as_optional_dtype, cast, promote_dtype
from nnx.nn.initial_values import InitializerLike, compiled, initial_value
from nnx.nn.initializers import normal, variance_scaling
from nnx.nn.linear import NO_METADATA
from nnx.sharding.explicit import result_sharding, split_like

default_embedding_init = compiled(variance_scaling(1.0, "fan_in", "normal", out_axis=0))
default_position_init = compiled(normal(0.02))

NOT_INTEGERS = "{layer} looks vectors up by number: expected an array of integers, got dtype {dtype}, shape {shape}."


class Embed(Module):
    """A table of vectors, one per token.

    Args:
        num_embeddings: size of the vocabulary.
        features: of each vector.
        dtype: of the result; that of the table by default.
        param_dtype: of the table.
        embedding_init: initialiser of the table.
        promote_dtype: replaces the function that brings query and table to one dtype.
        ctx: Context with the stream "params".
        embedding_metadata: metadata of the table's Variable.

    Attributes:
        embedding: the table, `[num_embeddings, features]`.

    >>> import nnx, jax.numpy as jnp
    >>> layer = nnx.Embed(10, 4, ctx=nnx.context(0))
    >>> x = layer(jnp.array([[1, 2, 3]]))
    >>> x.shape
    (1, 3, 4)
    >>> layer.attend(x).shape  # a logit for every token
    (1, 3, 10)
    """

    logical_axes = {"embedding": ("vocab", "embed")}

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        embedding_init: InitializerLike = default_embedding_init,
        promote_dtype: PromoteDtype = promote_dtype,
        ctx: Context,
        embedding_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        self.num_embeddings = num_embeddings
        self.features = features
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.promote_dtype = promote_dtype
        table = initial_value(self, embedding_init, ctx, (num_embeddings, features), self.param_dtype)
        self.embedding = Param(table, **embedding_metadata)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Looks tokens up.

        Args:
            inputs: integers of any shape, within `0..num_embeddings - 1`; negative ones count from the end, and those
                outside give NaN, never a wrong vector.
            out_sharding: of the result, see `jax.Array.at`.

        Returns:
            `[*inputs.shape, features]`.
        """
        vectors = _looked_up(self, self.embedding, inputs, out_sharding)
        (vectors,) = self.promote_dtype((vectors,), dtype=self.dtype)
        return vectors

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """The product of `query` with every vector: logits over the vocabulary, when the table also serves as the last
        layer.

        Args:
            query: `[..., features]`.
            out_sharding: of the result, see `jax.lax.dot_general`.

        Returns:
            `[..., num_embeddings]`.
        """
        check_last_axis(self, query, self.features, "features")
        query, table = self.promote_dtype((query, self.embedding), dtype=self.dtype)
        if out_sharding is None:
            out_sharding = result_sharding((query, range(query.ndim - 1)), (table, (0,)))
        options = {} if out_sharding is None else {"out_sharding": out_sharding}
        return lax.dot_general(query, table, (((query.ndim - 1,), (1,)), ((), ())), **options)


class LearnedPositionEmbed(Module):
    """Adds a learned vector per position.

    Args:
        max_length: how many positions there are.
        features: of the input.
        dtype: of the result; by default what input and table promote to.
        param_dtype: of the table.
        embedding_init: initialiser of the table.
        ctx: Context with the stream "params".
        embedding_metadata: metadata of the table's Variable.

    Attributes:
        embedding: the table, `[max_length, features]`.

    >>> import nnx, jax.numpy as jnp
    >>> layer = nnx.LearnedPositionEmbed(16, 4, ctx=nnx.context(0))
    >>> layer(jnp.zeros((2, 5, 4))).shape
    (2, 5, 4)
    >>> layer(jnp.zeros((2, 1, 4)), positions=jnp.array([[3], [7]])).shape  # while decoding
    (2, 1, 4)
    """

    logical_axes = {"embedding": (None, "embed")}

    def __init__(
        self,
        max_length: int,
        features: int,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        embedding_init: InitializerLike = default_position_init,
        ctx: Context,
        embedding_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        self.max_length = max_length
        self.features = features
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        table = initial_value(self, embedding_init, ctx, (max_length, features), self.param_dtype)
        self.embedding = Param(table, **embedding_metadata)

    def __call__(self, inputs: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Adds the vectors of the positions.

        Args:
            inputs: `[batch..., length, features]`.
            positions: `[batch..., length]` or `[length]`; 0, 1, 2 … by default. One outside of the table gives NaN.

        Returns:
            An array of the shape of `inputs`.
        """
        length = _checked_length(self, inputs, positions)
        if positions is None:
            if length > self.max_length:
                raise ValueError(
                    f"LearnedPositionEmbed has vectors for max_length={self.max_length} positions, got an input of "
                    f"length {length} (shape {inputs.shape})."
                )
            vectors = lax.slice_in_dim(self.embedding, 0, length)
        else:
            vectors = _looked_up(self, self.embedding, positions)
        inputs, vectors = promote_dtype((inputs, vectors), dtype=self.dtype)
        return inputs + split_like(vectors, inputs, range(-vectors.ndim, 0))


class SinusoidalPositionEmbed(Module):
    """Adds sines and cosines of the position; has no parameters and no greatest length.

    Args:
        features: of the input, an even number.
        max_timescale: the longest wavelength is `2 pi` times this.
        dtype: of the result; that of the input by default.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.SinusoidalPositionEmbed(4)(jnp.zeros((2, 5, 4))).shape
    (2, 5, 4)
    """

    def __init__(self, features: int, *, max_timescale: float = 10000.0, dtype: Any = None):
        _check_even(features)
        self.features = features
        self.max_timescale = float(max_timescale)
        self.dtype = as_optional_dtype(dtype)

    def __call__(self, inputs: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Adds the vectors of the positions.

        Args:
            inputs: `[batch..., length, features]`.
            positions: `[batch..., length]` or `[length]`; 0, 1, 2 … by default.

        Returns:
            An array of the shape of `inputs`.
        """
        length = _checked_length(self, inputs, positions)
        if positions is None:
            positions = jnp.arange(length)
        vectors = sinusoidal_positions(positions, self.features, max_timescale=self.max_timescale)
        (inputs,) = promote_dtype((inputs,), dtype=self.dtype)
        return inputs + cast(vectors, inputs.dtype)


def sinusoidal_positions(positions: jax.Array, features: int, *, max_timescale: float = 10000.0) -> jax.Array:
    """Sines (even features) and cosines (odd ones) of each position; the function of `SinusoidalPositionEmbed`.

    As in "Attention Is All You Need".

    Args:
        positions: of any shape.
        features: an even number.
        max_timescale: the longest wavelength is `2 pi` times this.

    Returns:
        float32 `[*positions.shape, features]`.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.sinusoidal_positions(jnp.arange(2), 4)[0].tolist()
    [0.0, 1.0, 0.0, 1.0]
    """
    _check_even(features)
    frequencies = (max_timescale ** (-np.arange(0, features, 2) / features)).astype(np.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies  # [..., features / 2]
    return jnp.stack((jnp.sin(angles), jnp.cos(angles)), -1).reshape(*positions.shape, features)


def _looked_up(layer: Module, table: jax.Array, indices: jax.Array, out_sharding: Any = None) -> jax.Array:
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(NOT_INTEGERS.format(layer=type(layer).__name__, dtype=indices.dtype, shape=indices.shape))
    if out_sharding is None:
        out_sharding = result_sharding((indices, range(indices.ndim)), (table, (1,)))
    if out_sharding is not None:
        return table.at[indices].get(mode="fill", out_sharding=out_sharding)
    return jnp.take(table, indices, axis=0, mode="fill")


def _checked_length(layer: Any, inputs: jax.Array, positions: jax.Array | None) -> int:
    check_last_axis(layer, inputs, layer.features, "features")
    if inputs.ndim < 2:
        raise ValueError(
            f"{type(layer).__name__}: expected an input of shape [batch..., length, features], got {inputs.shape}."
        )
    tokens = inputs.shape[:-1]
    if positions is not None and positions.shape not in (tokens, tokens[-1:]):
        raise ValueError(
            f"{type(layer).__name__}: expected positions of shape {tokens} or {tokens[-1:]} for an input of shape "
            f"{inputs.shape}, got {positions.shape}."
        )
    return tokens[-1]


def _check_even(features: int) -> None:
    if features % 2:
        raise ValueError(
            f"Sinusoidal positions are pairs of sine and cosine: expected an even number of features, got {features}."
        )
