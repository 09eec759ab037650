"""Scalings of rotary frequencies, for contexts longer than those a model was trained on.

A model trained on short texts meets unseen angles in long ones. A *scaling* changes the frequencies so that the angles
stay familiar:

- `LinearScaling` divides every frequency by the factor (position interpolation).
- `NTKScaling` uses a larger base, which slows low frequencies most and leaves the highest alone (NTK-aware).
- `DynamicNTKScaling` does the same once a text is longer than those trained on, with a factor that grows with it.
- `YaRNScaling` keeps high frequencies, divides low ones, ramps between them, and sharpens attention slightly (YaRN).
- `Llama3Scaling` is the same idea with the bands of Llama 3.1, chosen by wavelength.
- `LongRoPEScaling` divides each frequency by its own number, from one list for short texts and another for long ones.

Two of them *depend on the length* of the text. All queries and keys that meet must be rotated with the frequencies of
one length, so attention asks for those of the whole text, and decoding for those of the longest text in the cache.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

WRONG_FACTORS = (
    "LongRoPEScaling: expected {expected} numbers in {name}, one for each pair of the {dim} features that rotate, "
    "got {got}."
)


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """A change of frequencies for contexts longer than those trained on; the base class leaves them alone.

    Subclass it as a frozen dataclass to write your own: a scaling is a static value.

    Attributes:
        depends_on_length: whether the frequencies depend on the length of the text, see `frequencies_for`.
        amplitude: the number by which rotated queries and keys are multiplied.
    """

    depends_on_length: ClassVar[bool] = False

    def frequencies(self, dim: int, base: float) -> np.ndarray:
        """Returns the `dim // 2` angular frequencies, in radians per token, fastest first.

        If they depend on the length of the text, those of a text as short as the ones trained on.
        """
        return base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)

    def frequencies_for(self, dim: int, base: float, length: int | jax.Array) -> np.ndarray | jax.Array:
        """Returns the frequencies for a text of this length.

        Args:
            dim: the number of features that rotate.
            base: the base of the geometric series of frequencies.
            length: the number of tokens in the text; an integer, or an array with one number per text.

        Returns:
            An array of shape `[*length.shape, dim // 2]`, or `[dim // 2]` if the length does not matter.
        """
        return self.frequencies(dim, base)

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
class DynamicNTKScaling(RotaryScaling):
    """NTK-aware scaling that begins where the texts trained on end, and grows with the text.

    For a text of `length` tokens, the base is multiplied by `(factor * length / original_max_length - factor + 1) **
    (dim / (dim - 2))`; up to `original_max_length` tokens it does not change.

    Args:
        factor: the growth of the scaling with the length of the text.
        original_max_length: the context length of training.

    >>> scaling = nnx.DynamicNTKScaling(1.0, original_max_length=100)
    >>> [scaling.frequencies_for(4, 10000.0, length).tolist() for length in (50, 100, 200)]
    [[1.0, 0.01], [1.0, 0.01], [1.0, 0.005]]
    """

    depends_on_length: ClassVar[bool] = True

    factor: float
    original_max_length: int

    def frequencies_for(self, dim: int, base: float, length: int | jax.Array) -> np.ndarray | jax.Array:
        numpy: Any = np if isinstance(length, int) else jnp
        beyond = numpy.maximum(length, self.original_max_length) / self.original_max_length - 1
        slower = (1 + self.factor * beyond)[..., None]  # by this factor, the lowest of the frequencies
        # The base enters with the power -2i / dim, so its factor with the power -2i / (dim - 2).
        powers = np.arange(0, dim, 2, dtype=np.float64) / max(dim - 2, 1)
        return self.frequencies(dim, base) * slower**-powers


@dataclasses.dataclass(frozen=True)
class LongRoPEScaling(RotaryScaling):
    """LongRoPE, the scaling of Phi-3: each frequency is divided by its own number.

    Args:
        short_factors: the divisors, fastest frequency first, for texts of at most `original_max_length` tokens.
        long_factors: the divisors for longer texts.
        original_max_length: the context length of training.
        factor: the new context length divided by the old.
        attention_factor: the factor on rotated queries and keys; `sqrt(1 + ln(factor) / ln(original_max_length))` by
            default.

    >>> scaling = nnx.LongRoPEScaling((1.0, 1.0), (2.0, 4.0), original_max_length=100, factor=32.0)
    >>> [scaling.frequencies_for(4, 10000.0, length).tolist() for length in (100, 101)]
    [[1.0, 0.01], [0.5, 0.0025]]
    """

    depends_on_length: ClassVar[bool] = True

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_length: int
    factor: float
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("short_factors", "long_factors"):  # a list could not be part of a static value
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def frequencies(self, dim: int, base: float) -> np.ndarray:
        return self._divided(dim, base, "short_factors")

    def frequencies_for(self, dim: int, base: float, length: int | jax.Array) -> np.ndarray | jax.Array:
        short, long = (self._divided(dim, base, name) for name in ("short_factors", "long_factors"))
        if isinstance(length, int):
            return long if length > self.original_max_length else short
        return jnp.where((length > self.original_max_length)[..., None], long, short)

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1 else math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_length))

    def _divided(self, dim: int, base: float, name: str) -> np.ndarray:
        factors = getattr(self, name)
        if len(factors) != dim // 2:
            raise ValueError(WRONG_FACTORS.format(expected=dim // 2, name=name, dim=dim, got=len(factors)))
        return super().frequencies(dim, base) / np.asarray(factors, np.float64)


@dataclasses.dataclass(frozen=True)
class YaRNScaling(RotaryScaling):
    """YaRN: interpolates only the features that turn rarely within the trained context.

    Args:
        factor: the new context length divided by the old.
        original_max_length: the context length of training.
        beta_fast: a number of turns within the trained context; features with more keep their frequency.
        beta_slow: a number of turns; features with fewer have their frequency divided by `factor`.
        attention_factor: the factor on rotated queries and keys; `0.1 * ln(factor) + 1` by default.
        truncate: whether the ramp between the two starts and ends at whole features.
        mscale, mscale_all_dim: two numbers with which DeepSeek divides the sharpening between the parts of a head: the
            default of `attention_factor` is then `(0.1 * mscale * ln(factor) + 1)` over the same with `mscale_all_dim`,
            and `logits_factor` is the square of the latter.
    """

    factor: float
    original_max_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def frequencies(self, dim: int, base: float) -> np.ndarray:
        plain = super().frequencies(dim, base)

        # Feature i turns `original_max_length * base ** (-2i / dim) / 2 pi` times; this solves it for i.
        def index_with(turns: float) -> float:
            return dim * math.log(self.original_max_length / (turns * 2 * math.pi)) / (2 * math.log(base))

        first, last = index_with(self.beta_fast), index_with(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        # 1e-3 keeps the ramp finite where it would have no width.
        divided = np.clip((np.arange(dim // 2) - first) / max(last - first, 1e-3), 0, 1)
        return plain * (1 - divided) + plain / self.factor * divided

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharpening(self.mscale) / self._sharpening(self.mscale_all_dim)
        return self._sharpening(1.0)

    @property
    def logits_factor(self) -> float:
        """The factor on all logits of `LatentAttention`, of which only a part of each head rotates."""
        return self._sharpening(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _sharpening(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


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
