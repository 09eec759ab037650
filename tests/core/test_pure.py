"""Pure: the (states, moduledef) tuple as a pytree, with the methods of a Module in functional form."""

import pickle
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


class Block(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.stat = nnx.BatchStat(jnp.zeros(2))

    def __call__(self, x):
        self.stat = self.stat + 1
        return x * self.w

    def attend(self, x, *, add=0):
        self.stat = self.stat + 10
        return x + self.w + add


class Model(nnx.Module):
    def __init__(self):
        self.layers = [Block(), Block()]
        self.named = {"k": Block()}


def test_pure_is_a_tuple_of_states_and_moduledef():
    pure = Block().partition()
    assert isinstance(pure, nnx.Pure) and isinstance(pure, tuple)
    assert len(pure) == 2
    assert pure.states is pure[0]
    assert pure.moduledef is pure[1]
    several = Block().partition(nnx.Param, ...)
    assert isinstance(several.states, tuple)
    assert [type(s) for s in several.states] == [nnx.State, nnx.State]


def test_pure_is_a_pytree():
    pure = Block().partition()
    leaves, treedef = jax.tree.flatten(pure)
    assert len(leaves) == 2
    again = jax.tree.unflatten(treedef, leaves)
    assert isinstance(again, nnx.Pure)
    assert again.moduledef == pure.moduledef
    doubled = jax.tree.map(lambda x: x * 2, Block().partition(nnx.Param, ...))
    assert isinstance(doubled, nnx.Pure)
    np.testing.assert_array_equal(doubled.merge().w, [2, 2])


def test_pure_passes_through_jit_and_compiles_once_for_equal_models():
    traces = []

    @jax.jit
    def step(pure):
        traces.append(1)
        m = pure.merge()
        m(jnp.ones(2))
        return m.partition()

    for _ in range(3):
        out = step(Model().layers[0].partition())
        assert isinstance(out, nnx.Pure)
        np.testing.assert_array_equal(out.merge().stat, [1, 1])
    assert len(traces) == 1


def test_merge_rebuilds_the_module():
    m = Block()
    for pure in (m.partition(), m.partition(nnx.Param, ...)):
        again = pure.merge()
        assert type(again) is Block
        assert again.get_state() == m.get_state()


def test_apply_gives_output_and_pure():
    pure = Block().partition()
    out, new = pure.apply(jnp.ones(2))
    np.testing.assert_array_equal(out, [1, 1])
    assert isinstance(new, nnx.Pure)
    np.testing.assert_array_equal(new.merge().stat, [1, 1])
    np.testing.assert_array_equal(pure.merge().stat, [0, 0])


def test_apply_follows_any_chain():
    pure = Model().partition(nnx.Param, ...)
    out, new = pure.apply.layers[1].attend(jnp.ones(2), add=1)
    np.testing.assert_array_equal(out, [3, 3])
    assert type(new.merge()) is Model
    np.testing.assert_array_equal(new.get_state()["layers/1/stat"].value, [10, 10])
    out, _ = pure.apply.named["k"].attend(jnp.ones(2))
    np.testing.assert_array_equal(out, [2, 2])


def test_call_returns_only_the_output():
    pure = Model().partition()
    np.testing.assert_array_equal(pure.call.layers[0](jnp.ones(2)), [1, 1])
    np.testing.assert_array_equal(Block().partition().call(jnp.ones(2)), [1, 1])


def test_get_state_gives_one_state():
    m = Block()
    assert m.partition().get_state() == m.get_state()
    assert m.partition(nnx.BatchStat, ...).get_state() == m.get_state()


def test_filter_gives_states():
    pure = Block().partition(nnx.BatchStat, ...)
    assert list(pure.filter(nnx.Param)) == ["w"]
    stats, params = pure.filter(nnx.BatchStat, nnx.Param)
    assert (list(stats), list(params)) == (["stat"], ["w"])


def test_partition_of_a_pure_can_use_other_filters():
    pure = Block().partition()
    again = pure.partition(nnx.Param, ...)
    assert isinstance(again, nnx.Pure)
    params, rest = again.states
    assert (list(params), list(rest)) == (["w"], ["stat"])
    assert list(again.partition().states) == ["stat", "w"]
    with pytest.raises(ValueError, match="Non-exhaustive filters, got a non-empty remainder"):
        pure.partition(nnx.Param)


def test_pop_state_gives_states_and_the_rest():
    pure = Block().partition()
    params, rest = pure.pop_state(nnx.Param)
    assert list(params) == ["w"]
    assert isinstance(rest, nnx.Pure)
    assert list(rest.get_state()) == ["stat"]
    assert list(pure.get_state()) == ["stat", "w"]
    (params, stats), rest = pure.pop_state(nnx.Param, nnx.BatchStat)
    assert (list(params), list(stats), len(rest.get_state())) == (["w"], ["stat"], 0)
    with pytest.raises(ValueError, match="filter"):
        pure.pop_state()


def test_the_rest_after_pop_merges_with_the_variable_absent():
    _, rest = Block().partition().pop_state(nnx.BatchStat)
    m = rest.merge()
    assert not hasattr(m, "stat")
    assert not hasattr(m.partition().merge(), "stat")


def test_update_state_gives_a_new_pure_in_which_the_update_wins():
    for pure in (Block().partition(), Block().partition(nnx.Param, ...)):
        new = pure.update_state(nnx.State({"w": nnx.Param(jnp.full(2, 5.0))}))
        assert isinstance(new, nnx.Pure)
        np.testing.assert_array_equal(new.merge().w, [5, 5])
        np.testing.assert_array_equal(pure.merge().w, [1, 1])


def test_update_state_takes_what_a_module_takes():
    other = Block()
    other(jnp.ones(2))
    pure = Block().partition()
    for update in (other, other.partition(), other.get_state(), other.filter(nnx.Param, nnx.BatchStat)):
        np.testing.assert_array_equal(pure.update_state(update).merge().stat, [1, 1])


def test_update_state_adds_new_variables():
    new = Block().partition().update_state(nnx.State({"extra": nnx.Cache(1.0)}))
    assert new.merge().extra == 1.0


def test_pure_module_is_the_annotation():
    def step(pure: nnx.PureModule[Block]) -> nnx.PureModule[Block]:
        return pure

    hints = typing.get_type_hints(step)
    assert hints["pure"] == hints["return"]


def test_it_survives_pickling():
    pure = Model().partition(nnx.Param, ...)
    again = pickle.loads(pickle.dumps(pure))
    assert isinstance(again, nnx.Pure)
    assert again.moduledef == pure.moduledef
    assert again.merge().get_state() == pure.merge().get_state()


def test_it_prints_readably():
    text = repr(Block().partition())
    assert "Pure" in text and "Block" in text and "w" in text


def test_an_update_through_an_alias_is_still_one_entry():
    m = nnx.Module()
    m.a = m.b = Block()
    new = m.partition().update_state(nnx.State({"b/w": nnx.Param(jnp.full(2, 5.0))}))
    assert list(new.get_state()) == ["a/stat", "a/w"]
    np.testing.assert_array_equal(new.merge().a.w, [5, 5])
