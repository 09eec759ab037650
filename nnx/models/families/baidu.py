"""Baidu: ernie4_5, ernie4_5_moe."""

from nnx.models.families.common import ALL_BIASES, ATTENTION, COMMON, LLAMA, MLP, NORMS, experts, table, without
from nnx.models.family import Family
from nnx.models.files.config_entries import SpecialTokens
from nnx.models.files.expert_entries import FIRST_DENSE, NUM_SHARED
from nnx.models.files.rope_entries import Rotary

_PARTS = (Rotary(500_000.0, interleaved=True), SpecialTokens())

BAIDU = (
    Family(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        LLAMA,
        {**COMMON, "use_bias": ALL_BIASES},
        defaults={"head_dim": 128, "norm_epsilon": 1e-5, "tie_embeddings": True},
        parts=_PARTS,
    ),
    Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        table(*ATTENTION, *experts(correction="moe_statics.e_score_correction_bias"), *MLP, *NORMS),
        {
            **{**without("intermediate_size", "head_dim"), "intermediate_size": "dense_features"},
            **{"moe_intermediate_size": "hidden_features", "moe_num_experts": "num_experts", "moe_k": "num_selected"},
            **{"moe_layer_start_index": FIRST_DENSE, "moe_num_shared_experts": NUM_SHARED},
        },
        constants={"use_router_correction": True},
        defaults={
            **{"norm_epsilon": 1e-5, "tie_embeddings": True, "hidden_features": 1536, "dense_layers": (0,)},
            **{"num_experts": 64, "num_selected": 6, "shared_features": lambda values: 2 * values["hidden_features"]},
        },
        only={
            **{"use_bias": False, "moe_layer_interval": 1, "moe_norm_min": 1e-12},
            "moe_layer_end_index": lambda values: values["num_layers"] - 1,
        },
        parts=_PARTS,
        aliases={"num_experts_per_tok": "moe_k", "num_local_experts": "moe_num_experts"},
    ),
)
