"""The gated delta rule in chunks agrees with the recurrence token by token, and the layer with its cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


@jax.jit
def recurrence(query, key, value, decay, beta, state):
    """The rule as it is defined, token by token."""
    query, key = (jnp.repeat(x, value.shape[-2] // key.shape[-2], -2) for x in (query, key))

    def step(state, token):
        query, key, value, decay, beta = token
        state = state * jnp.exp(decay)[..., None, None]
        error = value - jnp.einsum("bhkv,bhk->bhv", state, key)
        state = state + jnp.einsum("bhk,bhv->bhkv", key, beta[..., None] * error)
        return state, jnp.einsum("bhkv,bhk->bhv", state, query)

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (query, key, value, decay, beta))
    state, out = jax.lax.scan(step, state, tokens)
    return jnp.moveaxis(out, 0, 1), state


def texts(length: int, seed: int = 0, alike: float = 0.0) -> tuple[jax.Array, ...]:
    """Queries, keys (the more `alike`, the more they agree), values, decays, betas and a state; two heads per key."""
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return draw.standard_normal(shape)

    key = normal(2, length, 2, 8) + alike
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    decay = -draw.exponential(draw.choice([0.01, 1.0, 30.0], (1, 1, 4)), (2, length, 4))
    arrays = (normal(2, length, 2, 8), key, normal(2, length, 4, 5), decay, draw.random((2, length, 4)))
    return tuple(jnp.asarray(x, jnp.float32) for x in (*arrays, normal(2, 4, 8, 5)))


def close(ours, theirs, tolerance=2e-5):
    scale = max(float(jnp.abs(theirs).max()), 1e-6)
    np.testing.assert_allclose(ours / scale, theirs / scale, atol=tolerance)


@pytest.mark.parametrize("length", [1, 2, 7, 16, 33, 50])
def test_chunks_agree_with_the_recurrence_and_so_do_their_gradients(length):
    arrays = texts(length, length)
    weights = jnp.asarray(np.random.default_rng(9).standard_normal((2, length, 4, 5)), jnp.float32)

    def total(rule):
        def of(*arrays):
            out, state = rule(*arrays)
            return (out * weights).sum() + (state**2).sum(), (out, state)

        return jax.jit(jax.value_and_grad(of, range(6), has_aux=True))

    chunked = total(lambda *arrays: nnx.gated_delta_rule(*arrays, chunk=16))
    (_, ours), our_gradients = chunked(*arrays)
    (_, theirs), their_gradients = total(recurrence)(*arrays)
    for mine, yours in zip((*ours, *our_gradients), (*theirs, *their_gradients), strict=True):
        close(mine, yours)


def test_keys_that_agree_and_never_decay_lose_no_digits():
    # The powers of the triangular matrix reach 1e17 here, and its inverse 1.
    query, key, value, decay, beta, state = texts(128, alike=1e4)
    arrays = (query, key, value, 0 * decay, 0 * beta + 1, state)
    for mine, yours in zip(nnx.gated_delta_rule(*arrays), recurrence(*arrays), strict=True):
        close(mine, yours)


@pytest.mark.parametrize("change", ["heads", "beta", "state", "chunk"])
def test_wrong_shapes_are_refused(change):
    query, key, value, decay, beta, state = texts(4)
    arrays = {
        "heads": (query, key, value[:, :, :3], decay, beta, state),
        "beta": (query, key, value, decay, beta[..., :1], state),
        "state": (query, key, value, decay, beta, state[:1]),
        "chunk": (query, key, value, decay, beta, state),
    }[change]
    with pytest.raises(ValueError, match="^gated_delta_rule: expected"):
        nnx.gated_delta_rule(*arrays, chunk=12 if change == "chunk" else 4)


# The layer


def make(**dtypes) -> nnx.GatedDeltaNet:
    return nnx.GatedDeltaNet(16, num_heads=4, key_dim=8, value_dim=6, key_heads=2, ctx=nnx.context(0), **dtypes)


def inputs(length: int = 9, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (2, length, 16), dtype)


@pytest.mark.parametrize("chunks", [(1,) * 9, (2, 1, 6)], ids=str)
def test_decoding_agrees_with_whole_texts(chunks):
    layer, x = make(), inputs()
    cache, outs, done = layer.make_cache(2, 9), [], 0
    for length in chunks:
        out, cache = layer.decode_step(x[:, done : done + length], cache, jnp.full(2, done))
        outs.append(out)
        done += length
    np.testing.assert_allclose(jnp.concatenate(outs, 1), layer(x), atol=1e-5)


def test_rows_of_different_lengths_are_advanced_by_their_own_tokens():
    layer, x = make(), inputs()
    lengths = jnp.array([2, 9])
    _, cache = layer.decode_step(x, layer.make_cache(2, 20), jnp.zeros(2, jnp.int32), lengths)
    out, _ = layer.decode_step(x, cache, lengths)
    expected = layer(jnp.concatenate((x[:1, :2], x[:1]), 1))[:, 2:]
    np.testing.assert_allclose(out[:1], expected, atol=1e-5)


def test_padding_changes_nothing_on_either_side():
    layer, x = make(), inputs()
    padded = jnp.concatenate((1e3 * x[:, :4], x, 1e3 * x[:, :3]), 1)
    mask = (jnp.arange(16) >= 4) & (jnp.arange(16) < 13)
    np.testing.assert_allclose(layer(padded, mask=mask[None, None, None])[:, 4:13], layer(x), atol=1e-5)
    np.testing.assert_allclose(layer(padded, mask=mask)[:, 4:13], layer(x), atol=1e-5)


def test_a_mask_between_pairs_of_tokens_and_looking_ahead_are_refused():
    layer, x = make(), inputs()
    with pytest.raises(ValueError, match=r"expected a mask \[batch..., 1, 1, length\].*leave causality out"):
        layer(x, mask=jnp.ones((2, 1, 9, 9), bool))
    with pytest.raises(ValueError, match="is_causal=True"):
        layer(x, is_causal=False)


def test_the_state_is_float32_in_a_bfloat16_layer():
    layer, x = make(param_dtype=jnp.bfloat16), inputs(dtype=jnp.bfloat16)
    cache = layer.make_cache(2, 9, jnp.bfloat16)
    out, after = layer.decode_step(x, cache, jnp.zeros(2, jnp.int32))
    assert (out.dtype, after.state.dtype, after.inputs.dtype) == (jnp.bfloat16, jnp.float32, jnp.bfloat16)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, cache)


def test_an_overflow_raises_and_inside_a_transform_is_nan_from_then_on():
    layer, x = make(), inputs(2)
    with pytest.raises(ValueError, match="DeltaCache is full: it has room for max_length=3"):
        layer.decode_step(x, layer.make_cache(2, 3), jnp.array([0, 2]))

    @jax.jit
    def step(x, cache, lengths):
        return layer.decode_step(x, cache, lengths)

    _, cache = step(x, layer.make_cache(2, 3), jnp.array([0, 2]))
    out, cache = step(x[:, :1], cache, jnp.array([2, 0]))
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()
    with pytest.raises(ValueError, match="row 1 got more tokens than max_length=3"):
        cache.check(jnp.array([3, 0]))
