"""Saving and loading: round trips, what does not fit, and bad disks."""

import inspect
import json
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx
from nnx.storage.checkpoints import saving


class Mixed(nnx.Module):
    def __init__(self, width: int = 4, *, ctx: nnx.Context):
        self.layers = [nnx.Linear(3, width, ctx=ctx), nnx.Linear(width, 2, ctx=ctx)]
        self.half = nnx.Param(jax.random.normal(ctx.make_rng("params"), (2, 3), jnp.bfloat16))
        self.count = nnx.var("counts", 0)
        self.mask = np.array([True, False])

    def __call__(self, x):
        self.count += 1
        for layer in self.layers:
            x = layer(x)
        return x


def make_net(seed: int = 0, width: int = 4) -> Mixed:
    return Mixed(width, ctx=nnx.context(seed))


def same(a, b) -> bool:
    return a.get_state() == b.get_state()


# Round trips


def test_a_module_comes_back_into_another_one_of_its_make(tmp_path):
    net, other = make_net(0), make_net(1)
    net.count = 7
    nnx.save(tmp_path / "c", net)
    assert not same(net, other)
    assert nnx.load(tmp_path / "c", other) is other
    assert same(net, other)
    assert other.count == 7 and isinstance(other.count, int)
    assert other.half.dtype == jnp.bfloat16
    assert isinstance(other.mask, np.ndarray) and other.get_module_def() == net.get_module_def()


def test_a_state_and_a_pure_come_back(tmp_path):
    net = make_net(0)
    params = net.filter(nnx.Param)
    nnx.save(tmp_path / "c", params)
    back = nnx.load(tmp_path / "c", make_net(1).filter(nnx.Param))
    assert isinstance(back, nnx.State) and back == params
    nnx.save(tmp_path / "p", net.partition())
    assert nnx.load(tmp_path / "p", make_net(2).partition()).merge().get_state() == net.get_state()


def test_the_state_of_a_module_can_be_loaded_into_the_module_and_back(tmp_path):
    net = make_net(0)
    nnx.save(tmp_path / "c", net.get_state())
    assert same(nnx.load(tmp_path / "c", make_net(1)), net)


def test_a_train_state_comes_back(tmp_path):
    def make(seed):
        (params, rest), moduledef = make_net(seed).partition(nnx.Param, ...)
        return nnx.TrainState(moduledef, params=params, tx=optax.adam(1e-3), rest=rest)

    state = make(0)
    state = state.apply_gradients(jax.tree.map(jnp.ones_like, state.params))
    nnx.save(tmp_path / "c", state)
    back = nnx.load(tmp_path / "c", make(1))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.all(a == b)), back, state))
    assert back.step == 1


def everything(seed: int):
    model = make_net(seed)
    metrics = nnx.MultiMetric(loss=nnx.Average("loss"))
    return {
        "model": model,
        "optimizer": nnx.Optimizer(model, optax.adam(1e-2)),
        "ema": nnx.EMA(model),
        "metrics": metrics,
        "ctx": nnx.context(seed, dropout=seed + 1, flags={"deterministic": False}),
        "data": {"position": seed, "order": np.arange(3) + seed, "name": f"run {seed}"},
    }


def test_a_dict_of_all_there_is_comes_back_in_place(tmp_path):
    old, new = everything(0), everything(1)
    old["optimizer"].update(jax.tree.map(jnp.ones_like, old["model"].filter(nnx.Param)))
    old["ema"].update(old["model"])
    old["metrics"].update(loss=3.0)
    old["ctx"].make_rng("dropout")
    nnx.save(tmp_path / "c", old)
    parts = dict(new)
    assert nnx.load(tmp_path / "c", new) is new
    assert all(new[name] is parts[name] for name in ("model", "optimizer", "ema", "metrics", "ctx"))
    for name in ("model", "optimizer", "ema", "metrics"):
        assert same(old[name], new[name]), name
    assert new["optimizer"].model is new["model"]
    assert new["metrics"].compute()["loss"] == 3
    assert new["data"]["position"] == 0 and new["data"]["name"] == "run 0"
    np.testing.assert_array_equal(new["data"]["order"], [0, 1, 2])
    for name in ("params", "dropout"):
        a, b = old["ctx"].make_rng(name), new["ctx"].make_rng(name)
        assert (jax.random.key_data(a) == jax.random.key_data(b)).all()
    assert new["ctx"].get_flag("deterministic") is False


