"""Normalization: statistics, modes, masks, mapped axes and low precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.nn.arrays import normal, numpy_normal

THREE_WAYS = r"in the call.*use_running_average=.*on the instance.*flag of the Context.*nnx\.context"


def test_batch_norm_takes_its_mode_from_call_then_instance_then_context():
    x = 5 + normal(8, 3)
    running = nnx.BatchNorm(3)(x, use_running_average=True)
    batch = nnx.BatchNorm(3)(x, use_running_average=False)
    assert not jnp.allclose(running, batch)

    training = nnx.context(0, flags={"use_running_average": False})
    np.testing.assert_array_equal(nnx.BatchNorm(3)(x, ctx=training), batch)
    np.testing.assert_array_equal(nnx.BatchNorm(3, use_running_average=True)(x, ctx=training), running)
    on_instance = nnx.BatchNorm(3, use_running_average=True)
    np.testing.assert_array_equal(on_instance(x, use_running_average=False, ctx=training), batch)


@pytest.mark.parametrize("ctx", [None, "without flag"])
def test_batch_norm_without_a_mode_names_the_three_ways(ctx):
    with pytest.raises(ValueError, match=THREE_WAYS):
        nnx.BatchNorm(3)(jnp.ones((2, 3)), ctx=ctx and nnx.context(0))


def test_batch_norm_updates_its_averages_only_in_training():
    layer = nnx.BatchNorm(3, momentum=0.5)
    x = 4 + normal(64, 3)
    layer(x, use_running_average=True)
    np.testing.assert_array_equal(layer.mean, jnp.zeros(3))
    layer(x, use_running_average=False)
    np.testing.assert_allclose(layer.mean, x.mean(0) / 2, rtol=1e-5)
    np.testing.assert_allclose(layer.var, 0.5 + x.var(0) / 2, rtol=1e-4)
    assert set(layer.filter(nnx.BatchStat)) == {"mean", "var"}


def test_batch_norm_needs_a_batch():
    with pytest.raises(ValueError, match=r"expected a batch.*x\[None\].*axis_name"):
        nnx.BatchNorm(3)(jnp.ones(3), use_running_average=False)


def test_batch_norm_over_a_mapped_axis_sees_the_whole_batch():
    x = normal(8, 3)
    whole = nnx.BatchNorm(3)
    expected = whole(x, use_running_average=False)
    state, moduledef = nnx.BatchNorm(3, axis_name="batch").partition()

    def part(x):
        layer = moduledef.merge(state)
        return layer(x, use_running_average=False), layer.mean

    out, mean = jax.vmap(part, axis_name="batch")(x)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mean, jnp.broadcast_to(whole.mean, (8, 3)), rtol=1e-5)
    out, mean = jax.vmap(part, axis_name="batch")(x.reshape(4, 2, 3))
    np.testing.assert_allclose(out.reshape(8, 3), expected, rtol=1e-4, atol=1e-5)


def test_masked_batch_norm_over_a_mapped_axis_counts_valid_entries_only():
    x, mask = normal(4, 2, 3), jnp.array([[1, 1], [1, 0], [0, 1], [1, 1]], bool)[..., None]
    valid = x[mask[..., 0]]
    state, moduledef = nnx.BatchNorm(3, axis_name="batch", momentum=0.0).partition()

    def part(x, mask):
        layer = moduledef.merge(state)
        layer(x, use_running_average=False, mask=mask)
        return layer.mean

    np.testing.assert_allclose(jax.vmap(part, axis_name="batch")(x, mask)[0], valid.mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "make", [nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.InstanceNorm], ids=lambda m: m.__name__
)
def test_statistics_of_half_precision_inputs_are_computed_in_float32(make, dtype):
    # In half precision, a sum of 4096 ones stops at 256 (bfloat16) or overflows when squared (float16).
    x = (100 + normal(2, 64, 64)).astype(dtype)
    layer = make(64, use_running_average=False) if make is nnx.BatchNorm else make(64)
    expected = make(64, use_running_average=False) if make is nnx.BatchNorm else make(64)
    out = layer(x)
    assert jnp.all(jnp.isfinite(out))
    np.testing.assert_allclose(out, expected(x.astype(jnp.float32)), rtol=1e-2, atol=1e-2)


def test_running_averages_stay_in_float32():
    layer = nnx.BatchNorm(3, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, use_running_average=False)
    assert layer(jnp.ones((2, 3), jnp.bfloat16)).dtype == jnp.bfloat16
    assert layer.mean.dtype == layer.var.dtype == jnp.float32


def test_layer_norm_over_several_axes():
    x = normal(5, 4, 3)
    layer = nnx.LayerNorm(12, reduction_axes=(-2, -1), feature_axes=(-2, -1))
    np.testing.assert_allclose(layer(x), (x - x.mean((1, 2), keepdims=True)) / x.std((1, 2), keepdims=True), atol=1e-4)
    with pytest.raises(ValueError, match=r"LayerNorm expected 12 features on axes \(-2, -1\), got 6"):
        layer(normal(5, 2, 3))


def test_an_offset_is_added_to_the_scale_in_float32():
    zeros = nnx.initializers.zeros()
    layer = nnx.RMSNorm(4, scale_offset=1.0, scale_init=zeros, param_dtype=jnp.bfloat16, ctx=nnx.context(0))
    x = numpy_normal(3, 4)
    plain = nnx.RMSNorm(4, ctx=nnx.context(0))
    np.testing.assert_allclose(layer(x), plain(x), rtol=1e-6)
    layer.scale = jnp.full(4, 1e-3, jnp.bfloat16)  # 1 + 1e-3 is 1 in bfloat16
    np.testing.assert_allclose(layer(x), plain(x) * (1 + float(layer.scale[0])), rtol=1e-5)


def test_group_norm_with_one_group_is_layer_norm_over_everything_but_the_batch():
    x = normal(3, 4, 5, 6)
    np.testing.assert_allclose(
        nnx.GroupNorm(6, num_groups=1)(x), nnx.LayerNorm(6, reduction_axes=(1, 2, 3))(x), rtol=1e-4, atol=1e-5
    )


def test_group_norm_ignores_masked_entries():
    x, mask = normal(2, 6, 4), jnp.arange(6)[None, :, None] < 4
    layer = nnx.GroupNorm(4, num_groups=2)
    np.testing.assert_allclose(layer(x, mask=mask)[:, :4], layer(x[:, :4]), rtol=1e-4, atol=1e-5)


def test_group_norm_explains_wrong_groups():
    with pytest.raises(ValueError, match="exactly one.*num_groups=32, group_size=2.*num_groups=None"):
        nnx.GroupNorm(64, group_size=2)
    with pytest.raises(ValueError, match="6 features.*num_groups=4"):
        nnx.GroupNorm(6, num_groups=4)
    with pytest.raises(ValueError, match="6 features.*group_size=4"):
        nnx.GroupNorm(6, num_groups=None, group_size=4)
    with pytest.raises(ValueError, match="6 features.*group_size=0"):
        nnx.GroupNorm(6, num_groups=None, group_size=0)
    with pytest.raises(ValueError, match="last axis"):
        nnx.GroupNorm(6, num_groups=3, reduction_axes=(1,))(normal(2, 3, 6))


def test_instance_norm_refuses_an_input_without_space():
    with pytest.raises(ValueError, match=r"InstanceNorm.*got shape \(5, 3\).*x\[None\]"):
        nnx.InstanceNorm(3)(jnp.ones((5, 3)))


@pytest.mark.parametrize("shape", [(5,), (4, 3), (1, 5, 1, 1)], ids=str)
def test_a_mask_of_another_shape_is_not_silently_broadcast(shape):
    with pytest.raises(ValueError, match="LayerNorm expected a mask"):
        nnx.LayerNorm(3)(normal(2, 5, 3), mask=jnp.ones(shape, bool))


def test_layers_without_scale_and_bias_have_no_parameters():
    layer = nnx.LayerNorm(3, use_scale=False, use_bias=False)
    assert len(layer.get_state()) == 0
    np.testing.assert_allclose(layer(normal(2, 3)).mean(-1), 0, atol=1e-6)


def test_random_scale_initializer_needs_a_context():
    init = nnx.initializers.normal()
    with pytest.raises(ValueError, match=r"LayerNorm.*no Context.*ctx=nnx\.context\(0\)"):
        nnx.LayerNorm(3, scale_init=init)
    assert nnx.LayerNorm(3, scale_init=init, ctx=nnx.context(0)).scale.shape == (3,)


def test_spectral_norm_brings_the_largest_singular_value_to_one():
    ctx = nnx.context(0)
    layer = nnx.SpectralNorm(nnx.Linear(6, 4, use_bias=False, ctx=ctx), n_steps=50, ctx=ctx)
    kernel = layer.layer_instance.kernel
    normalized = layer(jnp.eye(6))
    assert float(jnp.linalg.norm(normalized, 2)) == pytest.approx(1.0, rel=1e-4)
    np.testing.assert_array_equal(layer.layer_instance.kernel, kernel)
    assert float(layer.sigma["kernel"]) == pytest.approx(float(jnp.linalg.norm(kernel, 2)), rel=1e-4)


def test_spectral_norm_survives_a_kernel_of_zeros():
    ctx = nnx.context(0)
    layer = nnx.SpectralNorm(nnx.Linear(6, 4, use_bias=False, ctx=ctx), n_steps=50, ctx=ctx)
    kernel = layer.layer_instance.kernel
    layer.layer_instance.kernel = jnp.zeros_like(kernel)
    np.testing.assert_array_equal(layer(jnp.eye(6)), 0)
    layer.layer_instance.kernel = kernel
    assert float(jnp.linalg.norm(layer(jnp.eye(6)), 2)) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("size", [1e-30, 1e-8, 1e25])
def test_weights_of_any_size_are_normalized(size):
    ctx = nnx.context(0)
    inner = nnx.Linear(6, 4, use_bias=False, ctx=ctx)
    inner.kernel *= size
    spectral = nnx.SpectralNorm(inner, n_steps=50, ctx=ctx)
    assert float(jnp.linalg.norm(spectral(jnp.eye(6)), 2)) == pytest.approx(1.0, rel=1e-4)
    np.testing.assert_allclose(jnp.linalg.norm(nnx.WeightNorm(inner)(jnp.eye(6)), axis=0), 1.0, rtol=1e-5)


def test_complex_weights_are_normalized_by_their_modulus():
    ctx = nnx.context(0)
    inner = nnx.Linear(6, 4, use_bias=False, param_dtype=jnp.complex64, ctx=ctx)
    spectral = nnx.SpectralNorm(inner, n_steps=50, ctx=ctx)
    identity = jnp.eye(6, dtype=jnp.complex64)
    assert float(jnp.linalg.norm(spectral(identity), 2)) == pytest.approx(1.0, rel=1e-4)
    assert float(spectral.sigma["kernel"]) == pytest.approx(float(jnp.linalg.norm(inner.kernel, 2)), rel=1e-4)
    np.testing.assert_allclose(jnp.linalg.norm(nnx.WeightNorm(inner)(identity), axis=0), 1.0, rtol=1e-5)


def test_weight_norm_of_zeros_has_a_finite_gradient():
    layer = nnx.WeightNorm(nnx.Linear(6, 4, kernel_init=nnx.initializers.zeros(), ctx=nnx.context(0)))
    for gradient in jax.tree.leaves(nnx.grad(lambda layer: layer(jnp.ones(6)).sum())(layer)):
        assert jnp.isfinite(gradient).all()


def test_spectral_norm_changes_its_estimate_only_when_told_to():
    ctx = nnx.context(0)
    layer = nnx.SpectralNorm(nnx.Conv(2, 3, (3,), ctx=ctx), ctx=ctx)
    before = layer.get_state()
    layer(jnp.ones((5, 2)), update_stats=False)
    assert layer.get_state() == before
    layer(jnp.ones((5, 2)))
    assert layer.get_state() != before


def test_spectral_norm_can_refuse_arrays_that_are_not_matrices():
    ctx = nnx.context(0)
    with pytest.raises(ValueError, match=r"'kernel' has shape \(3, 2, 3\)"):
        nnx.SpectralNorm(nnx.Conv(2, 3, (3,), ctx=ctx), error_on_non_matrix=True, ctx=ctx)


def test_weight_norm_brings_columns_to_norm_one_and_scales_them():
    layer = nnx.WeightNorm(nnx.Linear(6, 4, use_bias=False, ctx=nnx.context(0)))
    np.testing.assert_allclose(jnp.linalg.norm(layer(jnp.eye(6)), axis=0), 1.0, rtol=1e-5)
    layer.scale["kernel"] = jnp.arange(1.0, 5.0)
    np.testing.assert_allclose(jnp.linalg.norm(layer(jnp.eye(6)), axis=0), jnp.arange(1.0, 5.0), rtol=1e-5)


def test_weight_wrappers_reach_nested_weights_and_keep_other_changes():
    class Block(nnx.Module):
        def __init__(self, ctx):
            self.layers = [nnx.Linear(3, 3, ctx=ctx), nnx.BatchNorm(3, use_running_average=False)]

        def __call__(self, x):
            return self.layers[1](self.layers[0](x))

    layer = nnx.WeightNorm(Block(nnx.context(0)))
    layer(5 + normal(4, 3))
    assert layer.layer_instance.layers[1].mean.any()
    assert list(layer.scale) == ["layers.0.kernel"]


def test_weight_wrappers_say_when_there_is_nothing_to_normalize():
    with pytest.raises(ValueError, match="WeightNorm found no weights to normalize in LayerNorm.*bias, scale"):
        nnx.WeightNorm(nnx.LayerNorm(3))
