"""State: a flat, typed, immutable mapping from paths to leaves that JAX understands."""

import pickle
from collections.abc import Mapping, MutableMapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


class Block(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2), ("a",))
        self.stat = nnx.BatchStat(jnp.zeros(2))


class Model(nnx.Module):
    def __init__(self, n=2):
        self.layers = [Block() for _ in range(n)]
        self.table = jnp.arange(2.0)


def small() -> nnx.State:
    return nnx.State({"a/w": nnx.Param(1), "a/b": nnx.BatchStat(2), "c": jnp.asarray(3)})


# a mapping


def test_state_is_an_immutable_mapping():
    state = small()
    assert isinstance(state, Mapping)
    assert not isinstance(state, MutableMapping)
    with pytest.raises(TypeError):
        state["a/w"] = nnx.Param(5)
    with pytest.raises(TypeError):
        del state["a/w"]
    with pytest.raises(AttributeError):
        state.new = 1
    assert state["a/w"] == nnx.Param(1)


def test_changing_the_mapping_it_was_made_from_does_not_change_it():
    source = {"a": nnx.Param(1)}
    state = nnx.State(source)
    source["b"] = nnx.Param(2)
    assert list(state) == ["a"]


def test_paths_are_strings_joined_by_slashes():
    assert list(small()) == ["a/b", "a/w", "c"]


def test_items_are_read_by_path_or_by_segments():
    state = small()
    assert state["a/w"] == nnx.Param(1)
    assert state["a", "w"] == nnx.Param(1)
    assert state["c"] is state["c",]


def test_iteration_length_and_membership():
    state = small()
    assert len(state) == 3
    assert "a/w" in state
    assert ("a", "w") in state
    assert "a" not in state
    assert "z" not in state
    assert list(state.keys()) == list(state)
    assert [type(leaf) for leaf in state.values()][:2] == [nnx.BatchStat, nnx.Param]
    assert dict(state.items())["a/b"] == nnx.BatchStat(2)
    assert state.get("z") is None


def test_a_missing_path_is_a_key_error_naming_it():
    with pytest.raises(KeyError, match="a/z"):
        small()["a/z"]


def test_numeric_segments_are_sorted_as_numbers():
    paths = [f"layers/{i}/w" for i in range(12)]
    state = nnx.State({path: nnx.Param(0) for path in reversed(paths)})
    assert list(state) == paths
    assert list(Model(12).get_state())[:4] == ["layers/0/stat", "layers/0/w", "layers/1/stat", "layers/1/w"]
    assert list(Model(12).filter(nnx.Param)) == paths


def test_order_is_by_segments_not_by_characters():
    state = nnx.State({"a/z": 1, "a-b/c": 2, "a": 3, "ab": 4})
    assert list(state) == ["a", "a/z", "a-b/c", "ab"]


def test_order_does_not_depend_on_insertion():
    forward = nnx.State({"a": 1, "b/2": 2, "b/10": 3, "b/x": 4})
    backward = nnx.State({"b/x": 4, "b/10": 3, "b/2": 2, "a": 1})
    assert list(forward) == list(backward)
    assert jax.tree.structure(forward) == jax.tree.structure(backward)


def test_a_leaf_is_a_variable_a_node_or_a_bare_array():
    state = Model().get_state()
    assert type(state["layers/0/w"]) is nnx.Param
    assert isinstance(state["table"], jax.Array)


# canonical paths


def test_shared_value_has_one_entry_under_its_shortest_path():
    m = nnx.Module()
    block = Block()
    m.a = [[block]]
    m.z = block
    assert list(m.get_state()) == ["z/stat", "z/w"]


def test_among_equally_short_paths_the_first_in_order_is_canonical():
    m = nnx.Module()
    block = Block()
    m.layers = [Block() for _ in range(11)]
    m.layers[10] = block
    m.layers[2] = block
    paths = list(m.get_state())
    assert "layers/2/w" in paths
    assert "layers/10/w" not in paths


def test_canonical_paths_do_not_depend_on_the_order_of_assignment():
    def build(names):
        m = nnx.Module()
        block = Block()
        for name in names:
            setattr(m, name, block)
        return m

    assert list(build("ab").get_state()) == list(build("ba").get_state()) == ["a/stat", "a/w"]


def test_updates_accept_any_alias():
    m = nnx.Module()
    m.a = m.b = Block()
    m.update_state(nnx.State({"b/w": nnx.Param(jnp.full(2, 5.0), ("a",))}))
    np.testing.assert_array_equal(m.a.w, [5, 5])


# operators


