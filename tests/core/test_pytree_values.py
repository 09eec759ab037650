"""Pytrees of arrays as attributes: one node of the state, changed in place like any Python object."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx
from tests.models import Box


class Point(NamedTuple):
    x: object
    y: object


def test_a_pytree_of_arrays_is_one_node():
    cache = {"k": jnp.zeros(2), "v": [jnp.ones(2), jnp.ones(1)]}
    m = Box(cache=cache)
    assert m.cache is cache
    state = m.get_state()
    assert list(state) == ["cache"]
    assert type(state["cache"]) is nnx.Node
    assert jax.tree.structure(state["cache"].value) == jax.tree.structure(cache)


@pytest.mark.parametrize(
    "value",
    [
        [jnp.ones(1)],
        (jnp.ones(1), jnp.ones(2)),
        {"a": {"b": np.ones(1)}},
        Point(jnp.ones(1), 2),
        optax.adam(1e-3).init({"w": jnp.ones(2)}),
    ],
    ids=["list", "tuple", "dict", "namedtuple", "optax state"],
)
def test_a_pytree_keeps_its_type_through_partition_and_merge(value):
    m = Box(x=value)
    assert type(m.x) is type(value)
    assert list(m.get_state()) == ["x"]
    again = m.partition().merge()
    assert type(again.x) is type(value)
    assert jax.tree.structure(again.x) == jax.tree.structure(value)
    for mine, theirs in zip(jax.tree.leaves(again.x), jax.tree.leaves(value), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_python_numbers_beside_arrays_are_data():
    m = Box(x={"w": jnp.ones(2), "step": 3, "rate": 0.5, "on": True})
    assert len(jax.tree.leaves(m.get_state())) == 4
    assert m.get_module_def() == Box(x={"w": jnp.ones(2), "step": 4, "rate": 0.1, "on": False}).get_module_def()


@pytest.mark.parametrize("leaf", ["text", object(), print], ids=["str", "object", "function"])
def test_a_leaf_jax_cannot_take_is_an_error_at_assignment(leaf):
    m = Box(y=1)
    with pytest.raises((ValueError, TypeError), match="x"):
        m.x = {"w": jnp.ones(2), "bad": leaf}
    assert not hasattr(m, "x")
    assert len(m.get_state()) == 0


def test_pytree_values_may_be_changed_in_place():
    m = Box(cache={"k": jnp.zeros(2)})
    m.get_state()
    m.cache["k"] = jnp.ones(2)
    m.cache["new"] = jnp.ones(3)
    value = m.get_state()["cache"].value
    np.testing.assert_array_equal(value["k"], [1, 1])
    assert set(value) == {"k", "new"}


def test_pytrees_inside_variables_may_be_changed_in_place():
    m = Box(cache=nnx.Cache({"k": jnp.zeros(2)}))
    m.get_state()
    m.cache["k"] = jnp.ones(2)
    np.testing.assert_array_equal(m.get_state()["cache"].value["k"], [1, 1])


def test_an_in_place_change_of_a_dict_valued_node_reaches_the_next_jitted_step():
    traces = []

    @jax.jit
    def total(pure):
        traces.append(1)
        return sum(jax.tree.leaves(pure.merge().cache))

    m = Box(cache={"k": jnp.asarray(1.0)})
    assert float(total(m.partition())) == 1.0
    m.cache["k"] = jnp.asarray(5.0)
    assert float(total(m.partition())) == 5.0
    assert len(traces) == 1
    m.cache["v"] = jnp.asarray(2.0)
    assert float(total(m.partition())) == 7.0
    del m.cache["k"]
    assert float(total(m.partition())) == 2.0


def test_an_in_place_change_inside_a_jitted_step_comes_out():
    @jax.jit
    def step(pure):
        m = pure.merge()
        m.cache["k"] = m.cache["k"] + 1
        m.cache["new"] = m.cache["k"] * 2
        return m.partition()

    m = Box(cache={"k": jnp.asarray(1.0)})
    m.update_state(step(m.partition()))
    assert float(m.cache["k"]) == 2.0
    assert float(m.cache["new"]) == 4.0


@pytest.mark.parametrize(
    "rebuild",
    [lambda m: m.clone(), lambda m: m.partition().merge(), lambda m: m.apply(None)[1]],
    ids=["clone", "partition and merge", "apply"],
)
@pytest.mark.parametrize("wrap", [lambda d: d, nnx.Cache], ids=["node", "variable"])
def test_every_rebuild_makes_fresh_containers(rebuild, wrap):
    class Callable(Box):
        def __call__(self, _):
            return None

    m = Callable(cache=wrap({"k": jnp.zeros(()), "inner": [jnp.zeros(())]}))
    again = rebuild(m)
    again.cache["k"] = jnp.ones(())
    again.cache["inner"].append(jnp.ones(()))
    assert float(m.cache["k"]) == 0.0
    assert len(m.cache["inner"]) == 1


def test_an_empty_pytree_seen_first_does_not_change_how_later_ones_are_treated():
    class Bag:
        def __init__(self, items):
            self.items = items

    jax.tree_util.register_pytree_node(Bag, lambda b: (tuple(b.items), None), lambda _, items: Bag(list(items)))
    for length in (0, 1):
        m = Box(cache=nnx.Cache(Bag([jnp.zeros(())] * length)))
        state, twin = m.get_state(), m.clone()
        m.cache.items.append(jnp.ones(()))
        assert len(m.cache.items) == length + 1
        assert len(state["cache"].value.items) == length
        assert len(twin.cache.items) == length


def test_partition_does_not_share_a_registered_node_with_the_module():
    class Cell:
        def __init__(self, x):
            self.x = x

    jax.tree_util.register_pytree_node(Cell, lambda c: ((c.x,), None), lambda _, children: Cell(*children))
    nnx.register_node_type(Cell)
    m = Box(cell=Cell(jnp.zeros(())))
    state, twin = m.get_state(), m.clone()
    m.cell.x = jnp.ones(())
    assert float(jax.tree.leaves(state)[0]) == 0.0
    assert float(twin.cell.x) == 0.0
    assert float(jax.tree.leaves(m.get_state())[0]) == 1.0


def test_partition_does_not_share_its_pytrees_with_the_module():
    m = Box(cache={"k": jnp.zeros(())})
    state, moduledef = m.partition()
    m.cache["k"] = jnp.ones(())
    assert float(state["cache"].value["k"]) == 0.0
    first, second = moduledef.merge(state), moduledef.merge(state)
    first.cache["k"] = jnp.full((), 5.0)
    assert float(second.cache["k"]) == 0.0
    assert float(state["cache"].value["k"]) == 0.0


def test_update_state_does_not_share_its_pytrees_with_the_state():
    m = Box(cache={"k": jnp.zeros(())})
    other = Box(cache={"k": jnp.ones(())}).get_state()
    m.update_state(other)
    m.cache["k"] = jnp.full((), 9.0)
    assert float(other["cache"].value["k"]) == 1.0
