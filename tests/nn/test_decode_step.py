"""Decoding with a cache that the caller owns: it equals the full pass, and nothing on the layer changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.nn.arrays import numpy_normal

MAX_LENGTH = 8
FEATURES = 16

VARIANTS = {
    "plain": {},
    "grouped and rotary": {"num_kv_heads": 2, "rotary": nnx.RotaryEmbedding(4)},
    "window": {"sliding_window": 2, "rotary": nnx.RotaryEmbedding(4)},
    "window as long as the cache": {"sliding_window": MAX_LENGTH},
    "sections, scale and soft cap": {
        **{"scale": 2.0, "logits_soft_cap": 0.5},
        **{"section_size": 4, "query_scale": nnx.models.PositionScale(length=2, slope=3.0)},
    },
    "sinks": {"use_sinks": True, "num_kv_heads": 2, "sliding_window": 3, "rotary": nnx.RotaryEmbedding(4)},
    "all": {
        "num_kv_heads": 1,
        "rotary": nnx.RotaryEmbedding(4, scaling=nnx.NTKScaling(2.0)),
        "sliding_window": 3,
        "normalize_qk": "rms",
        "scale": 3.0,
        "logits_soft_cap": 0.5,
        "use_out_bias": False,
    },
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


def attention(**options) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(4, FEATURES, ctx=nnx.context(0), **options)


def agree(out, expected) -> None:
    np.testing.assert_allclose(out, expected, atol=2e-5, rtol=1e-4)


@variants
@pytest.mark.parametrize("chunks", [[1] * 6, [3, 1, 1, 1], [3, 3]], ids=["tokens", "prompt then tokens", "chunks"])
def test_decoding_equals_the_full_pass(options, chunks):
    layer, x = attention(**options), numpy_normal(2, 6, FEATURES)
    cache, lengths, pieces = layer.make_cache(2, MAX_LENGTH), jnp.zeros(2, jnp.int32), []
    for length in chunks:
        start = int(lengths[0])
        out, cache = layer.decode_step(x[:, start : start + length], cache, lengths)
        pieces.append(out)
        lengths = lengths + length
    agree(np.concatenate(pieces, axis=1), layer(x, is_causal=True))


@pytest.mark.parametrize("name", ["grouped and rotary", "window", "all"])
def test_the_first_tokens_of_a_cache_that_is_promised_to_be_empty_attend_to_each_other(name):
    layer, x = attention(**VARIANTS[name]), numpy_normal(2, 6, FEATURES)
    cache, lengths, real = layer.make_cache(2, MAX_LENGTH), jnp.zeros(2, jnp.int32), jnp.array([6, 4])
    promised = dataclasses.replace(cache, is_empty=True)
    (out, kept), (expected, same) = (layer.decode_step(x, given, lengths, real) for given in (promised, cache))
    agree(out[0], expected[0])
    agree(out[1, :4], expected[1, :4])  # what padding attends to is nobody's concern
    jax.tree.map(np.testing.assert_array_equal, kept, same)
    assert not kept.is_empty


@pytest.mark.parametrize("window", [None, 2])
def test_a_bias_covers_the_slots_of_the_cache(window):
    layer, x = attention(sliding_window=window), numpy_normal(2, 6, FEATURES)
    bias = 3 * numpy_normal(4, 6, MAX_LENGTH, seed=1)
    cache, pieces = layer.make_cache(2, MAX_LENGTH), []
    for start, length in ((0, 4), (4, 1), (5, 1)):
        part = x[:, start : start + length]
        out, cache = layer.decode_step(part, cache, jnp.full(2, start), bias=bias[:, start : start + length])
        pieces.append(out)
    agree(np.concatenate(pieces, axis=1), layer(x, is_causal=True, bias=bias[..., :6]))


@pytest.mark.parametrize(
    "options", [{}, {"num_kv_heads": 2, "normalize_qk": "rms", "rotary": nnx.RotaryEmbedding(4), "scale": 2.0}]
)
def test_keys_that_are_projected_once_serve_many_queries(options):
    layer, x, source = attention(**options, in_kv_features=6), numpy_normal(2, 4, FEATURES), numpy_normal(2, 5, 6)
    mask = (np.arange(5) < np.array([[5], [3]]))[:, None, None]
    projected = layer.project_keys(source)
    parts = [
        layer.attend_projected(x[:, i : i + 2], projected, mask=mask, positions=jnp.arange(i, i + 2)) for i in (0, 2)
    ]
    agree(np.concatenate(parts, axis=1), layer(x, source, mask=mask))
    with pytest.raises(ValueError, match=r"expected inputs_k of shape \[batch..., length, 6\], got \(2, 4, 16\)"):
        layer.project_keys(x)


@variants
def test_ragged_rows_equal_each_row_alone(options):
    layer, texts = attention(**options), numpy_normal(2, 6, FEATURES)
    alone = np.asarray(layer(texts, is_causal=True))
    held = np.array([1, 3])
    prompt = texts[:, :3].copy()
    prompt[0, 1:] = np.nan  # padding must not reach the cache
    cache = layer.make_cache(2, MAX_LENGTH)
    out, cache = layer.decode_step(prompt, cache, jnp.zeros(2, jnp.int32), jnp.asarray(held))
    for row, n in enumerate(held):
        agree(out[row, :n], alone[row, :n])

    second = np.stack([texts[row, n : n + 3] for row, n in enumerate(held)])
    out, cache = layer.decode_step(second, cache, jnp.asarray(held), jnp.array([3, 2]))
    agree(out[0], alone[0, 1:4])
    agree(out[1, :2], alone[1, 3:5])

    token = np.stack([texts[0, 4, None], texts[1, 5, None]])
    out, cache = layer.decode_step(token, cache, jnp.array([4, 5]))
    agree(out[:, 0], [alone[0, 4], alone[1, 5]])


def test_any_number_of_batch_axes():
    for batch in ((), (2, 3)):
        layer, x = attention(), numpy_normal(*batch, 4, FEATURES)
        out, _ = layer.decode_step(x, layer.make_cache(batch, MAX_LENGTH), jnp.zeros(batch, jnp.int32))
        agree(out, layer(x, is_causal=True))


def test_the_layer_and_the_given_cache_do_not_change():
    layer, x = attention(), numpy_normal(2, 3, FEATURES)
    before, cache = layer.get_state(), layer.make_cache(2, MAX_LENGTH)
    layer.decode_step(x, cache, jnp.zeros(2, jnp.int32))
    assert layer.get_state() == before and layer.cache is None
    assert not cache.key.any()


def test_a_narrow_cache_keeps_its_dtype():
    layer, x = attention(), numpy_normal(2, 3, FEATURES)
    out, cache = layer.decode_step(x, layer.make_cache(2, MAX_LENGTH, jnp.bfloat16), jnp.zeros(2, jnp.int32))
    assert cache.key.dtype == jnp.bfloat16 and out.dtype == jnp.float32
    np.testing.assert_allclose(out, layer(x, is_causal=True), atol=0.05)


class TestOverflow:
    def test_eagerly_it_is_an_error_that_names_the_row(self):
        layer, x = attention(), numpy_normal(2, 3, FEATURES)
        with pytest.raises(ValueError, match="(?s)LayerCache is full.*max_length=8.*row 1 holds 6 tokens.*come to 9"):
            layer.decode_step(x, layer.make_cache(2, MAX_LENGTH), jnp.array([5, 6]))

    @pytest.mark.parametrize("window", [None, 2], ids=["all", "window"])
    def test_under_jit_the_row_turns_nan_and_stays_so(self, window):
        layer, x = attention(sliding_window=window), numpy_normal(2, 1, FEATURES)
        step = nnx.jit(lambda m, *args: m.decode_step(*args))
        cache, lengths = layer.make_cache(2, MAX_LENGTH), jnp.array([7, 2])
        out, cache = step(layer, x, cache, lengths)
        assert np.isfinite(out).all()  # the last slot of row 0
        for more in (1, 2, 3):
            out, cache = step(layer, x, cache, lengths + more)
            assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()
        assert np.isfinite(cache.key).all()  # no old key was lost
        assert step.trace_count == 1

    def test_a_decoder_cache_that_overflowed_says_so_outside(self):
        cache = nnx.DecoderCache.empty(2, 4, [(1, 2)])
        cache = jax.jit(lambda c: c.advanced(c.layers, jnp.array([5, 1])))(cache)
        with pytest.raises(ValueError, match="DecoderCache is full.*row 0 holds 5 tokens"):
            cache.check()


class TestDecoderCache:
    def test_cache_is_a_pytree_of_keys_values_and_lengths(self):
        cache = nnx.DecoderCache.empty(2, 4, [(1, 2), (3, 5)], dtype=jnp.bfloat16)
        shapes = [leaf.shape for leaf in jax.tree.leaves(cache)]
        assert shapes == [(2, 4, 1, 2)] * 2 + [(2, 4, 3, 5)] * 2 + [(2,)]
        assert cache.layers[1].key.dtype == jnp.bfloat16 and cache.lengths.dtype == jnp.int32
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(cache)]
        assert paths[0] == ".layers[0].key" and paths[-1] == ".lengths"

    def test_advancing_adds_one_number_or_one_per_row(self):
        cache = nnx.DecoderCache.empty(2, 4, [(1, 2)])
        assert cache.advanced(cache.layers, 2).lengths.tolist() == [2, 2]
        assert cache.advanced(cache.layers, jnp.array([0, 3])).lengths.tolist() == [0, 3]

    def test_bad_settings_are_errors(self):
        with pytest.raises(ValueError, match="floating-point"):
            nnx.DecoderCache.empty(2, 4, [(1, 2)], dtype=jnp.int8)
        with pytest.raises(ValueError, match="max_length >= 1, got 0"):
            nnx.DecoderCache.empty(2, 0, [(1, 2)])

    def test_wrong_shapes_say_expected_and_got(self):
        layer, x = attention(), numpy_normal(3, 1, FEATURES)
        with pytest.raises(ValueError, match=r"LayerCache: expected keys of shape \(2, length, 4, 4\)"):
            layer.decode_step(x, layer.make_cache(2, MAX_LENGTH), jnp.zeros(3, jnp.int32))
        with pytest.raises(ValueError, match=r"LayerCache: expected lengths of shape \(3,\), one per row, got \(2,\)"):
            layer.make_cache(3, 8).append(jnp.ones((3, 1, 4, 4)), jnp.ones((3, 1, 4, 4)), jnp.zeros(2, jnp.int32))


class TestAlignedRows:
    """A cache whose rows always hold equally many tokens writes a token into one slot of all rows."""

    def appended(self, cache: nnx.LayerCache, steps: list[int]) -> nnx.LayerCache:
        lengths = jnp.zeros(2, jnp.int32)
        for seed, length in enumerate(steps):
            key, value = numpy_normal(2, length, 4, 4, seed=seed), numpy_normal(2, length, 4, 4, seed=seed + 100)
            cache = jax.jit(lambda cache, *new: cache.append(*new))(cache, key, value, lengths)
            lengths = lengths + length
        return cache

    @pytest.mark.parametrize("steps", [[1] * 3, [3, 1, 1], [7, 1, 1]], ids=["tokens", "prompt", "overflow"])
    def test_the_cache_is_the_same(self, steps):
        plain = attention().make_cache(2, MAX_LENGTH)
        aligned = nnx.LayerCache(plain.key, plain.value, aligned=True)
        found, expected = self.appended(aligned, steps), self.appended(plain, steps)
        assert found.aligned and not expected.aligned
        np.testing.assert_array_equal(found.key, expected.key)
        np.testing.assert_array_equal(found.value, expected.value)
