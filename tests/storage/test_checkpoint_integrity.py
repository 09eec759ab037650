"""Damaged and hostile checkpoints: always a CheckpointError that names the file, and never a half-loaded target."""

import itertools
import json
import os
import random
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from nnx.storage.checkpoints import array_reader, loading, saving, zarr
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
def saved(tmp_path, monkeypatch):
    """A checkpoint in which one array has files of its own, and the others are packed."""
    monkeypatch.setattr(saving, "LARGE", 100)
    nnx.save(tmp_path / "c", make(2.0))
    return tmp_path / "c"


def files_of(directory):
    """All files but the metadata of zarr, which is for other programs."""
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "zarr.json")


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
    assert [file.name for file in files_of(saved)] == ["manifest.json", "c.0.0", "c.0"]  # of an array, and the pack
    for file in files_of(saved):
        whole = file.read_bytes()
        for _ in range(12):
            at = draw.randrange(8 * len(whole))
            damaged = bytearray(whole)
            damaged[at // 8] ^= 1 << at % 8
            file.write_bytes(damaged)
            refused(saved, str(file.relative_to(saved)))
        for damaged in (b"", whole[:-1], whole[: len(whole) // 2], whole + b"x"):
            file.write_bytes(damaged)
            refused(saved, str(file.relative_to(saved)))
        file.unlink()
        refused(saved, str(file.relative_to(saved)))
        file.symlink_to("/etc/hostname")
        refused(saved)
        file.unlink()
        file.mkdir()
        refused(saved)
        file.rmdir()
        file.write_bytes(whole)
    assert values(nnx.load(saved, make(1.0))) == values(make(2.0))


def test_every_exchange_of_two_files_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(zarr, "CHUNK", 64)
    monkeypatch.setattr(zarr, "FILE", 128)
    monkeypatch.setattr(saving, "LARGE", 100)
    x = jnp.arange(60, dtype=jnp.float32).reshape(20, 3)
    model = nnx.Dict(a=nnx.Param(x), b=nnx.Param(x.at[-1].set(1)), small=nnx.Param(x[:4]))
    nnx.save(tmp_path / "c", model)
    files = [file for file in files_of(tmp_path / "c") if file.suffix != ".json"]
    assert len({file.parent for file in files}) == 3 and len(files) > 4
    for one, other in itertools.combinations(files, 2):
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)
        if first != second:  # the first files of the two arrays are alike
            with pytest.raises(nnx.CheckpointError, match="differs from what was saved, or is another one"):
                nnx.load(tmp_path / "c", model)
        one.write_bytes(first)
        other.write_bytes(second)
    nnx.load(tmp_path / "c", model)


def test_an_early_checkpoint_without_fingerprints_is_read(saved):
    fields = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(
        sealed({name: value for name, value in fields.items() if name != "fingerprints"})
    )
    assert values(nnx.load(saved, make(1.0))) == values(make(2.0))


def flip_first_bit(file):
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)


def test_checksums_are_not_compared_on_request(saved):
    files = [next(saved.glob(f"nnx-data-*/{name}")) for name in ("0/c.0.0", "pack-0/c.0")]
    for file in files:
        flip_first_bit(file)
        refused(saved, rf"{file.relative_to(saved)} differs from what was saved, or cannot be read \(DATA_LOSS")
        flip_first_bit(file)
    for file in files:
        flip_first_bit(file)
    found = nnx.load(saved, make(1.0), verify=False)
    assert values(found)[0] != values(make(2.0))[0] and values(found)[2] != values(make(2.0))[2]
    assert values(found)[0][0][1:] == values(make(2.0))[0][0][1:] and values(found)[1] == values(make(2.0))[1]
    assert nnx.load(saved, verify=False)["epoch"] == 2
    file = next(saved.glob("nnx-data-*/0/c.0.0"))
    file.write_bytes(file.read_bytes()[:-30])  # without the index, nothing can be read
    with pytest.raises(nnx.CheckpointError, match="0/c.0.0 differs"):
        nnx.load(saved, verify=False)


def test_a_load_checks_only_what_it_reads(saved):
    flip_first_bit(next(saved.glob("nnx-data-*/pack-0/c.0")))
    target = {"model": nnx.Dict(w=nnx.Param(jnp.zeros((5, 7))))}
    nnx.load(saved, target, strict=False, report=nnx.LoadReport())
    assert (target["model"].w == 2).all()


def test_metadata_for_other_programs_is_not_needed(saved):
    for file in saved.rglob("zarr.json"):
        assert json.loads(file.read_text())["zarr_format"] == 3
        file.write_text("{}")
    assert values(nnx.load(saved, make(1.0))) == values(make(2.0))


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
    "packs is a table": lambda m: m | {"packs": {}},
    "no packs": lambda m: m | {"packs": []},
    "a pack is a number": lambda m: m | {"packs": [3]},
    "a pack that is too small": lambda m: m | {"packs": [m["packs"][0] | {"shape": [4]}]},
    "arrays is a list": lambda m: m | {"arrays": []},
    "packed is a list": lambda m: m | {"packed": []},
    "arrays that are not entries": lambda m: m | {"arrays": m["arrays"] | {"x": m["arrays"]["model/w"]}},
    "an array in two places": lambda m: m | {"packed": m["packed"] | {"model/w": 0}},
    "an array without data": lambda m: m | {"arrays": {}},
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
} | {
    f"the layout of w has {changed}": lambda m, changed=changed: m | {
        "arrays": {"model/w": m["arrays"]["model/w"] | changed}
    }
    for changed in [
        {"number": "../../.."}, {"number": -1}, {"number": 10**30}, {"number": 1}, {"shape": [7, 5]}, {"shape": [5]},
        {"shard": [5, 0]}, {"shard": "all"}, {"file": [10**9, 10**9]}, {"file": [5, -7]}, {"file": [5.0, 7]},
        {"chunk": [2, 7]}, {"chunk": [5]}, {"chunk": None}, {"chunk": [0, 7]},
    ]
} | {
    f"b is packed at {place}": lambda m, place=place: m | {"packed": m["packed"] | {"model/b": place}}
    for place in [
        -1, 10**9, 10**30, 1.5, "0", None, True, [], [[0, 0, [0], [3]]] * 2, [[0, 0, [1], [3]]], [[0, 0, [0], [2]]],
        [[1, 0, [0], [3]]], [[0, 0, [0, 0], [3]]], [[-1, 0, [0], [3]]], [[0, 0, [-1], [3]]], [3], [[0] * 9],
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


def test_a_data_folder_that_is_a_link_is_not_followed(saved):
    folder = next(saved.glob("nnx-data-*"))
    shutil.move(folder, saved.parent / "elsewhere")
    folder.symlink_to(saved.parent / "elsewhere")
    refused(saved, "symbolic link")
    nnx.save(saved, make(3.0))  # and what it leads to is not removed
    assert (saved.parent / "elsewhere" / "pack-0").exists()
    assert values(nnx.load(saved, make(0.0))) == values(make(3.0))


SHAPES = [(3,), (100,), (7, 9), (2, 3, 40), (1, 1, 5), (3, 1000), (2, 2, 2, 2), (13, 17)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_every_box_is_found_where_the_shards_were_stored(monkeypatch, shape, shards):
    monkeypatch.setattr(zarr, "CHUNK", 64)
    monkeypatch.setattr(zarr, "FILE", 200)
    draw = random.Random(0)
    axis = shape.index(max(shape))
    whole = tuple(n * shards if i == axis else n for i, n in enumerate(shape))
    found = zarr.grid_of(whole, shape, 4)
    assert np.prod(found.chunk) * 4 <= 64 and np.prod(found.file) * 4 <= 200
    waste = np.prod([-(-n // size) * size for n, size in zip(shape, found.chunk)]) / np.prod(shape)
    assert waste <= 1.34, "padding of more than a third"
    array = np.arange(np.prod(whole), dtype=np.float32).reshape(whole)
    stored = np.full(found.stored_shape, -1, np.float32)
    for number in range(shards):  # as each device writes its shard
        start = tuple(number * n if i == axis else 0 for i, n in enumerate(shape))
        box = array_reader.Box(start, shape)
        for place, inside in found.places(box):
            assert (stored[place] == -1).all(), "two shards overlap"
            stored[place] = array[box.slices()][inside]
    for _ in range(20):
        start = tuple(draw.randrange(n) for n in whole)
        box = array_reader.Box(start, tuple(draw.randint(1, n - a) for n, a in zip(whole, start)))
        read = np.full(box.shape, -2, np.float32)
        for place, inside in found.places(box):
            read[inside] = stored[place]
        assert (read == array[box.slices()]).all()


@pytest.mark.parametrize("shape", [(6, 5), (64, 3), (1, 50), (4, 4, 4)])
def test_arrays_saved_in_chunks_are_loaded(tmp_path, monkeypatch, shape):
    monkeypatch.setattr(zarr, "CHUNK", 40)
    monkeypatch.setattr(zarr, "FILE", 100)
    monkeypatch.setattr(saving, "LARGE", 1)
    monkeypatch.setattr(loading, "SMALL", 1)
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    nnx.save(tmp_path / "c", nnx.Dict(a=nnx.Param(x), b=nnx.Param(x[::-1].T), c=np.asfortranarray(x)))
    target = nnx.Dict(a=nnx.Param(0 * x), b=nnx.Param(0 * x.T), c=np.zeros(shape, np.float32))
    nnx.load(tmp_path / "c", target)
    assert (target.a == x).all() and (target.b == x[::-1].T).all() and (target.c == x).all()


def test_a_file_that_cannot_be_read_again_says_that_the_target_is_filled_in_part(saved, monkeypatch):
    monkeypatch.setattr(loading, "SMALL", 1)
    read = loading.ArrayReader.read

    def fails_later(self, wanted, **options):
        if "model/w" in wanted:
            raise OSError(5, "Input/output error")
        return read(self, wanted, **options)

    monkeypatch.setattr(loading.ArrayReader, "read", fails_later)
    with pytest.raises(
        nnx.CheckpointError, match="could not be read again: .*Input/output error.*filled in part: build it"
    ):
        nnx.load(saved, make(1.0))


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_read_again(saved, monkeypatch):
    read_manifest, calls = loading.read_manifest, []

    def replaced(place):
        manifest = read_manifest(place)
        if not calls:
            calls.append(1)
            nnx.save(saved, make(4.0))  # what the manifest names is gone now
        return manifest

    monkeypatch.setattr(loading, "read_manifest", replaced)
    assert values(nnx.load(saved, make(1.0))) == values(make(4.0))
    calls.clear()
    assert nnx.load(saved)["epoch"] == 4


def test_a_checkpoint_that_is_replaced_while_the_target_is_filled_is_loaded_whole(saved, monkeypatch):
    monkeypatch.setattr(loading, "SMALL", 1)
    fill_cells, replacements = loading.Leaves.fill_cells, [make(4.0)]

    def replaced(self, values):
        fill_cells(self, values)
        if replacements:  # one group has been filled from the old checkpoint
            nnx.save(saved, replacements.pop())

    monkeypatch.setattr(loading.Leaves, "fill_cells", replaced)
    assert values(nnx.load(saved, make(1.0))) == values(make(4.0))
    replacements.append({"other": 1})
    with pytest.raises(nnx.CheckpointError, match="could not be read again: .*does not fit.*filled in part"):
        nnx.load(saved, make(1.0))


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
