"""Damaged and hostile checkpoints: always a CheckpointError that names the file, and never a half-loaded target."""

import json
import os
import random
import shutil
import signal
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from nnx.storage.checkpoints import chunks, loading
from tests.checks import sealed


def make(value: float = 0.0):
    return {
        "model": nnx.Dict(w=nnx.Param(jnp.full((5, 7), value)), b=nnx.Param(jnp.full((3,), value, jnp.bfloat16))),
        "ctx": nnx.context(int(value)),
        "name": f"run {value}",
        "epoch": int(value),
    }


def values(things):
    model = things["model"]
    key = jax.random.key_data(things["ctx"]._streams["params"].key)
    return model.w.tolist(), model.b.tolist(), key.tolist(), things["name"], things["epoch"]


@pytest.fixture
def saved(tmp_path):
    nnx.save(tmp_path / "c", make(2.0))
    return tmp_path / "c"


def files_of(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


def refused(directory, match=None):
    target = make(1.0)
    with pytest.raises(nnx.CheckpointError, match=match) as caught:
        nnx.load(directory, target)
    assert values(target) == values(make(1.0)), "half loaded"
    assert str(directory) in str(caught.value)
    with pytest.raises(nnx.CheckpointError):
        nnx.load(directory)


@pytest.mark.parametrize("part_by_part", [False, True])
def test_every_flipped_bit_truncation_and_loss_of_every_file_is_noticed(saved, monkeypatch, part_by_part):
    if part_by_part:  # as large checkpoints are: all is checked before anything is filled
        monkeypatch.setattr(loading, "SMALL", 1)
    draw = random.Random(0)
    assert [file.name for file in files_of(saved)] == ["manifest.json", "0.bin", "0.json"]
    for file in files_of(saved):
        whole = file.read_bytes()
        for _ in range(12):
            at = draw.randrange(8 * len(whole))
            damaged = bytearray(whole)
            damaged[at // 8] ^= 1 << at % 8
            file.write_bytes(damaged)
            refused(saved, file.name)
        for damaged in (b"", whole[:-1], whole[: len(whole) // 2], whole + b"x"):
            file.write_bytes(damaged)
            refused(saved, file.name)
        file.unlink()
        refused(saved, file.name)
        file.symlink_to("/etc/hostname")
        refused(saved)
        file.unlink()
        file.mkdir()
        refused(saved)
        file.rmdir()
        file.write_bytes(whole)
    assert values(nnx.load(saved, make(1.0))) == values(make(2.0))


def test_checksums_are_not_compared_on_request(saved):
    file = next(saved.glob("nnx-data-*/0.bin"))
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    refused(saved, r"0\.bin differs from what was saved: the checksum of bytes 0 to 8 does not match")
    assert values(nnx.load(saved, make(1.0), verify=False)) != values(make(2.0))
    assert nnx.load(saved, verify=False)["epoch"] == 2


def test_a_load_checks_only_what_it_reads(saved):
    file = next(saved.glob("nnx-data-*/0.bin"))
    data = bytearray(file.read_bytes())
    data[0] ^= 1  # in the key of the Context, which comes first
    file.write_bytes(data)
    target = {"model": nnx.Dict(w=nnx.Param(jnp.zeros((5, 7))))}
    nnx.load(saved, target, strict=False, report=nnx.LoadReport())
    assert (target["model"].w == 2).all()


def deep(depth):
    return "[" * depth + "]" * depth


def with_entry(manifest, changed):
    entry = manifest["entries"]["model/w"] | changed
    return manifest | {"entries": manifest["entries"] | {"model/w": entry}}


HOSTILE = {
    "not an object": lambda m: [],
    "data outside": lambda m: m | {"data": "../other"},
    "absolute data": lambda m: m | {"data": "/etc"},
    "data is a number": lambda m: m | {"data": 3},
    "a file outside": lambda m: m | {"files": {"../../secret.json": {"size": 10, "crc32": 0}}},
    "an absolute file": lambda m: m | {"files": {"/etc/hostname": {"size": 10}}},
    "a negative size": lambda m: m | {"files": {"0.bin": {"size": -1}}},
    "a huge size": lambda m: m | {"files": {"0.bin": {"size": 10**40}}},
    "files is a list": lambda m: m | {"files": []},
    "no index": lambda m: m | {"files": {name: f for name, f in m["files"].items() if name != "0.json"}},
    "no data file": lambda m: m | {"files": {name: f for name, f in m["files"].items() if name != "0.bin"}},
    "entries is a string": lambda m: m | {"entries": "all"},
    "no entries": lambda m: {name: field for name, field in m.items() if name != "entries"},
    "an entry is null": lambda m: m | {"entries": {"model/w": None}},
    "version is text": lambda m: m | {"version": "2"},
    "version is huge": lambda m: m | {"version": 10**100},
    "aliases in a circle": lambda m: m | {"aliases": {"model": "other", "other": 3}},
    "info is a list": lambda m: m | {"info": [1]},
    "settings are numbers": lambda m: m | {"hyperparameters": {"model": [1]}},
} | {
    f"w has {changed}": lambda m, changed=changed: with_entry(m, changed)
    for changed in [
        {"shape": [10**30, 10**30]}, {"shape": [-1]}, {"shape": "5"}, {"shape": [5.0, 7]}, {"shape": [True, 7]},
        {"shape": [1] * 1000}, {"dtype": "O"}, {"dtype": "U8"}, {"dtype": "float32,int8"}, {"dtype": 3},
        {"dtype": ">f4"}, {"dtype": "float128"}, {"kind": "pickle"}, {"kind": []}, {"weak": 1}, {"more": 1},
        {"kind": "key", "impl": "mine"}, {"kind": "number", "dtype": "int", "value": "3"},
        {"kind": "number", "dtype": "complex", "value": [1, 2, 3]}, {"kind": "text"}, {"shape": [35]}, {"type": 1},
    ]
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_with_a_right_checksum_is_refused(saved, name):
    (saved.parent / "secret.json").write_text("x" * 10)
    manifest = saved / "manifest.json"
    fields = json.loads(manifest.read_text())
    fields.pop("crc32")
    changed = HOSTILE[name](fields)
    manifest.write_text(sealed(changed) if isinstance(changed, dict) else json.dumps(changed))
    refused(saved)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "{}",
        deep(200_000),
        '{"format": ' + deep(200_000) + "}",
        '{"format": 1' + "0" * 10_000 + "}",
        "\udcff",
    ],
    ids=["empty", "null", "no fields", "deep", "deep format", "huge number", "not UTF-8"],
)
def test_a_manifest_that_is_not_one_is_refused(saved, text):
    (saved / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(saved)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: [],
        lambda rows: {**rows, "other": []},
        lambda rows: {**rows, "model/w": 3},
        lambda rows: {**rows, "model/w": []},
        lambda rows: {**rows, "model/w": rows["model/w"] * 2},
        lambda rows: {**rows, "model/w": [[0, 140, 0, [0, 0], [5]]]},
        lambda rows: {**rows, "model/w": [[0, 140, 0, [1, 0], [5, 7]]]},
        lambda rows: {**rows, "model/w": [[10**9, 140, 0, [0, 0], [5, 7]]]},
        lambda rows: {**rows, "model/w": [[0, 140, 0.5, [0, 0], [5, 7]]]},
        lambda rows: {**rows, "model/w": [[0, 140, 0, [-1, 0], [5, 7]]]},
        lambda rows: {**rows, "model/w": [None]},
        lambda rows: {**rows, "model/w": [[0] * 9]},
    ],
)
def test_a_hostile_index_is_refused(saved, change):
    index = next(saved.glob("nnx-data-*/0.json"))
    text = json.dumps(change(json.loads(index.read_text())))
    index.write_text(text)
    manifest = saved / "manifest.json"
    fields = json.loads(manifest.read_text())
    fields.pop("crc32")
    fields["files"]["0.json"] = {"size": len(text), "crc32": zlib.crc32(text.encode())}
    manifest.write_text(sealed(fields))
    refused(saved)


def test_a_data_folder_that_is_a_link_is_not_followed(saved):
    folder = next(saved.glob("nnx-data-*"))
    shutil.move(folder, saved.parent / "elsewhere")
    folder.symlink_to(saved.parent / "elsewhere")
    refused(saved, "symbolic link")
    nnx.save(saved, make(3.0))  # and what it leads to is not removed
    assert (saved.parent / "elsewhere" / "0.bin").exists()
    assert values(nnx.load(saved, make(0.0))) == values(make(3.0))


def test_large_arrays_are_cut_into_chunks_that_follow_each_other(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 64)
    for shape in [(), (3,), (100,), (7, 9), (2, 3, 40), (1, 1, 5), (3, 1000), (2, 2, 2, 2)]:
        array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
        found = list(chunks.boxes((0,) * len(shape), shape, 4))
        assert all(box.size * 4 <= 64 for box in found)
        parts = [array[box.slices()].ravel() for box in found]
        assert np.concatenate(parts).tolist() == array.ravel().tolist()


@pytest.mark.parametrize("shape", [(6, 5), (64, 3), (1, 50), (4, 4, 4)])
def test_arrays_saved_in_chunks_are_loaded(tmp_path, monkeypatch, shape):
    monkeypatch.setattr(chunks, "CHUNK", 40)
    monkeypatch.setattr(loading, "SMALL", 1)
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    nnx.save(tmp_path / "c", nnx.Dict(a=nnx.Param(x), b=nnx.Param(x[::-1].T), c=np.asfortranarray(x)))
    target = nnx.Dict(a=nnx.Param(0 * x), b=nnx.Param(0 * x.T), c=np.zeros(shape, np.float32))
    nnx.load(tmp_path / "c", target)
    assert (target.a == x).all() and (target.b == x[::-1].T).all() and (target.c == x).all()


def test_a_file_that_cannot_be_read_again_says_that_the_target_is_filled_in_part(saved, monkeypatch):
    monkeypatch.setattr(loading, "SMALL", 1)
    read = loading.ChunkReader.read

    def fails_later(self, wanted, **options):
        if "model/w" in wanted:
            raise OSError(5, "Input/output error")
        return read(self, wanted, **options)

    monkeypatch.setattr(loading.ChunkReader, "read", fails_later)
    with pytest.raises(
        nnx.CheckpointError, match="could not be read again: .*Input/output error.*filled in part: build it"
    ):
        nnx.load(saved, make(1.0))


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_read_again(saved, monkeypatch):
    read_manifest, calls = loading.read_manifest, []

    def replaced(directory):
        manifest = read_manifest(directory)
        if not calls:
            calls.append(1)
            nnx.save(saved, make(4.0))  # what the manifest names is gone now
        return manifest

    monkeypatch.setattr(loading, "read_manifest", replaced)
    assert values(nnx.load(saved, make(1.0))) == values(make(4.0))
    calls.clear()
    assert nnx.load(saved)["epoch"] == 4


def test_ctrl_c_waits_until_the_target_is_filled(saved, monkeypatch):
    monkeypatch.setattr(loading, "SMALL", 1)
    fill_cells = loading.Leaves.fill_cells

    def interrupted(self, values):
        os.kill(os.getpid(), signal.SIGINT)
        fill_cells(self, values)

    monkeypatch.setattr(loading.Leaves, "fill_cells", interrupted)
    target, handler = make(1.0), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        nnx.load(saved, target)
    assert values(target) == values(make(2.0))
    assert signal.getsignal(signal.SIGINT) is handler
