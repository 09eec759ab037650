"""`nnx.vmap` and `nnx.Vmap`: ensembles, broadcast state, split randomness, and the errors of mapped bodies."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models import Count


class Affine(nnx.Module):
    def __init__(self, din=3, dout=2, *, ctx):
        self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (din, dout)), ("din", "dout"))
        self.bias = nnx.Param(jnp.zeros((dout,)))
        self.count = Count(jnp.zeros((), jnp.int32))
        self.node = jnp.ones((2,))

    def __call__(self, x):
        self.count += 1
        return x @ self.kernel + self.bias

    def scaled(self, x, scale):
        return x @ self.kernel * scale

    def noisy(self, x, *, ctx):
        return x + jax.random.uniform(ctx.make_rng("noise")), jax.random.uniform(ctx.make_rng("shared"))


SIZE = 6
X = jnp.arange(3.0)
ENSEMBLE = {"variable_axes": {nnx.Param: 0}, "split_rngs": "params", "axis_size": SIZE, "in_axes": None}


def ensemble(seed=0, **options):
    return nnx.Vmap(Affine, **(ENSEMBLE | options))(3, 2, ctx=nnx.context(seed))


def members(**options):
    return ensemble(**options).vmap_module


# The class form


def test_an_ensemble_of_six():
    m = ensemble()
    inner = m.vmap_module
    assert isinstance(inner, Affine) and inner.kernel.shape == (SIZE, 3, 2) and inner.bias.shape == (SIZE, 2)
    assert inner.count.shape == () and inner.node.shape == (2,)
    assert len({float(inner.kernel[i, 0, 0]) for i in range(SIZE)}) == SIZE
    y = m(X)
    np.testing.assert_allclose(y, jnp.einsum("i,eij->ej", X, inner.kernel), rtol=1e-5)


def test_without_split_rngs_every_member_is_the_same():
    kernel = members(split_rngs={"params": False}).kernel
    assert all(np.array_equal(kernel[0], kernel[i]) for i in range(SIZE))


def test_inputs_may_be_mapped_too():
    m = ensemble(in_axes=0)
    xs = jnp.arange(SIZE * 3.0).reshape(SIZE, 3)
    np.testing.assert_allclose(m(xs), jnp.einsum("ei,eij->ej", xs, m.vmap_module.kernel), rtol=1e-5)


def test_call_reaches_any_method_with_axes_per_argument():
    m = ensemble(in_axes=(None, 0))
    scales = jnp.arange(float(SIZE))
    expected = jnp.einsum("i,eij->ej", X, m.vmap_module.kernel) * scales[:, None]
    np.testing.assert_allclose(m.call.scaled(X, scales), expected, rtol=1e-5)


def test_out_axes_place_the_mapped_axis():
    m = ensemble(out_axes=1)
    np.testing.assert_allclose(m(X), jnp.einsum("i,eij->je", X, m.vmap_module.kernel), rtol=1e-5)


def test_the_axis_of_the_stack_can_be_chosen():
    m = ensemble(variable_axes={nnx.PathMatches("**/kernel"): 1, nnx.Param: 0})
    assert m.vmap_module.kernel.shape == (3, SIZE, 2)
    np.testing.assert_allclose(m(X), jnp.einsum("i,iej->ej", X, m.vmap_module.kernel), rtol=1e-5)


def test_metadata_params_name_the_mapped_axis_outside_only():
    seen = []

    class Spy(Affine):
        def __call__(self, x):
            seen.append(tuple(self.variable("kernel").sharding))
            return super().__call__(x)

    m = nnx.Vmap(Spy, **ENSEMBLE, metadata_params={nnx.PARTITION_NAME: "ensemble"})(3, 2, ctx=nnx.context(0))
    m(X)
    assert tuple(m.vmap_module.variable("kernel").sharding) == ("ensemble", "din", "dout")
    assert set(seen) == {("din", "dout")}


def test_axis_name_allows_collectives():
    class Mean(Affine):
        def __call__(self, x):
            return jax.lax.pmean(x @ self.kernel, "members")

    m = nnx.Vmap(Mean, **ENSEMBLE, axis_name="members")(3, 2, ctx=nnx.context(0))
    y = m(X)
    expected = jnp.einsum("i,eij->ej", X, m.vmap_module.kernel).mean(0)
    np.testing.assert_allclose(y, np.tile(expected, (SIZE, 1)), rtol=1e-5)


def test_an_ensemble_under_jit_and_grad():
    m = ensemble()

    @nnx.jit
    def step(m, x):
        return nnx.grad(lambda m: (m(x) ** 2).sum())(m)

    grads = step(m, X)
    kernel = m.vmap_module.kernel
    expected = 2 * jnp.einsum("i,ej->eij", X, jnp.einsum("i,eij->ej", X, kernel))
    np.testing.assert_allclose(grads["vmap_module/kernel"].value, expected, rtol=1e-5)
    assert m.vmap_module.count == 1


# The decorator form


class Ensemble(nnx.Module):
    @nnx.vmap(variable_axes={nnx.Param: 0}, split_rngs="params", axis_size=SIZE)
    def __init__(self, din, dout, *, ctx):
        self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (din, dout)))
        self.count = Count(jnp.zeros((), jnp.int32))

    @nnx.vmap(variable_axes={nnx.Param: 0}, in_axes=None, axis_size=SIZE)
    def __call__(self, x):
        """One member."""
        self.count += 1
        return x @ self.kernel


def test_vmap_decorates_init_and_methods():
    m = Ensemble(3, 2, ctx=nnx.context(0))
    assert m.kernel.shape == (SIZE, 3, 2)
    np.testing.assert_allclose(m(X), jnp.einsum("i,eij->ej", X, m.kernel), rtol=1e-5)
    assert m.count == 1 and m.count.shape == ()
    assert Ensemble.__call__.__doc__ == "One member."
    assert list(inspect.signature(Ensemble.__call__).parameters) == ["self", "x"]


# The function form


def test_a_module_is_broadcast_by_default():
    model = Affine(ctx=nnx.context(0))
    xs = jnp.arange(12.0).reshape(4, 3)
    ys = nnx.vmap(lambda m, x: m(x))(model, xs)
    np.testing.assert_allclose(ys, xs @ model.kernel, rtol=1e-5)


def test_equal_change_to_broadcast_state_in_every_member_is_kept():
    model = Affine(ctx=nnx.context(0))
    nnx.vmap(lambda m, x: m(x))(model, jnp.ones((4, 3)))
    assert model.count == 1 and model.count.shape == ()
    assert not isinstance(model.count, jax.core.Tracer)


def test_broadcast_state_changed_per_member_is_an_error_that_names_the_path():
    def f(m, x):
        m.inner.bias = m.inner.bias + x.sum()
        return x

    model = nnx.Dict(inner=Affine(ctx=nnx.context(0)))
    bias = model.inner.bias
    with pytest.raises(ValueError, match="inner/bias") as error:
        nnx.vmap(f)(model, jnp.arange(12.0).reshape(4, 3))
    assert "variable_axes" in str(error.value)
    assert model.inner.bias is bias


def test_change_to_mapped_state_per_member_is_kept():
    def f(m, x):
        m.bias = m.bias + x
        return x

    model = members()
    nnx.vmap(f, variable_axes={nnx.Param: 0}, axis_size=SIZE)(model, jnp.arange(float(SIZE)))
    np.testing.assert_allclose(model.bias, np.tile(np.arange(SIZE)[:, None], (1, 2)))


def test_new_variables_under_variable_axes_are_stacked():
    def f(m, x):
        m.last = nnx.Cache(x * 2)

    model = Affine(ctx=nnx.context(0))
    nnx.vmap(f, variable_axes={nnx.Cache: 0}, axis_size=4)(model, jnp.arange(4.0))
    np.testing.assert_array_equal(model.last, [0.0, 2.0, 4.0, 6.0])
    assert isinstance(model.variable("last"), nnx.Cache)


def test_in_axes_count_arguments_and_leave_modules_to_variable_axes():
    def f(m, x, y):
        return m.bias.sum() + x * y

    model = members()
    out = nnx.vmap(f, variable_axes={nnx.Param: 0}, in_axes=(None, 0, None), axis_size=SIZE)(
        model, jnp.arange(float(SIZE)), 2.0
    )
    np.testing.assert_allclose(out, 2 * np.arange(SIZE))


def test_modules_nested_among_mapped_arrays_take_variable_axes():
    def f(tree):
        return tree["m"].kernel.sum() + tree["x"]

    model = members()
    out = nnx.vmap(f, variable_axes={nnx.Param: 0}, axis_size=SIZE)({"m": model, "x": jnp.arange(float(SIZE))})
    np.testing.assert_allclose(out, model.kernel.sum((1, 2)) + np.arange(SIZE), rtol=1e-5)


def test_keyword_arguments_are_mapped_along_axis_zero():
    out = nnx.vmap(lambda m, *, x: m.node.sum() + x)(Affine(ctx=nnx.context(0)), x=jnp.arange(4.0))
    np.testing.assert_array_equal(out, 2 + np.arange(4.0))


def test_contexts_are_split_by_split_rngs():
    model, ctx = Affine(ctx=nnx.context(0)), nnx.context(noise=0, shared=1)

    @nnx.vmap(split_rngs={"noise": True, "shared": False})
    def f(m, x, ctx):
        return m.noisy(x, ctx=ctx)

    noise, shared = f(model, jnp.zeros(4), ctx)
    assert len({float(v) for v in noise}) == 4
    assert len({float(v) for v in np.atleast_1d(shared)}) == 1


def test_a_module_returned_by_the_mapped_function_is_the_same_object():
    model = members()

    def f(m, x):
        m.bias = m.bias + 1
        return m, x

    out, _ = nnx.vmap(f, variable_axes={nnx.Param: 0}, axis_size=SIZE)(model, jnp.ones(SIZE))
    assert out is model and model.bias[0, 0] == 1


def test_a_module_made_in_a_mapped_function_is_stacked_by_variable_axes():
    make = nnx.vmap(lambda ctx: Affine(ctx=ctx), variable_axes={nnx.Param: 0}, split_rngs="params", axis_size=SIZE)
    model = make(nnx.context(0))
    assert isinstance(model, Affine) and model.kernel.shape == (SIZE, 3, 2) and model.count.shape == ()
    assert len({float(model.kernel[i, 0, 0]) for i in range(SIZE)}) == SIZE


def test_stateful_false_discards_the_changes():
    model = Affine(ctx=nnx.context(0))
    nnx.vmap(lambda m, x: m(x), stateful=False)(model, jnp.ones((4, 3)))
    assert model.count == 0


def test_vmap_nests_with_raw_transforms():
    model, xs = Affine(ctx=nnx.context(0)), jnp.arange(24.0).reshape(2, 4, 3)
    read = nnx.vmap(lambda m, x: x @ m.kernel)
    np.testing.assert_allclose(jax.vmap(lambda x: read(model, x))(xs), xs @ model.kernel, rtol=1e-5)
    np.testing.assert_allclose(
        nnx.vmap(lambda m, x: jax.vmap(lambda v: v @ m.kernel)(x))(model, xs), xs @ model.kernel, rtol=1e-5
    )


def test_vmap_and_scan_mean_the_same_by_the_same_options():
    def f(m, carry, x):
        m.bias = m.bias + x
        return carry, m.bias.sum()

    mapped, scanned = members(), members()
    xs = jnp.arange(float(SIZE))
    ys = nnx.vmap(lambda m, x: f(m, 0.0, x)[1], variable_axes={nnx.Param: 0}, axis_size=SIZE)(mapped, xs)
    _, zs = nnx.scan(f, variable_axes={nnx.Param: 0}, length=SIZE)(scanned, 0.0, xs)
    np.testing.assert_allclose(ys, zs, rtol=1e-6)
    np.testing.assert_allclose(mapped.bias, scanned.bias, rtol=1e-6)


def test_vmap_inside_scan_and_scan_inside_vmap():
    Inner = nnx.Vmap(Affine, variable_axes={nnx.Param: 0}, split_rngs="params", axis_size=2, in_axes=0)

    class Layer(nnx.Module):
        def __init__(self, *, ctx):
            self.heads = Inner(3, 3, ctx=ctx)

        def __call__(self, x, _):
            return self.heads(x), None

    m = nnx.Scan(Layer, variable_axes={nnx.Param: 0}, split_rngs="params", length=4)(ctx=nnx.context(0))
    kernel = m.scan_module.heads.vmap_module.kernel
    assert kernel.shape == (4, 2, 3, 3)
    y, _ = m(jnp.ones((2, 3)), None)
    expected = jnp.ones((2, 3))
    for i in range(4):
        expected = jnp.einsum("ei,eij->ej", expected, kernel[i])
    np.testing.assert_allclose(y, expected, rtol=1e-4)


# Errors


def test_variable_axes_without_axis_size_is_an_error_at_construction():
    with pytest.raises(ValueError, match="Cannot use variable_axes without specifying"):
        nnx.Vmap(Affine, variable_axes={nnx.Param: 0})(3, 2, ctx=nnx.context(0))


def test_disagreeing_sizes_list_every_size_with_its_path():
    model = members()
    with pytest.raises(ValueError) as error:
        nnx.vmap(lambda m, tree: tree["x"], variable_axes={nnx.Param: 0}, axis_size=5)(model, {"x": jnp.ones(7)})
    message = str(error.value)
    for fragment in ("kernel", "x", "5", "6", "7"):
        assert fragment in message


def set_static(m):
    m.mode = "eval"


def add_submodule(m):
    m.child = nnx.Dict()


def add_unmapped_variable(m):
    m.extra = nnx.Variable(jnp.ones(()))


@pytest.mark.parametrize("change, path", [(set_static, "inner/mode"), (add_submodule, "inner/child")])
def test_structural_changes_in_the_body_are_errors_that_name_the_path(change, path):
    model = nnx.Dict(inner=Affine(ctx=nnx.context(0)))
    moduledef = model.get_module_def()
    with pytest.raises(Exception, match=path):
        nnx.vmap(lambda m, x: change(m.inner))(model, jnp.ones(2))
    assert model.get_module_def() == moduledef


def test_a_new_variable_outside_variable_axes_that_differs_per_member_is_an_error():
    def f(m, x):
        m.inner.extra = nnx.Variable(x)

    model = nnx.Dict(inner=Affine(ctx=nnx.context(0)))
    with pytest.raises(Exception, match="inner/extra"):
        nnx.vmap(f)(model, jnp.ones(2))
    assert not hasattr(model.inner, "extra")


def test_vmap_with_nothing_to_map_over_is_an_error():
    with pytest.raises(ValueError):
        nnx.vmap(lambda m: m.bias)(Affine(ctx=nnx.context(0)))


def test_name_docstring_and_signature_are_kept():
    @nnx.vmap(in_axes=0)
    def forward(model, x):
        """Maps."""
        return x

    assert forward.__name__ == "forward" and forward.__doc__ == "Maps."
    assert list(inspect.signature(forward).parameters) == ["model", "x"]


# Axes at a Module's place


def plus(m, x):
    return m.node.sum() + x


@pytest.mark.parametrize(
    ("in_axes", "wrap"),
    [
        ((0, 0), lambda m, x: (m, x)),
        ([0, 0], lambda m, x: (m, x)),
        ((1, 0), lambda m, x: (m, x)),
        ((-1, 0), lambda m, x: (m, x)),
        (({"m": 0, "x": 0},), lambda m, x: ({"m": m, "x": x},)),
        ((0, 0), lambda m, x: ([m], x)),
        (([0, None], 0), lambda m, x: ([m, m], x)),
        (({"kernel": 0}, 0), lambda m, x: (m, x)),
    ],
)
def test_an_axis_at_a_modules_place_is_an_error_that_shows_variable_axes(in_axes, wrap):
    args = wrap(Affine(ctx=nnx.context(0)), jnp.arange(4.0))
    with pytest.raises(
        ValueError, match=r"in_axes has the axis .* for argument 0.*Affine.*variable_axes=\{nnx.Param: "
    ):
        nnx.vmap(lambda *args: 0.0, in_axes=in_axes)(*args)


@pytest.mark.parametrize("in_axes", [0, (None, 0), [None, 0]])
def test_a_module_is_shared_under_a_plain_axis_or_none(in_axes):
    out = nnx.vmap(plus, in_axes=in_axes)(Affine(ctx=nnx.context(0)), jnp.arange(4.0))
    np.testing.assert_array_equal(out, 2 + np.arange(4.0))


@pytest.mark.parametrize("in_axes", [(0,), ({"m": None, "x": 0},)])
def test_axis_of_a_mixed_tree_applies_to_its_arrays(in_axes):
    tree = {"m": Affine(ctx=nnx.context(0)), "x": jnp.arange(4.0)}
    out = nnx.vmap(lambda tree: plus(tree["m"], tree["x"]), in_axes=in_axes)(tree)
    np.testing.assert_array_equal(out, 2 + np.arange(4.0))


def test_an_axis_at_a_modules_place_is_fine_with_variable_axes():
    def f(m, x):
        return m.bias.sum() + x

    x = jnp.arange(float(SIZE))
    np.testing.assert_allclose(nnx.vmap(f, variable_axes={nnx.Param: 0}, in_axes=(0, 0))(members(), x), x)


def test_an_output_axis_at_a_modules_place_is_an_error_that_shows_variable_axes():
    model, x = Affine(ctx=nnx.context(0)), jnp.arange(4.0)
    with pytest.raises(ValueError, match=r"out_axes has the axis 0 for the result\[0\], a Module.*variable_axes"):
        nnx.vmap(lambda m, x: (m, x), out_axes=(0, 0))(model, x)
    for out_axes in (0, (None, 0)):
        out, y = nnx.vmap(lambda m, x: (m, x), out_axes=out_axes)(model, x)
        assert out is model and y.shape == (4,)
    made, _ = nnx.vmap(lambda m, x: (m, x), variable_axes={nnx.Param: 0}, out_axes=(0, 0))(members(), jnp.ones(SIZE))
    assert made.kernel.shape[0] == SIZE
