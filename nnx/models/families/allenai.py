"""Allen Institute for AI: olmo, olmo2, olmo3, olmoe, flex_olmo."""

from nnx.models.families.common import (
    ATTENTION,
    BIASES,
    EXPERTS,
    LLAMA,
    MLP,
    NORMS,
    POST_NORMS,
    STANDARD,
    experts,
    table,
    without,
)
from nnx.models.family import Family
from nnx.models.files.config_entries import SpecialTokens
from nnx.models.files.rope_entries import Rotary
from nnx.models.files.windows import Windows, every

_POST_NORMED = table(*ATTENTION, *MLP, *POST_NORMS)
_CONSTANTS = {"pre_norms": False, "post_norms": True, "normalize_qk": True, "qk_norm": "joint"}

ALLENAI = (
    Family(
        "olmo",
        "OlmoForCausalLM",
        LLAMA,
        {**without("head_dim", "rms_norm_eps"), **BIASES},
        constants={"norm": "layer", "norm_epsilon": 1e-5, "use_norm_scale": False, "use_norm_bias": False},
        only={"clip_qkv": None},
        parts=STANDARD,
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        _POST_NORMED,
        {**without("head_dim"), **BIASES},
        constants=_CONSTANTS,
        defaults={"norm_epsilon": 1e-5},
        parts=STANDARD,
    ),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        _POST_NORMED,
        {**without("head_dim"), **BIASES},
        constants=_CONSTANTS,
        defaults={"norm_epsilon": 1e-5},
        parts=(Rotary(500_000.0, shares_base=True), SpecialTokens(), Windows(4096, every(4))),
    ),
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        table(*ATTENTION, *experts(), *NORMS),
        {**without("head_dim"), **BIASES, **EXPERTS, "norm_topk_prob": "normalize_experts"},
        constants={"normalize_qk": True, "qk_norm": "joint"},
        defaults={"norm_epsilon": 1e-5, "num_experts": 64, "num_selected": 8, "normalize_experts": False},
        only={"clip_qkv": None},
        parts=STANDARD,
        aliases={"num_local_experts": "num_experts"},
    ),
    Family(
        "flex_olmo",
        "FlexOlmoForCausalLM",
        table(*ATTENTION, *experts(), *POST_NORMS),
        {**without("head_dim"), **BIASES, **EXPERTS, "norm_topk_prob": "normalize_experts"},
        constants=_CONSTANTS,
        defaults={"num_experts": 7, "num_selected": 5, "normalize_experts": False},
        parts=(Rotary(500_000.0), SpecialTokens()),
        aliases={"num_local_experts": "num_experts"},
    ),
)
