"""`vjp`, `jvp`, `linearize`, `jacfwd`, `jacrev`, `hessian`, `custom_vjp`, `custom_jvp` on Modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


class Count(nnx.Variable):
    pass


class Affine(nnx.Module):
    def __init__(self, seed=0):
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(seed), (2, 2)), ("din", "dout"))
        self.bias = nnx.Param(jnp.array([0.5, -0.5]))
        self.mean = nnx.BatchStat(jnp.ones(2))
        self.count = Count(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.count += 1
        return jnp.tanh(x @ self.kernel + self.bias) * self.mean


X = jnp.array([0.3, -0.7])


def apply(model, x):
    return model(x)


def pure_apply(model):
    """`apply` as a function of the Params' State and the input, with everything else fixed."""
    params, rest = model.partition(nnx.Param, ...).states
    moduledef = model.get_module_def()
    return params, lambda params, x: moduledef.merge(params, rest)(x)


def assert_trees_close(found, expected, rtol=1e-5):
    found_leaves, expected_leaves = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found_leaves) == len(expected_leaves)
    for a, b in zip(found_leaves, expected_leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


def assert_no_tracers(model):
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(model.get_state()))


# vjp


def test_vjp_gives_the_output_and_cotangents_as_states():
    model = Affine()
    params, pure = pure_apply(model)
    y, pullback = nnx.vjp(apply, model, X)
    expected_y, expected_pullback = jax.vjp(pure, params, X)
    np.testing.assert_allclose(y, expected_y, rtol=1e-6)
    cotangent = jnp.array([1.0, 2.0])
    state, x_bar = pullback(cotangent)
    assert isinstance(state, nnx.State) and list(state) == ["bias", "kernel"]
    assert isinstance(state["kernel"], nnx.Param) and state["kernel"].sharding == ("din", "dout")
    assert_trees_close((state, x_bar), expected_pullback(cotangent))


def test_state_changes_in_the_forward_pass_of_vjp_stand():
    model = Affine()
    _, pullback = nnx.vjp(apply, model, X)
    assert model.count == 1
    pullback(jnp.ones(2))
    pullback(jnp.ones(2))
    assert model.count == 1
    assert_no_tracers(model)


def test_vjp_takes_wrt():
    model = Affine()
    _, pullback = nnx.vjp(apply, model, X, wrt=nnx.BatchStat)
    state, _ = pullback(jnp.ones(2))
    assert list(state) == ["mean"]


def test_vjp_takes_has_aux():
    model = Affine()
    y, pullback, aux = nnx.vjp(lambda m, x: (m(x), {"x": x}), model, X, has_aux=True)
    np.testing.assert_array_equal(aux["x"], X)
    assert len(pullback(y)) == 2


def test_vjp_with_stateful_false_discards_changes():
    model = Affine()
    nnx.vjp(apply, model, X, stateful=False)
    assert model.count == 0


def test_vjp_works_inside_jit():
    @nnx.jit
    def f(m, x):
        y, pullback = nnx.vjp(apply, m, x)
        return pullback(y)

    model = Affine()
    y, pullback = nnx.vjp(apply, model, X)
    assert_trees_close(f(model, X), pullback(y))
    assert model.count == 2


# jvp


def tangents_for(model):
    return jax.tree.map(lambda w: jnp.ones_like(w) * 0.5, model.filter(nnx.Param))


def test_jvp_takes_tangents_as_states():
    model = Affine()
    params, pure = pure_apply(model)
    tangent = tangents_for(model)
    y, y_dot = nnx.jvp(apply, (model, X), (tangent, jnp.ones(2)))
    expected = jax.jvp(pure, (params, X), (tangent, jnp.ones(2)))
    assert_trees_close((y, y_dot), expected)
    assert model.count == 1
    assert_no_tracers(model)


def test_jvp_takes_wrt():
    model = Affine()
    _, y_dot = nnx.jvp(lambda m: m(X), (model,), (model.filter(nnx.BatchStat),), wrt=nnx.BatchStat)
    np.testing.assert_allclose(y_dot, jnp.tanh(X @ model.kernel + model.bias), rtol=1e-5)


def test_jvp_takes_has_aux():
    model = Affine()
    y, y_dot, aux = nnx.jvp(lambda m: (m(X), X), (model,), (tangents_for(model),), has_aux=True)
    np.testing.assert_array_equal(aux, X)


def test_paths_missing_from_a_tangent_are_zero():
    model = Affine()
    some = model.filter(nnx.PathMatches("bias"))
    zeros = jax.tree.map(jnp.zeros_like, model.filter(nnx.Param))
    found = nnx.jvp(lambda m: m(X), (model,), (some,))
    expected = nnx.jvp(lambda m: m(X), (model,), (zeros | some,))
    assert_trees_close(found, expected)


