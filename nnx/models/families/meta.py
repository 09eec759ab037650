"""Meta: llama, llama4."""

from collections.abc import Mapping
from typing import Any

from nnx.models.config import DecoderConfig
from nnx.models.families.common import (
    BIASES,
    COMMON,
    LLAMA,
    LOCAL_EXPERTS,
    MLP_BIAS,
    NORMS,
    PROJECTIONS,
    STANDARD,
    mlp,
    table,
    without,
)
from nnx.models.family import Family
from nnx.models.files.config_entries import NOT_A_NUMBER, SpecialTokens, checked
from nnx.models.files.layouts import HALVES, LINEAR
from nnx.models.files.rope_entries import Rotary
from nnx.models.files.table import TableEntry
from nnx.models.layer_spec import PositionScale

_ROTATED, _SPARSE, _GROWS = "no_rope_layers", "moe_layers", "attn_temperature_tuning"
_RULES = {"no_rope_layer_interval": 4, "interleave_moe_layer_step": 1}
_NAMES = {"section": "chunked_attention", "full": "full_attention"}
_SCALE = {"floor_scale": 8192, "attn_scale": 0.1}


class _Layers:
    """The part of the config that says which layers rotate, see only their section, and have experts.

    Layers that do not rotate see the whole text.
    """

    def known(self, entries: Mapping[str, Any]) -> set[str]:
        return {_ROTATED, _SPARSE, _GROWS, "layer_types", *_RULES, *_SCALE}

    def read(self, entries: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        def given(name: str, default: Any, kind: Any) -> Any:
            return checked(default if entries.get(name) is None else entries[name], kind, name, where)

        def wrong(name: str, expected: str) -> ValueError:
            return ValueError(NOT_A_NUMBER.format(where=where, key=name, expected=expected, got=entries[name]))

        numbers = range(values["num_layers"])
        interval, step = (given(name, default, int) for name, default in _RULES.items())
        rotated: Any = [(i + 1) % interval for i in numbers]
        if entries.get(_ROTATED):  # the first files have an empty list
            rotated = given(_ROTATED, None, tuple[int, ...])
        if len(rotated) != len(numbers):
            raise wrong(_ROTATED, f"a list of {len(numbers)} entries")
        kinds = ["section" if flag else "full" for flag in rotated]
        names = [_NAMES[kind] for kind in kinds]
        if entries.get("layer_types") not in (None, names):
            raise wrong("layer_types", f"{names}, as {_ROTATED} says")
        sparse = given(_SPARSE, [i for i in numbers if not (i + 1) % step], tuple[int, ...])
        grows = entries.get(_GROWS, True)  # some files have a number
        return {
            "layer_types": tuple(kinds),
            "unrotated_layers": tuple(i for i in numbers if not rotated[i]),
            "dense_layers": tuple(i for i in numbers if i not in sparse),
            "unrotated_scale": PositionScale(*(given(*each, float) for each in _SCALE.items())) if grows else None,
        }

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        scale, numbers = config.unrotated_scale, range(config.num_layers)
        return {
            _ROTATED: [int(i not in config.unrotated_layers) for i in numbers],
            _SPARSE: [i for i in numbers if i not in config.dense_layers],
            "layer_types": [_NAMES.get(kind, kind) for kind in config.layer_types],
            _GROWS: scale is not None,
            **({} if scale is None else {"floor_scale": scale.length, "attn_scale": scale.slope}),
        }


_EXPERTS = (
    TableEntry("feed_forward.router.weight", ("mlp/router",), LINEAR),
    TableEntry("feed_forward.experts.gate_up_proj", ("mlp/gate", "mlp/up"), HALVES),
    TableEntry("feed_forward.experts.down_proj", ("mlp/down",)),
    *mlp("feed_forward.shared_expert", "mlp/shared"),
)

META = (
    Family("llama", "LlamaForCausalLM", LLAMA, {**COMMON, **BIASES, **MLP_BIAS}, parts=STANDARD),
    Family(
        "llama4_text",
        "Llama4ForCausalLM",
        table(*PROJECTIONS, *_EXPERTS, *mlp("feed_forward"), *NORMS),
        {
            **{**without("intermediate_size"), **BIASES, **LOCAL_EXPERTS, "use_qk_norm": "normalize_qk"},
            **{"intermediate_size": "hidden_features", "intermediate_size_mlp": "dense_features"},
            "attention_chunk_size": "section_size",
        },
        constants={
            **{"router_scores": "sigmoid", "normalize_experts": False, "weigh_expert_inputs": True},
            **{"qk_norm": "unit", "qk_norm_after_rotary": True},
            "shared_features": lambda values: values["hidden_features"],
        },
        defaults={
            **{"num_experts": 16, "num_selected": 1, "head_dim": 128, "num_kv_heads": 8, "norm_epsilon": 1e-5},
            **{"dense_features": 16384, "section_size": 8192, "normalize_qk": True},
        },
        parts=(Rotary(500_000.0, interleaved=True), SpecialTokens(), _Layers()),
    ),
)
