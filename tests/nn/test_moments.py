"""The moments that norms take: large offsets, masks without valid entries, empty batches, complex numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.nn.arrays import normal, numpy_normal

NORMS = {
    "LayerNorm": (lambda: nnx.LayerNorm(8), (-1,)),
    "RMSNorm": (lambda: nnx.RMSNorm(8), (-1,)),
    "BatchNorm": (lambda: nnx.BatchNorm(8, use_running_average=False), (0, 1)),
    "GroupNorm": (lambda: nnx.GroupNorm(8, num_groups=1), (1, 2)),
    "InstanceNorm": (lambda: nnx.InstanceNorm(8), (1,)),
}
every_norm = pytest.mark.parametrize("name", NORMS)


@pytest.mark.parametrize("name", sorted(set(NORMS) - {"RMSNorm"}))
@pytest.mark.parametrize("masked", [False, True])
def test_a_large_mean_does_not_cancel_the_variance(name, masked):
    make, axes = NORMS[name]
    x = (1e4 + numpy_normal(4, 64, 8)).astype(np.float32)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(axes, keepdims=True)) / wide.std(axes, keepdims=True)
    y = make()(x, mask=jnp.ones(x.shape, bool) if masked else None)
    # The mean is a rounded float32, and near 1e4 those are 1e-3 apart.
    np.testing.assert_allclose(y, expected, atol=5e-3)


def test_a_large_mean_does_not_cancel_the_variance_across_devices():
    x = (1e4 + normal(8, 16, 3)).astype(jnp.float32)
    mask = jnp.arange(16)[None, :, None] < jnp.arange(1, 9)[:, None, None]
    state, moduledef = nnx.BatchNorm(3, axis_name="batch", momentum=0.0).partition()

    def part(x, mask):
        layer = moduledef.merge(state)
        return layer(x, use_running_average=False, mask=mask), layer.var

    out, var = jax.vmap(part, axis_name="batch")(x, mask)
    valid = np.asarray(x, np.float64)[np.asarray(mask[..., 0])]
    np.testing.assert_allclose(var[0], valid.var(0), rtol=1e-4)
    expected = (np.asarray(x, np.float64) - valid.mean(0)) / valid.std(0)
    np.testing.assert_allclose(out, expected, atol=5e-3)


def test_a_constant_row_has_variance_zero():
    y = nnx.LayerNorm(3)(jnp.full((2, 3), 1e4 / 3))
    np.testing.assert_allclose(y, 0, atol=1e-3 / np.sqrt(1e-6))
    assert jnp.isfinite(y).all()


@pytest.mark.parametrize("name", sorted(set(NORMS) - {"BatchNorm"}))
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(2, 6, 8), (1, 1, 8)], ids=["rows", "one row"])
def test_values_whose_squares_are_beyond_float32_are_normalized(name, masked, shape):
    norm, mask = NORMS[name][0](), jnp.ones((*shape[:2], 1), bool) if masked else None
    x, weights = normal(*shape), np.cos(np.arange(np.prod(shape))).reshape(shape).astype(np.float32)

    def value_and_gradient(x):
        y, pullback = jax.vjp(lambda x: norm(x, mask=mask), x)
        return norm(x, mask=mask), y, pullback(weights)[0]

    y, differentiated, gradient = value_and_gradient(2.0**66 * x)
    *expected, expected_gradient = value_and_gradient(2.0**16 * x)  # for which epsilon is negligible as well
    np.testing.assert_allclose([y, differentiated], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(2.0**50 * gradient, expected_gradient, rtol=1e-4, atol=1e-10)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_a_variance_that_overflows_is_nan_in_its_row(name):
    norm, x = NORMS[name][0](), normal(2, 8).at[1].multiply(1e32)
    for y in (norm(x), jax.vjp(norm, x)[0]):
        assert jnp.isfinite(y[0]).all() and jnp.isnan(y[1]).all()


def test_batch_norm_keeps_its_variance_and_is_nan_where_that_overflows():
    layer, x = nnx.BatchNorm(8, use_running_average=False), normal(4, 8).at[:, 1].multiply(1e20)
    for y in (layer(x), layer(x, use_running_average=True)):
        assert jnp.isnan(y[:, 1]).all() and jnp.isfinite(y[:, 2:]).all()


@pytest.mark.parametrize("epsilon", [1e-5, 1e-12, 1.2e-38])
def test_small_rows_have_the_gradients_of_the_formula(epsilon):
    x = np.array([0, 1e-14, 1e-8, 1e-4])[:, None] * numpy_normal(4, 8).astype(np.float64)
    weights = np.cos(np.arange(32)).reshape(4, 8)
    factor = 1 / np.sqrt(np.mean(x**2, -1, keepdims=True) + epsilon)
    y = x * factor
    expected = factor * (weights - y * np.mean(weights * y, -1, keepdims=True))
    found, pullback = jax.vjp(nnx.RMSNorm(8, epsilon=epsilon), jnp.asarray(x, jnp.float32))
    (gradient,) = pullback(jnp.asarray(weights, jnp.float32))
    np.testing.assert_allclose(found, y, rtol=1e-5)
    largest = np.abs(expected).max(-1, keepdims=True)
    np.testing.assert_allclose(gradient / largest, expected / largest, atol=1e-5)


def test_second_derivatives_of_a_norm_are_those_of_its_formula():
    layer, x = nnx.LayerNorm(4, use_scale=False, use_bias=False), normal(4)

    def formula(x):
        return jnp.sum(jnp.sin((x - x.mean()) / jnp.sqrt(x.var() + 1e-6)))

    expected = jax.hessian(formula)(x)
    np.testing.assert_allclose(jax.hessian(lambda x: jnp.sum(jnp.sin(layer(x))))(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "InstanceNorm"])
def test_differentiating_a_norm_does_not_change_its_output(name):
    # The two are computed in different forms, see `_fused` in norm_base.
    norm, x = NORMS[name][0](), 3 + numpy_normal(4, 6, 8).astype(np.float32)
    y, pullback = jax.vjp(norm, x)
    np.testing.assert_allclose(y, norm(x), atol=2e-6)
    masked = jax.vjp(lambda x: norm(x, mask=jnp.ones(x.shape, bool)), x)[1]  # the plain formula of a masked norm
    np.testing.assert_allclose(pullback(x)[0], masked(x)[0], atol=2e-5)


@every_norm
def test_a_mask_without_valid_entries_has_finite_values_and_gradients(name):
    layer, x = NORMS[name][0](), 5 + normal(2, 3, 8)
    # The first example, whose entries make whole rows, groups and instances; for BatchNorm, everything.
    mask = jnp.zeros((2, 1, 1), bool) if name == "BatchNorm" else jnp.array([False, True])[:, None, None]

    def loss(layer, x):
        return jnp.sum(layer(x, mask=mask)[1] ** 3)

    assert jnp.isfinite(layer(x, mask=mask)).all()
    np.testing.assert_allclose(layer(x, mask=mask)[0], x[0], rtol=1e-4)  # the moments are 0 and 1
    for gradient in jax.tree.leaves(nnx.grad(loss, argnums=(0, 1))(layer, x)):
        assert jnp.isfinite(gradient).all()


@every_norm
def test_a_nan_behind_a_mask_does_not_reach_valid_entries(name):
    layer, x = NORMS[name][0](), normal(2, 3, 8)
    mask = jnp.arange(8) != 2 if name in ("LayerNorm", "RMSNorm") else (jnp.arange(3) != 2)[:, None]
    mask = jnp.broadcast_to(mask, x.shape)

    broken = layer(jnp.where(mask, x, jnp.nan), mask=mask)
    np.testing.assert_allclose(broken[mask], NORMS[name][0]()(x, mask=mask)[mask], rtol=1e-5)


@pytest.mark.parametrize("rows, mask", [(0, None), (3, False)])
def test_a_batch_without_entries_leaves_the_running_averages_alone(rows, mask):
    layer = nnx.BatchNorm(4, use_running_average=False)
    layer(2 + normal(16, 4))
    before = layer.filter(nnx.BatchStat)
    y = layer(jnp.ones((rows, 4)), mask=None if mask is None else jnp.full((rows, 4), mask))
    assert jnp.isfinite(y).all() and y.shape == (rows, 4)
    assert layer.filter(nnx.BatchStat) == before


def test_features_without_valid_entries_keep_their_running_averages():
    layer = nnx.BatchNorm(2, use_running_average=False, momentum=0.5)
    layer(jnp.full((4, 2), 8.0), mask=jnp.array([[True, False]]))
    np.testing.assert_allclose(layer.mean, [4.0, 0.0])
    np.testing.assert_allclose(layer.var, [0.5, 1.0])


@every_norm
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_a_mask_of_numbers_counts_nonzero_entries_once(name, dtype):
    x = normal(2, 3, 8)
    mask = jnp.array([2, 0, 1])[:, None]
    given = jnp.broadcast_to(mask, x.shape)
    y = NORMS[name][0]()(x, mask=given.astype(dtype))
    np.testing.assert_array_equal(y, NORMS[name][0]()(x, mask=given != 0))


def test_complex_batch_norm_keeps_the_imaginary_running_mean():
    x = normal(64, 2) + 1j * (3 + normal(64, 2, seed=1))
    layer = nnx.BatchNorm(2, use_running_average=False, momentum=0.0, param_dtype=jnp.complex64)
    y = layer(x)
    np.testing.assert_allclose(layer.mean, x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(layer.var, x.var(0), rtol=1e-4)
    assert layer.var.dtype == jnp.float32
    np.testing.assert_allclose(layer(x, use_running_average=True), y, rtol=1e-4, atol=1e-5)


def test_complex_input_of_a_real_batch_norm_is_an_error():
    layer = nnx.BatchNorm(2, use_running_average=False)
    with pytest.raises(ValueError, match=r"complex64.*running mean is real.*param_dtype=jnp\.complex64"):
        layer(jnp.ones((3, 2), jnp.complex64))
