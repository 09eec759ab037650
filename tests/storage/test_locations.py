"""Any path: what is a local directory, what is a URL, and what is refused."""

import os
import pathlib

import jax.numpy as jnp
import pytest

import nnx
from nnx.storage.locations import location


def make(value: float = 0.0):
    return nnx.Dict(w=nnx.Param(jnp.full(3, float(value))))


class Like:
    """What etils and other libraries pass: an object that says its path."""

    def __init__(self, text):
        self.text = text

    def __fspath__(self):
        return self.text


@pytest.mark.parametrize("kind", ["text", "file URL", "pathlib", "path-like", "bytes in memory", "URL-like"])
def test_a_checkpoint_is_saved_to_any_kind_of_path(tmp_path, kind):
    text = f"{tmp_path}/a b"
    path = {
        "text": text,
        "file URL": f"file://{tmp_path}/a%20b",
        "pathlib": pathlib.Path(text),
        "path-like": Like(text),
        "bytes in memory": f"memory://{tmp_path.name}/x",
        "URL-like": Like(f"memory://{tmp_path.name}/y"),
    }[kind]
    nnx.save(path, make(1.0))
    nnx.save(path, make(2.0))
    assert (nnx.load(path, make()).w == 2).all() and nnx.checkpoint_entries(path)["w"].shape == (3,)
    assert os.path.isfile(f"{text}/manifest.json") == ("memory" not in str(kind) and kind != "URL-like")
    assert set(os.listdir(tmp_path)) <= {"a b"}


def test_the_steps_of_a_run_are_in_memory(tmp_path):
    url = f"memory://{tmp_path.name}/run"
    with nnx.CheckpointManager(url, keep_last=2, keep_best=1) as manager:
        assert manager.resume(make()) is None and str(manager.directory) == url
        for step in range(5):
            manager.save(step, make(step), metrics={"loss": abs(step - 1)})
    assert manager.steps() == [1, 3, 4] and manager.best_step() == 1 and location(url).names() == ["1", "3", "4"]
    again, model = nnx.CheckpointManager(url), make()
    assert again.resume(model) == 4 and (model.w == 4).all()
    again.save(2, make(2), overwrite=True)
    again.close()
    assert again.steps() == [1, 2] and location(url).names() == ["1", "2"]
    with pytest.raises(nnx.CheckpointError, match="nnx.CheckpointManager"):
        nnx.load(url)


def test_a_damaged_step_in_a_store_is_passed_over(tmp_path):
    place = location(f"memory://{tmp_path.name}/run")
    manager = nnx.CheckpointManager(place, asynchronous=False)
    for step in (1, 2):
        manager.save(step, make(step))
    (data,) = [name for name in (place / "2").names() if name.startswith("nnx-data")]
    pack = place / "2" / data / "pack-0"
    value = bytearray(pack.read("c.0").value or b"")
    value[0] ^= 1
    pack.write("c.0", bytes(value))
    model = make()
    with pytest.warns(UserWarning, match="Resumed from step 1(.|\n)*memory://.*pack-0/c.0 differs"):
        assert manager.resume(model) == 1
    assert (model.w == 1).all()


REFUSED = {
    "http://host/run": "is a URL that cannot be read",
    "hf://user/model": "begins with file://, gs://, s3:// or memory://",
    "S3A://bucket/run": "is a URL that cannot be read",
    "gs://bucket": "does not name a bucket and a path in it",
    "s3:///run": "does not name a bucket and a path in it",
    "file://host/run": "is on another host",
    "file://run": "is on another host",
    "s3://bucket/a/../b": "means nothing in an object store",
    "x y://z": "is a URL that cannot be read",
}


@pytest.mark.parametrize("path", REFUSED)
def test_no_other_url_becomes_a_folder(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    calls = [
        lambda: nnx.save(path, make()),
        lambda: nnx.load(path, make()),
        lambda: nnx.load(path),
        lambda: nnx.checkpoint_entries(path),
        lambda: nnx.CheckpointManager(path),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=REFUSED[path]):
            call()
    assert os.listdir(tmp_path) == []


def test_a_url_that_pathlib_took_apart_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in ("gs://bucket/run", "file:///tmp/run"):
        with pytest.raises(ValueError, match="was a URL before pathlib took it apart"):
            nnx.save(pathlib.Path(text), make())
    assert os.listdir(tmp_path) == []


def test_endpoints_come_from_the_environment(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    assert dict(location("s3://bucket/a/b").spec) == {"driver": "s3", "bucket": "bucket"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    spec = dict(location("s3://bucket/a/b").spec)
    assert spec["endpoint"] == "http://127.0.0.1:9000" and spec["aws_region"] == "us-east-1"
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    assert dict(location("s3://bucket/a/b").spec)["aws_region"] == "eu-central-1"


def test_of_two_writers_that_replace_one_value_one_is_told_so(tmp_path):
    for place in (location(tmp_path), location(f"memory://{tmp_path.name}/cas")):
        before = place.read("key")
        assert before.value is None
        first = place.replace("key", b"a", before.generation)
        assert first and place.replace("key", b"b", before.generation) is None and place.read("key").value == b"a"
        assert place.replace("key", None, first) is not None and place.read("key").value is None
        assert place.replace("key", b"c", first) is None
