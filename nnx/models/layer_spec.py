"""What one layer of a decoder is made of (`LayerSpec`), and which layers of a model repeat (`Stack`)."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from nnx.nn.attention.rotary_scaling import RotaryScaling

LayerType = Literal["full", "sliding", "section", "linear"]


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
    """The rotary position embedding of a layer.

    Args:
        base: the base of the geometric series of frequencies.
        scaling: the change of frequencies for long contexts, if any.
        fraction: the part of each head's features that rotate.
        interleaved: whether neighboring features rotate together, rather than those of the two halves.
    """

    base: float = 10000.0
    scaling: RotaryScaling | None = None
    fraction: float = 1.0
    interleaved: bool = False


@dataclasses.dataclass(frozen=True)
class PositionScale:
    """A factor of queries that grows with their positions: `1 + slope * log(1 + floor((position + 1) / length))`.

    Args:
        length: the number of tokens after which it begins to grow.
        slope: how fast it grows.

    >>> nnx.models.PositionScale(length=4, slope=0.5)(jnp.array([0, 2, 3])).tolist()
    [1.0, 1.0, 1.3465735912322998]
    """

    length: float
    slope: float

    def __call__(self, positions: jax.Array) -> jax.Array:
        """Returns the factors at some positions, in float32."""
        return 1 + self.slope * jnp.log1p(jnp.floor((positions + 1) / self.length))


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one layer of a decoder is made of, where layers may differ.

    Attributes:
        mixer: the name of what mixes tokens, one of the keys of `MIXERS` in `nnx/models/mixers`.
        window: the number of tokens that a token sees, including itself; all by default.
        rotary: the rotary embedding, if any.
        mlp: "dense" or "experts".
        section: the number of tokens in a section of the text, if a token sees only its own section.
        mixer_norm: whether the mixer's input is normalized, in models that do so; not if the embedding just was.

    >>> config = nnx.models.DecoderConfig(
    ...     model_type="gemma2", vocab_size=64, features=8, hidden_features=16, num_layers=2, num_heads=2, max_length=9,
    ...     layer_types=("sliding", "full"), sliding_window=4)
    >>> [layer.window for layer in config.layers]
    [4, None]
    """

    mixer: str
    window: int | None
    rotary: RotaryConfig | None
    mlp: Literal["dense", "experts"]
    section: int | None = None
    mixer_norm: bool = True


@dataclasses.dataclass(frozen=True)
class Stack:
    """Which layers of a decoder can be scanned: `count` periods of equal layers, after the first `lead` ones.

    Attributes:
        lead: the number of layers before the first period.
        period: the number of layers in a period.
        count: the number of whole periods. Layers that follow them start another one.
    """

    lead: int
    period: int
    count: int


def stack_of(layers: tuple[LayerSpec, ...]) -> Stack:
    """Returns the stack that leaves the fewest layers to compile: those before it, of one period, and after it."""
    kinds = [layers.index(layer) for layer in layers]  # numbers compare faster

    def after(lead: int) -> Stack:
        rest = kinds[lead:]
        # A pattern of length n repeats if the list agrees with itself moved by n.
        period = next(n for n in range(1, len(rest) + 1) if rest[n:] == rest[:-n])
        return Stack(lead, period, len(rest) // period)

    first = after(0)
    repeated = [stack for stack in (first, *map(after, range(1, len(kinds)))) if stack.count > 1]
    return min(repeated, key=lambda s: len(kinds) - (s.count - 1) * s.period, default=first)
