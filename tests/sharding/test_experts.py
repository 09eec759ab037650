"""Experts on eight virtual devices: tokens travel to their experts and back, and the result is that of one device."""

import json
from collections import Counter

import pytest

from tests.sharding.programs import HERE, finish, start


@pytest.fixture(scope="module")
def seen():
    """The findings of the program, which runs once."""
    (output,) = finish([start(HERE / "experts_program.py", devices=8)], 240)
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("routing", ["random", "one-sided"])
def test_loss_and_gradients_are_those_of_one_device(seen, routing):
    found = seen["distributed"]
    assert found[routing] < 1e-4
    assert found[f"{routing} losses"] < 1e-5


def test_every_device_holds_its_experts_only(seen):
    assert seen["distributed"]["parts"] == [[2, 8, 12], [2, 12, 8]]


def test_tokens_are_exchanged_and_no_expert_is_gathered(seen):
    found = seen["distributed"]["collectives"]
    kinds = Counter(kind for kind, _ in found)
    # Rows, the numbers of their experts, and the results: once, and once in the loop of further rounds.
    assert kinds["all-to-all"] == 6
    experts = 16 * 8 * 12
    assert max(size for kind, size in found if kind == "all-gather") <= 8 * 16 < experts  # the router, and shared


def test_tokens_that_cannot_be_divided_are_computed_all_the_same(seen):
    assert seen["distributed"]["few tokens"] < 1e-5


def test_another_mesh_axis_can_split_the_experts_themselves(seen):
    assert seen["with_tensor_parallelism"]["difference"] < 1e-4
    assert seen["with_tensor_parallelism"]["part"] == [4, 8, 6]


def test_explicit_axes_need_no_rule_for_experts(seen):
    found = seen["on_explicit_axes"]
    assert len(found) == 2 and max(found.values()) < 1e-4, found


def test_experts_work_inside_shard_map(seen):
    assert seen["inside_shard_map"] < 1e-5


def test_experts_that_cannot_be_divided_are_an_error(seen):
    assert "num_experts=6 cannot be divided by the mesh axis 'expert' of size 4" in seen["errors"]
