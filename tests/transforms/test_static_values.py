"""Static values in compiled functions: complete keys, nobody else's objects, changes in place, sharing."""

import argparse
import collections
import dataclasses
import enum
import functools
import types
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx


@dataclasses.dataclass
class Options:
    size: int = 0


class Config(Options):
    """A subclass of a dataclass that keeps more than its fields."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale


@dataclasses.dataclass
class Derived:
    given: dataclasses.InitVar[float]
    size: int = 0

    def __post_init__(self, given):
        self.scale = given


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float


class Attrs:
    """As attrs makes it: slots, an `__eq__`, and no hash."""

    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale

    def __eq__(self, other):
        return type(other) is Attrs and self.scale == other.scale


class Model:
    """As pydantic makes it: fields in `__dict__`, the rest in slots, and no hash."""

    __slots__ = ("__dict__", "__fields_set__")

    def __init__(self, scale):
        object.__setattr__(self, "__fields_set__", set())
        self.scale = scale

    def __setattr__(self, name, value):
        self.__dict__[name] = value
        self.__fields_set__.add(name)

    def __eq__(self, other):
        return type(other) is Model and vars(self) == vars(other)


class Scales(list):
    pass


class Table(dict):
    pass


class Pair(NamedTuple):
    item: float


class NamedPair(Pair):
    pass


class Number(int):
    pass


def with_attribute(value, scale):
    value.scale = scale
    return value


def closure_over(value):
    return lambda: value.scale


def factory(scale):
    return collections.defaultdict(lambda: scale)


# each makes a value that behaves by its argument, and reads it back
MAKERS = {
    "subclass of a dataclass": (Config, lambda v: v.scale),
    "InitVar and __post_init__": (Derived, lambda v: v.scale),
    "slots": (Slotted, lambda v: v.scale),
    "frozen dataclass": (Frozen, lambda v: v.scale),
    "argparse": (lambda s: argparse.Namespace(scale=s), lambda v: v.scale),
    "namespace": (lambda s: types.SimpleNamespace(scale=s), lambda v: v.scale),
    "attribute of a list": (lambda s: with_attribute(Scales([1]), s), lambda v: v.scale),
    "attribute of a dict": (lambda s: with_attribute(Table(a=1), s), lambda v: v.scale),
    "attribute of a namedtuple": (lambda s: with_attribute(NamedPair(1.0), s), lambda v: v.scale),
    "attribute of a number": (lambda s: with_attribute(Number(3), s), lambda v: v.scale),
    "ordered dict": (lambda s: collections.OrderedDict(scale=s), lambda v: v["scale"]),
    "deque": (lambda s: collections.deque([s], maxlen=3), lambda v: v[0]),
    "length of a deque": (lambda s: collections.deque([1.0], maxlen=int(s)), lambda v: v.maxlen),
    "default factory": (factory, lambda v: v.default_factory()),
    "closure": (lambda s: closure_over(Config(s)), lambda v: v()),
    "partial": (lambda s: functools.partial(lambda c: c.scale, Config(s)), lambda v: v()),
    "method of a value": (lambda s: Method(s).read, lambda v: v()),
    "unit of a datetime": (
        lambda s: np.datetime64(1, "D" if s == 1.0 else "s"),
        lambda v: 1.0 if np.datetime_data(v)[0] == "D" else 2.0,
    ),
    "nested": (lambda s: ([Config(s)], {"a": Config(1.0)}), lambda v: v[0][0].scale),
    "stop of a range": (lambda s: range(0, int(s) + 2, 9), lambda v: v.stop - 2),
}


@dataclasses.dataclass
class Method:
    scale: float

    def read(self):
        return self.scale


class Configured(nnx.Module):
    def __init__(self, config=None):
        self.w = nnx.Param(jnp.ones(2))
        if config is not None:
            self.config = config


@pytest.mark.parametrize("make, read", MAKERS.values(), ids=MAKERS)
def test_a_value_that_behaves_differently_has_another_key(make, read):
    f = nnx.jit(lambda net: net.w * read(net.config))
    net = Configured()
    for scale in (1.0, 2.0, 1.0):
        net.config = make(scale)
        assert f(net)[0] == scale
    assert f.trace_count == 2  # and equal values share one


@pytest.mark.parametrize("make, read", MAKERS.values(), ids=MAKERS)
def test_a_value_assigned_inside_a_compiled_function_is_there_afterwards(make, read):
    def assign(net):
        net.config = make(2.0)

    net = Configured(make(1.0))
    lifted = nnx.jit(assign)
    for _ in range(2):
        net.config = make(1.0)
        lifted(net)
        assert read(net.config) == 2.0


@pytest.mark.parametrize("make, read", MAKERS.values(), ids=MAKERS)
def test_context_flag_is_compared_by_its_whole_content(make, read):
    f = nnx.jit(lambda net, ctx: net.w * read(ctx.get_flag("config")))
    net = Configured()
    for scale in (1.0, 2.0, 1.0):
        assert f(net, nnx.context(flags={"config": make(scale)}))[0] == scale


@pytest.mark.parametrize("make, read", MAKERS.values(), ids=MAKERS)
def test_static_argument_is_compared_by_its_whole_content(make, read):
    f = nnx.jit(lambda net, config: net.w * read(config), static_argnums=1)
    try:
        hash(make(1.0))
    except TypeError:
        pytest.raises(ValueError, f, Configured(), make(1.0))
    else:
        assert [float(f(Configured(), make(scale))[0]) for scale in (1.0, 2.0, 1.0)] == [1.0, 2.0, 1.0]


# changes in place

MUTATIONS = {
    "dataclass": (lambda: Config(1.0), lambda v: setattr(v, "scale", 7.0), lambda v: v.scale),
    "slots": (lambda: Slotted(1.0), lambda v: setattr(v, "scale", 7.0), lambda v: v.scale),
    "namespace": (lambda: types.SimpleNamespace(scale=1.0), lambda v: setattr(v, "scale", 7.0), lambda v: v.scale),
    "argparse": (lambda: argparse.Namespace(scale=1.0), lambda v: setattr(v, "scale", 7.0), lambda v: v.scale),
    "attrs": (lambda: Attrs(1.0), lambda v: setattr(v, "scale", 7.0), lambda v: v.scale),
    "pydantic": (lambda: Model(1.0), lambda v: setattr(v, "scale", 7.0), lambda v: v.scale),
    "list": (lambda: [1.0], lambda v: v.append(7.0), lambda v: v[-1]),
    "dict": (lambda: {"scale": 1.0}, lambda v: v.update(scale=7.0), lambda v: v["scale"]),
    "a dict's key": (lambda: {1: 7.0}, lambda v: v.update({2: v.pop(1)}), lambda v: v.get(2, 1.0)),
    "ordered dict": (
        lambda: collections.OrderedDict(a=1.0, b=7.0),
        lambda v: v.move_to_end("a"),
        lambda v: next(iter(v.values())),
    ),
    "set": (lambda: {1.0}, lambda v: (v.clear(), v.add(7.0)), lambda v: next(iter(v))),
    "deque": (lambda: collections.deque([1.0]), lambda v: v.appendleft(7.0), lambda v: v[0]),
    "default factory": (
        lambda: factory(1.0),
        lambda v: setattr(v, "default_factory", lambda: 7.0),
        lambda v: v.default_factory(),
    ),
    "attribute of a list": (
        lambda: with_attribute(Scales(), 1.0),
        lambda v: setattr(v, "scale", 7.0),
        lambda v: v.scale,
    ),
    "inside a tuple": (lambda: (Config(1.0),), lambda v: setattr(v[0], "scale", 7.0), lambda v: v[0].scale),
    "inside a frozen dataclass": (
        lambda: Frozen([1.0]),
        lambda v: v.scale.append(7.0),
        lambda v: v.scale[-1],
    ),
    "type of a number": (
        lambda: types.SimpleNamespace(n=1),
        lambda v: setattr(v, "n", True),
        lambda v: 7.0 if v.n is True else 1.0,
    ),
}


@pytest.mark.parametrize("make, change, read", MUTATIONS.values(), ids=MUTATIONS)
def test_a_value_changed_in_place_is_noticed_by_the_next_call(make, change, read):
    f = nnx.jit(lambda net: net.w * read(net.config))
    net = Configured(make())
    assert [float(f(net)[0]) for _ in range(2)] == [1.0, 1.0]
    change(net.config)
    assert [float(f(net)[0]) for _ in range(2)] == [7.0, 7.0]
    assert f.trace_count == 2


@pytest.mark.parametrize("make, change, read", MUTATIONS.values(), ids=MUTATIONS)
def test_a_value_changed_in_place_inside_is_changed_outside_and_stays_the_same_object(make, change, read):
    config = make()
    net, other = Configured(config), Configured(config)
    lifted = nnx.jit(lambda net: change(net.config) and None)
    if "tuple" not in str(type(config)):
        nnx.jit(lambda net: change(net.config) and None, stateful=False)(net)
        assert read(config) == 1.0
    lifted(net)
    assert read(net.config) == read(other.config) == read(config) == 7.0
    assert isinstance(config, (tuple, Frozen)) or net.config is config


@pytest.mark.parametrize("make, change, read", MUTATIONS.values(), ids=MUTATIONS)
def test_a_flag_changed_in_place_is_noticed(make, change, read):
    f = nnx.jit(lambda net, ctx: net.w * read(ctx.get_flag("config")))
    net, ctx = Configured(), nnx.context(noise=0, flags={"config": make()})
    assert [float(f(net, ctx)[0]) for _ in range(2)] == [1.0, 1.0]
    change(ctx.get_flag("config"))
    assert [float(f(net, ctx)[0]) for _ in range(2)] == [7.0, 7.0]


def test_exception_restores_a_value_that_the_body_changed():
    net = Configured(Config(1.0))

    @nnx.jit
    def fails(net):
        net.config.scale = 2.0
        raise KeyError

    for _ in range(2):
        pytest.raises(KeyError, fails, net)
        assert net.config.scale == 1.0


def test_a_value_replaced_by_an_equal_one_inside_is_another_object_outside():
    config = Config(1.0)
    net = Configured(config)

    @nnx.jit
    def replace(net):
        net.config = Config(1.0)

    replace(net)
    assert net.config is not config and net.config == config


def test_cached_property_is_not_a_change():
    class Sizes(types.SimpleNamespace):
        @functools.cached_property
        def total(self):
            return sum(self.sizes)

    f = nnx.jit(lambda net: net.w * net.config.total)
    net = Configured(Sizes(sizes=(1, 2)))
    for _ in range(3):
        assert f(net)[0] == 3.0
    assert net.config.total == 3 and f(net)[0] == 3.0
    assert f.trace_count == 1
    scanned = nnx.scan(lambda net, carry, _: (carry * net.config.total, None), length=2)
    assert scanned(Configured(Sizes(sizes=(1, 2))), 1.0, None)[0] == 9.0  # reading it is no change of structure


# whose object it is


def test_a_compiled_function_never_uses_the_config_of_another_model():
    f = nnx.jit(lambda net, x: net.w[0] * net.config.scale * x)
    a, b = Configured(Config(1.0)), Configured(Config(1.0))
    f(a, jnp.ones(1))
    a.config.scale = 50.0
    for length in (2, 3):  # each shape is traced again
        assert f(b, jnp.ones(length)).tolist() == [1.0] * length
        assert f(a, jnp.ones(length)).tolist() == [50.0] * length


def test_a_compiled_function_never_uses_the_closure_of_another_model():
    def make():
        config = Config(1.0)
        return Configured(lambda: config.scale), config

    f = nnx.jit(lambda net, x: net.config() * x)
    (a, config), (b, _) = make(), make()
    f(a, jnp.ones(1))
    config.scale = 50.0
    assert f(b, jnp.ones(2)).tolist() == [1.0, 1.0]


def test_a_compiled_function_never_uses_the_flags_of_another_context():
    f = nnx.jit(lambda x, ctx: x * ctx.get_flag("config").scale)
    first, second = Config(1.0), Config(1.0)
    f(jnp.ones(1), nnx.context(flags={"config": first}))
    first.scale = 50.0
    assert f(jnp.ones(2), nnx.context(flags={"config": second})).tolist() == [1.0, 1.0]


def test_a_retrace_from_the_short_path_draws_the_keys_it_would_have_drawn():
    def draws():
        f = nnx.jit(lambda net, x, ctx: ctx.make_rng("noise"))
        net, ctx = Configured(), nnx.context(noise=0)
        return [f(net, jnp.ones(length), ctx) for length in (1, 1, 1, 2, 1)]

    ctx = nnx.context(noise=0)
    assert draws() == [ctx.fork().make_rng("noise") for _ in range(5)]


@pytest.mark.parametrize("copy", [lambda net: net.clone(), lambda net: net.partition().merge()])
def test_a_copy_of_a_module_has_its_own_config(copy):
    net = Configured(Config(1.0))
    copied = copy(net)
    copied.config.scale = 2.0
    assert net.config.scale == 1.0 and type(copied.config) is Config


def test_the_mapping_of_a_moduledef_is_a_snapshot():
    net = Configured(Config(1.0))
    moduledef = net.get_module_def()
    net.config.scale = 2.0
    assert moduledef.merge(net.get_state()).config.scale == 1.0
    assert moduledef != net.get_module_def()


# sharing


@pytest.mark.parametrize("make, change, read", MUTATIONS.values(), ids=MUTATIONS)
def test_a_value_under_two_attributes_is_one_value_inside(make, change, read):
    net = Configured(make())
    net.child = Configured(net.config)

    @nnx.jit
    def through_the_child(net):
        change(net.child.config)
        return net.w * read(net.config)

    for copied in (net, net.clone(), net.partition().merge()):
        assert through_the_child(copied)[0] == 7.0
        assert read(copied.config) == read(copied.child.config) == 7.0
        assert isinstance(copied.config, (tuple, Frozen)) or copied.config is copied.child.config


def test_values_tied_or_untied_in_a_body_are_so_outside():
    net = Configured([1])
    net.child = Configured([1])

    @nnx.jit
    def tie(net):
        net.child.config = net.config

    @nnx.jit
    def untie(net):
        net.child.config = list(net.config)

    config = net.config
    tie(net)
    assert net.child.config is net.config is config
    net.config.append(2)
    untie(net)
    net.config.append(3)
    assert net.child.config == [1, 2] and net.config is config


def test_a_loop_accepts_a_config_that_all_modules_share():
    config = Config(2.0)
    net = Configured(config)
    net.child = Configured(config)
    scanned = nnx.scan(lambda net, carry, _: (carry * net.child.config.scale, net.child.w), length=3)
    assert scanned(net, 1.0, None)[0] == 8.0

    def sow(net, carry, _):
        net.child.sow(nnx.Intermediate, "carry", carry)
        return carry * net.config.scale, None

    nnx.scan(sow, length=3, variable_axes={nnx.Intermediate: 0})(net, 1.0, None)
    assert net.child.carry[0].tolist() == [1.0, 2.0, 4.0]


def test_a_body_that_runs_many_times_must_not_change_a_config_in_place():
    def change(net, carry, _):
        net.config.scale = 3.0
        return carry, None

    with pytest.raises(ValueError, match="changes the static attribute 'config'"):
        nnx.scan(change, length=2)(Configured(Config(1.0)), 1.0, None)


# values that contain themselves, and functions that change themselves


def test_a_declared_static_field_accepts_a_value_that_contains_itself():
    @nnx.dataclass
    class Record(nnx.Module):
        w: jax.Array = nnx.param_field()
        knot: object = nnx.static_field(default=None)

    items = [1]
    items.append(items)
    for knot in (items, collections.OrderedDict(items=items)):
        record = Record(jnp.ones(2))
        record.knot = knot
        assert nnx.jit(lambda record: record.w * 2)(record)[0] == 2.0
        assert "knot" in repr(record)


def test_values_that_contain_themselves_are_static_values():
    items = [1]
    items.append(items)
    table = {"a": 1}
    table["self"] = table

    def recursive():
        return recursive, items

    for value in (items, table, recursive, [recursive, table]):
        net = Configured(value)
        f = nnx.jit(lambda net: net.w * 2)
        assert f(net)[0] == 2.0 and f(net.clone())[0] == 2.0 and f.trace_count == 1
    copied = Configured(items).clone().config
    assert copied[1] is copied and copied is not items


def test_a_schedule_that_changes_its_own_closure_is_traced_once():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))
            self.dropout = nnx.Dropout(0.5)

    optimizer = nnx.Optimizer(Model(), optax.adam(optax.cosine_decay_schedule(1e-3, 100)))

    @nnx.jit
    def step(optimizer):
        optimizer.update(nnx.grad(lambda model: (model.w**2).sum())(optimizer.model))

    optimizer.model.train()
    step(optimizer)
    step(optimizer)
    optimizer.model.eval()
    optimizer.model.train()
    step(optimizer)
    assert step.trace_count == 1


def closure_over_a_list():
    scale = [1.0]
    return lambda: scale[0], lambda value: scale.__setitem__(0, value)


def closure_over_a_name():
    scale = 1.0

    def change(value):
        nonlocal scale
        scale = value

    return lambda: scale, change


def partial_of_a_config():
    config = Config(1.0)
    return functools.partial(getattr, config, "scale"), lambda value: setattr(config, "scale", value)


def function_with_an_attribute():
    def read():
        return read.scale

    read.scale = 1.0
    return read, lambda value: setattr(read, "scale", value)


def function_in_a_config():
    read, change = closure_over_a_list()
    config = Config(lambda: read())
    return config.scale, change


FUNCTIONS = [
    closure_over_a_list,
    closure_over_a_name,
    partial_of_a_config,
    function_with_an_attribute,
    function_in_a_config,
]


@pytest.mark.parametrize("make", FUNCTIONS)
def test_functions_that_differ_when_they_are_first_traced_share_no_trace(make):
    (read, _), (other, change) = make(), make()
    a, b = Configured(read), Configured(other)
    assert a.get_module_def() == b.get_module_def()  # equal at first, and asked already
    change(50.0)
    assert a.get_module_def() != b.get_module_def()
    f = nnx.jit(lambda net: net.config() * net.w)
    raw = jax.jit(lambda pure: (net := pure.merge()).config() * net.w)
    for net, scale in [(a, 1.0), (b, 50.0)] * 2:
        assert raw(net.partition())[0] == f(net)[0] == scale
    assert f.trace_count == 2


def test_a_function_that_changes_its_own_closure_is_traced_once_even_where_a_config_is_watched():
    def make():
        calls = []

        def count(x):
            calls.append(1)
            return x * 2.0

        return count

    net = Configured([1])
    net.child = Configured(make())
    scanned = nnx.scan(lambda net, carry, _: (net.child.config(carry), None), length=2)
    assert scanned(net, 1.0, None)[0] == 4.0  # no change of structure
    f = nnx.jit(lambda net: net.child.config(net.w))
    twin = Configured([1])
    twin.child = Configured(make())
    for one in (net, twin, net, twin):
        assert f(one)[0] == 2.0
    assert f.trace_count == 2  # the first had run before


def test_a_jitted_function_can_be_an_attribute_in_every_transform():
    net = Configured()
    net.activation = nnx.jit(lambda x: x * 2)
    net.activation(1.0)  # it counts its traces
    scanned = nnx.scan(lambda net, carry, _: (net.activation(carry), None), length=3)
    assert scanned(net, 1.0, None)[0] == 8.0
    assert nnx.cond(True, lambda net: net.activation(1.0), lambda net: 0.0, net) == 2.0
    f = nnx.jit(lambda net: net.activation(net.w))
    for _ in range(3):
        assert f(net)[0] == 2.0
    assert f.trace_count == 1


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def test_the_config_of_every_built_in_sort_is_equal_between_two_models_of_the_same_code():
    def build():
        return Configured(
            [make(1.0) for make, _ in MAKERS.values()] + [Color.RED, jnp.float32, np.float32(1), slice(1), ...]
        )

    f = nnx.jit(lambda net: net.w)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(build()), f(build())
    assert f.trace_count == 1
    assert build().get_module_def() == build().get_module_def()
    assert hash(build().get_module_def()) == hash(build().get_module_def())
