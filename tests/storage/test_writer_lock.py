"""One writer per path: who is refused, who takes over, and who finds out."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time

import pytest

from nnx.storage import writer_lock
from nnx.storage.writer_lock import WriterLock


@pytest.fixture
def file(tmp_path):
    return tmp_path / ".lock"


def test_second_writer_is_refused_with_the_name_of_the_lock_holder(file):
    with WriterLock(file, "run/last"):
        with pytest.raises(TimeoutError, match=rf"run/last is being written by .*process {os.getpid()} on host"):
            WriterLock(file, "run/last", wait=0).acquire()
    with WriterLock(file, "run/last", wait=0):
        pass
    assert not file.exists()


def test_a_second_writer_waits_for_the_first(file):
    first = WriterLock(file, "p")
    first.acquire()
    timer = threading.Timer(0.2, first.release)
    timer.start()
    with WriterLock(file, "p", wait=30) as second:
        second.check()
    timer.join()


def test_the_lock_of_a_process_that_was_killed_is_taken_over_at_once(file):
    program = "import os, sys; from pathlib import Path; from nnx.storage.writer_lock import WriterLock\n"
    program += "WriterLock(Path(sys.argv[1]), 'p').acquire(); os.kill(os.getpid(), 9)"
    child = subprocess.Popen([sys.executable, "-c", program, str(file)])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # not reaped: a zombie still has its process id
    assert file.exists()
    with WriterLock(file, "p", wait=0):
        pass
    child.wait()


@pytest.mark.parametrize("has_links", [True, False])
def test_a_lock_names_its_holder_from_the_first_moment(file, monkeypatch, has_links):
    """A process killed while it takes the lock leaves none, or one that says who is dead."""
    seen = []

    def link(source, target):
        if not has_links:
            raise PermissionError(1, "Operation not permitted")
        seen.append(file.exists())
        os.rename(source, target)  # the moment at which the lock appears
        assert writer_lock._read(file)[0].process == os.getpid()

    monkeypatch.setattr(os, "link", link)
    with WriterLock(file, "p", wait=0) as lock:
        lock.check()
    assert seen == [False] * has_links and not os.listdir(file.parent)


def held_by(file, **changes):
    holder = {"token": "t", "host": writer_lock._host(), "process": os.getpid(), "started": 0, "since": "noon"}
    file.write_text(json.dumps({**holder, **changes}))


def test_a_process_id_that_was_given_out_again_does_not_keep_a_lock_alive(file):
    held_by(file, started=writer_lock._status(os.getpid())[1] + 1)
    WriterLock(file, "p", wait=0).acquire()


@pytest.mark.parametrize("text", [None, "", "[" * 100_000, '{"token": 1}'])
def test_a_lock_of_another_host_is_taken_over_when_its_heartbeat_stops(file, text):
    if text is None:
        held_by(file, host="far away")
    else:
        file.write_text(text)
    with pytest.raises(TimeoutError, match="being written by another job: (process .* on host far|unknown)"):
        WriterLock(file, "p", wait=0.05, stale_after=10).acquire()
    WriterLock(file, "p", wait=10, stale_after=0.1).acquire()


def test_a_heartbeat_keeps_the_lock_of_another_host(file, monkeypatch):
    held_by(file, host="far away")
    monkeypatch.setattr(writer_lock, "HEARTBEAT", 0.02)
    released = threading.Event()
    beats = threading.Thread(target=writer_lock._beat, args=(file, released))
    beats.start()
    try:
        with pytest.raises(TimeoutError, match="on host far"):
            WriterLock(file, "p", wait=1, stale_after=0.5).acquire()
    finally:
        released.set()
        beats.join()


def test_a_holder_whose_lock_was_taken_over_finds_out_and_leaves_the_new_one_alone(file):
    lock = WriterLock(file, "p")
    lock.acquire()
    file.unlink()
    with pytest.raises(TimeoutError, match="lock on p was taken over by another job: it has released it since"):
        lock.check()
    other = WriterLock(file, "p", wait=0)
    other.acquire()
    with pytest.raises(TimeoutError, match="Nothing was replaced"):
        lock.check()
    lock.release()
    other.check()
    other.release()


def test_a_live_lock_taken_away_by_mistake_is_put_back(file):
    lock = WriterLock(file, "p")
    lock.acquire()
    writer_lock._take_away(file, None)  # a waiter that read the stale lock before this one
    lock.check()
    lock.release()
    assert os.listdir(file.parent) == []


def test_a_link_in_the_place_of_the_lock_is_not_followed(file, tmp_path):
    (tmp_path / "victim").write_text("precious")
    file.symlink_to(tmp_path / "victim")
    with pytest.raises(TimeoutError, match="another job: unknown"):
        WriterLock(file, "p", wait=0.1, stale_after=0.01).acquire()
    assert (tmp_path / "victim").read_text() == "precious"


def _count(file, counter, times):
    for _ in range(times):
        with WriterLock(file, "p"):
            value = int(counter.read_text())
            time.sleep(0.0005)
            counter.write_text(str(value + 1))


def test_four_writers_never_hold_it_together(file, tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    start = multiprocessing.get_context("spawn")
    jobs = [start.Process(target=_count, args=(file, counter, 20)) for _ in range(2)]
    jobs += [threading.Thread(target=_count, args=(file, counter, 20)) for _ in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert counter.read_text() == "80"
