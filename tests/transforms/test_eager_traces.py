"""Traces that are kept outside of `jit`: what uses them again, and everything that must end them."""

import functools
import gc
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from nnx.transforms.eager_traces import MAX_TRACES, clear_traces, kept_traces


@pytest.fixture(autouse=True)
def no_traces():
    clear_traces()
    yield
    clear_traces()


class Traced:
    """How many times a body was traced. A class: a list that a body names would have it traced on every call."""

    times = 0


@pytest.fixture(autouse=True)
def count_traces():
    Traced.times = 0


def counter(value=0.0):
    return nnx.Dict(n=nnx.Variable(jnp.asarray(value)), scale=1.0)


def add(m, by):
    """What every body below does, and a note that it was traced."""
    Traced.times += 1
    m.n = m.n + by * m.scale


def by_scan(body):
    @nnx.scan(length=3)
    def run(m, carry, _):
        body(m)
        return carry, None

    return lambda m: run(m, 0.0, None)


def by_cond(body):
    return lambda m: nnx.cond(True, body, lambda m: None, m)


def by_switch(body):
    return lambda m: nnx.switch(1, [lambda m: None, body], m)


def by_fori_loop(body):
    def step(_, m):
        body(m)
        return m

    return lambda m: nnx.fori_loop(0, 3, step, m)


def by_while_loop(body):
    def step(value):
        m, i = value
        body(m)
        return m, i + 1

    return lambda m: nnx.while_loop(lambda value: value[1] < 3, step, (m, 0))


def by_remat(body):
    return nnx.remat(lambda m: body(m))


TRANSFORMS = {
    "scan": (by_scan, 3),
    "cond": (by_cond, 1),
    "switch": (by_switch, 1),
    "fori_loop": (by_fori_loop, 3),
    "while_loop": (by_while_loop, 3),
    "remat": (by_remat, 1),
}
each_transform = pytest.mark.parametrize("lift, runs", TRANSFORMS.values(), ids=TRANSFORMS)


@each_transform
def test_a_repeated_call_is_not_traced_again(lift, runs):
    run, m = lift(lambda m: add(m, 1.0)), counter()
    run(m)
    first = Traced.times
    for _ in range(4):
        run(m)
    assert Traced.times == first
    assert float(m.n) == 5 * runs


@each_transform
def test_another_model_of_the_same_structure_uses_the_same_trace(lift, runs):
    run, a, b = lift(lambda m: add(m, 1.0)), counter(), counter(10.0)
    run(a)
    first = Traced.times
    run(b)
    assert Traced.times == first
    assert (float(a.n), float(b.n)) == (runs, 10.0 + runs)


@each_transform
def test_a_changed_static_attribute_is_seen(lift, runs):
    run, m = lift(lambda m: add(m, 1.0)), counter()
    run(m)
    m.scale = 2.0
    run(m)
    assert float(m.n) == 3 * runs


@each_transform
def test_a_hook_held_by_the_module_is_seen_when_it_is_replaced(lift, runs):
    def body(m):
        m.n = m.hook(m.n)

    run, m = lift(body), counter()
    m.hook = lambda x: x + 1.0
    run(m)
    m.hook = lambda x: x + 10.0
    run(m)
    assert float(m.n) == 11 * runs


STEP = 1.0


def by_global_step(m):
    add(m, STEP)


@each_transform
def test_a_changed_global_is_seen(lift, runs, monkeypatch):
    run, m = lift(by_global_step), counter()
    run(m)
    monkeypatch.setitem(globals(), "STEP", 10.0)
    run(m)
    assert float(m.n) == 11 * runs


def through_a_helper(m):
    by_global_step(m)


@each_transform
def test_a_changed_global_of_a_helper_is_seen(lift, runs, monkeypatch):
    run, m = lift(through_a_helper), counter()
    run(m)
    monkeypatch.setitem(globals(), "STEP", 10.0)
    run(m)
    assert float(m.n) == 11 * runs


