"""One container under several attributes stays one container through a transform, until a body parts them."""

import copy

import jax
import jax.numpy as jnp
import pytest

import nnx
from tests.transforms.identity_models import (
    LIFTED,
    REPEATING,
    ref,
    two_attributes_of_one_dict,
    value,
)


@pytest.mark.parametrize("lift", LIFTED)
def test_one_container_under_two_attributes_is_one_inside_and_after(lift):
    def body(m):
        assert m.p is m.q
        m.p["k"] = m.q["k"] + 1
        m.q["new"] = value(0.0)

    m = two_attributes_of_one_dict()
    f = lift(body)
    f(m)
    f(m)
    assert float(m.q["k"]) == 3.0
    assert m.p is m.q
    assert m.p is not m.other


@pytest.mark.parametrize("lift", LIFTED)
def test_replacing_a_shared_container_in_one_attribute_unties_it(lift):
    def body(m):
        m.p = dict(m.p)
        m.p["k"] = value(9.0)

    m = two_attributes_of_one_dict()
    lift(body)(m)
    assert (float(m.p["k"]), float(m.q["k"])) == (9.0, 1.0)
    m = two_attributes_of_one_dict()
    lift(lambda m: setattr(m, "p", dict(m.p)))(m)
    assert m.p is not m.q


def test_a_list_that_replaces_tuples_under_two_attributes_is_one_inside():
    class Pair(nnx.Module):
        def __init__(self):
            self.p, self.q = (value(1.0),), (value(1.0),)

    m, f = Pair(), nnx.jit(lambda m: m.p.append(m.p[0] + 1))
    nnx.jit(lambda m: None)(m)
    m.p = m.q = [value(1.0)]
    f(m)
    assert m.p is m.q and len(m.q) == 2


@pytest.mark.parametrize("lift", LIFTED)
def test_attributes_that_become_one_container_stay_one(lift):
    def body(m):
        m.q = m.other
        m.new = m.other

    m = two_attributes_of_one_dict()
    f = lift(body)
    f(m)
    assert m.q is m.other is m.new
    assert m.p is not m.q
    f(m)
    assert m.q is m.other is m.new


@pytest.mark.parametrize("name", REPEATING)
def test_bodies_that_run_many_times_see_one_container(name):
    def body(m):
        m.p["k"] = jnp.minimum(m.q["k"] + 1, 2.0)

    m = two_attributes_of_one_dict()
    REPEATING[name](body)(m)
    assert m.p is m.q
    assert float(m.q["k"]) == 2.0


@pytest.mark.parametrize("name", REPEATING)
@pytest.mark.parametrize("change", [lambda m: setattr(m, "p", dict(m.p)), lambda m: setattr(m, "p", m.other)])
def test_bodies_that_run_many_times_may_not_change_what_holds_one_container(name, change):
    m = two_attributes_of_one_dict()
    with pytest.raises(ValueError, match="the body changes which attributes hold one and the same container: "):
        REPEATING[name](change)(m)
    assert m.p is m.q


def test_one_container_under_two_axes_is_an_error():
    m = nnx.Dict(p=nnx.Param({"k": jnp.zeros(2)}), q=nnx.BatchStat({"k": jnp.zeros(2)}))
    m.p = m.q
    with pytest.raises(ValueError, match=r"one variable is reached under two axes: 'p' \(0\) and 'q' \(broadcast\)"):
        nnx.vmap(lambda m: None, variable_axes={nnx.Param: 0}, axis_size=2)(m)


def test_one_container_under_two_specs_is_an_error():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {nnx.Param: jax.sharding.PartitionSpec("x"), ...: jax.sharding.PartitionSpec()}
    m = nnx.Dict(p=nnx.Param({"k": jnp.zeros(2)}), q=nnx.BatchStat({"k": jnp.zeros(2)}))
    m.p = m.q
    with pytest.raises(ValueError, match="one container is the value of 'p' .* and of 'q'"):
        nnx.shard_map(lambda m: None, mesh=mesh, in_specs=(specs,), out_specs=jax.sharding.PartitionSpec())(m)


def test_jitted_step_notices_when_attributes_become_one_container():
    @nnx.jit
    def body(m):
        m.p["k"] = m.p["k"] + 1

    m = nnx.Dict(p=nnx.Param({"k": value(1.0)}), q=nnx.Param({"k": value(10.0)}), r=nnx.Param(value(0.0)))
    body(m)
    body(m)
    assert (float(m.p["k"]), float(m.q["k"])) == (3.0, 10.0)
    m.p = m.q
    body(m)
    assert float(m.q["k"]) == 11.0
    assert m.p is m.q
    m.r = m.p = {"k": value(0.0)}  # r held an array till now
    body(m)
    assert m.r is m.p
    assert (float(m.r["k"]), float(m.q["k"])) == (1.0, 11.0)
    assert body.trace_count == 3


