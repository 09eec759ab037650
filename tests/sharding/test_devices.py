"""Eight virtual devices, in one process or two: what is split is really split; losses are those of one device."""

import json
import socket

import numpy as np
import pytest

from tests.sharding.programs import HERE, finish, start

LIMIT = 240  # seconds, for all that a program or a pair of them does


@pytest.fixture(scope="module")
def seen():
    """The findings of the program, which runs once."""
    (output,) = finish([start(HERE / "devices_program.py", devices=8)], LIMIT)
    return json.loads(output.splitlines()[-1])


SHARDED = ("fsdp", "tensor parallel", "fsdp and tensor parallel")  # test_recipes trains with data parallelism


@pytest.mark.parametrize("setting", SHARDED)
def test_training_gives_the_losses_of_one_device(seen, setting):
    expected = seen["training"]["one device"]["losses"]
    assert len(expected) == 20 and expected[-1] < 0.2 * expected[0]
    np.testing.assert_allclose(seen["training"][setting]["losses"], expected, rtol=1e-4, atol=1e-5)


# Of every kernel of the scanned stack and around it: its part on one device, by setting.
BLOCK = "blocks/scan_module"
PARTS = {
    "fsdp": {
        "embed/embedding": [64, 4],
        f"{BLOCK}/attention/query/kernel": [2, 4, 4, 8],
        f"{BLOCK}/attention/out/kernel": [2, 4, 8, 4],
        f"{BLOCK}/mlp/layers/0/kernel": [2, 4, 128],
        f"{BLOCK}/mlp/layers/1/kernel": [2, 128, 4],
        "head/kernel": [4, 64],
    },
    "tensor parallel": {
        "embed/embedding": [16, 32],
        f"{BLOCK}/attention/query/kernel": [2, 32, 1, 8],
        f"{BLOCK}/attention/out/kernel": [2, 1, 8, 32],
        f"{BLOCK}/mlp/layers/0/kernel": [2, 32, 32],
        f"{BLOCK}/mlp/layers/1/kernel": [2, 32, 32],
        "head/kernel": [32, 16],
    },
    "fsdp and tensor parallel": {
        "embed/embedding": [16, 16],
        f"{BLOCK}/attention/query/kernel": [2, 16, 1, 8],
        f"{BLOCK}/attention/out/kernel": [2, 1, 8, 16],
        f"{BLOCK}/mlp/layers/0/kernel": [2, 16, 32],
        f"{BLOCK}/mlp/layers/1/kernel": [2, 32, 16],
        "head/kernel": [16, 16],
    },
}


@pytest.mark.parametrize("setting", SHARDED)
def test_parameters_and_adam_state_are_really_split(seen, setting):
    parts = seen["training"][setting]["parts"]
    for path, expected in PARTS[setting].items():
        for owner in ("model", "opt_state/0/mu", "opt_state/0/nu"):
            assert parts[f"{owner}/{path}"][1] == expected, f"{owner}/{path}"


WIDEST = 32 * 128  # elements of the largest kernel of one layer
HIDDEN = 16 * 12 * 32  # elements of the activations between layers


def gathers(seen, setting):
    return [size for kind, size in seen["training"][setting]["collectives"] if kind == "all-gather"]


def test_tensor_parallelism_sums_activations_and_gathers_no_parameters(seen):
    found = seen["training"]["tensor parallel"]["collectives"]
    assert {kind for kind, _ in found} == {"all-reduce"}
    assert max(size for _, size in found) == HIDDEN


def test_fsdp_gathers_one_layer_of_the_stack_at_a_time(seen):
    assert max(gathers(seen, "fsdp")) == WIDEST


def test_fsdp_with_tensor_parallelism_gathers_only_its_share_of_heads_and_hidden_units(seen):
    activation = HIDDEN // 2  # the batch has two parts
    parameters = [size for size in gathers(seen, "fsdp and tensor parallel") if size != activation]
    assert max(parameters) == WIDEST // 4


# Building: a CPU needs three times its part of the largest array beside the parts, for the random bits


@pytest.mark.parametrize("setting", SHARDED)
def test_building_a_scanned_stack_takes_little_more_than_the_parts(seen, setting):
    size = seen["training"][setting]["size"]
    assert size["peak"] < 1.9 * size["parts"]  # stacked, one kernel is almost a third of the model


def test_building_a_deep_model_takes_hardly_more_than_the_parts(seen):
    size = seen["unrolled"]
    assert size["peak"] < 1.2 * size["parts"] < 0.16 * size["whole"]


