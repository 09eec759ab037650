"""Latent attention as a mixer: the public layer, with the settings of a decoder."""

from typing import Any

from nnx.models.config import DecoderConfig
from nnx.models.layer_spec import LayerSpec
from nnx.nn.attention.latent import LatentAttention
from nnx.nn.attention.rotary import RotaryEmbedding
from nnx.nn.attention.rotary_scaling import YaRNScaling

NO_ROTARY = (
    "DecoderConfig: layers with latent_rank={rank} have a rotary embedding and no window; this one has "
    "rotary={rotary!r} and window={window!r}."
)


def make_latent(config: DecoderConfig, spec: LayerSpec, options: dict[str, Any]) -> LatentAttention:
    """Returns the latent attention of a layer; `options` are `dtype`, `param_dtype` and `ctx`."""
    rotary, rank, rotary_dim = spec.rotary, config.latent_rank, config.rotary_dim
    if rotary is None or rank is None or rotary_dim is None or spec.window is not None:
        raise ValueError(NO_ROTARY.format(rank=rank, rotary=rotary, window=spec.window))
    scale = (config.head_dim + rotary_dim) ** -0.5
    if isinstance(rotary.scaling, YaRNScaling):
        scale *= rotary.scaling.logits_factor
    return LatentAttention(
        config.num_heads,
        config.features,
        kv_rank=rank,
        query_rank=config.query_rank,
        head_dim=config.head_dim,
        value_dim=config.value_dim,
        rotary=RotaryEmbedding(rotary_dim, base=rotary.base, scaling=rotary.scaling, interleaved=rotary.interleaved),
        use_bias=config.use_qkv_bias,
        scale=scale,
        **options,
    )
