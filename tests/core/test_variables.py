"""Containers: one value plus metadata, pytrees whose metadata are static, collections by name."""

import gc
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import nnx
from tests.models import Box, Count


class RunningMean(nnx.Variable):
    pass


class SpecialParam(nnx.Param):
    pass


VARIABLE_TYPES = [nnx.Variable, nnx.Param, nnx.BatchStat, nnx.Cache, nnx.Intermediate, Count, SpecialParam]
NODE_TYPES = [nnx.Node, *VARIABLE_TYPES]


def test_everything_that_wraps_a_value_is_a_container():
    for container in [*NODE_TYPES, nnx.Static, nnx.TreeNode]:
        assert issubclass(container, nnx.Container)


def test_a_variable_is_a_node_and_the_built_in_types_are_variables():
    assert issubclass(nnx.Variable, nnx.Node)
    for variable_type in VARIABLE_TYPES:
        assert issubclass(variable_type, nnx.Variable)
    assert not issubclass(nnx.Static, nnx.Node)


@pytest.mark.parametrize("node_type", NODE_TYPES)
def test_a_container_holds_its_value_and_its_metadata_as_attributes(node_type):
    container = node_type(3, unit="metres", anything_given=[1])
    assert container.value == 3
    assert container.unit == "metres"
    assert container.anything_given == [1]


def test_missing_metadata_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        nnx.Param(1).nothing_of_the_kind  # noqa: B018


# sharding


@pytest.mark.parametrize("variable_type", VARIABLE_TYPES)
def test_sharding_may_be_given_by_position_or_by_name(variable_type):
    assert variable_type(1, ("din", "dout")).sharding == ("din", "dout")
    assert variable_type(1, sharding=("din", "dout")).sharding == ("din", "dout")


def test_sharding_is_none_unless_given():
    assert nnx.Param(1).sharding is None


def test_sharding_may_be_a_partition_spec():
    spec = PartitionSpec("din", None)
    assert nnx.Param(1, spec).sharding == spec
    assert jax.tree.structure(nnx.Param(1, spec)) == jax.tree.structure(nnx.Param(2, spec))


# equivalence, equality, replace


def test_containers_are_equal_when_type_metadata_and_value_agree():
    assert nnx.Param(1, ("a",), unit="m") == nnx.Param(1, ("a",), unit="m")
    assert nnx.Param(1) != nnx.Param(2)
    assert nnx.Param(1) != nnx.Variable(1)
    assert nnx.Param(1) != nnx.BatchStat(1)
    assert nnx.Param(1, ("a",)) != nnx.Param(1, ("b",))
    assert nnx.Param(1, unit="m") != nnx.Param(1)
    assert nnx.Param(1) != 1


def test_containers_of_arrays_compare_to_a_bool():
    assert bool(nnx.Param(jnp.arange(3)) == nnx.Param(jnp.arange(3))) is True
    assert bool(nnx.Param(jnp.arange(3)) == nnx.Param(jnp.ones(3))) is False
    assert bool(nnx.Param(jnp.arange(3)) == nnx.Param(jnp.ones(4))) is False


def test_replace_returns_a_changed_copy():
    before = nnx.Param(1, ("a",), unit="m")
    after = before.replace(value=2, unit="km")
    assert type(after) is nnx.Param
    assert (after.value, after.sharding, after.unit) == (2, ("a",), "km")
    assert (before.value, before.sharding, before.unit) == (1, ("a",), "m")


def test_replace_takes_an_equivalent_container_as_value():
    before = nnx.Param(1, ("a",))
    assert before.replace(value=nnx.Param(5, ("a",))) == nnx.Param(5, ("a",))


@pytest.mark.parametrize("other", [nnx.BatchStat(2), nnx.Variable(2), nnx.Node(2), nnx.Param(2, ("a",)), nnx.Static(2)])
def test_replace_refuses_the_value_of_a_container_that_is_not_equivalent(other):
    before = nnx.Param(1)
    with pytest.raises(ValueError, match="Cannot replace value from incompatible container"):
        before.replace(value=other)
    assert before == nnx.Param(1)


def test_replace_refuses_an_unknown_metadata_key_and_names_it():
    with pytest.raises(ValueError, match="Unknown metadata key.*colour|colour.*Unknown metadata key"):
        nnx.Param(1, unit="m").replace(colour="red")


# wrapping


