"""Memory: steps leave nothing behind, donation saves one copy of the parameters, and no cache owns a Module."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models import Net, net


def train(m, x):
    m.encoder.kernel = m.encoder.kernel + x
    m.decoder.kernel = m.decoder.kernel - x
    m.encoder.count += 1
    return m.decoder.kernel[0, 0]


@pytest.mark.parametrize("option", [{}, {"donate_argnums": 0}], ids=["plain", "donated"])
def test_ten_thousand_steps_are_flat(option):
    model, step = net(), nnx.jit(train, **option)
    for _ in range(50):
        step(model, 1.0)
    gc.collect()
    arrays, objects = len(jax.live_arrays()), len(gc.get_objects())
    for _ in range(10_000):
        step(model, 1.0)
    gc.collect()
    assert len(jax.live_arrays()) <= arrays
    assert len(gc.get_objects()) <= objects + 50
    assert model.encoder.count == 10_050 and step.trace_count <= 2


def test_steps_with_a_context_are_flat():
    model, ctx = net(), nnx.context(noise=0)
    step = nnx.jit(lambda m, ctx: train(m, jax.random.uniform(ctx.make_rng("noise"))))
    for _ in range(20):
        step(model, ctx)
    gc.collect()
    arrays, objects = len(jax.live_arrays()), len(gc.get_objects())
    for _ in range(500):
        step(model, ctx)
    gc.collect()
    assert len(jax.live_arrays()) <= arrays + 2 and len(gc.get_objects()) <= objects + 50


def peak(jitted, *args):
    stats = jitted.lower(*args).compile().memory_analysis()
    sizes = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    return sizes - stats.alias_size_in_bytes


def test_a_donated_step_peaks_one_copy_of_the_parameters_lower():
    def update(m, x):
        grads = nnx.grad(lambda m: sum((w**2 * x).sum() for w in jax.tree.leaves(m.filter(nnx.Param))))(m)
        m.update_state(jax.tree.map(lambda w, g: w - 0.1 * g, m.filter(nnx.Param), grads))

    model, x = net(din=64, hidden=64, dout=64), jnp.ones(())
    copy = sum(leaf.nbytes for leaf in jax.tree.leaves(model.filter(nnx.Param)))
    saved = peak(nnx.jit(update), model, x) - peak(nnx.jit(update, donate_argnums=0), model, x)
    assert saved == pytest.approx(copy, rel=0.01)


def test_a_donated_step_aliases_only_what_it_replaces():
    def replace_one(m):
        m.encoder.kernel = m.encoder.kernel * 2.0

    model = net(din=64, hidden=64, dout=64)
    stats = nnx.jit(replace_one, donate_argnums=0).lower(model).compile().memory_analysis()
    assert stats.alias_size_in_bytes == model.encoder.kernel.nbytes
    assert stats.output_size_in_bytes < 1.1 * model.encoder.kernel.nbytes  # what did not change does not come out


def use_jit(model):
    nnx.jit(train)(model, 1.0)


KEPT_STEP = nnx.jit(train)
KEPT_DONATED_STEP = nnx.jit(train, donate_argnums=0)
KEPT_GRADIENT = nnx.grad(lambda m: (m.encoder.kernel**2).sum())


def use_kept_jit(model):
    KEPT_STEP(model, 1.0)
    KEPT_STEP(model, 2.0)


def use_donated(model):
    KEPT_DONATED_STEP(model, 1.0)
    KEPT_DONATED_STEP(model, 2.0)


def use_grad(model):
    KEPT_GRADIENT(model)


def use_structure_change(model):
    def f(m):
        m.extra = nnx.Param(jnp.ones(2))
        m.decoder = m.encoder

    nnx.jit(f)(model)


def use_scan(model):
    nnx.scan(lambda m, c, x: (train(m, x), None))(model, jnp.zeros(()), jnp.ones(2))


def use_branches_and_loops(model):
    nnx.cond(True, lambda m: train(m, 1.0), lambda m: train(m, 2.0), model)
    nnx.fori_loop(0, 2, lambda i, m: (train(m, 1.0), m)[1], model)


def use_vmap_and_remat(model):
    nnx.vmap(lambda m, x: m.encoder.kernel.sum() + x)(model, jnp.ones(2))
    nnx.remat(lambda m: train(m, 1.0))(model)


def use_bound_method(model):
    class Bound(Net):
        def run(self, x):
            return train(self, x)

    nnx.jit(Bound(ctx=nnx.context(0)).run)(1.0)


def use_result(model):
    assert nnx.jit(lambda m: m)(model) is model


@pytest.mark.parametrize(
    "use",
    [
        use_jit,
        use_kept_jit,
        use_donated,
        use_grad,
        use_structure_change,
        use_scan,
        use_branches_and_loops,
        use_vmap_and_remat,
        use_bound_method,
        use_result,
    ],
)
def test_deleting_a_model_after_a_transform_frees_it(use, without_garbage_collector):
    model = net()
    use(model)
    references = [
        weakref.ref(model),
        weakref.ref(model.encoder),
        weakref.ref(model.encoder.kernel),
        weakref.ref(model.decoder.kernel),
    ]
    del model
    assert [r() for r in references] == [None] * 4


def test_a_lifted_bound_method_keeps_its_module_and_frees_it_with_itself(without_garbage_collector):
    class Runner(Net):
        def run(self, x):
            return train(self, x)

    model = Runner(ctx=nnx.context(0))
    step = nnx.jit(model.run)
    step(1.0)
    reference = weakref.ref(model)
    del model
    step(1.0)
    assert reference() is not None and reference().encoder.count == 2
    del step
    gc.collect()
    assert reference() is None


def test_old_values_are_freed_when_a_step_replaces_them(without_garbage_collector):
    model, step = net(), nnx.jit(train)
    step(model, 1.0)
    old = weakref.ref(model.encoder.kernel)
    step(model, 1.0)
    assert old() is None


def test_a_freed_model_leaves_the_compiled_step_for_the_next(without_garbage_collector):
    step = nnx.jit(train)
    for _ in range(3):
        model = net()
        before = np.asarray(model.encoder.kernel)
        step(model, 1.0)
        np.testing.assert_array_equal(model.encoder.kernel, before + 1)
        del model
    assert step.trace_count == 1


def test_exception_keeps_no_module_alive(without_garbage_collector):
    def fail(m):
        m.encoder.count += 1
        raise ValueError("boom")

    model = net()
    reference = weakref.ref(model)
    with pytest.raises(ValueError, match="boom"):
        nnx.jit(fail)(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_tied_module_that_dies_frees_its_arrays_at_once():
    ref = nnx.Ref(nnx.Param(jnp.ones(4)))
    model, partner = nnx.Dict(w=ref), nnx.Dict(w=ref, big=nnx.Param(jnp.ones(1000)))
    step = nnx.jit(lambda m: setattr(m, "w", m.w + 1))
    step(model)
    big = weakref.ref(partner.big)
    del partner
    assert big() is None
    step(model)
    assert model.w[0] == 3.0


def test_steps_with_tied_modules_that_die_are_flat():
    model = nnx.Dict(w=nnx.Ref(nnx.Param(jnp.ones(4))))
    step = nnx.jit(lambda m: setattr(m, "w", m.w + 1))

    def tie_and_step():
        partner = nnx.Dict(w=model._nnx_info.kinds["w"], big=nnx.Param(jnp.ones(1000)))
        step(model)
        return partner.w

    for _ in range(20):
        tie_and_step()
    gc.collect()
    arrays, objects = len(jax.live_arrays()), len(gc.get_objects())
    for _ in range(1_000):
        tie_and_step()
    gc.collect()
    assert len(jax.live_arrays()) <= arrays + 2
    assert len(gc.get_objects()) <= objects + 50
    assert model.w[0] == 1021.0


def test_a_class_that_was_passed_to_a_transform_can_be_freed():
    def use_a_class():
        class Local(nnx.Module):
            def __init__(self):
                self.w = nnx.Param(jnp.ones(2))
                self.config = [1]

            def __call__(self, x):
                return x * self.w

        model = Local()
        nnx.jit(lambda model, x: model(x))(model, jnp.ones(2))
        nnx.grad(lambda model: model(1.0).sum())(model)
        nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))(model, jnp.ones((3, 2)))
        model.partition(), model.clone()
        return weakref.ref(Local)

    used = [use_a_class() for _ in range(4)]
    gc.collect()
    gc.collect()  # the first one frees compiled functions, and only then does JAX let go of what they were keyed by
    assert [local() for local in used] == [None] * 4


def test_a_function_that_was_a_static_value_can_be_freed():
    def use_a_function():
        holder = type("Holder", (), {})()

        def captured():
            return holder

        holder.function = captured  # a cycle through what the function's key refers to
        nnx.jit(lambda m: m.w)(nnx.Dict(w=nnx.Param(jnp.ones(2)), function=captured))
        return weakref.ref(captured), weakref.ref(holder)

    found = use_a_function()
    gc.collect()
    assert [weak() for weak in found] == [None, None]