def test_shared_values_are_stored_once(tmp_path):
    things = everything(0)
    nnx.save(tmp_path / "c", things)
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert "model/layers/0/kernel" in manifest["entries"]
    assert not [path for path in manifest["entries"] if path.startswith("optimizer/model")]
    assert manifest["aliases"] == {"optimizer/model": "model"}
    # either name leads to it
    other = make_net(1)
    report = nnx.LoadReport()
    nnx.load(tmp_path / "c", {"optimizer": {"model": other}}, strict=False, report=report)
    assert same(other, things["model"]) and not report.missing


class Tied(nnx.Module):
    def __init__(self, value: float, tied: bool = True):
        table = nnx.Param(jnp.full((3,), value))
        self.embed = nnx.Dict(table=nnx.Ref(table) if tied else table)
        self.out = nnx.Dict(table=nnx.Param(jnp.zeros(3)))
        if tied:
            del self.out["table"]
            self.out["table"] = nnx.Ref(nnx.Param(jnp.zeros(3)))
            shared = nnx.Ref(table)
            self.embed.table = shared
            self.out.table = shared
        self.shared = self.out


def test_tied_variables_are_stored_once_and_loaded_tied_or_untied(tmp_path):
    nnx.save(tmp_path / "c", Tied(2.0))
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert list(manifest["entries"]) == ["embed/table"]
    assert manifest["modules"] == {"": "Tied", "embed": "Dict", "out": "Dict"}
    tied, untied = nnx.load(tmp_path / "c", Tied(0.0)), nnx.load(tmp_path / "c", Tied(0.0, tied=False))
    assert tied.embed.table is tied.out.table and (tied.out.table == 2).all()
    assert (untied.embed.table == 2).all() and (untied.out.table == 2).all()


@pytest.mark.parametrize(
    "value",
    [
        jnp.array(3, jnp.int32),
        jnp.arange(4, dtype=jnp.uint4),
        jnp.arange(4, dtype=jnp.int4),
        jnp.array([1.5, -2], jnp.float8_e4m3fn),
        jnp.array([1.5, jnp.nan, jnp.inf], jnp.float16),
        jnp.array([1 + 2j]),
        jnp.array([True, False]),
        jnp.zeros((0, 3)),
        jax.random.key(3),
        jax.random.split(jax.random.key(3, impl="rbg"), (2, 3)),
        jax.random.key(0)[None][:0],
        jax.random.PRNGKey(1),
        np.arange(3, dtype=np.int64),
        np.float64(2.5),
        jnp.asarray(1.0),
    ],
    ids=lambda value: f"{type(value).__name__} {value.dtype}{list(value.shape)}",
)
def test_every_kind_of_array_survives(tmp_path, value):
    nnx.save(tmp_path / "c", {"x": value})
    back = nnx.load(tmp_path / "c", {"x": value})["x"]
    assert type(back) is type(value) and back.dtype == value.dtype and back.shape == value.shape
    if isinstance(value, jax.Array):
        assert back is not value and back.committed == value.committed
        assert getattr(back, "weak_type", False) == getattr(value, "weak_type", False)
    assert nnx.State({"x": back}) == nnx.State({"x": value}) or np.isnan(np.asarray(value, np.float32)).any()


@pytest.mark.parametrize("value", [3, -(10**30), 2.5, float("inf"), 1 + 2j, True, "text"])
def test_numbers_and_strings_survive(tmp_path, value):
    nnx.save(tmp_path / "c", {"x": value, "in": nnx.Dict(w=nnx.Param(jnp.ones(2)))})
    back = nnx.load(tmp_path / "c", {"x": type(value)(), "in": nnx.Dict(w=nnx.Param(jnp.ones(2)))})["x"]
    assert back == value and type(back) is type(value)


