"""What families of decoders have in common: entries of the config, and names of tensors.

Tables are put together from *sections*, the entries of one part of a layer. Sections that a model does not have
(biases, norms of queries and keys) do no harm.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from nnx.models.files.config_entries import Key, SpecialTokens
from nnx.models.files.layouts import FROM_HEADS, LINEAR, SAME, TensorLayout
from nnx.models.files.rope_entries import Rotary
from nnx.models.files.table import Table, TableEntry, attention, linear, norm
from nnx.models.files.text_part import OTHER_PARTS, PREFIXES

COMMON: dict[str, str | Key] = {
    "vocab_size": "vocab_size",
    "hidden_size": "features",
    "intermediate_size": "hidden_features",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_length",
    "rms_norm_eps": "norm_epsilon",
    "hidden_act": "activation",
    "tie_word_embeddings": "tie_embeddings",
}
ALL_BIASES = Key("use_mlp_bias", also=("use_qkv_bias", "use_out_bias"))
BIASES: dict[str, str | Key] = {"attention_bias": Key("use_qkv_bias", also=("use_out_bias",))}
MLP_BIAS: dict[str, str | Key] = {"mlp_bias": "use_mlp_bias"}
EXPERTS: dict[str, str | Key] = {"num_experts": "num_experts", "num_experts_per_tok": "num_selected"}
LOCAL_EXPERTS: dict[str, str | Key] = {"num_local_experts": "num_experts", "num_experts_per_tok": "num_selected"}
SPARSE = {  # experts and dense layers, each with hidden features of their own
    **{"intermediate_size": "dense_features", "moe_intermediate_size": "hidden_features"},
    "norm_topk_prob": "normalize_experts",
}
CORRECTED = {"router_scores": "sigmoid", "use_router_correction": True}


def without(*names: str, **renamed: str) -> dict[str, str | Key]:
    """Returns the common entries without some; `renamed` has the entry that sets a field in this family."""
    kept = {name: field for name, field in COMMON.items() if name not in names and field not in renamed}
    return {**kept, **{name: field for field, name in renamed.items()}}


STANDARD = (Rotary(), SpecialTokens())
"""The parts of most families: a rotary embedding, and special tokens."""

# Names of tensors

QKV = ("attention/query", "attention/key", "attention/value")
GATE_UP = ("mlp/gate", "mlp/up")
OUTER = (TableEntry("embed_tokens.weight", ("embed/embedding",)), *norm("norm", "norm"))
PROJECTIONS = attention("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj"), "attention")
ATTENTION = (
    *PROJECTIONS,
    *norm("self_attn.q_norm", "attention/query_ln"),
    *norm("self_attn.k_norm", "attention/key_ln"),
)


def mlp(name: str = "mlp", path: str = "mlp") -> tuple[TableEntry, ...]:
    """Returns the entries of a gated MLP."""
    return tuple(entry for part in ("gate", "up", "down") for entry in linear(f"{name}.{part}_proj", f"{path}/{part}"))


MLP = mlp()
FUSED_MLP = (*linear("mlp.gate_up_proj", GATE_UP), *linear("mlp.down_proj", "mlp/down"))
POST_NORMS = (
    *norm("post_attention_layernorm", "attention_post_norm"),
    *norm("post_feedforward_layernorm", "mlp_post_norm"),
)
NORMS = (*norm("input_layernorm", "attention_norm"), *norm("post_attention_layernorm", "mlp_norm"))
OUT = linear("self_attn.o_proj", "attention/out", FROM_HEADS)
HEAD = linear("lm_head", "head")
FREQUENCIES = r".*\.rotary_emb\.inv_freq"


def plain_mlp(up: str, down: str) -> tuple[TableEntry, ...]:
    """Returns the entries of an MLP without gates."""
    return (*linear(up, "mlp/layers/0"), *linear(down, "mlp/layers/1"))


def without_rotary(kind: str = "full") -> Callable[[Mapping[str, Any]], tuple[int, ...]]:
    """Returns the function from a config's fields to the numbers of the layers of a kind."""
    return lambda values: tuple(i for i, each in enumerate(values["layer_types"]) if each == kind)


def experts(
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    *,
    block: str = "mlp",
    router: str = "gate",
    correction: str = "gate.e_score_correction_bias",
    shared: str = "shared_experts",
) -> tuple[TableEntry, ...]:
    """Returns the entries of a mixture of experts, each with its own tensors `BLOCK.experts.NUMBER.GATE.weight`."""
    projections = {"gate": gate, "up": up, "down": down}
    # Some files have an axis of size one before that of the experts.
    layout = TensorLayout(leading=1) if "statics" in correction else SAME
    return (
        TableEntry(f"{block}.{router}.weight", ("mlp/router",), LINEAR),
        TableEntry(f"{block}.{correction}", ("mlp/correction",), layout),
        *(
            TableEntry(f"{block}.experts.{{}}.{name}.weight", (f"mlp/{at}",), LINEAR)
            for at, name in projections.items()
        ),
        *(
            entry
            for at, name in projections.items()
            for entry in linear(f"{block}.{shared}.{name}", f"mlp/shared/{at}")
        ),
        TableEntry(f"{block}.{shared}_gate.weight", ("mlp/shared_gate",), LINEAR),
    )


def skipping_next_tokens(table: Table) -> Callable[[Any], Table]:
    """Returns the table for a config, which ignores a last layer that predicts further tokens in training."""

    def for_config(config: Any) -> Table:
        return dataclasses.replace(table, ignored=(*table.ignored, rf"model\.layers\.{config.num_layers}\..*"))

    return for_config


def table(
    *sections: TableEntry,
    outer: tuple[TableEntry, ...] = OUTER,
    head: tuple[TableEntry, ...] = HEAD,
    prefix: str = "model.",
    layer: str = "layers",
    ignored: tuple[str, ...] = (FREQUENCIES,),
) -> Table:
    """Returns the table of a family, given the sections of its layers."""
    layers = (
        TableEntry(f"{layer}.{{}}.{name}", tuple(f"layers/{{}}/{path}" for path in paths), layout)
        for name, paths, layout in sections
    )
    return Table((*outer, *layers), head, prefix, ignored=(*ignored, *OTHER_PARTS), others=PREFIXES)


LLAMA = table(*ATTENTION, *MLP, *NORMS)
"""The table of most families."""
