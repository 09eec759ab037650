"""State in numpy arrays can change in place; a transform treats such a change like any other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


def model():
    m = nnx.Dict(w=nnx.Param(jnp.ones(())), c=nnx.Variable(np.zeros(2)), d=nnx.Variable({"k": np.zeros(2)}))
    m.array = np.zeros(2)
    m.tree = [np.zeros(2), jnp.ones(())]
    return m


def add(m):
    """Changes numpy arrays in place, or, where they have become tracers, replaces them."""
    m.c += 1
    m.d["k"] += 1
    m.array += 1
    m.tree[0] += 1


def write_items(m):
    m.c[0] = 3
    m.d["k"][0] = 3
    m.array[0] = 3
    m.tree[0][0] = 3


def state(m):
    return [np.asarray(x).tolist() for x in (m.c, m.d["k"], m.array, m.tree[0])]


def scan(variables):
    return lambda f, m: nnx.scan(lambda m, c, x: (f(m), (c, x))[1], **variables)(m, 0.0, jnp.ones(2))


EAGER = {
    "grad": lambda f, m: nnx.grad(lambda m: (f(m), m.w)[1])(m),
    "vjp": lambda f, m: nnx.vjp(lambda m: (f(m), m.w)[1], m),
    "vmap": lambda f, m: nnx.vmap(lambda m, x: (f(m), x)[1])(m, jnp.ones(3)),
    "disabled jit": lambda f, m: without_jit(f, m),
}
"""Transforms inside which numpy arrays that take no part stay numpy arrays."""

TRACED = {
    "jit": lambda f, m: nnx.jit(f)(m),
    "remat": lambda f, m: nnx.remat(f)(m),
    "cond": lambda f, m: nnx.cond(True, f, lambda m: None, m),
    "while_loop": lambda f, m: nnx.while_loop(lambda m: m.c[0] < 1, lambda m: (f(m), m)[1], m),
}


def without_jit(f, m):
    with jax.disable_jit():
        nnx.jit(f)(m)


@pytest.mark.parametrize("name", [*EAGER, *TRACED])
def test_in_place_arithmetic_is_a_change_like_any_other(name):
    m = model()
    mine = (m.c, m.d, m.d["k"], m.array, m.tree, m.tree[0])
    {**EAGER, **TRACED}[name](add, m)
    assert state(m) == [[1.0, 1.0]] * 4
    assert all(not np.any(x["k"] if isinstance(x, dict) else x[0]) for x in mine)  # the caller's arrays: untouched


@pytest.mark.parametrize("name", EAGER)
def test_items_may_be_written_where_the_body_sees_numpy_arrays(name):
    m = model()
    EAGER[name](write_items, m)
    assert state(m) == [[3.0, 0.0]] * 4


@pytest.mark.parametrize("name", TRACED)
def test_items_of_traced_state_cannot_be_written_and_nothing_changes(name):
    m = model()
    with pytest.raises(TypeError, match="JAX arrays are immutable"):
        TRACED[name](write_items, m)
    assert state(m) == [[0.0, 0.0]] * 4


@pytest.mark.parametrize("transform", [nnx.grad, nnx.value_and_grad])
def test_in_place_changes_are_absent_with_stateful_false(transform):
    m = model()
    transform(lambda m: (add(m), write_items(m), m.w)[2], stateful=False)(m)
    nnx.vmap(lambda m, x: (add(m), write_items(m), x)[2], stateful=False)(m, jnp.ones(2))
    assert state(m) == [[0.0, 0.0]] * 4


@pytest.mark.parametrize("name", [*EAGER, *TRACED])
def test_in_place_changes_are_undone_by_an_exception(name):
    def fail(m):
        add(m)
        raise RuntimeError("stop")

    m = model()
    with pytest.raises(RuntimeError, match="stop"):
        {**EAGER, **TRACED}[name](fail, m)
    assert state(m) == [[0.0, 0.0]] * 4


@pytest.mark.parametrize(
    "change, error, message",
    [
        (add, ValueError, "the body changed 'array', which is under variable_broadcast"),
        (write_items, TypeError, "JAX arrays are immutable"),
    ],
)
def test_an_in_place_change_of_what_a_scan_broadcasts_is_an_error(change, error, message):
    m = model()
    with pytest.raises(error, match=message):
        scan({"variable_broadcast": ..., "variable_carry": None})(change, m)
    assert state(m) == [[0.0, 0.0]] * 4


def test_in_place_arithmetic_adds_up_over_the_steps_of_a_scan():
    m = model()
    scan({})(add, m)
    assert state(m) == [[2.0, 2.0]] * 4


def test_only_what_was_written_counts_as_changed():
    m = nnx.Dict(w=nnx.Param(jnp.ones(())), c=nnx.Variable(np.array([np.nan, 0.0])), d=nnx.Variable(np.zeros(2)))
    before = m.c

    def loss(m):
        m.d[0] = 0.0  # the value it has already
        return m.w

    nnx.grad(loss)(m)
    assert m.c is before
    nnx.grad(lambda m: (m.d.__setitem__(0, -0.0), m.w)[1])(m)
    assert np.signbit(m.d[0])


def test_a_change_of_shape_in_place_is_a_change():
    m = nnx.Dict(w=nnx.Param(jnp.ones(())), c=nnx.Variable(np.zeros(4)))

    def loss(m):
        m.c.resize((2, 2), refcheck=False)
        return m.w

    nnx.grad(loss)(m)
    assert m.c.shape == (2, 2)


def test_one_array_under_two_attributes_is_one_inside():
    m = nnx.Dict(w=nnx.Param(jnp.ones(())))
    m.a = m.b = np.zeros(2)
    nnx.grad(lambda m: (m.a.__setitem__(0, 3.0), m.w)[1])(m)
    assert m.a.tolist() == m.b.tolist() == [3.0, 0.0]


def test_an_array_that_is_read_only_is_so_inside():
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    m = nnx.Dict(w=nnx.Param(jnp.ones(())), c=nnx.Variable(frozen))
    with pytest.raises(ValueError, match="read-only"):
        nnx.grad(lambda m: (m.c.__setitem__(0, 3.0), m.w)[1])(m)


def test_tied_numpy_state_changes_in_place_for_every_owner():
    r = nnx.Ref(nnx.Variable(np.zeros(2)))
    m, outside = nnx.Dict(w=nnx.Param(jnp.ones(())), a=r, b=r), nnx.Dict(a=r)
    nnx.grad(lambda m: (m.a.__setitem__(0, 3.0), m.w)[1])(m)
    assert m.b.tolist() == outside.a.tolist() == r.value.tolist() == [3.0, 0.0]
