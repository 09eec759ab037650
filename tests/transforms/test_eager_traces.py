"""Traces that are kept outside of `jit`: what uses them again, and everything that must end them."""

import collections
import copy
import functools
import gc
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from nnx.transforms.control.eager_traces import MAX_TRACES, clear_traces, kept_traces


@pytest.fixture(autouse=True)
def no_traces():
    clear_traces()
    yield
    clear_traces()


class Traced:
    """How many times a body was traced."""

    times = 0


@pytest.fixture(autouse=True)
def count_traces():
    Traced.times = 0


def counter(value=0.0):
    return nnx.Dict(n=nnx.Variable(jnp.asarray(value)), scale=1.0)


def add(args, by):
    """What every body below does: adds to the counter among its arguments, and returns what its transform expects."""
    Traced.times += 1
    args = args[0] if isinstance(args[0], tuple) else args  # the value of a while loop
    m = next(arg for arg in args if isinstance(arg, nnx.Module))
    m.n = m.n + by * m.scale
    if len(args) == 3:  # scan: module, carry, x
        return args[1], None
    return None if len(args) == 1 else m if args[1] is m else (m, args[1] + 1)


def nothing(m):
    pass


def is_below_3(value):
    return value[1] < 3


def by_scan(body):
    run = nnx.scan(body, length=3)
    return lambda m: run(m, 0.0, None)


def by_cond(body):
    return lambda m: nnx.cond(True, body, nothing, m)


def by_switch(body):
    return lambda m: nnx.switch(1, [nothing, body], m)


def by_fori_loop(body):
    return lambda m: nnx.fori_loop(0, 3, body, m)


def by_while_loop(body):
    return lambda m: nnx.while_loop(is_below_3, body, (m, 0))


TRANSFORMS = {
    "scan": (by_scan, 3),
    "cond": (by_cond, 1),
    "switch": (by_switch, 1),
    "fori_loop": (by_fori_loop, 3),
    "while_loop": (by_while_loop, 3),
    "remat": (nnx.remat, 1),
}
each_transform = pytest.mark.parametrize("lift, runs", TRANSFORMS.values(), ids=TRANSFORMS)


@each_transform
def test_a_repeated_call_is_not_traced_again(lift, runs):
    run, m = lift(lambda *args: add(args, 1.0)), counter()
    run(m)
    first = Traced.times
    for _ in range(4):
        run(m)
    assert Traced.times == first
    assert float(m.n) == 5 * runs


@each_transform
def test_another_model_of_the_same_structure_uses_the_same_trace(lift, runs):
    run, a, b = lift(lambda *args: add(args, 1.0)), counter(), counter(10.0)
    run(a)
    first = Traced.times
    run(b)
    assert Traced.times == first
    assert (float(a.n), float(b.n)) == (runs, 10.0 + runs)


@each_transform
def test_a_changed_static_attribute_is_seen(lift, runs):
    run, m = lift(lambda *args: add(args, 1.0)), counter()
    run(m)
    m.scale = 2.0
    run(m)
    assert float(m.n) == 3 * runs


@each_transform
def test_a_hook_held_by_the_module_is_seen_when_it_is_replaced(lift, runs):
    def body(*args):
        (m,) = [arg for arg in jax.tree.leaves(args) if isinstance(arg, nnx.Module)]
        return add(args, m.hook(0.0))

    run, m = lift(body), counter()
    m.hook = lambda x: x + 1.0
    run(m)
    m.hook = lambda x: x + 10.0
    run(m)
    assert float(m.n) == 11 * runs


STEP = 1.0


def by_global_step(*args):
    return add(args, STEP)


@each_transform
def test_a_changed_global_is_seen(lift, runs, monkeypatch):
    run, m = lift(by_global_step), counter()
    run(m)
    monkeypatch.setitem(globals(), "STEP", 10.0)
    run(m)
    assert float(m.n) == 11 * runs


@each_transform
@pytest.mark.parametrize("value", [10, 10.0, -0.0, True, jnp.array(10.0)], ids=["int", "float", "-0", "bool", "array"])
def test_a_changed_closure_cell_is_seen(lift, runs, value):
    step = 0.0

    def body(*args):
        return add(args, step)

    run, m = lift(body), counter()
    run(m)
    step = value
    expected = float(m.n) + runs * float(value)
    run(m)
    assert float(m.n) == expected
    traces = Traced.times
    run(m)
    assert Traced.times == traces, "and the new trace is kept, too"


CAN_CHANGE = {
    "list": [1.0],
    "dict": {0: 1.0},
    "numpy array": np.ones(1),
    "object": collections.UserList([1.0]),
    "object in a tuple": (collections.UserList([1.0]),),
}


@each_transform
@pytest.mark.parametrize("held", CAN_CHANGE.values(), ids=CAN_CHANGE)
def test_values_that_change_in_place_are_never_stale(lift, runs, held):
    held = copy.deepcopy(held)

    def body(*args):
        return add(args, float(held[0][0] if isinstance(held, tuple) else held[0]))

    run, m = lift(body), counter()
    run(m)
    (held[0] if isinstance(held, tuple) else held)[0] = 10.0
    run(m)
    assert float(m.n) == 11 * runs


