"""Attention at its edges: biases of minus infinity, float64, empty sequences, dropout of everything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.nn.arrays import numpy_normal
from tests.nn.attention_by_hand import agrees, by_hand

QUERY, KEY, VALUE = (numpy_normal(2, 6, 2, 8, seed=seed) for seed in range(3))

bodies = pytest.mark.parametrize("precision", [None, "highest"], ids=["delegated", "explicit"])
lowest = pytest.mark.parametrize("low", [-np.inf, np.finfo(np.float32).min], ids=["-inf", "finfo.min"])


@bodies
@lowest
def test_no_bias_reveals_the_future(precision, low):
    # Every query may see only key 4 by its bias, and by causality only the past: the first four see nothing.
    bias = np.where(np.arange(6) == 4, 0, low).astype(np.float32)[None, :].repeat(6, 0)

    def attend(key, value):
        return nnx.dot_product_attention(QUERY, key, value, bias, is_causal=True, precision=precision)

    later = np.arange(6)[:, None, None] >= 4
    changed = attend(np.where(later, KEY + 1, KEY), np.where(later, 100.0, VALUE))
    np.testing.assert_allclose(changed[:, :4], attend(KEY, VALUE)[:, :4], atol=1e-6)
    if low == -np.inf:
        np.testing.assert_array_equal(changed[:, :4], 0)
    gradients = jax.grad(lambda *arrays: attend(*arrays).sum(), argnums=(0, 1))(KEY, VALUE)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@bodies
def test_minus_infinity_in_a_bias_hides_a_key(precision):
    hidden = np.random.default_rng(0).random((2, 2, 6, 6)) < 0.5
    hidden[0, 1, 3] = True  # one query sees nothing
    bias = np.where(hidden, -np.inf, numpy_normal(2, 2, 6, 6, seed=3)).astype(np.float32)

    def attend(query, bias):
        return nnx.dot_product_attention(query, KEY, VALUE, bias, precision=precision)

    agrees(attend(QUERY, bias), by_hand(QUERY, KEY, VALUE, ~hidden, np.where(hidden, 0, bias)))
    assert all(np.isfinite(g).all() for g in jax.grad(lambda *a: attend(*a).sum(), argnums=(0, 1))(QUERY, bias))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": np.tri(6, dtype=bool)}], ids=str)
def test_float64_is_computed_in_float64(options):
    with jax.enable_x64(True):
        query, key, value = (np.asarray(x, np.float64) for x in (QUERY, KEY, VALUE))
        out = nnx.dot_product_attention(query, key, value, **options)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, by_hand(query, key, value, np.tri(6) if options else None), atol=1e-14)


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan")])
def test_a_dropout_rate_is_a_probability(rate):
    with pytest.raises(ValueError, match=f"dot_product_attention: dropout_rate.*from 0 to 1, got {rate}"):
        nnx.dot_product_attention(QUERY, KEY, VALUE, dropout_rate=rate, dropout_rng=jax.random.key(0))
    with pytest.raises(ValueError, match=f"MultiHeadAttention: dropout_rate.*from 0 to 1, got {rate}"):
        nnx.MultiHeadAttention(2, 4, dropout_rate=rate, ctx=nnx.context(0))


def test_dropping_everything_returns_zeros_without_a_gradient():
    def attend(query):
        return nnx.dot_product_attention(query, KEY, VALUE, dropout_rate=1.0, dropout_rng=jax.random.key(0))

    np.testing.assert_array_equal(attend(QUERY), 0)
    np.testing.assert_array_equal(jax.grad(lambda query: attend(query).sum())(QUERY), 0)


@bodies
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": np.ones((1, 1, 0, 0), bool)}], ids=str)
def test_empty_sequences_have_empty_outputs_and_gradients(options, precision):
    empty = jnp.zeros((2, 0, 2, 8))
    attend = lambda x: nnx.dot_product_attention(x, x, x, precision=precision, **options)  # noqa: E731
    assert attend(empty).shape == empty.shape
    assert jax.grad(lambda x: attend(x).sum())(empty).shape == empty.shape
