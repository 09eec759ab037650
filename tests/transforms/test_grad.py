"""`nnx.grad` and `nnx.value_and_grad`: gradients as State, by filter, with sharing, aux values, state written back."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models import Count, Net


class Linear(nnx.Module):
    def __init__(self, din=2, dout=3, *, ctx):
        self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (din, dout)), ("din", "dout"), tag="k")
        self.bias = nnx.Param(jnp.zeros((dout,)))
        self.mean = nnx.BatchStat(jnp.ones((dout,)))
        self.count = Count(0)

    def __call__(self, x):
        self.count += 1
        return x @ self.kernel + self.bias + self.mean


X = jnp.array([[1.0, 2.0]])


def linear(seed=0):
    return Linear(ctx=nnx.context(seed))


def net(seed=0):
    return Net(2, 2, 2, layer=Linear, ctx=nnx.context(seed))


def loss(model, x=X):
    return (model(x) ** 2).sum()


def by_hand(f, model, wrt=nnx.Param):
    """The gradient through partition, `jax.grad` and merge."""
    selected, rest, moduledef = *model.partition(wrt, ...).states, model.get_module_def()
    return jax.grad(lambda selected: f(moduledef.merge(selected, rest)))(selected)


def assert_states_agree(found, expected, rtol=1e-6):
    assert isinstance(found, nnx.State)
    assert list(found) == list(expected)
    for path in expected:
        assert type(found[path]) is type(expected[path])
        np.testing.assert_allclose(found[path].value, expected[path].value, rtol=rtol)


# What a gradient looks like


def test_grad_of_a_module_is_a_state_of_its_params():
    model = net()
    grads = nnx.grad(loss)(model)
    assert_states_agree(grads, by_hand(loss, model))
    assert list(grads) == ["decoder/bias", "decoder/kernel", "encoder/bias", "encoder/kernel"]


def test_gradients_keep_variable_types_and_metadata():
    grads = nnx.grad(loss)(linear())
    assert isinstance(grads["kernel"], nnx.Param)
    assert grads["kernel"].sharding == ("din", "dout") and grads["kernel"].tag == "k"


def test_gradients_map_together_with_the_filtered_state():
    model = linear()
    before = loss(model)
    grads = nnx.grad(loss)(model)
    model.update_state(jax.tree.map(lambda w, g: w - 0.01 * g, model.filter(nnx.Param), grads))
    assert loss(model) < before


def test_value_and_grad_gives_both():
    model = linear()
    value, grads = nnx.value_and_grad(loss)(model)
    np.testing.assert_allclose(value, loss(model.clone()), rtol=1e-6)
    assert_states_agree(grads, by_hand(loss, model))


def test_state_changes_of_the_forward_pass_are_kept():
    model = net()
    nnx.grad(loss)(model)
    nnx.value_and_grad(loss)(model)
    assert model.encoder.count == 2 and not isinstance(model.encoder.count, jax.core.Tracer)


def test_structural_changes_of_the_forward_pass_are_kept():
    def f(m):
        m.loss = nnx.Intermediate(loss(m))
        m.mode = "trained"
        del m.mean
        return m.loss

    model = linear()
    value, _ = nnx.value_and_grad(f)(model)
    assert model.loss == value and not isinstance(model.loss, jax.core.Tracer)
    assert model.mode == "trained" and not hasattr(model, "mean")


def test_differentiated_values_written_in_the_body_come_back_concrete():
    def f(m):
        value = loss(m)
        m.kernel = m.kernel * 2
        return value

    model = linear()
    kernel = model.kernel
    expected = by_hand(f, model)
    assert_states_agree(nnx.grad(f)(model), expected)
    np.testing.assert_array_equal(model.kernel, 2 * kernel)


def test_values_that_depend_on_params_are_written_without_their_gradient():
    def f(m):
        m.mean = m.kernel.sum(0)
        return (m.mean**2).sum()

    model = linear()
    grads = nnx.grad(f)(model)
    np.testing.assert_allclose(grads["kernel"].value, np.tile(2 * model.kernel.sum(0), (2, 1)), rtol=1e-5)
    np.testing.assert_array_equal(model.mean, model.kernel.sum(0))


def test_stateful_false_discards_the_changes():
    model = linear()
    nnx.grad(loss, stateful=False)(model)
    nnx.value_and_grad(loss, stateful=False)(model)
    assert model.count == 0


# wrt


def test_wrt_takes_any_filter():
    model = net()
    for wrt, paths in [
        (nnx.BatchStat, ["decoder/mean", "encoder/mean"]),
        ("batch_stats", ["decoder/mean", "encoder/mean"]),
        (nnx.PathMatches("encoder/kernel"), ["encoder/kernel"]),
        (lambda path, value: path == "decoder/bias", ["decoder/bias"]),
        (nnx.All(nnx.Param, nnx.Not(nnx.PathMatches("**/bias"))), ["decoder/kernel", "encoder/kernel"]),
        ((nnx.Param, nnx.BatchStat), [f"{a}/{b}" for a in ("decoder", "encoder") for b in ("bias", "kernel", "mean")]),
    ]:
        grads = nnx.grad(loss, wrt=wrt)(model)
        assert list(grads) == paths
        assert_states_agree(grads, by_hand(loss, model, wrt))


def test_wrt_may_be_given_by_position():
    assert list(nnx.grad(loss, nnx.BatchStat)(linear())) == ["mean"]


@pytest.mark.parametrize("transform", [nnx.grad, nnx.value_and_grad])
def test_wrt_that_matches_nothing_raises_with_the_candidates(transform):
    model = linear()
    with pytest.raises(ValueError) as error:
        transform(loss, wrt=nnx.Cache)(model)
    text = str(error.value)
    assert "wrt=Cache matches nothing in Linear" in text
    assert "Param: 'bias', 'kernel'" in text and "BatchStat: 'mean'" in text
    assert model.count == 0


def test_a_wrt_that_matches_one_of_several_modules_or_arrays_is_enough():
    grads = nnx.grad(lambda pair: loss(pair[0]) * pair[1].w, wrt=nnx.Cache)(
        [linear(), nnx.Dict(w=nnx.Cache(jnp.ones(())))]
    )
    assert len(grads[0]) == 0 and list(grads[1]) == ["w"]
    grads, by_x = nnx.grad(lambda m, x: loss(m) * x, wrt=nnx.Cache, argnums=(0, 1))(linear(), 2.0)
    assert len(grads) == 0 and by_x != 0


def test_a_wrt_that_names_no_type_and_selects_several_is_an_error():
    with pytest.raises(ValueError, match=r"(?s)PathMatches\('\*\*'\) names no Variable type.*nnx.All\(nnx.Param"):
        nnx.grad(loss, wrt=nnx.PathMatches("**"))(linear())
    grads = nnx.grad(loss, wrt=nnx.All(nnx.Param, nnx.PathMatches("**")))(linear())
    assert list(grads) == ["bias", "kernel"]


def test_wrt_may_select_bare_arrays():
    model = linear()
    model.scale = jnp.ones(3)
    grads = nnx.grad(lambda m: (m.scale * m.bias + m.scale**2).sum(), wrt=nnx.buffers)(model)
    assert list(grads) == ["scale"]
    np.testing.assert_allclose(jax.tree.leaves(grads)[0], [2.0, 2.0, 2.0])


def test_wrt_may_select_a_pytree_node():
    model = linear()
    model.table = {"a": jnp.ones(2), "b": (jnp.ones(()),)}
    grads = nnx.grad(lambda m: (m.table["a"] * 3).sum() + m.table["b"][0] * 5, wrt=nnx.PathMatches("table"))(model)
    assert list(grads) == ["table"]
    np.testing.assert_allclose(jax.tree.leaves(grads)[0], [3.0, 3.0])
    np.testing.assert_allclose(jax.tree.leaves(grads)[1], 5.0)


# argnums


def test_the_gradient_has_the_shape_of_the_argument():
    def f(tree):
        return (tree["m"](tree["x"]) ** 2).sum() + tree["rest"][0].bias.sum()

    models = {"m": linear(0), "x": X, "rest": [linear(1)]}
    grads = nnx.grad(f)(models)
    assert set(grads) == {"m", "x", "rest"} and isinstance(grads["rest"], list)
    assert isinstance(grads["m"], nnx.State) and isinstance(grads["rest"][0], nnx.State)
    np.testing.assert_allclose(grads["rest"][0]["bias"].value, np.ones(3))
    m = models["m"]
    np.testing.assert_allclose(grads["x"], 2 * (X @ m.kernel + m.bias + m.mean) @ m.kernel.T, rtol=1e-5)


def test_argnums_choose_the_argument():
    model = linear()
    grad_x = nnx.grad(loss, argnums=1)(model, X)
    np.testing.assert_allclose(grad_x, jax.grad(lambda x: loss(model.clone(), x))(X), rtol=1e-5)
    assert model.count == 1


def test_argnums_may_be_a_tuple():
    model = linear()
    value, (grads, grad_x) = nnx.value_and_grad(loss, argnums=(0, 1))(model, X)
    assert_states_agree(grads, by_hand(loss, model))
    assert grad_x.shape == X.shape
    (only,) = nnx.grad(loss, argnums=(0,))(model)
    assert isinstance(only, nnx.State)


def test_argnums_may_choose_two_modules():
    a, b = linear(0), linear(1)

    def f(a, x, b):
        return (a(x) * b(x)).sum()

    grad_a, grad_b = nnx.grad(f, argnums=(0, 2))(a, X, b)
    np.testing.assert_allclose(grad_a["bias"].value, (X @ b.kernel + b.bias + b.mean)[0], rtol=1e-5)
    np.testing.assert_allclose(grad_b["bias"].value, (X @ a.kernel + a.bias + a.mean)[0], rtol=1e-5)
    assert a.count == 1 and b.count == 1


def test_modules_in_other_arguments_are_constants_but_are_written():
    student, teacher = linear(0), linear(1)

    @nnx.grad
    def f(student, *, teacher):
        return ((student(X) - teacher(X)) ** 2).sum()

    grads = f(student, teacher=teacher)
    assert list(grads) == ["bias", "kernel"]
    assert student.count == 1 and teacher.count == 1


def test_grad_works_on_plain_arrays_alone():
    assert nnx.grad(lambda x: x**2)(3.0) == 6.0
    value, grads = nnx.value_and_grad(lambda tree: tree["a"] * tree["b"])({"a": 2.0, "b": 3.0})
    assert value == 6.0 and grads == {"a": 3.0, "b": 2.0}


# has_aux


def test_has_aux_returns_the_aux_value():
    model = linear()

    def f(m):
        y = m(X)
        return (y**2).sum(), {"y": y}

    grads, aux = nnx.grad(f, has_aux=True)(model)
    assert_states_agree(grads, by_hand(lambda m: f(m)[0], model))
    (value, aux), grads = nnx.value_and_grad(f, has_aux=True)(model)
    assert aux["y"].shape == (1, 3) and not isinstance(aux["y"], jax.core.Tracer)
    np.testing.assert_allclose(value, (aux["y"] ** 2).sum(), rtol=1e-6)


def test_a_module_in_the_aux_value_is_the_same_object():
    model = linear()
    _, out = nnx.grad(lambda m: (loss(m), m), has_aux=True)(model)
    assert out is model and model.count == 1
    _, new = nnx.grad(lambda m: (loss(m), Linear(ctx=nnx.context(0))), has_aux=True)(model)
    assert isinstance(new, Linear) and new is not model and not isinstance(new.kernel, jax.core.Tracer)


# Sharing


def test_a_shared_module_counts_once():
    model = net()
    model.decoder = model.encoder
    grads = nnx.grad(loss)(model)
    assert list(grads) == ["decoder/bias", "decoder/kernel"]
    assert_states_agree(grads, by_hand(loss, model))
    assert model.encoder.count == 2


def test_a_ref_counts_once_and_sums_its_uses():
    ref = nnx.Ref(nnx.Param(jnp.array([1.0, 2.0])))
    model = nnx.Dict(a=nnx.Dict(), b=nnx.Dict())
    model.a.w = ref
    model.b.w = ref
    grads = nnx.grad(lambda m: (m.a.w * m.b.w).sum())(model)
    assert list(grads) == ["a/w"]
    np.testing.assert_allclose(grads["a/w"].value, [2.0, 4.0])


def test_a_module_shared_between_two_arguments_appears_once():
    a, b = nnx.Dict(), nnx.Dict()
    a.own = nnx.Param(jnp.ones(()))
    a.shared = linear()
    b.shared = a.shared
    grad_a, grad_b = nnx.grad(lambda a, b: loss(a.shared) + loss(b.shared) + a.own, argnums=(0, 1))(a, b)
    paths = [*grad_a, *grad_b]
    assert paths.count("shared/kernel") == 1 and list(grad_a) == ["own", "shared/bias", "shared/kernel"]
    expected = by_hand(loss, a.shared)
    np.testing.assert_allclose(grad_a["shared/kernel"].value, 2 * expected["kernel"].value, rtol=1e-5)


def test_a_module_in_two_places_of_one_argument_appears_once():
    model = linear()
    grads = nnx.grad(lambda tree: loss(tree["a"]) + loss(tree["b"]))({"a": model, "b": model})
    assert list(grads["a"]) == ["bias", "kernel"] and len(grads["b"]) == 0
    np.testing.assert_allclose(grads["a"]["bias"].value, 2 * by_hand(loss, model)["bias"].value, rtol=1e-5)


def test_a_module_passed_as_differentiated_and_as_constant_argument_is_one_module():
    model = linear()
    grads = nnx.grad(lambda m, other: (m.bias * 2 + other.bias * 3).sum())(model, model)
    np.testing.assert_allclose(grads["bias"].value, [5.0, 5.0, 5.0])


# Errors


def test_an_integer_leaf_under_wrt_is_an_error_that_names_its_path():
    model = net()
    with pytest.raises(TypeError, match="encoder/count|decoder/count") as error:
        nnx.grad(loss, wrt=(nnx.Param, Count))(model)
    assert "int" in str(error.value)
    assert model.encoder.count == 0


def test_an_integer_leaf_beside_modules_in_the_argument_is_an_error():
    with pytest.raises(TypeError, match="int"):
        nnx.grad(lambda tree: loss(tree["m"]))({"m": linear(), "n": jnp.ones((), jnp.int32)})


def test_allow_int_gives_float0_gradients():
    model = linear()
    model.count = jnp.asarray(2)
    grads = nnx.grad(loss, wrt=(nnx.Param, Count), allow_int=True)(model)
    assert grads["count"].value.dtype == jax.dtypes.float0


@pytest.mark.parametrize(
    ("returned", "has_aux", "advice"),
    [
        (lambda out: out, False, r"one number, and returned traced float32\[.*`.mean\(\)`"),
        (lambda out: (out, 1), True, "`.mean"),
        (lambda out: None, False, "returned None. Is its `return` missing"),
        (lambda out: (out.sum(), 1), False, "pass has_aux=True"),
        (lambda out: {"loss": out.sum()}, False, "pass has_aux=True"),
        (lambda out: out.sum(), True, "with has_aux=True the function returns a pair"),
        (lambda out: (out.sum(), 1, 2), True, "with has_aux=True the function returns a pair"),
    ],
)
def test_a_function_that_returns_no_number_to_differentiate_is_told_what_to_return(returned, has_aux, advice):
    model = linear()
    with pytest.raises(TypeError, match=advice):
        nnx.value_and_grad(lambda m: returned(m(X)), has_aux=has_aux)(model)
    assert model.count == 0


def test_a_complex_parameter_needs_holomorphic():
    class Complex(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.array(1.0 + 2.0j))

    grads = nnx.grad(lambda m: m.w**2, holomorphic=True)(Complex())
    np.testing.assert_allclose(grads["w"].value, 2.0 + 4.0j)
    with pytest.raises(TypeError, match="complex"):
        nnx.grad(lambda m: m.w**2)(Complex())


# Nesting, methods, signatures


def test_grads_nest():
    model = nnx.Dict()
    model.w = nnx.Param(jnp.asarray(3.0))

    def inner(m):
        return m.w**3

    def outer(m):
        return nnx.grad(inner)(m)["w"].value

    np.testing.assert_allclose(nnx.grad(outer)(model)["w"].value, 18.0)
    np.testing.assert_allclose(nnx.grad(lambda m: nnx.grad(outer)(m)["w"].value)(model)["w"].value, 6.0)


def test_grad_inside_jit_updates_the_module():
    model = linear()

    @nnx.jit
    def train_step(m, x):
        value, grads = nnx.value_and_grad(loss)(m, x)
        m.update_state(jax.tree.map(lambda w, g: w - 0.01 * g, m.filter(nnx.Param), grads))
        return value

    values = [float(train_step(model, X)) for _ in range(5)]
    assert values == sorted(values, reverse=True) and model.count == 5
    assert train_step.trace_count == 1


def test_jit_of_grad_and_grad_of_jit_agree_with_grad():
    model = linear()
    expected = nnx.grad(loss)(model)
    assert_states_agree(nnx.jit(nnx.grad(loss))(model), expected)
    assert_states_agree(nnx.grad(nnx.jit(loss))(model), expected)
    assert model.count == 3


def test_raw_grad_around_a_merged_module_meets_lifted_grad_inside():
    model = linear()
    params, rest = model.partition(nnx.Param, ...).states
    moduledef = model.get_module_def()

    def f(params):
        m = moduledef.merge(params, rest)
        grads = nnx.grad(loss)(m)
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))

    outer = jax.grad(f)(params)
    assert list(outer) == ["bias", "kernel"]


def test_the_gradient_of_a_bound_method_is_that_of_its_module():
    class Model(Linear):
        def loss(self, x):
            return (self(x) ** 2).sum()

    model = Model(ctx=nnx.context(0))
    assert_states_agree(nnx.grad(model.loss)(X), by_hand(loss, model))
    assert model.count == 1


def test_grad_decorates_methods():
    class Model(Linear):
        @nnx.grad
        def gradient(self, x):
            return (self(x) ** 2).sum()

        @nnx.value_and_grad(has_aux=True)
        def both(self, x):
            return (self(x) ** 2).sum(), x

    model = Model(ctx=nnx.context(0))
    assert list(model.gradient(X)) == ["bias", "kernel"]
    (_, aux), grads = model.both(X)
    np.testing.assert_array_equal(aux, X)
    assert list(grads) == ["bias", "kernel"] and model.count == 2


@pytest.mark.parametrize("transform", [nnx.grad, nnx.value_and_grad])
def test_name_docstring_and_signature_are_kept(transform):
    def objective(model: Linear, x, *, scale=1.0):
        """The objective."""
        return loss(model, x) * scale

    wrapped = transform(objective)
    assert wrapped.__name__ == "objective" and "The objective." in wrapped.__doc__
    assert list(inspect.signature(wrapped).parameters) == ["model", "x", "scale"]


@pytest.mark.parametrize("transform", [nnx.grad, nnx.value_and_grad])
def test_the_signature_of_the_transform_is_the_contract(transform):
    parameters = inspect.signature(transform).parameters
    assert list(parameters)[:2] == ["fun", "wrt"]
    assert {"argnums", "stateful", "has_aux", "holomorphic", "allow_int", "reduce_axes"} <= set(parameters)
    assert parameters["wrt"].default is nnx.Param and parameters["argnums"].default == 0
    assert parameters["argnums"].kind is inspect.Parameter.KEYWORD_ONLY


def test_reduce_axes_is_accepted():
    assert list(nnx.grad(loss, reduce_axes=())(linear())) == ["bias", "kernel"]


def test_a_context_passed_to_grad_is_usable_inside():
    def f(m, ctx):
        return (m(X + jax.random.normal(ctx.make_rng("noise"), X.shape)) ** 2).sum()

    model, ctx = linear(), nnx.context(noise=0)
    first, second = nnx.grad(f)(model, ctx), nnx.grad(f)(model, ctx)
    assert not np.allclose(first["kernel"].value, second["kernel"].value)
