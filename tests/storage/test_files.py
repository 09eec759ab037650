"""Files that are complete or not there, and names that cannot lead out of a directory."""

import errno
import fcntl
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nnx.storage import files


def test_a_file_is_replaced_when_the_block_ends_and_not_before(tmp_path):
    path = tmp_path / "notes"
    path.write_bytes(b"old")
    with files.atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["notes"]


def test_a_block_that_raises_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "notes"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), files.atomic_file(path) as file:
        file.write(b"new")
        raise RuntimeError
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["notes"]


def test_symbolic_link_in_the_way_is_not_followed_or_overwritten(tmp_path, monkeypatch):
    victim, path = tmp_path / "victim", tmp_path / "notes"
    victim.write_bytes(b"precious")
    monkeypatch.setattr(files, "unique_token", lambda: "0" * 16)  # an attacker who guesses it
    (tmp_path / f".notes.{'0' * 16}.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError), files.atomic_file(path):
        raise AssertionError("was opened")
    (tmp_path / f".notes.{'0' * 16}.tmp").unlink()
    path.symlink_to(victim)  # the final name is replaced, not written through
    with files.atomic_file(path) as file:
        file.write(b"new")
    assert victim.read_bytes() == b"precious" and not path.is_symlink()


def test_leftovers_of_a_killed_writer_are_removed_and_other_files_are_not(tmp_path):
    for name in (".a.0123456789abcdef.tmp", ".b.0123456789abcdef.tmp", ".a.tmp", "a", ".a.mine.tmp"):
        (tmp_path / name).touch()
    assert [path.name for path in files.remove_leftovers(tmp_path, "a")] == [".a.0123456789abcdef.tmp"]
    assert files.remove_leftovers(tmp_path, re.compile("[ac]")) == []
    assert [path.name for path in files.remove_leftovers(tmp_path)] == [".b.0123456789abcdef.tmp"]
    assert sorted(os.listdir(tmp_path)) == [".a.mine.tmp", ".a.tmp", "a"]


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "", ".", "a\0b", "C:/x", "a\\b", 3, None])
def test_a_name_that_leads_outside_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="is not the path of a file inside"):
        files.inside(tmp_path, name)


def test_a_link_inside_is_refused_and_only_regular_files_are_opened(tmp_path):
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "folder").symlink_to(tmp_path)
    assert files.inside(tmp_path, "real") == tmp_path / "real"
    for name in ("link", "folder/real"):
        with pytest.raises(ValueError, match="is a symbolic link"):
            files.inside(tmp_path, name)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "folder", "missing"):
        with pytest.raises(OSError):
            files.open_regular(tmp_path / name)
    with files.open_regular(tmp_path / "real") as file:
        assert file.read() == b"x"


# One writer at a time


def test_a_second_writer_waits_for_the_first(tmp_path):
    entered = threading.Event()

    def hold():
        with files.only_writer(tmp_path / "model"):
            entered.set()
            time.sleep(0.1)
            (tmp_path / "done").touch()

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    with files.only_writer(tmp_path / "model"):
        assert (tmp_path / "done").exists()
    thread.join()
    assert os.listdir(tmp_path) == ["done"]


def start(program: str, directory: Path) -> subprocess.Popen:
    """Starts a program that uses `files`, which needs nothing else of the library, and so no second to import it."""
    environment = {**os.environ, "PYTHONPATH": str(Path(files.__file__).parent)}
    begin = "import files, os, pathlib, sys, time; directory = pathlib.Path(sys.argv[1])\n"
    return subprocess.Popen([sys.executable, "-c", begin + program, str(directory)], env=environment)


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path, monkeypatch):
    child = start("with files.only_writer(directory / 'model'): os.kill(os.getpid(), 9)", tmp_path)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # not reaped: a zombie still has its process id
    assert os.listdir(tmp_path) == [".model.lock"]
    monkeypatch.setattr(files, "WAIT", 0.0)
    with files.only_writer(tmp_path / "model"):
        pass
    child.wait()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_can_be_written(tmp_path, monkeypatch, number):
    def refuse(handle, operation):
        raise OSError(number, "")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with files.only_writer(tmp_path / "model"):
        pass
    assert os.listdir(tmp_path) == []


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".model.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError), files.only_writer(tmp_path / "model"):
        raise AssertionError("was entered")
    assert (tmp_path / "victim").read_text() == "precious"


COUNT = """
for _ in range(20):
    with files.only_writer(directory / "model"):
        value = int((directory / "counter").read_text())
        time.sleep(0.0005)
        (directory / "counter").write_text(str(value + 1))
"""


def test_four_writers_never_hold_the_lock_together(tmp_path):
    (tmp_path / "counter").write_text("0")
    children = [start(COUNT, tmp_path) for _ in range(2)]
    scope = {"files": files, "time": time, "directory": tmp_path}
    threads = [threading.Thread(target=exec, args=(COUNT, dict(scope))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [child.wait() for child in children] == [0, 0]
    assert (tmp_path / "counter").read_text() == "80" and os.listdir(tmp_path) == ["counter"]
