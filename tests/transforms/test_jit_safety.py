"""What must not go wrong: exceptions, interrupts, closures, trace levels, and Modules handed to raw JAX."""

import functools
import random
import signal
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


class Count(nnx.Variable):
    pass


class Linear(nnx.Module):
    def __init__(self, din=2, dout=3, *, ctx):
        self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (din, dout)))
        self.count = Count(jnp.zeros((), jnp.int32))
        self.mode = "train"

    def __call__(self, x, *, ctx=None):
        self.count += 1
        if ctx is not None:
            x = x + jax.random.normal(ctx.make_rng("noise"), x.shape)
        return x @ self.kernel


class Net(nnx.Module):
    def __init__(self, *, ctx):
        self.encoder = Linear(2, 2, ctx=ctx)
        self.decoder = Linear(2, 3, ctx=ctx)
        self.tags = ["a"]

    def __call__(self, x):
        return self.decoder(self.encoder(x))


def linear(seed=0):
    return Linear(ctx=nnx.context(seed))


def net(seed=0):
    return Net(ctx=nnx.context(seed))


def photograph(module):
    """Everything that can be seen of a Module: its objects, leaves, and structure."""
    pure = module.partition()
    return [m for _, m in module.named_modules()], jax.tree.leaves(pure), pure.moduledef


def assert_unchanged(module, before):
    modules, leaves, moduledef = photograph(module)
    assert all(a is b for a, b in zip(modules, before[0], strict=True))
    assert all(a is b for a, b in zip(leaves, before[1], strict=True))
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    assert moduledef == before[2]


def vandalise(m):
    """Changes values, statics, submodules and variables of a Net."""
    m.encoder.count += 1
    m.encoder.kernel = m.encoder.kernel * 2
    m.encoder.mode = "eval"
    m.extra = nnx.Param(jnp.ones(2))
    m.decoder = m.encoder
    m.tags.append("b")
    del m.encoder.count


class Boom(Exception):
    pass


def explode(m, *args):
    vandalise(m)
    raise Boom("in the body")


# Exceptions


@pytest.mark.parametrize(
    "call",
    [
        lambda m: nnx.jit(explode)(m),
        lambda m: nnx.jit(explode, donate_argnums=0)(m),
        lambda m: nnx.grad(explode)(m),
        lambda m: nnx.value_and_grad(explode)(m),
        lambda m: nnx.vjp(explode, m),
        lambda m: nnx.remat(explode)(m),
        lambda m: nnx.vmap(explode)(m, jnp.ones(2)),
        lambda m: nnx.scan(explode, length=2)(m, 0.0, jnp.ones(2)),
        lambda m: nnx.cond(True, explode, explode, m),
        lambda m: nnx.switch(0, [explode, explode], m),
        lambda m: nnx.while_loop(lambda m: True, explode, m),
        lambda m: nnx.fori_loop(0, 2, lambda i, m: explode(m), m),
        lambda m: nnx.eval_shape(explode, m),
        lambda m: nnx.jit(explode).lower(m),
        lambda m: nnx.jit(explode).trace(m),
        lambda m: nnx.jit(explode).eval_shape(m),
    ],
    ids="jit donated grad value_and_grad vjp remat vmap scan cond switch while fori shapes lower trace shape".split(),
)
def test_an_exception_in_the_body_leaves_the_module_as_it_was(call):
    model = net()
    before = photograph(model)
    with pytest.raises(Boom, match="in the body"):
        call(model)
    assert_unchanged(model, before)
    model(jnp.ones((1, 2)))
    assert model.encoder.count == 1


def test_an_exception_in_a_nested_transform_leaves_every_module_as_it_was():
    model, other = net(0), net(1)
    before, other_before = photograph(model), photograph(other)

    @nnx.jit
    def outer(m, o):
        vandalise(o)
        nnx.grad(explode)(m)

    with pytest.raises(Boom):
        outer(model, other)
    assert_unchanged(model, before)
    assert_unchanged(other, other_before)


def test_the_call_after_a_failed_trace_works():
    model, fail = net(), [True]
    before = photograph(model)

    @nnx.jit
    def f(m):
        m.encoder.count += 1
        if fail:
            raise Boom
        return m.encoder.count

    for _ in range(2):
        with pytest.raises(Boom):
            f(model)
        assert_unchanged(model, before)
    fail.clear()
    assert f(model) == 1 and model.encoder.count == 1


def test_a_result_jax_cannot_return_leaves_the_module_as_it_was():
    model = net()
    before = photograph(model)

    @nnx.jit
    def f(m):
        vandalise(m)
        return "a string"

    with pytest.raises(TypeError):
        f(model)
    assert_unchanged(model, before)


def test_a_failed_concretization_leaves_the_module_as_it_was():
    model = net()
    before = photograph(model)

    @nnx.jit
    def f(m):
        vandalise(m)
        return float(m.encoder.kernel.sum())

    with pytest.raises(jax.errors.ConcretizationTypeError):
        f(model)
    assert_unchanged(model, before)


def test_an_exception_while_dispatching_leaves_the_module_as_it_was():
    model = net()

    @nnx.jit
    def f(m, x):
        vandalise(m)
        return x

    before = photograph(model)
    with pytest.raises(TypeError):
        f(model, object())
    assert_unchanged(model, before)


