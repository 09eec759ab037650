"""`nnx.jit`: where Modules may stand, what comes back from the body, the options of `jax.jit`, and inspection."""

import functools
import inspect
import threading
import typing
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import nnx


class Count(nnx.Variable):
    pass


class Linear(nnx.Module):
    def __init__(self, din, dout, *, ctx):
        self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (din, dout)), ("din", "dout"))
        self.bias = nnx.Param(jnp.zeros((dout,)))
        self.count = Count(0)

    def __call__(self, x):
        self.count += 1
        return x @ self.kernel + self.bias

    def shifted(self, x, by):
        self.count += 10
        return self(x) + by


class Counter(nnx.Module):
    def __init__(self, start=0):
        self.count = Count(jnp.asarray(start))

    @nnx.jit
    def bump(self, by):
        self.count += by
        return self.count

    @nnx.jit(static_argnums=1)
    def repeat(self, times):
        for _ in range(times):
            self.count += 1

    @nnx.jit
    def __call__(self, x, *, scale=1):
        self.count += 1
        return x * scale


class Pair(nnx.Module):
    def __init__(self, left=1, right=2):
        self.left = Counter(left)
        self.right = Counter(right)
        self.mode = "train"


class Batch(typing.NamedTuple):
    model: typing.Any
    x: typing.Any


def linear(seed=0, din=2, dout=3):
    return Linear(din, dout, ctx=nnx.context(seed))


def increment(model):
    model.count += 1


# Modules anywhere in the arguments


def test_a_module_passed_by_position_is_updated_in_place():
    model, x = linear(), jnp.ones((1, 2))
    expected = x @ model.kernel + model.bias
    y = nnx.jit(lambda m, x: m(x))(model, x)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    assert model.count == 1 and not isinstance(model.count, jax.core.Tracer)


def test_a_module_passed_by_keyword_is_updated_in_place():
    model = linear()
    nnx.jit(lambda x, *, model: model(x))(jnp.ones((1, 2)), model=model)
    assert model.count == 1


@pytest.mark.parametrize(
    "wrap, unwrap",
    [
        (lambda m: [1.0, m], lambda tree: tree[1]),
        (lambda m: {"a": {"b": m}}, lambda tree: tree["a"]["b"]),
        (lambda m: (jnp.ones(2), (m, None)), lambda tree: tree[1][0]),
        (lambda m: Batch(m, jnp.ones(2)), lambda tree: tree.model),
    ],
    ids=["list", "dict", "tuple", "namedtuple"],
)
def test_a_module_nested_in_a_pytree_is_updated_in_place(wrap, unwrap):
    model = linear()
    nnx.jit(lambda tree: increment(unwrap(tree)))(wrap(model))
    assert model.count == 1


def test_several_modules_in_one_call_are_all_updated():
    first, second, third = linear(0), linear(1), linear(2)

    @nnx.jit
    def step(a, many, *, last):
        a.count += 1
        many["x"].count += 2
        last.count += 3

    step(first, {"x": second}, last=third)
    assert (first.count, second.count, third.count) == (1, 2, 3)


def test_a_module_without_any_state_can_be_passed():
    class Doubler(nnx.Module):
        def __call__(self, x):
            return x * 2

    assert nnx.jit(lambda m, x: m(x))(Doubler(), 3) == 6


def test_functions_without_modules_are_plain_jit():
    assert nnx.jit(lambda x: {"y": x + 1})(1) == {"y": 2}


def test_default_arguments_and_variadic_arguments_work():
    @nnx.jit
    def f(*modules, scale=2.0, **more):
        for m in modules + tuple(more.values()):
            m.count += 1
        return len(modules) * scale

    a, b, c = linear(0), linear(1), linear(2)
    assert f(a, b, extra=c) == 4.0
    assert (a.count, b.count, c.count) == (1, 1, 1)


# Contexts


def test_contexts_may_stand_anywhere_and_give_new_keys_every_call():
    ctx = nnx.context(noise=0)

    @nnx.jit
    def draw(tree, *, ctx):
        return jax.random.uniform(tree["ctx"].make_rng("noise")), jax.random.uniform(ctx.make_rng("noise"))

    values = [float(v) for _ in range(3) for v in draw({"ctx": ctx}, ctx=ctx)]
    assert len(set(values)) == 6
    assert draw.trace_count == 1


def test_one_context_passed_twice_is_one_context_inside():
    ctx = nnx.context(noise=0)
    seen = []

    @nnx.jit
    def draw(a, b):
        seen.append(a is b)

    draw(ctx, ctx)
    assert seen == [True]


def test_the_same_seed_gives_the_same_keys_through_the_same_calls():
    def run():
        ctx = nnx.context(noise=3)
        draw = nnx.jit(lambda ctx: jax.random.uniform(ctx.make_rng("noise"), (2,)))
        return np.concatenate([draw(ctx), draw(ctx)])

    np.testing.assert_array_equal(run(), run())


def test_the_callers_context_never_repeats_a_key_used_inside():
    ctx = nnx.context(noise=0)
    draw = nnx.jit(lambda ctx: jax.random.uniform(ctx.make_rng("noise")))
    values = [float(draw(ctx)), float(jax.random.uniform(ctx.make_rng("noise"))), float(draw(ctx))]
    assert len(set(values)) == 3


