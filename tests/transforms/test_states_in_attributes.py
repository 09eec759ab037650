"""Attributes whose value is a tree of States, such as the state of an optimizer, in calls of jitted functions."""

import gc
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx


class Moments(NamedTuple):
    count: Any
    mu: Any


class Trainer(nnx.Module):
    """An optimizer such as a user would write."""

    def __init__(self, model, tx):
        self.tx = tx
        self.state = tx.init(model.filter(nnx.Param))

    def update(self, model, grads):
        params = model.filter(nnx.Param)
        updates, self.state = self.tx.update(grads, self.state, params)
        model.update_state(optax.apply_updates(params, updates))


def trained(steps, lift, **options):
    model = nnx.Linear(2, 3, ctx=nnx.context(0))
    trainer = Trainer(model, optax.chain(optax.clip(1.0), optax.adam(0.1)))

    def step(model, trainer, x):
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        trainer.update(model, grads)

    step = nnx.jit(step, **options) if lift else step
    for i in range(steps):
        step(model, trainer, jnp.full((4, 2), i + 1.0))
    return model, trainer, step


@pytest.mark.parametrize("options", [{}, {"donate_argnums": (0, 1)}], ids=["plain", "donated"])
def test_a_user_defined_optimizer_trains_as_it_does_without_jit(options):
    model, trainer, step = trained(5, True, **options)
    expected_model, expected_trainer, _ = trained(5, False)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        (model.get_state(), trainer.state),
        (expected_model.get_state(), expected_trainer.state),
    )
    assert jax.tree.structure(trainer.state) == jax.tree.structure(expected_trainer.state)
    assert step.trace_count == 1


def test_a_state_that_was_written_back_has_the_containers_that_the_function_gave_it():
    m = nnx.Dict(
        state=(nnx.State({"w": nnx.Param(jnp.zeros(2), ("embed",)), "b": nnx.BatchStat(1.0), "a": jnp.ones(2)}),)
    )

    @nnx.jit
    def step(m):
        m.state = jax.tree.map(lambda x: x + 1, m.state)

    for _ in range(3):
        step(m)
    state = m.state[0]
    assert type(state["w"]) is nnx.Param and state["w"].sharding == ("embed",)
    assert type(state["b"]) is nnx.BatchStat and state["b"].value == 4.0
    assert isinstance(state["a"], jax.Array)
    assert state["w"] is state["w"]
    np.testing.assert_array_equal(state["w"].value, [3.0, 3.0])


def test_a_static_entry_of_a_state_stays_static():
    m = nnx.Dict(state=(nnx.State({"n": nnx.Static(2), "w": nnx.Param(jnp.ones(2))}),))

    @nnx.jit
    def step(m):
        (state,) = m.state
        m.state = (nnx.State({"n": state["n"], "w": nnx.Param(state["w"].value * state["n"].value)}),)

    for _ in range(3):
        step(m)
    assert m.state[0]["n"] == nnx.Static(2)
    np.testing.assert_array_equal(m.state[0]["w"].value, [8.0, 8.0])
    m.state = (nnx.State({"n": nnx.Static(5), "w": m.state[0]["w"]}),)
    step(m)
    np.testing.assert_array_equal(m.state[0]["w"].value, [40.0, 40.0])


def test_changes_made_in_place_around_a_state_are_seen():
    m = nnx.Dict(cache=nnx.Node({"k": jnp.zeros(()), "inner": [nnx.State({"w": nnx.Param(jnp.ones(()))})]}))

    @nnx.jit
    def total(m):
        m.cache["inner"] = [jax.tree.map(lambda x: x + 1, state) for state in m.cache["inner"]]
        return m.cache["k"] + sum(jax.tree.leaves(m.cache["inner"]))

    assert total(m) == 2 and total(m) == 3
    m.cache["k"] = jnp.asarray(10.0)
    assert total(m) == 14
    m.cache["inner"][0] = nnx.State({"w": nnx.Param(jnp.asarray(100.0))})
    assert total(m) == 111
    m.cache["inner"].append(nnx.State({"v": nnx.Param(jnp.asarray(1000.0))}))
    assert total(m) == 10 + 102 + 1001
    m.cache["k"] = nnx.State({"new": nnx.Param(jnp.asarray(5.0))})  # a State where there was a leaf
    with pytest.raises(TypeError):
        total(m)
    m.cache["k"] = jnp.asarray(0.0)
    assert total(m) == 103 + 1002
    del m.cache["inner"][1]
    assert total(m) == 104


