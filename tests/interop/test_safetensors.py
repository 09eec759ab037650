"""safetensors in and out, and against the reference implementation."""

import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx


class Net(nnx.Module):
    def __init__(self, seed: float = 0.0):
        self.kernel = nnx.Param(jnp.arange(6.0).reshape(2, 3) + seed, sharding=("in", "out"))
        self.half = nnx.Param(jnp.full((3,), seed, jnp.bfloat16))
        self.inner = nnx.Dict(stat=nnx.BatchStat(jnp.array(seed)), mask=np.array([True, False]))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def test_a_state_comes_back_with_types_and_metadata(path):
    net = Net(1.0)
    nnx.save_safetensors(path, net.get_state())
    state = nnx.load_safetensors(path, Net(2.0).get_state())
    assert state == net.get_state()
    assert state["kernel"].sharding == ("in", "out") and state["half"].value.dtype == jnp.bfloat16
    assert isinstance(state["inner/mask"], np.ndarray)


def test_a_module_may_stand_for_its_state_and_is_not_changed(path):
    net, other = Net(1.0), Net(2.0)
    nnx.save_safetensors(path, net)
    state = nnx.load_safetensors(path, other)
    assert other.get_state() == Net(2.0).get_state()
    other.update_state(state)
    assert other.get_state() == net.get_state()


def test_the_reference_implementation_reads_what_we_write(path):
    nnx.save_safetensors(path, Net(1.0), metadata={"format": "np"})
    read = safetensors.numpy.load_file(path)
    assert sorted(read) == ["half", "inner/mask", "inner/stat", "kernel"]
    np.testing.assert_array_equal(read["kernel"], Net(1.0).kernel)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata()["format"] == "np"


def test_we_read_what_the_reference_implementation_writes(path):
    tensors = {
        "kernel": np.ones((2, 3), np.float32),
        "empty": np.zeros((0, 2)),
        "count": np.array(3),
        "b": np.array([True]),
    }
    safetensors.numpy.save_file(tensors, path)
    state = nnx.load_safetensors(path, nnx.State(tensors))
    assert state == nnx.State(tensors)


DTYPES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 int64 int32 int16 int8 "
    "uint64 uint32 uint16 uint8 bool"
).split()


def test_every_dtype_of_the_format_survives(path):
    state = nnx.State({name: np.array([0, 1, 1]).astype(jnp.dtype(name)) for name in DTYPES})
    nnx.save_safetensors(path, state)
    assert nnx.load_safetensors(path, state) == state


def test_a_dtype_that_the_format_has_not_is_named(path):
    with pytest.raises(ValueError, match="Cannot save 'w' as safetensors: the format has no int4.*e.g. to int8"):
        nnx.save_safetensors(path, nnx.State({"w": jnp.ones(2, jnp.int4)}))
    assert not path.exists()


def test_keys_numbers_and_empty_states_survive(path):
    state = nnx.State(
        {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(0, impl="rbg"), 2), "n": nnx.var("c", 5)}
    )
    nnx.save_safetensors(path, state)
    assert nnx.load_safetensors(path, state) == state
    with pytest.raises(nnx.CheckpointError, match=r"'key' is key<fry>\[\] in the checkpoint and uint32\[2\]"):
        nnx.load_safetensors(path, state | nnx.State({"key": jax.random.PRNGKey(0)}))
    nnx.save_safetensors(path, nnx.State())
    assert nnx.load_safetensors(path, nnx.State()) == nnx.State()


def make_tied():
    ref = nnx.Ref(nnx.Param(jnp.arange(3.0)))
    return nnx.Dict(embed=nnx.Dict(table=ref), out=nnx.Dict(table=ref))


def test_what_is_shared_is_written_once_and_read_by_any_name(path):
    nnx.save_safetensors(path, make_tied())
    assert list(safetensors.numpy.load_file(path)) == ["embed/table"]
    untied = nnx.Dict(embed=nnx.Dict(table=nnx.Param(jnp.zeros(3))), out=nnx.Dict(table=nnx.Param(jnp.zeros(3))))
    assert (nnx.load_safetensors(path, untied)["out/table"].value == jnp.arange(3)).all()
    # other people's files have it under another name, or twice
    table = np.full(3, 7, np.float32)
    safetensors.numpy.save_file({"out/table": table}, path)
    assert (nnx.load_safetensors(path, make_tied())["embed/table"].value == 7).all()
    safetensors.numpy.save_file({"out/table": table, "embed/table": table}, path)
    assert (nnx.load_safetensors(path, make_tied())["embed/table"].value == 7).all()
    safetensors.numpy.save_file({"out/table": table, "embed/table": table + 1}, path)
    with pytest.raises(nnx.CheckpointError, match="two different values, 'embed/table' and 'out/table'"):
        nnx.load_safetensors(path, make_tied())


def big_state(value: float = 0.0):
    return nnx.State({f"layers/{i}/w": nnx.Param(jnp.full((10, 10), value + i)) for i in range(5)})


