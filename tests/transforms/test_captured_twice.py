"""A Module that a function reaches by two ways is followed on both, and a list on the way is watched as it fills."""

import itertools
import operator
import types
from unittest import mock

import jax.numpy as jnp
import pytest

import nnx
from nnx.transforms.engine.routes import Route


class Weight(nnx.Module):
    def __init__(self, value):
        self.w = nnx.Param(jnp.array(value))


class Around(nnx.Module):
    def __init__(self, inner):
        self.inner = inner


class Slotted:
    __slots__ = ("part",)

    def __init__(self, part):
        self.part = part


class ByName:
    def __init__(self, part):
        self.part_0 = part

    def read(self):
        return getattr(self, f"part_{0}").w


class ByMethodCaller:
    def __init__(self, part):
        self.part = part

    def read(self):
        return operator.methodcaller("_get_it")(self).w

    def _get_it(self):
        return self.part


class ByMethod:
    def __init__(self, part):
        self.part = part

    def read(self):
        return self.named_by_helper().w

    def named_by_helper(self):
        return self.part


def in_cell(part):
    def read():
        return part.w

    def put(other):
        nonlocal part
        part = other

    return read, put


def in_object(cls, name):
    def way(part):
        holder = cls(part)
        return holder.read, lambda other: setattr(holder, name, other)

    return way


def in_attribute(cls, name="part"):
    def way(part):
        holder = cls(part)
        return lambda: getattr(holder, name).w, lambda other: setattr(holder, name, other)

    return way


def in_class(part):
    cls = type("Settings", (), {"part": part})
    return lambda: cls().part.w, lambda other: setattr(cls, "part", other)


def in_container(make, key):
    def way(part):
        container = make(part)
        return lambda: container[key].w, lambda other: container.__setitem__(key, other)

    return way


def in_pair(part):
    pairs = [("name", part)]
    return lambda: pairs[0][1].w, lambda other: pairs.__setitem__(0, ("name", other))


def in_nested(part):
    inner = types.SimpleNamespace(parts={"one": [part]})
    return lambda: inner.parts["one"][0].w, lambda other: inner.parts.update(one=[other])


WAYS = {
    "cell": in_cell,
    "attribute": in_attribute(lambda part: types.SimpleNamespace(part=part)),
    "slot": in_attribute(Slotted),
    "module": in_attribute(Around, "inner"),
    "name": in_object(ByName, "part_0"),
    "method": in_object(ByMethod, "part"),
    "methodcaller": in_object(ByMethodCaller, "part"),
    "class": in_class,
    "list": in_container(lambda part: [part], 0),
    "dict": in_container(lambda part: {"one": part}, "one"),
    "pair": in_pair,
    "nested": in_nested,
}


@pytest.mark.parametrize(("first", "second"), [*itertools.combinations_with_replacement(WAYS, 2)])
def test_another_module_on_either_way_is_used_by_the_next_call(first, second):
    one = Weight(1.0)
    read_first, put_first = WAYS[first](one)
    read_second, put_second = WAYS[second](one)
    step = nnx.jit(lambda x: x + read_first() + 10 * read_second())
    assert step(0.0) == 11
    put_second(Weight(2.0))
    assert step(0.0) == 21
    put_first(Weight(3.0))
    assert step(0.0) == 23
    traces = step.trace_count
    one.w += 1  # which nobody reads any more
    assert step(0.0) == 23 and step.trace_count == traces


def fill_list(parts, new):
    parts.append(new)


def fill_dict(parts, new):
    parts[len(parts)] = new


def fill_slot(parts, new):
    parts[parts.index(None)] = new


def fill_with_pair(parts, new):
    parts.append(("name", new))


@pytest.mark.parametrize(
    ("make", "fill"),
    [(list, fill_list), (dict, fill_dict), (lambda: [None] * 3, fill_slot), (list, fill_with_pair)],
    ids=["list", "dict", "list of None", "list of pairs"],
)
def test_modules_that_fill_an_empty_container_are_used_by_the_next_call(make, fill):
    parts = make()

    def total():
        values = parts.values() if isinstance(parts, dict) else parts
        found = [part[1] if isinstance(part, tuple) else part for part in values]
        return sum([part.w for part in found if part is not None])

    step = nnx.jit(lambda x: x + total())
    assert step(0.0) == 0
    fill(parts, Weight(1.0))
    assert step(0.0) == 1
    fill(parts, Weight(2.0))
    assert step(0.0) == 3


def test_an_empty_list_that_fills_with_other_things_costs_no_trace():
    model, losses = Weight(1.0), []
    step = nnx.jit(lambda x: x + model.w if losses is not None else x)
    for _ in range(3):
        losses.append(step(0.0))
    assert step.trace_count == 1


def test_a_function_traced_for_many_shapes_checks_no_more_on_each_call():
    holder, parts = types.SimpleNamespace(part=Weight(1.0)), []
    parts += [holder.part, Weight(2.0)]
    step = nnx.jit(lambda x: x + holder.part.w + sum([part.w for part in parts]))

    def checks(x):
        step(x)
        with mock.patch.object(Route, "follow", autospec=True, side_effect=Route.follow) as follow:
            step(x)
        return follow.call_count

    assert checks(jnp.zeros(1)) == [checks(jnp.zeros(n)) for n in range(2, 6)][-1] > 0
