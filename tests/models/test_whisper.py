"""Whisper: writing through the cache, the limits of its positions, checkpoints with a copy of the embedding."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models.golden_files import sums
from tests.models.published import edited, golden_arrays, golden_directory, golden_model, golden_text


@pytest.fixture(scope="module")
def conditioned():
    model = golden_model("whisper")
    return model.conditioned(
        nnx.jit(lambda model, sound: model.encode(sound))(model, golden_arrays("whisper")[0]["sound"])
    )


def test_greedy_text_is_that_of_transformers(conditioned):
    expected = golden_text("whisper")
    start = jnp.full((2, 1), conditioned.model.config.start_token)
    out = nnx.generate(conditioned, start, max_new_tokens=expected.shape[1], temperature=0)
    np.testing.assert_array_equal(out, expected)


def test_decoding_in_parts_equals_the_call(conditioned):
    inputs, outputs = golden_arrays("whisper")
    tokens, expected = inputs["decoder_tokens"], outputs["logits"]
    decode = nnx.jit(lambda model, tokens, cache, lengths: model.decode(tokens, cache, lengths))
    first, cache = decode(conditioned, tokens[:, :7], conditioned.init_cache(2, 20), jnp.array([7, 5]))
    np.testing.assert_allclose(sums(first[0]), expected[0, :7], atol=1e-4)
    np.testing.assert_allclose(sums(first[1, :5]), expected[1, :5], atol=1e-4)
    second, cache = decode(conditioned, np.stack([tokens[0, 7:9], tokens[1, 5:7]]), cache, None)
    np.testing.assert_allclose(sums(second), np.stack([expected[0, 7:9], expected[1, 5:7]]), atol=1e-4)
    assert cache.lengths.tolist() == [9, 7]


def test_texts_longer_than_the_positions_are_refused(conditioned):
    start = jnp.full((2, 1), 3)
    with pytest.raises(ValueError, match="at most max_length=40 tokens, and this call needs 50"):
        nnx.generate(conditioned, start, max_new_tokens=50, temperature=0)
    with pytest.raises(ValueError, match="Whisper: this model has learned positions for max_length=40 tokens"):
        conditioned.model(golden_arrays("whisper")[0]["sound"], jnp.zeros((2, 41), jnp.int32))


@pytest.mark.parametrize(
    ("sound", "message"),
    [
        (jnp.zeros((1, 10, 32)), r"\[batch, 32, 10\] .* got \(1, 10, 32\)"),
        (jnp.zeros((1, 31, 10)), r"\[batch, 32, 10\] .* got \(1, 31, 10\)"),
        (jnp.zeros((1, 32, 10), jnp.int32), "expected sound as floating-point numbers, got dtype int32"),
    ],
)
def test_input_that_is_not_sound_is_refused(sound, message):
    with pytest.raises(ValueError, match=message):
        golden_model("whisper").encode(sound)


def test_a_copy_of_the_embedding_is_allowed(tmp_path):
    directory = shutil.copytree(golden_directory("whisper"), tmp_path / "whisper")
    arrays = {name: np.array(array) for name, array in nnx.load_safetensors(directory / "model.safetensors").items()}
    arrays["proj_out.weight"] = arrays["model.decoder.embed_tokens.weight"]
    nnx.save_safetensors(directory / "model.safetensors", nnx.State(arrays))
    assert nnx.models.from_pretrained(directory).get_state() == golden_model("whisper").get_state()
    edited(directory, scale_embedding=True)
    with pytest.raises(ValueError, match="scale_embedding=True is not supported for whisper; only False is"):
        nnx.models.from_pretrained(directory)


def test_configs_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="expected features=384 to be a multiple of num_heads=5"):
        nnx.models.WhisperConfig(num_decoder_heads=5)
    with pytest.raises(ValueError, match="expected num_bands to be a positive integer, got 0"):
        nnx.models.WhisperConfig(num_bands=0)


def test_a_model_made_here_has_the_same_config_after_a_round_trip(tmp_path):
    config = golden_model("whisper").config.replace(extra=())
    nnx.models.save_pretrained(nnx.models.Whisper(config, ctx=nnx.context(0)), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["pad_token_id"] is None  # the default is 50256
    assert nnx.models.from_pretrained(tmp_path, abstract=True).config == config


def test_a_new_encoder_starts_with_sines_and_cosines():
    config = golden_model("whisper").config
    model = nnx.models.Whisper(config, ctx=nnx.context(0))
    table = np.asarray(model.encoder.positions.embedding)
    np.testing.assert_allclose(table[:, 0], np.sin(np.arange(16)), atol=1e-6)
    np.testing.assert_allclose(table[:, 12], np.cos(np.arange(16)), atol=1e-6)
    assert all(block.attention.key.bias is None for block in model.encoder.layers)


def test_shards_follow_the_rules():
    mesh = jax.make_mesh((1, 1), ("data", "model"))
    rules = nnx.fsdp_tensor_parallel_rules()
    plan = nnx.models.from_pretrained(golden_directory("whisper"), mesh=mesh, rules=rules, abstract=True)
    assert plan.layers[0].cross_attention.key.kernel.sharding.spec == jax.P("data", "model", None)
    assert plan.embed.embedding.sharding.spec == jax.P("model", "data")
