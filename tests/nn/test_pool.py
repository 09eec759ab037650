"""Pooling and resizing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.nn.arrays import normal


def line(*values):
    return jnp.array(values)[:, None]


def test_strides_are_one_unless_given():
    assert nnx.max_pool(line(1.0, 3.0, 2.0), (2,)).ravel().tolist() == [3.0, 3.0]
    assert nnx.MaxPool((2,))(line(1.0, 3.0, 2.0)).ravel().tolist() == [3.0, 3.0]


@pytest.mark.parametrize("name", ["max", "min", "avg"])
def test_functions_and_modules_agree(name):
    x = normal(2, 5, 6, 3)
    function, module = getattr(nnx, f"{name}_pool"), getattr(nnx, f"{name.title()}Pool")
    np.testing.assert_array_equal(module((2, 3), 2, 1)(x), function(x, (2, 3), 2, 1))


def test_average_counts_padding_or_not():
    x = line(1.0, 1.0, 1.0)
    np.testing.assert_allclose(nnx.avg_pool(x, (3,), padding="SAME").ravel(), [2 / 3, 1, 2 / 3], rtol=1e-6)
    np.testing.assert_allclose(nnx.avg_pool(x, (3,), padding="SAME", count_include_pad=False).ravel(), 1.0)


def test_average_of_half_precision_is_summed_in_float32():
    x = jnp.full((4096, 1), 100.0, jnp.float16)
    assert nnx.avg_pool(x, (4096,)).item() == 100.0
    assert nnx.global_avg_pool(x, 1).item() == 100.0
    assert nnx.adaptive_avg_pool(x, (3,)).ravel().tolist() == [100.0] * 3


def test_integers_are_pooled_too():
    x = jnp.array([[1], [5], [-3]])
    assert nnx.max_pool(x, (2,)).ravel().tolist() == [5, 5]
    assert nnx.min_pool(x, (2,)).ravel().tolist() == [1, -3]
    assert nnx.avg_pool(x, (2,)).ravel().tolist() == [3.0, 1.0]


def test_pool_reduces_with_any_function():
    assert nnx.pool(line(1.0, 2.0, 3.0), 1.0, jax.lax.mul, (2,), None, "VALID").ravel().tolist() == [2.0, 6.0]


def test_a_bare_int_window_is_an_error_that_shows_the_tuple():
    with pytest.raises(TypeError, match=r"max_pool takes `window_shape` as a tuple.*\(2,\).*\(2, 2\)"):
        nnx.max_pool(jnp.ones((4, 4, 1)), 2)
    with pytest.raises(TypeError, match=r"AdaptiveAvgPool takes `output_size`"):
        nnx.AdaptiveAvgPool(2)


def test_too_few_axes_show_the_expected_shape():
    with pytest.raises(
        ValueError, match=r"AvgPool expected an input of shape \(\.\.\., d0, d1, features\), got .*\(4, 4\)"
    ):
        nnx.AvgPool((2, 2))(jnp.ones((4, 4)))


def test_adaptive_pooling_covers_every_entry_with_overlapping_bins():
    x = jnp.arange(7.0)[:, None]
    # bins of 7 entries in 3: [0, 3), [2, 5), [4, 7)
    assert nnx.adaptive_avg_pool(x, (3,)).ravel().tolist() == [1.0, 3.0, 5.0]
    assert nnx.adaptive_max_pool(x, (3,)).ravel().tolist() == [2.0, 4.0, 6.0]


def test_adaptive_pooling_enlarges_and_keeps():
    x = jnp.arange(2.0)[:, None]
    assert nnx.adaptive_avg_pool(x, (4,)).ravel().tolist() == [0.0, 0.0, 1.0, 1.0]
    assert nnx.AdaptiveMaxPool((None, 1))(jnp.ones((5, 4, 6, 3))).shape == (5, 4, 1, 3)


def test_global_pooling_takes_all_of_space():
    x = normal(2, 4, 5, 3)
    np.testing.assert_allclose(nnx.global_avg_pool(x), x.mean((1, 2)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(nnx.GlobalMaxPool(keepdims=True)(x), x.max((1, 2), keepdims=True))
    np.testing.assert_allclose(nnx.GlobalAvgPool(2)(x[0]), x[0].mean((0, 1)), rtol=1e-5, atol=1e-6)


def test_upsample_repeats_or_interpolates():
    x = line(0.0, 2.0)
    assert nnx.Upsample((2,))(x).ravel().tolist() == [0.0, 0.0, 2.0, 2.0]
    np.testing.assert_allclose(nnx.Upsample((2,), method="linear")(x).ravel(), [0.0, 0.5, 1.5, 2.0], atol=1e-6)
    assert nnx.Upsample(size=(7, 9))(jnp.ones((2, 3, 4, 1))).shape == (2, 7, 9, 1)


def test_upsample_needs_one_size():
    with pytest.raises(ValueError, match="exactly one of `scale_factor` and `size`"):
        nnx.Upsample()
    with pytest.raises(TypeError, match=r"scale_factor=\(2,\)"):
        nnx.Upsample(2)


def test_booleans_are_pooled_by_or_and_and():
    x = jnp.array([False, True, True, False, False])[:, None]
    assert nnx.max_pool(x, (2,)).ravel().tolist() == [True, True, True, False]
    assert nnx.min_pool(x, (2,)).ravel().tolist() == [False, True, False, False]
    assert nnx.adaptive_max_pool(x, (2,)).ravel().tolist() == [True, True]


@pytest.mark.parametrize("options", [{"padding": ((2, 0),)}, {"padding": 3}, {"padding": ((0, 2),)}], ids=str)
def test_windows_that_hold_only_padding_are_an_error(options):
    x = jnp.ones((4, 1))
    for function in (nnx.max_pool, nnx.min_pool, lambda *a, **k: nnx.avg_pool(*a, **k, count_include_pad=False)):
        with pytest.raises(ValueError, match=r"_pool: with window_shape=\(2,\).*entirely in the padding.*Pad by less"):
            function(x, (2,), **options)
    with pytest.raises(ValueError, match="MaxPool: .*entirely in the padding"):
        nnx.MaxPool((2,), **options)(x)
    assert jnp.isfinite(nnx.avg_pool(x, (2,), **options)).all()  # padding counts as zeros


def test_padding_that_no_window_reaches_is_not_an_error():
    assert nnx.max_pool(jnp.ones((4, 1)), (2,), 3, ((0, 2),)).shape == (2, 1)


@pytest.mark.parametrize("size", [0, -1])
def test_adaptive_pooling_to_nothing_is_an_error(size):
    for function in (nnx.adaptive_avg_pool, nnx.adaptive_max_pool):
        with pytest.raises(ValueError, match=rf"output_size with positive entries.*got \({size},\)"):
            function(jnp.ones((4, 1)), (size,))
    with pytest.raises(ValueError, match="AdaptiveAvgPool: expected output_size"):
        nnx.AdaptiveAvgPool((size,))
