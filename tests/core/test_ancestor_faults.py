"""Faults of the library's ancestor, each kept from coming back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


class Counter(nnx.Module):
    def __init__(self):
        self.n = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.n = self.n + 1
        return x

    def add(self, x):
        self.n = self.n + x
        return self.n


class Inner(nnx.Module):
    def __init__(self):
        self.counters = {"a": Counter(), "b": Counter()}


class Outer(nnx.Module):
    def __init__(self):
        self.inner = Inner()
        self.counter = Counter()


def test_chained_access_in_apply_follows_every_step():
    m = Outer()
    _, new = m.apply.inner.counters["b"].add(5.0)
    assert float(new.inner.counters["b"].n) == 5.0
    assert float(new.inner.counters["a"].n) == 0.0
    assert float(new.counter.n) == 0.0
    state, moduledef = m.partition()
    out, pure = moduledef.apply(state).inner.counters["b"].add(5.0)
    assert float(out) == 5.0
    assert float(pure.states["inner/counters/b/n"].value) == 5.0
    assert float(pure.states["counter/n"].value) == 0.0


def test_a_chain_can_be_kept_and_branched():
    state, moduledef = Outer().partition()
    counters = moduledef.apply(state).inner.counters
    _, first = counters["a"].add(1.0)
    _, second = counters["b"].add(2.0)
    assert float(first.states["inner/counters/b/n"].value) == 0.0
    assert float(second.states["inner/counters/b/n"].value) == 2.0


def test_an_empty_sequence_has_length_zero():
    assert len(nnx.Sequence([])) == 0


def test_len_of_a_dict_does_not_count_internals():
    d = nnx.Dict({})
    assert len(d) == 0
    d["a"] = Counter()
    assert len(d) == 1
    assert list(d) == ["a"]


def test_pure_update_state_lets_the_update_win():
    pure = Counter().partition()
    new = pure.update_state(nnx.State({"n": nnx.Variable(jnp.asarray(7.0))}))
    assert float(new.merge().n) == 7.0
    split = Counter().partition(nnx.Variable, ...)
    assert float(split.update_state(nnx.State({"n": nnx.Variable(jnp.asarray(7.0))})).merge().n) == 7.0


def test_property_setters_are_not_bypassed():
    class Doubled(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(1.0)

        @property
        def double(self):
            return self.w * 2

        @double.setter
        def double(self, value):
            self.w = value / 2

    m = Doubled()
    m.double = 10.0
    assert m.w == 5.0
    assert "double" not in m.get_state()
    assert "double" not in vars(m)


def test_unhashable_static_attributes_do_not_break_jit():
    class Config(nnx.Module):
        def __init__(self):
            self.sizes = [1, 2]
            self.options = {"a": [1], "b": {2}}
            self.w = nnx.Param(jnp.ones(2))

    traces = []

    @jax.jit
    def step(pure):
        traces.append(1)
        m = pure.merge()
        m.w = m.w * m.sizes[1]
        return m.partition()

    pure = step(Config().partition())
    step(pure)
    step(Config().partition())
    assert len(traces) == 1
    np.testing.assert_array_equal(pure.merge().w, [2, 2])


def test_pop_state_respects_the_trace_level():
    m = Counter()

    @jax.jit
    def f(x):
        m.pop_state(nnx.Variable)
        return x

    with pytest.raises(nnx.TraceContextError, match="Cannot mutate Module from different trace level"):
        f(1.0)
    assert float(m.n) == 0.0


def test_the_error_for_a_bad_filter_shows_the_filter():
    with pytest.raises(TypeError, match="12345"):
        Counter().filter(12345)


@pytest.mark.parametrize("seed", [np.int32(3), np.int64(3), np.uint8(3)])
def test_numpy_integers_are_seeds(seed):
    mine, theirs = nnx.context(seed), nnx.context(3)
    assert jnp.array_equal(jax.random.key_data(mine.make_rng("params")), jax.random.key_data(theirs.make_rng("params")))
    assert nnx.context(0, dropout=seed).has_rng("dropout")


def test_mutable_state_dict_gives_sharding():
    m = nnx.Module()
    m.w = nnx.Param(jnp.ones(2), ("a",))
    m.b = nnx.Param(jnp.ones(2))
    leaves = m.mutable_state_dict()
    assert leaves["w"].sharding == ("a",)
    assert leaves["b"].sharding is None
