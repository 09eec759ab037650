"""A chain of 20,000 nested Modules: everything is iterative, nothing recurses."""

import gc

import jax.numpy as jnp
import numpy as np
import pytest

import nnx

DEPTH = 20_000


class Link(nnx.Module):
    pass


def chain(depth=DEPTH, last="end"):
    root = here = Link()
    for _ in range(depth):
        here.next = Link()
        here = here.next
    here.w = nnx.Param(jnp.ones(2))
    here.name = last
    return root


@pytest.fixture(scope="module")
def deep():
    yield chain()
    gc.collect()


PATH = "next/" * DEPTH + "w"


def last_of(m):
    while hasattr(m, "next"):
        m = m.next
    return m


def test_deep_model_partitions(deep):
    state, _ = deep.partition()
    assert list(state) == [PATH]


def test_deep_model_merges(deep):
    again = deep.partition().merge()
    np.testing.assert_array_equal(last_of(again).w, [1, 1])


def test_deep_model_clones(deep):
    twin = deep.clone()
    last_of(twin).w = jnp.zeros(2)
    np.testing.assert_array_equal(last_of(deep).w, [1, 1])
    assert twin.get_module_def() == deep.get_module_def()


def test_deep_moduledef_hashes_and_compares(deep):
    other = chain()
    assert hash(deep.get_module_def()) == hash(other.get_module_def())
    assert deep.get_module_def() == other.get_module_def()
    assert deep.get_module_def() != chain(last="another end").get_module_def()
    assert deep.get_module_def() != chain(DEPTH - 1).get_module_def()


def test_deep_model_updates_filters_and_pops():
    m = chain(2_000)
    m.update_state(nnx.State({"next/" * 2_000 + "w": nnx.Param(jnp.zeros(2))}))
    np.testing.assert_array_equal(last_of(m).w, [0, 0])
    assert len(m.filter(nnx.Param)) == 1
    assert len(m.filter(nnx.PathMatches("**/w"))) == 1
    assert len(m.pop_state(nnx.Param)) == 1


def test_deep_model_can_be_walked():
    m = chain(2_000)
    assert len(list(m.modules())) == 2_001
    seen = []
    m.for_each(Link, seen.append)
    assert len(seen) == 2_001
    assert m.get_path("next/" * 2_000 + "name") == "end"


def test_deep_model_can_be_freed(deep):
    m = chain()
    del m


def test_deep_lists_and_wide_models_work_too():
    nested: list = [nnx.Param(1.0)]
    for _ in range(20):
        nested = [nested]
    m = nnx.Module()
    m.nested = nested
    assert list(m.get_state()) == ["nested/" + "0/" * 20 + "0"]
    m.clone()
