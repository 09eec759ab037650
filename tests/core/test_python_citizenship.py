"""A Module is an ordinary Python class: properties, abc, generics, copying, pickling, weak references."""

import abc
import copy
import functools
import gc
import inspect
import pickle
import weakref
from typing import Generic, Protocol, TypeVar, runtime_checkable

import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models import Box

T = TypeVar("T")


class Layer(nnx.Module):
    def __init__(self, width=2):
        self.w = nnx.Param(jnp.ones(width), ("a",))
        self.sizes = [width]

    def __call__(self, x):
        return x * self.w


class Model(nnx.Module):
    def __init__(self):
        self.a = Layer()
        self.b = self.a
        self.layers = [Layer(), Layer()]
        self.me = self
        self.cache = {"k": jnp.zeros(2)}
        self.callback = self.a.__call__


# properties


class Celsius(nnx.Module):
    def __init__(self):
        self.degrees = nnx.Param(0.0)
        self.calls = 0

    @property
    def fahrenheit(self):
        return self.degrees * 9 / 5 + 32

    @fahrenheit.setter
    def fahrenheit(self, value):
        self.calls += 1
        self.degrees = (value - 32) * 5 / 9

    @fahrenheit.deleter
    def fahrenheit(self):
        self.degrees = 0.0

    @property
    def fixed(self):
        return 1


def test_property_setters_and_deleters_run():
    m = Celsius()
    m.fahrenheit = 212.0
    assert m.degrees == 100.0
    assert m.calls == 1
    assert m.fahrenheit == 212.0
    assert type(m.variable("degrees")) is nnx.Param
    assert list(m.get_state()) == ["degrees"]
    del m.fahrenheit
    assert m.degrees == 0.0
    again = m.clone()
    again.fahrenheit = 32.0
    assert again.degrees == 0.0


def test_a_property_that_a_class_gets_later_is_found_by_its_subclasses_too():
    class Base(nnx.Module):
        pass

    class Scaled(Base):
        def __init__(self):
            self.scale = 2

    assert Scaled().scale == 2
    Base.scale = property(lambda self: self.hidden + 1, lambda self, value: setattr(self, "hidden", value))  # type: ignore
    scaled = Scaled()
    assert (scaled.hidden, scaled.scale) == (2, 3)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_property_without_a_setter_cannot_be_assigned():
    with pytest.raises(AttributeError):
        Celsius().fixed = 2


def test_an_attribute_error_inside_a_property_is_not_hidden():
    class Broken(nnx.Module):
        @property
        def value(self):
            return self.not_there

    with pytest.raises(AttributeError, match="not_there"):
        Broken().value  # noqa: B018


def test_other_data_descriptors_work():
    class Positive:
        def __set_name__(self, owner, name):
            self.name = "_" + name

        def __get__(self, instance, owner=None):
            return self if instance is None else getattr(instance, self.name)

        def __set__(self, instance, value):
            if value <= 0:
                raise ValueError("must be positive")
            setattr(instance, self.name, value)

    class Model(nnx.Module):
        rate = Positive()

    m = Model()
    m.rate = 3
    assert m.rate == 3
    with pytest.raises(ValueError, match="must be positive"):
        m.rate = -1


def test_cached_properties_work():
    class Lazy(nnx.Module):
        @functools.cached_property
        def value(self):
            return object()

    m = Lazy()
    assert m.value is m.value
    del m.value
    assert "value" not in vars(m)


# classes


def test_abstract_modules_cannot_be_made_and_concrete_ones_can():
    class Base(nnx.Module, abc.ABC):
        @abc.abstractmethod
        def __call__(self, x): ...

    class Concrete(Base):
        def __call__(self, x):
            return x

    with pytest.raises(TypeError, match="abstract"):
        Base()
    assert Concrete()(3) == 3
    assert type(Concrete().clone()) is Concrete


def test_generic_modules():
    class Box(nnx.Module, Generic[T]):
        def __init__(self, value: T):
            self.value = value

    m = Box[int](3)
    assert type(m) is Box
    assert m.value == 3
    assert m.clone().value == 3
    assert Box[int] is not Box


def test_protocols():
    @runtime_checkable
    class Callable(Protocol):
        def __call__(self, x): ...

    assert isinstance(Layer(), Callable)