def test_a_count_that_became_an_array_loads_into_a_fresh_model(tmp_path):
    net = make_net()
    nnx.jit(lambda net: net(jnp.ones((1, 3))))(net)
    assert isinstance(net.count, jax.Array)
    nnx.save(tmp_path / "c", net)
    fresh = nnx.load(tmp_path / "c", make_net(1))
    assert fresh.count == 1 and fresh.count.weak_type == net.count.weak_type
    nnx.save(tmp_path / "fresh", make_net())
    net = nnx.load(tmp_path / "fresh", net)  # and the reverse
    assert net.count == 0


def test_variables_that_hold_pytrees_are_saved_leaf_by_leaf(tmp_path):
    def make(value):
        return nnx.Dict(cache=nnx.Cache({"k": jnp.full(2, value), "v": (jnp.full(3, value), value)}))

    nnx.save(tmp_path / "c", make(2.0))
    back = nnx.load(tmp_path / "c", make(0.0))
    assert back.get_state() == make(2.0).get_state()


def test_a_model_without_arrays_and_a_single_array_can_be_saved(tmp_path):
    nnx.save(tmp_path / "none", {"epoch": 3})
    assert nnx.load(tmp_path / "none", {"epoch": 0}) == {"epoch": 3}
    nnx.save(tmp_path / "one", jnp.arange(3))
    np.testing.assert_array_equal(nnx.load(tmp_path / "one", jnp.zeros(3, jnp.int32)), [0, 1, 2])


def test_saving_again_replaces_the_checkpoint_and_leaves_nothing_behind(tmp_path):
    for seed in range(3):
        nnx.save(tmp_path / "c", make_net(seed))
    assert same(nnx.load(tmp_path / "c", make_net(9)), make_net(2))
    assert len(list((tmp_path / "c").iterdir())) == 2  # the manifest and one folder
    (tmp_path / "c" / "nnx-data-mine").mkdir()  # not ours
    nnx.save(tmp_path / "c", {"epoch": 1})
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"manifest.json", "nnx-data-mine"}


def test_an_abstract_model_is_filled(tmp_path):
    nnx.save(tmp_path / "c", make_net(0))
    abstract = nnx.eval_shape(make_net, 1)
    assert isinstance(abstract.half, jax.ShapeDtypeStruct)
    loaded = nnx.load(tmp_path / "c", abstract)
    assert loaded is abstract and (loaded.layers[0].kernel == make_net(0).layers[0].kernel).all()
    loaded(jnp.ones((1, 3)))


def test_manifest_describes_the_checkpoint(tmp_path):
    nnx.save(tmp_path / "c", {"model": make_net()})
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert manifest["entries"]["model/half"] == {
        "type": "Param", "kind": "array", "dtype": "bfloat16", "shape": [2, 3],
    }  # fmt: skip
    assert manifest["entries"]["model/count"]["value"] == 0
    assert manifest["modules"]["model/layers/1"] == "Linear"


# What does not fit


def check_refused(path, target, match, **options):
    before = target.get_state()
    with pytest.raises(nnx.CheckpointError, match=match) as caught:
        nnx.load(path, target, **options)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, OSError)
    assert target.get_state() == before


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path):
    nnx.save(tmp_path / "c", make_net())
    wider = make_net(1, width=5)
    check_refused(tmp_path / "c", wider, r"'layers/0/kernel' is float32\[3,4\] in the checkpoint and float32\[3,5\]")
    other = nnx.Dict(scale=nnx.Param(jnp.ones(2)), half=nnx.Param(jnp.ones((2, 3), jnp.float32)))
    check_refused(tmp_path / "c", other, r"missing from the checkpoint: 'scale'")
    check_refused(tmp_path / "c", other, r"not in the target: 'count', 'layers/0/bias'")
    check_refused(tmp_path / "c", other, r"'half' is bfloat16\[2,3\] in the checkpoint and float32\[2,3\]")
    check_refused(tmp_path / "c", other, r"Nothing was loaded.(.|\n)*strict=False")


