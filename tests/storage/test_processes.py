"""Two processes with two devices each save and load as one program: equal steps, equal values, and no hanging."""

import fcntl
import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.sharding.programs import finish, start
from tests.storage.processes_run import Counter

PROGRAM = Path(__file__).with_name("processes_run.py")
LIMIT = 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_pair(mode: str, directory: Path, devices: int) -> list[subprocess.Popen]:
    address = f"127.0.0.1:{free_port()}"
    return [start(PROGRAM, mode, address, str(i), str(directory), devices=devices) for i in range(2)]


def finish_pair(pair: list[subprocess.Popen], codes: tuple[int, int]) -> list[dict]:
    """What each process printed, when both have ended with the expected codes."""
    lines = [[line for line in output.splitlines() if line.startswith("{")] for output in finish(pair, LIMIT, codes)]
    return [json.loads(found[-1]) if found else {} for found in lines]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A directory that the workers of pytest-xdist share, so that the programs run once for all of them."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "processes"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="module")
def found(directory):
    """What two pairs of processes found: one that went through all checks, and one that lost a process."""
    results, ended = directory / "results.json", 128 + signal.SIGTERM
    with open(directory / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not results.exists():
            checks, killed = start_pair("checks", directory, 2), start_pair("killed", directory, 2)
            seen = finish_pair(checks, (ended, ended)), finish_pair(killed, (0, -signal.SIGKILL))
            results.write_text(json.dumps(seen))
    return json.loads(results.read_text())


pytestmark = pytest.mark.timeout(2 * LIMIT)


def test_both_processes_find_what_was_saved_in_each_of_ten_saves_to_one_path(found):
    for process in found[0]:
        assert process["loop"]["wrong"] == [] and process["loop"]["position"] == 90


def test_each_process_holds_its_own_part(found):
    assert [process["shards"] for process in found[0]] == [["0", "2"], ["4", "6"]]


def test_data_local_to_a_process_is_written_once_and_loaded_by_all(found):
    first, second = (process["loop"] for process in found[0])
    assert first == second
    assert first["local"] == [[10.0] * 3, 10] and first["order"] == [[10, 11, 12], 10]


def test_each_process_gets_back_the_state_of_its_own_data_iterator(found, directory):
    assert [process["iterators"] for process in found[0]] == [0, 0]
    assert nnx.load(directory / "data")["data"] == [{"position": 10}, {"position": 20}]
    with pytest.raises(nnx.CheckpointError, match="state of a data iterator in each of 2 processes in the checkpoint"):
        nnx.load(directory / "data", {"data": Counter(0)})


def test_both_processes_see_the_same_steps_and_resume_from_the_same_one(found):
    first, second = (process["managed"] for process in found[0])
    assert first == second
    assert first["saved"] == [True, False] * 3 + [True]
    assert first["steps"] == [4, 6] and first["best"] == 6 and first["metrics"] == {"loss": 1.0}
    assert first["resumed"] == 6 and first["right"] and first["position"] == 6
    assert first["refused"] and first["after going back"] == [3]


def test_failure_on_one_process_fails_on_both_before_any_change(found):
    for process in found[0]:
        failing = process["failing"]
        assert failing["bad dtype"] and failing["different objects"] and failing["still there"] == 1


def test_damage_that_one_process_finds_makes_both_fall_back_to_the_same_step(found):
    for process in found[0]:
        failing = process["failing"]
        assert failing["damage"] and failing["fell back to"] == 1 and failing["warned"] == [True] and failing["right"]


def test_sigterm_to_one_process_has_both_save_the_same_step_and_end(found, directory):
    manager = nnx.CheckpointManager(directory / "t")
    (step,) = manager.steps()
    assert step >= 5 and nnx.load(directory / "t" / str(step))["data"]["position"] == step


def test_a_process_that_died_is_named_and_the_old_checkpoint_stays(found, directory):
    error = found[1][0]
    assert "process 1 of 2 showed no sign of life" in error["error"] and "intact" in error["error"]
    assert error["seconds"] < 30
    assert nnx.load(directory / "k")["data"]["position"] == 1


def test_one_process_loads_what_two_have_saved(found, directory):
    saved = nnx.load(directory / "loop")
    np.testing.assert_array_equal(saved["optimizer"]["model"]["kernel"], 90 + np.arange(8.0)[:, None] + np.zeros(4))
    target = {"optimizer": {"model": {"kernel": jnp.zeros((8, 4))}}, "flags": jnp.zeros(8)}
    nnx.load(directory / "loop", target, strict=False, report=nnx.LoadReport())
    np.testing.assert_array_equal(target["optimizer"]["model"]["kernel"][:, 0], 90 + np.arange(8.0))
    np.testing.assert_array_equal(target["flags"], np.arange(8.0))


# Safetensors and the log


def test_data_of_both_processes_is_written_once_and_read_by_both(found):
    for output in (process["exports"] for process in found[0]):
        assert output["equal"] == [True] * 5 and output["shardings"] == [True] * 5


def test_write_error_of_process_0_fails_on_both(found):
    first, second = (process["exports"]["refused"] for process in found[0])
    assert first.startswith("Could not save to") and "FileExistsError" in first
    assert second.startswith("Could not save to") and "failed on process 0: FileExistsError" in second


def test_process_0_alone_logs(found):
    first, second = (process["exports"] for process in found[0])
    assert first["shown"] and first["sink"] == {"loss": 1.0}
    assert not second["shown"] and "sink" not in second
    for output in (process["exports"] for process in found[0]):
        directory, log = output["files"]
        assert directory == ["file", "log", "model.safetensors"]
        assert "metrics.jsonl" in log
