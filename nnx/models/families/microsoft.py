"""Microsoft: phi3."""

from nnx.models.families.common import FUSED_MLP, NORMS, OUT, QKV, table, without
from nnx.models.family import Family
from nnx.models.files.config_entries import SpecialTokens
from nnx.models.files.rope_entries import Rotary
from nnx.models.files.table import linear
from nnx.models.files.windows import Windows

MICROSOFT = (
    Family(
        "phi3",
        "Phi3ForCausalLM",
        table(*linear("self_attn.qkv_proj", QKV), *OUT, *FUSED_MLP, *NORMS),
        without("head_dim"),
        defaults={"norm_epsilon": 1e-5},
        parts=(Rotary(original=4096), SpecialTokens(), Windows()),
    ),
)
