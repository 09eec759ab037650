"""`nnx.cond` and `nnx.switch`: whichever branch ran, its state changes stand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models import Box, Count


def net(seed=0):
    kernel = jax.random.normal(jax.random.key(seed), (2, 2))
    left, right = Count(jnp.zeros((), jnp.int32)), Count(jnp.zeros((), jnp.int32))
    return nnx.Dict(inner=Box(kernel=nnx.Param(kernel), left=left, right=right, mode="train", tags=["a"]))


def go_left(m, x):
    m.inner.left += 1
    return x + 1


def go_right(m, x):
    m.inner.right += 10
    m.inner.kernel = m.inner.kernel * 2
    return x - 1


def do_nothing(m, x):
    return x


def counts(m):
    return int(m.inner.left), int(m.inner.right)


def eagerly(f, *args):
    return f(*args)


def jitted(f, *args):
    return nnx.jit(f)(*args)


@pytest.mark.parametrize("run", [eagerly, jitted])
@pytest.mark.parametrize("pred, value, expected", [(True, 6.0, (1, 0)), (False, 4.0, (0, 10))])
def test_changes_of_the_branch_that_ran_are_kept(run, pred, value, expected):
    model = net()
    kernel = model.inner.kernel
    y = run(lambda pred, m, x: nnx.cond(pred, go_left, go_right, m, x), pred, model, 5.0)
    assert y == value and counts(model) == expected
    np.testing.assert_allclose(model.inner.kernel, kernel if pred else 2 * kernel)
    assert not isinstance(model.inner.left, jax.core.Tracer)


def test_one_compiled_step_takes_either_branch():
    model = net()
    step = nnx.jit(lambda pred, m, x: nnx.cond(pred, go_left, go_right, m, x))
    for pred in (True, False, True):
        step(pred, model, 1.0)
    assert counts(model) == (2, 10) and step.trace_count == 1


def test_a_branch_may_change_nothing():
    model = net()
    nnx.cond(False, go_left, do_nothing, model, 1.0)
    assert counts(model) == (0, 0)
    nnx.cond(True, go_left, do_nothing, model, 1.0)
    assert counts(model) == (1, 0)


@pytest.mark.parametrize("run", [eagerly, jitted])
def test_switch_runs_one_of_many(run):
    model = net()
    branches = [go_left, go_right, do_nothing]
    results = [run(lambda i, m, x: nnx.switch(i, branches, m, x), i, model, 5.0) for i in (0, 1, 2, 1)]
    assert [float(r) for r in results] == [6.0, 4.0, 5.0, 4.0]
    assert counts(model) == (1, 20)


def test_switch_clamps_its_index_as_jax_does():
    model = net()
    nnx.switch(7, [go_left, go_right], model, 1.0)
    nnx.switch(-3, [go_left, go_right], model, 1.0)
    assert counts(model) == (1, 10)


def test_operands_may_hold_modules_anywhere():
    model = net()

    def f(tree):
        tree["many"][0].inner.left += 1
        return tree["x"]

    assert nnx.cond(True, f, lambda tree: tree["x"], {"many": [model], "x": 3.0}) == 3.0
    assert counts(model) == (1, 0)


def test_one_module_passed_twice_is_one_module():
    model, seen = net(), []

    def f(a, b):
        seen.append(a is b)
        a.inner.left += 1
        b.inner.left += 1

    nnx.cond(True, f, lambda a, b: None, model, model)
    assert all(seen) and counts(model) == (2, 0)


def test_an_input_module_returned_by_every_branch_is_the_same_object():
    model = net()
    out = nnx.cond(True, lambda m: m, lambda m: m, model)
    assert out is model


def test_branches_without_modules_are_plain_cond():
    assert nnx.cond(True, lambda x: x + 1, lambda x: x - 1, 1) == 2
    assert nnx.switch(1, [lambda x: x, lambda x: x * 3], 2) == 6


def test_a_context_may_be_an_operand():
    def f(m, ctx):
        return jax.random.uniform(ctx.make_rng("noise"))

    ctx = nnx.context(noise=0)
    values = {float(nnx.cond(True, f, lambda m, ctx: 0.0, net(), ctx)) for _ in range(3)}
    assert len(values) == 3


def test_a_new_variable_made_identically_in_every_branch_appears():
    def make(scale):
        def f(m):
            m.inner.extra = nnx.Cache(m.inner.kernel * scale, tag="t")

        return f

    for pred, scale in ((True, 2.0), (False, 3.0)):
        model = net()
        nnx.cond(pred, make(2.0), make(3.0), model)
        np.testing.assert_allclose(model.inner.extra, model.inner.kernel * scale)
        assert isinstance(model.inner.variable("extra"), nnx.Cache) and model.inner.variable("extra").tag == "t"


def test_gradients_flow_through_the_branch_that_ran():
    def loss(m, pred):
        return nnx.cond(pred, lambda m: m.inner.kernel.sum() * 3.0, lambda m: m.inner.kernel.sum() * 5.0, m)

    for pred, slope in ((True, 3.0), (False, 5.0)):
        grads = nnx.grad(loss)(net(), pred)
        np.testing.assert_allclose(grads["inner/kernel"].value, np.full((2, 2), slope))


def test_stateful_false_discards_the_changes():
    model = net()
    assert nnx.cond(True, go_left, go_right, model, 1.0, stateful=False) == 2.0
    assert nnx.switch(0, [go_left, go_right], model, 1.0, stateful=False) == 2.0
    assert counts(model) == (0, 0)


def test_in_place_changes_of_a_pytree_node_are_kept():
    def f(m):
        m.cache["n"] = m.cache["n"] + 1

    model = nnx.Dict()
    model.cache = {"n": jnp.zeros(()), "other": jnp.ones(())}
    nnx.cond(True, f, lambda m: None, model)
    assert model.cache["n"] == 1
    nnx.cond(False, f, lambda m: None, model)
    assert model.cache["n"] == 1 and model.cache["other"] == 1


# Errors


def set_static(m):
    m.inner.mode = "eval"


def mutate_static_list(m):
    m.inner.tags.append("b")


def add_submodule(m):
    m.inner.child = nnx.Dict()


def add_variable(m):
    m.inner.extra = nnx.Cache(jnp.ones(2))


def add_other_shape(m):
    m.inner.extra = nnx.Cache(jnp.ones(3))


def add_other_type(m):
    m.inner.extra = nnx.BatchStat(jnp.ones(2))


def delete_variable(m):
    del m.inner.left


def change_dtype(m):
    m.inner.left = m.inner.left + 0.5


def nothing(m):
    pass


@pytest.mark.parametrize(
    "true_branch, false_branch, path",
    [
        (set_static, nothing, "inner/mode"),
        (set_static, set_static, "inner/mode"),
        (mutate_static_list, nothing, "inner/tags"),
        (add_submodule, nothing, "inner/child"),
        (add_submodule, add_submodule, "inner/child"),
        (add_variable, nothing, "inner/extra"),
        (nothing, add_variable, "inner/extra"),
        (add_variable, add_other_shape, "inner/extra"),
        (add_variable, add_other_type, "inner/extra"),
        (delete_variable, nothing, "inner/left"),
        (change_dtype, nothing, "inner/left"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("kind", ["cond", "switch"])
def test_branches_that_disagree_are_an_error_that_names_the_difference(true_branch, false_branch, path, kind):
    model = net()
    state, moduledef = model.partition()
    with pytest.raises((TypeError, ValueError), match=path):
        if kind == "cond":
            nnx.cond(True, true_branch, false_branch, model)
        else:
            nnx.switch(0, [true_branch, false_branch, nothing], model)
    assert model.get_module_def() == moduledef
    assert all(a is b for a, b in zip(jax.tree.leaves(model.get_state()), jax.tree.leaves(state), strict=True))


def test_branches_that_return_different_things_are_an_error():
    model = net()
    with pytest.raises((TypeError, ValueError)):
        nnx.cond(True, lambda m: 1.0, lambda m: (1.0, 2.0), model)
    with pytest.raises((TypeError, ValueError), match="float32"):
        nnx.cond(True, lambda m: jnp.ones(()), lambda m: jnp.ones((), jnp.int32), model)


def test_branches_that_return_different_modules_are_an_error():
    with pytest.raises((TypeError, ValueError)):
        nnx.cond(True, lambda a, b: a, lambda a, b: b, net(0), net(1))


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        (jnp.ones(3), "float32[3]"),
        (jnp.ones(2, jnp.int32), "int32[2]"),
        ({"a": jnp.ones(2)}, "{'a': *}) of float32[2]"),
        (1.0, "float32[]"),
    ],
)
def test_branches_with_different_types_raise_with_both(other, shown):
    model = nnx.Dict(v=nnx.Variable(jnp.ones(2)))
    branches = [lambda model, value=value: setattr(model, "v", value) for value in (jnp.ones(2), other)]
    with pytest.raises(
        TypeError, match="the branches disagree about 'v': it is float32\\[2\\] after branch 0"
    ) as error:
        nnx.cond(True, *branches, model)
    assert f"{shown} after branch 1" in str(error.value)
