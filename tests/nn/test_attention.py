"""Dot-product attention, the choice of its kernel, and multi-head attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import nnx
from nnx.sharding.target import compiling_for
from tests.nn.arrays import numpy_normal
from tests.nn.attention_by_hand import agrees, by_hand

QUERY, KEY, VALUE = numpy_normal(2, 5, 4, 8), numpy_normal(2, 6, 2, 8, seed=1), numpy_normal(2, 6, 2, 8, seed=2)


bodies = pytest.mark.parametrize("precision", [None, "highest"], ids=["delegated", "explicit"])


class TestFunction:
    def test_grouped_heads_agree_with_the_definition(self):
        agrees(nnx.dot_product_attention(QUERY, KEY, VALUE), by_hand(QUERY, KEY, VALUE))

    @pytest.mark.parametrize("batch", [(), (2, 3)], ids=["unbatched", "two batch axes"])
    def test_any_number_of_batch_axes(self, batch):
        query, key, value = (
            numpy_normal(*batch, 3, 4, 8),
            numpy_normal(*batch, 3, 2, 8, seed=1),
            numpy_normal(*batch, 3, 2, 8, seed=2),
        )
        mask = (numpy_normal(*batch, 1, 3, 3, seed=3) > -0.5) | np.eye(3, dtype=bool)
        out = nnx.dot_product_attention(query, key, value, mask=mask)
        agrees(out, by_hand(query, key, value, mask))

    @bodies
    def test_everything_that_hides_keys(self, precision):
        causal = np.tril(np.ones((5, 6), bool))
        window = np.abs(np.subtract.outer(np.arange(5), np.arange(6))) <= 2
        lengths = jnp.array([6, 3])
        real = np.arange(6) < np.asarray(lengths)[:, None, None, None]
        out = nnx.dot_product_attention(
            QUERY,
            KEY,
            VALUE,
            precision=precision,
            is_causal=True,
            local_window_size=2,
            key_value_seq_lengths=lengths,
        )
        agrees(out, by_hand(QUERY, KEY, VALUE, causal & window & real))

    @bodies
    def test_bias_scale_and_query_lengths(self, precision):
        bias = numpy_normal(4, 5, 6, seed=4)
        out = nnx.dot_product_attention(
            QUERY, KEY, VALUE, bias, precision=precision, scale=0.3, query_seq_lengths=jnp.array([5, 2])
        )
        expected = by_hand(QUERY, KEY, VALUE, bias=bias, scale=0.3)
        agrees(out[0], expected[0])
        agrees(out[1, :2], expected[1, :2])
        assert (np.asarray(out[1, 2:]) == 0).all()

    def test_a_soft_cap_bends_the_scaled_logits_before_bias_and_mask(self):
        causal, bias = np.tril(np.ones((5, 6), bool)), numpy_normal(4, 5, 6, seed=4)
        options = {"is_causal": True, "scale": 0.7, "logits_soft_cap": 1.5}
        out = nnx.dot_product_attention(QUERY, KEY, VALUE, bias, **options)
        agrees(out, by_hand(QUERY, KEY, VALUE, causal, bias, scale=0.7, soft_cap=1.5))

    @pytest.mark.parametrize("sinks", [[0.0, 1.5, -2.0, 40.0], [-np.inf] * 4], ids=["several", "without effect"])
    def test_sinks_take_their_part_of_the_softmax(self, sinks):
        causal, bias = np.tril(np.ones((5, 6), bool)), numpy_normal(4, 5, 6, seed=4)
        options = {"is_causal": True, "scale": 0.7, "logits_soft_cap": 1.5, "sinks": jnp.asarray(sinks)}
        out = nnx.dot_product_attention(QUERY, KEY, VALUE, bias, **options)
        expected = by_hand(QUERY, KEY, VALUE, causal, bias, scale=0.7, soft_cap=1.5, sinks=sinks)
        agrees(out, expected)
        if sinks[0] == -np.inf:
            agrees(nnx.dot_product_attention(QUERY, KEY, VALUE, bias, **{**options, "sinks": None}), expected)

    def test_sinks_have_the_gradient_of_a_key_with_a_value_of_zero(self):
        query, key, value = QUERY[..., :2, :], KEY[..., :1, :], VALUE[..., :1, :]

        def with_a_key(query, key, value, sinks):
            # The last feature of the queries is one, so that the last one of the extra key is its logit.
            query = jnp.concatenate([query, jnp.ones_like(query[..., :1])], -1)
            key = jnp.concatenate([key, jnp.zeros_like(key[..., :1])], -1)
            extra = jnp.zeros_like(key[..., :1, :, :]).at[..., -1].set(sinks)
            value = jnp.concatenate([value, jnp.zeros_like(value[..., :1, :, :])], -3)
            key = jnp.concatenate([key, extra], -3)
            return nnx.dot_product_attention(query, key, value, scale=1.0)

        def with_a_sink(query, key, value, sinks):
            return nnx.dot_product_attention(query, key, value, scale=1.0, sinks=jnp.broadcast_to(sinks, (2,)))

        def gradients(function):
            weigh = numpy_normal(2, 5, 2, 8, seed=7)
            return jax.grad(lambda *args: (weigh * function(*args)).sum(), (0, 1, 2, 3))(query, key, value, 0.3)

        for ours, expected in zip(gradients(with_a_sink), gradients(with_a_key), strict=True):
            agrees(ours, np.asarray(expected))

    def test_a_query_that_sees_no_key_returns_zeros_next_to_a_sink(self):
        def attended(sinks, **options):
            return nnx.dot_product_attention(QUERY, KEY, VALUE, jnp.zeros(()), sinks=sinks, **options)

        sinks, mask = jnp.array([-9e9, 0.0, 1.0, -jnp.inf]), jnp.zeros((5, 6), bool).at[1:].set(True)
        agrees(attended(sinks, mask=mask), by_hand(QUERY, KEY, VALUE, mask, sinks=np.asarray(sinks)))
        assert (np.asarray(attended(sinks, mask=mask))[:, 0] == 0).all()
        grads = jax.grad(lambda sinks: attended(sinks, mask=mask).sum())(sinks)
        assert np.isfinite(grads).all()

    def test_sinks_in_half_precision_and_in_the_recorded_weights(self):
        module, sinks = nnx.Module(), jnp.array([0.0, 1.0, 2.0, 3.0], jnp.bfloat16)
        query, key, value = (jnp.asarray(x, jnp.bfloat16) for x in (QUERY, KEY, VALUE))
        out = nnx.dot_product_attention(query, key, value, sinks=sinks, module=module)
        assert out.dtype == jnp.bfloat16
        agrees(out, by_hand(query, key, value, sinks=np.asarray(sinks, np.float64)), atol=2e-2)
        assert (module.attention_weights[0].sum(-1) < 1).all()

    def test_sinks_that_do_not_fit_are_refused(self):
        with pytest.raises(ValueError, match=r"expected sinks of shape \(4,\), one logit per query head, got \(2,\)"):
            nnx.dot_product_attention(QUERY, KEY, VALUE, sinks=jnp.zeros(2))

    def test_masks_need_not_be_boolean(self):
        mask = nnx.make_causal_mask(jnp.zeros((2, 5)))
        agrees(
            nnx.dot_product_attention(QUERY, KEY[:, :5], VALUE[:, :5], mask=mask),
            by_hand(QUERY, KEY[:, :5], VALUE[:, :5], mask),
        )

    def test_values_may_have_another_head_size(self):
        value = numpy_normal(2, 6, 2, 3, seed=5)
        agrees(nnx.dot_product_attention(QUERY, KEY, value), by_hand(QUERY, KEY, value))

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    @pytest.mark.parametrize("module", [None, nnx.Module()], ids=["delegated", "explicit"])
    def test_softmax_is_in_float32(self, dtype, module):
        # With 512 equal logits of 40 or so, a softmax in bfloat16 would be off by several percent.
        query, key = jnp.full((1, 1, 8), 4.0, dtype), jnp.full((512, 1, 8), 4.0, dtype)
        value = numpy_normal(512, 1, 8, dtype=dtype)
        out = nnx.dot_product_attention(query, key, value, module=module)
        assert out.dtype == dtype
        agrees(out, by_hand(query, key, value), atol=3e-3)

    def test_gradients_of_both_bodies_agree(self):
        def loss(query, precision):
            return nnx.dot_product_attention(query, KEY, VALUE, is_causal=True, precision=precision).sum()

        agrees(jax.grad(loss)(QUERY, None), np.asarray(jax.grad(loss)(QUERY, "highest")))

    def test_dropout_drops_and_rescales(self):
        value = jnp.ones((1, 64, 1, 1))
        query = key = jnp.zeros((1, 64, 1, 1))
        rng = jax.random.key(0)
        out = nnx.dot_product_attention(query, key, value, dropout_rng=rng, dropout_rate=0.5)
        assert float(out.std()) > 0.05
        assert float(out.mean()) == pytest.approx(1.0, abs=0.1)
        again = nnx.dot_product_attention(query, key, value, dropout_rng=rng, dropout_rate=0.5, deterministic=True)
        agrees(again, np.ones((1, 64, 1, 1)))

    def test_dropout_is_shared_by_rows_and_heads_only_if_broadcast(self):
        query = key = jnp.zeros((2, 8, 3, 4))
        value = jnp.ones((2, 8, 3, 4))
        options = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.5}
        shared = nnx.dot_product_attention(query, key, value, **options)
        np.testing.assert_array_equal(shared[0], shared[1])
        np.testing.assert_array_equal(shared[:, :, 0], shared[:, :, 1])
        own = nnx.dot_product_attention(query, key, value, broadcast_dropout=False, **options)
        assert not np.array_equal(own[0], own[1])
        assert not np.array_equal(own[:, :, 0], own[:, :, 1])

    def test_dropout_without_key_raises_with_advice(self):
        with pytest.raises(ValueError, match=r"dropout_rng=ctx.make_rng\('dropout'\)"):
            nnx.dot_product_attention(QUERY, KEY, VALUE, dropout_rate=0.5)

    def test_weights_are_sown_into_the_module(self):
        module = nnx.Module()
        nnx.dot_product_attention(QUERY, KEY, VALUE, module=module)
        (weights,) = module.attention_weights
        assert weights.shape == (2, 4, 5, 6)
        np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-5)

    @pytest.mark.parametrize(
        "shapes, message",
        [
            (((2, 5, 4, 8), (2, 6, 2, 7), (2, 6, 2, 8)), "head_dim=8, got 7"),
            (((2, 5, 4, 8), (2, 6, 3, 8), (2, 6, 3, 8)), "multiple of that of key heads"),
            (((2, 5, 4, 8), (2, 6, 2, 8), (2, 5, 2, 8)), "one value per key"),
            (((2, 5, 4, 8), (1, 6, 2, 8), (1, 6, 2, 8)), "same leading axes"),
            (((5, 8), (6, 8), (6, 8)), "three arrays"),
        ],
    )
    def test_shapes_that_do_not_fit_are_refused(self, shapes, message):
        with pytest.raises(ValueError, match=f"dot_product_attention: expected .*{message}"):
            nnx.dot_product_attention(*(jnp.ones(shape) for shape in shapes))

    @pytest.mark.parametrize("name", ["mask", "bias"])
    def test_masks_and_biases_that_do_not_fit_are_refused(self, name):
        with pytest.raises(
            ValueError, match=rf"expected a {name} that broadcasts to .* \(2, 4, 5, 6\), got \(2, 5, 6\)"
        ):
            nnx.dot_product_attention(QUERY, KEY, VALUE, **{name: jnp.ones((2, 5, 6))})

    def test_lengths_that_do_not_fit_are_refused(self):
        with pytest.raises(ValueError, match=r"key_value_seq_lengths of shape \(2,\), one per row, got \(3,\)"):
            nnx.dot_product_attention(QUERY, KEY, VALUE, key_value_seq_lengths=jnp.array([1, 2, 3]))


def struct(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


class TestImplementation:
    @staticmethod
    def choice(q=(8, 128, 12, 64), k=None, dtype=jnp.bfloat16, platform="gpu", capability="9.0", **options) -> str:
        query, key = struct(*q, dtype=dtype), struct(*(k or q), dtype=dtype)
        return nnx.attention_implementation(
            query, key, key, platform=platform, compute_capability=capability, **options
        )

    def test_half_precision_on_a_gpu_is_fused(self):
        assert self.choice() == "cudnn"
        assert self.choice(dtype=jnp.float16, is_causal=True) == "cudnn"
        assert self.choice(is_causal=True, local_window_size=(31, 0)) == "cudnn"
        assert self.choice(k=(8, 128, 4, 64)) == "cudnn"
        assert self.choice(mask=struct(8, 1, 128, 128, dtype=bool)) == "cudnn"
        assert self.choice(bias=struct(12, 128, 128)) == "cudnn"

    def test_long_texts_on_a_tpu_are_fused(self):
        choice = functools.partial(self.choice, platform="tpu")
        assert choice() == self.choice(platform="cpu") == "xla"  # 128 tokens
        long = (2, 2048, 8, 64)
        assert choice(q=long) == choice(q=long, is_causal=True, logits_soft_cap=3.0) == "splash"
        assert (
            choice(q=long, is_causal=True, local_window_size=(31, 0)) == choice(q=long, k=(2, 128, 2, 64)) == "splash"
        )
        assert self.choice(q=long, platform="cpu") == "xla"

    def test_unsupported_options_of_the_kernel_of_tpus_fall_back(self):
        long = (2, 2048, 8, 64)
        choice = functools.partial(self.choice, platform="tpu", q=long)
        assert choice(dtype=jnp.float32) == choice(k=(2, 100, 2, 64)) == choice(q=(2, 2048, 8, 80)) == "xla"
        for option in ("dropout", "weights", "sinks"):
            assert choice(**{option: True}) == "xla"
        assert choice(precision="highest") == choice(mask=struct(2, 1, 2048, 2048, dtype=bool)) == "xla"
        assert choice(k=(2, 1024, 8, 64), local_window_size=(31, 0)) == "xla"

    def test_the_platform_is_that_of_jax_by_default(self):
        expected = "cudnn" if jax.default_backend() == "gpu" else "xla"
        assert self.choice(platform=None, capability=None) == expected

    def test_unsupported_options_of_the_kernel_fall_back(self):
        assert self.choice(dtype=jnp.float32) == "xla"
        assert self.choice(capability="7.5") == "xla"
        assert self.choice(capability="gfx942") == "xla"
        assert self.choice(q=(8, 128, 12, 60)) == "xla"
        assert self.choice(q=(8, 128, 12, 264)) == "xla"
        assert self.choice(q=(8, 128, 12, 256)) == "cudnn"
        assert self.choice(q=(8, 128, 12, 256), capability="8.0") == "xla"
        assert self.choice(k=(8, 0, 12, 64)) == "xla"
        assert self.choice(q=(8, 0, 12, 64), k=(8, 128, 12, 64)) == "xla"
        assert self.choice(dropout=True) == "xla"
        assert self.choice(weights=True) == "xla"
        assert self.choice(is_causal=True, sinks=True) == "xla"
        assert self.choice(precision="highest") == "xla"
        assert self.choice(local_window_size=4) == "xla"
        assert self.choice(k=(8, 64, 12, 64), is_causal=True, local_window_size=4) == "xla"
        assert self.choice(q=(8, 127, 12, 64), mask=struct(8, 1, 127, 127, dtype=bool)) == "xla"

    def test_a_bias_the_kernel_would_not_differentiate_falls_back(self):
        assert self.choice(bias=struct(8, 12, 128, 128)) == "xla"
        assert self.choice(bias=struct(1, 1, 128, 128)) == "xla"
        assert self.choice(bias=struct(12, 128, 128), mask=struct(8, 1, 128, 128, dtype=bool)) == "xla"

    @pytest.mark.skipif(jax.default_backend() == "gpu", reason="the fused kernel exists here")
    def test_impossible_request_raises_with_reason(self):
        with pytest.raises(ValueError, match="implementation='cudnn' is not possible here: it needs an NVIDIA GPU"):
            nnx.dot_product_attention(QUERY, KEY, VALUE, implementation="cudnn")

    def test_the_fused_kernel_of_tpus_is_refused_elsewhere(self):
        x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
        with pytest.raises(ValueError, match="implementation='splash' is not possible here: it needs a TPU"):
            nnx.dot_product_attention(x, x, x, implementation="splash")

    def test_a_choice_for_the_default_backend_is_corrected_when_lowered(self, pretend):
        x = struct(1, 2048, 2, 64)
        pretend("gpu", capability="9.0")
        assert nnx.attention_implementation(x, x, x) == "cudnn"
        with compiling_for("tpu"):
            assert nnx.attention_implementation(x, x, x) == "splash"
        pretend("tpu")
        assert nnx.attention_implementation(x, x, x) == "splash"
        loss = lambda x: nnx.dot_product_attention(x, x, x).astype(jnp.float32).sum()  # noqa: E731
        traced = jax.jit(jax.value_and_grad(loss)).trace(x)
        for platform in ("cpu", "cuda"):
            assert "tpu_custom_call" not in traced.lower(lowering_platforms=(platform,)).as_text()

    @pytest.mark.parametrize(("length", "gradient"), [(6, "cudnn"), (7, "xla")])
    def test_odd_lengths_are_differentiated_without_the_fused_kernel(self, monkeypatch, length, gradient):
        attend = jax.nn.dot_product_attention

        def named(
            *args, implementation, **options
        ):  # there is no cuDNN here: XLA computes, and a name tells the choice
            return checkpoint_name(attend(*args, implementation="xla", **options), implementation)

        monkeypatch.setattr(jax.nn, "dot_product_attention", named)
        monkeypatch.setattr("nnx.nn.attention.dot_product.fusion_obstacle", lambda *args, **options: None)
        x = jnp.linspace(0.0, 1.0, length * 16, dtype=jnp.bfloat16).reshape(1, length, 2, 8)
        lengths = jnp.array([length - 1])

        def loss(x, implementation="cudnn"):
            options = {"is_causal": True, "key_value_seq_lengths": lengths, "implementation": implementation}
            return nnx.dot_product_attention(x, x, x, **options).astype(jnp.float32).sum()

        def kernels(f):
            return {name for name in ("cudnn", "xla") if f"name={name}" in str(jax.make_jaxpr(f)(x))}

        assert kernels(loss) == {"cudnn"}
        assert kernels(jax.value_and_grad(loss)) == kernels(jax.jit(jax.grad(loss))) == {gradient}
        assert kernels(lambda x: jax.vmap(jax.grad(loss))(x[None])) == {gradient}
        expected = jax.grad(lambda x: loss(x, "xla"))(x)
        assert (jax.grad(loss)(x) == expected).all() and jnp.isfinite(expected).all()

    def test_unknown_implementations_are_refused(self):
        with pytest.raises(ValueError, match="expected implementation 'cudnn', 'splash', 'xla' or None, got 'flash'"):
            nnx.dot_product_attention(QUERY, KEY, VALUE, implementation="flash")  # type: ignore[arg-type]


def attention(*args, ctx=None, **options) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(*(args or (4, 16)), ctx=ctx or nnx.context(0), **options)


class TestMultiHeadAttention:
    def test_parameters_have_an_axis_for_heads(self):
        shapes = {path: leaf.value.shape for path, leaf in attention(4, 16, num_kv_heads=2).get_state().items()}
        assert shapes == {
            "key/bias": (2, 4),
            "key/kernel": (16, 2, 4),
            "out/bias": (16,),
            "out/kernel": (4, 4, 16),
            "query/bias": (4, 4),
            "query/kernel": (16, 4, 4),
            "value/bias": (2, 4),
            "value/kernel": (16, 2, 4),
        }

    def test_layer_is_projection_attention_projection(self):
        layer = attention(4, 16, num_kv_heads=2, qkv_features=32, out_features=6)
        x = numpy_normal(2, 5, 16)
        attended = by_hand(layer.query(x), layer.key(x), layer.value(x))
        agrees(layer(x), np.einsum("btnh,nho->bto", attended, layer.out.kernel) + np.asarray(layer.out.bias))

    def test_one_argument_is_self_attention(self):
        layer, x = attention(), numpy_normal(2, 5, 16)
        np.testing.assert_array_equal(layer(x), layer(x, x, x))
        np.testing.assert_array_equal(layer(x), layer(x, x))

    def test_cross_attention_takes_other_features_and_lengths(self):
        layer = attention(4, 16, in_kv_features=10)
        out = layer(numpy_normal(2, 5, 16), numpy_normal(2, 7, 10, seed=1), seq_lengths=jnp.array([7, 3]))
        assert out.shape == (2, 5, 16)
        shorter = layer(numpy_normal(2, 5, 16)[1], numpy_normal(2, 7, 10, seed=1)[1, :3])
        agrees(out[1], np.asarray(shorter))

    @pytest.mark.parametrize("batch", [(), (2, 3)], ids=["unbatched", "two batch axes"])
    def test_any_number_of_batch_axes(self, batch):
        layer = attention(4, 16, num_kv_heads=2, rotary=nnx.RotaryEmbedding(4), normalize_qk="rms")
        x = numpy_normal(*batch, 5, 16)
        out = layer(x, is_causal=True)
        agrees(out, np.asarray(layer(x.reshape(-1, 5, 16), is_causal=True)).reshape(out.shape))

    def test_causal_outputs_ignore_the_future(self):
        layer, x = attention(rotary=nnx.RotaryEmbedding(4)), numpy_normal(2, 5, 16)
        out = layer(x, is_causal=True)
        agrees(layer(x[:, :3], is_causal=True), np.asarray(out[:, :3]))
        agrees(layer(x, mask=nnx.make_causal_mask(x[..., 0])), np.asarray(out))

    def test_packed_documents_with_their_own_positions_equal_single_ones(self):
        layer, x = attention(rotary=nnx.RotaryEmbedding(4)), numpy_normal(5, 16)
        mask = nnx.make_segment_mask(jnp.array([1, 1, 1, 2, 2]))
        packed = layer(x, mask=mask, is_causal=True, positions=jnp.array([0, 1, 2, 0, 1]))
        agrees(packed[:3], np.asarray(layer(x[:3], is_causal=True)))
        agrees(packed[3:], np.asarray(layer(x[3:], is_causal=True)))

    def test_a_query_sees_its_own_section_and_is_scaled_by_its_position(self):
        layer, x = attention(section_size=2, query_scale=nnx.models.PositionScale(2, 3.0)), numpy_normal(2, 5, 16)
        out = layer(x, is_causal=True)
        plain = attention(query_scale=layer.query_scale)
        agrees(out, np.asarray(plain(x, mask=nnx.make_segment_mask(jnp.array([[1, 1, 2, 2, 3]])), is_causal=True)))
        placed = layer(x, is_causal=True, positions=jnp.arange(7, 12))  # the first section has one token, the next two
        agrees(placed[:, 0], np.asarray(attention()(x[:, :1])[:, 0]))
        factor = float(layer.query_scale(jnp.array(9)))
        assert factor > 4
        agrees(placed[:, 2], np.asarray(attention(scale=factor / 2)(x[:, 1:3], is_causal=True)[:, 1]))
        with pytest.raises(ValueError, match="section_size, the tokens of a section, to be at least 1, got 0"):
            attention(section_size=0)

    def test_sliding_window_is_the_mask_of_that_name(self):
        layer, x = attention(sliding_window=2), numpy_normal(2, 5, 16)
        plain = attention()
        for causal in (True, False):
            mask = nnx.make_sliding_window_mask(x[..., 0], 2, causal=causal)
            agrees(layer(x, is_causal=causal), np.asarray(plain(x, mask=mask)))

    def test_scale_and_soft_cap_reach_the_attention_function(self):
        layer, x = attention(scale=0.9, logits_soft_cap=0.4), numpy_normal(2, 5, 16)
        heads = by_hand(layer.query(x), layer.key(x), layer.value(x), scale=0.9, soft_cap=0.4)
        agrees(layer(x), np.asarray(layer.out(jnp.asarray(heads, jnp.float32))))

    def test_sinks_are_parameters_that_start_at_zero(self):
        layer = attention(4, 16, use_sinks=True)
        x = numpy_normal(2, 5, 16)
        assert layer.sinks.shape == (4,) and (layer.sinks == 0).all()
        assert type(layer.variable("sinks")) is nnx.Param
        assert nnx.name_axes(layer).variable("sinks").sharding == ("heads",)
        grads = nnx.grad(lambda layer: (layer(x, is_causal=True) ** 2).sum())(layer)
        assert (grads["sinks"].value != 0).all()
        layer.sinks = jnp.full(4, -jnp.inf)
        plain = attention(4, 16)
        agrees(layer(x, is_causal=True), np.asarray(plain(x, is_causal=True)))
        assert plain.sinks is None

    @pytest.mark.parametrize("use_bias", [True, False])
    def test_the_output_projection_can_differ_in_its_bias(self, use_bias):
        layer = attention(use_bias=use_bias, use_out_bias=not use_bias)
        assert (layer.query.bias is not None) == use_bias
        assert (layer.out.bias is None) == use_bias

    def test_bias_is_added_to_the_logits(self):
        layer, x = attention(), numpy_normal(2, 5, 16)
        hide = jnp.where(nnx.make_causal_mask(x[0, :, 0], dtype=bool), 0.0, -1e9)
        agrees(layer(x, bias=hide), np.asarray(layer(x, is_causal=True)))

    @pytest.mark.parametrize("kind, norm", [(True, nnx.LayerNorm), ("layer", nnx.LayerNorm), ("rms", nnx.RMSNorm)])
    def test_queries_and_keys_can_be_normalized(self, kind, norm):
        layer, x = attention(normalize_qk=kind), numpy_normal(2, 5, 16)
        assert type(layer.query_ln) is type(layer.key_ln) is norm
        large = attention(normalize_qk=kind)
        large.query.kernel = large.query.kernel * 100.0
        agrees(large(x), np.asarray(layer(x)), atol=1e-3)

    def test_unknown_norms_are_refused(self):
        with pytest.raises(ValueError, match="normalize_qk to be True, False, 'layer' or 'rms', got 'batch'"):
            attention(normalize_qk="batch")

    def test_rotary_makes_order_matter(self):
        x = numpy_normal(5, 16)
        plain, turned = attention(), attention(rotary=nnx.RotaryEmbedding(4))
        agrees(plain(x)[::-1], np.asarray(plain(x[::-1])))
        assert not np.allclose(turned(x)[::-1], turned(x[::-1]), atol=1e-3)

    def test_a_rotary_of_another_head_size_is_refused(self):
        with pytest.raises(ValueError, match="rotary embedding with head_dim=4 .* got 8"):
            attention(rotary=nnx.RotaryEmbedding(8))

    def test_weights_can_be_sown(self):
        layer, x = attention(), numpy_normal(2, 5, 16)
        layer(x, sow_weights=True, is_causal=True)
        (weights,) = layer.attention_weights
        assert weights.shape == (2, 4, 5, 5)
        assert (np.triu(weights[0, 0], 1) == 0).all()
        assert isinstance(layer.variable("attention_weights"), nnx.Intermediate)

    def test_dropout_takes_its_mode_from_call_instance_or_flag(self):
        x = numpy_normal(2, 5, 16)
        plain = attention()(x)
        assert np.array_equal(attention(dropout_rate=0.5)(x, deterministic=True), plain)
        assert np.array_equal(attention(dropout_rate=0.5, deterministic=True)(x), plain)
        flagged = nnx.context(dropout=0, flags={"deterministic": True})
        assert np.array_equal(attention(dropout_rate=0.5)(x, ctx=flagged), plain)
        ctx = nnx.context(dropout=0)
        one, two = (attention(dropout_rate=0.5, deterministic=False)(x, ctx=ctx) for _ in range(2))
        assert not np.array_equal(one, plain)
        assert not np.array_equal(one, two)

    def test_dropout_without_a_mode_names_all_three_ways(self):
        with pytest.raises(ValueError, match="(?s)MultiHeadAttention.*call.*instance.*Context"):
            attention(dropout_rate=0.5)(numpy_normal(2, 5, 16), ctx=nnx.context(dropout=0))

    def test_dropout_without_a_context_raises_with_advice(self):
        with pytest.raises(ValueError, match="call the layer with ctx=ctx, or with deterministic=True"):
            attention(dropout_rate=0.5)(numpy_normal(2, 5, 16), deterministic=False)

    def test_attention_function_can_be_replaced_by_one_with_the_common_arguments(self):
        seen = {}

        def mean_of_values(query, key, value, *, mask=None, is_causal=False, **rest):
            seen.update(rest)
            return jnp.broadcast_to(value.mean(-3, keepdims=True), query.shape)

        layer, x = attention(attention_fn=mean_of_values), numpy_normal(2, 5, 16)
        np.testing.assert_allclose(layer(x)[:, 0], layer(x)[:, 1])
        assert set(seen) == {
            "dropout_rate",
            "broadcast_dropout",
            "deterministic",
            "dtype",
            "precision",
            "module",
        }

    def test_dtypes(self):
        layer = attention(dtype=jnp.bfloat16, normalize_qk=True, rotary=nnx.RotaryEmbedding(4))
        assert layer.query.kernel.dtype == jnp.float32
        assert layer(numpy_normal(2, 5, 16)).dtype == jnp.bfloat16
        half = attention(param_dtype=jnp.float16)
        assert half(numpy_normal(2, 5, 16, dtype=jnp.float16)).dtype == jnp.float16

    def test_metadata_reach_the_kernels(self):
        layer = attention(kernel_metadata={"sharding": ("embed", "heads", "kv")})
        assert layer.query.variable("kernel").sharding == ("embed", "heads", "kv")
        by_init = attention(
            out_kernel_init=nnx.with_partitioning(nnx.initializers.lecun_normal(), ("heads", "kv", "embed"))
        )
        assert by_init.out.variable("kernel").sharding == ("heads", "kv", "embed")
        assert by_init.query.variable("kernel").sharding is None

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ((3, 16), "qkv_features to be a multiple of num_heads=3, got 16"),
            ((4, 16, None, None, 3), "num_kv_heads to divide num_heads=4, got 3"),
        ],
    )
    def test_heads_that_do_not_divide_are_refused(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            attention(*arguments)

    def test_wrong_inputs_say_expected_and_got(self):
        layer = attention(4, 16, in_kv_features=10)
        with pytest.raises(
            ValueError, match=r"MultiHeadAttention: expected inputs_q of shape .* 16\], got \(2, 5, 15\)"
        ):
            layer(jnp.ones((2, 5, 15)), jnp.ones((2, 5, 10)))
        with pytest.raises(ValueError, match=r"expected inputs_k of shape .* 10\], got \(2, 5, 16\)"):
            layer(jnp.ones((2, 5, 16)))
        with pytest.raises(ValueError, match="inputs_v was given without inputs_k"):
            layer(jnp.ones((2, 5, 16)), None, jnp.ones((2, 5, 10)))

    def test_two_built_alike_have_equal_definitions(self):
        make = lambda: attention(num_kv_heads=2, rotary=nnx.RotaryEmbedding(4), normalize_qk=True)  # noqa: E731
        assert make().get_module_def() == make().get_module_def()
