"""What fits where is decided by one set of rules: every rule, over every way to load."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from nnx.storage.safetensors.file import TensorFile
from tests.models.published import golden_directory

KEY, OTHER_KEY = jax.random.key(0), jax.random.key(0, impl="rbg")

# What is loaded, the place it is loaded into, and whether it fits as it is and with cast=True.
RULES = {
    "the same": (np.ones(3, np.float32), jnp.zeros(3), True, True),
    "another shape": (np.ones(4, np.float32), jnp.zeros(3), False, False),
    "another number of axes": (np.ones((3, 1), np.float32), jnp.zeros(3), False, False),
    "no axes": (np.ones((), np.float32), jnp.zeros(1), False, False),
    "no elements": (np.ones((0, 3), np.float32), jnp.zeros((0, 3)), True, True),
    "no elements of another shape": (np.ones((0, 3), np.float32), jnp.zeros((3, 0)), False, False),
    "a narrower float": (np.ones(3, np.float16), jnp.zeros(3), False, True),
    "a wider float": (np.ones(3, np.float32), jnp.zeros(3, jnp.bfloat16), False, True),
    "an integer for a float": (np.ones(3, np.int32), jnp.zeros(3), False, True),
    "a float for an integer": (np.ones(3, np.float32), jnp.zeros(3, np.int32), False, True),
    "a boolean for an integer": (np.ones(3, bool), jnp.zeros(3, np.int32), False, True),
    "complex for a float": (np.ones(3, np.complex64), jnp.zeros(3), False, False),
    "complex for an integer": (np.ones(3, np.complex64), jnp.zeros(3, np.int32), False, False),
    "a float for complex": (np.ones(3, np.float32), jnp.zeros(3, np.complex64), False, True),
    "64 bits for 32": (np.ones(3), jnp.zeros(3), False, True),
    "64 bits where JAX has 32": (np.ones(3), jax.ShapeDtypeStruct((3,), np.float64), False, True),
    "64 bits on the host": (np.ones(3), np.zeros(3), True, True),
    "a key": (KEY, jax.random.key(1), True, True),
    "data of a key": (np.zeros(2, np.uint32), KEY, False, False),
    "a key for its data": (KEY, np.zeros(2, np.uint32), False, False),
    "another kind of key": (OTHER_KEY, KEY, False, False),
    "a number": (2, 1, True, True),
    "a float for an int": (2.5, 1, False, True),
    "complex for a number": (1j, 1.0, False, False),
    "a number for an array": (2, jnp.zeros((), np.int32), True, True),
    "a number for a longer array": (2, jnp.zeros(3, np.int32), False, False),
    "a number too large for its place": (300, jnp.zeros((), np.int8), False, False),
}


def from_checkpoint(path, value, place, cast):
    nnx.save(path, {"w": value})
    return nnx.load(path, {"w": place}, cast=cast)["w"]


def from_safetensors(path, value, place, cast):
    file = path.with_suffix(".safetensors")
    nnx.save_safetensors(file, nnx.State({"w": value}))
    return nnx.load_safetensors(file, nnx.State({"w": place}), cast=cast)["w"]


def from_mapping(path, value, place, cast):
    model = nnx.Dict(w=nnx.Variable(place))
    model.load_state({"w": value}, cast=cast)
    return model.w


WAYS = {"checkpoint": from_checkpoint, "safetensors": from_safetensors, "mapping": from_mapping}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_load_has_the_same_rules(way, rule, tmp_path):
    value, place, as_it_is, converted = RULES[rule]
    for cast, fits in ((False, as_it_is), (True, converted)):
        if way == "safetensors" and rule == "a number too large for its place":
            continue  # such files have no Python numbers: this one is an int32 array, of another dtype
        if not fits:
            with pytest.raises(ValueError, match="'w'"):
                WAYS[way](tmp_path / f"{cast}", value, place, cast)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns that it has no 64 bits
            loaded = WAYS[way](tmp_path / f"{cast}", value, place, cast)
        if isinstance(place, int):
            assert type(loaded) is int and loaded == int(value)
        elif rule == "a key":
            assert (jax.random.key_data(loaded) == jax.random.key_data(value)).all()
        else:
            assert loaded.dtype == jax.dtypes.canonicalize_dtype(place.dtype) or isinstance(place, np.ndarray)
            np.testing.assert_array_equal(np.asarray(loaded), np.asarray(value))


# State dicts and published models come from elsewhere: their floats may have any width, and nothing else may differ.
PUBLISHED = {
    "float64": True,
    "float32": True,
    "bfloat16": True,
    "float8_e4m3fn": False,  # without the scales it comes with
    "int32": False,
    "bool": False,
    "complex64": False,
}


@pytest.mark.parametrize("dtype", PUBLISHED)
def test_weights_from_elsewhere_are_floats_of_any_width(dtype, tmp_path):
    model = nnx.Linear(3, 2, use_bias=False, ctx=nnx.context(0))
    golden = golden_directory("llama")
    arrays = {name: np.array(array) for name, array in nnx.load_safetensors(golden / "model.safetensors").items()}
    name = "model.layers.1.mlp.up_proj.weight"
    arrays[name] = arrays[name].astype(dtype)
    (tmp_path / "config.json").write_text((golden / "config.json").read_text())
    nnx.save_safetensors(tmp_path / "model.safetensors", nnx.State(arrays))
    with TensorFile(tmp_path / "model.safetensors") as file:
        assert str(file.tensors[name].dtype) == dtype
    weight = np.ones((2, 3)).astype(dtype)
    if PUBLISHED[dtype]:
        nnx.load_torch_state_dict(model, {"weight": weight})
        assert model.kernel.dtype == jnp.float32 and (model.kernel == 1).all()
        loaded = nnx.models.from_pretrained(tmp_path)
        np.testing.assert_array_equal(loaded.layers[1].mlp.up.kernel, arrays[name].T.astype(np.float32))
        return
    with pytest.raises(ValueError, match=f"'kernel' is {dtype}.*float32"):
        nnx.load_torch_state_dict(model, {"weight": weight})
    with pytest.raises(nnx.CheckpointError, match=f"{name} is {dtype}"):
        nnx.models.from_pretrained(tmp_path)


def test_shapes_of_weights_from_elsewhere_agree_exactly(tmp_path):
    model = nnx.Linear(3, 2, use_bias=False, ctx=nnx.context(0))
    with pytest.raises(ValueError, match=r"float32\[3, 2\] .*float32\[2, 3\], in the layout of PyTorch"):
        nnx.load_torch_state_dict(model, {"weight": np.ones((3, 2), np.float32)})
    fields = json.loads((golden_directory("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "vocab_size": 95}))
    (tmp_path / "model.safetensors").write_bytes((golden_directory("llama") / "model.safetensors").read_bytes())
    with pytest.raises(nnx.CheckpointError, match=r"embed_tokens.weight is \[96, 32\], expected \[95, 32\]"):
        nnx.models.from_pretrained(tmp_path)
