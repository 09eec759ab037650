"""`LatentAttention`: absorbed and expanded attention agree with attention written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx

RANK, WIDTH, VALUE, TURNS, HEADS = 8, 6, 5, 4, 3


def make(**options) -> nnx.LatentAttention:
    settings = {"kv_rank": RANK, "head_dim": WIDTH, "value_dim": VALUE, "query_rank": 7, "use_bias": True, **options}
    rotary = nnx.RotaryEmbedding(TURNS, interleaved=True)
    return nnx.LatentAttention(HEADS, 16, rotary=rotary, ctx=nnx.context(0), **settings)


def inputs(rows: int = 2, length: int = 9) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (rows, length, 16))


def by_hand(layer: nnx.LatentAttention, x: jax.Array) -> np.ndarray:
    """The layer in NumPy, head by head, with every key and value written out."""
    value = {path: np.asarray(leaf.value, np.float64) for path, leaf in layer.get_state().items()}
    x = np.asarray(x, np.float64)  # type: ignore[assignment]

    def normed(a, scale):
        return a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-6) * scale

    narrow = normed(x @ value["query_down/kernel"] + value["query_down/bias"], value["query_norm/scale"])
    queries = np.einsum("blr,rhd->bhld", narrow, value["query/kernel"])
    down = x @ value["kv_down/kernel"] + value["kv_down/bias"]
    latent = normed(down[..., :RANK], value["kv_norm/scale"])
    up = np.einsum("blr,rhd->bhld", latent, value["kv_up/kernel"])
    turned = layer.rotary(jnp.asarray(queries[..., WIDTH:].transpose(0, 2, 1, 3)))
    queries[..., WIDTH:] = np.asarray(turned).transpose(0, 2, 1, 3)
    shared = np.asarray(layer.rotary(jnp.asarray(down[:, :, None, RANK:])))[:, :, 0]
    out = np.zeros((*x.shape[:2], 16))
    for head in range(HEADS):
        keys = np.concatenate((up[:, head, :, :WIDTH], shared), -1)
        logits = queries[:, head] @ keys.transpose(0, 2, 1) / np.sqrt(WIDTH + TURNS)
        logits = np.where(np.tril(np.ones(logits.shape[-2:], bool)), logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out += weights @ up[:, head, :, WIDTH:] @ value["out/kernel"][head]
    return out + value["out/bias"]


def test_whole_texts_agree_with_attention_written_out():
    layer, x = make(), inputs()
    np.testing.assert_allclose(layer(x, is_causal=True), by_hand(layer, x), atol=2e-5)


@pytest.mark.parametrize("chunks", [(9,), (5, 1, 1, 2), (1,) * 9], ids=str)
def test_decoding_agrees_with_whole_texts_whether_absorbed_or_expanded(chunks):
    layer, x = make(kv_rank=2 if chunks == (9,) else RANK), inputs()  # of a small rank, nine queries are expanded
    expected = layer(x, is_causal=True)
    cache, outs, done = layer.make_cache(2, 12), [], 0
    for length in chunks:
        out, cache = layer.decode_step(x[:, done : done + length], cache, jnp.full(2, done))
        outs.append(out)
        done += length
    np.testing.assert_allclose(jnp.concatenate(outs, 1), expected, atol=2e-5)
    assert cache.value.shape == (2, 12, 1, layer.kv_rank) and cache.key.shape == (2, 12, 1, TURNS)


def test_ragged_rows_do_not_see_padding():
    layer, x = make(), inputs()
    lengths = jnp.array([4, 9])
    _, cache = layer.decode_step(x, layer.make_cache(2, 12), jnp.zeros(2, jnp.int32), lengths)
    out, _ = layer.decode_step(x[:, :1], cache, lengths)
    text = jnp.concatenate((x[:1, :4], x[:1, :1]), 1)
    np.testing.assert_allclose(out[:1], layer(text, is_causal=True)[:, -1:], atol=2e-5)


@pytest.mark.parametrize("change", ["quantized", "adapted"])
def test_decoding_follows_a_layer_that_is_quantized_or_adapted(change):
    layer, x = make(), inputs()
    if change == "quantized":
        nnx.quantize(layer)
    else:
        nnx.add_lora(layer, 2, where="kv_up", b_initializer=nnx.initializers.normal(1.0), ctx=nnx.context(3))
    cache = layer.make_cache(2, 12)
    first, cache = layer.decode_step(x[:, :8], cache, jnp.zeros(2, jnp.int32))
    last, _ = layer.decode_step(x[:, 8:], cache, jnp.full(2, 8))
    expected = layer(x, is_causal=True)
    np.testing.assert_allclose(
        jnp.concatenate((first, last), 1), expected, atol=2e-2 if change == "quantized" else 2e-5
    )


def test_an_overflow_inside_a_transform_is_nan_from_then_on():
    layer, x = make(), inputs(length=2)

    @jax.jit
    def step(x, cache, lengths):
        return layer.decode_step(x, cache, lengths)

    _, cache = step(x, layer.make_cache(2, 3), jnp.array([0, 2]))
    out, cache = step(x[:, :1], cache, jnp.array([2, 4]))
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()
    with pytest.raises(ValueError, match="more tokens than max_length=3"):
        cache.check(jnp.array([3, 0]))


def test_the_part_that_rotates_is_given_as_its_embedding():
    with pytest.raises(TypeError, match=r"expected rotary=nnx.RotaryEmbedding\(n\).*head_dim=6, got None"):
        nnx.LatentAttention(3, 16, kv_rank=8, head_dim=6, rotary=None, ctx=nnx.context(0))  # type: ignore[arg-type]
