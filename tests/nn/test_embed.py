"""Embeddings of tokens and positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


def embed(**options) -> nnx.Embed:
    return nnx.Embed(7, 4, ctx=nnx.context(0), **options)


def test_tokens_become_rows_of_the_table():
    layer = embed()
    out = layer(jnp.array([[1, 6], [0, -1]]))
    np.testing.assert_array_equal(out, layer.embedding[jnp.array([[1, 6], [0, 6]])])


def test_a_token_outside_of_the_vocabulary_is_nan_and_never_a_wrong_vector():
    out = embed()(jnp.array([3, 7]))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()
    single = nnx.Embed(1, 4, ctx=nnx.context(0))
    assert np.isnan(single(jnp.array(1))).all()


def test_tokens_must_be_integers():
    with pytest.raises(ValueError, match="Embed looks vectors up by number.*float32"):
        embed()(jnp.ones(3))


def test_attend_gives_a_logit_per_token():
    layer = embed()
    query = jax.random.normal(jax.random.key(1), (2, 3, 4))
    np.testing.assert_allclose(layer.attend(query), query @ layer.embedding.T, atol=1e-6)
    assert layer.attend(query[0, 0]).shape == (7,)


def test_attend_with_wrong_features_raises_with_the_expected_ones():
    with pytest.raises(ValueError, match="Embed expected 4 features.*got 5"):
        embed().attend(jnp.ones((2, 5)))


def test_dtype_is_of_the_result_and_param_dtype_of_the_table():
    layer = embed(dtype=jnp.bfloat16)
    assert layer.embedding.dtype == jnp.float32
    assert layer(jnp.array([1])).dtype == jnp.bfloat16
    assert layer.attend(jnp.ones(4)).dtype == jnp.bfloat16
    assert embed(param_dtype=jnp.float16)(jnp.array([1])).dtype == jnp.float16


def test_gradient_counts_each_use_of_a_token():
    layer = embed()
    grads = nnx.grad(lambda m: m(jnp.array([2, 2, 5])).sum())(layer)
    table = grads["embedding"].value
    np.testing.assert_array_equal(table.sum(-1), [0, 0, 8, 0, 0, 4, 0])


def test_metadata_reach_the_table():
    layer = embed(embedding_metadata={"sharding": ("vocab", "embed")})
    assert layer.variable("embedding").sharding == ("vocab", "embed")
    by_init = embed(embedding_init=nnx.with_partitioning(nnx.initializers.normal(), ("vocab", "embed")))
    assert by_init.variable("embedding").sharding == ("vocab", "embed")


def test_learned_positions_are_added():
    layer = nnx.LearnedPositionEmbed(6, 4, ctx=nnx.context(0))
    x = jnp.ones((2, 3, 4))
    np.testing.assert_allclose(layer(x), x + layer.embedding[:3])
    np.testing.assert_allclose(layer(x[0]), x[0] + layer.embedding[:3])


def test_learned_positions_can_be_given_per_row():
    layer = nnx.LearnedPositionEmbed(6, 4, ctx=nnx.context(0))
    out = layer(jnp.zeros((2, 1, 4)), jnp.array([[5], [2]]))
    np.testing.assert_array_equal(out[:, 0], layer.embedding[jnp.array([5, 2])])
    assert np.isnan(layer(jnp.zeros((1, 4)), jnp.array([6]))).all()


def test_too_long_an_input_is_refused():
    layer = nnx.LearnedPositionEmbed(6, 4, ctx=nnx.context(0))
    with pytest.raises(ValueError, match="max_length=6 positions, got an input of length 7"):
        layer(jnp.ones((7, 4)))


def test_sinusoids_follow_the_formula():
    out = nnx.SinusoidalPositionEmbed(4)(jnp.zeros((3, 4)))
    for position in range(3):
        angles = position, position / 100.0
        expected = [np.sin(angles[0]), np.cos(angles[0]), np.sin(angles[1]), np.cos(angles[1])]
        np.testing.assert_allclose(out[position], expected, atol=1e-6)


def test_sinusoids_keep_the_dtype_of_the_input():
    assert nnx.SinusoidalPositionEmbed(4)(jnp.zeros((3, 4), jnp.bfloat16)).dtype == jnp.bfloat16
    assert nnx.SinusoidalPositionEmbed(4, dtype=jnp.float16)(jnp.zeros((3, 4))).dtype == jnp.float16


def test_sinusoids_take_positions():
    layer = nnx.SinusoidalPositionEmbed(4)
    x = jnp.zeros((2, 5, 4))
    np.testing.assert_allclose(layer(x[:, 3:4], jnp.array([3])), layer(x)[:, 3:4])


def test_odd_features_have_no_sinusoids():
    with pytest.raises(ValueError, match="even number of features, got 3"):
        nnx.SinusoidalPositionEmbed(3)


@pytest.mark.parametrize(
    "make", [lambda: nnx.LearnedPositionEmbed(6, 4, ctx=nnx.context(0)), lambda: nnx.SinusoidalPositionEmbed(4)]
)
def test_positions_layers_refuse_wrong_shapes(make):
    layer = make()
    with pytest.raises(ValueError, match="PositionEmbed expected 4 features.*got 5"):
        layer(jnp.ones((3, 5)))
    with pytest.raises(ValueError, match="batch..., length, features"):
        layer(jnp.ones(4))
    with pytest.raises(ValueError, match=r"expected positions of shape \(2, 3\) or \(3,\)"):
        layer(jnp.ones((2, 3, 4)), jnp.zeros((2, 2), jnp.int32))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.int32])
def test_small_integers_find_the_same_vectors(dtype):
    numbers = nnx.Embed(300, 1, embedding_init=lambda *_: jnp.arange(300.0)[:, None], ctx=nnx.context(0))
    tokens = [0, 5, 127] if jnp.issubdtype(dtype, jnp.unsignedinteger) else [0, 5, 127, -1, -128]
    found = numbers(jnp.array(tokens, dtype))[:, 0]
    np.testing.assert_array_equal(found, np.arange(300.0)[tokens])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32])
def test_negative_positions_are_outside_the_table(dtype):
    layer = nnx.LearnedPositionEmbed(300, 1, ctx=nnx.context(0))
    y = layer(jnp.zeros((3, 1)), positions=jnp.array([-1, 0, -100], dtype))[:, 0]
    assert jnp.isnan(y).tolist() == [True, False, True]
