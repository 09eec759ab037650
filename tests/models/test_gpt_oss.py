"""gpt_oss: what its config can say, its activation, and its sinks in generation and quantization."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from nnx.models.activations_by_name import ClampedSwiGLU
from nnx.models.families import config_from_dict, config_to_dict
from tests.models.published import GOLDEN, golden_config, golden_model, tiny_config


def fields(**changes):
    found = {**json.loads((GOLDEN / "gpt_oss" / "config.json").read_text()), **changes}
    return {key: value for key, value in found.items() if value is not ...}


def test_generate_writes_what_transformers_does_and_the_uncached_model_too():
    with np.load(GOLDEN / "gpt_oss" / "golden.npz") as golden:
        tokens, greedy = golden["tokens"], golden["greedy"]
    model = golden_model("gpt_oss")
    out = nnx.generate(model, jnp.asarray(tokens), max_new_tokens=12, temperature=0)
    np.testing.assert_array_equal(out, greedy[:, :12])
    logits = model(jnp.concatenate([jnp.asarray(tokens), out[:, :-1]], axis=1))
    np.testing.assert_array_equal(jnp.argmax(logits[:, tokens.shape[1] - 1 :], -1), out)


def test_sinks_and_biases_reach_the_logits():
    for path in ("layers/1/attention/sinks", "layers/0/mlp/router_bias", "layers/2/mlp/up_bias"):
        model = golden_model("gpt_oss").clone()
        expected = model(jnp.array([[5, 6, 7]]))
        model.update_state(model.filter(nnx.PathMatches(path)).map(lambda path, leaf: leaf.replace(-2 * leaf.value)))
        assert not np.allclose(model(jnp.array([[5, 6, 7]])), expected, atol=1e-3)


def test_a_quantized_model_computes_nearly_the_same():
    model, tokens = golden_model("gpt_oss").clone(), jnp.array([[5, 6, 7, 8]])
    expected = model(tokens)
    assert "layers/0/mlp" in nnx.quantize(model)
    assert model.layers[0].mlp.gate.dtype == jnp.int8 and model.layers[0].mlp.gate_bias.dtype == jnp.float32
    assert np.abs(model(tokens) - expected).max() < 0.1 * np.abs(expected).max()


def test_gates_and_values_are_bounded():
    gate, value = jnp.array([-9.0, 0.5, 3.0, 9.0]), jnp.array([-9.0, 0.5, -1.0, 9.0])
    out = ClampedSwiGLU(limit=2.0, alpha=1.5)(gate, value)
    expected = [(v + 1) * g * jax.nn.sigmoid(1.5 * g) for g, v in ((-9.0, -2.0), (0.5, 0.5), (2.0, -1.0), (2.0, 2.0))]
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    assert ClampedSwiGLU(2.0) == ClampedSwiGLU(2.0) != ClampedSwiGLU(3.0)


def test_a_model_with_another_activation_is_not_saved(tmp_path):
    model = golden_model("gpt_oss").clone()
    model.layers[0].mlp.gated_activation = ClampedSwiGLU(limit=9.0)
    with pytest.raises(ValueError, match="layers/0/mlp: gated_activation is ClampedSwiGLU"):
        nnx.models.save_pretrained(model, tmp_path)


class TestConfigs:
    def test_a_file_that_mentions_no_rotary_scaling_means_that_of_the_published_models(self):
        scaling = nnx.YaRNScaling(32.0, 4096, 32.0, 1.0, truncate=False)
        for changes in ({"rope_theta": ...}, {"rope_theta": 150_000.0}, {"rope_parameters": None}):
            config = config_from_dict(fields(rope_scaling=..., **{"rope_theta": ..., **changes}))
            assert config.rotary == nnx.models.RotaryConfig(150_000.0, scaling)
            assert config_from_dict(config_to_dict(config)) == config
        plain = config_from_dict(fields(rope_scaling=..., rope_parameters={"rope_type": "default", "rope_theta": 9.0}))
        assert plain.rotary == nnx.models.RotaryConfig(9.0)
        assert config_from_dict(config_to_dict(plain)) == plain

    def test_the_ramp_of_yarn_is_rounded_unless_told(self):
        yarn = {"rope_type": "yarn", "factor": 4.0}
        rounded, exact = (config_from_dict(fields(rope_scaling={**yarn, **more})) for more in ({}, {"truncate": False}))
        assert rounded.rotary.scaling.truncate and not exact.rotary.scaling.truncate
        assert "truncate" not in config_to_dict(rounded)["rope_scaling"]
        assert config_to_dict(exact)["rope_scaling"]["truncate"] is False
        with pytest.raises(ValueError, match="'truncate' in the rotary settings to be true or false, got 0"):
            config_from_dict(fields(rope_scaling={**yarn, "truncate": 0}))

    def test_absent_entries_have_the_values_of_the_published_models(self):
        absent = ("attention_bias", "swiglu_limit", "swiglu_alpha", "sliding_window", "num_local_experts", "head_dim")
        config = config_from_dict(fields(**dict.fromkeys(absent, ...)))
        assert config.use_qkv_bias and config.use_out_bias and config.use_sinks and config.use_router_bias
        assert (config.swiglu_limit, config.swiglu_alpha) == (7.0, 1.702)
        assert (config.num_experts, config.head_dim, config.sliding_window) == (128, 64, 128)
        assert config.layer_types == ("sliding", "full", "sliding")

    def test_either_name_of_the_number_of_selected_experts_is_read(self):
        config = config_from_dict(fields(num_experts_per_tok=..., experts_per_token=3))
        assert config.num_selected == 3 and "experts_per_token" not in config_to_dict(config)
        assert config_from_dict(fields(num_experts_per_tok=2, experts_per_token=3)).num_selected == 2

    def test_other_families_cannot_express_sinks(self):
        with pytest.raises(ValueError, match="A llama config.json cannot express use_sinks=True"):
            config_to_dict(tiny_config(use_sinks=True))
        with pytest.raises(ValueError, match="A gpt_oss config.json cannot express use_sinks=False"):
            config_to_dict(golden_config("gpt_oss").replace(use_sinks=False))

    def test_a_bound_of_gates_needs_gates(self):
        with pytest.raises(ValueError, match="swiglu_limit=7.0 is about gates, which MLPs with gated=False"):
            tiny_config(swiglu_limit=7.0, gated=False)
        with pytest.raises(ValueError, match="GatedMLP: `gated_activation` replaces `activation`"):
            nnx.models.Decoder(tiny_config(swiglu_limit=7.0, activation="relu"), ctx=nnx.context(0))
