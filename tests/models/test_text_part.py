"""The language model of a model of text and images is opened as a model of its own."""

import json

import numpy as np
import pytest

import nnx
from tests.models import golden_files
from tests.models.published import golden_directory, golden_model

SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "mrope_interleaved": True}


def wrapped(directory, name, model_type, prefix, head, changes):
    """Writes a golden as a part of a model that also sees images."""
    golden = golden_files.read(name)
    tensors = {
        prefix + key.removeprefix("model.") if key.startswith("model.") else head + key: value
        for key, value in golden_files.weights(golden).items()
    }
    tensors["model.visual.patch_embed.weight"] = np.zeros((3, 2), np.float32)
    nnx.save_safetensors(directory / "model.safetensors", nnx.State(tensors))
    text = {**golden["config"], **changes}
    tied = {"tie_word_embeddings": text.pop("tie_word_embeddings")}
    config = {"model_type": model_type, "text_config": text, "vision_config": {"depth": 1}, "image_token_id": 7, **tied}
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "model_type", "prefix", "head", "changes"),
    [
        ("llama", "llava", "language_model.model.", "language_model.", {}),
        ("llama", "smolvlm", "model.text_model.", "", {}),
        ("gemma3_text", "gemma3", "model.language_model.", "", {}),
        ("llama4_text", "llama4", "language_model.model.", "language_model.", {}),
        ("qwen2", "qwen2_5_vl", "model.", "", {"model_type": "qwen2_5_vl_text", "rope_parameters": SECTIONS}),
        (
            "qwen3",
            "qwen3_vl",
            "model.language_model.",
            "",
            {"model_type": "qwen3_vl_text", "rope_parameters": SECTIONS},
        ),
    ],
)
def test_the_language_model_is_the_one_that_was_wrapped(name, model_type, prefix, head, changes, tmp_path):
    wrapped(tmp_path, name, model_type, prefix, head, changes)
    model = nnx.models.from_pretrained(tmp_path)
    assert model.get_state() == golden_model(name).get_state()
    assert model.config == golden_model(name).config
    assert nnx.models.explain(tmp_path).error is None


def test_the_first_files_of_qwen_have_the_entries_of_the_text_at_the_top(tmp_path):
    wrapped(tmp_path, "qwen2", "qwen2_vl", "model.", "", {})
    fields = json.loads((golden_directory("qwen2") / "config.json").read_text())
    rotary = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_parameters": None}
    top = {**fields, **rotary, "model_type": "qwen2_vl", "vision_config": {}, "vision_token_id": 3}
    (tmp_path / "config.json").write_text(json.dumps(top))
    assert nnx.models.from_pretrained(tmp_path).get_state() == golden_model("qwen2").get_state()


def test_a_model_without_a_language_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    with pytest.raises(ValueError, match="'text_config' to be an object, got None"):
        nnx.models.from_pretrained(tmp_path)
