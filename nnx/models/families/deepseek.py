"""DeepSeek: deepseek_v2, deepseek_v3; and glm4_moe_lite of Z.ai, which has their layers."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from nnx.models.families.common import CORRECTED, MLP, NORMS, OUT, SPARSE, experts, skipping_next_tokens, table, without
from nnx.models.family import Family
from nnx.models.files.config_entries import Key, SpecialTokens, checked
from nnx.models.files.expert_entries import FIRST_DENSE, LISTED_DENSE, NUM_SHARED, Groups
from nnx.models.files.rope_entries import Rotary
from nnx.models.files.table import Table, TableEntry, linear, norm

UNKNOWN_METHOD = "{where}: expected topk_method to be 'greedy' or 'group_limited_greedy', got {got!r}."

_LATENT = (
    *linear("self_attn.q_a_proj", "attention/query_down"),
    *norm("self_attn.q_a_layernorm", "attention/query_norm"),
    *linear("self_attn.kv_a_proj_with_mqa", "attention/kv_down"),
    *norm("self_attn.kv_a_layernorm", "attention/kv_norm"),
    *linear("self_attn.kv_b_proj", "attention/kv_up"),
    *OUT,
)


def _latent_table(*queries: TableEntry) -> Callable[[Any], Table]:
    return skipping_next_tokens(table(*queries, *_LATENT, *experts(), *MLP, *NORMS))


_DIRECT = _latent_table(*linear("self_attn.q_proj", "attention/query"))
_FROM_LATENTS = _latent_table(*linear("self_attn.q_b_proj", "attention/query"))


def _table(config: Any) -> Table:
    """Returns the table: the projection of queries has another name if they have a latent."""
    return (_DIRECT if config.query_rank is None else _FROM_LATENTS)(config)


class _Interleaved(Rotary):
    """A rotary embedding whose file says whether neighboring features rotate together; by default, they do."""

    def known(self, entries: Mapping[str, Any]) -> set[str]:
        return super().known(entries) | {"rope_interleave"}

    def read(self, entries: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        together = checked(entries.get("rope_interleave", True), bool, "rope_interleave", where)
        fields = super().read(entries, values, where)
        return {**fields, "rotary": dataclasses.replace(fields["rotary"], interleaved=together)}

    def write(self, config: Any) -> dict[str, Any]:
        return {**super().write(config), "rope_interleave": config.rotary.interleaved}


class _GroupsByMethod(Groups):
    """Groups of experts that only one of two methods knows."""

    def known(self, entries: Mapping[str, Any]) -> set[str]:
        return super().known(entries) | {"topk_method"}

    def read(self, entries: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        method = entries.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise ValueError(UNKNOWN_METHOD.format(where=where, got=method))
        return super().read(entries, values, where) if method != "greedy" else {"expert_groups": None}

    def write(self, config: Any) -> dict[str, Any]:
        method = "greedy" if config.expert_groups is None else "group_limited_greedy"
        return {**super().write(config), "topk_method": method}


_ENTRIES: dict[str, str | Key] = {
    **without("intermediate_size", "num_key_value_heads", "head_dim"),
    **SPARSE,
    **{"n_routed_experts": "num_experts", "num_experts_per_tok": "num_selected", "n_shared_experts": NUM_SHARED},
    **{"routed_scaling_factor": "expert_weight_scale", "attention_bias": Key("use_qkv_bias", also=("use_out_bias",))},
    **{"kv_lora_rank": "latent_rank", "q_lora_rank": "query_rank", "qk_nope_head_dim": "head_dim"},
    **{"qk_rope_head_dim": "rotary_dim", "v_head_dim": "value_dim"},
}
_ONLY: dict[str, Any] = {
    "num_key_value_heads": lambda values: values["num_heads"],
    "head_dim": lambda values: values["rotary_dim"],
    "qk_head_dim": lambda values: values["head_dim"] + values["rotary_dim"],
    "moe_layer_freq": 1,
}
_SIZES = {"latent_rank": 512, "query_rank": 1536, "head_dim": 128, "rotary_dim": 64, "value_dim": 128}
_NORMALIZE = "norm_topk_prob"  # in deepseek_v2 false in every published model; transformers passes over it
_ALIASES = {"num_local_experts": "n_routed_experts"}

DEEPSEEK = (
    Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        _table,
        {**{name: key for name, key in _ENTRIES.items() if name != _NORMALIZE}, "first_k_dense_replace": FIRST_DENSE},
        constants={"normalize_experts": False},
        defaults={
            **{**_SIZES, "num_experts": 64, "hidden_features": 1407},
            "shared_features": lambda values: 2 * values["hidden_features"],
        },
        only={**_ONLY, _NORMALIZE: False, "mlp_bias": False, "scoring_func": "softmax"},
        parts=(Rotary(interleaved=True), SpecialTokens(), _GroupsByMethod(best=1)),
        aliases=_ALIASES,
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _table,
        {**_ENTRIES, "first_k_dense_replace": FIRST_DENSE},
        constants=CORRECTED,
        defaults={
            **{**_SIZES, "num_experts": 256, "num_selected": 8, "hidden_features": 2048, "expert_weight_scale": 2.5},
            **{"dense_layers": (0, 1, 2), "shared_features": lambda values: values["hidden_features"]},
        },
        only={**_ONLY, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        parts=(_Interleaved(), SpecialTokens(), Groups()),
        aliases=_ALIASES,
    ),
    Family(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        _table,
        {**_ENTRIES, "mlp_layer_types": LISTED_DENSE},
        constants=CORRECTED,
        defaults={
            **{**_SIZES, "query_rank": 768, "head_dim": 192, "value_dim": 256, "norm_epsilon": 1e-5},
            **{"num_experts": 64, "num_selected": 4, "hidden_features": 1536, "expert_weight_scale": 1.8},
            **{"dense_layers": (0,), "shared_features": lambda values: values["hidden_features"]},
        },
        only={**_ONLY, "topk_method": "noaux_tc", "first_k_dense_replace": lambda values: len(values["dense_layers"])},
        parts=(_Interleaved(), SpecialTokens(), Groups()),
        aliases=_ALIASES,
    ),
)
