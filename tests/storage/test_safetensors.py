"""safetensors in and out, and against the reference implementation."""

import json
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx
from nnx.storage.safetensors import file as safetensors_file
from tests.sharding.programs import environment


class Mixed(nnx.Module):
    def __init__(self, seed: float = 0.0):
        self.kernel = nnx.Param(jnp.arange(6.0).reshape(2, 3) + seed, sharding=("in", "out"))
        self.half = nnx.Param(jnp.full((3,), seed, jnp.bfloat16))
        self.inner = nnx.Dict(stat=nnx.BatchStat(jnp.array(seed)), mask=np.array([True, False]))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def test_a_state_comes_back_with_types_and_metadata(path):
    net = Mixed(1.0)
    nnx.save_safetensors(path, net.get_state())
    state = nnx.load_safetensors(path, Mixed(2.0).get_state())
    assert state == net.get_state()
    assert state["kernel"].sharding == ("in", "out") and state["half"].value.dtype == jnp.bfloat16
    assert isinstance(state["inner/mask"], np.ndarray)


def test_module_may_be_passed_for_its_state_and_is_unchanged(path):
    net, other = Mixed(1.0), Mixed(2.0)
    nnx.save_safetensors(path, net)
    state = nnx.load_safetensors(path, other)
    assert other.get_state() == Mixed(2.0).get_state()
    other.update_state(state)
    assert other.get_state() == net.get_state()


def test_the_reference_implementation_reads_what_we_write(path):
    nnx.save_safetensors(path, Mixed(1.0), metadata={"format": "np"})
    read = safetensors.numpy.load_file(path)
    assert sorted(read) == ["half", "inner/mask", "inner/stat", "kernel"]
    np.testing.assert_array_equal(read["kernel"], Mixed(1.0).kernel)
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


def test_shared_value_is_written_once_and_read_by_any_name(path):
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
    with pytest.raises(nnx.CheckpointError, match="'out/table' is .* a different value from 'embed/table'"):
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
    with pytest.raises(ValueError, match='a number of bytes or a string such as "5GB"'):
        nnx.save_safetensors(path, big_state(), max_shard_size=size)


def test_entries_that_do_not_fit_are_listed(path):
    nnx.save_safetensors(path, Mixed())
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
    nnx.save_safetensors(path, Mixed())
    whole = path.read_bytes()
    for cut in (0, 4, 8, 40, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(nnx.CheckpointError, match="is not a valid safetensors file"):
            nnx.load_safetensors(path, Mixed())
    path.write_bytes(whole + b"x")
    with pytest.raises(nnx.CheckpointError, match="but its header describes"):
        nnx.load_safetensors(path, Mixed())
    unknown_dtype = b'{"w":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}'
    too_short = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'
    for header in (b"[1]  ", unknown_dtype, too_short):
        path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
        with pytest.raises(nnx.CheckpointError, match="is not a valid safetensors file"):
            nnx.load_safetensors(path, Mixed())
    with pytest.raises(FileNotFoundError, match="There is no safetensors file at"):
        nnx.load_safetensors(path.with_name("other.safetensors"), Mixed())
    with pytest.raises(FileNotFoundError, match="the directory contains none"):
        (path.parent / "empty").mkdir()
        nnx.load_safetensors(path.parent / "empty", Mixed())
    with pytest.raises(TypeError, match="load_safetensors takes a State or a Module, got"):
        nnx.load_safetensors(path, {"w": 1})


def test_an_interrupted_write_leaves_the_old_file(path, monkeypatch):
    nnx.save_safetensors(path, Mixed(1.0))

    def no_space(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", no_space)
        with pytest.raises(nnx.CheckpointError, match="Could not save to .*No space left"):
            nnx.save_safetensors(path, Mixed(2.0))
    assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]
    assert nnx.load_safetensors(path, Mixed()) == Mixed(1.0).get_state()


def test_an_abstract_target_with_shardings_is_read_in_place(path):
    nnx.save_safetensors(path, Mixed(1.0))
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), P("data"))
    abstract = nnx.eval_shape(Mixed)
    abstract.kernel = jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=sharding)
    state = nnx.load_safetensors(path, abstract)
    assert state["kernel"].value.sharding == sharding
    assert (state["kernel"].value == Mixed(1.0).kernel).all()