def test_context_flags_are_static_inside():
    f = nnx.jit(lambda ctx, x: x + 1 if ctx.get_flag("train") else x - 1)
    assert f(nnx.context(0, flags={"train": True}), 1) == 2
    assert f(nnx.context(0, flags={"train": False}), 1) == 0
    assert f(nnx.context(1, flags={"train": True}), 1) == 2
    assert f.trace_count == 2


def test_a_context_in_the_result_is_an_error():
    with pytest.raises((TypeError, ValueError), match="Context"):
        nnx.jit(lambda ctx: {"ctx": ctx})(nnx.context(0))


# Identity and sharing, in both directions


def test_one_module_passed_twice_is_one_module_inside():
    model, seen = linear(), []

    @nnx.jit
    def f(a, tree, *, c):
        seen.append(a is tree["b"] and a is c)
        a.count += 1
        tree["b"].count += 1
        return c.count

    assert f(model, {"b": model}, c=model) == 2
    assert seen == [True] and model.count == 2


def test_a_submodule_passed_beside_its_parent_is_that_submodule_inside():
    pair, seen = Pair(), []

    @nnx.jit
    def f(pair, left):
        seen.append(pair.left is left)
        left.count += 10

    f(pair, pair.left)
    assert seen == [True] and pair.left.count == 11


def test_distinct_modules_stay_distinct_inside():
    pair, seen = Pair(1, 1), []
    nnx.jit(lambda p: seen.append(p.left is p.right))(pair)
    assert seen == [False]


def test_shared_submodules_and_cycles_are_kept_inside():
    pair = Pair()
    pair.right = pair.left
    pair.left.parent = pair
    seen = []

    @nnx.jit
    def f(p):
        seen.append(p.right is p.left and p.left.parent is p)
        p.right.count += 1

    f(pair)
    assert seen == [True]
    assert pair.left.count == 2 and pair.left is pair.right and pair.left.parent is pair


def test_calls_with_and_without_sharing_are_told_apart():
    @nnx.jit
    def f(a, b):
        a.count += 1
        b.count += 1
        return a.count

    a, b = Counter(), Counter()
    assert f(a, b) == 1
    assert f(a, a) == 3
    assert f(a, b) == 4
    assert (a.count, b.count) == (4, 2)


def test_a_ref_is_one_cell_inside_and_outside():
    ref = nnx.Ref(nnx.Param(jnp.ones(2)))
    a, b = nnx.Dict(), nnx.Dict()
    a.w = ref
    b.w = ref

    @nnx.jit
    def f(a, b):
        a.w = a.w * 2
        return b.w

    np.testing.assert_array_equal(f(a, b), [2.0, 2.0])
    np.testing.assert_array_equal(b.w, [2.0, 2.0])
    assert a.w is b.w
    a.w = jnp.zeros(2)
    np.testing.assert_array_equal(b.w, [0.0, 0.0])


def test_an_input_module_returned_is_the_same_object():
    model = linear()

    @nnx.jit
    def f(m):
        m.count += 1
        return {"m": m, "again": [m]}

    out = f(model)
    assert out["m"] is model and out["again"][0] is model and model.count == 1
    out = f(model)
    assert out["m"] is model and model.count == 2


def test_an_input_submodule_returned_is_the_same_object():
    pair = Pair()
    left, count = nnx.jit(lambda p: (p.left, p.right.count))(pair)
    assert left is pair.left and count == 2


def test_a_cached_call_returns_the_module_of_that_call():
    f = nnx.jit(lambda m: m)
    first, second = linear(0), linear(1)
    assert f(first) is first
    assert f(second) is second
    assert f.trace_count == 1


def test_a_module_made_inside_comes_out_with_concrete_values():
    @nnx.jit
    def make(x):
        counter = Counter(3)
        counter.scale = nnx.Param(x * 2)
        return counter

    first, second = make(1.0), make(2.0)
    assert isinstance(first, Counter) and first is not second
    assert first.scale == 2.0 and second.scale == 4.0 and first.count == 3
    assert isinstance(second.variable("scale"), nnx.Param)
    first.count += 1
    assert first.count == 4 and second.count == 3


def test_a_new_module_that_holds_an_input_holds_that_very_object():
    class Wrapper(nnx.Module):
        def __init__(self, inner):
            self.inner = inner
            self.gain = nnx.Param(jnp.ones(()))

    wrap = nnx.jit(Wrapper)
    model, other = linear(), linear(1)
    wrapped = wrap(model)
    assert isinstance(wrapped, Wrapper) and wrapped.inner is model
    assert wrap(other).inner is other


def test_a_new_module_returned_twice_is_one_object():
    @nnx.jit
    def make():
        counter = Counter()
        return counter, {"same": counter}

    a, b = make()
    assert a is b["same"]


def test_a_module_built_under_jit_is_a_jitted_constructor():
    model = nnx.jit(lambda ctx: Linear(2, 3, ctx=ctx))(nnx.context(0))
    assert model.kernel.shape == (2, 3) and model.variable("kernel").sharding == ("din", "dout")
    model(jnp.ones((1, 2)))
    assert model.count == 1


# Everything that happens inside is there afterwards, on first and on cached calls


def check_on_first_and_cached_call(make, f, check, *args):
    """Runs `f` on three equal models: the first call traces, the others replay the compiled version."""
    jitted = nnx.jit(f)
    for seed in range(3):
        model = make(seed)
        jitted(model, *args)
        check(model, seed)
    assert jitted.trace_count == 1
    return jitted


