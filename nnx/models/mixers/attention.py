"""Multi-head attention as a mixer: the public layer, with the settings of a decoder."""

from typing import Any

from nnx.models.config import DecoderConfig
from nnx.models.layer_spec import LayerSpec
from nnx.models.mixers.norms import make_head_norm
from nnx.nn.attention.attention import MultiHeadAttention
from nnx.nn.attention.rotary import RotaryEmbedding


def make_attention(config: DecoderConfig, spec: LayerSpec, options: dict[str, Any]) -> MultiHeadAttention:
    """Returns the attention of a layer; `options` are `dtype`, `param_dtype` and `ctx`."""
    rotary, divisor, scale = spec.rotary, config.query_pre_attn_scalar, config.attention_scale
    layer = MultiHeadAttention(
        config.num_heads,
        config.features,
        qkv_features=config.num_heads * config.head_dim,
        num_kv_heads=config.num_kv_heads,
        use_bias=config.use_qkv_bias,
        use_out_bias=config.use_out_bias,
        rotary=None
        if rotary is None
        else RotaryEmbedding(
            config.head_dim,
            base=rotary.base,
            rotary_dim=int(config.head_dim * rotary.fraction),
            scaling=rotary.scaling,
            interleaved=rotary.interleaved,
        ),
        sliding_window=spec.window,
        section_size=spec.section,
        query_scale=config.unrotated_scale if rotary is None else None,
        scale=scale if divisor is None else float(divisor) ** -0.5,
        logits_soft_cap=config.attention_soft_cap,
        use_sinks=config.use_sinks,
        use_gate=config.use_attention_gate,
        normalize_after_rotary=config.qk_norm_after_rotary,
        **options,
    )
    if config.normalize_qk and not (config.qk_norm == "unit" and rotary is None):
        # Set here because `normalize_qk=` takes neither the epsilon nor the offset.
        layer.query_ln = make_head_norm(config, config.num_heads, options)
        layer.key_ln = make_head_norm(config, config.num_kv_heads, options)
    return layer