# Without a target


def test_without_a_target_everything_is_there_as_a_nested_dict_of_memory_mapped_arrays(tmp_path, path):
    nnx.save_safetensors(path, big_state(1.0) | nnx.State({"scale": np.float32(3), "empty": np.zeros((0, 2))}))
    found = nnx.load_safetensors(path)
    assert sorted(found) == ["empty", "layers", "scale"] and sorted(found["layers"]) == list("01234")
    weight = found["layers"]["3"]["w"]
    assert isinstance(weight, np.memmap) and (weight == 4.0).all() and not weight.flags.writeable
    assert found["scale"] == 3 and found["empty"].shape == (0, 2)
    nnx.save_safetensors(path, big_state(2.0), max_shard_size=1000)  # a map shows the file that was opened
    assert (weight == 4.0).all() and (nnx.load_safetensors(tmp_path)["layers"]["3"]["w"] == 5.0).all()


def test_without_a_target_keys_are_keys_and_options_for_targets_are_refused(path):
    keys = jax.random.split(jax.random.key(3), 2)
    nnx.save_safetensors(path, nnx.State({"a/key": keys, "a/half": jnp.ones(2, jnp.bfloat16)}))
    found = nnx.load_safetensors(path, verify=False)["a"]
    assert (found["key"] == keys).all() and found["half"].dtype == jnp.bfloat16
    for options in ({"strict": False}, {"cast": True}, {"report": nnx.LoadReport()}):
        with pytest.raises(
            TypeError, match=f"without a target returns everything in the file, so {next(iter(options))}= has no"
        ):
            nnx.load_safetensors(path, **options)
    with pytest.raises(TypeError, match="takes a State or a Module, got None"):
        nnx.load_safetensors(path, None)


def test_names_that_are_both_a_tensor_and_a_folder_need_other_names(path):
    for names in (("a", "a/b"), ("a/b", "a"), ("a/b/c/d", "a/b")):
        safetensors.numpy.save_file({name: np.zeros(1) for name in names}, path)
        with pytest.raises(nnx.CheckpointError, match="contains both 'a(/b)?' and 'a/b(/c/d)?', so its names are not"):
            nnx.load_safetensors(path)
    assert sorted(nnx.load_safetensors(path, rename={"a/b": "x"})) == ["a", "x"]


def test_the_entries_of_a_file_are_listed_without_reading_it(tmp_path, path):
    state = big_state() | nnx.State({"keys": jax.random.split(jax.random.key(3), 2), "half": jnp.ones(2, jnp.bfloat16)})
    nnx.save_safetensors(path, state)
    whole = nnx.checkpoint_entries(path)
    assert whole["layers/0/w"] == ("array", (10, 10), "float32", "") and whole["half"].dtype == "bfloat16"
    assert whole["keys"] == ("key", (2,), "key<fry>", "")
    nnx.save_safetensors(path, state, max_shard_size=1000)
    for source in (path, tmp_path, tmp_path / "model.safetensors.index.json"):
        assert nnx.checkpoint_entries(source) == whole
    path.with_name("model.safetensors.index.json").write_text("{}")
    with pytest.raises(nnx.CheckpointError, match="index.json cannot be read"):
        nnx.checkpoint_entries(path)
    with pytest.raises(FileNotFoundError):
        nnx.checkpoint_entries(tmp_path / "nothing.safetensors")


# Other names and other dtypes