def test_changed_values_are_written_back():
    def f(m):
        m.kernel = m.kernel * 0 + m.count

    def check(m, seed):
        np.testing.assert_array_equal(m.kernel, np.zeros((2, 3)))
        assert isinstance(m.variable("kernel"), nnx.Param) and m.variable("kernel").sharding == ("din", "dout")

    check_on_first_and_cached_call(linear, f, check)


def test_a_cell_that_changes_shape_and_dtype_is_written_back():
    def f(m):
        m.kernel = jnp.zeros((5,), jnp.int32)

    def check(m, seed):
        assert m.kernel.shape == (5,) and m.kernel.dtype == jnp.int32

    check_on_first_and_cached_call(linear, f, check)


def test_untouched_cells_keep_their_very_array():
    model = linear()
    kernel, bias = model.kernel, model.bias
    nnx.jit(increment)(model)
    assert model.kernel is kernel and model.bias is bias


def test_new_variables_appear():
    def f(m):
        m.ema = nnx.BatchStat(m.kernel + 1, ("a", "b"), note="new")

    def check(m, seed):
        np.testing.assert_array_equal(m.ema, m.kernel + 1)
        assert isinstance(m.variable("ema"), nnx.BatchStat)
        assert m.variable("ema").sharding == ("a", "b") and m.variable("ema").note == "new"

    check_on_first_and_cached_call(linear, f, check)


def test_new_bare_arrays_and_pytrees_appear_as_nodes():
    def f(m):
        m.buffer = jnp.ones(2)
        m.history = {"a": jnp.zeros(1), "b": [m.bias, 3]}

    def check(m, seed):
        assert set(m.filter(nnx.buffers)) == {"buffer"}
        np.testing.assert_array_equal(m.history["b"][0], m.bias)
        assert isinstance(m.history, dict) and isinstance(m.history["b"], list) and m.history["b"][1] == 3

    check_on_first_and_cached_call(linear, f, check)


def test_deleted_variables_disappear():
    def f(m):
        del m.bias

    check_on_first_and_cached_call(linear, f, lambda m, seed: pytest.raises(AttributeError, getattr, m, "bias"))


def test_a_popped_state_is_gone_and_returned():
    @nnx.jit
    def f(m):
        m.sow(nnx.Intermediate, "y", m.bias + 1)
        return m.pop_state(nnx.Intermediate)

    for seed in range(2):
        model = linear(seed)
        state = f(model)
        assert isinstance(state, nnx.State) and list(state) == ["y"]
        np.testing.assert_array_equal(state["y"].value[0], model.bias + 1)
        assert not hasattr(model, "y")
    assert f.trace_count == 1


def test_replaced_submodules_are_replaced():
    originals = {}

    def make(seed):
        pair = Pair(seed, seed + 1)
        originals[seed] = (pair.left, pair.right)
        return pair

    def f(p):
        p.left = Counter(7)

    def check(p, seed):
        left, right = originals[seed]
        assert p.left is not left and p.left.count == 7 and p.right is right
        assert left.count == seed  # the removed Module is as it was

    check_on_first_and_cached_call(make, f, check)


def test_a_submodule_changed_and_then_removed_keeps_its_change():
    originals = {}

    def make(seed):
        pair = Pair(seed, seed)
        originals[seed] = pair.left
        return pair

    def f(p):
        p.left.count += 5
        del p.left

    def check(p, seed):
        assert not hasattr(p, "left") and originals[seed].count == seed + 5

    check_on_first_and_cached_call(make, f, check)


def test_swapped_submodules_are_the_original_objects_swapped():
    originals = {}

    def make(seed):
        pair = Pair(seed, seed + 1)
        originals[seed] = (pair.left, pair.right)
        return pair

    def f(p):
        p.left, p.right = p.right, p.left

    check_on_first_and_cached_call(make, f, lambda p, seed: same((p.right, p.left), originals[seed]))


def same(found, expected):
    assert all(a is b for a, b in zip(found, expected, strict=True))


def test_submodules_made_shared_inside_are_shared_outside():
    def f(p):
        p.right = p.left
        p.right.count += 1

    def check(p, seed):
        assert p.left is p.right and p.left.count == seed + 1

    check_on_first_and_cached_call(lambda seed: Pair(seed, 9), f, check)


def test_a_module_of_one_argument_can_be_adopted_by_another():
    @nnx.jit
    def adopt(a, b):
        a.child = b
        b.count += 1

    for _ in range(2):
        a, b = Counter(), Counter()
        adopt(a, b)
        assert a.child is b and b.count == 1
    assert adopt.trace_count == 1


def test_new_submodules_inside_new_submodules_appear():
    def f(p):
        p.extra = Pair(5, 6)
        p.extra.left.inner = p.right
        p.items = [Counter(1), Counter(2)]

    def check(p, seed):
        assert p.extra.right.count == 6 and p.extra.left.inner is p.right
        assert isinstance(p.items, nnx.Sequence) and [int(c.count) for c in p.items] == [1, 2]
        p.extra.right.bump(1)
        assert p.extra.right.count == 7

    check_on_first_and_cached_call(lambda seed: Pair(), f, check)


