"""Makers of one family: seed_oss, stablelm, nemotron, arcee, hunyuan_v1_dense, helium, gpt_neox,
minimax_m2, hy_v3, and eurobert, in which every token sees all others.
"""

from nnx.models.families.common import (
    ATTENTION,
    BIASES,
    COMMON,
    CORRECTED,
    EXPERTS,
    LLAMA,
    LOCAL_EXPERTS,
    MLP,
    MLP_BIAS,
    NORMS,
    PROJECTIONS,
    QKV,
    STANDARD,
    experts,
    plain_mlp,
    table,
    without,
)
from nnx.models.family import Family
from nnx.models.files.config_entries import Key, SpecialTokens
from nnx.models.files.expert_entries import LISTED_DENSE, NUM_SHARED
from nnx.models.files.layouts import FROM_HEADS, IN_GROUPS
from nnx.models.files.rope_entries import Rotary
from nnx.models.files.table import TableEntry, linear, norm

_NEOX = table(
    *linear("attention.query_key_value", QKV, IN_GROUPS),
    *linear("attention.dense", "attention/out", FROM_HEADS),
    *plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    *NORMS,
    outer=(TableEntry("embed_in.weight", ("embed/embedding",)), *norm("final_layer_norm", "norm")),
    head=linear("embed_out", "head"),
    prefix="gpt_neox.",
    ignored=(r".*\.attention\.(masked_)?bias", r".*rotary_emb\.inv_freq"),
)
_HUNYUAN_NORMS = (
    *norm("self_attn.query_layernorm", "attention/query_ln"),
    *norm("self_attn.key_layernorm", "attention/key_ln"),
)
_HY_EXPERTS = experts(router="router.gate", correction="expert_bias", shared="shared_mlp")
_PLAIN = (*ATTENTION, *plain_mlp("mlp.up_proj", "mlp.down_proj"), *NORMS)

OTHERS = (
    Family(
        "seed_oss",
        "SeedOssForCausalLM",
        LLAMA,
        {**COMMON, "attention_bias": "use_qkv_bias", "attention_out_bias": "use_out_bias", **MLP_BIAS},
        defaults={"head_dim": 128, "use_qkv_bias": True},
        parts=STANDARD,
        neutral=("residual_dropout",),
    ),
    Family(
        "stablelm",
        "StableLmForCausalLM",
        LLAMA,
        {
            **without("head_dim", norm_epsilon="layer_norm_eps"),
            "use_qkv_bias": "use_qkv_bias",
            "use_parallel_residual": Key("parallel", also=("shared_norm",)),
        },
        constants={"norm": "layer"},
        defaults={"norm_epsilon": 1e-5},
        only={"qk_layernorm": False},
        parts=(Rotary(fraction=0.25), SpecialTokens()),
    ),
    Family(
        "nemotron",
        "NemotronForCausalLM",
        table(*_PLAIN),
        {**without(norm_epsilon="norm_eps"), **BIASES, **MLP_BIAS},
        constants={"norm": "layer", "norm_offset": 1.0, "gated": False},
        defaults={"norm_epsilon": 1e-5, "activation": "relu2"},
        parts=(Rotary(fraction=0.5), SpecialTokens()),
    ),
    Family(
        "arcee",
        "ArceeForCausalLM",
        table(*_PLAIN),
        {**COMMON, **BIASES, **MLP_BIAS},
        constants={"gated": False},
        defaults={"norm_epsilon": 1e-5, "activation": "relu2"},
        parts=STANDARD,
    ),
    Family(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        table(*PROJECTIONS, *_HUNYUAN_NORMS, *MLP, *NORMS),
        {**COMMON, **BIASES},
        constants={"normalize_qk": True, "qk_norm_after_rotary": True},
        defaults={"norm_epsilon": 1e-5},
        parts=STANDARD,
        neutral=("eod_token_id",),
    ),
    Family(
        "helium",
        "HeliumForCausalLM",
        LLAMA,
        {**COMMON, "attention_bias": "use_qkv_bias", **MLP_BIAS},
        defaults={"head_dim": 128, "norm_epsilon": 1e-8},
        parts=(Rotary(100_000.0, interleaved=True), SpecialTokens()),
    ),
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _NEOX,
        {
            **without("head_dim", "num_key_value_heads", norm_epsilon="layer_norm_eps"),
            **BIASES,
            "use_parallel_residual": "parallel",
        },
        constants={"norm": "layer", "gated": False, "use_mlp_bias": True},
        defaults={"norm_epsilon": 1e-5, "activation": "gelu", "use_qkv_bias": True, "parallel": True},
        parts=(Rotary(fraction=0.25), SpecialTokens()),
        neutral=("num_key_value_heads",),
        aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    ),
    Family(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        table(
            *ATTENTION,
            *experts("w1", "w3", "w2", block="block_sparse_moe", correction="e_score_correction_bias"),
            *NORMS,
        ),
        {**COMMON, **LOCAL_EXPERTS},
        constants={**CORRECTED, "normalize_qk": True, "qk_norm": "joint"},
        defaults={"num_experts": 256, "num_selected": 8, "head_dim": 128},
        parts=(Rotary(5_000_000.0, dim="rotary_dim"), SpecialTokens()),
    ),
    Family(
        "hy_v3",
        "HYV3ForCausalLM",
        table(*ATTENTION, *_HY_EXPERTS, *MLP, *NORMS),
        {
            **{**without("intermediate_size"), **BIASES, **MLP_BIAS, **EXPERTS, "mlp_layer_types": LISTED_DENSE},
            **{"intermediate_size": "dense_features", "moe_intermediate_size": "hidden_features"},
            **{"router_scaling_factor": "expert_weight_scale", "num_shared_experts": NUM_SHARED},
        },
        constants={**CORRECTED, "normalize_qk": True},
        defaults={
            **{"num_experts": 192, "num_selected": 8, "norm_epsilon": 1e-5, "head_dim": 128},
            **{"expert_weight_scale": 2.826, "hidden_features": 1536, "dense_layers": (0,)},
            "shared_features": lambda values: values["hidden_features"],
        },
        parts=(Rotary(11158840.0), SpecialTokens()),
        neutral=("enable_moe_fp32_combine",),
        aliases={"num_local_experts": "num_experts"},
    ),
    Family(
        "eurobert",
        "EuroBertForMaskedLM",
        LLAMA,
        {**without("tie_word_embeddings"), **BIASES, **MLP_BIAS},
        constants={"causal": False, "use_head_bias": True},
        defaults={"norm_epsilon": 1e-5},
        only={"is_decoder": False, "tie_word_embeddings": False},
        parts=(Rotary(250_000.0), SpecialTokens()),
        neutral=("mask_token_id",),
    ),
)
