"""Rotary position embeddings: each query and key is rotated by an angle that grows with its position.

Each pair of features rotates at its own *frequency*, `base ** (-2i / dim)`. A model trained on short texts meets
unseen angles in long ones; a *scaling* changes the frequencies so that the angles stay familiar:

- `LinearScaling` divides every frequency by the factor (position interpolation).
- `NTKScaling` uses a larger base, which slows low frequencies most and leaves the highest alone (NTK-aware).
- `YaRNScaling` keeps high frequencies, divides low ones, ramps between them, and sharpens attention slightly (YaRN).
- `Llama3Scaling` is the same idea with the bands of Llama 3.1, chosen by wavelength.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.module import Module
from nnx.nn.checks import shape_of
from nnx.nn.settings import compiled_body

ODD_ROTARY_DIM = (
    "{layer} rotates pairs of features: expected rotary_dim to be even and within 2..head_dim={head_dim}, got {got}."
)
WRONG_HEADS = "RotaryEmbedding: expected an input of shape [batch..., length, heads, head_dim={head_dim}], got {got}."
NO_HEADS = "apply_rotary: expected x of shape [batch..., length, heads, head_dim], got {got}."
WRONG_POSITIONS = (
    "apply_rotary: expected positions of shape {tokens} (batch..., length) or {length} (length,) for x of shape "
    "{shape}, got {got}."
)


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """A change of frequencies for contexts longer than those trained on; the base class leaves them alone.

    Subclass it as a frozen dataclass to write your own: a scaling is a static value.
    """

    def frequencies(self, dim: int, base: float) -> np.ndarray:
        """Returns the `dim // 2` angular frequencies, in radians per token, fastest first."""
        return base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)

    @property
    def amplitude(self) -> float:
        """The number by which rotated queries and keys are multiplied."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class LinearScaling(RotaryScaling):
    """Position interpolation: positions shrink by `factor`.

    Args:
        factor: the new context length divided by the old.

    >>> nnx.LinearScaling(2.0).frequencies(4, base=10000.0).tolist()
    [0.5, 0.005]
    """

    factor: float

    def frequencies(self, dim: int, base: float) -> np.ndarray:
        return super().frequencies(dim, base) / self.factor


@dataclasses.dataclass(frozen=True)
class NTKScaling(RotaryScaling):
    """NTK-aware scaling: the base grows to `base * factor ** (dim / (dim - 2))`.

    The slowest frequency is then divided by `factor`, and the fastest does not change.

    Args:
        factor: the new context length divided by the old.

    >>> nnx.NTKScaling(2.0).frequencies(4, base=10000.0).tolist()
    [1.0, 0.005]
    """

    factor: float

    def frequencies(self, dim: int, base: float) -> np.ndarray:
        if dim <= 2:
            return super().frequencies(dim, base) / self.factor
        return super().frequencies(dim, base * self.factor ** (dim / (dim - 2)))


@dataclasses.dataclass(frozen=True)
class YaRNScaling(RotaryScaling):
    """YaRN: interpolates only the features that turn rarely within the trained context.

    Args:
        factor: the new context length divided by the old.
        original_max_length: the context length of training.
        beta_fast: a number of turns within the trained context; features with more keep their frequency.
        beta_slow: a number of turns; features with fewer have their frequency divided by `factor`.
        attention_factor: the factor on rotated queries and keys; `0.1 * ln(factor) + 1` by default.
    """

    factor: float
    original_max_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def frequencies(self, dim: int, base: float) -> np.ndarray:
        plain = super().frequencies(dim, base)

        # Feature i turns `original_max_length * base ** (-2i / dim) / 2 pi` times; this solves it for i.
        def index_with(turns: float) -> float:
            return dim * math.log(self.original_max_length / (turns * 2 * math.pi)) / (2 * math.log(base))

        first = max(math.floor(index_with(self.beta_fast)), 0)
        last = min(math.ceil(index_with(self.beta_slow)), dim - 1)
        # 1e-3 keeps the ramp finite where it would have no width.
        divided = np.clip((np.arange(dim // 2) - first) / max(last - first, 1e-3), 0, 1)
        return plain * (1 - divided) + plain / self.factor * divided

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(RotaryScaling):
    """The scaling of Llama 3.1 and later.

    Args:
        factor: the number by which the frequencies of long wavelengths are divided.
        low_freq_factor: a bound; wavelengths above `original_max_length / low_freq_factor` are scaled fully.
        high_freq_factor: a bound; wavelengths below `original_max_length / high_freq_factor` are left alone. Between
            the two is a ramp.
        original_max_length: the context length of training.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_length: int = 8192

    def frequencies(self, dim: int, base: float) -> np.ndarray:
        plain = super().frequencies(dim, base)
        turns = self.original_max_length * plain / (2 * math.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return plain * kept + plain / self.factor * (1 - kept)


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
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        _check_rotary_dim("RotaryEmbedding", rotary_dim, head_dim)
        self.head_dim = head_dim
        self.base = float(base)
        self.rotary_dim = rotary_dim
        self.interleaved = interleaved
        self.scaling = scaling

    def __call__(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Rotates `x`.

        Args:
            x: an array of shape `[batch..., length, heads, head_dim]`.
            positions: the positions of the tokens, `[batch..., length]` or `[length]`; 0, 1, 2 … by default.

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
        )


def apply_rotary(
    x: jax.Array,
    positions: jax.Array | None = None,
    *,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: RotaryScaling | None = None,
) -> jax.Array:
    """Rotates `x` by its positions; the function form of `RotaryEmbedding`.

    Args:
        x: an array of shape `[batch..., length, heads, head_dim]`.
        positions: the positions of the tokens, `[batch..., length]` or `[length]`; 0, 1, 2 … by default.
        base, rotary_dim, interleaved, scaling: the settings of `RotaryEmbedding`.

    >>> x = jnp.ones((3, 1, 4))  # length, heads, head_dim
    >>> bool((nnx.apply_rotary(x)[0] == x[0]).all())  # position 0 is not turned
    True
    """
    if len(shape_of("apply_rotary", x)) < 3:
        raise ValueError(NO_HEADS.format(got=x.shape))
    if positions is None:
        positions = jnp.arange(x.shape[-3], dtype=jnp.int32)
    elif not _one_per_token(positions.shape, x.shape[:-2]):
        raise ValueError(
            WRONG_POSITIONS.format(tokens=x.shape[:-2], length=x.shape[-3:-2], shape=x.shape, got=positions.shape)
        )
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    _check_rotary_dim("apply_rotary", rotary_dim, x.shape[-1])
    return _rotate(x, positions, base=base, rotary_dim=rotary_dim, interleaved=interleaved, scaling=scaling)


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
    *,
    base: float,
    rotary_dim: int,
    interleaved: bool,
    scaling: RotaryScaling | None,
) -> jax.Array:
    scaling = RotaryScaling() if scaling is None else scaling
    # Computed in float64 on the host, then rounded once: an error in a frequency grows with the position.
    frequencies = scaling.frequencies(rotary_dim, base).astype(np.float32)
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