@pytest.mark.parametrize("node_type", [*NODE_TYPES, nnx.Static, nnx.TreeNode])
def test_wrapping_is_idempotent(node_type):
    twice = node_type(node_type(1))
    assert type(twice) is node_type
    assert twice.value == 1


def test_wrapping_again_keeps_the_metadata():
    twice = nnx.Param(nnx.Param(1, ("a",), unit="m"))
    assert (twice.value, twice.sharding, twice.unit) == (1, ("a",), "m")


@pytest.mark.parametrize(
    "outer, inner",
    [
        (nnx.BatchStat, nnx.Param),
        (nnx.Param, nnx.BatchStat),
        (nnx.Node, nnx.Variable),
        (nnx.Variable, nnx.Node),
        (nnx.Static, nnx.Param),
        (nnx.Param, nnx.Static),
        (Count, RunningMean),
    ],
)
def test_wrapping_into_another_type_is_an_error_that_names_both(outer, inner):
    with pytest.raises(ValueError, match="is not compatible with return type") as error:
        outer(inner(1))
    assert outer.__name__ in str(error.value)
    assert inner.__name__ in str(error.value)


# pytrees


@pytest.mark.parametrize("node_type", [*NODE_TYPES, nnx.TreeNode])
def test_every_node_type_is_a_pytree_with_one_child_called_value(node_type):
    container = node_type(3, unit="m")
    [(path, leaf)], _ = jax.tree_util.tree_flatten_with_path(container)
    assert jax.tree_util.keystr(path) == ".value"
    assert leaf == 3


@pytest.mark.parametrize("node_type", [*NODE_TYPES, nnx.TreeNode])
def test_mapping_over_a_container_keeps_type_and_metadata(node_type):
    mapped = jax.tree.map(lambda x: x + 1, node_type(3, unit="m"))
    assert type(mapped) is node_type
    assert (mapped.value, mapped.unit) == (4, "m")


def test_metadata_are_the_static_part_of_the_pytree():
    def structure(container):
        return jax.tree.structure(container)

    assert structure(nnx.Param(1, ("a",))) == structure(nnx.Param(2, ("a",)))
    assert structure(nnx.Param(1, ("a",))) != structure(nnx.Param(1, ("b",)))
    assert structure(nnx.Param(1)) != structure(nnx.BatchStat(1))


def test_a_containers_value_may_itself_be_a_pytree():
    assert jax.tree.leaves(nnx.Param({"a": 1, "b": (2, 3)})) == [1, 2, 3]


def test_containers_travel_through_jit():
    double = jax.jit(lambda p: p.replace(value=p.value * 2))
    out = double(nnx.Param(jnp.arange(3), ("a",)))
    assert type(out) is nnx.Param
    assert out.sharding == ("a",)
    np.testing.assert_array_equal(out.value, [0, 2, 4])


def test_a_subclass_of_a_subclass_registers_itself():
    class Deeper(SpecialParam):
        pass

    assert jax.tree.leaves(Deeper(7)) == [7]


def test_a_static_is_a_pytree_without_leaves_hashed_by_its_value():
    assert jax.tree.leaves(nnx.Static(jnp)) == []
    assert nnx.Static("a") == nnx.Static("a")
    assert hash(nnx.Static("a")) == hash(nnx.Static("a"))
    assert nnx.Static("a") != nnx.Static("b")
    assert len({nnx.Static("a"), nnx.Static("a"), nnx.Static("b")}) == 2
    assert jax.tree.structure(nnx.Static("a")) == jax.tree.structure(nnx.Static("a"))
    assert jax.tree.structure(nnx.Static("a")) != jax.tree.structure(nnx.Static("b"))


# initialisers that carry metadata


def zeros(key, shape):
    return jnp.zeros(shape)


def test_container_metadata_is_a_value_and_its_metadata():
    carried = nnx.ContainerMetadata(1, {"unit": "m"})
    assert carried.value == 1
    assert carried.metadata == {"unit": "m"}


def test_metadata_of_an_initializer_reach_the_variable():
    initializer = nnx.with_metadata(zeros, sharding=("a", "b"), unit="m")
    result = initializer(jax.random.key(0), (2, 3))
    assert isinstance(result, nnx.ContainerMetadata)
    param = nnx.Param(result)
    assert type(param) is nnx.Param
    assert param.value.shape == (2, 3)
    assert (param.sharding, param.unit) == (("a", "b"), "m")


def test_with_partitioning_is_the_short_form_for_sharding():
    param = nnx.Param(nnx.with_partitioning(zeros, ("a", "b"))(jax.random.key(0), (2, 3)))
    assert param.sharding == ("a", "b")
    assert param.value.shape == (2, 3)


