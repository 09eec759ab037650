"""The multi-process example on one machine: a process is killed, the job ends, and one process resumes it."""

import re
import runpy
import sys

import jax
import pytest

import nnx
from tests.sharding.programs import ROOT, finish, start

LIMIT = 240  # seconds, of which the surviving process waits twelve for a sign of life


@pytest.mark.timeout(LIMIT + 30)
def test_a_job_that_lost_a_process_ends_and_continues_on_one_process_with_the_same_losses(tmp_path):
    rehearsal = ROOT / "examples" / "distributed" / "rehearse.py"
    (output,) = finish([start(rehearsal, "--smoke", "--output", str(tmp_path), "--limit", "100")], LIMIT)
    assert "2 processes, mesh {'data': 4, 'model': 1}, steps 0" in output
    assert re.search(
        r"process 0 ended after \d+ s with exit code \S+: .*(another task died|process 0 of 2 ends)", output
    )
    assert f"Start the job again: it continues from the last checkpoint in {tmp_path}" in output
    assert re.search(r"1 processes, mesh \{'data': 4, 'model': 1\}, steps 40 to \d+", output)
    repeated = re.search(r"(\d+) steps ran before and after the kill; their losses differ by at most (\S+),", output)
    assert repeated and int(repeated[1]) >= 3 and float(repeated[2]) < 1e-3
    assert re.match(r"final loss: \d\.\d", output.strip().splitlines()[-1])


class Reached(Exception):
    """The example got to a certain line."""


SLURM = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environment", "joins"),
    [({}, False), (SLURM, True), (POD, False), ({**POD, "JOB_COMPLETION_INDEX": "0"}, True)],
    ids=["alone", "a task of SLURM", "a pod that is alone", "a pod of an indexed Job"],
)
def test_the_example_joins_other_processes_only_where_there_are_some(monkeypatch, environment, joins):
    def joined(**options):
        raise Reached(f"joined, heartbeat {options['heartbeat_timeout_seconds']}")

    def made_a_mesh(*args, **options):
        raise Reached("made a mesh")

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train.py", "--heartbeat", "7"])
    monkeypatch.setattr(jax.distributed, "initialize", joined)
    monkeypatch.setattr(jax, "make_mesh", made_a_mesh)
    monkeypatch.setattr(nnx, "compilation_cache", lambda: None)  # its settings would hold for all tests of this process
    with pytest.raises(Reached, match="joined, heartbeat 7" if joins else "made a mesh"):
        runpy.run_path(str(ROOT / "examples" / "distributed" / "train.py"))