def test_without_strict_fitting_entries_are_loaded_and_the_rest_reported(tmp_path):
    nnx.save(tmp_path / "c", make_net(0))
    report = nnx.LoadReport()
    target = make_net(1, width=5)
    target.scale = nnx.Param(jnp.ones(2))
    before = target.layers[0].kernel
    nnx.load(tmp_path / "c", target, strict=False, report=report)
    assert report.missing == ["scale"] and report.unexpected == []
    assert report.mismatched["layers/0/kernel"] == ("float32[3,4]", "float32[3,5]")
    assert (target.half == make_net(0).half).all() and (target.layers[0].kernel == before).all()
    with pytest.warns(UserWarning, match="only in part(.|\n)*missing from the checkpoint: 'scale'"):
        nnx.load(tmp_path / "c", target, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nnx.load(tmp_path / "c", make_net(1), strict=False)
    assert not nnx.LoadReport()


@pytest.mark.parametrize("function", [nnx.load, nnx.load_safetensors])
def test_strict_is_a_keyword_of_every_function_that_loads(function):
    assert inspect.signature(function).parameters["strict"].kind is inspect.Parameter.KEYWORD_ONLY


def test_another_dtype_is_converted_only_on_request(tmp_path):
    nnx.save(tmp_path / "c", nnx.Dict(w=nnx.Param(jnp.array([1.0, 2.0]))))
    target = nnx.Dict(w=nnx.Param(jnp.zeros(2, jnp.bfloat16)))
    check_refused(tmp_path / "c", target, r"'w' is float32\[2\] in the checkpoint and bfloat16\[2\] in the target")
    nnx.load(tmp_path / "c", target, cast=True)
    assert target.w.dtype == jnp.bfloat16 and (target.w == jnp.array([1, 2])).all()


def test_a_key_of_another_kind_is_refused(tmp_path):
    nnx.save(tmp_path / "c", {"key": jax.random.key(0)})
    with pytest.raises(nnx.CheckpointError, match=r"'key' is key<fry>\[\] in the checkpoint and key<rbg>\[\]"):
        nnx.load(tmp_path / "c", {"key": jax.random.key(0, impl="rbg")})
    with pytest.raises(nnx.CheckpointError, match="'key' is key<fry>"):
        nnx.load(tmp_path / "c", {"key": jax.random.PRNGKey(0)})


def test_values_that_cannot_be_saved_are_named(tmp_path):
    with pytest.raises(TypeError, match="Cannot save 'f': .* is not data"):
        nnx.save(tmp_path / "c", {"f": lambda x: x})
    with pytest.raises(ValueError, match="Cannot save 'x': .* has no values"):
        nnx.save(tmp_path / "c", {"x": jax.ShapeDtypeStruct((2,), jnp.float32)})
    with pytest.raises(ValueError, match="Cannot save 'x': .*outside jit"):
        jax.jit(lambda x: nnx.save(tmp_path / "c", {"x": x}))(1.0)
    donated = jnp.ones(2)
    donated.delete()
    with pytest.raises(ValueError, match="Cannot save 'x': its buffer was deleted"):
        nnx.save(tmp_path / "c", {"x": donated})
    with pytest.raises(ValueError, match="same path, 'a/0/b/c'"):
        nnx.save(tmp_path / "c", {"1": jnp.ones(1), "a": [{"b/c": jnp.ones(1), "b": {"c": jnp.ones(1)}}]})
    assert not (tmp_path / "c").exists()


# Bad files and disks


def test_missing_path_file_and_folder_of_steps_have_different_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint at .*the path does not exist"):
        nnx.load(tmp_path / "c", make_net())
    (tmp_path / "file").write_text("")
    with pytest.raises(nnx.CheckpointError, match="it is a file"):
        nnx.load(tmp_path / "file", make_net())
    with pytest.raises(nnx.CheckpointError, match="a checkpoint is a directory, and there is a file"):
        nnx.save(tmp_path / "file", make_net())
    nnx.save(tmp_path / "steps" / "3", make_net())
    with pytest.raises(nnx.CheckpointError, match="nnx.CheckpointManager"):
        nnx.load(tmp_path / "steps", make_net())


def data_files(path: Path) -> list[Path]:
    """The files with values; the metadata is for other programs, and a load does not need it."""
    return sorted(file for file in path.glob("nnx-data-*/*/c.*"))


def test_every_truncated_or_missing_file_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "LARGE", 40)  # bytes: some arrays have files of their own
    nnx.save(tmp_path / "c", make_net(0))
    target = make_net(1)
    assert len(data_files(tmp_path / "c")) > 1
    for file in data_files(tmp_path / "c"):
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        name = file.relative_to(tmp_path / "c")
        check_refused(tmp_path / "c", target, f"damaged: the file {name} differs from what was saved, or is another")
        file.unlink()
        check_refused(tmp_path / "c", target, f"damaged: the file {name} differs .*NOT_FOUND")
        file.write_bytes(whole)
    assert same(nnx.load(tmp_path / "c", target), make_net(0))