def test_equality_compares_paths_types_metadata_and_values():
    assert Model().get_state() == Model().get_state()
    assert small() == small()
    assert small() != nnx.State({"a/w": nnx.Param(1)})
    assert nnx.State({"a": nnx.Param(1)}) != nnx.State({"a": nnx.BatchStat(1)})
    assert nnx.State({"a": nnx.Param(1)}) != nnx.State({"a": nnx.Param(2)})
    assert nnx.State({"a": nnx.Param(jnp.ones(2))}) != nnx.State({"a": nnx.Param(jnp.zeros(2))})
    assert nnx.State({"a": jnp.ones(2)}) == nnx.State({"a": jnp.ones(2)})
    assert nnx.State({"a": jnp.ones(2)}) != nnx.State({"a": jnp.ones(3)})
    assert small() != 3


def test_union_lets_the_right_side_win():
    left = nnx.State({"a": nnx.Param(1), "b": nnx.Param(2)})
    right = nnx.State({"b": nnx.Param(3), "c": nnx.Param(4)})
    union = left | right
    assert isinstance(union, nnx.State)
    assert {path: leaf.value for path, leaf in union.items()} == {"a": 1, "b": 3, "c": 4}
    assert {path: leaf.value for path, leaf in left.items()} == {"a": 1, "b": 2}


def test_difference_is_by_path():
    left = nnx.State({"a": nnx.Param(1), "b": nnx.Param(2)})
    assert list(left - nnx.State({"b": nnx.BatchStat(99)})) == ["a"]
    assert isinstance(left - left, nnx.State)
    assert len(left - left) == 0


def test_merge_of_many_states():
    merged = nnx.State.merge(
        nnx.State({"a": nnx.Param(1)}), nnx.State({"b": nnx.Param(2)}), nnx.State({"a": nnx.Param(3)})
    )
    assert {path: leaf.value for path, leaf in merged.items()} == {"a": 3, "b": 2}


def test_partition_and_filter():
    params, stats, rest = small().partition(nnx.Param, nnx.BatchStat, ...)
    assert (list(params), list(stats), list(rest)) == (["a/w"], ["a/b"], ["c"])
    assert isinstance(small().partition(...), nnx.State)
    with pytest.raises(ValueError, match="Non-exhaustive filters, got a non-empty remainder") as error:
        small().partition(nnx.Param)
    assert "a/b" in str(error.value) and "c" in str(error.value)
    assert list(small().filter(nnx.Param)) == ["a/w"]
    params, stats = small().filter(nnx.Param, nnx.BatchStat)
    assert (list(params), list(stats)) == (["a/w"], ["a/b"])


def test_map_calls_with_path_and_leaf():
    seen = []

    def double(path, leaf):
        seen.append(path)
        return leaf.replace(value=leaf.value * 2) if isinstance(leaf, nnx.Variable) else leaf * 2

    doubled = small().map(double)
    assert isinstance(doubled, nnx.State)
    assert seen == list(small())
    assert doubled["a/w"] == nnx.Param(2)
    assert int(doubled["c"]) == 6
    assert small()["a/w"] == nnx.Param(1)


def test_nested_dicts_and_back():
    state = small()
    nested = state.to_nested()
    assert type(nested) is dict
    assert type(nested["a"]) is dict
    assert set(nested) == {"a", "c"}
    assert nested["a"]["w"] == nnx.Param(1)
    assert nnx.State.from_nested(nested) == state


def test_nested_dicts_of_an_empty_state():
    assert nnx.State({}).to_nested() == {}
    assert len(nnx.State.from_nested({})) == 0


def test_from_nested_keeps_dict_valued_nodes_of_containers_whole():
    state = nnx.State({"a/cache": nnx.Cache({"k": 1})})
    assert nnx.State.from_nested(state.to_nested()) == state


# a pytree


def test_state_is_a_pytree_with_readable_key_paths():
    flat, _ = jax.tree_util.tree_flatten_with_path(Model(1).get_state())
    text = [jax.tree_util.keystr(path) for path, _ in flat]
    assert len(text) == 3
    assert "layers/0/stat" in text[0] and text[0].endswith(".value")
    assert "layers/0/w" in text[1] and text[1].endswith(".value")
    assert "table" in text[2]


def test_mapping_keeps_types_and_metadata():
    state = jax.tree.map(lambda x: x + 1, Model(1).get_state())
    assert isinstance(state, nnx.State)
    assert type(state["layers/0/w"]) is nnx.Param
    assert state["layers/0/w"].sharding == ("a",)
    np.testing.assert_array_equal(state["layers/0/w"].value, [2, 2])


