"""The multi-process example on one machine: a process is killed, the job ends, and one process resumes it."""

import re

import pytest

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
    assert re.search(r"1 processes, mesh \{'data': 4, 'model': 1\}, steps 40 to \d+", output)
    repeated = re.search(r"(\d+) steps ran before and after the kill; their losses differ by at most (\S+),", output)
    assert repeated and int(repeated[1]) >= 3 and float(repeated[2]) < 1e-3
    assert re.match(r"final loss: \d\.\d", output.strip().splitlines()[-1])
