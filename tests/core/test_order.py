"""The order of attributes and of the items of dicts, outside of transforms; see transforms/test_order.py for inside."""

import collections
import copy
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import nnx

ONE = jnp.ones(1)


class Block(nnx.Module):
    def __init__(self, size: int = 1):
        self.second = nnx.Param(jnp.ones(size))
        self.first = nnx.BatchStat(jnp.zeros(size))
        self.kind = "block"


class Model(nnx.Module):
    def __init__(self):
        self.net = {"up": Block(), "down": Block()}
        self.last = Block()
        self.cache = {"value": ONE, "key": [ONE, {"b": ONE, "a": ONE}]}
        self.table = nnx.Cache(collections.OrderedDict(y=ONE, x=ONE))
        self.bias = nnx.Ref(nnx.Param(ONE))


COPIES = {
    "clone": nnx.Module.clone,
    "merge": lambda m: m.partition().merge(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "a view": lambda m: m.view(kind="other"),
}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_a_copy_has_its_attributes_and_items_in_order(make_copy: Any):
    model = make_copy(Model())
    assert [*vars(model)] == ["net", "last", "cache", "table", "bias"]
    assert [*model.net] == ["up", "down"] and [*vars(model.last)] == ["second", "first", "kind"]
    assert [*model.cache] == ["value", "key"] and [*model.cache["key"][1]] == ["b", "a"]
    assert [*model.table] == ["y", "x"]


def test_modules_are_visited_as_they_were_assigned_and_paths_are_sorted():
    model = Model()
    assert [path for path, _ in model.named_modules()] == ["", "net", "net/up", "net/down", "last"]
    assert [*model.modules()][2:4] == [model.net.up, model.net.down]
    assert [*model.filter(nnx.Param)] == ["bias", "last/second", "net/down/second", "net/up/second"]


def test_a_shared_module_is_visited_at_its_canonical_path():
    model = nnx.Dict(b=Block(), a=nnx.Dict())
    model.a.b = model.b
    assert [path for path, _ in model.named_modules()] == ["", "b", "a"]


def test_repr_is_in_order():
    def labels(text: str) -> list[str]:
        lines = [line for line in text.splitlines() if line[:3].strip()]
        return [line.split(":")[0].strip() for line in lines if ":" in line and not line.startswith("   ")]

    assert labels(repr(Model())) == labels(str(Model())) == ["net", "last", "cache", "table", "bias"]
    assert [row.path for row in nnx.summary(Model()).rows][:5] == ["", "net", "net/up", "net/down", "last"]


def test_items_of_a_sequence_are_printed_by_number():
    model = nnx.Sequence([nnx.Param(1.0), 2, nnx.Param(3.0)])
    model.update_state(model.pop_state(nnx.Param))
    assert [line.split(":")[0].strip() for line in repr(model).splitlines()[1:-1]] == ["0", "1", "2"]


def test_a_summary_of_a_call_is_in_the_order_of_the_calls():
    class Net(nnx.Module):
        def __init__(self):
            self.spare, self.last, self.blocks = nnx.Dropout(0.5), nnx.Identity(), nnx.Dict(z=Step(), y=Step())

        def __call__(self, x: Any) -> Any:
            return self.last(self.blocks.z(self.blocks.y(x)))

    class Step(nnx.Module):
        def __call__(self, x: Any) -> Any:
            return x + 1

    assert [row.path for row in nnx.summary(Net()).rows] == ["", "spare", "last", "blocks", "blocks/z", "blocks/y"]
    called = [row.path for row in nnx.summary(Net(), ONE).rows]
    assert called == ["", "blocks", "blocks/y", "blocks/z", "last", "spare"]


def test_models_built_by_the_same_code_have_one_structure_and_another_order_is_another():
    assert Model().get_module_def() == Model().get_module_def()
    model = Model()
    last = model.last
    del model.last
    model.last = last
    (difference,) = Model().get_module_def().diff(model.get_module_def())
    before, after = "net, last, cache, table, bias", "net, cache, table, bias, last"
    assert difference == ("", f"attributes in the order {before}", f"attributes in the order {after}")


def test_a_variable_without_state_keeps_its_place():
    model = Model()
    params, rest = model.partition(nnx.Param, ...).states
    merged = model.get_module_def().merge(params)
    assert [*vars(merged.last)] == ["second", "kind"]
    merged.update_state(rest)
    assert [*vars(merged.last)] == ["second", "first", "kind"]
    other = model.get_module_def().merge(params)
    other.last.first = ONE
    assert [*vars(other.last)] == ["second", "first", "kind"]
    assert merged.get_module_def() == model.get_module_def()


def test_an_update_through_jax_leaves_the_items_of_dicts_in_order():
    model = Model()
    model.update_state(jax.tree.map(lambda leaf: leaf + 1, model.get_state()))
    assert [*model.cache] == ["value", "key"] and [*model.cache["key"][1]] == ["b", "a"]
    assert model.cache["key"][1]["a"] == 2
    model.load_state(jax.tree.map(lambda leaf: leaf + 1, model.get_state()))
    assert [*model.cache] == ["value", "key"] and model.cache["value"] == 3


def test_states_whose_dicts_are_ordered_differently_map_over_each_other():
    one, other = Model(), Model()
    other.cache = {"key": [ONE, {"a": ONE, "b": ONE}], "value": ONE}
    total = jax.tree.map(jnp.add, one.get_state(), other.get_state())
    assert total["cache"].value["key"][1]["b"] == 2


# Trees


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.mark.parametrize(
    "tree",
    [
        {"b": 1, "a": {"d": 2, "c": 3}},
        [{"b": 1, "a": 2}, ({"z": 1, "y": [{"x": 1, "w": 2}]}, 3)],
        Pair({"b": 1, "a": 2}, None),
        collections.defaultdict(list, {"b": 1, "a": {"d": 1, "c": 1}}),
        {2: 1, 1: 2},
    ],
    ids=str,
)
def test_tree_of_a_variable_keeps_its_order_when_jax_sorts_its_state(tree: Any):
    model = nnx.Dict(tree=nnx.Param(tree))
    through_jax = jax.tree.map(lambda leaf: leaf, model.get_state())
    assert repr(through_jax["tree"].value) != repr(tree)
    model.update_state(through_jax)
    assert repr(model.tree) == repr(tree) and type(model.tree) is type(tree)


def test_update_with_other_keys_takes_their_order_where_the_keys_differ():
    model = nnx.Dict(tree=nnx.Param({"b": 1, "a": {"d": 1, "c": 1}}))
    model.update_state(nnx.State({"tree": nnx.Param({"a": {"c": 1, "d": 1}, "x": 1, "b": 1})}))
    assert repr(model.tree) == "{'a': {'d': 1, 'c': 1}, 'x': 1, 'b': 1}"


# Dicts that JAX does not take apart


class Table(dict):
    pass


@pytest.mark.parametrize("wrap", [lambda value: value, nnx.Param, lambda value: [value]], ids=["bare", "Param", "list"])
@pytest.mark.parametrize(
    ("value", "reason", "advice"),
    [
        ({1: ONE, "a": ONE}, "its keys cannot be sorted", "Use keys of one type"),
        (Table(a=ONE), "it does not know the class", "Convert it to a plain dict"),
    ],
    ids=["keys", "class"],
)
def test_a_dict_that_jax_cannot_take_apart_is_refused_with_advice(wrap: Any, value: Any, reason: str, advice: str):
    with pytest.raises(ValueError, match="its values are data, and JAX cannot take it apart") as caught:
        nnx.Dict().d = wrap(value)
    assert reason in str(caught.value) and advice in str(caught.value)


def test_dict_without_arrays_is_static_with_any_keys():
    model = nnx.Dict()
    model.d, model.e, model.f = {1: 2, "a": 3}, Table(a=1), {"axes": {nnx.Param: 0, nnx.Cache: 0}}
    assert [*model.clone().d] == [1, "a"] and type(model.clone().e) is Table and not model.get_state()


# What 0.2 has pickled


MODELS = {
    "linear": lambda: nnx.Linear(2, 3, ctx=nnx.context(0)),
    "mlp": lambda: nnx.Sequence(
        [
            nnx.Linear(2, 2, ctx=nnx.context(0)),
            nnx.Dict(z=nnx.Linear(2, 1, ctx=nnx.context(1)), a=jnp.zeros(2)),
        ]
    ),
    "norm": lambda: nnx.BatchNorm(3, ctx=nnx.context(0)),
    "dict value": lambda: nnx.Dict(cache={"b": jnp.ones(1), "a": jnp.zeros(1)}, tag="x"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_and_moduledefs_that_0_2_has_pickled_equal_fresh_ones(name: str):
    pickled = pickle.loads((Path(__file__).parent / "data" / "models_of_0_2.pickle").read_bytes())
    model, moduledef = pickled[name]
    fresh = MODELS[name]().get_module_def()
    assert model.get_module_def() == fresh and repr(model) == repr(MODELS[name]())
    # They have no order, so they equal the structure in any order.
    assert moduledef == fresh and fresh == moduledef and hash(moduledef) == hash(fresh) and not fresh.diff(moduledef)
    assert pickle.loads(pickle.dumps(moduledef)) == fresh
    assert moduledef.merge(model.get_state()).get_state() == model.get_state()
    assert moduledef != nnx.Dict().get_module_def()
