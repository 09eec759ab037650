"""What a mixer is, and the table of all of them. To add one, list it in `MIXERS`."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax.typing import DTypeLike

from nnx.models.config import DecoderConfig
from nnx.models.layer_spec import LayerSpec
from nnx.models.mixers.attention import make_attention
from nnx.models.mixers.gated_delta import make_gated_delta
from nnx.models.mixers.latent import make_latent


class Mixer(Protocol):
    """The part of a decoder's layer in which tokens meet: a Module with these methods.

    Its cache is a pytree of its own with an attribute `max_length`, the number of tokens a row can hold. A row that
    gets more inside a transform returns NaN from then on.
    """

    def __call__(
        self,
        x: jax.Array,
        /,
        *,
        is_causal: bool = False,
        positions: jax.Array | None = None,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Mixes the tokens of whole texts, `[batch, length, features]`; the arguments are those of attention."""
        ...

    def make_cache(self, batch_shape: int | tuple[int, ...], max_length: int, dtype: DTypeLike) -> Any:
        """Returns an empty cache for `decode_step`."""
        ...

    def decode_step(
        self, inputs: jax.Array, cache: Any, lengths: jax.Array, seq_lengths: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Appends tokens to a cache; returns their outputs and the new cache.

        Args:
            inputs: `[batch, length, features]`, the next tokens.
            cache: the cache, see `make_cache`.
            lengths: `[batch]`, the number of tokens each row holds before this call.
            seq_lengths: `[batch]`, the number of real tokens in each row, which come first.
        """
        ...


MIXERS: dict[str, Callable[[DecoderConfig, LayerSpec, dict[str, Any]], Mixer]] = {
    "attention": make_attention,
    "gated_delta": make_gated_delta,
    "latent": make_latent,
}
"""The mixers by the name in `LayerSpec.mixer`; each is called with config, layer and `dtype`, `param_dtype`, `ctx`."""
