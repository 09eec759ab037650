"""Directories as people have them: what can be opened is opened, anything else is named."""

import json
import shutil

import numpy as np
import pytest

import nnx
from tests.models import golden_files
from tests.models.published import edited, golden_directory, golden_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 123\n"


@pytest.fixture
def llama(tmp_path):
    return shutil.copytree(golden_directory("llama"), tmp_path / "llama")


def same(model, name="llama"):
    return model.get_state() == golden_model(name).get_state()


def test_a_config_with_a_byte_order_mark_is_read(llama):
    file = llama / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert same(nnx.models.from_pretrained(llama))


def test_shards_without_their_index_are_read_if_none_is_missing(tmp_path):
    directory = shutil.copytree(golden_directory("mistral"), tmp_path / "mistral")
    (directory / "model.safetensors.index.json").unlink()
    assert same(nnx.models.from_pretrained(directory), "mistral")
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="2 of 3 shards.*no index; missing are model-00002-of-00003"):
        nnx.models.from_pretrained(directory)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_is_not_its_directory(llama, name):
    with pytest.raises(NotADirectoryError, match=f"is a file. Pass the directory that holds config.json.*: {llama}$"):
        nnx.models.from_pretrained(llama / name)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pointer_of_git_lfs_is_named(llama, name):
    (llama / name).write_text(POINTER)
    with pytest.raises((ValueError, FileNotFoundError), match=f"{name} is a pointer of git-lfs.*git lfs pull"):
        nnx.models.from_pretrained(llama)


def test_an_adapter_is_not_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/model"}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"low-rank adapter.*some/model.*nnx.models.load_adapter\(model"):
        nnx.models.from_pretrained(tmp_path)


# How to write with a model


def test_the_recommendations_of_a_model_are_options_of_generate(llama):
    entries = {"eos_token_id": [3, 4], "pad_token_id": 0, "do_sample": True, "top_p": 0.9, "top_k": 0}
    (llama / "generation_config.json").write_text(json.dumps({**entries, "temperature": 0.5, "min_p": None}))
    options = nnx.models.generation_defaults(llama)
    assert options == {"stop_tokens": (3, 4), "pad_token": 0, "temperature": 0.5, "top_p": 0.9}
    nnx.generate(golden_model("llama"), np.array([[5, 6]]), max_new_tokens=2, ctx=nnx.context(sample=0), **options)


def test_without_sampling_the_most_likely_token_is_taken_and_stop_tokens_may_be_in_the_config(llama):
    edited(llama, eos_token_id=7)
    assert nnx.models.generation_defaults(llama) == {"stop_tokens": (7,), "temperature": 0}
    (llama / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "repetition_penalty": 1.2}))
    expected = {"stop_tokens": (7,), "temperature": 0, "repetition_penalty": 1.2}
    assert nnx.models.generation_defaults(llama) == expected
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(ValueError, match="generation_config.json: expected 'eos_token_id' to be a whole number"):
        nnx.models.generation_defaults(llama)


# A tied output layer of its own


@pytest.mark.parametrize("equal", [True, False])
def test_an_output_layer_in_the_file_wins_over_a_tie_that_it_contradicts(tmp_path, equal):
    directory = shutil.copytree(golden_directory("qwen2"), tmp_path / "qwen2")
    tensors = dict(golden_files.weights(golden_files.read("qwen2")))
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding if equal else embedding[::-1]
    nnx.save_safetensors(directory / "model.safetensors", nnx.State(tensors))
    model = nnx.models.from_pretrained(directory)
    assert model.config.tie_embeddings == equal
    if not equal:
        np.testing.assert_array_equal(model.head.kernel, embedding[::-1].T)
        nnx.models.save_pretrained(model, tmp_path / "again")
        assert nnx.models.from_pretrained(tmp_path / "again").get_state() == model.get_state()


# Models that write no text


@pytest.mark.parametrize(("name", "plain"), [("llama", "LlamaModel"), ("modernbert", "ModernBertModel")])
def test_a_directory_without_a_head_opens_and_returns_hidden_states(tmp_path, name, plain):
    directory = shutil.copytree(golden_directory(name), tmp_path / name)
    tensors = golden_files.weights(golden_files.read(name)).items()
    bare = {key.removeprefix("model."): tensor for key, tensor in tensors if key.startswith("model.")}
    nnx.save_safetensors(directory / "model.safetensors", nnx.State(bare))
    model, whole, tokens = nnx.models.from_pretrained(directory), golden_model(name), np.array([[5, 6, 7]])
    assert model.config.head == "none"
    np.testing.assert_array_equal(model(tokens), whole.features(tokens))
    for logits in (lambda: model.logits(model(tokens)), lambda: model.head_kernel):
        with pytest.raises(ValueError, match=r"no output layer.*model.features\(tokens\)"):
            logits()
    nnx.models.save_pretrained(model, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["architectures"] == [plain]
    assert nnx.load_safetensors(tmp_path / "again" / "model.safetensors").keys() == bare.keys()
    assert nnx.models.from_pretrained(tmp_path / "again").get_state() == model.get_state()


def test_a_head_that_is_missing_under_the_usual_names_is_missing(llama):
    tensors = golden_files.weights(golden_files.read("llama"))
    nnx.save_safetensors(
        llama / "model.safetensors", nnx.State({k: v for k, v in tensors.items() if k != "lm_head.weight"})
    )
    with pytest.raises(nnx.CheckpointError, match=r"missing: lm_head.weight \[96, 32\], for head/kernel"):
        nnx.models.from_pretrained(llama)


@pytest.mark.parametrize("named", [True, False])
def test_a_classifier_reads_the_last_token_of_each_text(llama, named, tmp_path):
    tensors = dict(golden_files.weights(golden_files.read("llama")))
    score = tensors.pop("lm_head.weight")[:3]
    nnx.save_safetensors(llama / "model.safetensors", nnx.State({**tensors, "score.weight": score}))
    names = {"0": "bad", "1": "fine", "2": "good"}
    edited(llama, architectures=["LlamaForSequenceClassification"], id2label=names if named else ...)
    model, tokens = nnx.models.from_pretrained(llama), np.array([[5, 6, 7, 8], [9, 10, 0, 0]])
    assert model.config.labels == (("bad", "fine", "good") if named else ("LABEL_0", "LABEL_1", "LABEL_2"))
    features = golden_model("llama").features(tokens)
    expected = np.stack([features[0, 3], features[1, 1]]) @ score.T
    np.testing.assert_allclose(model.classify(tokens, np.array([4, 2])), expected, atol=1e-4)
    np.testing.assert_allclose(model.classify(tokens[:1]), expected[:1], atol=1e-4)
    with pytest.raises(ValueError, match=r"no labels \(config.head is 'tokens'\)"):
        golden_model("llama").classify(tokens)
    nnx.models.save_pretrained(model, tmp_path / "again")
    entries = json.loads((tmp_path / "again" / "config.json").read_text())
    assert entries["architectures"] == ["LlamaForSequenceClassification"] and len(entries["id2label"]) == 3
    assert nnx.models.from_pretrained(tmp_path / "again").get_state() == model.get_state()