def test_metadata_of_an_initialiser_reach_the_module():
    m = Box(w=nnx.Param(nnx.with_partitioning(zeros, ("a", "b"))(jax.random.key(0), (2, 3))))
    assert isinstance(m.w, jax.Array)
    assert m.variable("w").sharding == ("a", "b")


# collections by name


@pytest.mark.parametrize(
    "variable_type, name",
    [
        (nnx.Param, "params"),
        (nnx.BatchStat, "batch_stats"),
        (nnx.Cache, "cache"),
        (nnx.Intermediate, "intermediates"),
        (Count, "count"),
        (RunningMean, "running_mean"),
    ],
)
def test_each_variable_type_has_a_collection_name(variable_type, name):
    m = Box(x=variable_type(1), other=nnx.Node(jnp.zeros(1)))
    assert m.collections() == {name}
    assert list(m.filter(name)) == ["x"]


def test_a_subclass_of_param_is_found_by_the_name_of_its_parent():
    m = Box(x=SpecialParam(1), y=nnx.BatchStat(2))
    assert list(m.filter("params")) == ["x"]


def test_var_makes_a_variable_of_the_type_for_that_name():
    counts = nnx.var("counts", 0, unit="steps")
    assert isinstance(counts, nnx.Variable)
    assert counts.value == 0
    assert counts.unit == "steps"
    assert type(counts) is type(nnx.var("counts", 1))
    assert type(counts) is not type(nnx.var("other_counts", 0))
    m = Box(n=counts, w=nnx.Param(1))
    assert list(m.filter("counts")) == ["n"]
    assert m.collections() == {"counts", "params"}


def test_var_of_a_built_in_name_is_the_built_in_type():
    assert type(nnx.var("params", 1)) is nnx.Param
    assert type(nnx.var("batch_stats", 1)) is nnx.BatchStat


def test_a_users_type_may_set_its_own_name():
    class Running(nnx.Variable):
        collection = "running_things"

    class Faster(Running):
        pass

    m = Box(a=Running(1), b=Faster(2), c=nnx.Param(3))
    assert m.collections() == {"running_things", "faster", "params"}
    assert list(m.filter("running_things")) == ["a", "b"]
    assert type(nnx.var("running_things", 1)) is Running


@pytest.mark.parametrize(
    "name, collection",
    [("KLLoss", "kl_loss"), ("Loss", "loss"), ("EMAParam2", "ema_param2"), ("lower", "lower")],
)
def test_class_names_become_snake_case(name, collection):
    assert Box(x=type(name, (nnx.Variable,), {})(1)).collections() == {collection}


def test_another_type_of_a_built_in_name_does_not_take_the_name_over():
    class Adapter(nnx.Param):
        collection = "params"

    assert type(nnx.var("params", 1)) is nnx.Param
    m = Box(a=Adapter(1), b=nnx.Param(2))
    assert list(m.filter("params")) == ["a", "b"]
    assert m.collections() == {"params"}


def test_name_stays_registered_while_one_of_its_types_is_alive():
    first = type("Transient", (nnx.Variable,), {})
    second = type("Transient", (nnx.Variable,), {})
    m = Box(a=first(1))
    del second
    gc.collect()
    assert list(m.filter("transient")) == ["a"]


def test_two_types_of_the_same_name_belong_to_one_collection():
    first = type("Tally", (nnx.Variable,), {})
    second = type("Tally", (nnx.Variable,), {})
    m = Box(a=first(1), b=second(2))
    assert m.collections() == {"tally"}
    assert sorted(m.filter("tally")) == ["a", "b"]


def test_lower_case_constructors():
    assert type(nnx.param(1, ("a",))) is nnx.Param
    assert nnx.param(1, sharding=("a",)).sharding == ("a",)
    assert type(nnx.node(1)) is nnx.Node
    assert type(nnx.static(1)) is nnx.Static
    assert nnx.static(1) == nnx.Static(1)


def test_types_made_on_demand_survive_pickling():
    before = nnx.var("made_for_pickling", 3, unit="m")
    after = pickle.loads(pickle.dumps(before))
    assert type(after) is type(before)
    assert after == before


