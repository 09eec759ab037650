"""Embeddings, attention and recurrent layers agree with flax on the same weights, forward and in their gradients."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax

import nnx
from tests.nn.arrays import numpy_normal


def with_weights_of(layer, peer):
    """`layer` with the parameters of flax's `peer`, which must have the same paths and shapes."""
    theirs = {
        "/".join(map(str, path)): leaf.get_value() for path, leaf in flax.to_flat_state(flax.state(peer, flax.Param))
    }
    ours = layer.filter(nnx.Param)
    assert {path: leaf.value.shape for path, leaf in ours.items()} == {path: x.shape for path, x in theirs.items()}
    layer.update_state(ours.map(lambda path, leaf: leaf.replace(theirs[path])))
    return layer


def agree_with_gradients(layer, peer, call) -> None:
    """Checks that `call(model)` has the same outputs, and the same gradients of their squares, for both models.

    Each side is one compiled program: operation by operation, every shape would be a program of its own.
    """
    with_weights_of(layer, peer)

    def squares(model):
        outputs = call(model)
        return sum((y**2).sum() for y in jax.tree.leaves(outputs)), outputs

    grads, outputs = nnx.jit(nnx.grad(squares, has_aux=True))(layer)
    their_grads, their_outputs = flax.jit(flax.grad(squares, has_aux=True))(peer)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), outputs, their_outputs)
    ours = {path: leaf.value for path, leaf in grads.items()}
    theirs = {"/".join(map(str, path)): leaf.get_value() for path, leaf in flax.to_flat_state(their_grads)}
    assert set(ours) == set(theirs)
    for path in ours:
        np.testing.assert_allclose(ours[path], theirs[path], atol=1e-4, rtol=1e-3, err_msg=path)


def test_embed():
    tokens = jnp.array([[0, 3], [6, 3]])
    agree_with_gradients(
        nnx.Embed(7, 4, ctx=nnx.context(0)),
        flax.Embed(7, 4, rngs=flax.Rngs(0)),
        lambda m: (m(tokens), m.attend(numpy_normal(2, 4))),
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_heads": 2}, {"normalize_qk": True}, {"use_bias": False, "qkv_features": 32, "out_features": 6}],
    ids=["plain", "grouped", "normalized", "other sizes"],
)
def test_multi_head_attention(options):
    x = numpy_normal(2, 5, 16)
    mask = nnx.make_causal_mask(x[..., 0])
    agree_with_gradients(
        nnx.MultiHeadAttention(4, 16, ctx=nnx.context(0), **options),
        flax.MultiHeadAttention(4, 16, decode=False, rngs=flax.Rngs(0), **options),
        lambda m: m(x, mask=mask),
    )


def test_cross_attention():
    query, key = numpy_normal(2, 5, 16), numpy_normal(2, 7, 10, seed=1)
    agree_with_gradients(
        nnx.MultiHeadAttention(4, 16, in_kv_features=10, ctx=nnx.context(0)),
        flax.MultiHeadAttention(4, 16, in_kv_features=10, decode=False, rngs=flax.Rngs(0)),
        lambda m: m(query, key),
    )


def test_decoding_token_by_token():
    x = numpy_normal(2, 4, 16)
    peer = flax.MultiHeadAttention(4, 16, decode=True, rngs=flax.Rngs(0))
    layer = with_weights_of(nnx.MultiHeadAttention(4, 16, decode=True, ctx=nnx.context(0)), peer)
    layer.init_cache((2, 6, 16))
    peer.init_cache((2, 6, 16))
    for i in range(4):
        np.testing.assert_allclose(layer(x[:, i : i + 1]), peer(x[:, i : i + 1]), atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"deterministic": True, "dropout_rate": 0.5}])
def test_dot_product_attention(options):
    query, key, value = numpy_normal(2, 5, 4, 8), numpy_normal(2, 5, 4, 8, seed=1), numpy_normal(2, 5, 4, 8, seed=2)
    bias = numpy_normal(2, 4, 5, 5, seed=3)

    def loss(attend, query):
        return (attend(query, key, value, bias, **options) ** 2).sum()

    np.testing.assert_allclose(
        jax.jit(jax.grad(loss, argnums=1), static_argnums=0)(nnx.dot_product_attention, query),
        jax.jit(jax.grad(loss, argnums=1), static_argnums=0)(flax.dot_product_attention, query),
        atol=1e-4,
    )


