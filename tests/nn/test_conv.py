"""Convolutions: padding, masks, batch axes, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import nnx
from tests.nn.arrays import normal


def conv(*args, **kwargs):
    return nnx.Conv(*args, **kwargs, ctx=nnx.context(0))


def test_a_bare_int_kernel_size_is_an_error_that_shows_the_tuple():
    with pytest.raises(TypeError, match=r"kernel_size=\(3,\).*kernel_size=\(3, 3\)"):
        conv(3, 4, 3)
    with pytest.raises(TypeError, match=r"kernel_size=\(3,\)"):
        conv(3, 4, np.int64(3))
    with pytest.raises(TypeError, match=r"ConvTranspose.*kernel_size=\(3,\)"):
        nnx.ConvTranspose(3, 4, 3, ctx=nnx.context(0))


@pytest.mark.parametrize("batch", [(), (1,), (2,), (2, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("make", [nnx.Conv, nnx.ConvTranspose])
def test_any_number_of_batch_axes(make, batch):
    layer = make(3, 4, (3, 3), ctx=nnx.context(0))
    x = normal(*batch, 5, 6, 3)
    y = layer(x)
    assert y.shape == (*batch, 5, 6, 4)
    if y.size:
        index = (0,) * len(batch)
        np.testing.assert_allclose(y[index], layer(x[index]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "padding, size",
    [("SAME", 8), ("same", 8), ("VALID", 6), ("CIRCULAR", 8), ("REFLECT", 8), ("CAUSAL", 8), (0, 6), (2, 10)]
    + [((1,), 8), (((1, 2),), 9), ([(0, 1)], 7)],
    ids=str,
)
def test_paddings_give_their_sizes(padding, size):
    assert conv(3, 4, (3,), padding=padding)(jnp.ones((2, 8, 3))).shape == (2, size, 4)


@pytest.mark.parametrize("padding", ["WRAP", (1, 2, 3), ((1, 2, 3), 1), ("a", "b")], ids=str)
def test_unknown_padding_raises_with_the_alternatives(padding):
    with pytest.raises(ValueError, match="unknown padding.*'SAME'.*'CIRCULAR'"):
        conv(3, 4, (3, 3), padding=padding)


def test_causal_convolution_does_not_look_ahead():
    layer = conv(1, 1, (3,), padding="CAUSAL", kernel_dilation=2)
    x = normal(9, 1)
    changed = x.at[5:].set(0.0)
    np.testing.assert_array_equal(layer(x)[:5], layer(changed)[:5])
    transposed = nnx.ConvTranspose(1, 1, (4,), 2, padding="CAUSAL", ctx=nnx.context(0))
    assert transposed(x).shape == (18, 1)
    np.testing.assert_array_equal(transposed(x)[:10], transposed(changed)[:10])


def test_causal_is_for_one_dimension():
    with pytest.raises(ValueError, match=r"one spatial dimension.*\(3, 3\)"):
        conv(3, 4, (3, 3), padding="CAUSAL")


def test_circular_convolution_commutes_with_shifts():
    x = normal(6, 5, 3)
    for layer in (
        conv(3, 4, (3, 4), padding="CIRCULAR"),
        nnx.ConvTranspose(3, 4, (3, 4), padding="CIRCULAR", ctx=nnx.context(0)),
    ):
        shifted = layer(jnp.roll(x, (2, 1), (0, 1)))
        np.testing.assert_allclose(shifted, jnp.roll(layer(x), (2, 1), (0, 1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel_size, stride, dilation", [(4, 1, 1), (3, 3, 1), (3, 2, 2), (4, 4, 1), (5, 4, 2)])
def test_transposed_circular_convolution_is_the_transpose_of_the_circular_convolution(kernel_size, stride, dilation):
    options = {"padding": "CIRCULAR", "kernel_dilation": dilation, "use_bias": False, "ctx": nnx.context(0)}
    layer = nnx.Conv(2, 3, (kernel_size,), stride, **options)
    transposed = nnx.ConvTranspose(3, 2, (kernel_size,), stride, transpose_kernel=True, **options)
    transposed.kernel = layer.kernel
    x, y = normal(3 * stride, 2), normal(3, 3)
    expected = jax.linear_transpose(layer, x)(y)[0]
    np.testing.assert_allclose(transposed(y), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", ["SAME", "VALID", 1])
def test_input_dilation_is_a_convolution_of_the_spread_input(padding):
    layer = conv(2, 3, (3,), padding=padding, input_dilation=2)
    plain = conv(2, 3, (3,), padding=padding)
    plain.kernel = layer.kernel
    x = normal(4, 2)
    spread = jnp.zeros((7, 2)).at[::2].set(x)
    np.testing.assert_allclose(layer(x), plain(spread), rtol=1e-4, atol=1e-5)


def test_depthwise_convolution_does_not_mix_features():
    layer = conv(4, 4, (3,), feature_group_count=4)
    assert layer.kernel.shape == (3, 1, 4)
    x = normal(6, 4)
    changed = x.at[:, 1].set(0.0)
    np.testing.assert_array_equal(layer(x)[:, [0, 2, 3]], layer(changed)[:, [0, 2, 3]])


def test_groups_must_divide_the_features():
    with pytest.raises(ValueError, match="feature_group_count=2, in_features=3, out_features=4"):
        conv(3, 4, (3,), feature_group_count=2)


def test_mask_and_mask_fn_mean_the_same_and_mask_gradients():
    mask = jnp.tril(jnp.ones((3, 3)))[..., None] * jnp.ones((3, 3, 4))
    x = normal(6, 3)
    by_array, by_function = conv(3, 4, (3,), mask=mask), conv(3, 4, (3,), mask_fn=lambda kernel: kernel * mask)
    np.testing.assert_allclose(by_array(x), by_function(x), rtol=1e-6)
    (params, rest), moduledef = by_function.partition(nnx.Param, ...)
    grads = jax.grad(lambda params: moduledef.merge(params, rest)(x).sum())(params)
    assert not jnp.any(grads["kernel"].value * (1 - mask))


def test_masks_must_fit_the_kernel():
    with pytest.raises(ValueError, match=r"Conv: `mask` must keep the kernel's shape \(3, 3, 4\), got \(3,\)"):
        conv(3, 4, (3,), mask=jnp.ones(3))
    with pytest.raises(ValueError, match=r"`mask_fn` must keep the kernel's shape"):
        conv(3, 4, (3,), mask_fn=lambda kernel: kernel[:1])(jnp.ones((6, 3)))
    with pytest.raises(ValueError, match="not both"):
        conv(3, 4, (3,), mask=jnp.ones((3, 3, 4)), mask_fn=lambda kernel: kernel)


def test_conv_transpose_with_transposed_kernel_is_the_transpose_of_conv():
    forward = conv(2, 3, (4,), 2, use_bias=False)
    backward = nnx.ConvTranspose(3, 2, (4,), 2, use_bias=False, transpose_kernel=True, ctx=nnx.context(0))
    backward.kernel = forward.kernel
    x, y = normal(8, 2), normal(4, 3, seed=1)
    np.testing.assert_allclose(jnp.vdot(forward(x), y), jnp.vdot(x, backward(y)), rtol=1e-4)


def test_conv_calls_a_convolution_of_the_user():
    calls = []

    def convolution(*args, **kwargs):
        calls.append(kwargs["feature_group_count"])
        return lax.conv_general_dilated(*args, **kwargs)

    conv(4, 4, (3,), feature_group_count=2, conv_general_dilated=convolution)(jnp.ones((6, 4)))
    assert calls == [2]


def test_wrong_inputs_raise_with_what_was_expected():
    with pytest.raises(ValueError, match=r"Conv expected an input of shape \(\.\.\., d0, d1, 3\), got shape \(6, 3\)"):
        conv(3, 4, (3, 3))(jnp.ones((6, 3)))
    with pytest.raises(ValueError, match=r"Channels come last here.* `jnp.moveaxis\(x, 1, -1\)`"):
        conv(3, 4, (3, 3))(jnp.ones((2, 3, 6, 6)))
    with pytest.raises(ValueError, match=r"`x\[..., None\]`"):
        conv(1, 4, (3, 3))(jnp.ones((2, 6, 6)))
    with pytest.raises(ValueError, match=r"`x.reshape\(\*x.shape\[:-3\], -1\)`"):
        nnx.Linear(24, 4, ctx=nnx.context(0))(jnp.ones((5, 2, 3, 4)))
    with pytest.raises(ValueError, match="Conv expected 3 features on the last axis, got 1"):
        conv(3, 4, (3,))(jnp.ones((6, 1)))
    with pytest.raises(ValueError, match="`strides` must be an int or have 2 entries"):
        conv(3, 4, (3, 3), (1, 1, 1))


@pytest.mark.parametrize("cls", [nnx.Conv, nnx.ConvTranspose])
def test_a_mask_does_not_change_the_dtype(cls):
    mask = np.ones((3, 2, 2), np.float32)
    for options in ({"mask": jnp.asarray(mask)}, {"mask_fn": lambda kernel: kernel * mask}):
        layer = cls(2, 2, (3,), **options, param_dtype=jnp.bfloat16, ctx=nnx.context(0))
        assert layer(jnp.ones((5, 2), jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("padding", ["CIRCULAR", "REFLECT"])
def test_repeating_paddings_refuse_input_dilation(padding):
    with pytest.raises(ValueError, match=f'padding "{padding}".*input_dilation=2.*yourself'):
        conv(2, 3, (3,), padding=padding, input_dilation=2)