def test_sequences_grow_and_shrink_inside():
    def make(seed):
        return nnx.Sequence([Counter(seed), Counter(10)])

    def f(items):
        items.append(Counter(20))
        del items[0]

    check_on_first_and_cached_call(make, f, lambda items, seed: same_value([int(c.count) for c in items], [10, 20]))


def test_changed_static_attributes_are_changed():
    def f(p):
        p.mode = "eval" if p.mode == "train" else "train"

    def check(p, seed):
        assert p.mode == "eval"

    jitted = check_on_first_and_cached_call(lambda seed: Pair(), f, check)
    pair = Pair()
    jitted(pair)
    jitted(pair)
    assert pair.mode == "train" and jitted.trace_count == 2


def test_static_lists_mutated_inside_are_mutated_outside():
    def make(seed):
        pair = Pair()
        pair.log = ["start"]
        return pair

    def f(p):
        p.log.append("step")

    check_on_first_and_cached_call(make, f, lambda p, seed: same_value(p.log, ["start", "step"]))


def same_value(found, expected):
    assert found == expected and type(found) is type(expected)


def test_new_static_attributes_appear_and_deleted_ones_disappear():
    def f(p):
        p.note = ("a", 1)
        del p.mode

    def check(p, seed):
        assert p.note == ("a", 1) and not hasattr(p, "mode")

    check_on_first_and_cached_call(lambda seed: Pair(), f, check)


def test_a_variable_that_changes_type_inside_has_the_new_type_outside():
    def f(m):
        value = m.bias
        del m.bias
        m.bias = nnx.BatchStat(value)

    check_on_first_and_cached_call(
        linear, f, lambda m, seed: same_value(isinstance(m.variable("bias"), nnx.BatchStat), True)
    )


def test_a_ref_tied_inside_is_tied_outside():
    def f(p):
        ref = nnx.Ref(nnx.Param(jnp.ones(2)))
        p.left.w = ref
        p.right.w = ref

    def check(p, seed):
        p.left.w = jnp.zeros(2)
        np.testing.assert_array_equal(p.right.w, np.zeros(2))

    check_on_first_and_cached_call(lambda seed: Pair(), f, check)


def test_alternating_shapes_may_change_different_things():
    @nnx.jit
    def f(m, x):
        if x.shape[0] == 2:
            m.count += 1
        else:
            m.bias = m.bias + 1
        return x.sum()

    model = linear()
    for n in (2, 3, 2, 3, 2):
        f(model, jnp.ones(n))
    assert model.count == 3 and model.bias[0] == 2 and f.trace_count == 2


def test_python_numbers_in_variables_do_not_retrace():
    model = linear()
    step = nnx.jit(increment)
    for _ in range(4):
        step(model)
    assert model.count == 4 and step.trace_count == 1


def test_static_values_changed_outside_are_seen_by_the_next_call():
    pair = Pair()
    pair.log, pair.scale = [1], 1
    f = nnx.jit(lambda p, x: x * len(p.log) * p.scale)
    assert f(pair, 2) == 2
    pair.log.append(2)
    assert f(pair, 2) == 4 and f.trace_count == 2
    pair.scale = 1.0
    assert f(pair, 2).dtype == jnp.float32 and f.trace_count == 3
    pair.log.pop()
    pair.scale = 1
    assert f(pair, 2) == 2 and f.trace_count == 3


def test_static_lists_are_not_shared_with_the_module_inside():
    pair, kept = Pair(), []
    pair.log = [1]

    @nnx.jit
    def f(p):
        kept.append(p.log)
        p.log.append(2)

    f(pair)
    kept[0].append(3)
    assert pair.log == [1, 2]


def test_a_bound_method_kept_as_a_static_value_is_bound_to_the_module_inside():
    class Hooked(Counter):
        def __init__(self):
            super().__init__()
            self.hook = self.grow

        def grow(self):
            self.count += 5

    model = Hooked()
    step = nnx.jit(lambda m: m.hook())
    step(model)
    step(model)
    assert model.count == 10 and step.trace_count == 1


def test_frozen_modules_are_written_by_transforms():
    @nnx.dataclass(frozen=True)
    class Frozen(nnx.Module):
        w: jax.Array = nnx.param_field()

    model = Frozen(jnp.ones(2))
    with pytest.raises(AttributeError):
        model.w = jnp.zeros(2)

    @nnx.jit
    def f(m):
        m.update_state(jax.tree.map(lambda w: w + 1, m.filter(nnx.Param)))

    f(model)
    np.testing.assert_array_equal(model.w, [2.0, 2.0])


def test_refs_are_untied_and_rebound_inside_as_outside():
    def make(seed):
        pair = Pair()
        pair.left.w = pair.right.w = nnx.Ref(nnx.Param(jnp.ones(())))
        pair.third = Counter()
        pair.third.w = pair.fourth = nnx.Ref(nnx.Param(jnp.zeros(())))
        return pair

    def f(p):
        del p.left.w
        p.right.w = p.right.w + 1
        p.third.w = nnx.Ref(nnx.Param(p.right.w * 10))

    def check(p, seed):
        assert not hasattr(p.left, "w") and p.right.w == 2 and p.third.w == 20 and p.fourth == 0

    check_on_first_and_cached_call(make, f, check)


# stateful=False


