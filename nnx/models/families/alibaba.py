"""Alibaba: qwen2, qwen3, and their mixtures of experts."""

from nnx.models.families.common import (
    ATTENTION,
    BIASES,
    COMMON,
    EXPERTS,
    LLAMA,
    NORMS,
    SPARSE,
    STANDARD,
    experts,
    table,
    without,
)
from nnx.models.family import Family
from nnx.models.files.windows import Windows

_SWITCH = "use_sliding_window"
_WINDOWS = Windows(4096, lambda i, entries: i >= entries.get("max_window_layers", 28), switch=_SWITCH)

ALIBABA = (
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        LLAMA,
        without("head_dim"),
        constants={"use_qkv_bias": True},
        parts=(*STANDARD, _WINDOWS),
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        LLAMA,
        {**COMMON, **BIASES},
        constants={"normalize_qk": True},
        defaults={"head_dim": 128},
        parts=(*STANDARD, _WINDOWS),
    ),
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        table(*ATTENTION, *experts(shared="shared_expert"), *NORMS),
        {
            **without("intermediate_size", "head_dim"),
            **{**SPARSE, **EXPERTS, "shared_expert_intermediate_size": "shared_features"},
            "qkv_bias": "use_qkv_bias",
        },
        constants={"use_shared_gate": True},
        defaults={
            **{"hidden_features": 1408, "shared_features": 5632, "num_experts": 60, "num_selected": 4},
            **{"normalize_experts": False, "use_qkv_bias": True},
        },
        only={"decoder_sparse_step": 1, "mlp_only_layers": []},
        parts=(*STANDARD, Windows(4096, switch=_SWITCH)),
        aliases={"num_local_experts": "num_experts"},
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        table(*ATTENTION, *experts(), *NORMS),
        {
            **without("intermediate_size", hidden_features="moe_intermediate_size"),
            **BIASES,
            **EXPERTS,
            "norm_topk_prob": "normalize_experts",
        },
        constants={"normalize_qk": True},
        defaults={"hidden_features": 768, "num_experts": 128, "num_selected": 8, "normalize_experts": False},
        only={"decoder_sparse_step": 1, "mlp_only_layers": []},  # no published model has dense MLPs in some layers
        neutral=("intermediate_size",),  # the width of these
        parts=(*STANDARD, Windows(4096, switch=_SWITCH)),
        aliases={"num_local_experts": "num_experts"},
    ),
)
