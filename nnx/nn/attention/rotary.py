"""Rotary position embeddings: each query and key is rotated by an angle that grows with its position.

Each pair of features rotates at its own *frequency*, `base ** (-2i / dim)`, or at those of a `RotaryScaling`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.module.module import Module
from nnx.nn.attention.rotary_scaling import RotaryScaling
from nnx.nn.support.checks import check_sizes, shape_of
from nnx.nn.support.settings import compiled_body

ODD_ROTARY_DIM = (
    "{layer} rotates pairs of features: expected rotary_dim to be even and within 2..head_dim={head_dim}, got {got}."
)
WRONG_HEADS = "RotaryEmbedding: expected an input of shape [batch..., length, heads, head_dim={head_dim}], got {got}."
NO_HEADS = "apply_rotary: expected x of shape [batch..., length, heads, head_dim], got {got}."
WRONG_POSITIONS = (
    "apply_rotary: expected positions of shape {tokens} (batch..., length) or {length} (length,) for x of shape "
    "{shape}, got {got}."
)


class RotaryEmbedding(Module):
    """A rotary position embedding of queries or keys.

    It has no parameters, so one instance can serve all layers of a model.

    Args:
        head_dim: the number of features per head.
        base: the base of the geometric series of frequencies.
        rotary_dim: the number of leading features that rotate, `head_dim` by default; the rest pass through.
        interleaved: whether to rotate the pairs (0, 1), (2, 3), … as GPT-J does, instead of (0, d/2), (1, d/2 + 1), …
            as Llama does.
        scaling: a `RotaryScaling` for contexts longer than those trained on.

    >>> rotary = nnx.RotaryEmbedding(8, scaling=nnx.LinearScaling(2.0))
    >>> query = jnp.ones((2, 5, 4, 8))  # batch, length, heads, head_dim
    >>> rotary(query).shape
    (2, 5, 4, 8)
    >>> last_token = rotary(query[:, -1:], positions=jnp.array([[4], [4]]))
    >>> bool(jnp.allclose(last_token, rotary(query)[:, -1:]))
    True
    """

    head_dim: int
    base: float
    rotary_dim: int
    interleaved: bool
    scaling: RotaryScaling | None

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        scaling: RotaryScaling | None = None,
    ) -> None:
        check_sizes(self, head_dim=head_dim)
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        _check_rotary_dim("RotaryEmbedding", rotary_dim, head_dim)
        self.head_dim = head_dim
        self.base = float(base)
        self.rotary_dim = rotary_dim
        self.interleaved = interleaved
        self.scaling = scaling
        if scaling is not None:
            scaling.frequencies(rotary_dim, self.base)  # raises here, rather than in a call, if it does not fit

    def __call__(
        self, x: jax.Array, positions: jax.Array | None = None, *, text_length: int | jax.Array | None = None
    ) -> jax.Array:
        """Rotates `x`.

        Args:
            x: an array of shape `[batch..., length, heads, head_dim]`.
            positions: the positions of the tokens, `[batch..., length]` or `[length]`; 0, 1, 2 … by default.
            text_length: the length of the text, of which `x` may be a part, for a scaling that depends on it: an
                integer, or `[batch...]`; one more than the last position by default.

        Returns:
            An array with the shape and dtype of `x`; angles are computed in float32.
        """
        if len(shape_of(self, x)) < 3 or x.shape[-1] != self.head_dim:
            raise ValueError(WRONG_HEADS.format(head_dim=self.head_dim, got=x.shape))
        return apply_rotary(
            x,
            positions,
            base=self.base,
            rotary_dim=self.rotary_dim,
            interleaved=self.interleaved,
            scaling=self.scaling,
            text_length=text_length,
        )


def apply_rotary(
    x: jax.Array,
    positions: jax.Array | None = None,
    *,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: RotaryScaling | None = None,
    text_length: int | jax.Array | None = None,
) -> jax.Array:
    """Rotates `x` by its positions; the function form of `RotaryEmbedding`.

    Args:
        x: an array of shape `[batch..., length, heads, head_dim]`.
        positions: the positions of the tokens, `[batch..., length]` or `[length]`; 0, 1, 2 … by default.
        base, rotary_dim, interleaved, scaling: the settings of `RotaryEmbedding`.
        text_length: the length of the text, as in a call of `RotaryEmbedding`.

    >>> x = jnp.ones((3, 1, 4))  # length, heads, head_dim
    >>> bool((nnx.apply_rotary(x)[0] == x[0]).all())  # position 0 is not turned
    True
    """
    if len(shape_of("apply_rotary", x)) < 3:
        raise ValueError(NO_HEADS.format(got=x.shape))
    by_length = scaling is not None and scaling.depends_on_length
    if by_length and text_length is None:
        text_length = _length_of_text(x, positions)
    if positions is None:
        positions = jnp.arange(x.shape[-3], dtype=jnp.int32)
    elif not _one_per_token(positions.shape, x.shape[:-2]):
        raise ValueError(
            WRONG_POSITIONS.format(tokens=x.shape[:-2], length=x.shape[-3:-2], shape=x.shape, got=positions.shape)
        )
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    _check_rotary_dim("apply_rotary", rotary_dim, x.shape[-1])
    # A length that is known is static: its frequencies are then computed on the host, in float64.
    known = text_length if by_length and isinstance(text_length, int) else None
    traced: Any = text_length if by_length and known is None else None
    settings: Any = {"base": base, "rotary_dim": rotary_dim, "interleaved": interleaved, "scaling": scaling}
    return _rotate(x, positions, traced, known_length=known, **settings)


def rotate_pair(
    rotary: RotaryEmbedding | None,
    query: jax.Array,
    key: jax.Array,
    positions: jax.Array | None,
    key_positions: jax.Array | None,
    text_length: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns rotated queries and keys that meet in attention.

    Args:
        rotary: the embedding, if any.
        query, key: arrays of shape `[batch..., length, heads, head_dim]`.
        positions, key_positions: the positions of both, as in a call of `RotaryEmbedding`.
        text_length: the length of the text that both belong to; by default, it ends with the last of them.
    """
    if rotary is None:
        return query, key
    if rotary.scaling is None or not rotary.scaling.depends_on_length:
        return rotary(query, positions), rotary(key, key_positions)
    length: Any = text_length
    if length is None:
        queries, keys = _length_of_text(query, positions), _length_of_text(key, key_positions)
        known = isinstance(queries, int) and isinstance(keys, int)
        length = max(queries, keys) if known else jnp.maximum(queries, keys)
    return rotary(query, positions, text_length=length), rotary(key, key_positions, text_length=length)


