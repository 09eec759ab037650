"""Static values: when two are equal, what is noticed when it changes, and what they must not capture."""

import argparse
import collections
import collections.abc
import dataclasses
import functools
import types

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


class Config:
    """Says that its instances are values that can change, as attrs, pydantic and ml_collections do: no `__hash__`."""

    def __init__(self, **options):
        self.__dict__.update(options)

    def __eq__(self, other):
        return isinstance(other, Config)


class SlottedConfig:
    __slots__ = ("width", "total")

    def __init__(self, width):
        self.width = width

    def __getattr__(self, name):  # a cached property of attrs: computed and stored on the first read
        if name != "total":
            raise AttributeError(name)
        self.total = 2 * self.width
        return self.total

    def __eq__(self, other):
        return True


class ConfigDict(dict):
    def __eq__(self, other):
        return True


class Finalized(Config):
    def __del__(self):
        finalized.append(1)


class ReadOnly(collections.abc.Mapping):
    """Counts its reads; the `__eq__` of a Mapping is not its author's word that it can change."""

    def __init__(self, items):
        self.items_, self.reads = items, 0

    def __getitem__(self, key):
        self.reads += 1
        return self.items_[key]

    def __len__(self):
        return len(self.items_)

    def __iter__(self):
        return iter(self.items_)


class Counting(ReadOnly, collections.abc.MutableMapping):
    """Can change, so it is compared by what it holds, and that is another number after every read."""

    def __setitem__(self, key, value):
        self.items_[key] = value

    def __delitem__(self, key):
        del self.items_[key]


class CountingByIdentity(Counting):
    __hash__ = object.__hash__


finalized: list[int] = []


@pytest.mark.parametrize(
    "make",
    [
        lambda n: Config(width=n, inner=Config(sizes=[n])),
        lambda n: argparse.Namespace(width=n),
        lambda n: collections.UserDict(width=n),
        SlottedConfig,
        lambda n: ConfigDict(width=n),
        lambda n: ConfigDict(inner=Config(width=n)),
    ],
)
def test_values_with_equality_but_no_hash_are_compared_by_all_they_hold(make):
    assert same(make(1), make(1))
    assert not same(make(1), make(2))
    assert not same(make(1), make(1.0))


def test_comparing_a_slotted_value_computes_nothing():
    one = SlottedConfig(1)
    m = Box(config=one)
    assert m.clone().config is not one
    assert "total" not in [name for name in SlottedConfig.__slots__ if has_slot(one, name)]
    before = m.get_module_def()
    assert one.total == 2 and has_slot(one, "total")
    assert m.get_module_def() != before  # it holds more than before


def has_slot(value, name):
    try:
        object.__getattribute__(value, name)
    except AttributeError:
        return False
    return True


def test_a_config_of_up_to_a_thousand_values_is_compared_by_content():
    assert same(Config(table=list(range(1_000))), Config(table=list(range(1_000))))
    assert same(*[Config(a=Config(b={i: "x" for i in range(500)}), c=(1,) * 500) for _ in range(2)])


def test_a_larger_config_is_compared_by_identity_with_a_note_once():
    class Large(collections.UserDict):
        pass

    config = Large({i: str(i) for i in range(50_000)})
    m = Box(config=config, other=[config])
    with pytest.warns(UserWarning, match="Large holds more than 1,000 values, so it is compared by identity"):
        before = m.get_module_def()
    config["new"] = 1
    assert m.get_module_def() == before
    assert m.clone().config is config and m.clone().other[0] is config
    assert not same(Large(config), Large(config))  # and no further note: warnings are errors here
    assert same(Large(a=1), Large(a=1))


def test_a_config_with_a_finalizer_is_compared_by_identity_with_a_note_once():
    config = Finalized(width=1)
    m = Box(config=config)
    with pytest.warns(UserWarning, match="because its class defines `__del__`"):
        m.get_module_def()
    assert m.clone().config is config
    assert not finalized


def test_a_config_of_omegaconf_is_compared_by_identity_and_the_note_says_what_to_assign():
    node = type("Node", (), {"__module__": "omegaconf.base"})
    hashes = {"__hash__": lambda self: hash(str(vars(self))), "__eq__": lambda self, other: vars(self) == vars(other)}
    config = type("DictConfig", (node,), hashes)()
    m = Box(config=config)
    with pytest.warns(UserWarning, match=r"Assign `OmegaConf.to_object\(config\)` instead"):
        before = m.get_module_def()
    config.width = 1
    assert m.get_module_def() == before


def test_a_read_only_mapping_is_compared_by_identity():
    config = ReadOnly({"width": 2.0})
    m = Box(config=config, w=nnx.Param(jnp.ones(2)))
    f = nnx.jit(lambda m: m.w * m.config["width"])
    assert [float(f(m)[0]) for _ in range(3)] == [2.0] * 3
    assert f.trace_count == 1 and config.reads == 1  # the library itself reads nothing
    nnx.scan(lambda m, c, _: (c * m.config["width"], None), length=2)(m, 1.0, None)
    assert not same(ReadOnly({}), ReadOnly({}))


def test_a_config_that_counts_its_reads_is_traced_again_and_the_warning_shows_the_way_out():
    models = [Box(config=make({"width": 2.0})) for make in (Counting, CountingByIdentity)]
    f, g = nnx.jit(lambda m, x: x * m.config["width"]), nnx.jit(lambda m, x: x * m.config["width"])
    with pytest.warns(UserWarning, match=r"Counting object> with reads = 9 -> .* reads = 10 (.|\n)*object.__hash__"):
        assert [f(models[0], 1.0) for _ in range(12)] == [2.0] * 12
    assert f.trace_count == models[0].config.reads == 12
    assert [g(models[1], 1.0) for _ in range(12)] == [2.0] * 12
    assert g.trace_count == models[1].config.reads == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Config(mean=x),
        lambda x: argparse.Namespace(inner=[Config(mean=x)]),
        lambda x: collections.UserDict({i: x for i in range(1_001)}),
        lambda x: [1, Config(mean=x)],
        lambda x: types.SimpleNamespace(mean=x),
    ],
)
def test_a_config_that_holds_an_array_is_refused_at_assignment(make):
    m = nnx.Dict()
    with pytest.raises(ValueError, match="Cannot assign attribute 'config' of Dict: .* holds an array") as error:
        m.config = make(jnp.ones(2))
    assert "nnx.Static(config)" in str(error.value)
    assert "config" not in m
    m.config = nnx.Static(make(jnp.ones(2)))


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


def test_functions_are_equal_by_code_and_closure():
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