def test_explicit_mesh_axes_train_the_same(seen):
    found = seen["explicit_axes"]
    np.testing.assert_allclose(found["losses"], seen["training"]["one device"]["losses"], rtol=1e-4, atol=1e-5)
    kernel = "float32[2,32@data,128@model]"
    assert found["types"] == [kernel, kernel, "float32[16@data,13,64@model]"]


@pytest.mark.parametrize("kind", ["automatic", "explicit", "mixed"])
def test_a_variable_with_a_constraint_is_split_when_rebuilt_and_when_assigned(seen, kind):
    assert seen["constraints"][kind] == [[8, 4], [2, 2], [2, 2]]


def test_indivisible_axis_raises_with_path_and_rule(seen):
    placed, built = seen["errors"]
    assert placed.startswith("layer/bias: axis 0, 'out', of size 6 cannot be divided by mesh axis 'data' of size 4")
    assert "('out', 'data')" in placed and "('out', None)" in placed
    assert built.startswith("kernel: axis 0, 'in', of size 6 cannot be divided by mesh axis 'data' of size 4")


def test_sharded_arrays_that_share_buffers_survive_donation(seen):
    assert seen["donation"] == [[2.0] * 8, [1.0] * 8, [0.0]]


# Optimizer state and averages lie as their parameters do, in whatever order things were built


def test_every_device_holds_an_eighth_of_parameters_and_optimizer_state(seen):
    assert len(seen["optimizer_state"]) == 27
    for name, (held, ideal) in seen["optimizer_state"].items():
        assert abs(held - ideal) <= 0.02 * ideal, f"{name}: {held} bytes on one device, ideally {ideal}"


def test_factored_moments_are_split_along_the_axes_they_kept(seen):
    kernel, table = seen["factored_moments"][:2], seen["factored_moments"][2:]
    assert kernel == [["('embed',)", [8]], ["('mlp',)", [16]]]  # of 64 by 128
    assert table == [["('vocab',)", [8]], ["('embed',)", [8]]]  # of 64 by 64, where the sizes do not tell them apart


def test_a_moment_has_the_names_its_parameter_got_from_a_class_around_both(seen):
    assert seen["outer_names"] == ["('embed', 'vocab')", "P('data', None)"]


def test_a_sharded_update_that_is_not_finite_is_skipped_on_all_devices(seen):
    found = seen["skipped_updates"]
    assert found["changed"] == [False, True] and found["counts"] == [2, 1, 2]
    assert found["finite"] and found["part"] == [64, 8] and found["traces"] == 1


def test_stacked_experts_and_their_moments_are_split_by_expert(seen):
    assert seen["experts"]["parts"] == [[2, 24, 40], [2, 24, 40]]


# A step leaves its state where it is, so it is compiled once


@pytest.mark.parametrize("donated", [0, 1])
@pytest.mark.parametrize(
    ("how", "kernel", "moment"),
    [
        ("zero_1", [16, 32], [2, 32]),
        ("made_after_the_model", [2, 32], [2, 32]),
        ("in_shardings", [2, 32], [2, 32]),
    ],
)
def test_a_step_is_compiled_once_and_keeps_the_placement_of_its_state(seen, how, kernel, moment, donated):
    found = seen["steps"][f"{how} {donated}"]
    assert found["compilations"] == [1, 0, 0] and found["traces"] == 1
    assert found["parts"] == [kernel, moment]


def test_a_mesh_axis_of_one_device_does_not_compile_the_step_again(seen):
    found = seen["steps"]["one device along an axis 0"]
    assert found["compilations"] == [1, 0, 0] and found["traces"] == 1


def test_moved_model_stays_where_it_was_moved(seen):
    assert seen["moved"] == {"parts": [[8], [1], [8]], "values": [64.0] * 8, "traces": 2}


def test_shardings_of_a_module_or_record_are_taken_as_logical_to_mesh_sharding_returns_them(seen):
    found = seen["given_shardings"]
    assert found["built"] == [2, 32] and found["record"] == [[2, 32], [1]]
    assert found["donated"] == 2  # the donated cell and the argument


# Two processes, with four devices each


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.timeout(2 * LIMIT)
def test_two_processes_train_as_one_device_does(seen):
    program, address = HERE / "processes_program.py", f"127.0.0.1:{free_port()}"
    outputs = finish([start(program, address, str(i), devices=4) for i in range(2)], LIMIT)
    for i, found in enumerate(json.loads(output.splitlines()[-1]) for output in outputs):
        assert found["devices"] == [8, 4]
        assert found["part"] == [16, 16] and found["parts here"] == 4
        assert found["batch here"] == [8 * i]  # each process has its own half of the batch
        expected = seen["training"]["one device"]["losses"][:10]
        np.testing.assert_allclose(found["losses"], expected, rtol=1e-4, atol=1e-5)
