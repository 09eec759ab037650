"""IBM: granite, granitemoe, granitemoeshared."""

from nnx.models.families.common import (
    ATTENTION,
    BIASES,
    LLAMA,
    LOCAL_EXPERTS,
    MLP_BIAS,
    NORMS,
    STANDARD,
    table,
    without,
)
from nnx.models.family import Family
from nnx.models.files.config_entries import Key
from nnx.models.files.layouts import LINEAR, STACKED
from nnx.models.files.table import TableEntry, linear

_INVERSE = Key("logits_scale", lambda value, _: 1 / value, lambda value, _: float(f"{1 / value:.12g}"))
MULTIPLIERS = {
    **{"embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale"},
    **{"attention_multiplier": "attention_scale", "logits_scaling": _INVERSE},
}
_WIDTH = Key("shared_features", lambda size, _: size or None, lambda size, _: size or 0)
_EXPERTS = (
    TableEntry("block_sparse_moe.router.layer.weight", ("mlp/router",), LINEAR),
    TableEntry("block_sparse_moe.input_linear.weight", ("mlp/gate", "mlp/up"), STACKED),  # each has all experts
    TableEntry("block_sparse_moe.output_linear.weight", ("mlp/down",), STACKED),
)
_SHARED = (
    *linear("shared_mlp.input_linear", ("mlp/shared/gate", "mlp/shared/up")),
    *linear("shared_mlp.output_linear", "mlp/shared/down"),
)

IBM = (
    Family(
        "granite",
        "GraniteForCausalLM",
        LLAMA,
        {**without("head_dim"), **BIASES, **MLP_BIAS, **MULTIPLIERS},
        defaults={"attention_scale": 1.0},
        parts=STANDARD,
    ),
    Family(
        "granitemoe",
        "GraniteMoeForCausalLM",
        table(*ATTENTION, *_EXPERTS, *NORMS),
        {**without("head_dim"), **BIASES, **MULTIPLIERS, **LOCAL_EXPERTS},
        defaults={"attention_scale": 1.0, "num_experts": 8, "num_selected": 2},
        parts=STANDARD,
    ),
    Family(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        table(*ATTENTION, *_EXPERTS, *_SHARED, *NORMS),
        {**without("head_dim"), **BIASES, **MULTIPLIERS, **LOCAL_EXPERTS, "shared_intermediate_size": _WIDTH},
        defaults={"attention_scale": 1.0, "num_experts": 8, "num_selected": 2},
        parts=STANDARD,
    ),
)
