"""gpt_oss: what its config can say, its activation, and its sinks in generation and quantization."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models.published import golden_arrays, golden_directory, golden_model, golden_text


def fields(**changes):
    found = {**json.loads((golden_directory("gpt_oss") / "config.json").read_text()), **changes}
    return {key: value for key, value in found.items() if value is not ...}


def test_generated_text_is_that_of_transformers_and_of_the_uncached_model():
    tokens, greedy = golden_arrays("gpt_oss")[0]["tokens"], golden_text("gpt_oss")
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
    activation = type(golden_model("gpt_oss").layers[0].mlp.gated_activation)
    out = activation(limit=2.0, alpha=1.5)(gate, value)
    expected = [(v + 1) * g * jax.nn.sigmoid(1.5 * g) for g, v in ((-9.0, -2.0), (0.5, 0.5), (2.0, -1.0), (2.0, 2.0))]
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    assert activation(2.0) == activation(2.0) != activation(3.0)


def test_a_model_with_another_activation_is_not_saved(tmp_path):
    model = golden_model("gpt_oss").clone()
    mlp = model.layers[0].mlp
    mlp.gated_activation = type(mlp.gated_activation)(limit=9.0)
    with pytest.raises(ValueError, match="layers/0/mlp: gated_activation is ClampedSwiGLU"):
        nnx.models.save_pretrained(model, tmp_path)
