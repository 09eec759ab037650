"""Answer.AI: modernbert, in which every token sees all others, or those near it."""

from collections.abc import Mapping
from typing import Any

from nnx.models.config import DecoderConfig
from nnx.models.families.common import BIASES, FREQUENCIES, GATE_UP, MLP_BIAS, QKV, table, without
from nnx.models.family import Family
from nnx.models.files.config_entries import SpecialTokens, checked
from nnx.models.files.layouts import FROM_HEADS
from nnx.models.files.rope_entries import Rotary
from nnx.models.files.table import TableEntry, linear, norm
from nnx.models.files.windows import Windows

_ABSENT = ("head_dim", "num_key_value_heads", "tie_word_embeddings")
_NEUTRAL = ("deterministic_flash_attn", "layer_norm_eps", "reference_compile", "repad_logits_with_grad")
_NEUTRAL += ("sparse_pred_ignore_index",)
_EVERY = "global_attn_every_n_layers"


class _WindowsToBothSides(Windows):
    """Windows to both sides. The file has the width of the whole window, of which half is on each side."""

    def known(self, entries: Mapping[str, Any]) -> set[str]:
        return super().known(entries) | {"local_attention", _EVERY}

    def read(self, entries: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        width = checked(entries.get("local_attention", 128), int, "local_attention", where)
        return super().read({**entries, "sliding_window": width // 2 + 1}, values, where)

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        entries = super().write(config)
        window = entries.pop("sliding_window")
        return entries if window is None else {**entries, "local_attention": 2 * (window - 1)}


_TABLE = table(
    *linear("attn.Wqkv", QKV),
    *linear("attn.Wo", "attention/out", FROM_HEADS),
    *linear("mlp.Wi", GATE_UP),
    *linear("mlp.Wo", "mlp/down"),
    *norm("attn_norm", "attention_norm"),
    *norm("mlp_norm", "mlp_norm"),
    outer=(
        TableEntry("embeddings.tok_embeddings.weight", ("embed/embedding",)),
        *norm("embeddings.norm", "embed_norm"),
        *norm("final_norm", "norm"),
    ),
    head=(
        *linear("head.dense", "head/dense"),
        *norm("head.norm", "head/norm"),
        TableEntry("decoder.bias", ("head/bias",)),
    ),
    ignored=(FREQUENCIES, r"decoder\.weight"),  # a copy of the embedding
)

ANSWER_AI = (
    Family(
        "modernbert",
        "ModernBertForMaskedLM",
        _TABLE,
        {
            **without(*_ABSENT, activation="hidden_activation", norm_epsilon="norm_eps"),
            **BIASES,
            **MLP_BIAS,
            **{"norm_bias": "use_norm_bias", "classifier_activation": "head_activation"},
        },
        constants={"norm": "layer", "embed_norm": True, "causal": False, "tie_embeddings": True},
        defaults={"norm_epsilon": 1e-5, "activation": "gelu", "head_activation": "gelu", "use_norm_bias": False},
        only={
            **{"tie_word_embeddings": True, "classifier_bias": False, "decoder_bias": True, "sparse_prediction": False},
            "rope_scaling": None,  # transformers would scale both bases
        },
        parts=(
            Rotary(160_000.0, local_base=10_000.0, entries=("global_rope_theta", "local_rope_theta")),
            SpecialTokens(),
            _WindowsToBothSides(rule=lambda i, entries: bool(i % (entries.get(_EVERY) or 3))),
        ),
        neutral=_NEUTRAL,
    ),
)