def test_a_damaged_or_foreign_manifest_is_noticed(tmp_path):
    nnx.save(tmp_path / "c", make_net(0))
    manifest = tmp_path / "c" / "manifest.json"
    text = manifest.read_text()
    target = make_net(1)
    manifest.write_text(text[:100])
    check_refused(tmp_path / "c", target, "damaged: manifest.json cannot be read")
    manifest.write_text('{"format": "something", "version": 1}')
    check_refused(tmp_path / "c", target, "is not an NNX checkpoint: .*'something'")
    manifest.write_text(json.dumps({**json.loads(text), "version": 99}))
    check_refused(tmp_path / "c", target, "format version 99; this version of NNX reads up to version 3")
    manifest.unlink()
    check_refused(tmp_path / "c", target, "not a finished checkpoint: it has no manifest.json.*interrupted")


def test_the_directory_of_a_published_model_says_who_opens_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(nnx.CheckpointError, match="published model: nnx.models.from_pretrained"):
        nnx.load(tmp_path)


@pytest.fixture
def public_directory():
    """A directory that other users can reach."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)


def test_a_read_only_disk_is_a_clear_error_and_the_earlier_checkpoint_stays(public_directory):
    inner = public_directory / "disk"
    inner.mkdir()
    nnx.save(inner / "c", make_net(0))
    for folder in (inner / "c", inner):
        os.chmod(folder, 0o555)
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(65534)  # permissions do not bind root
        with pytest.raises(nnx.CheckpointError, match="Could not save to .*Permission denied.* are intact"):
            nnx.save(inner / "c", make_net(1))
        with pytest.raises(nnx.CheckpointError, match="Could not save to .*Permission denied"):
            nnx.save(inner / "new", make_net(1))
    finally:
        if is_root:
            os.seteuid(0)
        for folder in (inner, inner / "c"):
            os.chmod(folder, 0o755)
    assert same(nnx.load(inner / "c", make_net(2)), make_net(0))


FULL_DISK = """
import resource, signal, sys
import jax, jax.numpy as jnp
import nnx
path = sys.argv[1]
nnx.save(path, {"x": jnp.arange(10.0)})
big = jax.random.normal(jax.random.key(0), (100_000,))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    nnx.save(path, {"x": big})
except nnx.CheckpointError as error:
    print("error:", error)
print(nnx.load(path, {"x": jnp.zeros(10)})["x"].tolist())
import pathlib
print(sorted(p.name[:8] for p in pathlib.Path(path).iterdir()))
"""


def test_a_full_disk_is_a_clear_error_and_the_earlier_checkpoint_stays(tmp_path):
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert lines and lines[0].startswith("error: Could not save to"), done.stdout + done.stderr
    assert "File too large" in lines[0] and "intact" in lines[0]
    assert lines[1:] == [str([float(i) for i in range(10)]), "['manifest', 'nnx-data']"]
