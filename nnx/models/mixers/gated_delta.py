"""Gated delta networks as a mixer: the public layer, with the settings of a decoder."""

from typing import Any, cast

from nnx.models.config import DecoderConfig
from nnx.models.layer_spec import LayerSpec
from nnx.nn.recurrent.gated_delta import GatedDeltaNet


def make_gated_delta(config: DecoderConfig, spec: LayerSpec, options: dict[str, Any]) -> GatedDeltaNet:
    """Returns the gated delta network of a layer; `options` are `dtype`, `param_dtype` and `ctx`."""
    del spec  # neither window nor rotary embedding: the order of the tokens is all it knows
    return GatedDeltaNet(
        config.features,
        cast(int, config.delta_heads),
        cast(int, config.delta_key_dim),
        config.delta_value_dim,
        config.delta_key_heads,
        taps=config.delta_taps,
        epsilon=config.norm_epsilon,
        **options,
    )
