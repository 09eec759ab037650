"""Static values changed in place: noticed by the next call, and never shared with a rebuilt Module."""

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models import Box


def append(values):
    values.append(3)


def set_key(values):
    values["b"] = 1


def add(values):
    values.add(3)


def nested(values):
    values["inner"][0].append(1)


@pytest.mark.parametrize(
    "value, change",
    [([1], append), ({"a": 1}, set_key), ({1}, add), ({"inner": [[1]]}, nested), (([1],), lambda v: v[0].append(2))],
    ids=["list", "dict", "set", "nested", "list in tuple"],
)
def test_a_static_container_mutated_in_place_is_noticed(value, change):
    m = Box(x=value)
    before = m.get_module_def()
    frozen_hash = hash(before)
    change(m.x)
    after = m.get_module_def()
    assert before != after
    assert hash(before) == frozen_hash
    assert after == Box(x=m.x).get_module_def()


@pytest.mark.parametrize("fields", [1, 2, 5, 32, 33, 100])
def test_every_kind_of_change_to_a_config_of_any_size_is_noticed(fields):
    def rename(config, name):
        config[f"{name}_"] = config.pop(name)

    def move_to_the_end(config, name):
        config[name] = config.pop(name)

    changes = {
        "another value": lambda config, name: config.update({name: "new"}),
        "an equal value of another type": lambda config, name: config.update({name: 1.0}),
        "a field more": lambda config, name: config.update(more=1),
        "a field less": lambda config, name: config.pop(name),
        "a renamed field": rename,
        "another order": move_to_the_end,
    }
    for what, change in changes.items():
        config = {f"field{i}": 1 for i in range(fields)}
        m = Box(config=config)
        before = m.get_module_def()
        assert m.get_module_def() == before
        change(config, "field0")
        if what == "another order":
            assert (m.get_module_def() == before) == (fields == 1)
        else:
            assert m.get_module_def() != before, what


def test_a_moduledef_keeps_the_value_it_was_made_with():
    m = Box(x=[1])
    state, before = m.partition()
    m.x.append(2)
    assert before.merge(state).x == [1]
    assert m.get_module_def().merge(state).x == [1, 2]


def test_changing_back_in_place_gives_an_equal_moduledef():
    m = Box(x=[1])
    before = m.get_module_def()
    m.x.append(2)
    m.get_module_def()
    m.x.pop()
    assert m.get_module_def() == before


def test_a_static_list_mutated_between_calls_is_seen():
    @jax.jit
    def step(pure):
        m = pure.merge()
        return jnp.asarray(sum(m.sizes))

    m = Box(sizes=[1, 2])
    assert int(step(m.partition())) == 3
    m.sizes.append(10)
    assert int(step(m.partition())) == 13
    m.sizes[0] = 5
    assert int(step(m.partition())) == 17


def test_a_static_list_mutated_inside_a_failing_trace_leaves_the_model_alone():
    m = Box(sizes=[1, 2])
    before = m.get_module_def()

    @jax.jit
    def step(pure):
        inner = pure.merge()
        inner.sizes.append(10)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        step(m.partition())
    assert m.sizes == [1, 2]
    assert m.get_module_def() == before
    assert before.merge(m.get_state()).sizes == [1, 2]


def test_two_equal_models_keep_their_static_lists_separate():
    a, b = Box(sizes=[1, 2]), Box(sizes=[1, 2])
    assert a.get_module_def() == b.get_module_def()
    a2, b2 = a.partition().merge(), b.partition().merge()
    a2.sizes.append(3)
    a.sizes.append(4)
    assert b.sizes == [1, 2]
    assert b2.sizes == [1, 2]
    assert b.get_module_def().merge(b.get_state()).sizes == [1, 2]
    assert a.get_module_def() != b.get_module_def()


def test_unhashable_static_attributes_do_not_break_jit():
    class Config(nnx.Module):
        def __init__(self):
            self.sizes = [1, 2]
            self.options = {"a": [1], "b": {2}}
            self.w = nnx.Param(jnp.ones(2))

    traces = []

    @jax.jit
    def step(pure):
        traces.append(1)
        m = pure.merge()
        m.w = m.w * m.sizes[1]
        return m.partition()

    pure = step(Config().partition())
    step(pure)
    step(Config().partition())
    assert len(traces) == 1
    np.testing.assert_array_equal(pure.merge().w, [2, 2])


@pytest.mark.parametrize("rebuild", [lambda m: m.clone(), lambda m: m.partition().merge()], ids=["clone", "merge"])
def test_rebuilt_modules_get_their_own_copies_of_static_containers(rebuild):
    m = Box(x=[1, {"a": [2]}], s={1})
    again = rebuild(m)
    again.x[1]["a"].append(3)
    again.x.append(4)
    again.s.add(5)
    assert m.x == [1, {"a": [2]}]
    assert m.s == {1}
    third = rebuild(m)
    assert third.x == [1, {"a": [2]}]


class Sizes(NamedTuple):
    sizes: list


@pytest.mark.parametrize(
    "value, reach",
    [
        (collections.OrderedDict(a=[1]), lambda v: v["a"]),
        (collections.defaultdict(list, a=[1]), lambda v: v["a"]),
        (Sizes([1]), lambda v: v.sizes),
        (([1], 2), lambda v: v[0]),
    ],
    ids=["OrderedDict", "defaultdict", "namedtuple", "tuple"],
)
def test_static_containers_of_other_types_are_noticed_and_copied_too(value, reach):
    m = Box(x=value)
    before = m.get_module_def()
    again = m.clone()
    assert type(again.x) is type(value)
    reach(again.x).append(2)
    assert reach(m.x) == [1]
    assert m.get_module_def() == before
    reach(m.x).append(3)
    assert m.get_module_def() != before


def test_slices_and_other_odd_values_are_static_values():
    for value in (slice(1, 2), slice(None), ..., NotImplemented, range(3), bytearray(b"a"), np.s_[1:2, ...]):
        m = Box(x=value)
        assert hash(m.get_module_def()) == hash(m.clone().get_module_def())
        assert m.get_module_def() == m.clone().get_module_def()
        assert m.clone().x == value


def test_a_static_list_held_twice_is_one_list_in_its_module_still():
    shared = [1]
    m = Box(a=shared, b=shared)
    m.a.append(2)
    assert m.b == [1, 2]
    again = [1, 2]
    assert m.get_module_def() == Box(a=again, b=again).get_module_def()
    assert m.get_module_def() != Box(a=[1, 2], b=[1, 2]).get_module_def()  # what changes one of these leaves the other
    assert "the same value as 'a'" in repr(m.get_module_def())


def test_other_objects_changed_in_place_are_not_noticed():
    class Plain:
        n = 1

    m = Box(x=Plain())
    before = m.get_module_def()
    m.x.n = 2
    assert m.get_module_def() == before


def test_assigning_an_equal_static_value_is_an_equal_moduledef():
    m = Box(x=[1, 2])
    before = m.get_module_def()
    m.x = [1, 2]
    assert m.get_module_def() == before
    m.x = [1, 3]
    assert m.get_module_def() != before