def test_masks():
    x, y = jnp.array([[1, 1, 0]]), jnp.array([[1, 0, 1, 1]])
    np.testing.assert_array_equal(nnx.make_attention_mask(x, y), flax.make_attention_mask(x, y))
    np.testing.assert_array_equal(nnx.make_causal_mask(x, 1), flax.make_causal_mask(x, 1))
    ours, theirs = (m.combine_masks(m.make_causal_mask(x), m.make_attention_mask(x, x)) for m in (nnx, flax))
    np.testing.assert_array_equal(ours, theirs)


CELLS = ["LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell"]


@pytest.mark.parametrize("name", CELLS)
def test_cells(name):
    x = numpy_normal(2, 3)
    hidden = (numpy_normal(2, 4, seed=1), numpy_normal(2, 4, seed=2))
    carry = hidden if "LSTM" in name else hidden[0]
    agree_with_gradients(
        getattr(nnx, name)(3, 4, ctx=nnx.context(0)),
        getattr(flax, name)(3, 4, rngs=flax.Rngs(0)),
        lambda m: m(carry, x),
    )


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"reverse": True, "keep_order": True}], ids=str)
def test_rnn_with_lengths(options):
    x, lengths = numpy_normal(2, 5, 3), jnp.array([5, 3])
    carry = (numpy_normal(2, 4, seed=1), numpy_normal(2, 4, seed=2))
    real = (jnp.arange(5) < lengths[:, None])[..., None]

    def call(rnn):
        final, y = rnn(x, initial_carry=carry, seq_lengths=lengths, return_carry=True, **options)
        return final, jnp.where(real, y, 0.0)

    agree_with_gradients(
        nnx.RNN(nnx.LSTMCell(3, 4, ctx=nnx.context(0))),
        flax.RNN(flax.LSTMCell(3, 4, rngs=flax.Rngs(0)), rngs=flax.Rngs(0)),
        call,
    )


def test_bidirectional():
    x = numpy_normal(2, 5, 3)
    ctx, rngs = nnx.context(0), flax.Rngs(0)
    initial = (numpy_normal(2, 4, seed=1), numpy_normal(2, 4, seed=2))
    agree_with_gradients(
        nnx.Bidirectional(*(nnx.RNN(nnx.GRUCell(3, 4, ctx=ctx)) for _ in range(2))),
        flax.Bidirectional(*(flax.RNN(flax.GRUCell(3, 4, rngs=rngs), rngs=rngs) for _ in range(2)), rngs=rngs),
        lambda m: m(x, initial_carry=initial),
    )


def test_conv_lstm_agrees_with_linen():
    x, carry = numpy_normal(2, 5, 4, 3), (numpy_normal(2, 5, 4, 6, seed=1), numpy_normal(2, 5, 4, 6, seed=2))
    peer = linen.ConvLSTMCell(features=6, kernel_size=(3, 3))
    params = jax.jit(peer.init)(jax.random.key(0), carry, x)["params"]
    cell = nnx.ConvLSTMCell(3, 6, (3, 3), ctx=nnx.context(0))
    for name in ("ih", "hh"):
        conv = getattr(cell, name)
        conv.kernel, conv.bias = params[name]["kernel"], params[name]["bias"]

    def squares(call):
        outputs = call(carry, x)
        return (outputs[1] ** 2).sum(), outputs

    mine, ours = nnx.jit(nnx.grad(squares, has_aux=True))(cell)
    apply = lambda params: squares(lambda *inputs: peer.apply({"params": params}, *inputs))  # noqa: E731
    peers, theirs = jax.jit(jax.grad(apply, has_aux=True))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, theirs)
    for name in ("ih", "hh"):
        np.testing.assert_allclose(mine[f"{name}/kernel"].value, peers[name]["kernel"], atol=1e-4, rtol=1e-3)
