"""Alibaba: qwen3_next and qwen3_5_text, most of whose layers are gated delta networks."""

from collections.abc import Callable
from typing import Any

from nnx.models.families.common import (
    BIASES,
    EXPERTS,
    FREQUENCIES,
    HEAD,
    MLP,
    NORMS,
    OUT,
    OUTER,
    QKV,
    experts,
    without,
)
from nnx.models.family import Family
from nnx.models.files.config_entries import Key, SpecialTokens
from nnx.models.files.layouts import FROM_HEADS, IN_GROUPS, KERNEL_1D
from nnx.models.files.linear_layers import LinearLayers
from nnx.models.files.rope_entries import Rotary
from nnx.models.files.table import Table, TableEntry, linear, norm

_GATED_ATTENTION = (
    *linear("self_attn.q_proj", ("attention/query", "attention/gate"), IN_GROUPS),
    *linear("self_attn.k_proj", "attention/key"),
    *linear("self_attn.v_proj", "attention/value"),
    *OUT,
    *norm("self_attn.q_norm", "attention/query_ln"),
    *norm("self_attn.k_norm", "attention/key_ln"),
)
_DELTA = (
    TableEntry("linear_attn.conv1d.weight", ("attention/conv_kernel",), KERNEL_1D),
    TableEntry("linear_attn.A_log", ("attention/decay_rate",)),
    TableEntry("linear_attn.dt_bias", ("attention/decay_bias",)),
    TableEntry("linear_attn.norm.weight", ("attention/norm/scale",)),
    *linear("linear_attn.out_proj", "attention/out", FROM_HEADS),
)
_SEPARATE = (
    *linear("linear_attn.in_proj_qkv", QKV),
    *linear("linear_attn.in_proj_z", "attention/gate"),
    *linear("linear_attn.in_proj_b", "attention/beta"),
    *linear("linear_attn.in_proj_a", "attention/decay"),
    *_DELTA,
)
_GROUPED = (
    *linear("linear_attn.in_proj_qkvz", (*QKV, "attention/gate"), IN_GROUPS),
    *linear("linear_attn.in_proj_ba", ("attention/beta", "attention/decay"), IN_GROUPS),
    *_DELTA,
)
_KEYS: dict[str, str | Key] = {
    **BIASES,
    "linear_num_value_heads": "delta_heads",
    "linear_num_key_heads": "delta_key_heads",
    "linear_value_head_dim": "delta_value_dim",
    "linear_key_head_dim": "delta_key_dim",
    "linear_conv_kernel_dim": "delta_taps",
}
_CONSTANTS = {"normalize_qk": True, "norm_offset": 1.0, "use_attention_gate": True}
_DEFAULTS = {
    **{"head_dim": 256, "delta_heads": 32, "delta_key_heads": 16, "delta_key_dim": 128, "delta_value_dim": 128},
}
_ONLY = {"hidden_act": "silu"}  # which is also the activation of convolutions and gates
_PARTS = (Rotary(fraction=0.25), SpecialTokens(), LinearLayers())


def _by_mixer(delta: tuple[TableEntry, ...], *rest: TableEntry) -> Callable[[Any], Table]:
    """Returns the table of models whose layers have the same paths and other names, depending on their mixer."""

    def for_config(config: Any) -> Table:
        entries = list(OUTER)
        for i, kind in enumerate(config.layer_types):
            for name, paths, layout in (*(delta if kind == "linear" else _GATED_ATTENTION), *rest):
                entries.append(TableEntry(f"layers.{i}.{name}", tuple(f"layers/{i}/{path}" for path in paths), layout))
        return Table(tuple(entries), HEAD, "model.", ignored=(FREQUENCIES, r"mtp\..*"))

    return for_config


ALIBABA_HYBRIDS = (
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _by_mixer(_GROUPED, *experts(shared="shared_expert"), *NORMS),
        {
            **without("intermediate_size", "hidden_act", hidden_features="moe_intermediate_size"),
            **{**EXPERTS, **_KEYS},
            **{"norm_topk_prob": "normalize_experts", "shared_expert_intermediate_size": "shared_features"},
        },
        constants={**_CONSTANTS, "use_shared_gate": True},
        defaults={
            **_DEFAULTS,
            **{"hidden_features": 512, "shared_features": 512, "num_experts": 512, "num_selected": 10},
        },
        only={**_ONLY, "decoder_sparse_step": 1, "mlp_only_layers": []},
        neutral=("intermediate_size",),  # the width of dense MLPs
        parts=_PARTS,
    ),
    Family(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        _by_mixer(_SEPARATE, *MLP, *NORMS),
        {**without("hidden_act"), **_KEYS},
        constants=_CONSTANTS,
        defaults=_DEFAULTS,
        only=_ONLY,
        parts=_PARTS,
    ),
)
