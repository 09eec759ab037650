"""The key-value cache: decoding equals the full forward pass, and a full cache refuses."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from nnx.nn.attention.kv_cache import LANES, MOST_ROWS
from nnx.sharding.target import compiling_for
from tests.nn.arrays import numpy_normal

MAX_LENGTH = 8
FEATURES = 16


def attention(batch: tuple[int, ...] = (2,), **options) -> nnx.MultiHeadAttention:
    layer = nnx.MultiHeadAttention(4, FEATURES, ctx=nnx.context(0), **options)
    layer.init_cache((*batch, MAX_LENGTH, FEATURES))
    return layer


def decoded(layer: nnx.MultiHeadAttention, x: Any, chunks: list[int]) -> Any:
    """`x` through the cache, in pieces of these lengths."""
    pieces, start = [], 0
    for length in chunks:
        pieces.append(layer(x[..., start : start + length, :], decode=True))
        start += length
    return np.concatenate(pieces, axis=-2)


def agree(out, expected) -> None:
    np.testing.assert_allclose(out, expected, atol=2e-5, rtol=1e-4)


VARIANTS = {
    "plain": {},
    "grouped and rotary": {"num_kv_heads": 2, "rotary": nnx.RotaryEmbedding(4)},
    "all": {
        "num_kv_heads": 1,
        "rotary": nnx.RotaryEmbedding(4, scaling=nnx.NTKScaling(2.0)),
        "sliding_window": 4,
        "normalize_qk": "rms",
    },
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


class TestDecoding:
    @variants
    @pytest.mark.parametrize("chunks", [[1] * 6, [3, 1, 1, 1], [3, 3]], ids=["tokens", "prompt then tokens", "chunks"])
    def test_decoding_equals_the_full_pass(self, options, chunks):
        layer, x = attention(**options), numpy_normal(2, 6, FEATURES)
        agree(decoded(layer, x, chunks), layer(x, is_causal=True))
        assert layer.cache.index.tolist() == [6, 6]

    @pytest.mark.parametrize("batch", [(), (2, 3)], ids=["unbatched", "two batch axes"])
    def test_any_number_of_batch_axes(self, batch):
        layer, x = attention(batch), numpy_normal(*batch, 6, FEATURES)
        agree(decoded(layer, x, [3, 3]), layer(x, is_causal=True))

    @variants
    def test_ragged_prompts_equal_each_row_alone(self, options):
        layer, texts = attention(**options), numpy_normal(2, 6, FEATURES)
        alone = np.asarray(layer(texts, is_causal=True))

        lengths = [1, 3]
        prompt = texts[:, :3].copy()
        prompt[0, 1:] = 0.0
        out = np.asarray(layer(prompt, decode=True, seq_lengths=jnp.array(lengths)))
        for row, n in enumerate(lengths):
            agree(out[row, :n], alone[row, :n])
        for step in range(2):
            token = np.stack([texts[row, n + step, None] for row, n in enumerate(lengths)])
            out = np.asarray(layer(token, decode=True))
            for row, n in enumerate(lengths):
                agree(out[row, 0], alone[row, n + step])
        assert layer.cache.index.tolist() == [3, 5]

    def test_ragged_chunks_may_follow_each_other(self):
        layer, x = attention(**VARIANTS["grouped and rotary"]), numpy_normal(2, 6, FEATURES)
        full = layer(x, is_causal=True)
        layer(x[:, :3], decode=True, seq_lengths=jnp.array([3, 1]))
        second = np.stack([x[0, 3:6], x[1, 1:4]])
        out = layer(second, decode=True, seq_lengths=jnp.array([2, 3]))
        agree(out[0, :2], full[0, 3:5])
        agree(out[1], full[1, 1:4])

    def test_padding_never_reaches_the_cache(self):
        layer, x = attention(), numpy_normal(2, 3, FEATURES)
        poisoned = x.copy()
        poisoned[1, 1:] = np.nan
        layer(poisoned, decode=True, seq_lengths=jnp.array([3, 1]))
        assert np.isfinite(layer.cache.key).all() and np.isfinite(layer.cache.value).all()
        assert np.isfinite(layer(x[:, :1], decode=True)).all()

    def test_compiled_decoding_equals_the_full_pass_and_traces_once(self):
        layer = attention(num_kv_heads=2, rotary=nnx.RotaryEmbedding(4), decode=True)
        x = numpy_normal(2, 6, FEATURES)
        step = nnx.jit(lambda m, token: m(token))
        out = np.concatenate([step(layer, x[:, i : i + 1]) for i in range(6)], axis=1)
        agree(out, layer(x, is_causal=True, decode=False))
        assert step.trace_count == 1

    def test_a_scanned_stack_of_layers_decodes_like_its_full_pass(self):
        class Block(nnx.Module):
            def __init__(self, *, ctx):
                self.attention = attention(num_kv_heads=2)
                self.attention.query.kernel = self.attention.query.kernel + 0.1 * jax.random.normal(
                    ctx.make_rng("params"), (FEATURES, 4, 4)
                )

            def __call__(self, x, _, decode):
                return x + self.attention(x, is_causal=True, decode=decode), None

        make = nnx.Scan(Block, variable_axes={(nnx.Param, nnx.Cache): 0}, split_rngs="params", length=3)
        stack, x = make(ctx=nnx.context(0)), numpy_normal(2, 6, FEATURES)
        assert stack.scan_module.attention.cache.key.shape == (3, 2, MAX_LENGTH, 2, 4)
        full, _ = stack(x, None, False)
        first, _ = stack(x[:, :3], None, True)
        second, _ = stack(x[:, 3:], None, True)
        agree(np.concatenate([first, second], axis=1), full)
        assert stack.scan_module.attention.cache.index.tolist() == [[6, 6]] * 3

    def test_mask_covers_cache_slots(self):
        layer, x = attention(), numpy_normal(2, 6, FEATURES)
        layer(x[:, :3], decode=True)
        hide_first = (np.arange(MAX_LENGTH) > 0)[None, None, None]
        out = layer(x[:, 3:], decode=True, mask=hide_first)
        mask = np.tril(np.ones((6, 6), bool)) & (np.arange(6) > 0)
        agree(out, layer(x, mask=mask)[:, 3:])
        with pytest.raises(ValueError, match=r"last axis of max_length=8, got a mask of shape \(2, 1, 1, 3\)"):
            layer(x[:, 3:], decode=True, mask=np.ones((2, 1, 1, 3)))

    def test_weights_over_the_cache_can_be_sown(self):
        layer, x = attention(), numpy_normal(2, 3, FEATURES)
        layer(x, decode=True, sow_weights=True)
        assert layer.attention_weights[0].shape == (2, 4, 3, MAX_LENGTH)

    def test_the_cache_may_be_narrower_than_the_computation(self):
        layer, x = attention(), numpy_normal(2, 6, FEATURES)
        layer.init_cache((2, MAX_LENGTH, FEATURES), dtype=jnp.bfloat16)
        out = decoded(layer, x, [3, 3])
        assert layer.cache.key.dtype == jnp.bfloat16 and out.dtype == jnp.float32
        np.testing.assert_allclose(out, layer(x, is_causal=True), atol=0.05)

    def test_going_back_is_setting_the_index(self):
        layer, x = attention(**VARIANTS["grouped and rotary"]), numpy_normal(2, 6, FEATURES)
        decoded(layer, np.concatenate([x[:, :3], 9.0 + x[:, 3:]], axis=1), [3, 3])
        layer.cache.index = jnp.array([3, 3])
        agree(layer(x[:, 3:], decode=True), layer(x, is_causal=True)[:, 3:])

    def test_state_is_in_the_cache_collection_alone(self):
        layer = attention()
        assert set(layer.filter(nnx.Cache)) == {"cache/key", "cache/value", "cache/index"}
        assert layer.collections() == {"params", "cache"}

    def test_decoding_without_a_cache_raises_with_advice(self):
        layer = nnx.MultiHeadAttention(4, FEATURES, ctx=nnx.context(0), decode=True)
        with pytest.raises(ValueError, match=r"layer.init_cache\(\(batch, max_length, features\)\)"):
            layer(numpy_normal(2, 1, FEATURES))

    def test_cross_attention_is_not_cached(self):
        with pytest.raises(ValueError, match="(?s)self-attention: .* got 3 and 1.*decode=False"):
            attention()(numpy_normal(2, 1, FEATURES), numpy_normal(2, 3, FEATURES), decode=True)


def cache(**options) -> nnx.KVCache:
    return nnx.KVCache(2, 4, num_heads=1, head_dim=2, **options)


def tokens(length: int, batch: int = 2) -> jax.Array:
    return jnp.ones((batch, length, 1, 2))


class TestOverflow:
    def test_eagerly_it_is_an_error_and_nothing_is_written(self):
        layer, x = attention(), numpy_normal(2, 3, FEATURES)
        decoded(layer, np.concatenate([x, x], axis=1), [3, 3])
        before = layer.cache.key
        with pytest.raises(
            ValueError, match="(?s)max_length=8 tokens per row, row 0 holds 6 tokens and would come to 9.*reset"
        ):
            layer(x, decode=True)
        assert layer.cache.key is before
        assert layer.cache.index.tolist() == [6, 6]

    def test_the_row_that_overflows_is_named(self):
        held = cache()
        held.append(tokens(3), tokens(3), jnp.array([1, 3]))
        held.append(tokens(2), tokens(2), jnp.array([2, 1]))
        with pytest.raises(ValueError, match="row 1 holds 4 tokens and would come to 5"):
            held.append(tokens(1), tokens(1))

    def test_padding_may_hang_over_the_end(self):
        held = cache()
        held.append(tokens(3), tokens(3))
        held.append(2 * tokens(3), 2 * tokens(3), jnp.array([1, 0]))
        assert held.index.tolist() == [4, 3]
        assert held.key[0, :, 0, 0].tolist() == [1, 1, 1, 2]
        assert held.key[1, :, 0, 0].tolist() == [1, 1, 1, 0]

    def test_a_chunk_longer_than_the_cache_is_an_error_even_while_tracing(self):
        with pytest.raises(ValueError, match="max_length=4 tokens per row, got 5 tokens at once"):
            nnx.jit(lambda held: held.append(tokens(5), tokens(5)))(cache())

    @pytest.mark.parametrize("window", [None, 2], ids=["all", "window"])
    def test_under_jit_the_row_turns_nan_and_stays_so(self, window):
        layer = attention(sliding_window=window)
        step = nnx.jit(lambda m, token: m(token, decode=True))
        x = numpy_normal(2, 1, FEATURES)
        layer.cache.index = jnp.array([7, 2])
        assert np.isfinite(step(layer, x)).all()  # the last slot of row 0
        for _ in range(3):
            out = step(layer, x)
            assert np.isnan(out[0]).all()
            assert np.isfinite(out[1]).all()
        assert layer.cache.overflowed.tolist() == [True, False]
        assert np.isfinite(layer.cache.key).all()  # no old key was lost

    def test_no_mask_hides_that_a_row_overflowed(self):
        layer, x = attention(), numpy_normal(2, 1, FEATURES)
        layer.cache.index = jnp.array([8, 2])
        nothing = jnp.zeros((1, MAX_LENGTH), bool)
        out = nnx.jit(lambda m, token: m(token, decode=True, mask=nothing))(layer, x)
        assert np.isnan(out[0]).all()
        agree(out[1, 0], layer.out.bias)

    @pytest.mark.parametrize("window", [None, 1, 3])
    def test_a_position_past_the_end_sees_the_last_slot(self, window):
        assert cache().mask(jnp.array([[3], [9]]), window)[..., -1].all()

    def test_under_jit_a_chunk_that_fits_only_in_part_turns_the_row_nan(self):
        layer = attention()
        layer.cache.index = jnp.array([6, 1])
        out = nnx.jit(lambda m, x: m(x, decode=True))(layer, numpy_normal(2, 3, FEATURES))
        assert np.isnan(out[0]).all()
        assert np.isfinite(out[1]).all()

    def test_outside_again_it_is_an_error(self):
        held = cache()
        append = nnx.jit(lambda held, token: held.append(token, token))
        for _ in range(5):
            append(held, tokens(1))
        with pytest.raises(ValueError, match="row 0 holds 5 tokens"):
            held.check()
        with pytest.raises(ValueError, match="KVCache is full"):
            held.append(tokens(1), tokens(1))
        held.reset()
        held.check()
        assert held.index.tolist() == [0, 0]
        assert np.isfinite(held.append(tokens(1), tokens(1))[1]).all()

    def test_going_back_after_an_overflow_does_not_hide_it(self):
        held = cache()
        append = nnx.jit(lambda held, token: held.append(token, token))
        for _ in range(5):
            append(held, tokens(1))
        held.index = jnp.array([4, 2])  # row 0 would need the token in the last slot, which is lost
        assert held.overflowed.tolist() == [True, True]
        with pytest.raises(ValueError, match="row 0 got more tokens than max_length=4.*reset or a longer cache"):
            held.check()
        held.index = jnp.array([2, 2])
        append(held, tokens(1))
        assert held.overflowed.tolist() == [True, True]
        _, values = append(held, tokens(1))  # into the last slot
        assert held.overflowed.tolist() == [False, False] and np.isfinite(values).all()
        held.check()

    def test_going_back_into_a_chunk_that_overflowed_does_not_hide_it(self):
        held = cache()
        held.append(tokens(2), tokens(2))
        append = nnx.jit(lambda held, token: held.append(token, token))
        append(held, tokens(3))  # the first two of them have slots
        held.index = jnp.array([3, 3])
        append(held, tokens(1))  # into the last slot
        assert np.isnan(held.value[:, 2]).all() and held.overflowed.tolist() == [True, True]
        with pytest.raises(ValueError, match="row 0 got more tokens than max_length=4"):
            held.check()
        held.index = jnp.array([2, 2])
        append(held, tokens(2))
        assert not held.overflowed.any() and np.isfinite(held.value).all()

    def test_a_nan_that_the_model_computed_is_not_an_overflow(self):
        held = cache()
        held.append(jnp.nan * tokens(4), jnp.nan * tokens(4))
        assert not held.overflowed.any()


class TestIndexBelowZero:
    @pytest.mark.parametrize("lengths", [None, [1, 1]])
    def test_it_is_an_error_and_nothing_is_written(self, lengths):
        held, lengths = cache(), None if lengths is None else jnp.array(lengths)
        held.index = jnp.array([1, -1])
        before = held.key
        with pytest.raises(ValueError, match=r"KVCache: expected an index of 0 or more.*got \[1, -1\]. Nothing was"):
            held.append(tokens(1), tokens(1), lengths)
        with pytest.raises(ValueError, match="index of 0 or more"):
            held.check()
        assert held.key is before
        with pytest.raises(ValueError, match=r"LayerCache: expected lengths of 0 or more"):
            nnx.LayerCache.empty(2, 8, 1, 2).append(tokens(1), tokens(1), jnp.array([1, -1]))

    @pytest.mark.parametrize("window", [None, 2], ids=["all", "window"])
    def test_while_tracing_the_row_becomes_nan_and_no_token_is_overwritten(self, window):
        layer = attention(sliding_window=window)
        decoded(layer, numpy_normal(2, 6, FEATURES), [6])
        before = np.asarray(layer.cache.value[:, :6])
        step = nnx.jit(lambda m, x: m(x, decode=True))
        for start, length in ((-2, 1), (-2, 2), (-1, 3)):
            layer.cache.index = jnp.array([start, 5])
            out = step(layer, numpy_normal(2, length, FEATURES))
            assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()
            np.testing.assert_array_equal(layer.cache.value[0, :6], before[0])
            assert layer.cache.overflowed.tolist() == [True, False]

    def test_a_layer_cache_poisons_the_row_too(self):
        layer, x = attention(), numpy_normal(2, 1, FEATURES)
        for aligned in (False, True):
            held = dataclasses.replace(layer.make_cache(2, MAX_LENGTH), aligned=aligned)
            out, _ = nnx.jit(lambda m, *args: m.decode_step(*args))(layer, x, held, jnp.array([-1, -1]))
            assert np.isnan(out).all()


class TestShapes:
    def test_wrong_keys_say_expected_and_got(self):
        with pytest.raises(ValueError, match=r"expected keys of shape \(2, length, 1, 2\) .* got \(2, 1, 1, 3\)"):
            cache().append(jnp.ones((2, 1, 1, 3)), tokens(1))
        with pytest.raises(ValueError, match=r"expected values of shape \(2, length, 1, 2\)"):
            cache().append(tokens(1), tokens(1, batch=3))
        with pytest.raises(ValueError, match="as many keys as values"):
            cache().append(tokens(1), tokens(2))

    def test_wrong_lengths_say_expected_and_got(self):
        with pytest.raises(ValueError, match=r"seq_lengths of shape \(2,\), one per row, got \(\)"):
            cache().append(tokens(1), tokens(1), jnp.array(1))

    def test_a_cache_of_integers_could_not_be_poisoned(self):
        with pytest.raises(ValueError, match="floating-point"):
            cache(dtype=jnp.int8)

    def test_values_may_have_another_size(self):
        held = cache(value_dim=3)
        keys, values = held.append(tokens(1), jnp.ones((2, 1, 1, 3)))
        assert keys.shape == (2, 4, 1, 2) and values.shape == (2, 4, 1, 3)


class TestImpossibleLengths:
    @pytest.mark.parametrize("lengths", [[2, -1], [4, 1]])
    def test_they_are_an_error_and_nothing_is_written(self, lengths):
        held = cache()
        with pytest.raises(ValueError, match=r"seq_lengths from 0 to 3.*got \[.*Nothing was written"):
            held.append(tokens(3), tokens(3), jnp.array(lengths))
        assert held.index.tolist() == [0, 0]
        layer = nnx.LayerCache.empty(2, 8, 1, 2)
        with pytest.raises(ValueError, match="LayerCache: expected seq_lengths from 0 to 3"):
            layer.append(tokens(3), tokens(3), jnp.array([0, 0]), jnp.array(lengths))

    @pytest.mark.parametrize("lengths", [[2, -1], [2, 4]])
    def test_while_tracing_they_poison_the_row(self, lengths):
        held = cache()
        append = nnx.jit(lambda held, lengths: held.append(tokens(3), tokens(3), lengths))
        append(held, jnp.array(lengths))
        assert held.overflowed.tolist() == [False, True]
        assert held.index[0] == 2
        assert not jnp.isnan(held.value[0]).any() and jnp.isnan(held.value[1]).any()
        with pytest.raises(ValueError, match="row 1"):
            held.check()


@pytest.mark.parametrize("features, rows", [(6, 3), (6, MOST_ROWS + 1), (LANES, 3)])
@pytest.mark.parametrize("ragged", [False, True])
def test_tokens_are_written_alike_for_tpus(features, rows, ragged):
    cache = nnx.LayerCache.empty(rows, 5, 2, features)
    tokens = jnp.arange(1.0, 1 + 2 * rows * features).reshape(rows, 1, 2, features)
    lengths = jnp.arange(rows) % 7 - 1  # some below zero, and some beyond the cache
    real = jnp.arange(rows) % 3 // 2 if ragged else None

    @jax.jit
    def append(cache, tokens, lengths):
        return cache.append(tokens, -tokens, lengths, real)

    expected = append(cache, tokens, lengths)
    with compiling_for("tpu"):
        found = append(cache, tokens, lengths)
        assert "scatter" not in append.lower(cache, tokens, lengths).as_text() or features == LANES
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("aligned", [False, True])
def test_lowering_decides_how_a_token_is_written(aligned):
    features = LANES if aligned else 6
    cache = dataclasses.replace(nnx.LayerCache.empty(3, 5, 2, features), aligned=aligned)
    token = jnp.ones((3, 1, 2, features))
    traced = jax.jit(lambda cache: cache.append(token, token, jnp.arange(3))).trace(cache)
    texts = {platform: traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda", "tpu")}
    scattered = {platform for platform, text in texts.items() if "stablehlo.scatter" in text}
    assert scattered == ({"tpu"} if aligned else {"cpu", "cuda"})


def test_rows_that_are_aligned_are_written_alike_for_tpus():
    for features in (6, LANES):
        cache = dataclasses.replace(nnx.LayerCache.empty(3, 5, 2, features), aligned=True)
        tokens, lengths = jnp.ones((3, 1, 2, features)), jnp.full(3, 2)
        expected = cache.append(tokens, 2 * tokens, lengths)
        with compiling_for("tpu"):
            jax.tree.map(np.testing.assert_array_equal, cache.append(tokens, 2 * tokens, lengths), expected)
