"""A repeated call of a jitted function is made from a plan; whatever differs from the earlier call must be noticed."""

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import nnx


class Counter(nnx.Module):
    def __init__(self, start: int = 0):
        self.count = nnx.Variable(jnp.array(start))


@nnx.jit
def add(a, b=None, *, by: Any = 1, ctx=None, other_ctx=None) -> Any:
    """Adds to one or two counters, and tells what it was given."""
    a.count += by
    if b is not None:
        b.count += 10 * by
    one = ctx is other_ctx
    return a is b, one, None if ctx is None else jax.random.bits(ctx.make_rng("noise"))


def test_two_modules_by_position_and_by_name():
    a, b = Counter(), Counter()
    for _ in range(3):
        add(a, b, by=jnp.array(2))
    for _ in range(3):
        add(a=a, b=b, by=jnp.array(2))
    for _ in range(3):
        add(by=jnp.array(2), b=b, a=a)
    assert (int(a.count), int(b.count)) == (18, 180)


def test_modules_that_change_places():
    a, b = Counter(), Counter()
    for _ in range(3):
        add(a, b=b)
        add(b, b=a)
    assert int(a.count) == int(b.count) == 33


def test_one_module_in_both_places_is_one_module_inside():
    a, b = Counter(), Counter()
    for _ in range(2):
        assert add(a, b)[0] == False  # noqa: E712  (the output of a jitted function is an array)
    for _ in range(2):
        assert add(a, a)[0] == True  # noqa: E712
    assert int(a.count) == 2 + 2 * 11


def test_one_context_in_both_places_is_one_context_inside():
    a, first, second = Counter(), nnx.context(noise=0), nnx.context(noise=1)
    for _ in range(2):
        assert add(a, ctx=first, other_ctx=second)[1] == False  # noqa: E712
    for _ in range(2):
        assert add(a, ctx=first, other_ctx=first)[1] == True  # noqa: E712


def test_keys_differ_from_call_to_call_and_repeat_with_the_seed():
    def draw(count):
        a, ctx = Counter(), nnx.context(noise=3)
        return [int(add(a, by=jnp.array(1), ctx=ctx)[2]) for _ in range(count)]

    keys = draw(5)
    assert len(set(keys)) == 5 and draw(5) == keys


def test_another_flag_is_another_function():
    @nnx.jit
    def apply(counter, ctx):
        counter.count += 1
        return ctx.get_flag("mode")

    counter = Counter()
    for mode in (1, 1, 2, 2, 1):
        assert apply(counter, nnx.context(noise=0, flags={"mode": mode})) == mode
    assert apply.trace_count == 2 and int(counter.count) == 5


def test_a_new_attribute_of_one_of_two_modules_is_seen():
    @nnx.jit
    def total(a, b):
        b.count += 1
        return a.count + sum(getattr(module, "extra", 0) for module in (a, b))

    a, b = Counter(), Counter()
    for _ in range(2):
        assert total(a, b) == 0
    b.extra = nnx.Variable(jnp.array(5))
    assert total(a, b) == 5
    del b.extra
    assert total(a, b) == 0


def test_a_failing_call_leaves_both_modules_and_the_next_one_works():
    @nnx.jit
    def divide(a, b, *, x):
        a.count += 1
        b.count += 1
        return x @ jnp.ones(3)

    a, b = Counter(), Counter()
    for _ in range(2):
        divide(a, b, x=jnp.ones(3))
    with pytest.raises(TypeError):
        divide(a, b, x=jnp.ones(4))
    assert divide(a, b, x=jnp.ones(3)) == 3
    assert int(a.count) == int(b.count) == 3


def test_under_a_raw_vmap_writing_is_an_error_and_leaks_nothing():
    a, b = Counter(), Counter()
    for _ in range(2):
        add(a, b, by=jnp.array(1))
    with pytest.raises(nnx.TraceContextError, match="Cannot mutate Module from different trace level"):
        jax.vmap(lambda by: add(a, b, by=by)[0])(jnp.arange(3))
    assert (int(a.count), int(b.count)) == (2, 20)


def test_a_jitted_function_is_freed_though_its_module_lives_on():
    a, b = Counter(), Counter()

    def use():
        def step(a, b):
            a.count += 1

        lifted = nnx.jit(step)
        for _ in range(3):
            lifted(a, b)
            lifted(a, b=b)
        return weakref.ref(step)

    step = use()
    gc.collect()
    assert step() is None
    assert int(a.count) == 6