@pytest.mark.parametrize("copied", [nnx.Module.clone, copy.deepcopy, lambda m: m.clone(copy_arrays=True)])
def test_a_copy_holds_one_container_where_the_model_does(copied):
    m = two_attributes_of_one_dict()
    twin = copied(m)
    assert twin.p is twin.q
    assert twin.p is not m.p
    assert twin.other is not twin.p


def test_a_container_written_by_update_state_or_through_a_ref_is_noticed():
    @nnx.jit
    def body(m):
        m.p["k"] = m.p["k"] + 1

    r = ref()
    m = nnx.Dict(p=r, q=nnx.Param(value(0.0)), s=nnx.Param({"k": value(0.0)}))
    nnx.jit(lambda m: None)(m)
    m.p = {"k": value(0.0)}
    body(m)
    m.s = m.p
    body(m)
    assert m.s is m.p is r.value
    assert float(m.s["k"]) == 2.0
    m.update_state(nnx.State({"q": nnx.Param({"k": value(5.0)})}))
    body(m)
    m.q = m.p
    body(m)
    assert m.q is m.p
    assert float(m.q["k"]) == 4.0


def test_a_tied_container_is_one_object_for_all_owners():
    r = nnx.Ref(nnx.Param({"k": value(1.0)}))
    m, outside = nnx.Dict(a=r, b=r), nnx.Dict(a=r)

    @nnx.jit
    def body(m):
        assert m.a is m.b
        m.a["k"] = m.a["k"] + 1

    body(m)
    assert m.a is m.b is outside.a is r.value
    assert float(outside.a["k"]) == 2.0


# `self` in a constructor that runs many times


@pytest.mark.parametrize("transform", ["vmap", "scan"])
def test_self_in_a_stacked_constructor_is_the_object_outside(transform):
    size = {"axis_size": 3} if transform == "vmap" else {"length": 3}

    class Model(nnx.Module):
        @getattr(nnx, transform)(variable_axes={nnx.Param: 0}, **size)
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))
            self.child = nnx.Dict(v=nnx.Param(jnp.zeros(1)))
            self.child.parent = self
            self.also = self.child
            self.method = self.double
            self.tied = self.child.tied = nnx.Ref(nnx.Param(jnp.ones(())))

        def double(self):
            return self.w * 2

    m = Model()
    assert m.child.parent is m
    assert m.also is m.child
    assert m.method.__self__ is m
    assert list(m.get_state()) == ["also/v", "tied", "w"]
    m.tied = jnp.zeros(3)
    assert m.child.tied.tolist() == [0.0] * 3
    nnx.jit(lambda m: setattr(m.child.parent, "w", m.w + 1))(m)
    assert m.w.tolist() == [[2.0, 2.0]] * 3


def test_stacked_constructor_keeps_attributes_set_earlier():
    class Base(nnx.Module):
        @nnx.vmap(variable_axes={nnx.Param: 0}, axis_size=2)
        def __init__(self):
            self.w = nnx.Param(jnp.full((3,), self.scale))

    class Sub(Base):
        def __init__(self):
            self.scale = 2.0
            self.own = nnx.Param(jnp.ones(()))
            super().__init__()

    m = Sub()
    assert m.w.tolist() == [[2.0] * 3] * 2
    assert float(m.own) == 1.0


def test_a_stacked_constructor_may_call_another_one():
    class Base(nnx.Module):
        @nnx.vmap(variable_axes={nnx.Param: 0}, axis_size=2)
        def __init__(self):
            self.w = nnx.Param(jnp.ones(()))
            self.me = self

    class Sub(Base):
        @nnx.vmap(variable_axes={nnx.Param: 0}, axis_size=3)
        def __init__(self):
            super().__init__()
            self.v = nnx.Param(jnp.ones(()))

    m = Sub()
    assert m.me is m
    assert (m.w.shape, m.v.shape) == ((3, 2), (3,))


def test_a_frozen_dataclass_may_have_a_stacked_constructor():
    @nnx.dataclass(frozen=True)
    class Frozen(nnx.Module):
        @nnx.vmap(variable_axes={nnx.Param: 0}, axis_size=2)
        def __init__(self):
            self.w = nnx.Param(jnp.ones(()))

    assert Frozen().w.shape == (2,)
