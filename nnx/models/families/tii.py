"""Technology Innovation Institute: falcon."""

from collections.abc import Mapping
from typing import Any

from nnx.models.config import DecoderConfig
from nnx.models.families.common import ALL_BIASES, QKV, STANDARD, plain_mlp, table, without
from nnx.models.family import Family
from nnx.models.files.layouts import FROM_HEADS, IN_GROUPS
from nnx.models.files.table import Table, TableEntry, linear, norm


class _Variants:
    """The part of the config that says how keys are shared, and which norms there are."""

    NAMES = ("multi_query", "new_decoder_architecture", "num_kv_heads", "num_ln_in_parallel_attn")

    def known(self, entries: Mapping[str, Any]) -> set[str]:
        return set(self.NAMES)

    def read(self, entries: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        new, heads = entries.get("new_decoder_architecture") or False, values["num_heads"]
        shared = 1 if entries.get("multi_query", True) else heads
        norms = entries.get("num_ln_in_parallel_attn") or (2 if new else 1)
        return {
            "num_kv_heads": (entries.get("num_kv_heads") or heads) if new else shared,
            "shared_norm": values["parallel"] and norms == 1,
        }

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        new = config.num_kv_heads not in (1, config.num_heads) or (config.parallel and not config.shared_norm)
        entries = {"new_decoder_architecture": new, "multi_query": config.num_kv_heads == 1}
        norms = None if not new else 1 if config.shared_norm else 2
        return {**entries, "num_kv_heads": config.num_kv_heads, "num_ln_in_parallel_attn": norms}


def _table(config: DecoderConfig) -> Table:
    """Returns the names of tensors, which depend on how many norms there are."""
    has_two = config.parallel and not config.shared_norm
    names = ("ln_attn", "ln_mlp") if has_two else ("input_layernorm", "post_attention_layernorm")
    return table(
        *linear("self_attention.query_key_value", QKV, IN_GROUPS),
        *linear("self_attention.dense", "attention/out", FROM_HEADS),
        *plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        *norm(names[0], "attention_norm"),
        *norm(names[1], "mlp_norm"),
        outer=(TableEntry("word_embeddings.weight", ("embed/embedding",)), *norm("ln_f", "norm")),
        prefix="transformer.",
        layer="h",
    )


_HIDDEN = {"hidden_features": "ffn_hidden_size"}

TII = (
    Family(
        "falcon",
        "FalconForCausalLM",
        _table,
        {
            **without(
                "rms_norm_eps",
                "num_key_value_heads",
                "head_dim",
                activation="activation",
                hidden_features="ffn_hidden_size",
            ),
            **{"layer_norm_epsilon": "norm_epsilon", "bias": ALL_BIASES, "parallel_attn": "parallel"},
        },
        constants={"norm": "layer", "gated": False},
        defaults={
            "hidden_features": lambda values: 4 * values["features"],
            **{"norm_epsilon": 1e-5, "activation": "gelu", "tie_embeddings": True, "parallel": True},
            "max_length": 2048,
        },
        only={"alibi": False},
        parts=(*STANDARD, _Variants()),
        neutral=("intermediate_size", "num_key_value_heads"),
        aliases={"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_head_kv": "num_kv_heads"},
    ),
)
