"""`nnx.jit`: where Modules and Contexts may stand in the arguments, and what comes back is the same object."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models import Linear, linear
from tests.transforms.jit_models import Batch, Counter, Pair, increment

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


def test_contexts_anywhere_in_the_arguments_draw_new_keys_every_call():
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


def test_calls_with_and_without_sharing_are_distinguished():
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
