"""Google: gemma, gemma2, gemma3."""

from nnx.models.families.common import ATTENTION, BIASES, LLAMA, MLP, STANDARD, table, without
from nnx.models.family import Family
from nnx.models.files.config_entries import Key, SpecialTokens
from nnx.models.files.rope_entries import Rotary
from nnx.models.files.table import norm
from nnx.models.files.windows import Windows, every

_ATTENTION_CAP = "attn_logit_softcapping"
_KEYS = {
    **without(activation="hidden_activation"),
    **BIASES,
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    _ATTENTION_CAP: "attention_soft_cap",
    "final_logit_softcapping": "logits_soft_cap",
}
_CONSTANTS = {"norm_offset": 1.0, "post_norms": True, "scale_embeddings": True}
_DEFAULTS = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "activation": "gelu_pytorch_tanh",
    "tie_embeddings": True,
}
_ONLY = {"use_bidirectional_attention": False}
_GELU = Key("activation", lambda name, _: "gelu_pytorch_tanh" if name == "gelu" else name)
_TABLE = table(
    *ATTENTION,
    *MLP,
    *norm("input_layernorm", "attention_norm"),
    *norm("post_attention_layernorm", "attention_post_norm"),
    *norm("pre_feedforward_layernorm", "mlp_norm"),
    *norm("post_feedforward_layernorm", "mlp_post_norm"),
)

GOOGLE = (
    Family(
        "gemma",
        "GemmaForCausalLM",
        LLAMA,
        # The first files say "gelu", which transformers takes for the other one as well.
        {**without("hidden_act"), **BIASES, "hidden_act": _GELU},
        constants={"norm_offset": 1.0, "scale_embeddings": True},
        defaults={"head_dim": 256, "activation": "gelu_pytorch_tanh", "tie_embeddings": True},
        only=_ONLY,
        parts=STANDARD,
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        _TABLE,
        _KEYS,
        constants=_CONSTANTS,
        defaults={**_DEFAULTS, "attention_soft_cap": 50.0, "logits_soft_cap": 30.0},
        only=_ONLY,
        parts=(*STANDARD, Windows(4096, lambda i, entries: i % 2 == 0)),
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _TABLE,
        {name: key for name, key in _KEYS.items() if name != _ATTENTION_CAP},
        constants={**_CONSTANTS, "normalize_qk": True},
        defaults=_DEFAULTS,
        only={**_ONLY, _ATTENTION_CAP: None},  # transformers passes over it
        parts=(Rotary(1_000_000.0, local_base=10_000.0), SpecialTokens(), Windows(4096, every(6))),
    ),
)
