"""Attributes that hold a pytree of arrays, changed in place inside transforms and between calls."""

import jax.numpy as jnp
import numpy as np
import pytest

import nnx


def with_cache():
    m = nnx.Dict()
    m.cache = {"k": jnp.zeros(2), "steps": [jnp.zeros(()), 1]}
    return m


def test_a_dict_valued_node_changed_in_place_under_jit():
    def f(m, x):
        m.cache["k"] = m.cache["k"] + x
        m.cache["steps"][0] = m.cache["steps"][0] + 1

    step = nnx.jit(f)
    eager, lifted = with_cache(), with_cache()
    for x in (1.0, 2.0, 3.0):
        f(eager, x)
        step(lifted, x)
    np.testing.assert_array_equal(lifted.cache["k"], eager.cache["k"])
    assert lifted.cache["steps"][0] == 3 and isinstance(lifted.cache["steps"], list)


def test_a_dict_valued_node_that_gains_a_key_under_jit():
    def f(m):
        m.cache["new"] = m.cache["k"] + 1

    step = nnx.jit(f)
    for _ in range(2):
        m = with_cache()
        step(m)
        np.testing.assert_array_equal(m.cache["new"], [1.0, 1.0])
        del m.cache["new"]
        step(m)
        assert set(m.cache) == {"k", "steps", "new"}
    assert step.trace_count == 1


def test_dict_changed_in_place_by_a_failing_body_is_restored():
    def f(m):
        m.cache["k"] = m.cache["k"] + 1
        m.cache["new"] = 3
        raise ValueError("boom")

    m = with_cache()
    with pytest.raises(ValueError, match="boom"):
        nnx.jit(f)(m)
    assert set(m.cache) == {"k", "steps"}
    np.testing.assert_array_equal(m.cache["k"], np.zeros(2))


def test_a_dict_valued_node_changed_in_place_under_scan():
    def f(m, carry, x):
        m.cache["k"] = m.cache["k"] + x
        return carry, m.cache["k"][0]

    m = with_cache()
    m.cache = {"k": jnp.zeros(2)}
    _, ys = nnx.scan(f)(m, 0.0, jnp.arange(4.0))
    np.testing.assert_array_equal(m.cache["k"], [6.0, 6.0])
    np.testing.assert_array_equal(ys, [0.0, 1.0, 3.0, 6.0])


def test_a_dict_changed_outside_between_calls_is_seen():
    step = nnx.jit(lambda m: m.cache["k"].sum())
    m = with_cache()
    assert step(m) == 0
    m.cache["k"] = jnp.ones(2)
    assert step(m) == 2
    m.cache["extra"] = jnp.ones(())
    assert nnx.jit(lambda m: m.cache["extra"])(m) == 1