def test_a_module_may_implement_protocols_by_name():
    @runtime_checkable
    class Encoder(Protocol[T]):
        def encode(self, x: T) -> T: ...

    class Doubling(nnx.Module, Encoder[float]):
        def __init__(self):
            self.w = nnx.Param(2.0)

        def encode(self, x):
            return x * self.w

    m = Doubling()
    assert isinstance(m, Encoder) and isinstance(m, nnx.Module) and not isinstance(m, Layer)
    assert m.clone().encode(3.0) == 6.0


def test_inheritance_and_super():
    class Wide(Layer):
        kind = "wide"

        def __init__(self):
            super().__init__(5)
            self.extra = nnx.Param(1.0)

        def __call__(self, x):
            return super().__call__(x) + 1

    m = Wide()
    assert m.w.shape == (5,)
    np.testing.assert_array_equal(m(jnp.zeros(5)), jnp.ones(5))
    assert m.kind == "wide"
    m.kind = "narrow"
    assert Wide.kind == "wide"
    assert m.clone().kind == "narrow"


def test_multiple_inheritance():
    class Mixin:
        def shout(self):
            return type(self).__name__.upper()

    class Loud(Mixin, Layer):
        pass

    assert Loud().shout() == "LOUD"
    assert Loud().clone().shout() == "LOUD"


def test_init_subclass_and_class_keywords_work():
    class Registered(nnx.Module):
        registry: list = []

        def __init_subclass__(cls, tag="", **kwargs):
            super().__init_subclass__(**kwargs)
            Registered.registry.append((cls.__name__, tag))

    class One(Registered, tag="first"):
        pass

    assert Registered.registry == [("One", "first")]


def test_the_signature_of_the_constructor_is_kept():
    assert list(inspect.signature(Layer).parameters) == ["width"]


def test_private_names_are_mangled_as_usual():
    class Hides(nnx.Module):
        def __init__(self):
            self.__w = nnx.Param(1.0)
            self._plain = nnx.Param(2.0)

        def read(self):
            return self.__w

    m = Hides()
    assert m.read() == 1.0
    assert m.clone().read() == 1.0
    assert list(m.get_state()) == ["_Hides__w", "_plain"]


def test_a_private_name_set_from_outside_is_an_attribute_like_any_other():
    m = Box()
    setattr(m, "__w", nnx.Param(jnp.ones(2)))
    m.__n = 3  # outside a class, Python mangles nothing
    assert list(m.get_state()) == ["__w"]
    assert m.clone().__n == 3
    nnx.jit(lambda m: setattr(m, "__w", 2 * m.__w))(m)
    assert m.__w.tolist() == [2.0, 2.0]
    del m.__w
    assert list(m.get_state()) == []


@pytest.mark.parametrize("value", [nnx.Param(1.0), jnp.ones(2), nnx.Dict(), [nnx.Dict()], nnx.Ref(nnx.Param(1.0))])
def test_a_name_that_belongs_to_python_refuses_state(value):
    m = Box()
    with pytest.raises(
        AttributeError, match="'__w__' of Box: names with two underscores at both ends belong to Python"
    ):
        m.__w__ = value
    assert "__w__" not in vars(m)
    m.__doc__ = "A box."  # what Python and its libraries set, such as `__orig_class__`, is theirs
    assert m.__doc__ == "A box." and len(m.get_state()) == 0


def test_a_name_that_belongs_to_python_is_an_item_of_a_dict_like_any_other():
    d = nnx.Dict({"__w__": nnx.Param(1.0), "__version__": 2})
    assert d["__w__"] == 1.0 and d["__version__"] == 2 and sorted(d) == ["__version__", "__w__"]
    assert list(d.get_state()) == ["__w__"]
    assert d.clone()["__version__"] == 2


def test_a_custom_new_works():
    class Custom(nnx.Module):
        def __new__(cls, n):
            return super().__new__(cls)

        def __init__(self, n):
            self.w = nnx.Param(jnp.ones(n))

    m = Custom(3)
    assert m.clone().w.shape == (3,)


def test_failing_init_keeps_nothing_alive():
    class Fails(nnx.Module):
        def __init__(self, fail):
            self.layers = []
            self.layers.append(Layer())
            if fail:
                raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        Fails(True)
    assert isinstance(Fails(False).layers, nnx.Sequence)


def test_a_custom_setattr_that_calls_super_works():
    class Watches(nnx.Module):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)

    m = Watches()
    m.w = nnx.Param(1.0)
    assert type(m.variable("w")) is nnx.Param


