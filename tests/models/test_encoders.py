"""Encoders: they compute what `transformers` computes, and their directories survive a round trip."""

import json

import jax
import jax.numpy as jnp
import pytest

import nnx
from tests.models.published import (
    ENCODERS,
    edited,
    encoder_outputs,
    golden_arrays,
    golden_directory,
    golden_model,
    randomized,
    relative_error,
)

goldens = pytest.mark.parametrize("name", ENCODERS)


def tensors(directory) -> dict[str, tuple]:
    arrays = nnx.load_safetensors(directory / "model.safetensors")
    return {name: (array.dtype, array.shape) for name, array in arrays.items()}


@goldens
def test_outputs_agree(name):
    inputs, expected = golden_arrays(name)
    out = encoder_outputs(golden_model(name), inputs)
    assert out.keys() == expected.keys()
    for key, array in expected.items():
        assert out[key].dtype == jnp.float32
        assert relative_error(out[key], array) < 1e-4


@goldens
def test_saved_model_has_the_published_names_shapes_and_config(name, tmp_path):
    model = golden_model(name)
    made = randomized(model.clone())
    nnx.models.save_pretrained(made, tmp_path)
    assert tensors(tmp_path) == tensors(golden_directory(name))
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (tmp_path, golden_directory(name)))
    for part in ("text_config", "vision_config"):
        inner, expected = ours.pop(part, {}), theirs.pop(part, {})
        for ignored in ("dtype", "projection_dim"):  # CLIP does not use these, and leaves their defaults in the file
            expected.pop(ignored, None)
        assert {key: inner.get(key) for key in expected} == expected
    assert {key: ours.get(key) for key in theirs} == theirs
    again = nnx.models.from_pretrained(tmp_path)
    assert type(again) is type(model) and again.config == model.config
    assert again.get_state() == made.get_state()


@goldens
def test_parameters_are_converted_while_they_are_read(name):
    model = nnx.models.from_pretrained(golden_directory(name), dtype=jnp.bfloat16)
    expected = nnx.eval_shape(lambda: type(model)(model.config, param_dtype=jnp.bfloat16, ctx=nnx.context(0)))
    assert model.get_module_def() == expected.get_module_def()
    dtypes = {path: leaf.value.dtype for path, leaf in expected.get_state().items()}
    assert {path: leaf.value.dtype for path, leaf in model.get_state().items()} == dtypes
    out = nnx.eval_shape(lambda model, inputs: model(**inputs), model, golden_arrays(name)[0])
    assert {leaf.dtype for leaf in jax.tree.leaves(out)} == {jnp.dtype(jnp.bfloat16)}


@goldens
def test_every_axis_of_every_parameter_has_a_name_or_none(name):
    model = nnx.name_axes(nnx.models.from_pretrained(golden_directory(name), abstract=True))
    for path, leaf in model.get_state().items():
        assert leaf.sharding is not None, path


def test_options_of_decoders_are_refused():
    with pytest.raises(ValueError, match="bert: scan_layers=True is not an option of bert models"):
        nnx.models.from_pretrained(golden_directory("bert"), scan_layers=True)


def test_a_model_that_its_config_does_not_describe_is_not_saved(tmp_path):
    model = nnx.models.from_pretrained(golden_directory("bert"))
    model.layers[0].mlp.activation = nnx.relu
    model.layers[1].post_norm = False
    with pytest.raises(ValueError, match="(?s)layers/0/mlp: activation is.*layers/1: post_norm is False"):
        nnx.models.save_pretrained(model, tmp_path)
    model = nnx.models.from_pretrained(golden_directory("bert"))
    model.more = nnx.Linear(2, 2, ctx=nnx.context(0))
    with pytest.raises(ValueError, match="published bert checkpoint: the format has no place for 'more/bias'"):
        nnx.models.save_pretrained(model, tmp_path)


class TestConfigs:
    def read(self, tmp_path, name="bert", **changes):
        (tmp_path / "config.json").write_text((golden_directory(name) / "config.json").read_text())
        (tmp_path / "model.safetensors").write_bytes((golden_directory(name) / "model.safetensors").read_bytes())
        edited(tmp_path, **changes)
        return nnx.models.from_pretrained(tmp_path, abstract=True)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"architectures": ["BertForMultipleChoice"]},
                "'BertForMultipleChoice' .* of bert: BertModel, Bert",
            ),
            ({"is_decoder": True}, "is_decoder=True is not supported for bert; only False is"),
            ({"hidden_size": "24"}, "'hidden_size' to be a positive integer, got '24'"),
            ({"layer_norm_eps": "small"}, "'layer_norm_eps' to be a number, got 'small'"),
            ({"hidden_act": 3}, "'hidden_act' to be a name, got 3"),
            ({"id2label": {"1": "a"}}, "'id2label' to be an object with a label for each number from 0, got"),
            ({"quantization_config": {"quant_method": "gptq"}}, "quantized .gptq., which cannot be read"),
        ],
    )
    def test_entries_that_cannot_be_used_say_why(self, tmp_path, changes, message):
        with pytest.raises(ValueError, match=f"config.json: .*{message}"):
            self.read(tmp_path, **changes)

    def test_absent_entries_mean_the_defaults_of_transformers(self, tmp_path):
        config = self.read(tmp_path, layer_norm_eps=..., hidden_act=..., type_vocab_size=..., architectures=...).config
        assert (config.norm_epsilon, config.activation, config.num_segments, config.task) == (1e-12, "gelu", 2, None)

    def test_labels_are_names_or_numbered(self, tmp_path):
        named = {"id2label": {"0": "bad", "2": "good", "1": "fine"}}
        assert self.read(tmp_path, "bert_classifier", **named).config.labels == ("bad", "fine", "good")
        numbered = self.read(tmp_path, "bert_classifier", id2label=..., label2id=..., num_labels=3)
        assert numbered.config.labels == ("LABEL_0", "LABEL_1", "LABEL_2")

    def test_a_config_that_disagrees_with_the_tensors(self, tmp_path):
        with pytest.raises(nnx.CheckpointError, match="unexpected: classifier.weight"):
            self.read(tmp_path, "bert_classifier", architectures=["BertModel"])
        with pytest.raises(nnx.CheckpointError, match=r"classifier.weight is \[3, 24\], expected \[2, 24\]"):
            self.read(tmp_path, "bert_classifier", id2label=...)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_layers": 0}, "BertConfig: expected num_layers to be a positive integer, got 0"),
            ({"num_heads": 5}, "expected features=768 to be a multiple of num_heads=5"),
            ({"task": "translation"}, "task to be one of 'masked_lm', .* or None, got 'translation'"),
            ({"labels": ()}, r"labels to be a tuple of strings, one per class, got \(\)"),
            ({"task": "question_answering", "labels": ("a",)}, "two labels, for start and end, got"),
        ],
    )
    def test_configs_that_make_no_sense_are_refused(self, changes, message):
        with pytest.raises(ValueError, match=message):
            nnx.models.BertConfig(**changes)