def _length_of_text(x: jax.Array, positions: jax.Array | None) -> int | jax.Array:
    """Returns one more than the last position of queries or keys: an integer if it is known, or one per text."""
    return x.shape[-3] if positions is None else positions.max(axis=-1) + 1


def _check_rotary_dim(layer: str, rotary_dim: int, head_dim: int) -> None:
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(ODD_ROTARY_DIM.format(layer=layer, head_dim=head_dim, got=rotary_dim))


def _one_per_token(positions: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    """Returns whether positions of one shape broadcast to tokens of another, with one per token along the length."""
    if not 0 < len(positions) <= len(tokens) or positions[-1] != tokens[-1]:
        return False
    return all(have in (1, want) for have, want in zip(reversed(positions), reversed(tokens), strict=False))


@compiled_body
def _rotate(
    x: jax.Array,
    positions: jax.Array,
    lengths: jax.Array | None,
    *,
    known_length: int | None,
    base: float,
    rotary_dim: int,
    interleaved: bool,
    scaling: RotaryScaling | None,
) -> jax.Array:
    scaling = RotaryScaling() if scaling is None else scaling
    # Computed in float64 on the host, then rounded once: an error in a frequency grows with the position.
    if known_length is not None:
        frequencies = scaling.frequencies_for(rotary_dim, base, known_length)
    elif lengths is not None:
        frequencies = scaling.frequencies_for(rotary_dim, base, lengths)[..., None, None, :]
    else:
        frequencies = scaling.frequencies(rotary_dim, base)
    frequencies = frequencies.astype(np.float32)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies  # [batch..., length, 1, rotary_dim / 2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if scaling.amplitude != 1.0:
        cos, sin = cos * scaling.amplitude, sin * scaling.amplitude

    turning = x[..., :rotary_dim].astype(jnp.promote_types(x.dtype, jnp.float32))
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = jnp.split(turning, 2, axis=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = jnp.stack(pair, -1).reshape(turning.shape) if interleaved else jnp.concatenate(pair, -1)
    return jnp.concatenate((turned.astype(x.dtype), x[..., rotary_dim:]), -1)
