"""Layers that draw random numbers in training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx

THREE_WAYS = r"in the call.*deterministic=.*on the instance.*flag of the Context.*nnx\.context"
LAYERS = [nnx.Dropout(0.5), nnx.DropPath(0.5), nnx.GaussianNoise(0.5)]
every_layer = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
X = jnp.ones((32, 16))


@every_layer
def test_mode_comes_from_call_then_instance_then_context(layer):
    training = nnx.context(dropout=0, flags={"deterministic": False})
    assert not jnp.array_equal(layer(X, ctx=training), X)
    assert layer(X, deterministic=True, ctx=training) is X
    fixed = layer.clone()
    fixed.deterministic = True
    assert fixed(X, ctx=training) is X
    assert not jnp.array_equal(fixed(X, deterministic=False, ctx=training), X)


@every_layer
def test_no_mode_is_an_error_that_names_the_three_ways(layer):
    with pytest.raises(ValueError, match=f"{type(layer).__name__}.*{THREE_WAYS}"):
        layer(X)
    with pytest.raises(ValueError, match=THREE_WAYS):
        layer(X, ctx=nnx.context(dropout=0))


@every_layer
def test_training_without_context_is_an_error_that_shows_one(layer):
    with pytest.raises(ValueError, match=r"no Context.*dropout=1"):
        layer(X, deterministic=False)


@every_layer
def test_every_call_draws_new_numbers_reproducibly(layer):
    one, two = nnx.context(dropout=0), nnx.context(dropout=0)
    first, second = layer(X, deterministic=False, ctx=one), layer(X, deterministic=False, ctx=one)
    assert not jnp.array_equal(first, second)
    np.testing.assert_array_equal(first, layer(X, deterministic=False, ctx=two))


@every_layer
def test_half_precision_stays(layer):
    assert layer(X.astype(jnp.bfloat16), deterministic=False, ctx=nnx.context(dropout=0)).dtype == jnp.bfloat16


def test_stream_is_a_choice():
    layer = nnx.Dropout(0.5, deterministic=False, rng_collection="noise")
    assert layer(X, ctx=nnx.context(noise=0)).shape == X.shape
    with pytest.raises(ValueError, match="Unknown Rng Stream: noise"):
        layer(X, ctx=nnx.context(dropout=0))


def test_dropout_keeps_the_mean():
    x = jnp.ones((200, 200))
    y = nnx.Dropout(0.3)(x, deterministic=False, ctx=nnx.context(dropout=0))
    assert float(jnp.mean(y == 0)) == pytest.approx(0.3, abs=0.02)
    assert float(y.mean()) == pytest.approx(1.0, abs=0.03)


def test_dropout_shares_its_mask_along_broadcast_dims():
    y = nnx.Dropout(0.5, (1,))(X, deterministic=False, ctx=nnx.context(dropout=0))
    assert jnp.all(y == y[:, :1])
    assert len(set(y[:, 0].tolist())) == 2


def test_extreme_rates():
    assert nnx.Dropout(0.0)(X) is X
    zeros = nnx.Dropout(1.0)(X, deterministic=False, ctx=nnx.context(dropout=0))
    assert not zeros.any()
    grad = jax.grad(lambda x: nnx.Dropout(1.0, deterministic=False)(x, ctx=nnx.context(dropout=0)).sum())(X)
    assert not grad.any()


@pytest.mark.parametrize("make", [nnx.Dropout, nnx.DropPath], ids=lambda m: m.__name__)
@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_rate_is_a_probability(make, rate):
    with pytest.raises(ValueError, match=f"{make.__name__}: `rate` is the probability.*{rate}"):
        make(rate)


def test_drop_path_drops_whole_examples():
    ctx = nnx.context(dropout=0)
    y = nnx.DropPath(0.5)(jnp.ones((64, 3, 4)), deterministic=False, ctx=ctx)
    assert sorted({tuple(np.unique(example)) for example in np.asarray(y)}) == [(0.0,), (2.0,)]
    kept = nnx.DropPath(0.5, rescale=False)(jnp.ones((64, 3)), deterministic=False, ctx=ctx)
    assert sorted(np.unique(kept)) == [0.0, 1.0]
    assert nnx.DropPath(0.5, batch_dims=0)(jnp.ones(3), deterministic=False, ctx=ctx).shape == (3,)
    with pytest.raises(ValueError, match="batch_dims=0"):
        nnx.DropPath(0.5)(jnp.ones(()), deterministic=False, ctx=ctx)


def test_gaussian_noise_has_its_deviation():
    x = jnp.zeros((200, 200))
    y = nnx.GaussianNoise(0.5)(x, deterministic=False, ctx=nnx.context(dropout=0))
    assert float(y.std()) == pytest.approx(0.5, rel=0.02)
    with pytest.raises(ValueError, match="must not be negative"):
        nnx.GaussianNoise(-1.0)
    with pytest.raises(ValueError, match="GaussianNoise expected floating point numbers, got int32"):
        nnx.GaussianNoise(1.0)(jnp.ones(3, jnp.int32), deterministic=False, ctx=nnx.context(dropout=0))


def test_axes_to_broadcast_that_the_input_does_not_have_are_an_error():
    layer = nnx.Dropout(0.5, (-3,), deterministic=False)
    with pytest.raises(ValueError, match=r"broadcast_dims=\(-3,\).*it has 2: shape \(2, 3\)"):
        layer(jnp.ones((2, 3)), ctx=nnx.context(dropout=0))


@pytest.mark.parametrize("name", ["Dropout", "MultiHeadAttention"])
def test_a_layer_that_drops_the_same_in_every_step_warns(name):
    attention = nnx.MultiHeadAttention(1, 4, dropout_rate=0.5, deterministic=False, ctx=nnx.context(0))
    layer = attention if name == "MultiHeadAttention" else nnx.Dropout(0.5, deterministic=False)
    scanned = nnx.scan(lambda layer, carry, x, ctx: (carry, layer(x, ctx=ctx)), split_rngs="params")
    with pytest.warns(UserWarning, match="'dropout', which `split_rngs` does not select.*split_rngs='dropout'"):
        scanned(layer, 0, jnp.ones((3, 2, 4)), nnx.context(dropout=0))
