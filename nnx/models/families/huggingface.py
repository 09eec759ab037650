"""Hugging Face and BigCode: smollm3, starcoder2."""

from collections.abc import Mapping
from typing import Any

from nnx.models.families.common import (
    ALL_BIASES,
    ATTENTION,
    BIASES,
    LLAMA,
    MLP_BIAS,
    NORMS,
    STANDARD,
    plain_mlp,
    table,
    without,
)
from nnx.models.family import Family
from nnx.models.files.config_entries import Key, SpecialTokens
from nnx.models.files.rope_entries import Rotary
from nnx.models.files.windows import Windows

_NO_ROPE = Key(
    "unrotated_layers",
    lambda flags, values: tuple(i for i, rotates in enumerate(flags) if not rotates),
    lambda layers, config: [int(i not in layers) for i in range(config.num_layers)],
    kind=tuple[int, ...],
)


def _every_fourth(values: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(range(3, values["num_layers"], 4))


HUGGINGFACE = (
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        LLAMA,
        {**without("head_dim"), **BIASES, **MLP_BIAS, "no_rope_layers": _NO_ROPE},
        defaults={"tie_embeddings": True, "num_kv_heads": 4, "unrotated_layers": _every_fourth},
        only={"use_sliding_window": False, "no_rope_layer_interval": 4},
        neutral=("sliding_window", "max_window_layers"),  # without the switch
        parts=(Rotary(2_000_000.0), SpecialTokens()),
    ),
    Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        table(*ATTENTION, *plain_mlp("mlp.c_fc", "mlp.c_proj"), *NORMS),
        {**without("head_dim", norm_epsilon="norm_epsilon"), "use_bias": ALL_BIASES},
        constants={"norm": "layer", "gated": False},
        defaults={
            **{"norm_epsilon": 1e-5, "tie_embeddings": True, "activation": "gelu_pytorch_tanh"},
            **{"use_mlp_bias": True, "num_kv_heads": 2},
        },
        parts=(*STANDARD, Windows()),
    ),
)
