"""The language model in a model of text and images: its part of the `config.json`, as that of a model of its own.

Such a file has the entries of the language model under `text_config` (the first ones of Qwen have them at the top), and
the names of its tensors begin with `language_model.` or the like. What sees images is left out. A text without images
has the same position on all axes of a rotary embedding with sections ("mrope"), which is then the ordinary one.
"""

from collections.abc import Mapping
from typing import Any

from nnx.models.files.config_entries import NOT_A_NUMBER

PREFIXES = ("language_model.model.", "model.language_model.", "model.text_model.", "language_model.")
"""The starts of the names of a language model's tensors, in place of `model.`."""

OTHER_PARTS = (
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|connector|embed_vision)\..*",
    r"(model\.)?image_newline",
)
"""Patterns of the tensors of other parts."""

WRAPPERS = ("gemma3", "idefics3", "llama4", "llava", "llava_next", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm")
"""The values of `model_type` whose language model can be opened."""

_TYPES = {"qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
_TOP = {"qwen2_5_vl": "qwen2", "qwen2_vl": "qwen2"}  # the language models whose entries may be at the top
# What transformers takes for entries of `text_config` that are absent, as most are in the first files.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 2048},
        **{"num_hidden_layers": 32, "num_attention_heads": 32},
    },
    "mistral": {
        **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    },
    "gemma3_text": {
        **{"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 131072},
        **{"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4},
    },
}
_INHERITED = ("tie_word_embeddings", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")
_SECTIONS = ("mrope_section", "mrope_interleaved")


def text_entries(entries: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns the entries of the language model; those of a model without other parts are returned as they are."""
    kind = entries.get("model_type")
    if kind not in WRAPPERS:
        return entries
    inner = entries.get("text_config")
    if inner is None and kind in _TOP:
        inner = {name: value for name, value in entries.items() if name not in _OTHERS} | {"model_type": _TOP[kind]}
    if not isinstance(inner, Mapping):
        raise ValueError(NOT_A_NUMBER.format(where=where, key="text_config", expected="an object", got=inner))
    text = inner.get("model_type", "llama")
    text = _TYPES.get(text, text)
    inherited = {name: entries[name] for name in _INHERITED if name in entries and name not in inner}
    found = {**_DEFAULTS.get(text, {}), **inherited, **inner, "model_type": text}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(found.get(name), Mapping):
            found[name] = _plain(found[name])
    return {name: value for name, value in found.items() if name not in _OTHERS}


_OTHERS = ("vision_config", "vision_start_token_id", "vision_end_token_id", "vision_token_id", "video_token_id")
_OTHERS += ("image_token_id",)


def _plain(rotary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rotary settings without sections."""
    kept = {name: value for name, value in rotary.items() if name not in _SECTIONS}
    return {name: "default" if value == "mrope" else value for name, value in kept.items()}
