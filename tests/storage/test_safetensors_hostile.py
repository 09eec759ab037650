"""Files from strangers: safetensors headers and indices that lie, and nothing but a CheckpointError."""

import json
import os
import random
import struct
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

import nnx
from nnx.storage.safetensors.header import DTYPES, make_header, parse_header

W = '"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


def one(dtype='"F32"', shape="[1]", offsets="[0,4]"):
    """A header with one tensor, of a field that is wrong."""
    return f'{{"w":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}'


def pack(header: bytes | str, data: bytes = b"\0" * 4, length: int | None = None) -> bytes:
    header = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(header) if length is None else length) + header + data


DEEP = "[" * 50_000

MALFORMED = {
    "no object": "[1]",
    "no JSON": '{"w":',
    "text after it": f"{{{W}}}x",
    "a NUL after it": f"{{{W}}}\0",
    "a byte order mark": b"\xef\xbb\xbf{" + W.encode() + b"}",
    "UTF-16": f"{{{W}}}".encode("utf-16"),
    "no UTF-8": b'{"\xff' + W.encode()[2:] + b"}",
    "half of a surrogate pair": r'{"\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "a name twice": f"{{{W},{W}}}",
    "a field twice": '{"w":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "a field missing": '{"w":{"shape":[1],"data_offsets":[0,4]}}',
    "a field too many": '{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":1}}',
    "an entry that is a list": '{"w":["F32",[1],[0,4]]}',
    "an unknown dtype": one(dtype='"F99"'),
    "a dtype that is a number": one(dtype="3"),
    "a dtype that is a list": one(dtype="[]"),
    "a shape with a float": one(shape="[1.0]"),
    "a shape with a power": one(shape="[1e0]"),
    "a shape with true": one(shape="[true]"),
    "a shape with NaN": one(shape="[NaN]"),
    "a shape with null": one(shape="[null]"),
    "a shape with text": one(shape='["1"]'),
    "a shape that is a number": one(shape="1"),
    "a negative shape": one(shape="[-1]"),
    "two negative sizes": one(shape="[-1,-1]"),
    "minus zero": one(offsets="[-0,4]"),
    "negative offsets": one(offsets="[-4,0]"),
    "offsets that run backwards": one(offsets="[4,0]"),
    "three offsets": one(offsets="[0,4,4]"),
    "one offset": one(offsets="[0]"),
    "a huge offset": one(offsets="[0," + "9" * 40 + "]"),
    "a number of 10,000 digits": one(shape="[" + "9" * 10_000 + "]"),
    "a product beyond 64 bits": one(shape="[4294967296,4294967296,1]"),
    "no elements but huge": one(shape="[0,9223372036854775807,9]", offsets="[0,0]"),
    "a hundred dimensions": one(shape="[" + ",".join("1" * 100) + "]"),
    "a shape for more bytes": one(shape="[2]"),
    "a hole": f'{{"a":{{"dtype":"F32","shape":[0],"data_offsets":[2,2]}},{W}}}',
    "an overlap": f"{{{W},{W.replace('w', 'v', 1)}}}",
    "data at the end that are nobody's": "{}",
    "metadata that are a list": f'{{"__metadata__":[],{W}}}',
    "metadata with a number": f'{{"__metadata__":{{"a":1}},{W}}}',
    "metadata with an object": f'{{"__metadata__":{{"a":{{}}}},{W}}}',
    "metadata that are a tensor": '{"__metadata__":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "deep nesting": "{" + '"a":{' * 50_000 + "}" * 50_001,
    "deep lists": one(shape="[" * 50_000 + "]" * 50_000),
    "CRCs that are no numbers": f'{{"__metadata__":{{"nnx.crc32":"16:xx"}},{W}}}',
    "too many CRCs": f'{{"__metadata__":{{"nnx.crc32":"4:0000000000000000"}},{W}}}',
    "checksums that are no numbers": f'{{"__metadata__":{{"nnx.checksums":"16:xx"}},{W}}}',
    "too few checksums": f'{{"__metadata__":{{"nnx.checksums":"2:00000000"}},{W}}}',
    "chunks of no size": f'{{"__metadata__":{{"nnx.checksums":"0:00000000"}},{W}}}',
    "notes that are no JSON": f'{{"__metadata__":{{"nnx.keys":"{{"}},{W}}}',
    "notes that are a list": f'{{"__metadata__":{{"nnx.aliases":"[1]"}},{W}}}',
    "deep notes": f'{{"__metadata__":{{"nnx.aliases":"{DEEP}"}},{W}}}',
    "keys of an unknown kind": f'{{"__metadata__":{{"nnx.keys":"{{\\"w\\":\\"enigma\\"}}"}},{W}}}',
    "keys that are floats": f'{{"__metadata__":{{"nnx.keys":"{{\\"w\\":\\"fry\\"}}"}},{W}}}',
}


@pytest.mark.parametrize("header", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_header_is_refused_by_name(tmp_path, header):
    path = tmp_path / "stranger.safetensors"
    path.write_bytes(pack(header))
    for arguments in ((), (nnx.State({"w": np.zeros(1, np.float32)}),)):
        with pytest.raises(nnx.CheckpointError, match="stranger.safetensors is not a valid safetensors file"):
            nnx.load_safetensors(path, *arguments)


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**63, 2**64 - 1, 100_000_001])
def test_wrong_header_size_is_refused(tmp_path, length):
    path = tmp_path / "stranger.safetensors"
    path.write_bytes(pack(f"{{{W}}}", length=length))
    with pytest.raises(nnx.CheckpointError, match="stranger.safetensors is not a valid safetensors file"):
        nnx.load_safetensors(path)


