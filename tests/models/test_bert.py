"""BERT and RoBERTa: padding, segments, tokens outside the vocabulary, older checkpoints, heads on trained encoders."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models.published import encoder_outputs, golden_arrays, golden_directory, golden_model


def tokens(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(1, 60, shape), jnp.int32)


def agree(out, expected):
    np.testing.assert_allclose(out, expected, rtol=2e-4, atol=2e-4)


def test_padding_by_length_by_mask_and_none_at_all_agree():
    model, texts = golden_model("bert"), tokens(2, 9)
    encode = nnx.jit(lambda model, texts, **options: model(texts, **options))
    lengths = jnp.array([9, 5])
    by_length = encode(model, texts, lengths=lengths).last_hidden_state
    by_mask = encode(model, texts, mask=(jnp.arange(9) < lengths[:, None])).last_hidden_state
    agree(by_length, by_mask)
    agree(by_length[1, :5], encode(model, texts[1:, :5]).last_hidden_state[0])


def test_positions_of_roberta_begin_after_the_padding_token_and_do_not_count_it():
    model, texts = golden_model("roberta"), tokens(1, 4) + 1  # without the padding token 1
    encode = nnx.jit(lambda model, texts, **options: model(texts, **options))
    expected = encode(model, texts)
    agree(encode(model, texts, positions=jnp.arange(4)), expected)
    real = jnp.array([1, 3, 4])
    spread, mask = (
        jnp.ones((1, 5), jnp.int32).at[0, real].set(texts[0, :3]),
        jnp.zeros((1, 5), bool).at[0, real].set(True),
    )
    three = encode(model, texts[:, :3])
    agree(encode(model, spread, mask=mask)[0, real], three[0])
    with pytest.raises(ValueError, match="max_length=14 tokens, and the text has 15"):
        model(tokens(1, 15))


def test_packed_texts_equal_single_ones():
    model, first, second = golden_model("bert_tokens"), tokens(1, 3), tokens(1, 4, seed=1)
    mask = nnx.make_segment_mask(jnp.array([[1] * 3 + [2] * 4]))
    packed = jnp.concatenate([first, second], axis=1)
    logits = nnx.jit(lambda model, texts, **options: model(texts, **options))
    out = logits(model, packed, mask=mask, positions=jnp.array([0, 1, 2, 0, 1, 2, 3]))
    agree(out[:, :3], logits(model, first))
    agree(out[:, 3:], logits(model, second))


@pytest.mark.parametrize("bad", [-1, 60])
def test_tokens_outside_the_vocabulary_are_an_error_or_nan(bad):
    model = golden_model("bert")
    texts = jnp.array([[1, 2, 3], [4, bad, 5]])
    with pytest.raises(ValueError, match=rf"Bert: expected tokens within 0..59 .* got {bad} at index \(1, 1\)"):
        model(texts)
    out = nnx.jit(lambda model, texts: model(texts))(model, texts).last_hidden_state
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()


def test_inputs_that_do_not_fit_are_errors():
    model = golden_model("bert")
    with pytest.raises(ValueError, match=r"shape \[batch, length\], got an array of shape \(3,\)"):
        model(jnp.array([1, 2, 3]))
    with pytest.raises(ValueError, match="max_length=16 tokens, and the text has 17"):
        model(tokens(1, 17))
    with pytest.raises(ValueError, match=r"\[batch, length\] = \(2, 5\) or with four axes, got \(5,\)"):
        model(tokens(2, 5), mask=jnp.ones(5, bool))


def test_checkpoints_as_first_published_are_understood(tmp_path):
    directory = shutil.copytree(golden_directory("bert_masked_lm"), tmp_path / "bert")
    arrays = {name: np.array(array) for name, array in nnx.load_safetensors(directory / "model.safetensors").items()}
    for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        for name in [name for name in arrays if name.endswith(new)]:
            arrays[name.removesuffix(new) + old] = arrays.pop(name)
    arrays["bert.embeddings.position_ids"] = np.arange(16)[None]
    arrays["cls.seq_relationship.weight"] = arrays["bert.pooler.dense.weight"] = np.ones((2, 24), np.float32)
    arrays["cls.predictions.decoder.weight"] = arrays["bert.embeddings.word_embeddings.weight"]
    nnx.save_safetensors(directory / "model.safetensors", nnx.State(arrays))
    assert nnx.models.from_pretrained(directory).get_state() == golden_model("bert_masked_lm").get_state()


def test_a_plain_model_whose_tensors_have_the_prefix_is_understood(tmp_path):
    directory = shutil.copytree(golden_directory("bert"), tmp_path / "bert")
    arrays = nnx.load_safetensors(directory / "model.safetensors").items()
    prefixed = {f"bert.{name}": np.array(array) for name, array in arrays}
    nnx.save_safetensors(directory / "model.safetensors", nnx.State(prefixed))
    assert nnx.models.from_pretrained(directory).get_state() == golden_model("bert").get_state()


def test_a_new_head_can_be_put_on_a_loaded_encoder(tmp_path):
    loaded = nnx.models.from_pretrained(golden_directory("bert_classifier"))
    config = loaded.config.replace(task="token_classification", labels=("noun", "verb"))
    model = nnx.models.BertWithHead(config, ctx=nnx.context(0))
    model.encoder = loaded.encoder
    model.encoder.pooler = None  # this task does not pool
    nnx.models.save_pretrained(model, tmp_path)
    again = nnx.models.from_pretrained(tmp_path)
    assert again.config == config
    out, expected = (encoder_outputs(each, {"tokens": tokens(1, 4)})["logits"] for each in (again, model))
    assert out.shape == (1, 4, 2)
    agree(out, expected)


def test_a_head_needs_a_task():
    with pytest.raises(ValueError, match="the config has no task. Set one of 'masked_lm'"):
        nnx.models.BertWithHead(golden_model("bert").config, ctx=nnx.context(0))


def test_a_model_can_be_differentiated():
    model, (inputs, _) = golden_model("bert_answers"), golden_arrays("bert_answers")
    grads = nnx.jit(nnx.grad(lambda model: (model(**inputs) ** 2).mean()))(model)
    assert all(np.isfinite(leaf.value).all() and np.abs(leaf.value).max() > 0 for leaf in grads.values())
    assert encoder_outputs(model, inputs)["logits"].shape == (2, 12, 2)
