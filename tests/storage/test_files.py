"""Files that are complete or not there, and names that cannot lead out of a directory."""

import os
import re

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