def test_states_that_differ_in_paths_or_containers_are_distinguished():
    seen = []

    @nnx.jit
    def step(m):
        (state,) = m.state
        seen.append((list(state), [type(leaf) for leaf in state.values()]))
        m.state = (jax.tree.map(lambda x: x + 1, state),)

    x = jnp.zeros(2)
    trees = [nnx.State({"a": nnx.Param(x)}), nnx.State({"b": nnx.Param(x)}), nnx.State({"a": nnx.BatchStat(x)})]
    m = nnx.Dict(state=nnx.Node((trees[0],)))
    for _ in range(3):
        for tree in trees:
            m.state = (tree,)
            step(m)
            step(m)
            assert list(m.state[0]) == list(tree)
            assert [type(leaf) for leaf in m.state[0].values()] == [type(leaf) for leaf in tree.values()]
    assert step.trace_count == len(seen) == 3


def test_shapes_can_decide_where_the_states_are_that_come_out():
    m = nnx.Dict(state=nnx.Node((jnp.zeros(()), nnx.State({"w": nnx.Param(jnp.zeros(()))}))))

    @nnx.jit
    def step(m, x):
        count, state = (jnp.zeros(()), nnx.State({"w": nnx.Param(jnp.zeros(()))}))
        m.state = (count, state) if x.size == 1 else ((state, count), state) if x.size == 2 else (state, count)

    for _ in range(3):
        for size, kinds in ((1, (jax.Array, nnx.State)), (2, (tuple, nnx.State)), (3, (nnx.State, jax.Array))):
            step(m, jnp.ones(size))
            assert all(map(isinstance, m.state, kinds))


def test_a_module_whose_changes_are_discarded_keeps_its_state():
    m = nnx.Dict(state=(nnx.State({"w": nnx.Param(jnp.zeros(()))}),))
    before = m.state

    @nnx.jit(stateful=False)
    def step(m):
        m.state = jax.tree.map(lambda x: x + 1, m.state)
        return m, m.state[0]["w"].value

    for _ in range(3):
        other, value = step(m)
        assert value == 1 and m.state is before
        assert type(other.state[0]) is nnx.State and other.state[0]["w"].value == 1


def test_a_state_behind_a_ref_reaches_all_its_owners():
    ref = nnx.Ref(nnx.Variable((nnx.State({"w": nnx.Param(jnp.zeros(()))}),)))
    m = nnx.Dict(a=nnx.Dict(s=ref), b=nnx.Dict(s=ref))

    @nnx.jit
    def step(m):
        m.a.s = jax.tree.map(lambda x: x + 1, m.a.s)

    for i in range(3):
        step(m)
        assert m.a.s is m.b.s and m.a.s[0]["w"].value == i + 1


def test_a_state_that_is_the_value_itself_keeps_its_identity_if_it_is_not_changed():
    m = nnx.Dict(state=nnx.State({"w": nnx.Param(jnp.ones(()))}), n=nnx.Variable(jnp.zeros(())))
    before = m.state

    @nnx.jit
    def step(m):
        m.n += m.state["w"].value

    for _ in range(3):
        step(m)
    assert m.state is before and m.n == 3


def test_no_plan_keeps_an_array_of_a_state_alive():
    m = nnx.Dict(state=nnx.Node((nnx.State({"w": nnx.Param(jnp.ones(3))}),)))

    @nnx.jit
    def step(m):
        m.state = jax.tree.map(lambda x: x + 1, m.state)

    for _ in range(3):
        step(m)
    array = weakref.ref(m.state[0]["w"].value)
    m.state = (nnx.State({"w": nnx.Param(jnp.zeros(3))}),)
    gc.collect()
    assert array() is None


def test_the_stages_of_compilation_take_trees_of_states():
    m = nnx.Dict(state=nnx.Node((nnx.State({"w": nnx.Param(jnp.ones(3))}),)))

    @nnx.jit
    def step(m):
        m.state = jax.tree.map(lambda x: x + 1, m.state)
        return m.state[0]

    assert step.eval_shape(m)["w"].shape == (3,)
    compiled = step.lower(m).compile()
    out = compiled(m)
    np.testing.assert_array_equal(m.state[0]["w"].value, out["w"].value)
    assert step.trace_count == 1


def test_errors_name_the_path_of_a_value_in_a_state():
    m = nnx.Dict(state=nnx.Node((nnx.State({"w": nnx.Param("text"), "v": nnx.Param(jnp.ones(()))}),)))
    with pytest.raises(TypeError, match=r"\[0\]\['w'\]\.value"):
        nnx.jit(lambda m: m.state[0]["v"].value)(m)