def test_stateful_false_discards_the_changes():
    model = linear()
    kernel = model.kernel

    @nnx.jit(stateful=False)
    def f(m):
        m.count += 1
        m.kernel = m.kernel + 1
        m.extra = nnx.Param(jnp.ones(1))
        m.note = "new"
        return m.count

    assert f(model) == 1
    assert f(model) == 1
    assert model.count == 0 and model.kernel is kernel
    assert not hasattr(model, "extra") and not hasattr(model, "note")


def test_stateful_false_returns_changed_modules_as_new_ones():
    model = linear()

    @nnx.jit(stateful=False)
    def f(m):
        m.count += 1
        return m

    new = f(model)
    assert new is not model and new.count == 1 and model.count == 0
    np.testing.assert_array_equal(new.kernel, model.kernel)


# Modules and bound methods as the function; decorators


def test_a_module_can_be_the_function():
    model, x = linear(), jnp.ones((1, 2))
    forward = nnx.jit(model)
    y = forward(x)
    np.testing.assert_allclose(y, x @ model.kernel + model.bias, rtol=1e-6)
    forward(x)
    assert model.count == 2 and forward.trace_count == 1


def test_a_bound_method_can_be_the_function():
    model, x = linear(), jnp.ones((1, 2))
    shifted = nnx.jit(model.shifted, static_argnums=1)
    y = shifted(x, 2)
    np.testing.assert_allclose(y, x @ model.kernel + model.bias + 2, rtol=1e-6)
    assert model.count == 11


def test_a_lifted_module_sees_later_changes_of_the_module():
    model, x = linear(), jnp.ones((1, 2))
    forward = nnx.jit(model)
    forward(x)
    forward(x)  # from here on the counter, a Python int at first, is an array
    traced = forward.trace_count
    model.bias = model.bias + 5
    np.testing.assert_allclose(forward(x), x @ model.kernel + 5, rtol=1e-6)
    assert forward.trace_count == traced


def test_a_bound_method_of_a_submodule_lifts_that_submodule():
    pair = Pair()
    pair.left.inner = linear()
    nnx.jit(pair.left.inner.shifted)(jnp.ones((1, 2)), 1.0)
    assert pair.left.inner.count == 11


def test_jit_decorates_methods():
    counter = Counter()
    assert counter.bump(2) == 2
    assert counter.bump(by=3) == 5
    assert counter(2.0, scale=3) == 6.0
    assert counter.count == 6


def test_jit_decorates_methods_with_options():
    counter = Counter()
    counter.repeat(3)
    assert counter.count == 3


def test_a_decorated_method_is_reached_through_class_and_super():
    class Child(Counter):
        @nnx.jit
        def bump(self, by):
            return super().bump(by * 2)

    child = Child()
    assert child.bump(1) == 2
    assert Counter.bump(child, 1) == 3


def test_decorated_methods_share_one_trace_between_equal_instances():
    class Local(nnx.Module):
        def __init__(self):
            self.count = Count(jnp.zeros(()))

        @nnx.jit
        def bump(self):
            self.count += 1

    for _ in range(3):
        Local().bump()
    assert Local.bump.trace_count == 1


def test_jit_keeps_name_docstring_and_signature():
    def forward(model: Linear, x, *, scale: float = 1.0) -> jax.Array:
        """Runs the model."""
        return model(x) * scale

    for wrapped in (nnx.jit(forward), nnx.jit(static_argnames="scale")(forward)):
        assert wrapped.__name__ == "forward" and wrapped.__doc__ == "Runs the model."
        assert wrapped.__module__ == __name__ and wrapped.__wrapped__ is forward
        assert inspect.signature(wrapped) == inspect.signature(forward)


def test_jit_works_through_functools_partial():
    model = linear()
    step = functools.partial(nnx.jit, static_argnames="n")(lambda m, n: [increment(m) for _ in range(n)] and None)
    step(model, n=2)
    assert model.count == 2
    nnx.jit(functools.partial(Linear.shifted, by=2.0))(model, jnp.ones((1, 2)))
    assert model.count == 13


# Options


def test_every_option_of_jax_jit_is_an_option():
    ours = set(inspect.signature(nnx.jit).parameters)
    theirs = set(inspect.signature(jax.jit).parameters) - {"device", "backend"}
    assert theirs <= ours


def test_static_argnums_count_module_arguments():
    @nnx.jit(static_argnums=(1, 2))
    def f(m, n, flag, x):
        assert isinstance(n, int) and flag is True
        m.count += n
        return x * n

    model = linear()
    assert f(model, 3, True, 2.0) == 6.0
    assert model.count == 3 and f.trace_count == 1
    f(model, 4, True, 2.0)
    assert model.count == 7 and f.trace_count == 2


def test_a_static_module_is_an_error_that_shows_the_way():
    with pytest.raises(ValueError, match="Modules are never static"):
        nnx.jit(lambda m: m.count, static_argnums=0)(linear())


def test_negative_static_argnums_count_from_the_end():
    f = nnx.jit(lambda m, n: jnp.zeros(n), static_argnums=-1)
    assert f(linear(), 3).shape == (3,)


def test_static_argnames_work_by_keyword_and_by_position():
    @nnx.jit(static_argnames=("mode",))
    def f(m, mode="add"):
        m.count = m.count + 1 if mode == "add" else m.count - 1

    model = linear()
    f(model)
    f(model, mode="add")
    f(model, "sub")
    f(model, mode="sub")
    assert model.count == 0