def test_a_custom_getattr_works():
    class Falls(nnx.Module):
        def __getattr__(self, name):
            if name == "magic":
                return 42
            raise AttributeError(name)

    assert Falls().magic == 42
    with pytest.raises(AttributeError, match="other"):
        Falls().other  # noqa: B018


def test_dir_and_vars_show_attributes():
    m = Layer()
    assert "w" in dir(m)
    assert "w" in vars(m)
    assert hasattr(m, "w") and not hasattr(m, "nothing")


# identity


def test_a_module_hashes_and_compares_by_identity():
    a, b = Layer(), Layer()
    assert a == a
    assert a != b
    assert len({a, b, a}) == 2
    assert hash(a) == hash(a)
    twin = copy.copy(a)
    assert twin != a
    assert len({a, twin}) == 2


# copies


def test_copy_makes_a_new_module_that_shares_submodules():
    m = Model()
    twin = copy.copy(m)
    assert type(twin) is Model
    assert twin is not m
    assert twin.a is m.a
    twin.extra = nnx.Param(1.0)
    assert not hasattr(m, "extra")
    assert "extra" not in m.get_state()
    assert "extra" in twin.get_state()
    twin.new = 3
    assert not hasattr(m, "new")


def test_shallow_copy_has_separate_variables():
    layer = Layer()
    twin = copy.copy(layer)
    twin.w = jnp.zeros(2)
    np.testing.assert_array_equal(layer.w, [1, 1])
    assert type(twin.variable("w")) is nnx.Param
    assert twin.variable("w").sharding == ("a",)


def test_a_shallow_copy_binds_its_own_methods():
    class Calls(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(1.0)
            self.callback = self.read

        def read(self):
            return self.w

    m = Calls()
    twin = copy.copy(m)
    twin.w = 5.0
    assert (m.callback(), twin.callback()) == (1.0, 5.0)
    assert twin.partition().merge().callback() == 5.0


def test_a_copy_inside_a_graph_is_another_module():
    m = nnx.Module()
    m.a = Layer()
    m.b = copy.copy(m.a)
    assert list(m.get_state()) == ["a/w", "b/w"]
    assert len(list(m.modules())) == 3


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_deep_copies_keep_structure_sharing_and_types(duplicate):
    m = Model()
    m.partition()
    twin = duplicate(m)
    assert type(twin) is Model
    assert twin.a is twin.b
    assert twin.a is not m.a
    assert twin.me is twin
    assert twin.callback.__self__ is twin.a
    assert twin.get_module_def() == m.get_module_def()
    assert twin.get_state() == m.get_state()
    twin.a.w = jnp.zeros(2)
    twin.a.sizes.append(3)
    twin.cache["k"] = jnp.ones(2)
    twin.layers.append(Layer())
    np.testing.assert_array_equal(m.a.w, [1, 1])
    assert m.a.sizes == [2]
    assert float(m.cache["k"].sum()) == 0.0
    assert len(m.layers) == 2


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol_works(protocol):
    twin = pickle.loads(pickle.dumps(Model(), protocol))
    assert twin.get_module_def() == Model().get_module_def()


def test_unpickled_modules_can_be_changed_and_are_at_this_trace_level():
    twin = pickle.loads(pickle.dumps(Layer()))
    twin.w = jnp.zeros(2)
    twin.new = nnx.Param(1.0)
    assert list(twin.get_state()) == ["new", "w"]


def test_an_unpickled_module_is_equal_to_a_pickled_one_in_moduledef():
    assert hash(pickle.loads(pickle.dumps(Layer())).get_module_def()) == hash(Layer().get_module_def())


def test_containers_survive_copying():
    s = nnx.Sequence([Layer(), nnx.Param(1.0)])
    d = nnx.Dict({"filter": Layer(), "x": 3})
    for duplicate in (copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        s2, d2 = duplicate(s), duplicate(d)
        assert len(s2) == 2 and s2[1] == 1.0
        assert len(d2) == 2 and d2["x"] == 3 and isinstance(d2["filter"], Layer)
        s2.append(1)
        d2["y"] = 1
        assert len(s) == 2 and len(d) == 2


# weak references


def test_weak_references_work(without_garbage_collector):
    m = Layer()
    m.partition()
    ref = weakref.ref(m)
    assert ref() is m
    del m
    assert ref() is None


def test_weak_key_dictionaries_work():
    table = weakref.WeakKeyDictionary()
    m = Layer()
    table[m] = 1
    assert table[m] == 1
    del m
    gc.collect()
    assert len(table) == 0
