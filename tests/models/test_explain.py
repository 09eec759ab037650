"""What a config asks for is understood, neutral, or a reason not to open the model."""

import json
import shutil

import pytest

import nnx
from tests.models.published import ALL_GOLDENS, GOLDENS, edited, golden_config, golden_directory, golden_model


@pytest.mark.parametrize("name", ALL_GOLDENS)
def test_every_entry_of_every_golden_is_understood_or_neutral(name):
    explanation = nnx.models.explain(golden_directory(name))
    assert explanation.error is None and not explanation.not_understood
    assert {entry.name for entry in explanation.entries} == json.loads(
        (golden_directory(name) / "config.json").read_text()
    ).keys()


def test_an_entry_that_would_change_the_model_is_refused_unless_it_is_to_be_ignored(tmp_path):
    directory = shutil.copytree(golden_directory("llama"), tmp_path / "llama")
    edited(directory, residual_multiplier=0.5, some_number=3, dropout=0.1, note="hello", off=None, logits_scaling=1.0)
    with pytest.raises(ValueError) as error:
        nnx.models.from_pretrained(directory)
    assert "\n  residual_multiplier=0.5: a multiplier of what layers add\n  some_number=3: an entry that no" in str(
        error.value
    )
    assert "ignore_entries=['residual_multiplier', 'some_number']" in str(error.value)
    model = nnx.models.from_pretrained(directory, ignore_entries=["residual_multiplier", "some_number"])
    assert model.get_state() == golden_model("llama").get_state()


def test_an_explanation_says_what_each_entry_means_and_shows_what_matters_first():
    entries = {"use_cache": True, "model_type": "gpt2", "n_embd": 8, "scale_attn_weights": False, "alibi": True}
    found = nnx.models.explain(entries)
    assert {entry.name: (entry.verdict, entry.meaning) for entry in found.entries} == {
        "use_cache": ("neutral", "changes nothing that a model computes"),
        "model_type": ("understood", "describes the file"),
        "n_embd": ("understood", "sets features"),
        "scale_attn_weights": ("not understood", "gpt2 models here have True"),
        "alibi": ("not understood", "positions as biases of attention (ALiBi)"),
    }
    lines = str(found).splitlines()
    assert lines[0] == "model_type 'gpt2'" and lines[1].startswith("not understood  scale_attn_weights=False: ")
    assert found.error is not None and lines[-1].startswith("cannot be opened: ")


def test_a_model_type_that_is_not_known_is_explained_as_well():
    found = nnx.models.explain({"model_type": "mamba", "state_size": 16, "hidden_size": 64, "use_cache": True})
    assert {entry.name: entry.meaning for entry in found.not_understood}["state_size"] == "state spaces"
    assert found.error is not None and "no family here has this model_type" in found.error


@pytest.mark.parametrize("name", GOLDENS[:2])
def test_configs_are_explained_by_the_file_they_would_be(name):
    assert nnx.models.explain(golden_config(name)).error is None
    with pytest.raises(TypeError, match="explain takes a directory, the entries of a config.json, or a config"):
        nnx.models.explain(3)