def test_keep_unused_inline_and_compiler_options_are_accepted():
    f = nnx.jit(lambda m, x: increment(m), keep_unused=True, inline=True, compiler_options={})
    model = linear()
    f(model, jnp.ones(3))
    assert model.count == 1


def test_keep_unused_keeps_unused_arguments():
    def f(m, x):
        return m.bias

    model, x = linear(), jnp.ones((64,))
    kept = nnx.jit(f, keep_unused=True).lower(model, x).compile().memory_analysis().argument_size_in_bytes
    dropped = nnx.jit(f).lower(model, x).compile().memory_analysis().argument_size_in_bytes
    assert kept - dropped >= x.nbytes


# Donation


def replace_kernel(m, x=1.0):
    m.kernel = m.kernel + x


def test_donating_a_module_donates_exactly_the_replaced_buffers():
    model = linear()
    kernel, bias = model.kernel, model.bias
    expected = np.asarray(kernel) + 1
    nnx.jit(replace_kernel, donate_argnums=0)(model)
    assert kernel.is_deleted() and not bias.is_deleted()
    np.testing.assert_allclose(model.kernel, expected)
    np.testing.assert_array_equal(model.bias, np.zeros(3))


def test_a_donated_module_stays_usable_call_after_call():
    model = linear()
    step = nnx.jit(replace_kernel, donate_argnums=(0,))
    start = np.asarray(model.kernel)
    for i in range(1, 4):
        step(model, 2.0)
        np.testing.assert_allclose(model.kernel, start + 2 * i, rtol=1e-6)
    assert step.trace_count <= 2  # one to find the changed set, at most one more to compile with it


def test_donate_argnames_name_module_arguments():
    model, other = linear(0), linear(1)
    kernel, other_kernel = model.kernel, other.kernel

    @nnx.jit(donate_argnames="model")
    def f(*, model, other):
        replace_kernel(model)
        replace_kernel(other)

    f(model=model, other=other)
    assert kernel.is_deleted() and not other_kernel.is_deleted()


def test_plain_arrays_are_donated_as_in_jax_jit():
    model, x = linear(), jnp.ones((4, 4))
    y = nnx.jit(lambda m, x: x + 1, donate_argnums=1)(model, x)
    assert x.is_deleted() and y[0, 0] == 2


def test_a_buffer_that_is_read_but_not_replaced_is_not_donated():
    model = linear()
    bias = model.bias

    @nnx.jit(donate_argnums=0)
    def f(m):
        m.kernel = m.kernel + m.bias

    f(model)
    assert not bias.is_deleted() and model.bias is bias


def test_a_buffer_in_two_cells_is_not_donated():
    pair = Pair()
    shared = jnp.ones((8,))
    pair.left.w = nnx.Param(shared)
    pair.right.w = nnx.Param(shared)

    @nnx.jit(donate_argnums=0)
    def f(p):
        p.left.w = p.left.w + 1

    f(pair)
    assert not shared.is_deleted()
    assert pair.left.w[0] == 2 and pair.right.w[0] == 1


def test_a_buffer_also_passed_undonated_is_not_donated():
    model = linear()
    kernel = model.kernel
    step = nnx.jit(replace_kernel, donate_argnums=0)
    step(model, kernel)
    assert not kernel.is_deleted()
    np.testing.assert_allclose(model.kernel, 2 * kernel)


def test_a_buffer_donated_in_one_call_and_shared_in_the_next_is_safe():
    model = linear()
    step = nnx.jit(replace_kernel, donate_argnums=0)
    step(model, jnp.ones((2, 3)))
    kernel = model.kernel
    step(model, kernel)
    assert not kernel.is_deleted()
    np.testing.assert_allclose(model.kernel, 2 * kernel)


def test_donating_a_ref_leaves_all_its_owners_usable():
    pair = Pair()
    ref = nnx.Ref(nnx.Param(jnp.ones((8,))))
    pair.left.w = ref
    pair.right.w = ref

    @nnx.jit(donate_argnums=0)
    def f(p):
        p.left.w = p.left.w + 1

    for i in range(2, 4):
        f(pair)
        assert pair.left.w[0] == i and pair.right.w[0] == i


def test_a_cell_that_moves_to_another_cell_is_safe_under_donation():
    pair = Pair()
    pair.left.w = nnx.Param(jnp.ones((4,)))
    pair.right.w = nnx.Param(jnp.full((4,), 2.0))

    @nnx.jit(donate_argnums=0)
    def swap(p):
        p.left.w, p.right.w = p.right.w, p.left.w

    swap(pair)
    assert pair.left.w[0] == 2 and pair.right.w[0] == 1
    swap(pair)
    assert pair.left.w[0] == 1 and pair.right.w[0] == 2


# Shardings, on a mesh of one device


def one_device_mesh():
    return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))


def test_in_shardings_accept_one_sharding_per_module():
    mesh = one_device_mesh()
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    model = linear()
    y = nnx.jit(lambda m, x: m(x), in_shardings=(whole, rows))(model, jnp.ones((4, 2)))
    assert y.shape == (4, 3) and model.count == 1
    assert set(y.sharding.device_set) == {jax.devices()[0]}


def test_in_shardings_accept_one_sharding_per_filter():
    mesh = one_device_mesh()
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    model = linear()
    f = nnx.jit(lambda m, x: m(x), in_shardings=({nnx.Param: rows, ...: whole}, whole))
    assert f(model, jnp.ones((4, 2))).shape == (4, 3) and model.count == 1