def test_modules_are_freed_though_their_jitted_function_lives_on():
    a, b = Counter(), Counter()
    for _ in range(3):
        add(a, b, by=jnp.array(1))
    weak = weakref.ref(a), weakref.ref(b)
    gc.disable()
    try:
        del a, b
        assert weak[0]() is None and weak[1]() is None
    finally:
        gc.enable()


def test_making_modules_between_calls_compiles_nothing():
    a, b = Counter(), Counter()
    before = add.trace_count
    for _ in range(4):
        add(a, b, by=jnp.array(1))
        Counter().more = Counter()
    assert add.trace_count <= before + 1 and int(a.count) == 4


class Stepper(Counter):
    def step(self, by):
        self.count += by
        return self.count


def test_bound_methods_and_modules_as_the_function():
    stepper = Stepper()
    step: Any = nnx.jit(stepper.step)
    assert [int(step(jnp.array(by))) for by in (1, 2, 3, 4)] == [1, 3, 6, 10]
    assert int(step(by=jnp.array(5))) == int(step(by=jnp.array(0))) == int(stepper.count) == 15
    assert step.trace_count <= 2  # by position and by name


def test_repeated_donated_call_donates_only_what_it_replaces():
    class Pair(nnx.Module):
        def __init__(self):
            self.changing, self.constant = nnx.Variable(jnp.zeros(4)), nnx.Variable(jnp.ones(4))

    @nnx.jit(donate_argnums=0)
    def step(pair, x):
        pair.changing += pair.constant * x
        return pair.changing.sum()

    pair = Pair()
    constant = pair.constant
    address = pair.changing.unsafe_buffer_pointer()
    for i in range(1, 5):
        assert float(step(pair, jnp.ones(()))) == 4 * i
        assert pair.changing.unsafe_buffer_pointer() == address and pair.constant is constant
    pair.changing = pair.constant  # one buffer in two places is not given away
    assert float(step(pair, jnp.ones(()))) == 8
    assert not constant.is_deleted() and pair.constant.tolist() == [1] * 4


def count_up(counter, by):
    counter.count += by


def test_donated_call_at_another_trace_level_donates_nothing():
    step, counter = nnx.jit(count_up, donate_argnums=0), Counter()
    for _ in range(2):
        step(counter, jnp.array(1))
    count = counter.count
    with pytest.raises(nnx.TraceContextError):
        jax.vmap(lambda by: step(counter, by))(jnp.arange(3))
    assert not count.is_deleted() and int(counter.count) == 2


def test_clear_cache_forgets_what_repeated_calls_use():
    def run(**options):
        step, counter = nnx.jit(count_up, **options), Counter()
        for _ in range(3):
            step(counter, jnp.array(1))
        before = step.trace_count
        step.clear_cache()
        step(counter, jnp.array(1))
        return int(counter.count), step.trace_count - before

    assert run() == run(donate_argnums=0) == (4, 1)


def test_a_static_list_changed_in_place_between_repeated_calls_is_noticed():
    class Scaled(Counter):
        def __init__(self):
            super().__init__()
            self.by = [1, 2]

    @nnx.jit
    def step(module, x):
        module.count += sum(module.by)
        return x * module.by[0]

    module, x = Scaled(), jnp.array(1)
    for _ in range(3):
        assert step(module, x) == 1
    module.by[0] = 5
    for _ in range(2):
        assert step(module, x) == 5
    assert int(module.count) == 3 * 3 + 2 * 7 and step.trace_count == 2


def test_repeated_calls_distinguish_their_arguments():
    model = nnx.Dict(n=nnx.Variable(jnp.array(0.0)))

    @nnx.jit
    def add(m, x, y=None):
        total = x["a"] if isinstance(x, dict) else x
        m.n = m.n + total + (0 if y is None else 10 * y)

    one = jnp.array(1.0)
    calls = [(1, ({"a": one},)), (2, (one,)), (3, (one,)), (14, (one, one)), (25, (one, one)), (26, (one,))]
    for expected, args in calls:
        add(model, *args)
        assert float(model.n) == expected
    assert add.trace_count == 3
