"""Static values: when two are equal, what is noticed when it changes, and what they must not capture."""

import collections
import dataclasses
import functools
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx
from tests.models import Box, Scale


def same(a, b) -> bool:
    """Whether two static values are equal: the ModuleDefs that hold them are, with their hashes."""
    first, second = Box(x=a).get_module_def(), Box(x=b).get_module_def()
    equal = first == second
    assert equal == (second == first)
    assert (first != second) is not equal
    if equal:
        assert hash(first) == hash(second)
    return equal


# plain values


@pytest.mark.parametrize(
    "a, b",
    [
        (1, 1.0),
        (1, True),
        (1.0, True),
        (0, False),
        (0, None),
        (0.0, -0.0),
        (1, np.int32(1)),
        (np.float32(1), np.float64(1)),
        ("1", 1),
        ("a", b"a"),
        (1j, 1),
        ([1], [1.0]),
        ([1], [True]),
        ([1, 2], [2, 1]),
        ([1], (1,)),
        ([], ()),
        ([], {}),
        ({}, set()),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"b": 1}),
        ({1: "a"}, {True: "a"}),
        ({1}, {1.0}),
        ({1}, frozenset({1})),
        ([[1]], [[1.0]]),
        ({"a": [1]}, {"a": [True]}),
        ((1, (2, [3])), (1, (2, [3.0]))),
        (int, float),
        (jnp.float32, jnp.bfloat16),
        (slice(1), slice(2)),
    ],
    ids=repr,
)
def test_values_of_another_type_or_value_differ(a, b):
    assert not same(a, b)


@pytest.mark.parametrize(
    "make",
    [
        lambda: 1,
        lambda: 1.5,
        lambda: "text" * 3,
        lambda: None,
        lambda: (1, "a", (2.5, None)),
        lambda: [1, [2, {"a": {3, 4}}]],
        lambda: {"a": 1, "b": [1, 2]},
        lambda: {1, 2, 3},
        lambda: frozenset({1, 2}),
        lambda: np.int32(1),
        lambda: np.dtype("float32"),
        lambda: jnp.dtype("bfloat16"),
        lambda: float("nan"),
        lambda: -0.0,
        lambda: int,
        lambda: print,
        lambda: types.SimpleNamespace,
        lambda: range(3),
        lambda: ...,
    ],
)
def test_values_of_the_same_type_and_value_are_equal(make):
    assert same(make(), make())


def test_floats_are_equal_by_bit_pattern():
    assert same(float("nan"), float("nan"))
    assert not same(float("nan"), -float("nan"))
    assert not same(0.0, -0.0)
    assert same([float("nan")], [float("nan")])


@pytest.mark.parametrize("a, b", [(1, 1.0), (1, True), (1.0, True), (0, False), (0.0, -0.0)])
def test_one_and_one_point_zero_and_true_are_different_static_values(a, b):
    traces = []

    @jax.jit
    def step(pure):
        m = pure.merge()
        traces.append(m.n)
        return m.w * m.n

    for value in (a, b, a, b):
        m = Box(n=value, w=nnx.Param(jnp.asarray(1)))
        step(m.partition())
        assert type(m.partition().merge().n) is type(value)
    assert [type(n) for n in traces] == [type(a), type(b)]


def test_an_objects_own_equality_is_used_when_it_can_be_hashed():
    class Named:
        def __init__(self, name):
            self.name = name

        def __eq__(self, other):
            return isinstance(other, Named) and self.name == other.name

        def __hash__(self):
            return hash(self.name)

    assert same(Named("a"), Named("a"))
    assert not same(Named("a"), Named("b"))


def test_objects_without_equality_are_equal_by_identity():
    class Plain:
        pass

    one = Plain()
    assert same(one, one)
    assert not same(Plain(), Plain())
    assert same([one], [one])


def test_objects_with_equality_but_no_hash_are_equal_by_identity():
    class Unhashable:
        def __eq__(self, other):
            return isinstance(other, Unhashable)

        __hash__ = None

    one = Unhashable()
    assert same(one, one)
    assert not same(Unhashable(), Unhashable())


def test_dataclass_instances_are_equal_structurally():
    @dataclasses.dataclass
    class Config:
        width: int
        sizes: list

    assert same(Config(1, [2]), Config(1, [2]))
    assert not same(Config(1, [2]), Config(1, [3]))
    assert not same(Config(1, [2]), Config(1.0, [2]))


def test_dataclass_instances_without_eq_are_equal_structurally():
    @dataclasses.dataclass(eq=False)
    class Config:
        width: int

    assert same(Config(1), Config(1))
    assert not same(Config(1), Config(2))


