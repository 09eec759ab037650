"""Compares language models in models of text and images with `transformers`: read, and written on their own."""

import pathlib
import tempfile
from typing import Any

import jax.numpy as jnp
import numpy as np
import reference
import torch
import transformers

import nnx

_TEXT: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_VISION: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 16, "patch_size": 8},
}
_TOKENS = {"image_token_id": 95, "video_token_id": 94, "vision_start_token_id": 93, "vision_end_token_id": 92}
_IMAGE = {"image_token_index": 95}


def _qwen(sections: list[int], text: dict[str, Any], vision: dict[str, Any], **rope: Any) -> dict[str, Any]:
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **rope}
    vision = {"depth": 1, "num_heads": 2, **vision}
    return {"text_config": {**_TEXT, **text, "rope_parameters": rotary}, "vision_config": vision, **_TOKENS}


def _pair(text: dict[str, Any], vision: str, **rest: Any) -> dict[str, Any]:
    return {"text_config": {**_TEXT, **text}, "vision_config": {**_VISION, "model_type": vision}, **rest}


CASES: dict[str, dict[str, Any]] = {
    "gemma3": _pair(
        {"head_dim": 8, "sliding_window": 6, "model_type": "gemma3_text"},
        "siglip_vision_model",
        **{**_IMAGE, "mm_tokens_per_image": 4, "boi_token_index": 94, "eoi_token_index": 93},
    ),
    "llava": _pair({"model_type": "llama"}, "clip_vision_model", **_IMAGE),
    "llava_next": _pair({"model_type": "mistral"}, "clip_vision_model", **_IMAGE),
    "smolvlm": {"text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _VISION, "image_token_id": 95},
    "idefics3": {"text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _VISION, "image_token_id": 95},
    "qwen2_vl": _qwen([1, 1, 2], {}, {"embed_dim": 16, "hidden_size": 32}),
    "qwen2_5_vl": _qwen([1, 1, 2], {}, {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 16}),
    "qwen3_vl": _qwen(
        [2, 1, 1],
        {"head_dim": 8},
        {
            **{"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 16},
            **{"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        },
        mrope_interleaved=True,
    ),
}


def compare(name: str, folder: pathlib.Path) -> tuple[float, float]:
    """Returns the relative errors of our logits, and of `transformers` on the language model that NNX wrote."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **CASES[name])
    kind = transformers.AutoModelForImageTextToText
    theirs = kind.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    theirs.save_pretrained(folder / "theirs")
    tokens = np.random.default_rng(0).integers(3, 90, (2, 16), np.int32)
    expected = reference.logits(theirs, tokens)
    model = nnx.models.from_pretrained(folder / "theirs")
    nnx.models.save_pretrained(model, folder / "ours")
    written = reference.logits(reference.load(folder / "ours"), tokens)
    largest = np.abs(expected).max()
    return tuple(float(np.abs(found - expected).max() / largest) for found in (model(jnp.asarray(tokens)), written))


def compare_wrappers() -> float:
    """Compares all of them, prints a line each, and returns the largest error."""
    worst = 0.0
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            read, written = compare(name, pathlib.Path(folder))
        print(f"{name:16}  language model   read {read:.1e}   written {written:.1e}", flush=True)
        worst = max(worst, read, written)
    return worst
