"""The norms of decoders, as their config describes them."""

from typing import Any

from nnx.models.config import DecoderConfig
from nnx.nn.initializers import zeros
from nnx.nn.norms.norm import LayerNorm, RMSNorm


def make_norm(config: DecoderConfig, features: int, options: dict[str, Any]) -> RMSNorm | LayerNorm:
    """Returns a norm over the last axis; `options` are `dtype`, `param_dtype` and `ctx`."""
    if config.norm == "layer":
        return LayerNorm(features, epsilon=config.norm_epsilon, **options)
    if config.norm_offset != 0.0:
        options = {**options, "scale_offset": config.norm_offset, "scale_init": zeros()}
    return RMSNorm(features, epsilon=config.norm_epsilon, **options)