def test_an_exception_in_the_body_of_a_cached_function_is_not_replayed():
    model = linear()

    @nnx.jit(static_argnums=1)
    def f(m, fail):
        m.count += 1
        if fail:
            raise Boom

    f(model, False)
    with pytest.raises(Boom):
        f(model, True)
    f(model, False)
    assert model.count == 2


def test_the_context_still_works_after_an_exception():
    ctx, model = nnx.context(noise=0), linear()

    @nnx.jit
    def f(m, ctx):
        ctx.make_rng("noise")
        raise Boom

    with pytest.raises(Boom):
        f(model, ctx)
    a = nnx.jit(lambda ctx: jax.random.uniform(ctx.make_rng("noise")))(ctx)
    b = jax.random.uniform(ctx.make_rng("noise"))
    assert a != b


def interrupt_again_and_again(call, check):
    """Calls under a timer that raises KeyboardInterrupt at random moments, checking after each; returns the hits."""

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    rng, interrupted = random.Random(0), 0
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(80):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 2e-3))
                for _ in range(40):
                    call()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return interrupted


def interruptible(test):
    test = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")(test)
    return pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")(test)


class Many(nnx.Module):
    def __init__(self, names):
        for name in names:
            setattr(self, name, Count(jnp.zeros((), jnp.int32)))


@interruptible
def test_an_interrupt_never_tears_the_write_back_of_values():
    names = [f"count_{i}" for i in range(60)]
    model = Many(names)

    @nnx.jit
    def step(m):
        for name in names:
            setattr(m, name, getattr(m, name) + 1)

    def check():
        assert len({int(getattr(model, name)) for name in names}) == 1

    step(model)
    assert interrupt_again_and_again(lambda: step(model), check) > 10
    count = int(model.count_0)
    step(model)
    assert int(model.count_59) == count + 1


@interruptible
def test_an_interrupt_never_tears_a_structural_change():
    names = [f"count_{i}" for i in range(20)]
    model = Many(names)
    for name in names:
        setattr(model, f"mode_{name}", "a")

    @nnx.jit
    def toggle(m):
        odd = m.mode_count_0 == "a"
        for name in names:
            setattr(m, f"mode_{name}", "b" if odd else "a")
            if odd:
                setattr(m, f"extra_{name}", nnx.Cache(getattr(m, name) * 1))
            else:
                delattr(m, f"extra_{name}")
            setattr(m, name, getattr(m, name) + 1)

    def check():
        count = int(model.count_0)
        assert {int(getattr(model, name)) for name in names} == {count}
        assert {getattr(model, f"mode_{name}") for name in names} == {"b" if count % 2 else "a"}
        assert {hasattr(model, f"extra_{name}") for name in names} == {count % 2 == 1}
        assert len(model.get_state()) == len(names) * (1 + count % 2)

    toggle(model)
    toggle(model)
    assert interrupt_again_and_again(lambda: toggle(model), check) > 10
    assert toggle.trace_count == 2


# Closures


def test_a_function_that_closes_over_a_module_is_a_warning_that_names_it():
    weights = linear()
    with pytest.warns(UserWarning, match="weights") as record:
        y = nnx.jit(lambda x: x @ weights.kernel)(jnp.ones((1, 2)))
    np.testing.assert_allclose(y, jnp.ones((1, 2)) @ weights.kernel, rtol=1e-6)
    assert "constant" in str(record[0].message)


GLOBAL_WEIGHTS = None


def uses_a_global_module(x):
    return x @ GLOBAL_WEIGHTS.kernel


def test_a_function_that_names_a_global_module_is_a_warning_that_names_it(monkeypatch):
    monkeypatch.setitem(globals(), "GLOBAL_WEIGHTS", linear())
    with pytest.warns(UserWarning, match="GLOBAL_WEIGHTS"):
        nnx.jit(uses_a_global_module)(jnp.ones((1, 2)))


def test_a_partial_that_captures_a_module_is_a_warning():
    with pytest.warns(UserWarning, match="Linear"):
        nnx.jit(functools.partial(lambda m, x: x @ m.kernel, linear()))(jnp.ones((1, 2)))


def test_closing_over_a_list_of_modules_is_a_warning_that_names_it():
    experts = [linear(0), linear(1)]
    with pytest.warns(UserWarning, match="experts"):
        nnx.jit(lambda x: x @ experts[0].kernel)(jnp.ones((1, 2)))


def test_closing_over_arrays_is_no_warning():
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
    with pytest.warns(UserWarning, match="other"), pytest.raises(nnx.TraceContextError):
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
    with pytest.warns(UserWarning, match="outer"), pytest.raises(nnx.TraceContextError):
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
    before = photograph(model)
    with pytest.raises(nnx.TraceContextError):
        jax.vmap(lambda x: step(model, x))(jnp.ones(4))
    assert_unchanged(model, before)
    step(model, 1.0)
    with pytest.raises(nnx.TraceContextError):
        jax.vmap(lambda x: step(model, x))(jnp.ones(4))
    assert not isinstance(model.kernel, jax.core.Tracer)


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


def test_a_context_captured_by_grad_is_an_error_that_shows_the_way():
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
def test_a_module_passed_to_raw_jax_is_an_error_that_shows_the_way(call):
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
