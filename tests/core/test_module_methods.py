"""The methods of a Module, row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.checks import assert_refused, assert_unchanged, photograph
from tests.core.method_models import COUNT_PATHS, PARAM_PATHS, PATHS, Linear, Model
from tests.models import Count

# partition


def test_partition_is_a_pure_tuple_of_state_and_moduledef():
    m = Model()
    pure = m.partition()
    assert isinstance(pure, nnx.Pure)
    assert isinstance(pure, tuple)
    state, moduledef = pure
    assert isinstance(state, nnx.State)
    assert isinstance(moduledef, nnx.ModuleDef)
    assert list(state) == PATHS
    assert state["enc/layers/0/w"].value is m.enc.layers[0].w


def test_partition_with_one_filter_requires_every_node_to_match():
    state, _ = Linear().partition(nnx.Variable)
    assert isinstance(state, nnx.State)
    with pytest.raises(ValueError, match="Non-exhaustive filters, got a non-empty remainder") as error:
        Linear().partition(nnx.Param)
    assert "count" in str(error.value)


def test_partition_with_several_filters_gives_a_tuple_of_states():
    (params, counts, rest), moduledef = Model().partition(nnx.Param, Count, ...)
    assert list(params) == PARAM_PATHS
    assert list(counts) == COUNT_PATHS
    assert list(rest) == ["enc/mean", "enc/table"]
    assert isinstance(moduledef, nnx.ModuleDef)


def test_the_first_match_wins():
    (variables, params, _), _ = Model().partition(nnx.Variable, nnx.Param, ...)
    assert len(params) == 0
    assert list(variables) == [p for p in PATHS if p != "enc/table"]


def test_incomplete_partition_lists_the_paths_and_changes_nothing():
    m = Model()
    before = photograph(m)
    with pytest.raises(ValueError, match="Non-exhaustive filters, got a non-empty remainder") as error:
        m.partition(nnx.Param, Count)
    assert "enc/mean" in str(error.value)
    assert "enc/table" in str(error.value)
    assert "heads/a/w" not in str(error.value)
    assert_unchanged(m, before)


def test_all_partitions_of_a_module_have_the_same_moduledef():
    m = Model()
    assert m.partition().moduledef == m.partition(nnx.Param, ...).moduledef == m.get_module_def()


def test_get_state_and_get_module_def_are_the_halves_of_partition():
    m = Model()
    state, moduledef = m.partition()
    assert m.get_state() == state
    assert m.get_module_def() == moduledef


def test_a_module_without_state_partitions_into_an_empty_state():
    state, moduledef = nnx.Module().partition()
    assert len(state) == 0
    assert type(moduledef.merge(state)) is nnx.Module


# filter


def test_filter_with_one_filter_gives_a_state():
    params = Model().filter(nnx.Param)
    assert isinstance(params, nnx.State)
    assert list(params) == PARAM_PATHS


def test_filter_with_several_filters_gives_a_tuple_and_need_not_be_exhaustive():
    params, stats = Model().filter(nnx.Param, nnx.BatchStat)
    assert list(params) == PARAM_PATHS
    assert list(stats) == ["enc/mean"]


def test_filter_leaves_the_module_alone():
    m = Model()
    before = photograph(m)
    m.filter(nnx.Param)
    assert_unchanged(m, before)


# pop_state


def test_pop_state_returns_the_matching_state_and_removes_it():
    m = Model()
    counts = m.pop_state(Count)
    assert isinstance(counts, nnx.State)
    assert list(counts) == COUNT_PATHS
    assert not hasattr(m.heads["a"], "count")
    assert list(m.get_state()) == [p for p in PATHS if p not in COUNT_PATHS]


def test_pop_state_with_several_filters_gives_a_tuple():
    m = Model()
    counts, stats = m.pop_state(Count, nnx.BatchStat)
    assert list(counts) == COUNT_PATHS
    assert list(stats) == ["enc/mean"]
    assert m.collections() == {"params"}


def test_pop_state_without_a_filter_is_an_error_and_changes_nothing():
    m = Model()
    before = photograph(m)
    with pytest.raises(ValueError, match="filter"):
        m.pop_state()
    assert_unchanged(m, before)


def test_pop_state_with_a_bad_filter_changes_nothing():
    m = Model()
    before = photograph(m)
    with pytest.raises(TypeError, match="1.5"):
        m.pop_state(nnx.Param, 1.5)
    assert_unchanged(m, before)


def test_popping_nothing_gives_an_empty_state():
    assert len(Model().pop_state(nnx.Cache)) == 0


def test_popped_state_can_be_put_back():
    m = Model()
    counts = m.pop_state(Count)
    m.update_state(counts)
    assert list(m.get_state()) == PATHS
    assert type(m.enc.layers[0].variable("count")) is Count


def test_a_variable_in_a_container_can_be_popped():
    m = nnx.Dict({"w": nnx.Param(1.0), "c": Count(1)})
    assert list(m.pop_state(Count)) == ["c"]
    assert list(m) == ["w"]


# clone


def test_a_clone_is_independent_and_equal():
    m = Model()
    twin = m.clone()
    assert type(twin) is Model
    assert twin is not m
    assert twin.enc is not m.enc
    assert twin.get_module_def() == m.get_module_def()
    assert twin.get_state() == m.get_state()
    twin.enc.layers[0].w = jnp.zeros((2, 2))
    twin.enc.extra = Linear()
    twin.name = "twin"
    np.testing.assert_array_equal(m.enc.layers[0].w, jnp.ones((2, 2)))
    assert not hasattr(m.enc, "extra")
    assert m.name == "model"


def test_a_clone_has_the_same_sharing():
    m = Model()
    m.enc.layers[1] = m.enc.layers[0]
    m.back = m
    twin = m.clone()
    assert twin.enc.layers[0] is twin.enc.layers[1]
    assert twin.back is twin


def test_a_plain_clone_shares_immutable_arrays_and_copy_arrays_does_not():
    m = Model()
    assert m.clone().enc.table is m.enc.table
    twin = m.clone(copy_arrays=True)
    m.enc.table.delete()
    m.heads["a"].w.delete()
    np.testing.assert_array_equal(twin.enc.table, [0.0, 1.0, 2.0])
    np.testing.assert_array_equal(twin.heads["a"].w, jnp.ones((2, 1)))


def test_clone_with_copied_arrays_copies_numpy_arrays_and_pytrees_too():
    class Holds(nnx.Module):
        def __init__(self):
            self.host = np.zeros(2)
            self.cache = {"k": jnp.zeros(2)}
            self.key = jax.random.key(0)

    m = Holds()
    twin = m.clone(copy_arrays=True)
    m.host[0] = 5
    m.cache["k"].delete()
    np.testing.assert_array_equal(twin.host, [0, 0])
    np.testing.assert_array_equal(twin.cache["k"], [0, 0])
    assert jnp.array_equal(jax.random.key_data(twin.key), jax.random.key_data(m.key))


# apply


def test_apply_runs_on_a_copy_and_returns_output_and_new_module():
    m = Linear(2, 3)
    before = photograph(m)
    out, new = m.apply(jnp.ones((1, 2)))
    np.testing.assert_array_equal(out, [[2.0, 2.0, 2.0]])
    assert type(new) is Linear
    assert new is not m
    assert new.count == 1
    assert_unchanged(m, before)


def test_apply_of_a_method():
    m = Linear(2, 3)
    m.b = jnp.ones(3)
    out, new = m.apply.halve(4.0)
    assert out == 2.0
    np.testing.assert_array_equal(new.b, [0.5] * 3)
    np.testing.assert_array_equal(m.b, [1.0] * 3)


def test_apply_follows_any_chain_and_returns_the_whole_new_module():
    m = Model()
    out, new = m.apply.enc.layers[1](jnp.ones((1, 2)))
    np.testing.assert_array_equal(out, [[2.0, 2.0]])
    assert type(new) is Model
    assert new.enc.layers[1].count == 1
    assert new.enc.layers[0].count == 0
    assert new.heads["a"].count == 0
    out, new = m.apply.heads["b"].halve(jnp.ones(()))
    assert float(out) == 0.5
    assert type(new) is Model


def test_apply_passes_keyword_arguments():
    class Named(nnx.Module):
        def __call__(self, *, x):
            return x

    assert Named().apply(x=3)[0] == 3


# mutable_state_dict


def test_mutable_state_dict_reads_and_writes_the_module():
    m = Model()
    leaves = m.mutable_state_dict()
    assert list(leaves) == PATHS
    assert leaves["heads/a/w"].value is m.heads["a"].w
    leaves["heads/a/w"].value = jnp.zeros((2, 1))
    np.testing.assert_array_equal(m.heads["a"].w, jnp.zeros((2, 1)))
    m.heads["a"].w = jnp.full((2, 1), 3.0)
    np.testing.assert_array_equal(leaves["heads/a/w"].value, [[3.0], [3.0]])
    assert type(m.heads["a"].variable("w")) is nnx.Param


def test_mutable_state_dict_reads_metadata():
    leaves = Model().mutable_state_dict()
    assert leaves["heads/a/w"].sharding == ("in", "out")
    assert leaves["heads/a/b"].sharding is None


def test_mutable_state_dict_writes_bare_nodes():
    m = Model()
    leaves = m.mutable_state_dict()
    leaves["enc/table"].value = jnp.zeros(3)
    np.testing.assert_array_equal(m.enc.table, [0, 0, 0])


# for_each, modules, named_modules


def test_for_each_calls_on_every_distinct_instance_self_included():
    m = Model()
    m.heads["shared"] = m.heads["a"]
    m.back = m
    seen = []
    m.for_each(Linear, seen.append)
    assert len(seen) == 4
    assert len({id(s) for s in seen}) == 4
    everything = []
    m.for_each(nnx.Module, everything.append)
    assert everything[0] is m
    assert [id(x) for x in everything] == [id(x) for x in m.modules()]


def test_for_each_may_change_the_modules():
    m = Model()

    def freeze(layer):
        layer.frozen = True
        layer.extra = nnx.Cache(1)

    m.for_each(Linear, freeze)
    assert m.heads["b"].frozen is True
    assert "enc/layers/1/extra" in m.get_state()


def test_modules_lists_every_distinct_module_depth_first():
    m = Model()
    expected = [m, m.enc, m.enc.layers, m.enc.layers[0], m.enc.layers[1], m.heads, m.heads["a"], m.heads["b"]]
    assert [id(x) for x in m.modules()] == [id(x) for x in expected]


def test_named_modules_gives_each_with_its_path():
    m = Model()
    assert [path for path, _ in m.named_modules()] == [
        "",
        "enc",
        "enc/layers",
        "enc/layers/0",
        "enc/layers/1",
        "heads",
        "heads/a",
        "heads/b",
    ]
    for path, module in m.named_modules():
        assert m.get_path(path) is module


def test_modules_of_a_cycle_end():
    m = Model()
    m.enc.parent = m
    assert len(list(m.modules())) == 8


def test_modules_are_in_numeric_order():
    m = nnx.Module()
    m.layers = [Linear() for _ in range(12)]
    paths = [path for path, _ in m.named_modules()]
    assert paths == ["", "layers", *(f"layers/{i}" for i in range(12))]


# variable, collections


def test_variable_gives_the_container_behind_an_attribute():
    m = Linear()
    container = m.variable("w")
    assert type(container) is nnx.Param
    assert container.value is m.w
    assert container.sharding == ("in", "out")


def test_variable_of_another_attribute_raises_with_its_name():
    m = Linear()
    with pytest.raises((AttributeError, ValueError, KeyError, TypeError), match="dout"):
        m.variable("dout")
    with pytest.raises((AttributeError, ValueError, KeyError, TypeError), match="nothing"):
        m.variable("nothing")


def test_collections_is_the_set_of_names_present():
    assert Model().collections() == {"params", "batch_stats", "count"}
    assert nnx.Module().collections() == set()


# paths


def test_get_path_reaches_modules_variables_and_statics():
    m = Model()
    assert m.get_path("") is m
    assert m.get_path("enc/layers/0") is m.enc.layers[0]
    assert m.get_path("enc/layers/0/w") is m.enc.layers[0].w
    assert m.get_path("heads/a") is m.heads["a"]
    assert m.get_path("name") == "model"


@pytest.mark.parametrize("path", ["nowhere", "enc/nowhere", "enc/layers/2", "heads/c/w"])
def test_get_path_that_leads_nowhere_is_an_error_naming_the_path(path):
    with pytest.raises((AttributeError, ValueError, KeyError, LookupError)) as error:
        Model().get_path(path)
    assert path in str(error.value)


def test_the_error_for_a_path_names_the_part_that_leads_nowhere():
    assert_refused(lambda m: m.get_path("enc/layers/0"), (ValueError, LookupError), ("enc/layers",))


def test_set_path_replaces_modules_and_values():
    m = Model()
    new = Linear(2, 5)
    m.set_path("heads/a", new)
    assert m.heads["a"] is new
    m.set_path("enc/layers/0", new)
    assert m.enc.layers[0] is new
    m.set_path("heads/b/w", jnp.zeros((2, 1)))
    np.testing.assert_array_equal(m.heads["b"].w, [[0], [0]])
    assert type(m.heads["b"].variable("w")) is nnx.Param
    m.set_path("name", "other")
    assert m.name == "other"


def test_set_path_into_containers():
    m = Model()
    m.set_path("heads/filter", Linear(2, 1))
    assert isinstance(m.heads["filter"], Linear)
    m.set_path("heads/c", Linear(2, 1))
    assert "heads/c/w" in m.get_state()
    with pytest.raises(IndexError, match=r"Cannot set item 7 of Sequence, which has 2 items.*\s.*append\(\)"):
        m.set_path("enc/layers/7", Linear(2, 2))
    assert len(m.enc.layers) == 2


def test_set_path_whose_parent_does_not_exist_is_an_error_naming_the_path():
    m = Model()
    before = photograph(m)
    with pytest.raises((AttributeError, ValueError, KeyError, LookupError)) as error:
        m.set_path("nowhere/w", 1)
    assert "nowhere" in str(error.value)
    assert_unchanged(m, before)


# caches


def test_partition_sees_every_structural_change():
    m = Model()
    seen = {m.get_module_def()}
    m.enc.layers.append(Linear(2, 2))
    seen.add(m.get_module_def())
    m.heads["c"] = Linear(2, 1)
    seen.add(m.get_module_def())
    m.name = "other"
    seen.add(m.get_module_def())
    m.enc.layers[0].extra = nnx.Cache(1)
    seen.add(m.get_module_def())
    del m.enc.mean
    seen.add(m.get_module_def())
    m.heads["a"] = m.heads["b"]
    seen.add(m.get_module_def())
    assert len(seen) == 7


def test_partition_sees_every_new_value():
    m = Model()
    m.partition()
    m.enc.layers[0].w = jnp.full((2, 2), 9.0)
    np.testing.assert_array_equal(m.get_state()["enc/layers/0/w"].value, jnp.full((2, 2), 9.0))
