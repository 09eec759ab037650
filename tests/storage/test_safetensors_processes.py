"""safetensors and the training log of two processes, with two devices each."""

import json
from pathlib import Path

import pytest

from tests.sharding.programs import finish, start
from tests.sharding.test_devices import free_port

PROGRAM = Path(__file__).with_name("processes_program.py")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    directory, address = tmp_path_factory.mktemp("shared"), f"127.0.0.1:{free_port()}"
    processes = [start(PROGRAM, address, str(i), str(directory), devices=2) for i in range(2)]
    return [json.loads(output.splitlines()[-1]) for output in finish(processes, 200)]


def test_data_of_both_processes_is_written_once_and_read_by_both(outputs):
    for output in outputs:
        assert output["equal"] == [True] * 5 and output["shardings"] == [True] * 5


def test_write_error_of_process_0_fails_on_both(outputs):
    first, second = (output["refused"] for output in outputs)
    assert first.startswith("Could not save to") and "FileExistsError" in first
    assert second.startswith("Could not save to") and "failed on process 0: FileExistsError" in second


def test_process_0_alone_logs(outputs):
    first, second = outputs
    assert first["shown"] and first["sink"] == {"loss": 1.0}
    assert not second["shown"] and "sink" not in second
    for output in outputs:
        directory, log = output["files"]
        assert directory == ["file", "log", "model.safetensors"]
        assert "metrics.jsonl" in log