@each_transform
@pytest.mark.parametrize("value", [10, 10.0, -0.0, True, jnp.array(10.0)], ids=["int", "float", "-0", "bool", "array"])
def test_a_changed_closure_cell_is_seen(lift, runs, value):
    step = 0.0

    def body(m):
        add(m, step)

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
    "list": (lambda: [1.0], lambda held: held[0], lambda held: held.__setitem__(0, 10.0)),
    "dict": (lambda: {"step": 1.0}, lambda held: held["step"], lambda held: held.update(step=10.0)),
    "numpy array": (lambda: np.ones(1), lambda held: float(held[0]), lambda held: held.fill(10.0)),
    "object": (
        lambda: types.SimpleNamespace(step=1.0),
        lambda held: held.step,
        lambda held: vars(held).update(step=10.0),
    ),
    "object in a tuple": (
        lambda: (types.SimpleNamespace(step=1.0),),
        lambda held: held[0].step,
        lambda held: vars(held[0]).update(step=10.0),
    ),
    "list in a partial": (
        lambda: functools.partial(sum, [1.0]),
        lambda held: held(),
        lambda held: held.args[0].append(9.0),
    ),
}


@each_transform
@pytest.mark.parametrize("make, read, change", CAN_CHANGE.values(), ids=CAN_CHANGE)
def test_what_can_change_in_place_is_never_stale(lift, runs, make, read, change):
    held = make()
    run, m = lift(lambda m: add(m, read(held))), counter()
    run(m)
    change(held)
    run(m)
    assert float(m.n) == 11 * runs


@each_transform
def test_a_captured_module_is_never_stale(lift, runs):
    other = counter(1.0)
    run, m = lift(lambda m: add(m, other.n)), counter()
    run(m)
    other.n = jnp.array(10.0)
    run(m)
    assert float(m.n) == 11 * runs


@each_transform
def test_functions_made_in_every_call_share_a_trace(lift, runs):
    m = counter()
    for _ in range(4):
        lift(lambda m: add(m, 1.0))(m)
    first = Traced.times
    lift(lambda m: add(m, 1.0))(m)  # other code on another line: one trace more
    assert Traced.times == 2 * first
    assert float(m.n) == 5 * runs


@each_transform
def test_new_shapes_are_traced_with_the_callers_own_values(lift, runs):
    run, a, b = lift(lambda m: add(m, 1.0)), counter(), counter(np.zeros(2))
    run(a)
    run(b)
    assert (float(a.n), b.n.tolist()) == (runs, [runs, runs])


@each_transform
def test_a_trace_goes_with_the_function_that_reaches_an_array(lift, runs):
    array = jnp.ones(())
    alive = weakref.ref(array)

    def body(m, step=array):
        m.n = m.n + step

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

    def body(m):
        m.n = m.n + array

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
    lift(lambda m: add(m, 1.0))(m)
    alive = weakref.ref(m)
    del m
    gc.collect()
    assert alive() is None


def test_the_number_of_traces_is_bounded():
    m = counter()
    for i in range(3):
        nnx.cond(True, lambda m, i=i: None, lambda m: None, m)
    assert kept_traces() == 3
    assert MAX_TRACES >= 100


@each_transform
def test_an_error_is_the_same_as_without_a_trace(lift, runs):
    def body(m):
        m.n = m.n + jnp.ones(3) @ jnp.ones(4)

    for _ in range(2):
        with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
            lift(body)(counter())


@each_transform
def test_the_function_works_again_after_an_error(lift, runs):
    def body(m):
        if m.fails:
            raise RuntimeError("as told")
        add(m, 1.0)

    run, m = lift(body), counter()
    m.fails = True
    with pytest.raises(RuntimeError, match="as told"):
        run(m)
    assert float(m.n) == 0.0
    m.fails = False
    run(m)
    assert float(m.n) == runs


def test_a_broadcast_argument_that_is_no_array_stays_what_it_is():
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
    nnx.jit(by_scan(lambda m: add(m, 1.0)))(m)
    nnx.grad(lambda m: nnx.cond(True, lambda m: m.n * 2, lambda m: m.n, m), nnx.Variable)(m)
    assert kept_traces() == 0


def test_debugging_without_jit_runs_the_body_in_python():
    run, m = by_scan(lambda m: add(m, 1.0)), counter()
    run(m)
    Traced.times = 0
    with jax.disable_jit():
        run(m)
    assert Traced.times >= 3


def test_other_axis_rules_are_another_trace():
    run, m = by_scan(lambda m: add(m, 1.0)), counter()
    run(m)
    with nnx.logical_axis_rules([("embed", None)]):
        run(m)
    assert kept_traces() == 2
