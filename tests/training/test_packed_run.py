"""A run on a packed, prefetched loader of Grain is killed, and resumes with the losses it would have had."""

import pathlib
import signal
import subprocess
import sys

from tests.training.packed_run import packed_batches, train

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_killed_run_on_packed_documents_resumes_with_the_same_losses(tmp_path: pathlib.Path):
    expected = train(str(tmp_path / "whole"), 6)
    assert len(set(expected.values())) == 6
    program = [sys.executable, "-m", "tests.training.packed_run", str(tmp_path / "killed"), "6", "2"]
    killed = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = train(str(tmp_path / "killed"), 6)
    assert list(resumed) == [3, 4, 5]
    assert resumed == {step: expected[step] for step in resumed}


def test_rows_hold_several_documents_with_positions_of_their_own():
    batch = next(iter(packed_batches()))
    segments, positions = batch["tokens_segment_ids"], batch["tokens_positions"]
    assert segments.max() > 1
    begins = (segments[:, 1:] != segments[:, :-1]) & (segments[:, 1:] > 0)
    assert (positions[:, 1:][begins] == 0).all() and begins.any()
