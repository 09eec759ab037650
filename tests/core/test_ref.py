"""Shared Variables: no accidental aliasing, and explicit sharing with ``nnx.Ref``."""

import copy
import gc
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models import Box


class Leaf(nnx.Module):
    def __init__(self, w):
        self.w = w


class Pair(nnx.Module):
    def __init__(self, a, b):
        self.a = a
        self.b = b


def tied(value=1.0, **metadata):
    """Two leaves below one root, whose ``w`` is one cell."""
    ref = nnx.Ref(nnx.Param(jnp.asarray(value), **metadata))
    return Pair(Leaf(ref), Leaf(ref))


def test_a_container_assigned_to_two_attributes_is_copied():
    param = nnx.Param(1)
    m = Pair(param, param)
    m.a = 5
    assert (m.a, m.b) == (5, 1)
    assert len(m.get_state()) == 2
    assert param.value == 1


def test_changing_a_container_after_assignment_does_not_reach_the_module():
    param = nnx.Param({"k": jnp.zeros(())})
    m = Leaf(param)
    container = m.variable("w")
    assert container == param
    m.w = {"k": jnp.ones(())}
    assert float(param.value["k"]) == 0.0


def test_a_ref_attribute_reads_as_the_raw_value():
    m = tied(3.0)
    assert isinstance(m.a.w, jax.Array)
    assert float(m.b.w) == 3.0


def test_a_ref_is_written_through_either_and_read_through_both():
    m = tied()
    m.a.w = jnp.asarray(5.0)
    assert float(m.b.w) == 5.0
    m.b.w = jnp.asarray(7.0)
    assert float(m.a.w) == 7.0
    assert m.a.w is m.b.w


def test_a_ref_has_one_entry_in_state_under_its_canonical_path():
    state = tied().get_state()
    assert list(state) == ["a/w"]
    assert type(state["a/w"]) is nnx.Param


def test_a_ref_has_one_gradient():
    state, moduledef = tied(3.0).partition()

    def loss(state):
        m = moduledef.merge(state)
        return m.a.w * m.b.w

    grads = jax.grad(loss)(state)
    assert list(grads) == ["a/w"]
    assert float(grads["a/w"].value) == 6.0


def test_assigning_an_equivalent_container_writes_through():
    m = tied(1.0, unit="m")
    m.a.w = nnx.Param(jnp.asarray(5.0), unit="m")
    assert float(m.b.w) == 5.0
    assert len(m.get_state()) == 1


@pytest.mark.parametrize("wrong", [nnx.BatchStat(1.0), nnx.Param(1.0, ("a",))])
def test_assigning_another_kind_of_container_is_an_error_and_changes_nothing(wrong):
    m = tied(3.0)
    with pytest.raises(ValueError, match="incompatible container|is not compatible"):
        m.a.w = wrong
    assert float(m.a.w) == float(m.b.w) == 3.0
    assert type(m.a.variable("w")) is nnx.Param
    assert len(m.get_state()) == 1


def test_assigning_another_ref_rebinds_that_attribute_only():
    m = tied(1.0)
    m.a.w = nnx.Ref(nnx.BatchStat(jnp.asarray(9.0)))
    assert (float(m.a.w), float(m.b.w)) == (9.0, 1.0)
    m.b.w = jnp.asarray(2.0)
    assert (float(m.a.w), float(m.b.w)) == (9.0, 2.0)
    assert {path: type(leaf) for path, leaf in m.get_state().items()} == {"a/w": nnx.BatchStat, "b/w": nnx.Param}


def test_deleting_unties_that_attribute_only():
    m = tied(1.0)
    del m.a.w
    assert not hasattr(m.a, "w")
    assert float(m.b.w) == 1.0
    m.b.w = jnp.asarray(4.0)
    assert not hasattr(m.a, "w")
    assert list(m.get_state()) == ["b/w"]


def test_after_untying_the_attribute_is_free_for_something_else():
    m = tied(1.0)
    del m.a.w
    m.a.w = jnp.asarray(2.0)
    assert float(m.b.w) == 1.0
    assert len(m.get_state()) == 2


def test_three_attributes_of_one_module_may_share_a_cell():
    ref = nnx.Ref(nnx.Param(jnp.asarray(1.0)))
    m = Pair(ref, ref)
    m.c = ref
    m.b = jnp.asarray(2.0)
    assert float(m.a) == float(m.b) == float(m.c) == 2.0
    assert list(m.get_state()) == ["a"]


def test_a_ref_may_be_attached_later_and_carries_the_current_value():
    ref = nnx.Ref(nnx.Param(jnp.asarray(1.0)))
    a = Leaf(ref)
    a.w = jnp.asarray(5.0)
    b = Leaf(ref)
    assert float(b.w) == 5.0


def test_metadata_and_type_stick_to_every_attribute():
    m = tied(1.0, sharding=("x",))
    for leaf in (m.a, m.b):
        assert type(leaf.variable("w")) is nnx.Param
        assert leaf.variable("w").sharding == ("x",)


@pytest.mark.parametrize(
    "rebuild",
    [
        lambda m: m.clone(),
        lambda m: m.clone(copy_arrays=True),
        lambda m: m.partition().merge(),
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
    ],
    ids=["clone", "clone with arrays", "partition and merge", "deepcopy", "pickle"],
)
def test_a_rebuilt_module_shares_the_cell_again_and_not_with_the_original(rebuild):
    m = tied(1.0)
    again = rebuild(m)
    again.a.w = jnp.asarray(5.0)
    assert float(again.b.w) == 5.0
    assert float(m.a.w) == float(m.b.w) == 1.0
    assert len(again.get_state()) == 1