def test_in_shardings_reach_modules_inside_pytrees_and_pass_contexts_by():
    mesh = one_device_mesh()
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    model, x = linear(), jnp.ones((4, 2))

    def f(tree, ctx):
        return tree["m"](tree["x"]) + jax.random.uniform(ctx.make_rng("noise"))

    for sharding in (whole, {"m": whole, "x": rows}, {"m": {nnx.Param: rows, ...: whole}, "x": None}):
        y = nnx.jit(f, in_shardings=(sharding, None))({"m": model, "x": x}, nnx.context(noise=0))
        assert y.shape == (4, 3)
    assert model.count == 3


def test_in_shardings_count_no_static_arguments_and_no_bound_module():
    rows = NamedSharding(one_device_mesh(), PartitionSpec("data"))
    model, x = linear(), jnp.ones((4, 2))
    y = nnx.jit(lambda m, n, x: m(x) * n, static_argnums=1, in_shardings=(None, rows))(model, 2, x)
    np.testing.assert_allclose(y, 2 * (x @ model.kernel), rtol=1e-6)
    assert nnx.jit(model.__call__, in_shardings=(rows,))(x).shape == (4, 3)
    assert model.count == 2


def test_in_shardings_of_the_wrong_number_are_an_error_that_says_both():
    rows = NamedSharding(one_device_mesh(), PartitionSpec("data"))
    with pytest.raises(ValueError, match="in_shardings has 1 entries for a call with 2 arguments"):
        nnx.jit(lambda m, x: m(x), in_shardings=(rows,))(linear(), jnp.ones((4, 2)))


def test_out_shardings_place_plain_results():
    rows = NamedSharding(one_device_mesh(), PartitionSpec("data"))
    y = nnx.jit(lambda m, x: m(x), out_shardings=rows)(linear(), jnp.ones((4, 2)))
    assert y.sharding.is_equivalent_to(rows, y.ndim)


def test_out_shardings_accept_one_sharding_per_returned_module():
    rows = NamedSharding(one_device_mesh(), PartitionSpec("data"))
    model = nnx.jit(lambda ctx: Counter(jnp.ones((4,))), out_shardings=rows)(nnx.context(0))
    assert isinstance(model.count.sharding, NamedSharding) and model.count.sharding.is_equivalent_to(rows, 1)


def test_out_shardings_accept_one_sharding_per_filter():
    mesh = one_device_mesh()
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    make = nnx.jit(lambda ctx: Linear(2, 3, ctx=ctx), out_shardings={nnx.Param: rows, ...: whole})
    model = make(nnx.context(0))
    for value, expected in ((model.kernel, rows), (model.bias, rows), (model.count, whole)):
        assert isinstance(value.sharding, NamedSharding) and value.sharding.is_equivalent_to(expected, value.ndim)


# Inspection: lower, trace, eval_shape, clear_cache, trace_count, explain_recompiles


def test_lower_and_compile_leave_the_module_alone():
    model, x = linear(), jnp.ones((1, 2))
    step = nnx.jit(lambda m, x: m(x))
    lowered = step.lower(model, x)
    assert "dot" in lowered.as_text()
    assert lowered.compile().memory_analysis().argument_size_in_bytes >= model.kernel.nbytes
    assert model.count == 0


def test_a_compiled_step_can_be_called_with_the_module():
    model, x = linear(), jnp.ones((1, 2))
    compiled = nnx.jit(lambda m, x: m(x)).lower(model, x).compile()
    np.testing.assert_allclose(compiled(model, x), x @ model.kernel + model.bias, rtol=1e-6)
    assert model.count == 1


def test_lower_takes_abstract_modules_and_arrays():
    abstract = nnx.eval_shape(Linear, 2, 3, ctx=nnx.context(0))
    lowered = nnx.jit(lambda m, x: m(x)).lower(abstract, jax.ShapeDtypeStruct((1, 2), jnp.float32))
    assert lowered.compile() is not None
    assert isinstance(abstract.kernel, jax.ShapeDtypeStruct)


def test_trace_gives_the_jaxpr():
    model = linear()
    traced = nnx.jit(lambda m, x: m(x)).trace(model, jnp.ones((1, 2)))
    assert "dot_general" in str(traced.jaxpr)
    assert traced.lower().compile() is not None
    assert model.count == 0


def test_eval_shape_gives_the_results_shapes():
    model = linear()
    out = nnx.jit(lambda m, x: {"y": m(x)}).eval_shape(model, jnp.ones((5, 2)))
    assert out["y"].shape == (5, 3) and out["y"].dtype == jnp.float32
    assert model.count == 0


def test_trace_count_counts_traces():
    step = nnx.jit(lambda m, x: m(x))
    assert step.trace_count == 0
    model = linear()
    step(model, jnp.ones((1, 2)))
    step(model, jnp.ones((1, 2)))
    assert step.trace_count == 1
    step(model, jnp.ones((2, 2)))
    assert step.trace_count == 2


def test_clear_cache_makes_the_next_call_trace_again():
    model, calls = linear(), []

    @nnx.jit
    def f(m):
        calls.append(1)
        m.count += 1

    f(model)
    f(model)
    f.clear_cache()
    f(model)
    assert len(calls) == 2 and model.count == 3