OTHER = None  # a Module that bodies reach by its name


def by_weight_of_helper(*args):
    return add(args, weight_of_global())


def weight_of_global():
    return OTHER.n


def by_weight_of_global(*args):
    return add(args, OTHER.n)


@each_transform
@pytest.mark.parametrize("route", ["closure", "global", "helper"])
def test_weights_of_a_captured_module_are_inputs_of_the_trace(lift, runs, route, monkeypatch):
    other = counter(1.0)
    monkeypatch.setitem(globals(), "OTHER", other)
    bodies = {
        "closure": lambda *args: add(args, other.n),
        "global": by_weight_of_global,
        "helper": by_weight_of_helper,
    }
    run, m = lift(bodies[route]), counter()
    run(m)
    traces = Traced.times
    for value in (10.0, 100.0):
        other.n = jnp.array(value)
        run(m)
    assert float(m.n) == 111 * runs
    assert Traced.times == traces


def test_a_captured_module_of_another_shape_or_structure_is_traced_again():
    other = counter(1.0)
    run, m = nnx.remat(lambda m: add((m,), other.n * other.scale)), counter()
    run(m)
    other.scale = 2.0
    run(m)
    assert float(m.n) == 3.0
    other.n = jnp.array([1.0, 2.0])
    run(m)
    assert m.n.tolist() == [5.0, 7.0]


def test_a_captured_module_replaced_by_another_is_traced_again():
    other = counter(1.0)
    run, m = nnx.remat(lambda m: add((m,), other.n)), counter()
    run(m)
    other = counter(10.0)
    run(m)
    assert float(m.n) == 11.0


def test_a_submodule_of_a_captured_module_that_is_replaced_is_read_from_then_on():
    other = nnx.Dict(inner=counter(1.0))
    run, m = nnx.remat(lambda m: add((m,), other.inner.n)), counter()
    run(m)
    other.inner = counter(10.0)
    run(m)
    other.inner.n = jnp.array(100.0)
    run(m)
    assert float(m.n) == 111.0


def test_captured_weights_that_stop_being_one_array_are_distinguished():
    first = nnx.Dict(n=nnx.Variable(jnp.ones(())))
    second = nnx.Dict(n=nnx.Variable(first.n))
    run, m = nnx.remat(lambda m: add((m,), second.n + 0 * first.n)), counter()
    run(m)
    first.n = jnp.array(5.0)
    run(m)
    second.n = jnp.array(10.0)
    run(m)
    assert float(m.n) == 12.0


@each_transform
def test_a_body_made_for_one_call_is_traced_in_that_call_and_forgotten(lift, runs):
    m = counter()
    lift(lambda *args: add(args, 1.0))(m)
    first = Traced.times
    for _ in range(3):
        lift(lambda *args: add(args, 1.0))(m)
    assert Traced.times == 4 * first
    assert float(m.n) == 4 * runs
    gc.collect()
    assert kept_traces() == 0


@each_transform
def test_a_partial_made_for_one_call_is_traced_in_that_call_and_forgotten(lift, runs):
    m, setting = counter(), types.SimpleNamespace(by=1.0)

    def read():
        return setting.by

    def body(_, *args):
        return add(args, read())

    for setting.by in (1.0, 20.0, 300.0):
        lift(functools.partial(body, None))(m)
    assert float(m.n) == 321 * runs
    gc.collect()
    assert kept_traces() == 0


@each_transform
def test_a_body_whose_code_is_replaced_is_traced_again(lift, runs):
    def body(*args):
        return add(args, 1.0)

    def edited(*args):
        return add(args, 20.0)

    run, m = lift(body), counter()
    run(m)
    body.__code__ = edited.__code__  # as the autoreload of a notebook does
    run(m)
    assert float(m.n) == 21 * runs


@each_transform
def test_new_shapes_are_traced_with_the_callers_own_values(lift, runs):
    run, a, b = lift(lambda *args: add(args, 1.0)), counter(), counter(np.zeros(2))
    run(a)
    run(b)
    assert (float(a.n), b.n.tolist()) == (runs, [runs, runs])


@each_transform
def test_a_trace_goes_with_the_function_that_reaches_an_array(lift, runs):
    array = jnp.ones(())
    alive = weakref.ref(array)

    def body(*args, step=array):
        return add(args, step)

    run = lift(body)
    run(counter())
    assert kept_traces() == 1
    del array, body, run
    gc.collect()
    assert kept_traces() == 0
    assert alive() is None


@each_transform
def test_a_cell_that_holds_another_array_at_every_call_keeps_only_the_last(lift, runs):
    array = jnp.zeros(())

    def body(*args):
        return add(args, array)

    run, m, alive = lift(body), counter(), []
    for i in range(4):
        array = jnp.array(float(i))
        alive.append(weakref.ref(array))
        run(m)
    gc.collect()
    assert float(m.n) == 6 * runs
    assert kept_traces() == 1
    assert [weak() is None for weak in alive] == [True, True, True, False]