def test_headers_that_look_odd_but_are_valid_are_read(tmp_path):
    path = tmp_path / "model.safetensors"
    for header in (f"{{{W}}}  \n", f'{{"__metadata__":null,{W}}}', f'{{{W},"__metadata__":{{}}}}', f"{{\n{W}\t}}"):
        path.write_bytes(pack(header))
        assert nnx.load_safetensors(path)["w"].tolist() == [0.0]
    path.write_bytes(pack("{}", b""))
    assert nnx.load_safetensors(path) == {}


def mutate(header: bytes, draw: random.Random) -> bytes:
    """A header with one to three changes: of a byte, a token or a piece."""
    tokens = [b"0", b"1", b"-", b"4", b"e1", b".0", b"null", b"true", b"[", b"]", b"{", b"}", b",", b":", b'"', b"\\u"]
    tokens += [b"99999999999999999999", b'"F32"', b'"I64"', b'"BF16"', b'"F4"', b"__metadata__", b'"a"', b" ", b"\xff"]
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(header))
        end = min(len(header), at + draw.choice((0, 1, 1, 2, 5)))
        new = draw.choice((bytes([draw.randrange(256)]), draw.choice(tokens), b"", header[at : at + 30]))
        header = header[:at] + new + header[end:]
    return header


def as_arrays(tensors: list, header) -> dict[str, np.ndarray] | None:
    """What the reference package found, as arrays; None where it has a dtype we do not have."""
    if any(found["dtype"] not in DTYPES for _, found in tensors):
        return None
    return {
        name: np.frombuffer(found["data"], jnp.dtype(DTYPES[found["dtype"]])).reshape(found["shape"])
        for name, found in tensors
    }


def test_ten_thousand_mutated_headers_load_as_the_reference_package_loads_them_or_not_at_all():
    draw = random.Random(0)
    shapes = {"a/w": ((2, 3), "float32"), "b": ((4,), "bfloat16"), "c": ((), "int8"), "d": ((0, 5), "int64")}
    tensors = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, (shape, dtype) in shapes.items()}
    original, placed = make_header(tensors, {"format": "np"})
    data = bytes(range(max(tensor.end for tensor in placed.values())))
    accepted = 0
    for _ in range(10_000):
        header = mutate(original, draw)
        try:
            ours = parse_header(Path("stranger.safetensors"), header, len(data)).tensors
        except nnx.CheckpointError as error:
            assert "stranger.safetensors is not a valid" in str(error)
            continue
        accepted += 1
        theirs = as_arrays(safetensors.deserialize(pack(header, data)), header)
        assert theirs is not None and theirs.keys() == ours.keys()
        for name, tensor in ours.items():
            mine = np.frombuffer(data[tensor.start : tensor.end], tensor.dtype).reshape(tensor.shape)
            assert mine.dtype == theirs[name].dtype and mine.shape == theirs[name].shape
            assert mine.tobytes() == theirs[name].tobytes()
    assert 100 < accepted < 5000  # renamed tensors and the like: the mutations are not all hopeless