def test_a_changed_structure_recompiles():
    pair = Pair()
    f = nnx.jit(lambda p: p.left.count + (0 if p.mode == "train" else 100))
    assert f(pair) == 1
    pair.mode = "eval"
    assert f(pair) == 101 and f.trace_count == 2
    pair.extra = nnx.Param(jnp.ones(()))
    f(pair)
    assert f.trace_count == 3
    pair.mode = "train"
    del pair.extra
    assert f(pair) == 1 and f.trace_count == 3  # the first version is still there


def test_explain_recompiles_names_the_static_path_and_both_values():
    pair = Pair()
    pair.left.mode = "fast"
    f = nnx.jit(lambda p: p.left.count, explain_recompiles=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(pair)
        f(pair)
    pair.left.mode = "slow"
    with pytest.warns(UserWarning, match="left/mode") as record:
        f(pair)
    message = " ".join(str(w.message) for w in record)
    assert "fast" in message and "slow" in message


def test_explain_recompiles_names_a_variable_that_came_or_went():
    pair = Pair()
    f = nnx.jit(lambda p: p.left.count, explain_recompiles=True)
    f(pair)
    pair.right.extra = nnx.Param(jnp.ones(()))
    with pytest.warns(UserWarning, match="right/extra"):
        f(pair)


def test_explain_recompiles_names_the_changed_argument_shape():
    f = nnx.jit(lambda m, x: m(x), explain_recompiles=True)
    model = linear()
    f(model, jnp.ones((5, 2)))
    with pytest.warns(UserWarning) as record:
        f(model, jnp.ones((7, 2)))
    message = " ".join(str(w.message) for w in record)
    assert "5,2" in message.replace(" ", "") and "7,2" in message.replace(" ", "")


def test_explain_recompiles_names_a_changed_shape_inside_the_module():
    f = nnx.jit(lambda m: m.bias.sum(), explain_recompiles=True)
    model = linear()
    f(model)
    model.bias = jnp.zeros((9,))
    with pytest.warns(UserWarning, match="bias") as record:
        f(model)
    assert "(9,)" in " ".join(str(w.message) for w in record) or "[9]" in " ".join(str(w.message) for w in record)


# Nesting and threads


def test_lifted_jit_nests_in_lifted_jit():
    inner = nnx.jit(lambda m, x: m(x))

    @nnx.jit
    def outer(m, x):
        y = inner(m, x)
        return inner(m, x) + y

    model, x = linear(), jnp.ones((1, 2))
    np.testing.assert_allclose(outer(model, x), 2 * (x @ model.kernel), rtol=1e-6)
    outer(model, x)
    assert model.count == 4


def test_structural_changes_pass_through_nested_jits():
    @nnx.jit
    def inner(p):
        p.mode = "eval"
        p.extra = Counter(4)
        p.left = p.right

    @nnx.jit
    def outer(p):
        inner(p)
        p.extra.count += 1

    for _ in range(2):
        pair = Pair()
        right = pair.right
        outer(pair)
        assert pair.mode == "eval" and pair.extra.count == 5 and pair.left is right is pair.right
    assert outer.trace_count == 1


def test_lifted_jit_works_inside_raw_jit_on_a_merged_module():
    model, x = linear(), jnp.ones((1, 2))
    step = nnx.jit(lambda m, x: m(x))

    @jax.jit
    def raw(pure, x):
        m = pure.merge()
        y = step(m, x)
        return y, m.partition()

    y, pure = raw(model.partition(), x)
    np.testing.assert_allclose(y, x @ model.kernel + model.bias, rtol=1e-6)
    assert pure.merge().count == 1 and model.count == 0


def test_raw_transforms_work_inside_a_lifted_jit():
    @nnx.jit
    def f(m, xs):
        m.count += 1
        ys = jax.vmap(lambda x: x @ m.kernel)(xs)
        slope = jax.grad(lambda s: (s * m.kernel).sum())(1.0)
        total, _ = jax.lax.scan(lambda c, x: (c + (x @ m.kernel).sum(), None), 0.0, xs)
        return ys, slope, total

    model, xs = linear(), jnp.ones((4, 2))
    ys, slope, total = f(model, xs)
    np.testing.assert_allclose(ys, xs @ model.kernel, rtol=1e-6)
    np.testing.assert_allclose(slope, model.kernel.sum(), rtol=1e-6)
    np.testing.assert_allclose(total, (xs @ model.kernel).sum(), rtol=1e-5)
    assert model.count == 1


def test_one_jitted_function_serves_several_threads():
    step = nnx.jit(increment)
    models = [linear(seed) for seed in range(4)]

    def work(model):
        for _ in range(25):
            step(model)

    threads = [threading.Thread(target=work, args=(m,)) for m in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [int(m.count) for m in models] == [25] * 4


def test_numpy_arrays_and_scalars_in_cells_come_and_go():
    class Buffers(nnx.Module):
        def __init__(self):
            self.table = np.arange(3)
            self.scale = nnx.Variable(2.0)

    module = Buffers()
    nnx.jit(lambda m: m.table.sum())(module)
    assert isinstance(module.table, np.ndarray) and module.scale == 2.0

    @nnx.jit
    def f(m):
        m.table = m.table + 1

    f(module)
    np.testing.assert_array_equal(module.table, [1, 2, 3])
