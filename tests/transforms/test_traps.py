"""The traps found in review of the design, each a test."""

import gc
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


class Count(nnx.Variable):
    pass


class Net(nnx.Module):
    def __init__(self, seed=0):
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(seed), (3, 3)))
        self.bias = nnx.Param(jnp.zeros((3,)))
        self.count = Count(jnp.zeros((), jnp.int32))


# jax.vmap around a lifted step that writes


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "cached call"])
@pytest.mark.parametrize("option", [{}, {"donate_argnums": 0}], ids=["plain", "donated"])
def test_vmap_around_a_writing_step_is_an_error_and_leaks_no_tracer(warm, option):
    @nnx.jit(**option)
    def step(m, x):
        m.kernel = m.kernel + x
        return x * 2

    model = Net()
    if warm:
        step(model, 1.0)
    before = np.asarray(model.kernel)
    with pytest.raises(nnx.TraceContextError):
        jax.vmap(lambda x: step(model, x))(jnp.arange(3.0))
    assert not isinstance(model.kernel, jax.core.Tracer)
    np.testing.assert_array_equal(model.kernel, before)
    step(model, 1.0)
    np.testing.assert_allclose(model.kernel, before + 1, rtol=1e-6)


def test_vmap_around_a_step_that_writes_unbatched_values_is_the_same_error():
    @nnx.jit
    def step(m, x):
        m.count += 1
        return x

    model = Net()
    with pytest.raises(nnx.TraceContextError):
        jax.vmap(lambda x: step(model, x))(jnp.arange(3.0))
    assert model.count == 0


# Alternating shapes with different change sets


@pytest.mark.parametrize("option", [{}, {"donate_argnums": 0}], ids=["plain", "donated"])
def test_alternating_shapes_with_different_change_sets(option):
    def f(m, x):
        if x.shape[0] == 2:
            m.kernel = m.kernel + 1
        elif x.shape[0] == 3:
            m.bias = m.bias + 1
        else:
            m.kernel = m.kernel * 1
            m.bias = m.bias - 1
        m.count += 1
        return x.sum() + m.bias[0]

    eager, lifted, step = Net(), Net(), nnx.jit(f, **option)
    for n in (2, 3, 2, 4, 3, 3, 2, 4, 2):
        expected = f(eager, jnp.ones(n))
        found = step(lifted, jnp.ones(n))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        for name in ("kernel", "bias", "count"):
            np.testing.assert_allclose(getattr(lifted, name), getattr(eager, name), rtol=1e-6)


def test_alternating_shapes_under_donation_settle():
    @nnx.jit(donate_argnums=0)
    def step(m, x):
        if x.shape[0] == 2:
            m.kernel = m.kernel + 1
        else:
            m.bias = m.bias + 1

    model = Net()
    for n in (2, 3, 2, 3):
        step(model, jnp.ones(n))
    traces = step.trace_count
    for n in (2, 3, 2, 3, 2):
        step(model, jnp.ones(n))
    assert step.trace_count == traces


def test_the_unchanged_buffer_of_the_other_shape_is_never_donated():
    @nnx.jit(donate_argnums=0)
    def step(m, x):
        if x.shape[0] == 2:
            m.kernel = m.kernel + 1
        else:
            m.bias = m.bias + 1

    model = Net()
    for n in (2, 3, 2, 3):
        kernel, bias = model.kernel, model.bias
        step(model, jnp.ones(n))
        kept = bias if n == 2 else kernel
        assert not kept.is_deleted()


# Model and clone in one donated call


def test_a_model_and_its_clone_in_one_donated_call():
    @nnx.jit(donate_argnums=(0, 1))
    def step(m, target):
        m.kernel = m.kernel + 1
        target.kernel = target.kernel * 0.5 + m.kernel * 0.5

    model = Net()
    start = np.asarray(model.kernel)
    target = model.clone()
    step(model, target)
    np.testing.assert_allclose(model.kernel, start + 1, rtol=1e-6)
    np.testing.assert_allclose(target.kernel, start + 0.5, rtol=1e-6)
    step(model, target)
    np.testing.assert_allclose(model.kernel, start + 2, rtol=1e-6)


def test_a_clone_kept_outside_with_copied_buffers_survives_donation():
    @nnx.jit(donate_argnums=0)
    def step(m):
        m.kernel = m.kernel + 1

    model = Net()
    backup = model.clone(copy_arrays=True)
    start = np.asarray(model.kernel)
    step(model)
    np.testing.assert_array_equal(backup.kernel, start)


def test_a_donated_model_whose_clone_is_passed_undonated():
    @nnx.jit(donate_argnums=0)
    def step(m, reference):
        m.kernel = m.kernel + reference.kernel

    model = Net()
    reference = model.clone()
    start = np.asarray(model.kernel)
    step(model, reference)
    np.testing.assert_allclose(reference.kernel, start)
    np.testing.assert_allclose(model.kernel, 2 * start, rtol=1e-6)


# In-place change of a dict-valued node


def with_cache():
    m = nnx.Dict()
    m.cache = {"k": jnp.zeros(2), "steps": [jnp.zeros(()), 1]}
    return m