def test_types_made_on_demand_survive_pickling_into_another_process():
    payload = pickle.dumps((nnx.var("only_known_here", 3), jax.tree.structure(nnx.Param(0)).num_leaves))
    code = (
        "import pickle, sys, nnx\n"
        f"variable, _ = pickle.loads({payload!r})\n"
        "assert isinstance(variable, nnx.Variable) and variable.value == 3\n"
        "assert type(variable) is type(nnx.var('only_known_here', 0))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)


@pytest.mark.parametrize("node_type", [*NODE_TYPES, nnx.Static])
def test_containers_survive_pickling(node_type):
    container = node_type(3)
    again = pickle.loads(pickle.dumps(container))
    assert type(again) is node_type
    assert again == container


def test_the_repr_of_a_container_shows_type_value_and_metadata():
    text = repr(nnx.Param(jnp.zeros((2, 3)), ("a", "b")))
    assert "Param" in text
    assert "2, 3" in text.replace("2,3", "2, 3")
    assert "float32" in text
    assert "'a'" in text and "'b'" in text


def test_metadata_may_be_any_value():
    array = np.ones(2)
    for value in ([1, 2], {"a": [1]}, {1, 2}, array, [array], lambda x: x, jnp.float32, object()):
        param = nnx.Param(1, extra=value)
        assert param.extra is value if not isinstance(value, (list, dict, set)) else param.extra == value
        assert param == nnx.Param(1, extra=value)
        assert jax.tree.structure(param) == jax.tree.structure(nnx.Param(2, extra=value))


def test_a_list_in_the_metadata_belongs_to_one_variable_alone():
    given = ["a"]
    param = nnx.Param(1, tags=given)
    param.tags.append("b")
    param.metadata["tags"].append("c")
    given.append("d")
    assert param.tags == nnx.Param(2, tags=["a"]).tags == ["a"]
    assert nnx.Ref(nnx.Param(1, tags=["a"])).tags == ["a"]


def test_metadata_that_hold_a_module_are_an_error_naming_them():
    module = Box(w=1)
    for value, where in ((module, "extra"), ([module], r"extra\[0\]"), ({"a": nnx.Param(1)}, r"extra\['a'\]")):
        with pytest.raises(ValueError, match=rf"The static value {where} is .*\n.*Make it an attribute of a Module"):
            nnx.Param(1, extra=value)
    with pytest.raises(ValueError, match="extra is a bound method of a Module .*get_state"):
        nnx.Param(1, extra=module.get_state)


def test_a_static_container_may_hold_arrays():
    array = jnp.ones(2)
    a, b, c = nnx.Static([array, "x"]), nnx.Static([array, "x"]), nnx.Static([jnp.ones(2), "x"])
    assert a == b and hash(a) == hash(b) and a != c
    m = Box(table=a)
    assert m.clone().table[0] is array
    assert m.clone().get_module_def() == m.get_module_def() == Box(table=b).get_module_def()


def test_on_value_and_on_metadata_names_do_not_clash():
    param = nnx.Param(1, value_range=(0, 1))
    assert (param.value, param.value_range) == (1, (0, 1))


def test_the_result_of_an_initialiser_with_metadata_must_be_wrapped():
    with pytest.raises((ValueError, TypeError), match="'w'"):
        Box(w=nnx.with_metadata(zeros, unit="m")(None, (2,)))


def test_an_incompatible_wrap_says_how_to_change_the_type():
    with pytest.raises(ValueError, match="is not compatible with return type") as error:
        nnx.BatchStat(nnx.Param(1))
    assert ".value" in str(error.value)


# array-like


def test_a_variable_has_the_shape_and_dtype_of_its_array():
    for value in (jnp.ones((2, 3), jnp.bfloat16), np.ones((2, 3), np.int8), jax.ShapeDtypeStruct((2, 3), jnp.float16)):
        assert nnx.Param(value).shape == (2, 3)
        assert nnx.Param(value).dtype == value.dtype
    assert nnx.Param(3).shape == () and nnx.Param(3).dtype == jnp.int32


def test_a_variable_around_a_pytree_has_no_shape():
    assert not hasattr(nnx.Variable((1, 2)), "shape")
    assert not hasattr(nnx.Variable((1, 2)), "dtype")


def test_numpy_takes_a_variable_for_its_array():
    param = nnx.Param(jnp.arange(3.0))
    np.testing.assert_array_equal(np.asarray(param), [0.0, 1.0, 2.0])
    assert np.asarray(param, np.int32).dtype == np.int32
    assert np.mean(param) == 1.0
    held = np.ones(2)
    assert np.asarray(nnx.Param(held)) is held
    assert np.array(nnx.Param(held)) is not held
