"""Zhipu: glm, glm4, glm4_moe; and Upstage, which built on the last: solar_open."""

from nnx.models.families.common import (
    ATTENTION,
    COMMON,
    CORRECTED,
    FUSED_MLP,
    MLP,
    NORMS,
    SPARSE,
    experts,
    skipping_next_tokens,
    table,
    without,
)
from nnx.models.family import Family
from nnx.models.files.config_entries import SpecialTokens
from nnx.models.files.expert_entries import FIRST_DENSE, NUM_SHARED, Groups
from nnx.models.files.rope_entries import Rotary
from nnx.models.files.table import norm

_PIECES = (*ATTENTION, *FUSED_MLP, *NORMS)
_POST_NORMS = (*norm("post_self_attn_layernorm", "attention_post_norm"), *norm("post_mlp_layernorm", "mlp_post_norm"))
_KEYS = {**COMMON, "attention_bias": "use_qkv_bias"}
_DEFAULTS = {"head_dim": 128, "norm_epsilon": 1.5625e-7, "use_qkv_bias": True}
_PARTS = (Rotary(fraction=0.5, interleaved=True), SpecialTokens())

ROUTED = {
    **{**SPARSE, "n_routed_experts": "num_experts", "num_experts_per_tok": "num_selected"},
    **{"routed_scaling_factor": "expert_weight_scale", "first_k_dense_replace": FIRST_DENSE},
    "n_shared_experts": NUM_SHARED,
}

ZHIPU = (
    Family("glm", "GlmForCausalLM", table(*_PIECES), _KEYS, defaults=_DEFAULTS, parts=_PARTS),
    Family(
        "glm4",
        "Glm4ForCausalLM",
        table(*_PIECES, *_POST_NORMS),
        _KEYS,
        constants={"post_norms": True},
        defaults=_DEFAULTS,
        parts=_PARTS,
    ),
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        skipping_next_tokens(table(*ATTENTION, *experts(), *MLP, *NORMS)),
        {**without("intermediate_size"), **ROUTED, "use_qk_norm": "normalize_qk", "attention_bias": "use_qkv_bias"},
        constants=CORRECTED,
        defaults={
            **{"norm_epsilon": 1e-5, "num_experts": 128, "num_selected": 8, "hidden_features": 1408},
            **{"dense_layers": (0,), "shared_features": lambda values: values["hidden_features"]},
        },
        parts=(Rotary(fraction=0.5), SpecialTokens(), Groups()),
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    Family(
        "solar_open",
        "SolarOpenForCausalLM",
        table(*ATTENTION, *experts(), *NORMS),
        {
            **without("intermediate_size"),
            **{entry: field for entry, field in ROUTED.items() if field not in ("dense_features", FIRST_DENSE)},
            "attention_bias": "use_qkv_bias",
        },
        constants=CORRECTED,
        defaults={
            **{"norm_epsilon": 1e-5, "num_experts": 128, "num_selected": 8, "hidden_features": 1280},
            **{"head_dim": 128, "shared_features": lambda values: values["hidden_features"]},
        },
        parts=(Rotary(1_000_000.0), SpecialTokens(), Groups()),
        neutral=("intermediate_size",),
        aliases={"num_local_experts": "n_routed_experts"},
    ),
)
