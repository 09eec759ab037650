"""Cohere: cohere, cohere2."""

from nnx.models.families.common import ATTENTION, BIASES, MLP, table, without, without_rotary
from nnx.models.family import Family
from nnx.models.files.config_entries import SpecialTokens
from nnx.models.files.rope_entries import Rotary
from nnx.models.files.table import norm
from nnx.models.files.windows import Windows, every

_TABLE = table(*ATTENTION, *MLP, *norm("input_layernorm", "attention_norm"))
_CONSTANTS = {"norm": "layer", "use_norm_bias": False, "parallel": True, "shared_norm": True}
_DEFAULTS = {"norm_epsilon": 1e-5, "tie_embeddings": True, "logits_scale": 0.0625}

COHERE = (
    Family(
        "cohere",
        "CohereForCausalLM",
        _TABLE,
        {
            **without("head_dim", norm_epsilon="layer_norm_eps"),
            **BIASES,
            **{"logit_scale": "logits_scale", "use_qk_norm": "normalize_qk"},
        },
        constants={**_CONSTANTS, "qk_norm": "separate"},
        defaults=_DEFAULTS,
        parts=(Rotary(500_000.0, interleaved=True), SpecialTokens()),
    ),
    Family(
        "cohere2",
        "Cohere2ForCausalLM",
        _TABLE,
        {**without(norm_epsilon="layer_norm_eps"), **BIASES, "logit_scale": "logits_scale"},
        constants={**_CONSTANTS, "unrotated_layers": without_rotary()},
        defaults=_DEFAULTS,
        parts=(Rotary(interleaved=True), SpecialTokens(), Windows(4096, every(4))),
    ),
)
