"""`nnx.jit`: closures, trace levels, bad static arguments, and Modules handed to raw JAX."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.checks import assert_unchanged, photograph
from tests.models import Count, linear

# Closures


def test_closing_over_arrays_does_not_warn():
    table = jnp.ones((2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nnx.jit(lambda m, x: m(x) + (x @ table))(linear(), jnp.ones((1, 2)))


def test_a_bound_method_is_lifted_and_no_closure():
    model = linear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nnx.jit(model)(jnp.ones((1, 2)))
        nnx.jit(model.__call__)(jnp.ones((1, 2)))
    assert model.count == 2


def mutate_value(m):
    m.count += 1


def mutate_static(m):
    m.mode = "eval"


def add_variable(m):
    m.extra = nnx.Param(jnp.ones(()))


def delete_variable(m):
    del m.count


def pop_variables(m):
    m.pop_state(Count)


def update_values(m):
    m.update_state(m.filter(nnx.Param))


MUTATIONS = [mutate_value, mutate_static, add_variable, delete_variable, pop_variables, update_values]
MUTATION_NAMES = {mutate_value: "count", mutate_static: "mode", add_variable: "extra", delete_variable: "count"}

LEVELS = {
    "jax.jit": lambda f: jax.jit(f)(1.0),
    "jax.vmap": lambda f: jax.vmap(f)(jnp.ones(2)),
    "jax.grad": lambda f: jax.grad(lambda x: (f(x), x)[1])(1.0),
    "jax.lax.scan": lambda f: jax.lax.scan(lambda c, x: (f(x), (c, None))[1], 0.0, jnp.ones(2)),
    "nnx.jit": lambda f: nnx.jit(f)(1.0),
    "nnx.grad": lambda f: nnx.grad(lambda d, x: (f(x), x)[1], argnums=1)(nnx.Dict(), 1.0),
    "nnx.vmap": lambda f: nnx.vmap(f)(jnp.ones(2)),
    "nnx.scan": lambda f: nnx.scan(lambda d, c, x: (f(x), (c, None))[1], length=2)(nnx.Dict(), 0.0, jnp.ones(2)),
    "nnx.remat": lambda f: nnx.remat(f)(1.0),
    "nnx.cond": lambda f: nnx.cond(True, f, f, 1.0),
    "nnx.fori_loop": lambda f: nnx.fori_loop(0, 2, lambda i, x: (f(x), x)[1], 1.0),
    "nnx.while_loop": lambda f: nnx.while_loop(lambda x: x < 2, lambda x: (f(x), x + 1)[1], 1.0),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", LEVELS)
def test_mutating_a_captured_module_is_an_error_at_every_level(level):
    model = linear()
    for mutation in MUTATIONS:
        before = photograph(model)
        with pytest.raises(nnx.TraceContextError, match="Cannot mutate Module from different trace level") as error:
            LEVELS[level](lambda x, mutation=mutation: mutation(model))
        assert "Linear" in str(error.value)
        if mutation in MUTATION_NAMES:
            assert MUTATION_NAMES[mutation] in str(error.value)
        assert_unchanged(model, before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", LEVELS)
def test_reading_a_captured_module_is_allowed_at_every_level(level):
    model, seen = linear(), []
    LEVELS[level](lambda x: seen.append(model.kernel.shape))
    assert seen[0] == (2, 3)


def test_a_module_captured_in_a_lifted_function_beside_a_lifted_one_is_not_confused_with_it():
    model, other = linear(0), linear(1)
    with pytest.raises(nnx.TraceContextError):
        nnx.jit(lambda m: mutate_value(other))(model)
    assert other.count == 0 and model.count == 0


def test_a_module_of_an_outer_trace_cannot_be_mutated_in_an_inner_one():
    @nnx.jit
    def outer(m, x):
        def inner(x):
            m.count += 1
            return x * 2.0

        return jax.grad(inner)(x)

    model = linear()
    with pytest.raises(nnx.TraceContextError, match="count"):
        outer(model, 1.0)
    assert model.count == 0


def test_a_ref_from_an_outer_level_cannot_be_attached_inside():
    ref = nnx.Ref(nnx.Param(jnp.ones(2)))

    @nnx.jit
    def f(m):
        m.tied = ref

    model = linear()
    with pytest.raises(nnx.TraceContextError):
        f(model)
    assert not hasattr(model, "tied")


def test_an_outer_module_cannot_be_attached_to_an_inner_one():
    outer, model = linear(1), linear(0)

    @nnx.jit
    def f(m):
        m.child = outer

    before = photograph(model)
    with pytest.raises(nnx.TraceContextError):
        f(model)
    assert_unchanged(model, before)


# Trace levels around a lifted call


@pytest.mark.parametrize("option", [{}, {"donate_argnums": 0}], ids=["plain", "donated"])
def test_raw_vmap_around_a_lifted_step_that_writes_is_an_error(option):
    @nnx.jit(**option)
    def step(m, x):
        m.kernel = m.kernel + x
        return x

    model = linear()
    start, before = np.asarray(model.kernel), photograph(model)
    with pytest.raises(nnx.TraceContextError):
        jax.vmap(lambda x: step(model, x))(jnp.ones(4))
    assert_unchanged(model, before)
    step(model, 1.0)
    before = photograph(model)
    with pytest.raises(nnx.TraceContextError):
        jax.vmap(lambda x: step(model, x))(jnp.ones(4))
    assert_unchanged(model, before)
    step(model, 1.0)
    np.testing.assert_allclose(model.kernel, start + 2, rtol=1e-6)


def test_vmap_around_a_step_that_writes_unbatched_values_is_the_same_error():
    @nnx.jit
    def step(m, x):
        m.count += 1
        return x

    model = linear(0, 3, 3)
    with pytest.raises(nnx.TraceContextError):
        jax.vmap(lambda x: step(model, x))(jnp.arange(3.0))
    assert model.count == 0


@pytest.mark.parametrize("around", [jax.jit, jax.grad, lambda f: jax.checkpoint(f)], ids=["jit", "grad", "checkpoint"])
def test_raw_transforms_around_a_lifted_step_that_writes_are_an_error(around):
    step = nnx.jit(lambda m, x: m(x).sum())
    model, x = linear(), jnp.ones((1, 2))
    before = photograph(model)
    for _ in range(2):
        with pytest.raises(nnx.TraceContextError):
            around(lambda x: step(model, x))(x)
        assert_unchanged(model, before)


def test_structural_changes_do_not_leak_through_a_raw_transform():
    @nnx.jit
    def step(m, x):
        m.extra = nnx.Param(x)
        m.mode = "eval"

    model = linear()
    before = photograph(model)
    with pytest.raises(nnx.TraceContextError):
        jax.jit(lambda x: step(model, x))(1.0)
    assert_unchanged(model, before)


def test_raw_transforms_around_a_lifted_step_that_only_reads_work():
    read = nnx.jit(lambda m, x: x @ m.kernel)
    model, xs = linear(), jnp.ones((4, 2))
    np.testing.assert_allclose(jax.vmap(lambda x: read(model, x))(xs), xs @ model.kernel, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda x: read(model, x))(xs), xs @ model.kernel, rtol=1e-6)
    slope = jax.grad(lambda x: read(model, x).sum())(xs)
    np.testing.assert_allclose(slope, jnp.ones((4, 3)) @ model.kernel.T, rtol=1e-6)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: nnx.remat(f),
        lambda f: nnx.grad(lambda m, x: f(m, x).sum()),
        lambda f: nnx.vmap(f, in_axes=0),
        lambda f: lambda m, x: nnx.cond(True, f, f, m, x),
    ],
    ids=["remat", "grad", "vmap", "cond"],
)
def test_other_lifted_transforms_do_not_leak_under_raw_ones_either(transform):
    model, x = linear(), jnp.ones((1, 2))
    before = photograph(model)
    with pytest.raises(nnx.TraceContextError):
        jax.jit(lambda x: transform(lambda m, x: m(x))(model, x))(x)
    assert_unchanged(model, before)


def test_stateful_false_may_run_under_a_raw_transform():
    step = nnx.jit(lambda m, x: m(x), stateful=False)
    model, x = linear(), jnp.ones((1, 2))
    np.testing.assert_allclose(jax.jit(lambda x: step(model, x))(x), x @ model.kernel, rtol=1e-6)
    assert model.count == 0


def test_a_module_that_escapes_a_trace_cannot_be_written_outside():
    escaped = []

    @nnx.jit
    def f(m):
        escaped.append(m)

    f(linear())
    with pytest.raises(nnx.TraceContextError):
        escaped[0].count = 3


def test_context_captured_by_grad_raises_with_advice():
    model, ctx = linear(), nnx.context(noise=0)
    x = jnp.ones((1, 2))
    before = photograph(model)
    with pytest.raises(nnx.TraceContextError, match="Cannot use Context from a different trace level") as error:
        nnx.grad(lambda m: m(x, ctx=ctx).sum())(model)
    assert "f(m, ctx)" in str(error.value)
    assert_unchanged(model, before)
    grads = nnx.grad(lambda m, ctx: m(x, ctx=ctx).sum())(model, ctx)
    assert grads["kernel"].value.shape == (2, 3)


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat, nnx.vmap], ids=["jit", "remat", "vmap"])
def test_a_context_captured_by_a_transform_is_an_error(transform):
    ctx = nnx.context(noise=0)
    with pytest.raises(nnx.TraceContextError, match="Cannot use Context from a different trace level"):
        transform(lambda x: jax.random.uniform(ctx.make_rng("noise")) + x)(jnp.ones(2))


# Bad static arguments; Modules handed to raw JAX


def test_an_unhashable_static_argument_is_an_error_that_names_it():
    @nnx.jit(static_argnums=1)
    def f(m, sizes):
        m.count += 1

    model = linear()
    before = photograph(model)
    with pytest.raises((TypeError, ValueError), match="hashable") as error:
        f(model, [1, 2])
    assert "static" in str(error.value) and "[1, 2]" in str(error.value)
    assert_unchanged(model, before)
    f(model, (1, 2))
    assert model.count == 1


def test_an_unhashable_static_keyword_is_an_error_that_names_it():
    f = nnx.jit(lambda m, *, sizes: mutate_value(m), static_argnames="sizes")
    model = linear()
    with pytest.raises((TypeError, ValueError), match="sizes"):
        f(model, sizes=[1])
    assert model.count == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda m, x: jax.jit(lambda m, x: m(x))(m, x),
        lambda m, x: jax.jit(lambda tree: tree["m"](tree["x"]))({"m": m, "x": x}),
        lambda m, x: jax.grad(lambda m: m(x).sum())(m),
        lambda m, x: jax.value_and_grad(lambda m: m(x).sum())(m),
        lambda m, x: jax.vmap(lambda m, x: m(x))(m, x),
        lambda m, x: jax.jit(nnx.grad(lambda m: m(x).sum()))(m),
        lambda m, x: jax.eval_shape(lambda m: m(x), m),
        lambda m, x: jax.checkpoint(lambda m: m(x))(m),
        lambda m, x: jax.lax.scan(lambda m, x: (m, m(x)), m, x),
        lambda m, x: jax.lax.cond(True, lambda m: m(x), lambda m: m(x), m),
    ],
    ids="jit nested grad value_and_grad vmap jit-of-lifted-grad eval_shape checkpoint scan cond".split(),
)
def test_module_passed_to_raw_jax_raises_with_advice(call):
    model = linear()
    before = photograph(model)
    with pytest.raises(ValueError, match=r"nnx\.jit") as error:
        call(model, jnp.ones((1, 2)))
    assert "partition" in str(error.value)
    assert_unchanged(model, before)


def test_a_module_returned_from_raw_jit_is_an_error():
    with pytest.raises((TypeError, ValueError)):
        jax.jit(lambda x: linear())(1.0)


def test_partition_and_merge_are_the_way_through_raw_jax():
    model, x = linear(), jnp.ones((1, 2))

    @jax.jit
    def raw(state, x):
        m = moduledef.merge(state)
        y = m(x)
        return y, m.get_state()

    state, moduledef = model.partition()
    _, state = raw(state, x)
    model.update_state(state)
    assert model.count == 1


# sow


def test_sowing_into_a_variable_that_was_not_popped_warns():
    @nnx.jit
    def f(m):
        m.sow(nnx.Intermediate, "activation", m.kernel.sum())

    model = linear()
    f(model)
    with pytest.warns(UserWarning, match="activation"):
        f(model)


def test_sowing_and_popping_around_a_transform_does_not_warn():
    @nnx.jit
    def f(m):
        m.sow(nnx.Intermediate, "activation", m.kernel.sum())

    model = linear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            f(model)
            assert len(model.pop_state(nnx.Intermediate)["activation"].value) == 1
    assert f.trace_count == 1