def test_reference_package_reads_our_files(tmp_path):
    draw = np.random.default_rng(0)
    state = nnx.State(
        {f"t/{i}/{name}": draw.integers(0, 2, (i, 3)).astype(name) for i in range(3) for name in DTYPES.values()}
    )
    nnx.save_safetensors(tmp_path / "model.safetensors", state, metadata={"quote": '"\\\n\0é😀'})
    found = dict(safetensors.deserialize((tmp_path / "model.safetensors").read_bytes()))
    assert found.keys() == set(state)
    for name, value in state.items():
        assert tuple(found[name]["shape"]) == value.shape and bytes(found[name]["data"]) == value.tobytes()
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as file:
        assert file.metadata()["quote"] == '"\\\n\0é😀'


# The index


@pytest.fixture
def index(tmp_path):
    """The index of a sharded model in its own directory, next to another file that belongs to somebody else."""
    nnx.save_safetensors(tmp_path / "secret.safetensors", nnx.State({"a": np.zeros(8), "b": np.ones(8)}))
    state = nnx.State({"a": np.zeros(8), "b": np.ones(8)})
    nnx.save_safetensors(tmp_path / "model" / "model.safetensors", state, max_shard_size=64)
    return tmp_path / "model" / "model.safetensors.index.json"


def test_shards_outside_of_the_directory_are_not_read(index):
    outside = index.parent.parent / "secret.safetensors"
    (index.parent / "link.safetensors").symlink_to(outside)
    (index.parent / "folder").symlink_to(index.parent.parent)
    names = ["../secret.safetensors", str(outside), "link.safetensors", "folder/secret.safetensors", "", ".", ".."]
    for name in (*names, "a\0b", "..\\secret.safetensors", "./../secret.safetensors", "model/"):
        index.write_text(json.dumps({"weight_map": {"a": name, "b": name}}))
        with pytest.raises(nnx.CheckpointError, match="index.json names the file .*, which is not a file in its dir"):
            nnx.load_safetensors(index)


def test_a_cache_of_links_to_another_directory_is_read_where_the_index_is_a_link_too(index):
    cache = index.parent.parent / "snapshot"
    cache.mkdir()
    for file in index.parent.iterdir():
        (cache / file.name).symlink_to(os.path.relpath(file, cache))
    assert nnx.load_safetensors(cache)["b"].tolist() == [1.0] * 8


MALFORMED_INDICES = ["", "[]", "3", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000]
MALFORMED_INDICES += ['{"weight_map": {}, "metadata": 3}', '{"weight_map": {"a": null}}', "\ufeff{}"]


@pytest.mark.parametrize("text", MALFORMED_INDICES, ids=lambda text: text[:20])
def test_a_malformed_index_is_refused_by_name(index, text):
    index.write_text(text)
    with pytest.raises(nnx.CheckpointError, match="The index .*index.json cannot be read"):
        nnx.load_safetensors(index)


