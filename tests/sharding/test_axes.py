"""What stacking does to the axis names of a Variable."""

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import nnx
from nnx.sharding.axes import add_axis, remove_axis

LAYERS = {nnx.PARTITION_NAME: "layers"}


def spec(sharding, **metadata):
    return nnx.Param(jnp.ones((2, 3)), sharding, **metadata)._spec


@pytest.mark.parametrize(
    ("index", "stacked"),
    [(0, ("layers", "din", "dout")), (1, ("din", "layers", "dout")), (-1, ("din", "dout", "layers"))],
)
def test_a_name_is_added_at_the_axis_and_removed_again(index, stacked):
    inner = spec(("din", "dout"), note="kept")
    outer = add_axis(inner, index, LAYERS)
    assert outer.metadata["sharding"] == stacked and outer.metadata["note"] == "kept"
    assert outer.type is nnx.Param
    assert remove_axis(outer, index, LAYERS) is inner


def test_a_partition_spec_stays_one():
    outer = add_axis(spec(PartitionSpec("din", None)), 0, LAYERS)
    assert outer.metadata["sharding"] == PartitionSpec("layers", "din", None)
    assert isinstance(outer.metadata["sharding"], PartitionSpec)


def test_missing_entries_are_filled_up_to_the_axis():
    assert add_axis(spec(("din",)), 2, LAYERS).metadata["sharding"] == ("din", None, "layers")


@pytest.mark.parametrize("change", [add_axis, remove_axis])
def test_without_names_or_without_a_partition_name_nothing_changes(change):
    bare, named = spec(None), spec(("din", "dout"))
    assert change(bare, 0, LAYERS) is bare
    assert change(named, 0, {}) is named


def test_removing_a_name_that_is_not_there_shows_the_variable_and_the_cure():
    with pytest.raises(ValueError, match="axis 0 of the stacked Variables is named 'layers'") as error:
        remove_axis(spec(("din", "dout")), 0, LAYERS)
    assert "'din' there" in str(error.value) and "metadata_params" in str(error.value)
    with pytest.raises(ValueError, match="no entry"):
        remove_axis(spec(("din",)), 3, LAYERS)