def test_renamed_paths_are_found_with_their_keys_and_aliases(path):
    model = nnx.Dict(old=make_tied(), key=jax.random.key(1))
    nnx.save_safetensors(path, model)
    target = nnx.Dict(new=nnx.Dict(body=make_tied()), seed=jax.random.key(0))
    state = nnx.load_safetensors(path, target, rename={"old/**": "new/body/**", "key": "seed"})
    assert (state["new/body/embed/table"].value == jnp.arange(3)).all() and state["seed"] == jax.random.key(1)
    untied = nnx.State({f"new/{name}/table": jnp.zeros(3) for name in ("embed", "out")} | {"key": jax.random.key(0)})
    loaded = nnx.load_safetensors(path, untied, rename={"old/**": "new/**"}, strict=False, report=nnx.LoadReport())
    assert (loaded["new/embed/table"] == jnp.arange(3)).all()
    with pytest.raises(ValueError, match="no path of the checkpoint matches 'odl/"):
        nnx.load_safetensors(path, target, rename={"odl/**": "new/**"})


def test_names_of_another_library_are_mapped_to_paths(path):
    safetensors.numpy.save_file({f"model.layers.{i}.w": np.full((10, 10), i, np.float32) for i in range(5)}, path)
    state = nnx.load_safetensors(path, big_state(), rename={"model.layers.*.w": "layers/*/w"})
    assert [float(state[f"layers/{i}/w"].value[0, 0]) for i in range(5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64"])
def test_64_bit_values_are_not_narrowed_unless_cast_is_asked_for(path, dtype):
    value = np.array([2**31 - 1, 3], dtype)
    nnx.save_safetensors(path, nnx.State({"w": value}))
    abstract = nnx.State({"w": jax.ShapeDtypeStruct((2,), dtype)})
    with pytest.raises(nnx.CheckpointError, match=rf"'w' is {dtype}\[2\], which JAX can hold only with jax_enable_x64"):
        nnx.load_safetensors(path, abstract)
    loaded = nnx.load_safetensors(path, abstract, cast=True)["w"]
    assert loaded.dtype.itemsize == 4 and loaded.tolist() == value.astype(loaded.dtype).tolist()
    assert nnx.load_safetensors(path, nnx.State({"w": value}))["w"].tolist() == value.tolist()  # NumPy has them
    with jax.enable_x64(True):
        wide = nnx.load_safetensors(path, abstract)["w"]
        assert wide.dtype == dtype and wide.tolist() == value.tolist()


UNKNOWN = {
    "timedelta64": (np.zeros(2, "m8[s]"), "Leave it out"),
    "datetime64": (np.zeros(2, "M8[s]"), "Leave it out"),
    "float128": (np.zeros(2, np.longdouble), "e.g. to float32"),
    "complex256": (np.zeros(2, np.clongdouble), "e.g. to complex64"),
    "complex128": (np.zeros(2, np.complex128), "e.g. to complex64"),
    ">f4": (np.zeros(2, ">f4"), r"x.astype\('float32'\)"),
    "<U3": (np.array(["abc"]), "Leave it out"),
    "object": (np.array([None]), "Leave it out"),
    "int4": (jnp.ones(2, jnp.int4), "e.g. to int8"),
}


@pytest.mark.parametrize("dtype", UNKNOWN)
def test_dtypes_the_format_does_not_have_are_refused_with_the_path(path, dtype):
    value, advice = UNKNOWN[dtype]
    with pytest.raises(ValueError, match=rf"Cannot save 'a/w' as safetensors: the format has no .*{advice}"):
        nnx.save_safetensors(path, nnx.State({"a/w": value}))
    assert not path.exists()


def test_names_the_format_cannot_express_are_refused(path):
    for state, text in (
        (nnx.State({"__metadata__": np.zeros(1)}), "reserves that name for its metadata"),
        (nnx.State({"a\ud800": np.zeros(1)}), "a path must be text that UTF-8 can encode"),
        (nnx.State({"a": nnx.Param("text")}), "Cannot save 'a' as safetensors: 'text' is not an array or a number"),
    ):
        with pytest.raises(ValueError, match=text):
            nnx.save_safetensors(path, state)
    for metadata in ({"a": 1}, {1: "a"}, {"a": "\ud800"}):
        with pytest.raises(ValueError, match="the metadata must be text"):
            nnx.save_safetensors(path, nnx.State({"w": np.zeros(1)}), metadata=metadata)
    assert not path.exists()


def test_python_numbers_of_any_width_come_back_as_numbers(path):
    numbers = {"big": 2**40, "small": 3, "half": 0.5, "flag": True, "phase": 1j}
    nnx.save_safetensors(path, nnx.State({name: nnx.var("c", value) for name, value in numbers.items()}))
    zeros = {name: nnx.var("c", type(value)(0)) for name, value in numbers.items()}
    loaded = nnx.load_safetensors(path, nnx.State(zeros))
    assert {name: loaded[name].value for name in loaded} == numbers
    assert all(type(loaded[name].value) is type(value) for name, value in numbers.items())
    with pytest.raises(nnx.CheckpointError, match=r"'half' is float32\[\] in the checkpoint and the number 0 in"):
        nnx.load_safetensors(path, nnx.State({**zeros, "half": nnx.var("c", 0)}))
    with pytest.raises(ValueError, match="Cannot save 'n' as safetensors: the format has no object"):
        nnx.save_safetensors(path, nnx.State({"n": nnx.var("c", 2**80)}))


# Memory


def test_arrays_larger_than_a_chunk_are_read_whole_and_in_parts(path, monkeypatch):
    monkeypatch.setattr("nnx.storage.safetensors.file.CHUNK", 64)
    array = np.arange(600, dtype=np.float32).reshape(30, 20)
    nnx.save_safetensors(path, nnx.State({"w": array, "v": array[:1], "tiny": array[:0]}))
    monkeypatch.undo()  # the size of the chunks is in the file
    state = nnx.State({"w": array, "v": array[:1], "tiny": array[:0]})
    assert nnx.load_safetensors(path, state) == state
    with safetensors_file.TensorFile(path) as file:
        for start, stop in ((0, 30), (0, 0), (7, 8), (3, 29), (29, 30)):
            for verify in (True, False):
                assert (file.read("w", start, stop, verify=verify) == array[start:stop]).all()
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(array[20].tobytes())] ^= 1
    path.write_bytes(damaged)
    with safetensors_file.TensorFile(path) as file:
        assert (file.read("w", 0, 15) == array[:15]).all()  # only what is read is verified
        with pytest.raises(nnx.CheckpointError, match="the bytes of 'w' do not match their checksum"):
            file.read("w", 15, 25)


PEAK_PROGRAM = """
import gc, json, sys, numpy as np, jax, jax.numpy as jnp, nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def resident(which):
    with open("/proc/self/status") as file:
        return 1024 * int(next(line for line in file if line.startswith(which)).split()[1])

shape, mesh, peaks = (512, 4096), Mesh(np.array(jax.devices()), ("x",)), {}
leaves = {
    "numpy": np.empty(shape, np.float32),
    "jax": jax.ShapeDtypeStruct(shape, jnp.float32),
    "rows": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("x"))),
    "columns": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(None, "x"))),
}
for kind, leaf in leaves.items():
    target = nnx.State({f"w{i}": leaf for i in range(10)})
    for attempt in range(2):  # the first one loads libraries as well
        state = None
        gc.collect()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forget the peak so far
        before = resident("VmRSS")
        state = jax.block_until_ready(nnx.load_safetensors(sys.argv[1], target))
        peaks[kind] = (resident("VmHWM") - before) / (40 * 512 * 4096)
    assert all((np.asarray(state[f"w{i}"]) == i).all() for i in range(10))
print(json.dumps(peaks))
"""


def test_loading_peaks_at_the_model_plus_one_array(path):
    nnx.save_safetensors(path, nnx.State({f"w{i}": np.full((512, 4096), i, np.float32) for i in range(10)}))
    command = [sys.executable, "-c", PEAK_PROGRAM, str(path)]
    run = subprocess.run(command, env=environment(devices=4), capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    peaks = json.loads(run.stdout)
    assert len(peaks) == 4 and max(peaks.values()) < 1.15, peaks  # one array is 0.1 models
