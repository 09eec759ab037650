"""Attention of a query that may see no key: zeros, and no gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnx
from tests.nn.arrays import numpy_normal
from tests.nn.attention_by_hand import agrees, by_hand

QUERY, KEY, VALUE = numpy_normal(2, 5, 4, 8), numpy_normal(2, 6, 2, 8, seed=1), numpy_normal(2, 6, 2, 8, seed=2)

bodies = pytest.mark.parametrize("precision", [None, "highest"], ids=["delegated", "explicit"])


def hidden(*shape: int, at) -> np.ndarray:
    """A mask that hides only what is `at` this index."""
    mask = np.ones(shape, bool)
    mask[at] = False
    return mask


def visible_keys(query_length, key_length, mask=None, lengths=None, is_causal=False, window=None) -> np.ndarray:
    """Which keys the arguments leave visible, `[batch, heads, query_length, key_length]`."""
    queries, keys = np.arange(query_length)[:, None], np.arange(key_length)
    visible = np.ones((2, 4, query_length, key_length), bool)
    if mask is not None:
        visible = visible & mask
    if lengths is not None:
        visible = visible & (keys < np.asarray(lengths)[:, None, None, None])
    if is_causal:
        visible = visible & (keys <= queries)
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        visible = visible & (queries - left <= keys) & (keys <= queries + right)
    return visible


CASES = {
    "mask of queries and keys": {"mask": hidden(5, 6, at=2)},
    "mask of keys": {"mask": hidden(2, 1, 1, 6, at=1)},
    "mask of one head": {"mask": hidden(4, 5, 6, at=(3, 1))},
    "mask of everything": {"mask": np.zeros(6, bool)},
    "mask of the key that causality leaves": {"mask": hidden(6, at=0), "is_causal": True},
    "length 0": {"lengths": [0, 4]},
    "length 0 and causality": {"lengths": [6, 0], "is_causal": True},
    "window past the length": {"lengths": [2, 6], "window": (1, 0)},
    "window past the last key": {"key_length": 2, "window": 1},
    "window before the first key": {"window": (2, -1)},
    "window of nothing": {"window": (-1, 0)},
    "no keys": {"key_length": 0},
    "no keys under a mask": {"key_length": 0, "mask": np.ones((5, 1), bool)},
}


class TestFunction:
    @bodies
    @pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
    def test_it_returns_zeros_and_passes_no_gradient(self, case, precision):
        options = dict(case)
        key_length = options.pop("key_length", 6)
        visible = visible_keys(5, key_length, **options)
        unseen = ~visible.any(-1).swapaxes(1, 2)
        assert unseen.any()

        def attend(query, key, value):
            return nnx.dot_product_attention(
                query,
                key,
                value,
                precision=precision,
                mask=options.get("mask"),
                is_causal=options.get("is_causal", False),
                key_value_seq_lengths=jnp.array(options["lengths"]) if "lengths" in options else None,
                local_window_size=options.get("window"),
            )

        arrays = QUERY, KEY[:, :key_length], VALUE[:, :key_length]
        out, pull_back = jax.vjp(attend, *arrays)
        agrees(out, by_hand(*arrays, visible))
        assert (np.asarray(out)[unseen] == 0).all()
        of_unseen = pull_back(jnp.broadcast_to(unseen[..., None], out.shape).astype(out.dtype))
        assert all((np.asarray(gradient) == 0).all() for gradient in of_unseen)
        of_all = pull_back(jnp.ones_like(out))
        assert all(np.isfinite(gradient).all() for gradient in of_all)
        assert (np.asarray(of_all[0])[unseen] == 0).all()

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_in_half_precision_it_returns_zeros_of_that_dtype(self, dtype):
        query, key, value = (jnp.asarray(numpy_normal(2, 6, 2, 8, seed=i), dtype) for i in range(3))
        mask = hidden(2, 1, 6, 6, at=(0, 0, slice(2, 4)))

        def loss(query, key, value):
            out = nnx.dot_product_attention(query, key, value, mask=mask)
            return out.astype(jnp.float32).sum(), out

        gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(query, key, value)
        assert out.dtype == dtype
        agrees(out, by_hand(query, key, value, mask), atol=2e-2)
        assert (np.asarray(out[0, 2:4], np.float32) == 0).all()
        assert (np.asarray(gradients[0][0, 2:4], np.float32) == 0).all()
        assert all(np.isfinite(np.asarray(gradient, np.float32)).all() for gradient in gradients)

    def test_its_weights_are_zeros(self):
        module = nnx.Module()
        nnx.dot_product_attention(QUERY, KEY, VALUE, mask=hidden(5, 6, at=2), module=module)
        (weights,) = module.attention_weights
        np.testing.assert_allclose(weights.sum(-1), np.broadcast_to([1, 1, 0, 1, 1], (2, 4, 5)), rtol=1e-5)

    @pytest.mark.parametrize(
        "options",
        [{}, {"is_causal": True}, {"is_causal": True, "local_window_size": 2}, {"local_window_size": (0, 3)}],
        ids=str,
    )
    def test_attention_that_always_sees_a_key_pays_nothing(self, options):
        def selections(attend) -> int:
            return str(jax.make_jaxpr(lambda *arrays: attend(*arrays, **options))(QUERY, KEY, VALUE)).count("select_n")

        assert selections(nnx.dot_product_attention) == selections(jax.nn.dot_product_attention)

    @settings(max_examples=40)
    @given(
        seed=st.integers(0, 2**32 - 1),
        density=st.sampled_from([0.1, 0.5]),
        lengths=st.tuples(st.integers(0, 6), st.integers(0, 6)),
        is_causal=st.booleans(),
        window=st.sampled_from([None, (1, 0), (0, 2)]),
        precision=st.sampled_from([None, "highest"]),
    )
    def test_any_masks_agree_with_the_definition(self, seed, density, lengths, is_causal, window, precision):
        mask = np.random.default_rng(seed).random((2, 4, 5, 6)) < density
        out = nnx.dot_product_attention(
            QUERY,
            KEY,
            VALUE,
            mask=jnp.asarray(mask),
            is_causal=is_causal,
            key_value_seq_lengths=jnp.array(lengths),
            local_window_size=window,
            precision=precision,
        )
        agrees(out, by_hand(QUERY, KEY, VALUE, visible_keys(5, 6, mask, lengths, is_causal, window)))


@bodies
def test_a_promise_that_every_query_sees_a_key_saves_the_pass_over_the_output(precision):
    def attend(lengths, **options):
        return nnx.dot_product_attention(
            QUERY, KEY, VALUE, key_value_seq_lengths=lengths, precision=precision, **options
        )

    lengths = jnp.array([3, 6])
    agrees(attend(lengths, assume_seen=True), np.asarray(attend(lengths)))
    checked, promised = (
        jax.jit(lambda lengths, seen=seen: attend(lengths, assume_seen=seen)).lower(lengths).as_text()
        for seen in (False, True)
    )
    assert promised.count("stablehlo.select") == checked.count("stablehlo.select") - 1


class TestMultiHeadAttention:
    @staticmethod
    def layer(**options) -> nnx.MultiHeadAttention:
        return nnx.MultiHeadAttention(4, 16, bias_init=nnx.initializers.ones(), ctx=nnx.context(0), **options)

    @pytest.mark.parametrize(
        "options", [{"mask": hidden(2, 1, 1, 5, at=0)}, {"seq_lengths": jnp.array([0, 5])}], ids=["mask", "seq_lengths"]
    )
    def test_its_output_is_the_bias_of_the_output_projection(self, options):
        layer, x = self.layer(), numpy_normal(2, 5, 16)
        out = layer(x, **options)
        agrees(out[0], np.ones((5, 16)))
        agrees(out[1], np.asarray(layer(x[1])))

        gradients = nnx.grad(lambda m: m(x, **options)[0].sum(), wrt=nnx.Param)(layer)
        for path, leaf in gradients.items():
            expected = 5.0 if path == "out/bias" else 0.0
            np.testing.assert_array_equal(leaf.value, np.full(leaf.value.shape, expected), err_msg=path)

    @pytest.mark.parametrize("chunks", [[4], [1, 1, 1, 1]], ids=["prompt", "tokens"])
    def test_decoding_leaves_out_padding_on_the_left(self, chunks):
        layer, x = self.layer(), numpy_normal(2, 4, 16)
        layer.init_cache((2, 6, 16))
        real = hidden(2, 1, 1, 6, at=(0, 0, 0, slice(2)))  # row 0 starts with two tokens of padding
        ends = np.cumsum(chunks)
        pieces = [layer(x[:, end - n : end], decode=True, mask=real) for n, end in zip(chunks, ends, strict=True)]
        out = np.concatenate(pieces, axis=1)
        agrees(out[0, :2], np.ones((2, 16)))
        agrees(out[0, 2:], np.asarray(layer(x[0, 2:], is_causal=True)))
        agrees(out[1], np.asarray(layer(x[1], is_causal=True)))
