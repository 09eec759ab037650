"""LG: exaone4, exaone_moe."""

from nnx.models.families.common import (
    ATTENTION,
    COMMON,
    CORRECTED,
    EXPERTS,
    MLP,
    NORMS,
    POST_NORMS,
    SPARSE,
    STANDARD,
    experts,
    table,
    without,
    without_rotary,
)
from nnx.models.family import Family
from nnx.models.files.expert_entries import LISTED_DENSE, NUM_SHARED, Groups
from nnx.models.files.windows import Windows, every

_UNROTATED = lambda values: without_rotary()(values) if values["sliding_window"] else ()  # noqa: E731

LG = (
    Family(
        "exaone4",
        "Exaone4ForCausalLM",
        table(*ATTENTION, *MLP, *POST_NORMS),
        COMMON,
        constants={
            **{"pre_norms": False, "post_norms": True, "normalize_qk": True},
            "unrotated_layers": _UNROTATED,
        },
        defaults={"norm_epsilon": 1e-5},
        parts=(*STANDARD, Windows(4096, every(4))),
    ),
    Family(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        table(*ATTENTION, *experts(correction="e_score_correction_bias"), *MLP, *NORMS),
        {
            **{**without("intermediate_size"), **SPARSE, **EXPERTS, "mlp_layer_types": LISTED_DENSE},
            **{"routed_scaling_factor": "expert_weight_scale", "num_shared_experts": NUM_SHARED},
        },
        constants={**CORRECTED, "normalize_qk": True, "unrotated_layers": _UNROTATED},
        defaults={
            **{"num_experts": 64, "num_selected": 8, "norm_epsilon": 1e-5, "hidden_features": 1024},
            **{"expert_weight_scale": 2.5, "dense_layers": (0,)},
            "shared_features": lambda values: values["hidden_features"],
        },
        parts=(*STANDARD, Windows(4096, every(4)), Groups()),
        neutral=("first_k_dense_replace",),
        aliases={"num_local_experts": "num_experts"},
    ),
)
