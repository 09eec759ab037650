"""Donation: exactly the buffers that a function replaces, and never one that something else still needs."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.checks import library_functions
from tests.models import linear
from tests.transforms.jit_models import Pair


def replace_kernel(m, x=1.0):
    m.kernel = m.kernel + x


def address(x):
    """Where an array is: a donated buffer holds the new value. (Whoever holds the old array keeps it from donation.)"""
    return x.unsafe_buffer_pointer()


def test_donating_a_module_donates_exactly_the_replaced_buffers():
    model = linear()
    kernel, bias = address(model.kernel), model.bias
    expected = np.array(model.kernel, copy=True) + 1
    nnx.jit(replace_kernel, donate_argnums=0)(model)
    assert address(model.kernel) == kernel and model.bias is bias
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
    kernel, other_kernel = address(model.kernel), address(other.kernel)

    @nnx.jit(donate_argnames="model")
    def f(*, model, other):
        replace_kernel(model)
        replace_kernel(other)

    f(model=model, other=other)
    assert address(model.kernel) == kernel and address(other.kernel) != other_kernel


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


# Two Array objects with one buffer


def alias(x):
    """Another Array object with the same buffer."""
    other = jax.device_put(x, *x.devices())
    assert other is not x and other.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
    return other


def pair(a, b):
    return nnx.Dict(a=nnx.Param(a), b=nnx.Param(b))


def change_a(m, x=1.0):
    m.a = m.a + 1


def read_b(m, x=1.0):
    m.a = m.a + 1 + 0 * m.b


def add_to_a(m, x):
    m.a = m.a + 1 + x


def change_both(m, x=1.0):
    m.a = m.a + 1
    m.b = m.b * 1


BODIES = [change_a, read_b, change_both]


@pytest.mark.parametrize("body", BODIES)
def test_two_cells_with_one_buffer_are_both_usable(body):
    x = jnp.ones(3)
    model = pair(x, alias(x))
    nnx.jit(body, donate_argnums=0)(model)
    np.testing.assert_array_equal(model.a, 2 * np.ones(3))
    np.testing.assert_array_equal(model.b, np.ones(3))


@pytest.mark.parametrize("body", [read_b, change_both])  # XLA does not see what a function does not use
def test_a_cell_made_an_alias_between_calls_is_usable(body):
    model, step = pair(jnp.zeros(3), jnp.ones(3)), nnx.jit(body, donate_argnums=0)
    for i in range(1, 4):
        step(model)
        step(model)
        model.b = alias(model.a)
        step(model)
        np.testing.assert_array_equal(model.a, np.full(3, 3.0 * i))
        np.testing.assert_array_equal(model.b, np.full(3, 3.0 * i - 1))


def test_data_with_the_buffer_of_a_cell_are_usable():
    model, step = pair(jnp.zeros(3), jnp.ones(3)), nnx.jit(add_to_a, donate_argnums=0)
    for i in range(3):
        x = alias(model.a)
        step(model, x)
        np.testing.assert_array_equal(x, np.full(3, 2.0**i - 1))
        np.testing.assert_array_equal(model.a, np.full(3, 2.0 ** (i + 1) - 1))


def test_donated_data_with_one_buffer_are_both_usable():
    step = nnx.jit(lambda m, x, y: (x + 1, y + 2), donate_argnums=(1, 2))
    for _ in range(2):
        x = jnp.ones(3)
        first, second = step(linear(), x, alias(x))
        np.testing.assert_array_equal(first, 2 * np.ones(3))
        np.testing.assert_array_equal(second, 3 * np.ones(3))


def test_an_alias_inside_a_pytree_is_usable():
    x = jnp.ones(3)
    model = nnx.Dict(a=nnx.Param({"k": x}), b=nnx.Param(alias(x)))

    @nnx.jit(donate_argnums=0)
    def step(m):
        m.a = {"k": m.a["k"] + 1}

    for i in range(2, 4):
        step(model)
        np.testing.assert_array_equal(model.a["k"], np.full(3, float(i)))
        np.testing.assert_array_equal(model.b, np.ones(3))


def test_two_models_in_turns_are_both_donated_and_usable():
    step = nnx.jit(change_a, donate_argnums=0)
    first, second = pair(jnp.zeros(3), jnp.ones(3)), pair(jnp.zeros(3), jnp.ones(3))
    addresses = [address(first.a), address(second.a)]
    for i in range(1, 4):
        for model, before in zip((first, second), addresses):
            step(model)
            assert address(model.a) == before and model.a[0] == i


def test_repeated_donated_step_enters_one_function_of_the_library():
    model, step = pair(jnp.zeros(3), jnp.ones(3)), nnx.jit(change_a, donate_argnums=0)
    step(model, jnp.ones(3))
    model.b, x = jnp.ones(3), jnp.ones(3)
    assert len(library_functions(lambda: step(model, x))) == 1  # nothing asks the arrays for their pointers


def test_a_donated_function_keeps_no_array_alive():
    model, step = pair(jnp.zeros(3), jnp.ones(3)), nnx.jit(change_a, donate_argnums=0)
    step(model, jnp.ones(4))
    arrays = [weakref.ref(model.a), weakref.ref(model.b)]
    model.a, model.b = 0.0, 0.0
    gc.collect()
    assert [ref() for ref in arrays] == [None, None]


def test_a_donated_function_can_turn_a_value_into_a_tree():
    model = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    sow = nnx.jit(lambda m: m.sow(nnx.Intermediate, "sown", m.w), donate_argnums=0)
    replace = nnx.jit(lambda m: setattr(m, "w", {"a": m.w, "b": (m.w + 1,)}), donate_argnums=0)
    sow(model)
    assert model.pop_state(nnx.Intermediate)["sown"].value[0].tolist() == [1.0, 1.0]
    replace(model)
    assert model.w["b"][0].tolist() == [2.0, 2.0] and model.w["a"].tolist() == [1.0, 1.0]


# Different shapes replace different buffers


def replace_by_shape(m, x):
    if x.shape[0] == 2:
        m.kernel = m.kernel + 1
    else:
        m.bias = m.bias + 1


def test_alternating_shapes_under_donation_settle():
    step, model = nnx.jit(replace_by_shape, donate_argnums=0), linear(0, 3, 3)
    for n in (2, 3, 2, 3):
        step(model, jnp.ones(n))
    traces = step.trace_count
    for n in (2, 3, 2, 3, 2):
        step(model, jnp.ones(n))
    assert step.trace_count == traces


def test_the_unchanged_buffer_of_the_other_shape_is_never_donated():
    step, model = nnx.jit(replace_by_shape, donate_argnums=0), linear(0, 3, 3)
    for n in (2, 3, 2, 3):
        kernel, bias = address(model.kernel), address(model.bias)
        step(model, jnp.ones(n))
        assert (address(model.kernel), address(model.bias)) == (kernel, bias)
        assert not model.kernel.is_deleted() and not model.bias.is_deleted()


# A model and its clone


def test_a_model_and_its_clone_in_one_donated_call():
    @nnx.jit(donate_argnums=(0, 1))
    def step(m, target):
        m.kernel = m.kernel + 1
        target.kernel = target.kernel * 0.5 + m.kernel * 0.5

    model = linear(0, 3, 3)
    start = np.asarray(model.kernel)
    target = model.clone()
    step(model, target)
    np.testing.assert_allclose(model.kernel, start + 1, rtol=1e-6)
    np.testing.assert_allclose(target.kernel, start + 0.5, rtol=1e-6)
    step(model, target)
    np.testing.assert_allclose(model.kernel, start + 2, rtol=1e-6)


def test_a_donated_model_whose_clone_is_passed_undonated():
    @nnx.jit(donate_argnums=0)
    def step(m, reference):
        m.kernel = m.kernel + reference.kernel

    model = linear(0, 3, 3)
    reference = model.clone()
    start = np.asarray(model.kernel)
    step(model, reference)
    np.testing.assert_allclose(reference.kernel, start)
    np.testing.assert_allclose(model.kernel, 2 * start, rtol=1e-6)
