"""OpenAI: gpt2, gpt_oss."""

from nnx.models.families.common import ATTENTION, BIASES, NORMS, QKV, table, without
from nnx.models.family import Family
from nnx.models.files.config_entries import SpecialTokens
from nnx.models.files.layouts import CONV1D, CONV1D_FROM_HEADS, IN_TURNS, LINEAR
from nnx.models.files.rope_entries import Rotary
from nnx.models.files.table import TableEntry, linear, norm
from nnx.models.files.windows import Windows

_GPT2 = table(
    *norm("ln_1", "attention_norm"),
    *linear("attn.c_attn", QKV, CONV1D),
    *linear("attn.c_proj", "attention/out", CONV1D_FROM_HEADS),
    *norm("ln_2", "mlp_norm"),
    *linear("mlp.c_fc", "mlp/layers/0", CONV1D),
    *linear("mlp.c_proj", "mlp/layers/1", CONV1D),
    outer=(
        TableEntry("wte.weight", ("embed/embedding",)),
        TableEntry("wpe.weight", ("positions/embedding",)),
        *norm("ln_f", "norm"),
    ),
    prefix="transformer.",
    layer="h",
    ignored=(r".*\.attn\.(masked_)?bias",),
)
_GPT_OSS = table(
    *ATTENTION,
    TableEntry("self_attn.sinks", ("attention/sinks",)),
    TableEntry("mlp.router.weight", ("mlp/router",), LINEAR),
    TableEntry("mlp.router.bias", ("mlp/router_bias",)),
    # Each tensor has all experts.
    TableEntry("mlp.experts.gate_up_proj", ("mlp/gate", "mlp/up"), IN_TURNS),
    TableEntry("mlp.experts.gate_up_proj_bias", ("mlp/gate_bias", "mlp/up_bias"), IN_TURNS),
    TableEntry("mlp.experts.down_proj", ("mlp/down",)),
    TableEntry("mlp.experts.down_proj_bias", ("mlp/down_bias",)),
    *NORMS,
)
_YARN = {
    **{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}

OPENAI = (
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        _GPT2,
        without(
            "num_key_value_heads",
            "head_dim",
            **{"features": "n_embd", "hidden_features": "n_inner", "num_layers": "n_layer", "num_heads": "n_head"},
            **{"max_length": "n_positions", "norm_epsilon": "layer_norm_epsilon", "activation": "activation_function"},
        ),
        constants={
            **{"norm": "layer", "gated": False, "rotary": None},
            **dict.fromkeys(("use_qkv_bias", "use_out_bias", "use_mlp_bias"), True),
        },
        defaults={
            "hidden_features": lambda values: 4 * values["features"],
            **{"norm_epsilon": 1e-5, "activation": "gelu_new", "tie_embeddings": True},
        },
        only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        parts=(SpecialTokens(),),
    ),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        _GPT_OSS,
        {
            **without("hidden_act"),  # the file does not name it
            **BIASES,
            **{"num_local_experts": "num_experts", "num_experts_per_tok": "num_selected"},
            **{"swiglu_limit": "swiglu_limit", "swiglu_alpha": "swiglu_alpha"},
        },
        constants=dict.fromkeys(("use_sinks", "use_mlp_bias", "use_router_bias"), True),
        defaults={
            **{"norm_epsilon": 1e-5, "head_dim": 64, "use_qkv_bias": True},
            **{"num_experts": 128, "num_selected": 4, "swiglu_limit": 7.0},
        },
        parts=(Rotary(150_000.0, scaling=_YARN), SpecialTokens(), Windows(128, lambda i, entries: i % 2 == 0)),
        aliases={"experts_per_token": "num_experts_per_tok"},
    ),
)