def test_index_that_is_not_text_or_contradicts_its_shards_is_refused(index):
    fields = json.loads(index.read_text())
    first, second = fields["weight_map"].values()
    index.write_bytes(b"\xff\xfe{}")
    with pytest.raises(nnx.CheckpointError, match="cannot be read: UnicodeDecodeError"):
        nnx.load_safetensors(index)
    index.write_text(json.dumps({**fields, "weight_map": {"a": first, "b": first}}))
    with pytest.raises(nnx.CheckpointError, match="says that 'b' is in .*, but it is not"):
        nnx.load_safetensors(index)
    index.write_text(json.dumps({**fields, "weight_map": {"a": first}}))
    assert list(nnx.load_safetensors(index)) == ["a"]
    index.write_text(json.dumps({**fields, "weight_map": {"x": first}}))
    with pytest.raises(nnx.CheckpointError, match="does not list 'a', which is in"):
        nnx.load_safetensors(index)
    index.write_text(json.dumps({**fields, "weight_map": {"a": "missing.safetensors"}}))
    with pytest.raises(nnx.CheckpointError, match="names the file 'missing.safetensors', which is missing"):
        nnx.load_safetensors(index)
    index.write_text(json.dumps({**fields, "weight_map": {"a": first, "b": second}}))
    (index.parent / second).unlink()
    (index.parent / second).mkdir()
    with pytest.raises(nnx.CheckpointError, match="which is missing"):
        nnx.load_safetensors(index)


def test_a_file_that_cannot_be_opened_is_named(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    nnx.save_safetensors(path, nnx.State({"a": np.zeros(8)}))

    def denied(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)
    with pytest.raises(nnx.CheckpointError, match="model.safetensors cannot be read: PermissionError"):
        nnx.load_safetensors(path)


# Bytes that changed


def test_a_flipped_bit_is_noticed_in_every_tensor(tmp_path):
    path = tmp_path / "model.safetensors"
    state = nnx.State({f"w{i}": jnp.arange(16.0) + i for i in range(4)})
    nnx.save_safetensors(path, state)
    whole = path.read_bytes()
    begin = len(whole) - 256
    for at in range(begin, len(whole), 37):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        name = f"w{(at - begin) // 64}"
        with pytest.raises(nnx.CheckpointError, match=f"the bytes of '{name}' do not match their checksum"):
            nnx.load_safetensors(path, state)
        assert nnx.load_safetensors(path, state, verify=False) != state


@pytest.mark.parametrize("seed", range(20))
def test_flips_of_top_bits_at_the_corners_of_a_rectangle_are_noticed(seed, tmp_path):
    path, draw = tmp_path / "model.safetensors", random.Random(seed)
    state = nnx.State({"w": np.random.default_rng(seed).integers(0, 256, (64, 4096), np.uint8)})
    nnx.save_safetensors(path, state)
    damaged = bytearray(path.read_bytes())
    begin = len(damaged) - 64 * 4096
    rows, words = draw.sample(range(64), 2), draw.sample(range(512), 2)
    for row in rows:
        for word in words:
            damaged[begin + 4096 * row + 8 * word + 7] ^= 128
    path.write_bytes(damaged)
    with pytest.raises(nnx.CheckpointError, match="the bytes of 'w' do not match their checksum"):
        nnx.load_safetensors(path, state)


def test_files_of_version_0_2_are_read_and_verified(tmp_path):
    whole = (Path(__file__).parent / "safetensors_0_2.safetensors").read_bytes()
    assert b"nnx.checksums" in whole and b"nnx.crc32" not in whole
    state = nnx.State({"w": np.arange(3000, dtype=np.float32), "b": np.zeros(3, np.int8)})
    path = tmp_path / "old.safetensors"
    path.write_bytes(whole)
    assert nnx.load_safetensors(path, state) == state
    for at in (len(whole) - 1, len(whole) - 5000):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(nnx.CheckpointError, match="do not match their checksum"):
            nnx.load_safetensors(path, state)


def test_a_header_of_150_000_entries_takes_a_second(tmp_path):
    entries = ",".join(f'"w{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(150_000))
    path = tmp_path / "model.safetensors"
    path.write_bytes(pack(f"{{{entries}}}", b""))
    begin = time.process_time()
    assert len(nnx.load_safetensors(path)) == 150_000
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "weights.pkl"])
def test_pickles_are_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x04K\x01.")
    for path, error in ((tmp_path / name, nnx.CheckpointError), (tmp_path, FileNotFoundError)):
        with pytest.raises(error, match=f"weights as pickles .{name}.. A pickle can run code"):
            nnx.load_safetensors(path)
    state = nnx.State({"w": np.ones(1)})
    nnx.save_safetensors(tmp_path / name, state)  # an unusual name, and no pickle
    assert nnx.load_safetensors(tmp_path / name, state) == state
