"""Checkpoints of version 1 of the format, whose data Orbax wrote, are still loaded."""

import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest

import nnx

ENTRIES = {
    "ctx/noise/count": {"type": "Context", "kind": "number", "dtype": "int", "value": 4},
    "ctx/noise/key": {"type": "Context", "kind": "key", "dtype": "key<fry>", "shape": [], "impl": "threefry2x32"},
    "model/count": {"kind": "array", "dtype": "int32", "shape": [], "weak": True},
    "model/small": {"type": "Param", "kind": "array", "dtype": "int4", "shape": [4], "stored": "int8"},
    "model/w": {"type": "Param", "kind": "array", "dtype": "float32", "shape": [2, 3]},
}


@pytest.fixture(scope="module")
def version_1(tmp_path_factory):
    """A checkpoint as version 1 wrote it."""
    directory = tmp_path_factory.mktemp("old")
    arrays = {
        "ctx/noise/key": jax.random.key_data(jax.random.key(7)),
        "model/count": jnp.asarray(3),
        "model/small": np.arange(4, dtype=np.int8),
        "model/w": jnp.arange(6.0).reshape(2, 3),
    }
    with orbax.checkpoint.Checkpointer(orbax.checkpoint.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(directory / "nnx-data-0", args=orbax.checkpoint.args.PyTreeSave(arrays))
    data = directory / "nnx-data-0"
    files = {str(file.relative_to(data)): file.stat().st_size for file in data.rglob("*") if file.is_file()}
    manifest = {
        **{"format": "nnx checkpoint", "version": 1, "jax": "0.10.0", "data": "nnx-data-0", "files": files},
        **{"entries": ENTRIES, "aliases": {}, "modules": {"model": "Dict"}, "info": {}},
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def make():
    model = nnx.Dict(w=nnx.Param(jnp.zeros((2, 3))), small=nnx.Param(jnp.zeros(4, jnp.int4)), count=jnp.asarray(0))
    return {"model": model, "ctx": nnx.context(noise=0)}


def test_an_old_checkpoint_is_loaded(version_1):
    found = nnx.load(version_1, make())
    model = found["model"]
    assert (model.w == jnp.arange(6.0).reshape(2, 3)).all() and model.count == 3 and model.count.weak_type
    assert model.small.dtype == jnp.int4 and model.small.tolist() == [0, 1, 2, 3]
    stream = found["ctx"]._streams["noise"]
    assert stream.count == 4 and (jax.random.key_data(stream.key) == jax.random.key_data(jax.random.key(7))).all()
    assert nnx.load(version_1)["model"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_without_orbax_the_error_names_the_extra(version_1, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(
        ImportError, match=r"format version 1 needs the package 'orbax'.*pip install 'nnx\[checkpoint\]'"
    ):
        nnx.load(version_1, make())


def test_saving_over_an_old_checkpoint_replaces_it(version_1, tmp_path):
    shutil.copytree(version_1, tmp_path / "c")
    nnx.save(tmp_path / "c", {"epoch": 1})
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["manifest.json"]