def test_a_dict_valued_node_changed_in_place_under_jit():
    def f(m, x):
        m.cache["k"] = m.cache["k"] + x
        m.cache["steps"][0] = m.cache["steps"][0] + 1

    step = nnx.jit(f)
    eager, lifted = with_cache(), with_cache()
    for x in (1.0, 2.0, 3.0):
        f(eager, x)
        step(lifted, x)
    np.testing.assert_array_equal(lifted.cache["k"], eager.cache["k"])
    assert lifted.cache["steps"][0] == 3 and isinstance(lifted.cache["steps"], list)


def test_a_dict_valued_node_that_gains_a_key_under_jit():
    def f(m):
        m.cache["new"] = m.cache["k"] + 1

    step = nnx.jit(f)
    for _ in range(2):
        m = with_cache()
        step(m)
        np.testing.assert_array_equal(m.cache["new"], [1.0, 1.0])
        del m.cache["new"]
        step(m)
        assert set(m.cache) == {"k", "steps", "new"}
    assert step.trace_count == 1


def test_a_dict_changed_in_place_by_a_failing_body_is_as_it_was():
    def f(m):
        m.cache["k"] = m.cache["k"] + 1
        m.cache["new"] = 3
        raise ValueError("boom")

    m = with_cache()
    with pytest.raises(ValueError, match="boom"):
        nnx.jit(f)(m)
    assert set(m.cache) == {"k", "steps"}
    np.testing.assert_array_equal(m.cache["k"], np.zeros(2))


def test_a_dict_valued_node_changed_in_place_under_scan():
    def f(m, carry, x):
        m.cache["k"] = m.cache["k"] + x
        return carry, m.cache["k"][0]

    m = with_cache()
    m.cache = {"k": jnp.zeros(2)}
    _, ys = nnx.scan(f)(m, 0.0, jnp.arange(4.0))
    np.testing.assert_array_equal(m.cache["k"], [6.0, 6.0])
    np.testing.assert_array_equal(ys, [0.0, 1.0, 3.0, 6.0])


def test_a_dict_changed_outside_between_calls_is_seen():
    step = nnx.jit(lambda m: m.cache["k"].sum())
    m = with_cache()
    assert step(m) == 0
    m.cache["k"] = jnp.ones(2)
    assert step(m) == 2
    m.cache["extra"] = jnp.ones(())
    assert nnx.jit(lambda m: m.cache["extra"])(m) == 1


# A new fork of a Context every step


def test_a_new_fork_of_a_context_every_step_compiles_once():
    step = nnx.jit(lambda m, ctx: m.kernel.sum() + jax.random.uniform(ctx.make_rng("noise")))
    model, ctx = Net(), nnx.context(noise=0)
    values = {float(step(model, ctx.fork())) for _ in range(5)} | {float(step(model, ctx)) for _ in range(5)}
    assert len(values) == 10 and step.trace_count == 1


def test_keys_made_between_calls_do_not_recompile():
    step = nnx.jit(lambda ctx: jax.random.uniform(ctx.make_rng("noise")))
    ctx = nnx.context(noise=0)
    for _ in range(3):
        step(ctx)
        ctx.make_rng("noise")
    assert step.trace_count == 1


# A static counter changed every step


def test_a_static_counter_changed_every_step_warns_once():
    @nnx.jit
    def step(m):
        m.inner.n += 1

    class Inner(nnx.Module):
        def __init__(self):
            self.n = 0

    model = nnx.Dict(inner=Inner())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(25):
            step(model)
    about = [w for w in caught if "inner/n" in str(w.message)]
    assert model.inner.n == 25 and len(about) == 1


def test_a_static_counter_changed_outside_warns_once_too():
    class Schedule(nnx.Module):
        def __init__(self):
            self.epoch = 0
            self.w = nnx.Param(jnp.ones(()))

    step = nnx.jit(lambda m: m.w * m.epoch)
    model = Schedule()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(25):
            model.epoch = epoch
            assert step(model) == epoch
    assert len([w for w in caught if "epoch" in str(w.message)]) == 1


def test_a_static_that_toggles_between_two_values_does_not_warn():
    class Modal(nnx.Module):
        def __init__(self):
            self.mode = "train"
            self.w = nnx.Param(jnp.ones(()))

    step, model = nnx.jit(lambda m: m.w * (2 if m.mode == "train" else 3)), Modal()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(30):
            model.mode = "train" if i % 2 else "eval"
            step(model)
    assert step.trace_count == 2


# del model


def test_del_model_after_a_jitted_call_frees_it():
    step, model = nnx.jit(lambda m: m.kernel.sum()), Net()
    step(model)
    step(model)
    references = weakref.ref(model), weakref.ref(model.kernel)
    gc.disable()
    try:
        del model
        assert [r() for r in references] == [None, None]
    finally:
        gc.enable()


# A function that closes over a Module


def test_a_function_that_closes_over_a_module_warns_and_names_it():
    encoder = Net()

    def forward(x):
        return x @ encoder.kernel

    with pytest.warns(UserWarning, match="encoder") as record:
        step = nnx.jit(forward)
        step(jnp.ones(3))
        step(jnp.ones(3))
    about = [w for w in record if "encoder" in str(w.message)]
    assert len(about) == 1 and "forward" in str(about[0].message)


def test_a_function_that_closes_over_a_container_of_modules_warns():
    models = nnx.Sequence([Net(), Net()])
    with pytest.warns(UserWarning, match="models"):
        nnx.jit(lambda x: x @ models[0].kernel)(jnp.ones(3))
