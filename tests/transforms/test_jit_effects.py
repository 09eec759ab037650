"""`nnx.jit`: everything that happens inside is there afterwards, on first and on cached calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models import linear
from tests.transforms.jit_models import Counter, Pair, increment


def check_on_first_and_cached_call(make, f, check, *args):
    """Runs `f` on three equal models: the first call traces, the others replay the compiled version."""
    jitted = nnx.jit(f)
    for seed in range(3):
        model = make(seed)
        jitted(model, *args)
        check(model, seed)
    assert jitted.trace_count == 1
    return jitted


def pairs_and_their_parts():
    """What makes a Pair from a seed, and the two Modules that each was made of."""
    parts = {}

    def make(seed):
        pair = Pair(seed, seed + 1)
        parts[seed] = (pair.left, pair.right)
        return pair

    return make, parts


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
    make, originals = pairs_and_their_parts()

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
    make, originals = pairs_and_their_parts()

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


@pytest.mark.parametrize("option", [{}, {"donate_argnums": 0}], ids=["plain", "donated"])
def test_alternating_shapes_with_different_change_sets(option):
    def f(m, x):
        if x.shape[0] == 2:
            m.kernel = m.kernel + 1
        elif x.shape[0] == 3:
            m.bias = m.bias + 1
        else:
            m.kernel = m.kernel * 1
            m.bias = m.bias - 1
        m.count += 1
        return x.sum() + m.bias[0]

    eager, lifted, step = linear(0, 3, 3), linear(0, 3, 3), nnx.jit(f, **option)
    for n in (2, 3, 2, 4, 3, 3, 2, 4, 2):
        expected = f(eager, jnp.ones(n))
        found = step(lifted, jnp.ones(n))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        for name in ("kernel", "bias", "count"):
            np.testing.assert_allclose(getattr(lifted, name), getattr(eager, name), rtol=1e-6)


def test_python_numbers_in_variables_do_not_retrace():
    model = linear()
    model.count = 0
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
