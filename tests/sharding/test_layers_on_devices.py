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


@pytest.mark.parametrize("layer", ["grouped attention", "LSTM", "ConvLSTM"])
def test_layers_on_explicit_axes_have_the_gradients_of_one_device(seen, layer):
    found = seen["explicit_layers"][layer]
    assert found["difference"] < 1e-5 and found["types"]


def test_cross_entropy_takes_logits_that_are_split_over_the_vocabulary(seen):
    one_device, *others = seen["split_logits"]
    np.testing.assert_allclose(others, one_device, rtol=1e-5)


def test_a_model_built_in_parts_has_exactly_the_numbers_of_its_constructor(seen):
    assert len(seen["same_numbers"]) == 4
    assert {name for name, same in seen["same_numbers"].items() if not same} == set()


def test_a_sharded_target_is_restored_with_little_more_memory_than_an_abstract_one(seen):
    found, margin = seen["restoring"], 17 << 20  # what is read at once
    assert found["abstract"] == found["model"]
    assert found["sharded"] <= found["abstract"] + margin < 1.6 * found["model"]


def test_a_large_array_left_whole_and_a_constraint_without_effect_are_warned_of_once(seen):
    placed, constrained = seen["warned"]
    assert "w: 16.0 MiB whole on each of 8 devices: no rule decides 'rows'" in placed
    assert "no array has the axis name of the rule ('row', 'data')" in placed
    assert constrained.startswith("with_logical_constraint: no rule has any of the axis names ('bach',)")


def test_a_planned_step_takes_the_memory_and_the_collectives_of_one_written_by_hand(seen):
    ours, by_hand = seen["plans"]
    assert abs(ours[0] - by_hand[0]) <= 64  # the optimizer counts its steps
    assert ours[1] == by_hand[1] == [{"all-gather": 7, "all-reduce": 2}, {"all-gather": 7, "all-reduce": 4}]


def test_every_block_of_the_guide_runs_on_eight_devices(seen):
    assert seen["guide"] == 8  # test_readme runs them on one
