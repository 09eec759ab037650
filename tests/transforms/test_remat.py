"""`nnx.remat` and `nnx.Remat`: recomputation that changes memory and nothing else."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models import Count


class Mlp(nnx.Module):
    def __init__(self, features=3, *, ctx):
        self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (features, features)))
        self.count = Count(jnp.zeros((), jnp.int32))

    def __call__(self, x, *, scale=1.0, ctx=None):
        self.count += 1
        if ctx is not None:
            x = x * jax.random.bernoulli(ctx.make_rng("dropout"), 0.5, x.shape)
        return jnp.sin(x @ self.kernel) * scale

    def twice(self, x):
        return self(self(x))


X = jnp.array([[0.1, 0.2, 0.3]])


def mlp(seed=0):
    return Mlp(ctx=nnx.context(seed))


def forward(m, x):
    return m(x)


def test_remat_computes_the_same_values_and_gradients():
    model = mlp()

    def loss(f):
        return lambda m: (f(m, X) ** 2).sum()

    value, grads = nnx.value_and_grad(loss(forward))(model)
    found_value, found = nnx.value_and_grad(loss(nnx.remat(forward)))(model)
    np.testing.assert_allclose(found_value, value, rtol=1e-6)
    np.testing.assert_allclose(found["kernel"].value, grads["kernel"].value, rtol=1e-5)


def test_backward_pass_repeats_the_forward_pass():
    (params, rest), moduledef = mlp().partition(nnx.Param, ...)

    def products(f):
        gradient = jax.grad(lambda params: f(moduledef.merge(params, rest), X).sum())
        return str(jax.make_jaxpr(gradient)(params)).count("dot_general")

    assert products(nnx.remat(forward)) == products(forward) + 1 == 3


def test_state_changes_happen_once():
    model = mlp()
    remat = nnx.remat(forward)
    remat(model, X)
    assert model.count == 1
    nnx.grad(lambda m: remat(m, X).sum())(model)
    assert model.count == 2 and not isinstance(model.count, jax.core.Tracer)


def test_structural_changes_are_kept():
    @nnx.remat
    def f(m, x):
        m.mode = "seen"
        m.extra = nnx.Intermediate(x * 2)
        m.child = nnx.Dict(w=nnx.Param(x))
        return x

    model = mlp()
    f(model, X)
    assert model.mode == "seen"
    np.testing.assert_allclose(model.extra, X * 2)
    np.testing.assert_allclose(model.child.w, X)


def test_keyword_arguments_are_allowed():
    model = mlp()
    np.testing.assert_allclose(nnx.remat(model)(X, scale=2.0), 2 * nnx.remat(forward)(model, X), rtol=1e-6)
    np.testing.assert_allclose(nnx.remat(lambda *, m, x: m(x))(m=model, x=X), nnx.remat(forward)(model, X), rtol=1e-6)


def test_static_argnums_count_modules():
    @nnx.remat(static_argnums=(1,))
    def f(m, n, x):
        assert isinstance(n, int)
        for _ in range(n):
            x = m(x)
        return x

    model = mlp()
    np.testing.assert_allclose(f(model, 2, X), model.clone().twice(X), rtol=1e-6)
    assert model.count == 2


def test_policy_and_prevent_cse_are_passed_on():
    model = mlp()
    params, moduledef = model.partition()

    f = nnx.remat(forward, prevent_cse=False, policy=jax.checkpoint_policies.dots_saveable)
    text = str(jax.make_jaxpr(lambda params: f(moduledef.merge(params), X))(params))
    assert "prevent_cse=False" in text and "policy=None" not in text


def test_randomness_is_the_same_in_both_passes():
    model = mlp()

    @nnx.remat
    def f(m, x, ctx):
        return m(x, ctx=ctx)

    def loss(m, ctx):
        y = f(m, jnp.ones((1, 3)), ctx)
        return y.sum(), y

    grads, y = nnx.grad(loss, has_aux=True)(model, nnx.context(dropout=1))
    zero_inputs = np.asarray(grads["kernel"].value == 0).all(axis=1)
    kept = ~zero_inputs
    np.testing.assert_allclose(y, jnp.sin(kept.astype(np.float32) @ model.kernel)[None], rtol=1e-5)


def test_remat_as_a_class():
    m = nnx.Remat(Mlp)(3, ctx=nnx.context(0))
    assert isinstance(m.remat_module, Mlp) and list(m.filter(nnx.Param)) == ["remat_module/kernel"]
    y = m(X, scale=2.0)
    np.testing.assert_allclose(y, 2 * jnp.sin(X @ m.remat_module.kernel), rtol=1e-6)
    np.testing.assert_allclose(m.call.twice(X), m.remat_module.clone().twice(X), rtol=1e-6)
    assert m.remat_module.count == 3


def test_remat_as_a_class_takes_options():
    m = nnx.Remat(Mlp, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False)(3, ctx=nnx.context(0))
    grads = nnx.grad(lambda m: m(X).sum())(m)
    assert list(grads) == ["remat_module/kernel"] and m.remat_module.count == 1


def test_remat_decorates_methods():
    class Model(Mlp):
        @nnx.remat
        def once(self, x):
            """Once."""
            return self(x)

        @nnx.remat(static_argnums=(0,))
        def times(self, n, x):
            for _ in range(n):
                x = self(x)
            return x

    model = Model(ctx=nnx.context(0))
    np.testing.assert_allclose(model.once(X), jnp.sin(X @ model.kernel), rtol=1e-6)
    model.times(2, X)
    assert model.count == 3
    assert Model.once.__name__ == "once" and Model.once.__doc__ == "Once."
    assert list(inspect.signature(Model.once).parameters) == ["self", "x"]


class Family(nnx.Module):
    @classmethod
    @nnx.remat(static_argnums=1)
    def repeated(cls, model, n, x):
        """Which argument is number 1 does not depend on the class in front of the dot."""
        assert issubclass(cls, Family) and type(n) is int
        for _ in range(n):
            x = model(x)
        return x

    @classmethod
    def times(cls, model, n, x):
        return cls.repeated.__wrapped__(cls, model, n, x)


@pytest.mark.parametrize("around", [lambda f: f, nnx.jit(static_argnums=1)], ids=["eager", "jit"])
def test_the_class_of_a_class_method_is_static_and_does_not_count(around):
    child, model = type("Child", (Family,), {}), mlp()
    expected = model.clone().twice(X)
    for call in (Family.repeated, child.repeated, nnx.remat(child.times, static_argnums=1)):
        np.testing.assert_allclose(around(lambda m, n, x, call=call: call(m, n, x))(model, 2, X), expected, rtol=1e-6)
    assert model.count == 6


@pytest.mark.parametrize("lift", [nnx.jit, nnx.grad, nnx.vmap, nnx.remat], ids=lambda lift: lift.__name__)
def test_a_class_method_is_lifted_once_a_class_has_it(lift):
    with pytest.raises(TypeError, match=rf"call nnx.{lift.__name__}\(Class.make\)"):

        class Model(nnx.Module):
            @lift
            @classmethod
            def make(cls, x):
                return x


def test_identity_and_results_are_kept():
    model = mlp()

    @nnx.remat
    def f(m, again):
        return m, m is again

    out, same = f(model, model)
    assert out is model and same


def test_stateful_false_discards_the_changes():
    model = mlp()
    nnx.remat(forward, stateful=False)(model, X)
    assert model.count == 0


def test_remat_inside_jit_inside_grad():
    model = mlp()
    step = nnx.jit(lambda m, x: nnx.grad(lambda m: nnx.remat(forward)(m, x).sum())(m))
    expected = nnx.grad(lambda m: forward(m, X).sum())(model)
    np.testing.assert_allclose(step(model, X)["kernel"].value, expected["kernel"].value, rtol=1e-5)
    assert model.count == 2


def test_a_context_in_the_result_is_an_error():
    with pytest.raises((TypeError, ValueError), match="Context"):
        nnx.remat(lambda ctx: ctx)(nnx.context(0))


# Constructors


def test_remat_on_init_leaves_arguments_and_self_as_they_are():
    seen = []

    class Block(nnx.Module):
        @nnx.remat
        def __init__(self, features, name="block", *, use_bias=True, ctx):
            seen.append((self, features, name, use_bias))
            self.linear = nnx.Linear(features, features, use_bias=use_bias, ctx=ctx)
            self.features = features
            self.child = nnx.Dict()
            self.child.parent = self

        @nnx.remat
        def __call__(self, x):
            return self.linear(x)

    ctx = nnx.context(0)
    block = Block(3, "first", use_bias=False, ctx=ctx)
    assert seen[0][0] is block and seen[0][1:] == (3, "first", False)
    assert type(block.features) is int and block.child.parent is block
    assert list(block.get_state()) == ["linear/kernel"]
    assert block(jnp.ones((1, 3))).shape == (1, 3)
    assert not jnp.array_equal(block.linear.kernel, Block(3, ctx=ctx).linear.kernel)
    assert nnx.jit(lambda ctx: Block(2, ctx=ctx))(ctx).features == 2


def test_is_init_overrides_the_name():
    class Block(nnx.Module):
        @nnx.remat(is_init=True)
        def build(self, features, *, ctx):
            self.linear = nnx.Linear(features, features, ctx=ctx)
            return features

    block = Block()
    assert type(block.build(3, ctx=nnx.context(0))) is int and block.linear.kernel.shape == (3, 3)


@pytest.mark.parametrize(
    "decorate",
    [
        nnx.remat,
        nnx.vmap(variable_axes={nnx.Param: 0}, split_rngs="params", axis_size=2),
        nnx.scan(variable_axes={nnx.Param: 0}, split_rngs="params", length=2),
    ],
    ids=["remat", "vmap", "scan"],
)
def test_a_decorated_constructor_sees_python_values(decorate):
    seen = []

    class Block(nnx.Module):
        @decorate
        def __init__(self, features, scale=0.5, *, names=("a", "b"), options=None, ctx):
            seen.append((type(features), type(scale), names, options))
            self.linear = nnx.Linear(features, len(names), ctx=ctx)

    Block(3, names=("x",), options={"rate": 2}, ctx=nnx.context(0))
    assert seen[-1] == (int, float, ("x",), {"rate": 2})
    assert type(seen[-1][3]["rate"]) is int
