"""Linear layers: shapes, dtypes, replaced operations, and errors that say expected and got."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import nnx
from tests.nn.arrays import normal, numpy_normal


def primitives(function, *args):
    """The names of the primitives in a function's jaxpr, those of nested calls included."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            inner = [p.jaxpr for p in eqn.params.values() if hasattr(p, "jaxpr")]
            if inner:
                for nested in inner:
                    yield from walk(nested)
            else:
                yield eqn.primitive.name

    return list(walk(jax.make_jaxpr(function)(*args).jaxpr))


def test_linear_is_a_product_and_a_sum():
    layer = nnx.Linear(3, 4, ctx=nnx.context(0))
    layer.bias = jnp.arange(4.0)
    x = jnp.ones((2, 5, 3))
    np.testing.assert_allclose(layer(x), x @ layer.kernel + layer.bias, rtol=1e-6)


def test_linear_traces_one_product_and_one_sum_and_no_casts():
    layer = nnx.Linear(3, 4, ctx=nnx.context(0))
    names = primitives(layer, jnp.ones((2, 3)))
    assert names.count("dot_general") == 1
    assert names.count("add") == 1
    assert "convert_element_type" not in names


def test_linear_casts_only_arrays_of_another_dtype():
    layer = nnx.Linear(3, 4, dtype=jnp.bfloat16, ctx=nnx.context(0))
    assert primitives(layer, jnp.ones((2, 3), jnp.bfloat16)).count("convert_element_type") == 2
    layer = nnx.Linear(3, 4, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, ctx=nnx.context(0))
    assert "convert_element_type" not in primitives(layer, jnp.ones((2, 3), jnp.bfloat16))


def test_linear_takes_integers_and_numpy_arrays():
    layer = nnx.Linear(3, 4, ctx=nnx.context(0))
    assert layer(np.ones((2, 3), np.int32)).dtype == jnp.float32
    assert layer(np.ones((2, 3), np.float64)).dtype == jnp.float32


def test_linear_names_expected_and_got_features():
    layer = nnx.Linear(3, 4, ctx=nnx.context(0))
    with pytest.raises(
        ValueError, match=r"Linear expected 3 features on the last axis, got 5.*\(2, 5\).*in_features=5"
    ):
        layer(jnp.ones((2, 5)))


def test_linear_calls_a_dot_general_of_the_user_each_time():
    calls = []

    def dot_general(lhs, rhs, dimensions, precision=None):
        calls.append(precision)
        return lax.dot_general(lhs, rhs, dimensions, precision=precision)

    layer = nnx.Linear(3, 4, dot_general=dot_general, precision="highest", ctx=nnx.context(0))
    for _ in range(2):
        layer(jnp.ones((2, 3)))
    assert calls == ["highest", "highest"]


def test_linear_calls_a_promote_dtype_of_the_user():
    def to_half(arrays, dtype=None):
        return tuple(None if a is None else a.astype(jnp.float16) for a in arrays)

    assert nnx.Linear(3, 4, promote_dtype=to_half, ctx=nnx.context(0))(jnp.ones((2, 3))).dtype == jnp.float16


def test_preferred_element_type_widens_the_result():
    layer = nnx.Linear(3, 4, dtype=jnp.bfloat16, preferred_element_type=jnp.float32, ctx=nnx.context(0))
    assert layer(jnp.ones((2, 3))).dtype == jnp.float32


def test_metadata_reach_the_variables_by_argument_and_by_initializer():
    layer = nnx.Linear(
        3,
        4,
        kernel_init=nnx.with_partitioning(nnx.initializers.lecun_normal(), ("in", "out")),
        bias_metadata={"sharding": ("out",)},
        ctx=nnx.context(0),
    )
    assert layer.variable("kernel").sharding == ("in", "out")
    assert layer.variable("bias").sharding == ("out",)


def test_toggling_the_bias_changes_no_kernel():
    with_bias, without = nnx.context(0), nnx.context(0)
    nnx.Linear(3, 4, ctx=with_bias)
    nnx.Linear(3, 4, use_bias=False, ctx=without)
    np.testing.assert_array_equal(nnx.Linear(3, 4, ctx=with_bias).kernel, nnx.Linear(3, 4, ctx=without).kernel)


def test_linear_general_keeps_metadata_of_a_reshaped_kernel():
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "heads", "dim"))
    layer = nnx.LinearGeneral(6, (2, 3), kernel_init=init, ctx=nnx.context(0))
    assert layer.kernel.shape == (6, 2, 3)
    assert layer.variable("kernel").sharding == ("embed", "heads", "dim")


def test_linear_general_initializes_by_the_true_number_of_inputs():
    layer = nnx.LinearGeneral((20, 30), (10, 10), axis=(-2, -1), ctx=nnx.context(0))
    assert float(layer.kernel.std()) == pytest.approx(600**-0.5, rel=0.05)


def test_linear_general_refuses_axes_that_do_not_fit():
    with pytest.raises(ValueError, match="same number of entries"):
        nnx.LinearGeneral((2, 3), 4, ctx=nnx.context(0))
    with pytest.raises(ValueError, match="leading axes.*moveaxis"):
        nnx.LinearGeneral(3, 4, batch_axis={1: 2}, ctx=nnx.context(0))
    with pytest.raises(ValueError, match="LinearGeneral expected 3 features on axis 1, got 2"):
        nnx.LinearGeneral(3, 4, axis=1, ctx=nnx.context(0))(jnp.ones((5, 2)))


def test_einsum_takes_its_equation_in_constructor_or_call_but_not_both():
    x = jnp.ones((2, 3))
    late = nnx.Einsum(None, (3, 4), ctx=nnx.context(0))
    early = nnx.Einsum("ab,bc->ac", (3, 4), ctx=nnx.context(0))
    np.testing.assert_allclose(late(x, "ab,bc->ac"), early(x))
    with pytest.raises(ValueError, match="exactly once.*neither"):
        late(x)
    with pytest.raises(ValueError, match="exactly once.*both"):
        early(x, "ab,bc->ac")


