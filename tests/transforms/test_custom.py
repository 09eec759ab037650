"""`custom_vjp` and `custom_jvp` on Modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.checks import assert_no_tracers
from tests.transforms.derivative_models import Affine

# custom_vjp


def make_custom_vjp():
    @nnx.custom_vjp
    def scaled(m, x):
        m.count += 1
        return m.kernel.sum() * x

    def forward(m, x):
        m.count += 1
        return m.kernel.sum() * x, (m.filter(nnx.Param), x)

    def backward(residuals, g):
        params, x = residuals
        ones = jax.tree.map(jnp.ones_like, params)
        return jax.tree.map(lambda w: w * g * 100.0, ones), g * 7.0

    scaled.defvjp(forward, backward)
    return scaled


def test_custom_vjp_runs_as_the_function_itself():
    model, scaled = Affine(), make_custom_vjp()
    np.testing.assert_allclose(scaled(model, 2.0), 2 * model.kernel.sum(), rtol=1e-6)
    assert model.count == 1


def test_custom_vjp_backward_returns_a_state():
    model, scaled = Affine(), make_custom_vjp()
    grads, by_x = nnx.grad(scaled, argnums=(0, 1))(model, 2.0)
    assert list(grads) == ["bias", "kernel"] and isinstance(grads["kernel"], nnx.Param)
    np.testing.assert_allclose(grads["kernel"].value, np.full((2, 2), 100.0))
    assert by_x == 7.0


def test_state_changes_in_the_custom_forward_pass_are_kept():
    model, scaled = Affine(), make_custom_vjp()
    nnx.grad(scaled)(model, 2.0)
    assert model.count == 1
    assert_no_tracers(model)


def test_custom_vjp_inside_jit_and_grad():
    model, scaled = Affine(), make_custom_vjp()

    @nnx.jit
    def step(m, x):
        return nnx.value_and_grad(lambda m: scaled(m, x) * 3.0)(m)

    value, grads = step(model, 2.0)
    np.testing.assert_allclose(value, 6 * model.kernel.sum(), rtol=1e-5)
    np.testing.assert_allclose(grads["kernel"].value, np.full((2, 2), 300.0))
    assert model.count == 1


def scaled_sum(m, x):
    return m.kernel.sum() * x


def test_a_state_change_in_the_custom_backward_pass_is_an_error():
    model, f = Affine(), nnx.custom_vjp(scaled_sum)

    def forward(m, x):
        return m.kernel.sum() * x, (m, x)

    def backward(residuals, g):
        m, x = residuals
        m.count += 1
        return jax.tree.map(jnp.zeros_like, m.filter(nnx.Param)), g

    f.defvjp(forward, backward)
    with pytest.raises(Exception, match="count|backward"):
        nnx.grad(f)(model, 2.0)
    assert model.count == 0


def test_a_custom_backward_of_other_paths_is_an_error_that_names_them():
    model, f = Affine(), nnx.custom_vjp(scaled_sum)
    f.defvjp(lambda m, x: (m.kernel.sum() * x, m.filter(nnx.PathMatches("bias"))), lambda residuals, g: (residuals, g))
    with pytest.raises((TypeError, ValueError), match="kernel"):
        nnx.grad(f)(model, 2.0)


def test_custom_vjp_takes_nondiff_argnums():
    @nnx.custom_vjp(nondiff_argnums=(0,))
    def f(power, m):
        return (m.bias**power).sum()

    f.defvjp(
        lambda power, m: ((m.bias**power).sum(), m.filter(nnx.Param)),
        lambda power, params, g: (jax.tree.map(lambda w: jnp.full_like(w, power * g), params),),
    )
    grads = nnx.grad(lambda m: f(3, m))(Affine())
    np.testing.assert_allclose(grads["bias"].value, [3.0, 3.0])


def test_custom_vjp_keeps_name_and_docstring():
    @nnx.custom_vjp
    def scaled(m, x):
        """Scales."""
        return x

    assert scaled.__name__ == "scaled" and scaled.__doc__ == "Scales."


# custom_jvp


def make_custom_jvp():
    @nnx.custom_jvp
    def f(m, x):
        m.count += 1
        return m.bias.sum() * x

    @f.defjvp
    def f_jvp(primals, tangents):
        m, x = primals
        m_dot, x_dot = tangents
        m.count += 1
        assert isinstance(m_dot, nnx.State)
        return m.bias.sum() * x, 10.0 * m_dot["bias"].value.sum() + 20.0 * x_dot

    return f


def test_custom_jvp_runs_as_the_function_itself():
    model, f = Affine(), make_custom_jvp()
    model.bias = jnp.array([1.0, 2.0])
    assert f(model, 2.0) == 6.0 and model.count == 1


def test_custom_jvp_takes_and_returns_tangents_of_states():
    model, f = Affine(), make_custom_jvp()
    model.bias = jnp.array([1.0, 2.0])
    tangent = jax.tree.map(jnp.ones_like, model.filter(nnx.Param))
    y, y_dot = nnx.jvp(f, (model, 2.0), (tangent, 1.0))
    assert y == 6.0 and y_dot == 40.0
    assert model.count == 1
    assert_no_tracers(model)


def test_custom_jvp_serves_reverse_mode():
    model, f = Affine(), make_custom_jvp()
    grads, by_x = nnx.grad(f, argnums=(0, 1))(model, 2.0)
    np.testing.assert_allclose(grads["bias"].value, [10.0, 10.0])
    np.testing.assert_allclose(grads["kernel"].value, np.zeros((2, 2)))
    assert by_x == 20.0 and model.count == 1


def test_custom_jvp_inside_jit():
    model, f = Affine(), make_custom_jvp()
    grads = nnx.jit(lambda m, x: nnx.grad(f)(m, x))(model, 2.0)
    np.testing.assert_allclose(grads["bias"].value, [10.0, 10.0])
    assert model.count == 1


# Modules that share cells


def scalar(value):
    return nnx.Dict(w=nnx.Param(jnp.array(value)))


def tied(value):
    ref = nnx.Ref(nnx.Param(jnp.array(value)))
    return nnx.Dict(w=ref), nnx.Dict(w=ref)


def filled(module, value):
    return jax.tree.map(lambda w: jnp.full_like(w, value), module.filter(nnx.Param))


def make_product():
    """`a.w * b.w`, with the cotangents 3 for `a` and 4 for `b`."""

    @nnx.custom_vjp
    def product(a, b):
        return a.w * b.w

    def backward(residuals, g):
        a, b = residuals
        return filled(a, 3 * g), filled(b, 4 * g)

    product.defvjp(lambda a, b: (a.w * b.w, (a, b)), backward)
    return product


@pytest.mark.parametrize("lift", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_cotangents_of_a_module_passed_twice_are_added(lift):
    product = make_product()
    grads = lift(nnx.grad(lambda m: product(m, m)))(scalar(1.0))
    assert grads["w"].value == 7.0


def test_cotangents_of_tied_modules_are_added():
    a, b = tied(1.0)
    first, second = nnx.grad(make_product(), argnums=(0, 1))(a, b)
    assert first["w"].value == 7.0 and len(second) == 0


@pytest.mark.parametrize("parent_first", [True, False])
def test_a_module_and_its_parent_each_have_the_cotangent_of_their_own_paths(parent_first):
    child = scalar(1.0)
    parent = nnx.Dict(child=child)

    @nnx.custom_vjp
    def f(a, b):
        return jnp.array(1.0)

    f.defvjp(lambda a, b: (jnp.array(1.0), (a, b)), lambda kept, g: (filled(kept[0], 3 * g), filled(kept[1], 4 * g)))
    modules = (parent, child) if parent_first else (child, parent)
    grads = nnx.grad(f, argnums=(0, 1))(*modules)
    assert sum(leaf.value for state in grads for leaf in state.values()) == 7.0


def test_a_cotangent_can_name_a_shared_cell_by_any_path():
    ref = nnx.Ref(nnx.Param(jnp.array(1.0)))
    model = nnx.Dict(a=ref, b=nnx.Dict(c=ref))

    @nnx.custom_vjp
    def f(m):
        return m.a * m.b.c

    f.defvjp(lambda m: (m.a * m.b.c, None), lambda _, g: (nnx.State({"a": nnx.Param(g), "b/c": nnx.Param(2 * g)}),))
    assert nnx.grad(f)(model)["a"].value == 3.0


def test_none_is_a_cotangent_of_zeros():
    @nnx.custom_vjp
    def f(modules, x):
        return modules[0].w * modules[1].w * x

    f.defvjp(lambda modules, x: (modules[0].w * x, modules), lambda kept, g: ([filled(kept[0], g), None], None))
    grads, by_x = nnx.grad(f, argnums=(0, 1))([scalar(1.0), scalar(2.0)], 3.0)
    assert grads[0]["w"].value == 1.0 and grads[1]["w"].value == 0.0 and by_x == 0.0
    f.defvjp(lambda modules, x: (modules[0].w * x, None), lambda kept, g: (None, g))
    grads, by_x = nnx.grad(f, argnums=(0, 1))([scalar(1.0), scalar(2.0)], 3.0)
    assert grads[0]["w"].value == grads[1]["w"].value == 0.0 and by_x == 1.0


def make_product_rule():
    @nnx.custom_jvp
    def product(a, b):
        return a.w * b.w

    @product.defjvp
    def rule(primals, tangents):
        (a, b), (a_dot, b_dot) = primals, tangents
        return a.w * b.w, 3.0 * a_dot["w"].value + 4.0 * b_dot["w"].value

    return product


def test_a_forward_rule_sees_the_tangent_of_every_module():
    product, model, (a, b) = make_product_rule(), scalar(1.0), tied(1.0)
    assert nnx.grad(lambda m: product(m, m))(model)["w"].value == 7.0
    assert nnx.grad(product, argnums=(0, 1))(a, b)[0]["w"].value == 7.0
    assert nnx.jvp(lambda m: product(m, m), (model,), (filled(model, 2.0),))[1] == 14.0


# Arguments without a gradient


def make_nondiff_vjp():
    @nnx.custom_vjp(nondiff_argnums=(0, 2))
    def f(m, x, mode="double"):
        m.calls += 1
        return m.w * x

    def forward(m, x, mode):
        m.calls += 1
        return m.w * x, None

    def backward(m, mode, _, g):
        assert isinstance(m, nnx.Dict) and mode == "double"
        return (10 * m.w * g + m.calls,)

    f.defvjp(forward, backward)
    return f


def make_nondiff_jvp():
    @nnx.custom_jvp(nondiff_argnums=(0, 2))
    def f(m, x, mode="double"):
        return m.w * x

    @f.defjvp
    def rule(m, mode, primals, tangents):
        assert isinstance(m, nnx.Dict) and mode == "double"
        return m.w * primals[0], (10 * m.w + 1) * tangents[0]

    return f


LEVELS = {
    "grad": lambda f: nnx.grad(f, argnums=(0, 1)),
    "jit of grad": lambda f: nnx.jit(nnx.grad(f, argnums=(0, 1))),
    "grad of jit": lambda f: nnx.grad(nnx.jit(f), argnums=(0, 1)),
    "grad of remat": lambda f: nnx.grad(nnx.remat(f), argnums=(0, 1)),
}


@pytest.mark.parametrize("levels", LEVELS.values(), ids=LEVELS)
@pytest.mark.parametrize("make", [make_nondiff_vjp, make_nondiff_jvp])
def test_a_module_without_gradient_can_be_used_in_the_rule(make, levels):
    f, model = make(), nnx.Dict(w=nnx.Param(jnp.array(3.0)), calls=nnx.BatchStat(jnp.array(0.0)))
    for _ in range(2):
        model.calls = jnp.array(0.0)
        grads, by_x = levels(lambda m, x: f(m, x))(model, 2.0)
        assert grads["w"].value == 0.0 and by_x == 31.0
        assert_no_tracers(model)


def test_arguments_can_be_passed_by_keyword():
    f, product = make_nondiff_jvp(), make_product()
    model = scalar(3.0)
    assert nnx.grad(lambda x: f(model, x=x, mode="double"))(2.0) == 31.0
    grads = nnx.grad(lambda m: product(b=m, a=scalar(2.0)))(scalar(1.0))
    assert grads["w"].value == 4.0


def test_a_keyword_only_argument_is_a_constant():
    @nnx.custom_vjp
    def f(m, *, scale=2.0):
        return m.w * scale

    f.defvjp(lambda m, *, scale=2.0: (m.w * scale, (m, scale)), lambda kept, g: (filled(kept[0], 5 * kept[1] * g),))
    assert nnx.grad(f)(scalar(1.0))["w"].value == 10.0
    grads, by_scale = nnx.grad(lambda m, s: f(m, scale=s), argnums=(0, 1))(scalar(1.0), 3.0)
    assert grads["w"].value == 15.0 and by_scale == 0.0


def test_a_context_without_gradient_can_be_used_in_the_backward_pass():
    @nnx.custom_vjp(nondiff_argnums=(0,))
    def f(ctx, x):
        return x

    f.defvjp(lambda ctx, x: (x, None), lambda ctx, _, g: (jax.random.uniform(ctx.make_rng("noise")) * g,))
    ctx = nnx.context(noise=0)
    first, second = (nnx.jit(nnx.grad(lambda x, ctx: f(ctx, x)))(1.0, ctx) for _ in range(2))
    assert 0 < first < 1 and 0 < second < 1 and first != second


def test_nondiff_argnums_out_of_range_are_an_error():
    @nnx.custom_vjp(nondiff_argnums=(2,))
    def f(m, x):
        return x

    f.defvjp(lambda m, x: (x, None), lambda _, kept, g: (None, g))
    with pytest.raises(ValueError, match=r"nondiff_argnums=\(2,\) names argument 2 of a call with 2 arguments"):
        f(scalar(1.0), 2.0)


def test_a_forward_rule_that_changes_other_state_than_the_function_is_an_error():
    @nnx.custom_vjp
    def f(m):
        return m.w

    def forward(m):
        m.w = m.w + 1
        return m.w, None

    f.defvjp(forward, lambda _, g: (nnx.State({"w": nnx.Param(g)}),))
    with pytest.raises(ValueError, match="the function changes nothing and its forward rule changes 'w'"):
        nnx.grad(nnx.jit(f))(scalar(1.0))


# Residuals


def test_one_module_kept_twice_is_one_module_in_the_backward_pass():
    @nnx.custom_vjp
    def f(m):
        return m.w

    def backward(kept, g):
        first, second, label = kept
        assert first is second and label == "kept"
        return (filled(first, g),)

    f.defvjp(lambda m: (m.w, (m, m, "kept")), backward)
    assert nnx.jit(nnx.grad(f))(scalar(1.0))["w"].value == 1.0


def test_a_structural_change_in_the_backward_pass_is_an_error_that_names_the_path():
    @nnx.custom_vjp
    def f(a, b):
        return a.w * b.w

    def backward(kept, g):
        kept[1].extra = nnx.Param(jnp.ones(1))
        return filled(kept[0], g), nnx.State({"w": nnx.Param(g)})

    f.defvjp(lambda a, b: (a.w * b.w, (a, b)), backward)
    with pytest.raises(ValueError, match=r"backward pass.*'\(Module 1\)/extra'"):
        nnx.grad(f)(scalar(1.0), scalar(2.0))


def test_a_method_with_a_rule_can_be_lifted_with_its_module():
    class Scaled(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.array(2.0))

        @nnx.custom_vjp
        def __call__(self, x):
            return self.w * x

        __call__.defvjp(lambda m, x: (m.w * x, (m, x)), lambda kept, g: (filled(kept[0], 10 * g), g))

    model = Scaled()
    assert nnx.grad(model.__call__)(3.0)["w"].value == 10.0
    assert model(3.0) == 6.0


def test_integer_state_under_wrt_has_no_gradient():
    @nnx.custom_vjp(wrt=...)
    def f(m):
        return m.w * m.n

    f.defvjp(lambda m: (m.w * m.n, m), lambda m, g: (jax.tree.map(jnp.ones_like, m.filter(...)),))
    model = nnx.Dict(w=nnx.Param(jnp.array(2.0)), n=nnx.Variable(jnp.array(3)))
    assert nnx.grad(f)(model)["w"].value == 1.0
