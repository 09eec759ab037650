"""Microsoft: phi, phi3."""

from nnx.models.families.common import FUSED_MLP, NORMS, OUT, OUTER, QKV, plain_mlp, table, without
from nnx.models.family import Family
from nnx.models.files.config_entries import SpecialTokens
from nnx.models.files.rope_entries import Rotary
from nnx.models.files.table import attention, linear, norm
from nnx.models.files.windows import Windows

_PHI = table(
    *attention("self_attn", ("q_proj", "k_proj", "v_proj", "dense"), "attention"),
    *plain_mlp("mlp.fc1", "mlp.fc2"),
    *norm("input_layernorm", "attention_norm"),
    outer=(OUTER[0], *norm("final_layernorm", "norm")),
)

MICROSOFT = (
    Family(
        "phi",
        "PhiForCausalLM",
        _PHI,
        without("head_dim", norm_epsilon="layer_norm_eps"),
        constants={
            **{"norm": "layer", "gated": False, "parallel": True, "shared_norm": True},
            **dict.fromkeys(("use_qkv_bias", "use_out_bias", "use_mlp_bias", "use_head_bias"), True),
        },
        defaults={"norm_epsilon": 1e-5, "activation": "gelu_new"},
        only={"qk_layernorm": False},
        parts=(Rotary(fraction=0.5), SpecialTokens()),
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        table(*linear("self_attn.qkv_proj", QKV), *OUT, *FUSED_MLP, *NORMS),
        without("head_dim"),
        defaults={"norm_epsilon": 1e-5},
        parts=(Rotary(original=4096), SpecialTokens(), Windows()),
    ),
)