def test_users_map_over_variables_with_is_leaf():
    state = Model(1).get_state()
    types = jax.tree.map(lambda v: type(v).__name__, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert types["layers/0/w"] == "Param"
    assert types["layers/0/stat"] == "BatchStat"


def test_mapping_over_two_states():
    state = Model(1).get_state()
    total = jax.tree.map(lambda a, b: a + b, state, state)
    np.testing.assert_array_equal(total["table"], [0, 2])


def test_state_passes_through_jit_grad_and_vmap():
    params = Model(1).filter(nnx.Param)
    assert jax.jit(lambda s: s)(params) == params
    grads = jax.grad(lambda s: (s["layers/0/w"].value ** 2).sum())(params)
    assert type(grads["layers/0/w"]) is nnx.Param
    np.testing.assert_array_equal(grads["layers/0/w"].value, [2, 2])
    stacked = jax.vmap(lambda s, x: jax.tree.map(lambda w: w * x, s), in_axes=(None, 0))(params, jnp.arange(3.0))
    assert stacked["layers/0/w"].value.shape == (3, 2)


@pytest.mark.parametrize("leaf", [None, object(), "text", 0, jax.ShapeDtypeStruct((), jnp.float32), True])
def test_state_may_hold_any_leaf_that_jax_puts_into_it(leaf):
    structure = jax.tree.structure(Model(1).get_state())
    state = jax.tree.unflatten(structure, [leaf] * structure.num_leaves)
    assert isinstance(state, nnx.State)
    assert state["layers/0/w"].value is leaf
    assert repr(state)
    assert list(state.filter(nnx.Param)) == ["layers/0/w"]


def test_state_survives_transposition_and_eval_shape():
    state = Model(1).get_state()
    shapes = jax.eval_shape(lambda s: s, state)
    assert shapes["layers/0/w"].value.shape == (2,)
    axes = jax.tree.map(lambda _: 0, state)
    assert axes["table"] == 0


def test_states_of_equal_paths_and_types_have_equal_structure():
    a, b = Model().get_state(), Model().get_state()
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert jax.tree.structure(a) != jax.tree.structure(a.filter(nnx.Param))


def test_it_survives_pickling():
    state = Model().get_state()
    again = pickle.loads(pickle.dumps(state))
    assert isinstance(again, nnx.State)
    assert again == state
    assert list(again) == list(state)


def test_it_prints_readably():
    text = repr(Model(1).get_state())
    assert "State" in text and "layers/0/w" in text and "Param" in text
    assert "float32" in text
    assert "[1." not in text


@pytest.mark.parametrize("bad", [{1: nnx.Param(1)}, 3, "text"])
def test_a_state_of_something_else_is_an_error(bad):
    with pytest.raises((TypeError, ValueError)):
        nnx.State(bad)


# parts and arrays


def test_sub_returns_what_is_below_a_path_without_the_prefix():
    state = Model().get_state()
    assert list(state.sub("layers/1")) == ["stat", "w"]
    assert state.sub("layers/1")["w"] == state["layers/1/w"]
    assert list(state.sub(("layers", "0"))) == ["stat", "w"]
    assert state.sub("") == state


def test_sub_matches_whole_segments_and_may_be_empty():
    state = nnx.State({"layers/1/w": jnp.ones(1), "layers/10/w": jnp.ones(2), "layers": jnp.ones(3)})
    assert list(state.sub("layers/1")) == ["w"]
    assert state.sub("layers/1")["w"].shape == (1,)
    assert len(state.sub("layer")) == 0


def test_map_passes_the_leaves_of_other_states():
    model = Model()
    params = model.filter(nnx.Param)
    grads = jax.tree.map(lambda x: 2 * x, params)
    stepped = params.map(lambda path, p, g, h: p.replace(p.value - g.value * h.value), grads, grads)
    np.testing.assert_array_equal(stepped["layers/0/w"].value, [-3.0, -3.0])
    assert stepped["layers/0/w"].sharding == ("a",)


def test_map_refuses_states_with_other_paths_and_names_them():
    state = small()
    with pytest.raises(ValueError, match=r"the other one has no 'c'; only the other one has 'd'"):
        state.map(lambda path, a, b: a, state.filter(nnx.Variable) | nnx.State({"d": jnp.ones(1)}))
    with pytest.raises(TypeError, match="further States, got"):
        state.map(lambda path, a, b: a, {"c": 1})


def test_arrays_are_the_values_by_path():
    model = Model()
    arrays = model.get_state().arrays()
    assert list(arrays) == list(model.get_state())
    assert arrays["table"] is model.table
    assert arrays["layers/0/w"] is model.layers[0].w


def test_a_state_can_be_saved_with_numpy_and_loaded_again(tmp_path):
    model = Model()
    np.savez(tmp_path / "model.npz", **model.get_state())
    with np.load(tmp_path / "model.npz") as saved:
        assert set(saved) == set(model.get_state())
        other = Model()
        other.update_state(jax.tree.map(jnp.zeros_like, other.get_state()))
        assert not other.load_state(saved)
    assert other.get_state() == model.get_state()
