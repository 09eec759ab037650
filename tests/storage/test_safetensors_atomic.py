"""A safetensors export is complete or did not happen, whoever is killed, and however many write or read at a time."""

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import nnx
from nnx.storage import files
from tests.storage.killed_export import export, found, model, run


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model" / "model.safetensors"


def listing(path: Path) -> list[str]:
    return sorted(os.listdir(path.parent))


def test_ten_kills_leave_the_old_model_or_the_new_one(tmp_path):
    run(10, tmp_path)


@pytest.mark.parametrize("order", [(0, 1, 2, 0), (1, 1, 1, 1), (2, 1, 2, 1), (0, 2, 2, 0, 0, 1)])
def test_every_format_replaces_every_other_without_leftovers(path, order):
    for step, form in enumerate(order):
        export(path, 3 * step + form)
        assert found(path) == 3 * step + form
        assert len(listing(path)) == {0: 1, 1: 4, 2: 7}[form]


def test_new_shards_have_new_names_and_the_usual_ones_where_they_are_free(path):
    export(path, 1)
    usual = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert listing(path) == [*usual, "model.safetensors.index.json"]
    export(path, 4)
    assert not set(usual) & set(listing(path))
    export(path, 7)
    assert listing(path) == [*usual, "model.safetensors.index.json"]


def test_files_of_somebody_else_are_left_alone(path):
    export(path, 1)
    others = ["model-a-00001-of-00003.safetensors", "model.safetensors.bak", "notes.txt", ".model.tmp"]
    others += ["model-00001-of-00009.safetensors", "model-0123456789abcdef-00001-of-00003.safetensors"]
    for name in others:
        (path.parent / name).write_bytes(b"precious")
    nnx.save_safetensors(path.with_name("model-a.safetensors"), model(5), max_shard_size=20_000)
    theirs = [name for name in listing(path) if name.startswith("model-a")]
    export(path, 3)
    assert set(listing(path)) == {*others, *theirs, "model.safetensors"}
    assert all((path.parent / name).read_bytes() == b"precious" for name in others)


def test_a_full_disk_leaves_the_old_model_and_nothing_else(path, monkeypatch):
    for old in (3, 4):
        export(path, old)
        before = listing(path)
        for new in (5, 6, 7):
            for failing_call in range(1, 5):
                calls = iter(range(1, 1000))

                def full(handle, calls=calls, failing_call=failing_call):
                    if next(calls) == failing_call:
                        raise OSError(28, "No space left on device")

                with monkeypatch.context() as patch:
                    patch.setattr("os.fsync", full)
                    try:
                        export(path, new)
                    except nnx.CheckpointError as error:
                        assert "No space left on device. A model saved there before is still intact" in str(error)
                        if found(path) == old:
                            assert listing(path) == before
                            continue
                export(path, old)
                before = listing(path)


def test_shards_of_two_saves_are_never_one_model(path):
    export(path, 1)
    first = {name: (path.parent / name).read_bytes() for name in listing(path)}
    for name in listing(path):
        (path.parent / name).unlink()
    export(path, 4)  # the same names
    (path.parent / "model-00002-of-00003.safetensors").write_bytes(first["model-00002-of-00003.safetensors"])
    with pytest.raises(
        nnx.CheckpointError, match="index.json and the file 'model-00002.*' are from two different saves"
    ):
        nnx.load_safetensors(path, model(0))


def test_one_shard_is_not_taken_for_a_model(path):
    export(path, 1)
    path.with_name("model.safetensors.index.json").unlink()
    for name in listing(path)[1:]:
        (path.parent / name).unlink()
    for source in (path, path.parent):
        with pytest.raises(FileNotFoundError, match="There is no safetensors file"):
            nnx.load_safetensors(source)


def test_a_link_at_the_path_is_replaced_and_not_followed(path, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path.parent.mkdir()
    for name in (path, path.with_name("model.safetensors.index.json"), path.with_name(".model.safetensors.lock.tmp")):
        name.symlink_to(victim)
    export(path, 1)
    assert victim.read_bytes() == b"precious" and found(path) == 1


def test_two_writers_and_two_readers_never_see_a_mixture(path):
    export(path, 0)
    errors: list[BaseException] = []
    stop = threading.Event()

    def write(first):
        for value in range(first, first + 18, 2):
            export(path, value)

    def read():
        while not stop.is_set():
            found_in_one_load(path)

    def guarded(work, *arguments):
        try:
            work(*arguments)
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=guarded, args=(write, first)) for first in (1, 2)]
    readers = [threading.Thread(target=guarded, args=(read,)) for _ in range(2)]
    for thread in (*writers, *readers):
        thread.start()
    for writer in writers:
        writer.join()
    stop.set()
    for reader in readers:
        reader.join()
    assert not errors, errors
    assert found(path) in (17, 18)


def found_in_one_load(path: Path) -> None:
    state = nnx.load_safetensors(path, model(0))
    assert len({float(x) for array in state.values() for x in np.unique(array)}) == 1


def test_refused_writer_learns_who_is_writing(path, monkeypatch):
    export(path, 1)
    monkeypatch.setattr(files, "WAIT", 0.0)
    with files.only_writer(path):
        with pytest.raises(
            nnx.CheckpointError, match=f"is being written by another job: process {os.getpid()} on host"
        ):
            export(path, 2)
    assert found(path) == 1
    export(path, 2)
    assert found(path) == 2 and not [name for name in listing(path) if "lock" in name]


def test_an_index_from_another_library_is_replaced_with_its_shards(path):
    export(path, 1)
    index = path.with_name("model.safetensors.index.json")
    fields = json.loads(index.read_text())
    del fields["metadata"]
    index.write_text(json.dumps(fields))
    assert found(path) == 1
    export(path, 3)
    assert listing(path) == ["model.safetensors"]
