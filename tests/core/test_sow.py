"""`Module.sow`: values collected on the side, in a tuple that a Variable holds."""

import jax
import jax.numpy as jnp
import pytest

import nnx
from tests.checks import assert_refused
from tests.core.method_models import Linear
from tests.models import Count


def test_sow_makes_a_tuple_on_first_use_and_appends_after():
    m = Linear()
    m.sow(nnx.Intermediate, "seen", 1)
    assert m.seen == (1,)
    m.sow(nnx.Intermediate, "seen", 2)
    assert m.seen == (1, 2)
    assert type(m.variable("seen")) is nnx.Intermediate
    assert m.pop_state(nnx.Intermediate)["seen"].value == (1, 2)


def test_sown_values_can_be_sown_again_after_popping():
    m = Linear()
    m.sow(nnx.Intermediate, "seen", 1)
    m.pop_state(nnx.Intermediate)
    m.sow(nnx.Intermediate, "seen", 3)
    assert m.seen == (3,)


@pytest.mark.parametrize("value", [jnp.ones(1), "text", 3], ids=["node", "static", "number"])
def test_sowing_into_an_attribute_that_is_not_a_variable_raises(value):
    m = nnx.Module()
    m.x = value
    with pytest.raises(ValueError, match="to be a Variable, got") as error:
        m.sow(nnx.Intermediate, "x", 1)
    assert "x" in str(error.value)
    assert m.x is value


def test_sowing_into_a_variable_of_another_type_is_an_error():
    m = Linear()
    with pytest.raises(ValueError, match="to be of type") as error:
        m.sow(nnx.Intermediate, "count", 1)
    assert "count" in str(error.value)
    assert m.count == 0


def test_sowing_into_a_parameter_names_both_types_and_changes_nothing():
    says = ("to be of type", "'w'", "Intermediate", "Param")
    assert_refused(lambda m: m.enc.sow(nnx.Intermediate, "w", 1), ValueError, says)


def test_sowing_into_a_variable_that_holds_no_tuple_is_an_error():
    m = Linear()
    with pytest.raises(ValueError, match="to be a tuple,") as error:
        m.sow(Count, "count", 1)
    assert "count" in str(error.value)
    assert m.count == 0


def test_sowing_arrays():
    m = Linear()
    m.sow(nnx.Intermediate, "h", jnp.ones(2))
    m.sow(nnx.Intermediate, "h", jnp.zeros(2))
    assert len(m.h) == 2
    assert len(jax.tree.leaves(m.filter(nnx.Intermediate))) == 2
