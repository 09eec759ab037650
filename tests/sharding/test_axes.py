"""What stacking does to the axis names of a Variable: the stack has one more, and a member sees its own."""

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import nnx

LAYERS = {nnx.PARTITION_NAME: "layers"}
seen_inside = []


class Layer(nnx.Module):
    """A kernel with names, which a call adds to `seen_inside`."""

    def __init__(self, sharding, **metadata):
        self.kernel = nnx.Param(jnp.ones((2, 3)), sharding, **metadata)

    def __call__(self):
        seen_inside.append(self.variable("kernel").sharding)


def stack(sharding, index=0, metadata_params=LAYERS, **metadata):
    options = {"variable_axes": {nnx.Param: index}, "metadata_params": metadata_params}
    return nnx.Vmap(Layer, axis_size=4, in_axes=None, **options)(sharding, **metadata)


def names(model):
    return model.vmap_module.variable("kernel").sharding


@pytest.mark.parametrize(
    ("index", "stacked"),
    [(0, ("layers", "din", "dout")), (1, ("din", "layers", "dout")), (-1, ("din", "dout", "layers"))],
)
def test_name_is_added_at_the_axis_and_absent_inside(index, stacked):
    model = stack(("din", "dout"), index, note="kept")
    assert names(model) == stacked and model.vmap_module.variable("kernel").note == "kept"
    seen_inside.clear()
    model()
    assert seen_inside == [("din", "dout")]


def test_partition_spec_stays_one():
    assert names(stack(PartitionSpec("din", None))) == PartitionSpec("layers", "din", None)
    assert isinstance(names(stack(PartitionSpec("din", None))), PartitionSpec)


def test_missing_entries_are_filled_up_to_the_axis():
    assert names(stack(("din",), 2)) == ("din", None, "layers")


def test_without_names_or_without_a_partition_name_nothing_changes():
    assert names(stack(None)) is None
    assert names(stack(("din", "dout"), metadata_params={})) == ("din", "dout")


@pytest.mark.parametrize(("sharding", "there"), [(("din", "dout"), "'din' there"), ((), "no entry")])
def test_removing_a_name_that_is_not_there_shows_the_variable_and_what_to_write(sharding, there):
    unnamed = stack(sharding, metadata_params={}).vmap_module
    call = nnx.vmap(Layer.__call__, variable_axes={nnx.Param: 0}, axis_size=4, in_axes=None, metadata_params=LAYERS)
    with pytest.raises(ValueError, match="axis 0 of the stacked Variables is named 'layers'") as error:
        call(unnamed)
    assert there in str(error.value) and "metadata_params" in str(error.value)