def test_update_state_writes_to_every_attribute():
    m = tied(1.0)
    m.update_state(jax.tree.map(lambda x: x + 1, m.get_state()))
    assert float(m.a.w) == float(m.b.w) == 2.0


def test_update_state_accepts_any_alias():
    m = tied(1.0)
    m.update_state(nnx.State({"b/w": nnx.Param(jnp.asarray(8.0))}))
    assert float(m.a.w) == float(m.b.w) == 8.0
    assert len(m.get_state()) == 1


def test_a_tied_tables_canonical_path_and_an_update_through_its_alias():
    table = nnx.Ref(nnx.Param(jnp.ones((3, 2))))
    m = Box(decoder=Box(out=Box(kernel=table)), embed=Box(table=table))
    assert list(m.get_state()) == ["embed/table"]
    m.update_state(nnx.State({"decoder/out/kernel": nnx.Param(jnp.zeros((3, 2)))}))
    np.testing.assert_array_equal(m.embed.table, jnp.zeros((3, 2)))
    np.testing.assert_array_equal(m.decoder.out.kernel, jnp.zeros((3, 2)))
    assert list(m.get_state()) == ["embed/table"]
    merged = m.get_module_def().merge(nnx.State({"decoder/out/kernel": nnx.Param(jnp.full((3, 2), 5.0))}))
    np.testing.assert_array_equal(merged.embed.table, jnp.full((3, 2), 5.0))


def test_pop_state_removes_every_attribute_of_the_cell():
    m = tied(1.0)
    popped = m.pop_state(nnx.Param)
    assert list(popped) == ["a/w"]
    assert not hasattr(m.a, "w") and not hasattr(m.b, "w")
    assert len(m.get_state()) == 0


def test_a_ref_outlives_one_of_its_owners():
    ref = nnx.Ref(nnx.Param(jnp.asarray(1.0)))
    a, b = Leaf(ref), Leaf(ref)
    del a
    gc.collect()
    b.w = jnp.asarray(2.0)
    assert float(b.w) == 2.0


def test_moduledefs_tell_tied_from_untied():
    untied = Pair(Leaf(nnx.Param(jnp.asarray(1.0))), Leaf(nnx.Param(jnp.asarray(1.0))))
    assert tied().get_module_def() == tied().get_module_def()
    assert tied().get_module_def() != untied.get_module_def()


def test_attaching_a_ref_from_an_outer_trace_level_is_an_error():
    ref = nnx.Ref(nnx.Param(jnp.asarray(1.0)))

    @jax.jit
    def build(x):
        m = Leaf(ref)
        return m.w + x

    with pytest.raises(nnx.TraceContextError):
        build(1.0)
    m = Leaf(ref)
    assert float(m.w) == 1.0


def test_writing_through_a_ref_from_another_trace_level_is_an_error():
    m = tied(1.0)

    @jax.jit
    def write(x):
        m.a.w = x
        return x

    with pytest.raises(nnx.TraceContextError, match="Cannot mutate Module from different trace level"):
        write(2.0)
    assert float(m.a.w) == float(m.b.w) == 1.0


def test_a_ref_made_inside_a_transform_works_there():
    @jax.jit
    def run(x):
        ref = nnx.Ref(nnx.Param(x))
        a, b = Leaf(ref), Leaf(ref)
        a.w = a.w + 1
        return b.w

    assert float(run(1.0)) == 2.0


def test_tied_values_in_place_changes_are_seen_by_both():
    ref = nnx.Ref(nnx.Cache({"k": jnp.asarray(0.0)}))
    m = Pair(Leaf(ref), Leaf(ref))
    m.a.w["k"] = jnp.asarray(1.0)
    assert float(m.b.w["k"]) == 1.0
    state = m.get_state()
    assert float(state["a/w"].value["k"]) == 1.0


def test_a_container_given_to_a_ref_is_copied():
    param = nnx.Param({"k": jnp.asarray(0.0)})
    one, two = nnx.Ref(param), nnx.Ref(param)
    m = Pair(Leaf(one), Leaf(two))
    m.a.w["k"] = jnp.asarray(1.0)
    assert float(m.b.w["k"]) == float(param.value["k"]) == 0.0
    m.a.w = param
    m.a.w["k"] = jnp.asarray(2.0)
    assert float(param.value["k"]) == 0.0


def test_a_ref_in_a_sequence_and_an_attribute_is_one_cell():
    ref = nnx.Ref(nnx.Param(jnp.asarray(1.0)))
    m = Pair(nnx.Sequence([Leaf(ref)]), Leaf(ref))
    m.b.w = jnp.asarray(3.0)
    assert float(m.a[0].w) == 3.0
    assert list(m.get_state()) == ["b/w"]  # fewest segments win
    np.testing.assert_array_equal(m.get_path("a/0/w"), 3.0)


@pytest.mark.parametrize(
    "does",
    [lambda: nnx.Ref(jnp.ones(1)), lambda: nnx.Ref(nnx.Ref(nnx.Param(1))), lambda: nnx.Ref(nnx.Static(1))],
    ids=["array", "ref", "static"],
)
def test_a_ref_of_anything_but_a_variable_is_a_type_error(does):
    with pytest.raises(TypeError, match="nnx.Ref"):
        does()
