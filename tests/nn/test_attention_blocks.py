"""Attention in blocks, and the fused kernel of TPUs: they compute the plain form, and memory grows linearly."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from nnx.nn.attention import blocks
from nnx.sharding.target import compiling_for
from tests.nn.arrays import numpy_normal

QUERIES, KEYS, HEADS = 37, 45, 4  # three blocks of queries, the last of them smaller


@pytest.fixture(autouse=True)
def small_blocks():
    jax.clear_caches()
    with mock.patch.multiple(blocks, LONG=1, SMALLEST=16, LARGEST=16):
        yield
    jax.clear_caches()


def arrays(dtype=jnp.float32, queries=QUERIES, keys=KEYS, features=8, value_dim=None):
    shapes = (queries, HEADS, features), (keys, 2, features), (keys, 2, value_dim or features)
    return [jnp.asarray(numpy_normal(2, *shape, seed=i), dtype) for i, shape in enumerate(shapes)]


def value_and_gradients(implementation, inputs, **options):
    """The output and the gradients of all inputs, and of the bias and sinks if there are any."""
    learned = {name: options.pop(name) for name in ("bias", "sinks") if name in options}

    def loss(inputs, learned):
        out = nnx.dot_product_attention(*inputs, **learned, **options, implementation=implementation)
        return jnp.sum(out.astype(jnp.float32) * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(inputs, learned)
    return out, gradients


def close(found, expected, tolerance):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        ours, theirs = (np.asarray(array, np.float64) for array in (ours, theirs))
        assert np.linalg.norm(ours - theirs) <= tolerance * (np.linalg.norm(theirs) + 1e-3)


BIAS, MASK = jnp.asarray(numpy_normal(HEADS, QUERIES, KEYS)), numpy_normal(2, 1, QUERIES, KEYS) > 0.5
OPTIONS = {
    "nothing": {},
    "causal": {"is_causal": True},
    "mask, causal": {"mask": MASK, "is_causal": True},
    "mask of rows without keys": {"mask": MASK[:1] & (np.arange(QUERIES) % 5 > 0)[:, None]},
    "mask of keys": {"mask": MASK[:, :, :1], "scale": 0.2},
    "bias": {"bias": BIAS.at[:, 3].set(-jnp.inf)},
    "bias of keys": {"bias": BIAS[0, 0]},
    "lengths": {"key_value_seq_lengths": jnp.array([0, 30]), "query_seq_lengths": jnp.array([3, QUERIES])},
    "causal window": {"is_causal": True, "local_window_size": (9, 0), "key_value_seq_lengths": jnp.array([2, KEYS])},
    "window on both sides, mask": {"local_window_size": (4, 7), "mask": MASK},
    "window and bias": {"local_window_size": 3, "bias": BIAS},
    "soft cap and sinks": {"logits_soft_cap": 2.0, "sinks": jnp.arange(4.0), "is_causal": True},
    "precision": {"precision": "highest", "is_causal": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_blocks_compute_the_plain_form(options):
    inputs = arrays()
    found = value_and_gradients("xla", inputs, **options)
    with mock.patch.object(blocks, "LONG", 10**9):
        expected = value_and_gradients("xla", inputs, **options)
    close(found, expected, 2e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
def test_half_precision_is_as_exact_as_the_plain_form(dtype):
    inputs = arrays(dtype, value_dim=6)
    exact = value_and_gradients("xla", [x.astype(jnp.float32) for x in inputs], is_causal=True)
    found = value_and_gradients("xla", inputs, is_causal=True)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(found))
    close(found, exact, 2e-2 if dtype == jnp.bfloat16 else 3e-3)


def test_dropout_drops_the_given_part_and_is_the_same_in_the_gradient():
    query, key, value = arrays(queries=64, keys=64)
    options = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.25}
    dropped = jax.jit(lambda value: nnx.dot_product_attention(query, key, value, **options))
    ones = dropped(jnp.ones_like(value))  # the sums of the weights that are left
    assert 0.9 < ones.mean() < 1.1 and ones.std() > 0.01 and not (ones[:, :16] == ones[:, 16:32]).all()
    # The output is linear in the values, so its product with a direction is that of the gradient.
    pulled = jax.jit(jax.grad(lambda value: dropped(value).sum()))(value)
    np.testing.assert_allclose((pulled * value).sum(), dropped(value).sum(), rtol=1e-4)


def test_forward_mode_works():
    query, key, value = arrays()
    attend = functools.partial(nnx.dot_product_attention, key=key, value=value, is_causal=True)
    slope = jax.jit(lambda x: jax.jvp(attend, (x,), (x,))[1])
    found = slope(query)
    with mock.patch.object(blocks, "LONG", 10**9):
        jax.clear_caches()
        close(found, slope(query), 1e-5)


def temporary_bytes(length, **options):
    x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)

    def loss(x):
        return nnx.dot_product_attention(x, x, x, **options).sum()

    return jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"logits_soft_cap": 3.0, "sinks": jnp.ones(2)}], ids=["causal", "cap and sinks"]
)
def test_memory_grows_linearly(options):
    with mock.patch.multiple(blocks, LONG=2048 * 2048, SMALLEST=128, LARGEST=256):  # the real ones
        short, long = (temporary_bytes(length, **options) for length in (2048, 8192))
    assert long < 5 * short
    assert long < 2 * 8192 * 8192  # half of the weights of one head


@pytest.mark.parametrize(("platform", "queries"), [("cpu", 128), ("gpu", 256), ("tpu", 256)])
def test_blocks_are_small_on_a_cpu_and_for_very_many_keys(platform, queries):
    x = jax.ShapeDtypeStruct((1, 4096, 2, 8), jnp.float32)
    with mock.patch.multiple(blocks, LONG=2048 * 2048, SMALLEST=128, LARGEST=256), compiling_for(platform):
        program = str(jax.make_jaxpr(nnx.dot_product_attention)(x, x, x))
        assert f"length={4096 // queries}" in program
        assert blocks.block_size(8192, platform) == 128


# The kernel of TPUs, interpreted

SPLASH = ("nothing", "causal", "lengths", "causal window", "soft cap")


@pytest.mark.parametrize("name", SPLASH)
def test_splash_computes_the_plain_form(name):
    inputs = arrays(jnp.bfloat16, 128, 256, 64)
    lengths = {"key_value_seq_lengths": jnp.array([0, 130]), "query_seq_lengths": jnp.array([3, 128])}
    options = {"lengths": lengths, "soft cap": {"logits_soft_cap": 2.0, "local_window_size": (20, 9)}, **OPTIONS}[name]
    with mock.patch.object(blocks, "LONG", 10**9):
        expected = value_and_gradients("xla", inputs, **options)
    with compiling_for("interpreter"):
        found = value_and_gradients("splash", inputs, **options)
    close(found, expected, 1e-2)
