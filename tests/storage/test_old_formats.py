"""Checkpoints that earlier versions have written are still loaded: `old_checkpoints` has one of each format.

Version 0.1 wrote format 1, with Orbax; version 0.2 wrote format 2, here by one process and by two.
"""

import json
import shutil
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx
from nnx.storage.locations import location
from tests.checks import sealed

SAMPLES = Path(__file__).with_name("old_checkpoints")
ALL = ("version_1", "version_2", "version_2_of_two_processes")


class Net(nnx.Module):
    def __init__(self, value, *, ctx):
        self.layers = [nnx.Linear(3, 4, ctx=ctx), nnx.Linear(4, 2, ctx=ctx)]
        self.half = nnx.Param(jnp.full((2, 3), value, jnp.bfloat16))
        self.small = nnx.Param(jnp.zeros(4, jnp.int4))
        self.empty = nnx.Param(jnp.zeros((0, 3)))
        self.count = nnx.var("counts", 0)
        self.mask = np.array([False, False])


def make():
    model = Net(0.0, ctx=nnx.context(9))
    return {
        "model": model,
        "optimizer": nnx.Optimizer(model, optax.adam(1e-2)),
        **{"ctx": nnx.context(6, noise=4), "epoch": 0, "name": "", "rate": 0.0, "z": 0j},
        **{"rows": jnp.zeros((8, 4)), "columns": np.zeros((4, 8), np.float32)},
        "keys": jax.random.split(jax.random.key(0, impl="rbg"), 2),
    }


@pytest.fixture(params=ALL)
def sample(request, tmp_path):
    return shutil.copytree(SAMPLES / request.param, tmp_path / "c")


def test_a_stored_sample_is_loaded(sample):
    found = nnx.load(sample, make(), report=nnx.LoadReport())
    model, rows = found["model"], np.arange(32.0).reshape(8, 4)
    assert (model.half == 2).all() and model.small.tolist() == [0, 1, 2, 3] and model.small.dtype == jnp.int4
    assert model.count == 7 and model.mask.tolist() == [True, False] and model.empty.shape == (0, 3)
    with jax.default_device(jax.devices("cpu")[0]):  # where the sample was written; a GPU draws other last digits
        drawn = np.asarray(nnx.Linear(3, 4, ctx=nnx.context(0)).kernel)
    assert (np.asarray(model.layers[0].kernel) == drawn).all()
    assert (found["rows"] == rows).all() and (found["columns"] == rows.reshape(4, 8)).all()
    assert (found["epoch"], found["name"], found["rate"], found["z"]) == (4, "run 4", 0.5, 1 + 2j)
    assert (found["keys"] == jax.random.split(jax.random.key(1, impl="rbg"), 2)).all()
    assert found["ctx"].make_rng("noise") == nnx.context(5, noise=3).make_rng("noise")
    assert (nnx.load(sample)["rows"] == rows).all()
    assert nnx.checkpoint_entries(sample)["model/half"] == nnx.CheckpointEntry("array", (2, 3), "bfloat16", "Param")


def test_saving_over_an_old_checkpoint_replaces_it(sample):
    nnx.save(sample, {"epoch": 1})
    assert [path.name for path in sample.iterdir()] == ["manifest.json"]


def test_without_orbax_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(
        ImportError, match=r"format version 1 needs the package 'orbax'.*pip install 'nnx\[checkpoint\]'"
    ):
        nnx.load(SAMPLES / "version_1", make())


def test_an_old_checkpoint_in_a_store_is_refused_with_what_to_do(tmp_path):
    url = f"memory://{tmp_path.name}/c"
    location(url).write("manifest.json", (SAMPLES / "version_2" / "manifest.json").read_bytes())
    with pytest.raises(nnx.CheckpointError, match="format version 2, which is read from local disks only: copy it"):
        nnx.load(url)


# Damage


def refused(path, match):
    target = {"rows": jnp.zeros((8, 4))}
    with pytest.raises(nnx.CheckpointError, match=match):
        nnx.load(path, target, strict=False, report=nnx.LoadReport())
    assert not target["rows"].any()


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_that_was_cut_or_lost_is_named(tmp_path, version):
    path = shutil.copytree(SAMPLES / f"version_{version}", tmp_path / "c")
    for file in [file for file in path.glob("nnx-data-*/**/*") if file.is_file()]:
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        refused(path, f"{file.name} has {len(whole) - 1} bytes instead of {len(whole)}")
        file.unlink()
        refused(path, file.name)
        file.write_bytes(whole)


def test_a_flipped_bit_in_format_2_is_noticed_unless_checksums_are_skipped(tmp_path):
    path = shutil.copytree(SAMPLES / "version_2", tmp_path / "c")
    file = next(path.glob("nnx-data-*/0.bin"))
    index = json.loads(next(path.glob("nnx-data-*/0.json")).read_text())
    data = bytearray(file.read_bytes())
    data[index["rows"][0][0]] ^= 1
    file.write_bytes(data)
    refused(path, r"0\.bin differs from what was saved: the checksum of bytes")
    assert nnx.load(path, verify=False)["rows"][0, 0] != 0


CHANGES = {
    "no index": lambda rows: [],
    "another array": lambda rows: {**rows, "other": []},
    "a number": lambda rows: {**rows, "rows": 3},
    "no chunks": lambda rows: {**rows, "rows": []},
    "a chunk twice": lambda rows: {**rows, "rows": rows["rows"] + rows["rows"][:1]},
    "another rank": lambda rows: {**rows, "rows": [[0, 128, 0, [0, 0], [8]]]},
    "a box outside": lambda rows: {**rows, "rows": [[0, 128, 0, [1, 0], [8, 4]]]},
    "bytes outside": lambda rows: {**rows, "rows": [[10**9, 128, 0, [0, 0], [8, 4]]]},
    "a fraction": lambda rows: {**rows, "rows": [[0, 128, 0.5, [0, 0], [8, 4]]]},
    "a negative start": lambda rows: {**rows, "rows": [[0, 128, 0, [-1, 0], [8, 4]]]},
    "null": lambda rows: {**rows, "rows": [None]},
    "zeros": lambda rows: {**rows, "rows": [[0] * 9]},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_hostile_index_of_format_2_is_refused(tmp_path, name):
    path = shutil.copytree(SAMPLES / "version_2", tmp_path / "c")
    index = next(path.glob("nnx-data-*/0.json"))
    text = json.dumps(CHANGES[name](json.loads(index.read_text())))
    index.write_text(text)
    fields = json.loads((path / "manifest.json").read_text())
    fields.pop("crc32")
    fields["files"]["0.json"] = {"size": len(text), "crc32": zlib.crc32(text.encode())}
    (path / "manifest.json").write_text(sealed(fields))
    refused(path, "0.json|json cover")


def test_a_file_that_a_manifest_names_outside_of_its_directory_is_not_read(tmp_path):
    path = shutil.copytree(SAMPLES / "version_2", tmp_path / "c")
    (tmp_path / "secret.bin").write_bytes(b"x" * 10)
    fields = json.loads((path / "manifest.json").read_text())
    fields.pop("crc32")
    fields["files"]["../../secret.bin"] = {"size": 10}
    (path / "manifest.json").write_text(sealed(fields))
    refused(path, "leads outside")
