"""`vjp`, `jvp`, `linearize`, `jacfwd`, `jacrev`, `hessian` on Modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.checks import assert_no_tracers
from tests.models import Count
from tests.transforms.derivative_models import Affine

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


def test_state_changes_in_the_forward_pass_of_vjp_are_kept():
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


# Modules that share cells


def ones(module):
    return jax.tree.map(jnp.ones_like, module.filter(nnx.Param))


def product(a, b):
    return a.w * b.w


def scalar(value):
    return nnx.Dict(w=nnx.Param(jnp.array(value)))


def tied(value):
    ref = nnx.Ref(nnx.Param(jnp.array(value)))
    return nnx.Dict(w=ref), nnx.Dict(w=ref)


@pytest.mark.parametrize("transform", ["jvp", "linearize"])
def test_tangents_of_a_module_passed_twice_are_added(transform):
    model = scalar(3.0)
    half = jax.tree.map(lambda w: w / 2, ones(model))
    if transform == "jvp":
        y, y_dot = nnx.jvp(product, (model, model), (ones(model), half))
    else:
        y, push = nnx.linearize(product, model, model)
        y_dot = push(ones(model), half)
    assert y == 9.0 and y_dot == 6.0 * 1.5


def test_tangents_of_tied_modules_are_added():
    a, b = tied(3.0)
    assert nnx.jvp(product, (a, b), (ones(a), nnx.State())) == (9.0, 6.0)
    assert nnx.jvp(product, (a, b), (nnx.State(), ones(b))) == (9.0, 6.0)
    assert nnx.jvp(product, (a, b), (ones(a), ones(b))) == (9.0, 12.0)


@pytest.mark.parametrize("parent_first", [True, False])
def test_a_module_and_its_parent_each_take_the_tangent_they_would_give(parent_first):
    child = scalar(3.0)
    parent = nnx.Dict(child=child, own=nnx.Param(jnp.array(5.0)))
    modules = (parent, child) if parent_first else (child, parent)

    def f(a, b):
        parent, child = (a, b) if parent_first else (b, a)
        return parent.child.w * child.w + parent.own

    _, y_dot = nnx.jvp(f, modules, tuple(ones(module) for module in modules))
    assert y_dot == 6.0 * 2 + 1


def test_a_tangent_can_name_a_shared_cell_by_any_path():
    ref = nnx.Ref(nnx.Param(jnp.array(3.0)))
    model = nnx.Dict(a=ref, b=nnx.Dict(c=ref))
    one = nnx.Param(jnp.array(1.0))
    for paths in (["a"], ["b/c"]):
        assert nnx.jvp(lambda m: m.a * m.b.c, (model,), (nnx.State({path: one for path in paths}),))[1] == 6.0
    assert nnx.jvp(lambda m: m.a * m.b.c, (model,), (nnx.State({"a": one, "b/c": one}),))[1] == 12.0


def test_the_cotangent_of_a_shared_cell_appears_once():
    a, b = tied(3.0)
    _, pull = nnx.vjp(product, a, b)
    first, second = pull(1.0)
    assert first["w"].value == 6.0 and len(second) == 0


def test_a_path_filter_selects_by_the_paths_of_each_module():
    child = scalar(3.0)
    parent = nnx.Dict(child=child)
    grads = nnx.grad(lambda a, b: a.w * b.child.w, wrt=nnx.PathMatches("child/*"), argnums=(0, 1))(child, parent)
    assert grads[0]["w"].value == 6.0 and len(grads[1]) == 0
    tangents = (nnx.State(), ones(parent))
    _, y_dot = nnx.jvp(lambda a, b: a.w * b.child.w, (child, parent), tangents, wrt=nnx.PathMatches("child/*"))
    assert y_dot == 6.0


def test_a_tangent_of_another_shape_is_an_error_that_names_its_path():
    model = Affine()
    tangent = nnx.State({"bias": nnx.Param(jnp.ones(()))})
    with pytest.raises(ValueError, match=r"'bias' have the shape \[\], but the variable has the shape \[2\]"):
        nnx.jvp(lambda m: m(X), (model,), (tangent,))


# Modules in the output


def test_a_module_in_the_output_is_the_callers_own():
    model = scalar(3.0)

    def f(m):
        return {"y": m.w**2, "model": m}

    out, pull = nnx.vjp(f, model)
    assert out["model"] is model and pull({"y": 1.0, "model": None})[0]["w"].value == 6.0
    out, y_dot = nnx.jvp(f, (model,), (ones(model),))
    assert out["model"] is model and y_dot == {"y": 6.0, "model": None}
    out, push = nnx.linearize(f, model)
    assert out["model"] is model and push(ones(model)) == {"y": 6.0, "model": None}
    jacobian = nnx.jacrev(f)(model)
    assert jacobian["model"] is None and jacobian["y"]["w"].value == 6.0


# wrt


@pytest.mark.parametrize("name", ["vjp", "jvp", "linearize", "jacfwd", "jacrev", "hessian"])
def test_wrt_that_matches_nothing_raises_with_the_candidates(name):
    model = Affine()
    calls = {
        "vjp": lambda: nnx.vjp(lambda m: m(X), model, wrt=nnx.Cache),
        "jvp": lambda: nnx.jvp(lambda m: m(X), (model,), (nnx.State(),), wrt=nnx.Cache),
        "linearize": lambda: nnx.linearize(lambda m: m(X), model, wrt=nnx.Cache),
    }
    run = calls.get(name) or (lambda: getattr(nnx, name)(lambda m: m(X).sum(), wrt=nnx.Cache)(model))
    with pytest.raises(ValueError, match=f"nnx.{name}.*wrt=Cache matches nothing in Affine.*Param: 'bias', 'kernel'"):
        run()
    assert model.count == 0


def test_an_array_among_the_arguments_is_enough_to_differentiate():
    _, pull = nnx.vjp(apply, Affine(), X, wrt=nnx.Cache)
    state, x_bar = pull(jnp.ones(2))
    assert len(state) == 0 and x_bar.shape == X.shape
