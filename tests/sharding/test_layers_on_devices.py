"""Layers on eight virtual devices: what they communicate, how they are built and restored, and what is warned of."""

import json

import numpy as np
import pytest

from tests.sharding.programs import HERE, finish, start

LIMIT = 240  # seconds


@pytest.fixture(scope="module")
def seen():
    """The findings of the program, which runs once."""
    (output,) = finish([start(HERE / "layers_program.py", devices=8)], LIMIT)
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize(
    ("layer", "branches"),
    [("MLP", 1), ("GatedMLP", 1), ("attention", 1), ("grouped attention", 1), ("DecoderBlock", 2)],
)
def test_tensor_parallelism_needs_one_all_reduce_per_branch(seen, layer, branches):
    found = seen["tensor_parallel_collectives"][layer]
    assert found["kinds"] == ["all-reduce"] * branches and not found["findings"]


def test_a_pair_of_linears_gathers_between_them_and_the_report_says_so(seen):
    found = seen["tensor_parallel_collectives"]["Linear pair"]
    assert found["kinds"] == ["all-gather"]
    (text,) = found["findings"]
    assert text.startswith("0 and 2 are split by their outputs") and '"0/kernel": ("embed", "mlp")' in text


@pytest.mark.parametrize("layer", ["attention", "LSTM", "ConvLSTM"])
def test_layers_on_explicit_axes_have_the_gradients_of_one_device(seen, layer):
    found = seen["explicit_layers"][layer]
    assert found["difference"] < 1e-5 and found["types"]


def test_cross_entropy_takes_logits_that_are_split_over_the_vocabulary(seen):
    one_device, *others = seen["split_logits"]
    np.testing.assert_allclose(others, one_device, rtol=1e-5)


def test_linear_cross_entropy_takes_a_batch_and_a_vocabulary_that_are_split(seen):
    assert len(seen["loss_in_blocks"]) == 2 and max(seen["loss_in_blocks"]) < 1e-6


def test_the_loss_has_fewer_blocks_where_devices_share_the_batch(seen):
    assert seen["blocks_of_the_loss"] == [4, 2, 2]


def test_products_in_8_bits_are_the_same_on_either_type_of_axis(seen):
    assert len(seen["eight_bits"]) == 2 and max(seen["eight_bits"]) < 1e-5


def test_muon_trains_matrices_that_are_split_on_either_type_of_axis(seen):
    assert len(seen["muon"]) == 2 and max(seen["muon"]) < 1e-5


def test_weighted_metrics_are_exact_over_a_split_batch(seen):
    assert len(seen["weighted_metrics"]) == 4 and max(seen["weighted_metrics"]) < 1e-13


def test_a_model_built_in_parts_has_exactly_the_numbers_of_its_constructor(seen):
    assert len(seen["same_numbers"]) == 3
    assert {name for name, same in seen["same_numbers"].items() if not same} == set()


def test_a_sharded_target_is_restored_with_little_more_memory_than_an_abstract_one(seen):
    found, margin = seen["restoring"], 17 << 20  # what is read at once
    assert found["abstract"] == found["model"]
    assert found["sharded"] <= found["abstract"] + margin < 1.6 * found["model"]


# Warnings: those of placing a model twice, and of calling it twice afterward. Each appears once.


def test_a_misspelled_rule_is_warned_of_when_a_model_is_placed(seen):
    (placed,), called = seen["warned"]["a typo"]
    assert "the rule ('mpl', 'data'), and no constraint so far has used it. Did you mean 'mlp'?" in placed
    assert called == []


@pytest.mark.parametrize(("case", "name"), [("nothing like it", "hidden"), ("rules for placing only", "width")])
def test_another_name_that_nothing_uses_is_warned_of_when_the_model_has_run(seen, case, name):
    placed, (called,) = seen["warned"][case]
    assert placed == [] and f"no array has the axis name of the rule ('{name}', 'data')" in called


def test_a_rule_for_an_axis_that_the_mesh_lacks_is_warned_of(seen):
    (placed,), called = seen["warned"]["not on the mesh"]
    assert "the mesh has no axis 'modle', which ('heads', 'modle') asked for; its axes are ('data',)." in placed
    assert called == []


def test_a_mesh_axis_that_nothing_uses_is_warned_of(seen):
    placed, (called,) = seen["warned"]["an idle axis"]
    assert placed == [] and "no rule uses the mesh axis 'model' of size 2" in called


def test_a_name_in_a_constraint_without_a_rule_is_warned_of(seen):
    placed, (called, rule) = seen["warned"]["no rule for the activation"]
    assert placed == [] and called.startswith("with_logical_constraint: no rule has the axis name 'rows' of ('rows',)")
    assert "Did you mean 'row'?" in called and "Did you mean 'rows'?" in rule


def test_a_large_array_left_whole_is_warned_of(seen):
    (placed,), _ = seen["warned"]["large"]
    assert "w: 16.0 MiB whole on each of 8 devices: no rule decides 'row'" in placed
    assert "no array has the axis name of the rule ('column', 'data')" in placed


def test_rules_that_are_right_are_silent(seen):
    right = {name: found for name, found in seen["warned"].items() if name.startswith("right")}
    assert len(right) == 5 and set(map(str, right.values())) == {"[[], []]"}


def test_a_planned_step_takes_the_memory_and_the_collectives_of_one_written_by_hand(seen):
    ours, by_hand = seen["plans"]
    assert abs(ours[0] - by_hand[0]) <= 64  # the optimizer counts its steps
    assert ours[1] == by_hand[1] == [{"all-gather": 7, "all-reduce": 2}, {"all-gather": 7, "all-reduce": 4}]


def test_every_block_of_the_guide_runs_on_eight_devices(seen):
    assert seen["guide"] == 8  # test_readme runs them on one
