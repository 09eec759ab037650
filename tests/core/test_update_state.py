"""`Module.update_state`: what it takes, what it refuses, and that a refusal changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.checks import assert_refused, assert_unchanged, photograph
from tests.core.method_models import Linear, Model
from tests.models import Count


def test_update_state_takes_a_state_and_updates_values():
    m = Model()
    m.update_state(jax.tree.map(lambda x: x + 1, m.filter(nnx.Param)))
    np.testing.assert_array_equal(m.heads["a"].b, [1.0])
    assert m.heads["a"].count == 0
    assert m.heads["a"].variable("w").sharding == ("in", "out")


def test_update_state_takes_a_tuple_of_states():
    m = Model()
    params, counts = m.filter(nnx.Param, Count)
    m.update_state((jax.tree.map(lambda x: x + 1, params), jax.tree.map(lambda x: x + 5, counts)))
    np.testing.assert_array_equal(m.heads["a"].b, [1.0])
    assert m.heads["b"].count == 5


def test_update_state_takes_a_pure():
    m, other = Model(), Model()
    other(jnp.ones((1, 2)))
    m.update_state(other.partition())
    assert m.enc.layers[0].count == 1
    m.update_state(Model().partition(nnx.Param, ...))
    assert m.enc.layers[0].count == 0


def test_update_state_takes_a_module_of_the_same_type():
    m, other = Model(), Model()
    other(jnp.ones((1, 2)))
    m.update_state(other)
    assert m.enc.layers[0].count == 1
    np.testing.assert_array_equal(m.enc.mean, [1, 1])


def test_update_state_refuses_a_module_of_another_type_and_changes_nothing():
    m = Model()
    before = photograph(m)
    with pytest.raises((TypeError, ValueError)) as error:
        m.update_state(Linear())
    assert "Linear" in str(error.value) and "Model" in str(error.value)
    assert_unchanged(m, before)


@pytest.mark.parametrize("wrong", [1, "state", None, [1]])
def test_update_state_refuses_anything_else_and_shows_it(wrong):
    m = Model()
    before = photograph(m)
    with pytest.raises((TypeError, ValueError)):
        m.update_state(wrong)
    assert_unchanged(m, before)


def test_update_state_adds_new_variables():
    m = Model()
    m.update_state(nnx.State({"heads/a/extra": nnx.Cache(jnp.ones(2), unit="m"), "bias": nnx.Param(1.0)}))
    np.testing.assert_array_equal(m.heads["a"].extra, [1, 1])
    assert type(m.heads["a"].variable("extra")) is nnx.Cache
    assert m.heads["a"].variable("extra").unit == "m"
    assert m.bias == 1.0
    assert {"bias", "heads/a/extra"} <= set(m.get_state())


@pytest.mark.parametrize("path", ["nowhere/w", "heads/c/w", "enc/layers/2/w", "enc/mean/deeper", "name/w"])
def test_an_update_whose_parent_does_not_exist_is_an_error_and_changes_nothing(path):
    m = Model()
    before = photograph(m)
    update = m.filter(nnx.Param).map(lambda _, leaf: leaf.replace(value=leaf.value + 1))
    with pytest.raises((ValueError, KeyError)) as error:
        m.update_state(update | nnx.State({path: nnx.Param(1.0)}))
    assert path in str(error.value)
    assert_unchanged(m, before)


@pytest.mark.parametrize("bad", [nnx.BatchStat(jnp.zeros(1)), nnx.Node(jnp.zeros(1))])
def test_an_update_with_a_container_of_another_type_is_an_error_and_changes_nothing(bad):
    m = Model()
    before = photograph(m)
    update = m.filter(nnx.Param).map(lambda _, leaf: leaf.replace(value=leaf.value + 1))
    with pytest.raises(ValueError) as error:
        m.update_state(update | nnx.State({"heads/b/b": bad}))
    assert "heads/b/b" in str(error.value)
    assert_unchanged(m, before)


def assert_nothing_is_updated(update, error, match):
    """Whether the update fails as a whole, given as a function of a State that could be written."""
    m = Model()
    before = photograph(m)
    with pytest.raises(error, match=match):
        m.update_state(update(jax.tree.map(lambda x: x + 1, m.filter(nnx.Param))))
    assert_unchanged(m, before)


def test_a_failing_second_state_of_a_tuple_changes_nothing():
    bad = nnx.State({"nowhere/w": nnx.Param(1.0)})
    assert_nothing_is_updated(lambda good: (good, bad), (ValueError, KeyError), "nowhere/w")


@pytest.mark.parametrize("name", ["filter", "clone", "heads/a/partition"])
def test_an_update_that_would_hide_a_method_is_an_error_and_changes_nothing(name):
    bad = nnx.State({name: nnx.Param(1.0)})
    assert_nothing_is_updated(lambda good: good | bad, (ValueError, AttributeError), name.split("/")[-1])


@pytest.mark.parametrize("path", ["enc", "heads/a", "name"])
def test_an_update_to_a_submodule_or_static_value_is_an_error_and_changes_nothing(path):
    bad = nnx.State({path: nnx.Param(1.0)})
    assert_nothing_is_updated(lambda good: good | bad, ValueError, path)


@pytest.mark.parametrize(
    "does, error, says",
    [
        (
            lambda m: m.update_state(nnx.State({"enc/w": nnx.Param(jnp.zeros(2), ("in",)), "dec/w": nnx.Param(1.0)})),
            ValueError,
            ("'dec/w'", "get_state()"),
        ),
        (
            lambda m: m.update_state(nnx.State({"enc/stat": nnx.BatchStat(1.0), "enc/w": nnx.BatchStat(1.0)})),
            ValueError,
            ("Cannot replace value from incompatible container", "'enc/w'", "Param", "BatchStat"),
        ),
        (lambda m: m.update_state({"w": 1}), TypeError, ("State", "Pure")),
    ],
    ids=["unknown path", "container of another type", "no state"],
)
def test_a_refused_update_names_the_path_and_what_to_write_and_changes_nothing(does, error, says):
    assert_refused(does, error, says)


def test_the_last_of_several_updates_wins_also_through_aliases():
    def model():
        m = nnx.Module()
        m.a = m.b = Linear()
        return m

    first, second = nnx.State({"b/b": nnx.Param(jnp.full(3, 1.0))}), nnx.State({"a/b": nnx.Param(jnp.full(3, 2.0))})
    m = model()
    m.update_state((first, second))
    np.testing.assert_array_equal(m.a.b, [2, 2, 2])
    m = model()
    m.update_state((second, first))
    np.testing.assert_array_equal(m.a.b, [1, 1, 1])


def test_update_state_with_a_module_of_another_structure_changes_nothing():
    m, other = Model(), Model()
    other(jnp.ones((1, 2)))
    other.enc.layers.append(Linear(2, 2))
    before = photograph(m)
    with pytest.raises(ValueError, match="enc/layers/2"):
        m.update_state(other)
    assert_unchanged(m, before)


def test_update_state_keeps_the_caches_coherent():
    m = Model()
    first = m.get_module_def()
    m.update_state(nnx.State({"new": nnx.Param(1.0)}))
    assert m.get_module_def() != first
    del m.new
    assert m.get_module_def() == first


def test_an_empty_update_changes_nothing():
    m = Model()
    before = photograph(m)
    m.update_state(nnx.State({}))
    m.update_state(())
    assert_unchanged(m, before)