def test_a_large_state_is_written_in_shards_with_an_index(tmp_path, path):
    nnx.save_safetensors(path, big_state(1.0), max_shard_size="1KB")  # 400 bytes each
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == [
        "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]  # fmt: skip
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2000
    assert index["weight_map"]["layers/4/w"] == "model-00003-of-00003.safetensors"
    for source in (path, tmp_path, tmp_path / "model.safetensors.index.json"):
        assert nnx.load_safetensors(source, big_state()) == big_state(1.0)


def test_one_form_replaces_the_other(tmp_path, path):
    nnx.save_safetensors(path, big_state(1.0), max_shard_size=1000)
    nnx.save_safetensors(path, big_state(2.0))
    assert nnx.load_safetensors(path, big_state()) == big_state(2.0)
    nnx.save_safetensors(path, big_state(3.0), max_shard_size=900)
    assert nnx.load_safetensors(path, big_state()) == big_state(3.0)


def test_shards_that_are_missing_are_named(tmp_path, path):
    nnx.save_safetensors(path, big_state(), max_shard_size="1KB")
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(nnx.CheckpointError, match="names the file 'model-00002-of-00003.*, which is missing"):
        nnx.load_safetensors(path, big_state())
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(nnx.CheckpointError, match="The index .* cannot be read"):
        nnx.load_safetensors(path, big_state())


@pytest.mark.parametrize("size", ["5 XB", "big", 0, -3, 1.5])
def test_a_shard_size_that_is_none_is_refused(path, size):
    with pytest.raises(ValueError, match='a number of bytes or a text such as "5GB"'):
        nnx.save_safetensors(path, big_state(), max_shard_size=size)


def test_what_does_not_fit_is_listed(path):
    nnx.save_safetensors(path, Net())
    target = nnx.State(
        {"kernel": nnx.Param(jnp.zeros((3, 3))), "half": nnx.Param(jnp.zeros(3)), "new": nnx.Param(jnp.zeros(1))}
    )
    with pytest.raises(nnx.CheckpointError) as caught:
        nnx.load_safetensors(path, target)
    text = str(caught.value)
    assert "missing from the checkpoint: 'new'" in text
    assert "not in the target: 'inner/stat', 'inner/mask'" in text or "not in the target: 'inner/mask'" in text
    assert "'kernel' is float32[2,3] in the checkpoint and float32[3,3] in the target" in text
    assert "'half' is bfloat16[3] in the checkpoint and float32[3] in the target" in text
    report = nnx.LoadReport()
    state = nnx.load_safetensors(path, target, strict=False, cast=True, report=report)
    assert list(state) == ["half"] and state["half"].value.dtype == jnp.float32
    assert report.missing == ["new"] and list(report.mismatched) == ["kernel"]
    with pytest.warns(UserWarning, match="only in part"):
        nnx.load_safetensors(path, target, strict=False)


def test_files_that_are_no_safetensors_are_refused(path):
    nnx.save_safetensors(path, Net())
    whole = path.read_bytes()
    for cut in (0, 4, 8, 40, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(nnx.CheckpointError, match="is not a valid safetensors file"):
            nnx.load_safetensors(path, Net())
    path.write_bytes(whole + b"x")
    with pytest.raises(nnx.CheckpointError, match="but its header describes"):
        nnx.load_safetensors(path, Net())
    unknown_dtype = b'{"w":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}'
    too_short = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'
    for header in (b"[1]  ", unknown_dtype, too_short):
        path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
        with pytest.raises(nnx.CheckpointError, match="is not a valid safetensors file"):
            nnx.load_safetensors(path, Net())
    with pytest.raises(FileNotFoundError, match="There is no safetensors file at"):
        nnx.load_safetensors(path.with_name("other.safetensors"), Net())
    with pytest.raises(FileNotFoundError, match="the directory contains none"):
        (path.parent / "empty").mkdir()
        nnx.load_safetensors(path.parent / "empty", Net())
    with pytest.raises(TypeError, match="load_safetensors takes a State or a Module, got"):
        nnx.load_safetensors(path, {"w": 1})


def test_an_interrupted_write_leaves_the_old_file(path, monkeypatch):
    nnx.save_safetensors(path, Net(1.0))

    def no_space(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", no_space)
        with pytest.raises(nnx.CheckpointError, match="Could not save to .*No space left"):
            nnx.save_safetensors(path, Net(2.0))
    assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]
    assert nnx.load_safetensors(path, Net()) == Net(1.0).get_state()


def test_an_abstract_target_with_shardings_is_read_in_place(path):
    nnx.save_safetensors(path, Net(1.0))
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), P("data"))
    abstract = nnx.eval_shape(Net)
    abstract.kernel = jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=sharding)
    state = nnx.load_safetensors(path, abstract)
    assert state["kernel"].value.sharding == sharding
    assert (state["kernel"].value == Net(1.0).kernel).all()
