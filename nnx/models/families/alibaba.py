"""Alibaba: qwen2, qwen3, qwen3_moe."""

from nnx.models.families.common import (
    ATTENTION,
    BIASES,
    COMMON,
    EXPERTS,
    LLAMA,
    NORMS,
    STANDARD,
    experts,
    table,
    without,
)
from nnx.models.family import Family
from nnx.models.files.windows import Windows

_SWITCH = "use_sliding_window"
_WINDOWS = Windows(4096, lambda i, entries: i >= entries.get("max_window_layers", 28), switch=_SWITCH)
_EXPERTS = experts("gate_proj", "up_proj", "down_proj", router="mlp.gate", of="mlp.experts")

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
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        table(*ATTENTION, *_EXPERTS, *NORMS),
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