@each_transform
def test_no_trace_keeps_a_module(lift, runs):
    m = counter()
    lift(lambda *args: add(args, 1.0))(m)
    alive = weakref.ref(m)
    del m
    gc.collect()
    assert alive() is None


def test_the_number_of_traces_is_bounded():
    m, bodies = counter(), [lambda m, i=i: None for i in range(3)]
    for body in bodies:
        nnx.cond(True, body, nothing, m)
    assert kept_traces() == 3
    assert MAX_TRACES >= 100


@each_transform
def test_error_of_the_body_is_raised_unchanged_and_the_body_runs_once(lift, runs):
    ran = types.SimpleNamespace(times=0)

    def note():
        ran.times += 1

    def body(*args):
        note()
        return add(args, jnp.ones(3) @ jnp.ones(4))

    for times in (1, 2):
        with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
            lift(body)(counter())
        assert ran.times == times


@each_transform
def test_the_function_works_again_after_an_error(lift, runs):
    def body(*args):
        (m,) = [arg for arg in jax.tree.leaves(args) if isinstance(arg, nnx.Module)]
        if m.fails:
            raise RuntimeError("as told")
        return add(args, 1.0)

    run, m = lift(body), counter()
    m.fails = True
    with pytest.raises(RuntimeError, match="as told"):
        run(m)
    assert float(m.n) == 0.0
    m.fails = False
    run(m)
    assert float(m.n) == runs


def test_broadcast_argument_other_than_an_array_is_unchanged():
    @nnx.scan(length=2)
    def run(m, carry, _, flag, name):
        if flag and name == "plus":
            m.n += 1
        return carry, None

    m = counter()
    for flag, name in [(True, "plus"), (False, "plus"), (True, "minus"), (True, "plus")]:
        run(m, 0.0, None, flag, name)
    assert float(m.n) == 4.0


def test_a_broadcast_array_can_decide_an_if_as_before():
    @nnx.scan(length=2)
    def run(m, carry, _, limit):
        if float(limit) > 0:
            m.n += limit
        return carry, None

    m = counter()
    for limit in (1.0, -1.0, 10.0):
        run(m, 0.0, None, jnp.array(limit))
    assert float(m.n) == 22.0


def test_random_keys_are_those_of_a_call_without_a_trace():
    @nnx.scan(length=3, split_rngs="noise")
    def run(m, carry, _, ctx):
        return carry, jax.random.normal(ctx.make_rng("noise"))

    def both():
        return run(counter(), 0.0, None, nnx.context(noise=1))[1].tolist()

    kept = [both(), both()]
    with jax.disable_jit():
        assert np.allclose(both(), kept[0])
    assert kept[0] == kept[1]


class Block(nnx.Module):
    def __init__(self, *, ctx):
        self.linear = nnx.Linear(2, 2, ctx=ctx)

    def __call__(self, x, _):
        Traced.times += 1
        return self.linear(x), None

    def other(self, x, _):
        Traced.times += 1
        return 2 * x, None


def test_a_scan_module_is_traced_once():
    make = nnx.Scan(Block, variable_axes={nnx.Param: 0}, split_rngs="params", length=3)
    a, b = make(ctx=nnx.context(0)), make(ctx=nnx.context(1))
    outs = [m(jnp.ones((1, 2)), None)[0] for m in (a, b, a)]
    assert Traced.times == 1
    assert np.array_equal(outs[0], outs[2]) and not np.array_equal(outs[0], outs[1])


def test_another_method_of_a_scan_module_is_traced_once():
    m = nnx.Scan(Block, variable_axes={nnx.Param: 0}, split_rngs="params", length=3)(ctx=nnx.context(0))
    for _ in range(3):
        assert m.call.other(jnp.ones((1, 2)), None)[0].tolist() == [[8.0, 8.0]]
    assert Traced.times == 1
    assert kept_traces() == 1


def test_a_method_replaced_on_the_class_is_seen_by_a_scan_module(monkeypatch):
    m = nnx.Scan(Block, variable_axes={nnx.Param: 0}, split_rngs="params", length=3)(ctx=nnx.context(0))
    m(jnp.ones((1, 2)), None)
    monkeypatch.setattr(Block, "__call__", lambda self, x, _: (x + 1, None))
    assert m(jnp.ones((1, 2)), None)[0].tolist() == [[4.0, 4.0]]


def test_inside_of_a_transform_nothing_is_kept():
    m = counter()
    nnx.jit(by_scan(lambda *args: add(args, 1.0)))(m)
    nnx.grad(lambda m: nnx.cond(True, lambda m: m.n * 2, lambda m: m.n, m), nnx.Variable)(m)
    assert kept_traces() == 0


def test_debugging_without_jit_runs_the_body_in_python():
    run, m = by_scan(lambda *args: add(args, 1.0)), counter()
    run(m)
    Traced.times = 0
    with jax.disable_jit():
        run(m)
    assert Traced.times >= 3


def test_other_axis_rules_are_another_trace():
    run, m = by_scan(lambda *args: add(args, 1.0)), counter()
    run(m)
    with nnx.logical_axis_rules([("embed", None)]):
        run(m)
    assert kept_traces() == 2