def test_a_tangent_of_other_paths_is_an_error_that_names_them():
    model = Affine()
    with pytest.raises(ValueError, match="mean"):
        nnx.jvp(lambda m: m(X), (model,), (model.filter(nnx.BatchStat),))
    with pytest.raises(TypeError, match="State"):
        nnx.jvp(lambda m: m(X), (model,), (model,))
    assert model.count == 0


# linearize


def test_linearize_gives_a_function_of_tangents():
    model = Affine()
    params, pure = pure_apply(model)
    y, pushforward = nnx.linearize(apply, model, X)
    tangent = (tangents_for(model), jnp.ones(2))
    _, expected = jax.linearize(pure, params, X)
    assert_trees_close(pushforward(*tangent), expected(*tangent))
    np.testing.assert_allclose(y, pure(params, X), rtol=1e-6)
    assert model.count == 1
    pushforward(*tangent)
    assert model.count == 1
    assert_no_tracers(model)


# jacobians and hessians


@pytest.mark.parametrize("name", ["jacfwd", "jacrev"])
def test_jacobians_are_states_of_jacobians(name):
    model = Affine()
    params, pure = pure_apply(model)
    jacobian = getattr(nnx, name)(apply)(model, X)
    assert isinstance(jacobian, nnx.State) and list(jacobian) == ["bias", "kernel"]
    assert jacobian["kernel"].value.shape == (2, 2, 2)
    assert_trees_close(jacobian, getattr(jax, name)(pure)(params, X))
    assert model.count == 1
    assert_no_tracers(model)


@pytest.mark.parametrize("name", ["jacfwd", "jacrev"])
def test_jacobians_take_wrt_argnums_and_has_aux(name):
    model = Affine()
    params, pure = pure_apply(model)
    transform = getattr(nnx, name)
    assert list(transform(apply, wrt=nnx.BatchStat)(model, X)) == ["mean"]
    assert_trees_close(transform(apply, argnums=1)(model, X), getattr(jax, name)(pure, argnums=1)(params, X))
    state, by_x = transform(apply, argnums=(0, 1))(model, X)
    assert isinstance(state, nnx.State) and by_x.shape == (2, 2)
    jacobian, aux = transform(lambda m, x: (m(x), x), has_aux=True)(model, X)
    np.testing.assert_array_equal(aux, X)
    assert isinstance(jacobian, nnx.State)


def test_hessian_agrees_with_jax_through_partition_and_merge():
    model = Affine()
    params, pure = pure_apply(model)

    def loss(m):
        return (m(X) ** 2).sum()

    hessian = nnx.hessian(loss)(model)
    expected = jax.hessian(lambda params: (pure(params, X) ** 2).sum())(params)
    assert isinstance(hessian, nnx.State) and list(hessian) == ["bias", "kernel"]
    assert_trees_close(hessian, expected, rtol=1e-4)
    assert model.count == 1
    assert_no_tracers(model)


def test_hessian_of_a_plain_array_argument():
    model = Affine()
    _, pure = pure_apply(model)
    params = model.filter(nnx.Param)
    found = nnx.hessian(lambda m, x: (m(x) ** 2).sum(), argnums=1)(model, X)
    expected = jax.hessian(lambda x: (pure(params, x) ** 2).sum())(X)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["jacfwd", "jacrev", "hessian"])
def test_derivatives_with_stateful_false_discard_changes(name):
    model = Affine()
    getattr(nnx, name)(lambda m: m(X).sum(), stateful=False)(model)
    assert model.count == 0


def test_an_integer_leaf_is_an_error_that_names_its_path():
    model = Affine()
    wrt = (nnx.Param, Count)
    for call in (
        lambda: nnx.jacrev(apply, wrt=wrt)(model, X),
        lambda: nnx.jacfwd(apply, wrt=wrt)(model, X),
        lambda: nnx.hessian(lambda m: m(X).sum(), wrt=wrt)(model),
    ):
        with pytest.raises(TypeError, match="count"):
            call()
        assert model.count == 0


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


def test_state_changes_in_the_custom_forward_pass_stand():
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


def test_a_state_change_in_the_custom_backward_pass_is_an_error():
    model = Affine()

    @nnx.custom_vjp
    def f(m, x):
        return m.kernel.sum() * x

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
    model = Affine()

    @nnx.custom_vjp
    def f(m, x):
        return m.kernel.sum() * x

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


def test_custom_jvp_takes_and_gives_tangents_of_states():
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