def test_dataclasses_of_different_classes_differ():
    @dataclasses.dataclass
    class A:
        width: int

    @dataclasses.dataclass
    class B:
        width: int

    assert not same(A(1), B(1))


# functions


def adder(n):
    return lambda x: x + n


def with_default(n):
    def f(x, n=n):
        return x + n

    return f


def with_keyword_default(n):
    def f(x, *, n=n):
        return x + n

    return f


def plus_one(x):
    return x + 1


def test_functions_are_equal_by_code_and_what_they_close_over():
    assert same(plus_one, plus_one)
    assert same(adder(1), adder(1))
    assert not same(adder(1), adder(2))
    assert not same(adder(1), adder(1.0))
    assert same(adder([1, {"a": 2}]), adder([1, {"a": 2}]))


def test_functions_of_different_code_differ():
    assert not same(lambda x: x + 1, lambda x: x + 2)
    assert not same(lambda x: x + 1, lambda x: x + 1.0)


def test_functions_are_equal_by_their_defaults():
    assert same(with_default(1), with_default(1))
    assert not same(with_default(1), with_default(2))
    assert same(with_keyword_default(1), with_keyword_default(1))
    assert not same(with_keyword_default(1), with_keyword_default(2))


def test_functions_are_equal_by_the_identity_of_their_globals():
    namespaces = [{}, {}]
    for namespace in namespaces:
        exec("def f(x):\n    return x", namespace)
    assert not same(namespaces[0]["f"], namespaces[1]["f"])
    assert same(namespaces[0]["f"], types.FunctionType(namespaces[0]["f"].__code__, namespaces[0], "f"))


def test_functions_are_equal_by_their_attributes():
    one, other, third = adder(1), adder(1), adder(1)
    one.mode = other.mode = "a"
    third.mode = "b"
    assert same(one, other)
    assert not same(one, third)


def test_functions_that_close_over_functions_are_compared_through_them():
    def compose(f, g):
        return lambda x: f(g(x))

    assert same(compose(adder(1), adder(2)), compose(adder(1), adder(2)))
    assert not same(compose(adder(1), adder(2)), compose(adder(2), adder(1)))


def test_a_function_that_calls_itself_is_a_static_value():
    def make(n):
        def factorial(x):
            return n if x == 0 else x * factorial(x - 1)

        return factorial

    assert same(make(1), make(1))
    assert not same(make(1), make(2))
    assert Box(f=make(1)).clone().f(4) == 24


def test_functions_that_close_over_an_array_are_equal_by_its_identity():
    array = np.ones(2)
    assert same(adder(array), adder(array))
    assert not same(adder(np.ones(2)), adder(np.ones(2)))


def test_partials_are_equal_by_function_and_arguments():
    partial = functools.partial
    assert same(partial(plus_one, 1), partial(plus_one, 1))
    assert not same(partial(plus_one, 1), partial(plus_one, 2))
    assert not same(partial(plus_one, 1), partial(plus_one, 1.0))
    assert same(partial(plus_one, x=[1]), partial(plus_one, x=[1]))
    assert not same(partial(plus_one, x=1), partial(plus_one, y=1))
    assert same(partial(adder(1)), partial(adder(1)))
    assert not same(partial(adder(1)), partial(adder(2)))


def test_a_freshly_made_optimizer_is_an_equal_static_value():
    assert same(optax.adam(1e-3), optax.adam(1e-3))
    assert not same(optax.adam(1e-3), optax.adam(1e-4))
    assert same(optax.chain(optax.clip(1.0), optax.sgd(0.1)), optax.chain(optax.clip(1.0), optax.sgd(0.1)))


def test_a_freshly_made_schedule_is_an_equal_static_value():
    assert same(optax.cosine_decay_schedule(1.0, 10), optax.cosine_decay_schedule(1.0, 10))
    assert not same(optax.cosine_decay_schedule(1.0, 10), optax.cosine_decay_schedule(1.0, 11))


# in-place mutation


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


# equal models


def test_two_models_built_by_the_same_code_have_equal_moduledefs():
    def build():
        return Box(
            layers=[Scale(), Scale()],
            sizes=[1, 2],
            activation=adder(1),
            tx=optax.adam(1e-3),
            options={"a": {1, 2}},
            schedule=functools.partial(plus_one, 2),
        )

    first, second = build().get_module_def(), build().get_module_def()
    assert first == second
    assert hash(first) == hash(second)