def test_einsum_adds_the_bias_along_the_kernels_axes():
    layer = nnx.Einsum("ab,bc->ca", (3, 4), (4,), bias_init=nnx.initializers.constant(2.0), ctx=nnx.context(0))
    x = jnp.ones((5, 3))
    np.testing.assert_allclose(layer(x), (x @ layer.kernel).T + 2.0, rtol=1e-6)


def test_einsum_explains_a_wrong_equation_bias_or_input():
    with pytest.raises(ValueError, match="like 'ab,bc->ac'.*got 'ab->a'"):
        nnx.Einsum("ab->a", (3,), ctx=nnx.context(0))
    with pytest.raises(ValueError, match="kernel_shape"):
        nnx.Einsum("ab,bc->ac", (3,), ctx=nnx.context(0))
    with pytest.raises(ValueError, match=r"bias_shape=\(4,\)"):
        nnx.Einsum("ab,bc->ac", (3, 4), (2,), ctx=nnx.context(0))
    with pytest.raises(ValueError, match="expected 3 features on the input's axis 'b', got 1"):
        nnx.Einsum("ab,bc->ac", (3, 4), ctx=nnx.context(0))(jnp.ones((2, 1)))


def test_bilinear_is_a_quadratic_form_per_output():
    layer = nnx.Bilinear(2, 3, 4, ctx=nnx.context(0))
    x1, x2 = jnp.arange(2.0), jnp.arange(3.0)
    expected = [x1 @ layer.kernel[:, :, k] @ x2 for k in range(4)]
    np.testing.assert_allclose(layer(x1, x2), expected, rtol=1e-5)


def test_bilinear_refuses_to_broadcast():
    layer = nnx.Bilinear(2, 3, 4, ctx=nnx.context(0))
    with pytest.raises(ValueError, match=r"equal leading axes.*\(1, 2\) and \(5, 3\).*broadcast_to"):
        layer(jnp.ones((1, 2)), jnp.ones((5, 3)))


def test_identity_ignores_options_meant_for_another_layer():
    x = jnp.ones(3)
    assert nnx.Identity()(x, deterministic=True, ctx=None) is x


def test_mlp_activates_between_its_layers():
    model = nnx.MLP(3, (5, 5), 2, ctx=nnx.context(0))
    assert [layer.kernel.shape for layer in model.layers] == [(3, 5), (5, 5), (5, 2)]
    x = normal(4, 3)
    y = jax.nn.relu(model.layers[1](jax.nn.relu(model.layers[0](x))))
    np.testing.assert_allclose(model(x), model.layers[2](y), rtol=1e-5)


def test_mlp_without_hidden_layers_is_linear():
    model = nnx.MLP(3, (), 2, ctx=nnx.context(0))
    x = jnp.ones((4, 3))
    np.testing.assert_allclose(model(x), model.layers[0](x))


def test_mlp_with_dropout_needs_a_mode():
    model = nnx.MLP(3, 8, 2, dropout_rate=0.5, ctx=nnx.context(0))
    with pytest.raises(ValueError, match="deterministic"):
        model(jnp.ones((4, 3)))
    assert model(jnp.ones((4, 3)), deterministic=True).shape == (4, 2)
    ctx = nnx.context(dropout=0)
    one = model(jnp.ones((4, 3)), deterministic=False, ctx=ctx)
    assert not jnp.allclose(one, model(jnp.ones((4, 3)), deterministic=False, ctx=ctx))


def test_layers_work_with_strict_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        x = jnp.ones((2, 6, 3))
        nnx.Linear(3, 4, ctx=nnx.context(0))(x)
        nnx.LinearGeneral(3, (2, 2), ctx=nnx.context(0))(x)
        nnx.Conv(3, 4, (3,), ctx=nnx.context(0))(x)
        nnx.LayerNorm(3)(x)
        nnx.BatchNorm(3)(x, use_running_average=False)


@pytest.mark.parametrize("use_bias", [False, True])
def test_gated_mlp_multiplies_the_activated_gate_with_the_other_projection(use_bias):
    layer = nnx.GatedMLP(
        3, 5, 2, activation=nnx.gelu, use_bias=use_bias, bias_init=nnx.initializers.normal(), ctx=nnx.context(0)
    )
    x = numpy_normal(4, 3)
    expected = layer.down(nnx.gelu(layer.gate(x)) * layer.up(x))
    np.testing.assert_allclose(layer(x), expected, rtol=1e-6)
    assert len(layer.get_state()) == (6 if use_bias else 3)
    assert layer.gate.kernel.shape == layer.up.kernel.shape == (3, 5) and layer.down.kernel.shape == (5, 2)


def test_a_gated_activation_takes_gates_and_values():
    layer = nnx.GatedMLP(3, 5, gated_activation=lambda gate, up: jnp.tanh(gate) - up, ctx=nnx.context(0))
    x = numpy_normal(4, 3)
    np.testing.assert_allclose(layer(x), layer.down(jnp.tanh(layer.gate(x)) - layer.up(x)), rtol=1e-6)
    with pytest.raises(ValueError, match="GatedMLP: `gated_activation` replaces `activation`, but activation=.*relu"):
        nnx.GatedMLP(3, 5, activation=nnx.relu, gated_activation=jnp.multiply, ctx=nnx.context(0))


def test_gated_mlp_returns_as_many_features_as_it_takes_by_default():
    assert nnx.GatedMLP(3, 5, ctx=nnx.context(0))(numpy_normal(4, 3)).shape == (4, 3)
