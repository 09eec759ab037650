"""`nnx.while_loop` and `nnx.fori_loop`: Modules as loop state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models import linear


def net(seed=0):
    inner = linear(seed, 2, 2)
    inner.tags = ["a"]
    inner.cache = {"n": jnp.zeros(())}
    return nnx.Dict(inner=inner)


def below(limit):
    return lambda m: m.inner.count < limit


def bump(m):
    m.inner.count += 1
    return m


def eagerly(f, *args):
    return f(*args)


def jitted(f, *args):
    return nnx.jit(f)(*args)


@pytest.mark.parametrize("run", [eagerly, jitted])
def test_while_loop_carries_a_module(run):
    model = net()
    kernel = model.inner.kernel
    out = run(lambda m: nnx.while_loop(below(5), bump, m), model)
    assert out is model and model.inner.count == 5
    np.testing.assert_array_equal(model.inner.kernel, kernel)


@pytest.mark.parametrize("run", [eagerly, jitted])
def test_fori_loop_carries_a_module_among_arrays(run):
    def body(i, carry):
        model, total = carry
        model.inner.count += i
        model.inner.cache["n"] = model.inner.cache["n"] + 1
        return model, total + model.inner.count

    model = net()
    out, total = run(lambda m: nnx.fori_loop(0, 4, body, (m, 0)), model)
    assert out is model and model.inner.count == 6 and total == 0 + 1 + 3 + 6
    assert model.inner.cache["n"] == 4
    assert not isinstance(model.inner.count, jax.core.Tracer)


def test_a_loop_that_never_runs_changes_nothing():
    model = net()
    nnx.while_loop(below(0), bump, model)
    nnx.fori_loop(3, 3, lambda i, m: bump(m), model)
    assert model.inner.count == 0


def test_loops_without_modules_are_plain_loops():
    assert nnx.while_loop(lambda x: x < 10, lambda x: x * 2, 1) == 16
    assert nnx.fori_loop(0, 5, lambda i, x: x + i, 0) == 10


def test_one_module_in_two_places_is_one_module():
    seen = []

    def body(i, pair):
        seen.append(pair[0] is pair[1])
        bump(pair[0])
        return pair

    model = net()
    a, b = nnx.fori_loop(0, 3, body, (model, model))
    assert a is b is model and model.inner.count == 3 and all(seen)


def test_the_bounds_of_fori_loop_may_be_traced():
    model = net()
    step = nnx.jit(lambda m, n: nnx.fori_loop(0, n, lambda i, m: bump(m), m) and None)
    step(model, 3)
    step(model, 4)
    assert model.inner.count == 7 and step.trace_count == 1


def test_a_loop_with_static_bounds_can_be_differentiated():
    def loss(m):
        _, x = nnx.fori_loop(0, 3, lambda i, c: (c[0], c[1] @ c[0].inner.kernel), (m, jnp.ones((1, 2))))
        return x.sum()

    model = net()
    k = model.inner.kernel
    expected = jax.grad(lambda k: (jnp.ones((1, 2)) @ k @ k @ k).sum())(k)
    np.testing.assert_allclose(nnx.grad(loss)(model)["inner/kernel"].value, expected, rtol=1e-4)


def test_stateful_false_discards_the_changes():
    model = net()
    nnx.while_loop(below(5), bump, model, stateful=False)
    nnx.fori_loop(0, 2, lambda i, m: bump(m), model, stateful=False)
    assert model.inner.count == 0


def test_gradients_inside_a_loop_train_the_module():
    def body(i, m):
        grads = nnx.grad(lambda m: (m.inner.kernel**2).sum())(m)
        m.update_state(jax.tree.map(lambda w, g: w - 0.25 * g, m.filter(nnx.Param), grads))
        return m

    model = net()
    kernel = model.inner.kernel
    nnx.fori_loop(0, 2, body, model)
    np.testing.assert_allclose(model.inner.kernel, kernel / 4, rtol=1e-5)


# Random keys


def drawn(loop, ctx, steps=4):
    """All the keys that a loop draws from a Context, in its body and, where it has one, in its condition."""
    noise = lambda ctx: jax.random.bits(ctx.make_rng("noise"), (2,))  # noqa: E731
    found = jnp.zeros((2 * steps + 1, 2), jnp.uint32)

    def body(i, found, ctx):
        return found.at[2 * i].set(noise(ctx)).at[2 * i + 1].set(noise(ctx))

    if loop == "fori_loop":
        found, _ = nnx.fori_loop(0, steps, lambda i, c: (body(i, c[0], c[1]), c[1]), (found, ctx))
        return found[:-1]
    seen = []

    def condition(carry):
        i, _, ctx = carry
        jax.debug.callback(lambda bits: seen.append(tuple(bits.tolist())), noise(ctx))
        return i < steps

    _, found, _ = nnx.while_loop(condition, lambda c: (c[0] + 1, body(*c), c[2]), (0, found, ctx))
    jax.effects_barrier()
    assert len(seen) == steps + 1
    return [*found[:-1], *seen]


@pytest.mark.parametrize("loop", ["while_loop", "fori_loop"])
def test_a_loop_draws_no_key_twice(loop):
    ctx = nnx.context(noise=0)
    before = jax.random.bits(ctx.make_rng("noise"), (2,))
    keys = [before, *drawn(loop, ctx), *drawn(loop, ctx), jax.random.bits(ctx.make_rng("noise"), (2,))]
    assert len({tuple(map(int, key)) for key in keys}) == len(keys)


# Errors


def change_dtype(m):
    m.inner.count = m.inner.count + 0.5


def change_shape(m):
    m.inner.kernel = m.inner.kernel[0]


def set_static(m):
    m.inner.mode = "eval"


def mutate_static_list(m):
    m.inner.tags.append("b")


def add_variable(m):
    m.inner.extra = nnx.Cache(jnp.ones(()))


def delete_variable(m):
    del m.inner.count


def add_submodule(m):
    m.inner.child = nnx.Dict()


def replace_submodule(m):
    m.inner = net(3).inner


@pytest.mark.parametrize(
    "change, path",
    [
        (change_dtype, "inner/count"),
        (change_shape, "inner/kernel"),
        (set_static, "inner/mode"),
        (mutate_static_list, "inner/tags"),
        (add_variable, "inner/extra"),
        (delete_variable, "inner/count"),
        (add_submodule, "inner/child"),
        (replace_submodule, "inner"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("kind", ["while_loop", "fori_loop"])
def test_a_body_that_changes_the_structure_is_an_error_that_names_the_path(change, path, kind):
    model = net()
    state, moduledef = model.partition()

    def body(m):
        change(m)
        return m

    with pytest.raises((TypeError, ValueError), match=path):
        if kind == "while_loop":
            nnx.while_loop(lambda m: m.inner.kernel.sum() < 100, body, model)
        else:
            nnx.fori_loop(0, 2, lambda i, m: body(m), model)
    assert model.get_module_def() == moduledef
    assert all(a is b for a, b in zip(jax.tree.leaves(model.get_state()), jax.tree.leaves(state), strict=True))


def test_a_condition_that_changes_a_module_is_an_error():
    def condition(m):
        m.inner.count += 1
        return m.inner.count < 3

    model = net()
    with pytest.raises(ValueError, match="the condition changed a Module"):
        nnx.while_loop(condition, lambda m: m, model)
    assert model.inner.count == 0


def test_a_plain_carry_that_changes_dtype_is_an_error():
    with pytest.raises((TypeError, ValueError), match="float32"):
        nnx.fori_loop(0, 2, lambda i, c: (c[0], c[1] + 0.5), (net(), jnp.zeros((), jnp.int32)))


def test_a_carry_that_changes_structure_is_an_error():
    model = net()
    with pytest.raises((TypeError, ValueError)):
        nnx.fori_loop(0, 2, lambda i, c: (bump(c), 1), model)
    assert model.inner.count == 0


def test_returning_another_module_than_the_carried_one_is_an_error():
    with pytest.raises((TypeError, ValueError)):
        nnx.fori_loop(0, 2, lambda i, c: (c[1], c[0]), (net(0), nnx.Dict(w=nnx.Param(jnp.ones(2)))))
