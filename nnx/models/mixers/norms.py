"""The norms of decoders, as their config describes them."""

from typing import Any

from nnx.models.config import DecoderConfig
from nnx.nn.initializers import zeros
from nnx.nn.norms.norm import LayerNorm, RMSNorm


def make_norm(
    config: DecoderConfig, features: int | tuple[int, ...], options: dict[str, Any], **more: Any
) -> RMSNorm | LayerNorm:
    """Returns a norm over the last axis; `options` are `dtype`, `param_dtype` and `ctx`, `more` those of the norm."""
    options = {**options, "epsilon": config.norm_epsilon, "use_scale": config.use_norm_scale, **more}
    if config.norm_offset != 0.0:
        options |= {"scale_offset": config.norm_offset, "scale_init": zeros()}
    if config.norm == "layer":
        return LayerNorm(features, use_bias=config.use_norm_bias, **options)
    return RMSNorm(features, **options)


def make_head_norm(config: DecoderConfig, heads: int, options: dict[str, Any]) -> RMSNorm | LayerNorm:
    """Returns the norm of queries or keys `[..., heads, head_dim]`."""
    if config.qk_norm == "shared":
        return make_norm(config, config.head_dim, options)
    if config.qk_norm == "unit":
        return make_norm(config, config.head_dim, options, use_scale=False)
    if config.qk_norm == "joint":
        joint = {"reduction_axes": (-2, -1), "feature_axes": (-2, -1)}
        return make_norm(config, heads * config.head_dim, options, **joint)
    separate = {"feature_axes": (-2, -1), "scale_metadata": {"sharding": ("heads", "norm")}}
    return make_norm(config, (heads, config.head_dim), options, **separate)
