"""Static values that would hide a Module or an array of the graph: refused, or rebound when the graph is rebuilt."""

import collections
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models import Box, Scale, Tree


def plus_one(x):
    return x + 1


class Layer(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.asarray(2.0))

    def double(self, x):
        return x * self.w


class HoldsOne:
    def __init__(self, module):
        self.module = module


class HoldsOneInASlot:
    __slots__ = ("module",)

    def __init__(self, module):
        self.module = module


@dataclasses.dataclass
class Record:
    module: object


class PairOf(NamedTuple):
    first: object
    second: object


@pytest.mark.parametrize(
    "capture",
    [
        lambda layer: lambda x: layer(x),
        lambda layer: functools.partial(plus_one, layer),
        lambda layer: functools.partial(plus_one, x=layer),
        lambda layer: functools.partial(lambda x: layer, 1),
        lambda layer: lambda x, layer=layer: layer(x),
        lambda layer: [lambda x: layer(x)],
        lambda layer: {"f": functools.partial(plus_one, [layer])},
        lambda layer: HoldsOne(layer),
        lambda layer: Record(layer),
        lambda layer: HoldsOne([layer]),
        lambda layer: HoldsOneInASlot(layer),
        lambda layer: PairOf(layer, 1),
        lambda layer: collections.OrderedDict(a=layer),
        lambda layer: collections.deque([layer]),
        lambda layer: {layer},
        lambda layer: {layer: 1},
        lambda layer: jax.jit(lambda x: layer(x)),
        lambda layer: jax.jit(layer.double),
        lambda layer: HoldsOne(layer).__init__,
    ],
    ids=[
        "lambda",
        "partial",
        "partial keyword",
        "partial of lambda",
        "default",
        "lambda in list",
        "nested partial",
        "object",
        "dataclass",
        "list in object",
        "slot",
        "namedtuple",
        "OrderedDict",
        "deque",
        "set",
        "key of a dict",
        "jit of lambda",
        "jit of method",
        "method of an object",
    ],
)
def test_a_static_value_that_captures_a_module_is_an_error_naming_the_attribute(capture):
    m = Box(layer=Layer())
    before = m.get_module_def()
    with pytest.raises((ValueError, TypeError), match="callback"):
        m.callback = capture(m.layer)
    assert not hasattr(m, "callback")
    assert m.get_module_def() == before


def test_a_lambda_that_captures_self_is_an_error_naming_the_attribute():
    class SelfCapturing(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(1.0)
            self.callback = lambda x: self.w * x

    with pytest.raises((ValueError, TypeError), match="callback") as error:
        SelfCapturing()
    assert "method" in str(error.value)


def test_a_bound_method_of_a_module_in_the_graph_is_rebound():
    m = Box(layer=Layer())
    m.callback = m.layer.double
    assert float(m.callback(3.0)) == 6.0
    for again in (m.clone(), m.partition().merge()):
        assert again.callback.__self__ is again.layer
        again.layer.w = jnp.asarray(10.0)
        assert float(again.callback(3.0)) == 30.0
    assert m.callback.__self__ is m.layer
    assert float(m.callback(3.0)) == 6.0


def test_a_bound_method_of_the_module_itself_is_rebound():
    class Chooses(Layer):
        def __init__(self):
            super().__init__()
            self.forward = self.double

    m = Chooses()
    again = m.clone()
    again.w = jnp.asarray(10.0)
    assert float(again.forward(3.0)) == 30.0
    assert float(m.forward(3.0)) == 6.0
    assert m.get_module_def() == Chooses().get_module_def()


def test_a_bound_method_follows_its_module_into_a_jitted_function():
    class Chooses(nnx.Module):
        def __init__(self):
            self.layer = Scale(2.0)
            self.run = self.layer.__call__
            self.own = self.plain

        def plain(self, x):
            return self.layer(x) + 1

    state, moduledef = Chooses().partition()

    @jax.jit
    def step(state, x):
        m = moduledef.merge(state)
        m.layer.s = m.layer.s * 2
        return m.run(x), m.own(x)

    assert [float(y) for y in step(state, 3.0)] == [12.0, 13.0]


def test_bound_methods_of_different_modules_differ():
    def make(which):
        m = Box(a=Layer(), b=Layer())
        m.callback = (m.a if which == "a" else m.b).double
        return m.get_module_def()

    assert make("a") == make("a")
    assert make("a") != make("b")


def test_a_bound_method_of_a_plain_object_is_static():
    class Tool:
        def use(self, x):
            return x

    tool = Tool()
    assert Box(f=tool.use).get_module_def() == Box(f=tool.use).get_module_def()


def test_a_bound_method_of_a_module_outside_the_graph_is_an_error_naming_the_path():
    m = Box(inner=Box())
    with pytest.raises((ValueError, TypeError), match="callback"):
        m.inner.callback = Layer().double
        m.partition()


@pytest.mark.parametrize("late", [Layer(), jnp.ones(1), np.ones(1)], ids=["module", "array", "numpy array"])
@pytest.mark.parametrize(
    "make, put",
    [
        (lambda: [], lambda c, x: c.append(x)),
        (lambda: {}, lambda c, x: c.update(k=x)),
        (lambda: {"inner": [1]}, lambda c, x: c["inner"].append(x)),
        (lambda: ([],), lambda c, x: c[0].append(x)),
    ],
    ids=["list", "dict", "nested", "list in tuple"],
)
def test_a_static_container_that_comes_to_hold_a_module_or_array_is_an_error_naming_the_path(make, put, late):
    m = Box(inner=Box(things=make()))
    m.partition()
    put(m.inner.things, late)
    for use in (m.partition, m.get_state, m.get_module_def, m.clone):
        with pytest.raises((ValueError, TypeError), match="inner/things"):
            use()


def test_a_static_set_that_comes_to_hold_a_module_is_an_error_naming_the_path():
    m = Box(things={1})
    m.partition()
    m.things.add(Layer())
    with pytest.raises((ValueError, TypeError), match="things"):
        m.partition()


@pytest.mark.parametrize("late", [Layer(), jnp.ones(1), nnx.Param(1.0)], ids=["module", "array", "container"])
def test_data_hidden_in_a_static_container_raises_with_advice(late):
    m = Tree()
    m.enc.sizes.append(late)
    with pytest.raises(ValueError, match="'enc/sizes'") as error:
        m.partition()
    assert "nnx.Sequence" in str(error.value)
    assert "sizes[1]" in str(error.value)


def test_after_the_module_is_taken_out_again_everything_works():
    m = Box(things=[1])
    before = m.get_module_def()
    m.things.append(Layer())
    with pytest.raises((ValueError, TypeError)):
        m.partition()
    m.things.pop()
    assert m.get_module_def() == before


@pytest.mark.parametrize("depth", [1, 300, 3000])
def test_a_module_is_found_however_many_objects_hide_it(depth):
    value = Box()
    for _ in range(depth):
        value = HoldsOne(value)
    with pytest.raises(ValueError, match="holds a Module"):
        Box().config = value
    wide = [HoldsOne(None) for _ in range(depth)] + [HoldsOne(Box())]
    with pytest.raises(ValueError, match="holds a Module"):
        Box().config = HoldsOne(wide)


def test_a_module_in_an_attribute_of_a_list_is_found():
    class Scales(list):
        pass

    scales = Scales()
    scales.owner = Box()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="holds a Module"):
        Box().config = scales
