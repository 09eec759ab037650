"""Checkpoints in 8-bit floats with a scale per block are read as the weights that they represent."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import nnx
from tests.models.published import golden_directory, golden_model

BLOCK = (16, 12)  # neither divides all matrices of the model


def blocks(weight):
    """The largest magnitude in each block."""
    rows, columns = (-(-size // of) for size, of in zip(weight.shape, BLOCK, strict=True))
    padded = np.zeros((rows * BLOCK[0], columns * BLOCK[1]), np.float32)
    padded[: weight.shape[0], : weight.shape[1]] = np.abs(weight)
    return padded.reshape(rows, BLOCK[0], columns, BLOCK[1]).max((1, 3))


def spread(scales, shape):
    return np.repeat(np.repeat(scales, BLOCK[0], 0), BLOCK[1], 1)[: shape[0], : shape[1]]


@pytest.fixture
def directory(tmp_path):
    """A golden with its projections as float8, in two files such that some scales are not next to their weights."""
    path = shutil.copytree(golden_directory("qwen3"), tmp_path / "fp8")
    arrays = {name: np.array(array) for name, array in nnx.load_safetensors(path / "model.safetensors").items()}
    for name in [name for name in arrays if name.endswith("_proj.weight")]:
        scales = blocks(arrays[name]) / 448
        stored = arrays[name] / spread(scales, arrays[name].shape)
        arrays |= {name: stored.astype(ml_dtypes.float8_e4m3fn), f"{name}_scale_inv": scales}
    (path / "model.safetensors").unlink()
    nnx.save_safetensors(path / "model.safetensors", nnx.State(arrays), max_shard_size="2KB")
    write_config(path, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)})
    return path


def write_config(path, quantization):
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, "quantization_config": quantization}))


def expected_kernel(path, name):
    arrays = nnx.load_safetensors(path / "model.safetensors.index.json")
    weight = np.asarray(arrays[name]).astype(np.float32)
    return (weight * spread(arrays[f"{name}_scale_inv"], weight.shape)).T


@pytest.mark.parametrize("scan_layers", [False, True], ids=["list", "scanned"])
def test_weights_are_scaled_as_they_are_read(directory, scan_layers):
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(index[name] != index[f"{name}_scale_inv"] for name in index if f"{name}_scale_inv" in index)
    model = nnx.models.from_pretrained(directory, scan_layers=scan_layers)
    model = model.unscanned()
    up = model.layers[1].mlp.up
    np.testing.assert_array_equal(up.kernel, expected_kernel(directory, "model.layers.1.mlp.up_proj.weight"))
    assert up.kernel.dtype == jnp.float32 and type(up.variable("kernel")) is nnx.Param
    tokens = jnp.array([[1, 2, 3]])
    original = golden_model("qwen3")(tokens)
    assert np.abs(model(tokens) - original).max() < 0.25 * np.abs(original).max()


def test_values_are_rounded_once_to_the_dtype_that_was_asked_for(directory):
    model = nnx.models.from_pretrained(directory, dtype=jnp.bfloat16)
    expected = expected_kernel(directory, "model.layers.0.mlp.down_proj.weight").astype(jnp.bfloat16)
    np.testing.assert_array_equal(model.layers[0].mlp.down.kernel, expected)


def test_inside_a_compiled_function_and_abstractly(directory):
    total = jax.jit(lambda: nnx.models.from_pretrained(directory).layers[1].mlp.up.kernel.sum())
    expected = expected_kernel(directory, "model.layers.1.mlp.up_proj.weight").sum()
    np.testing.assert_allclose(total(), expected, rtol=1e-4)
    abstract = nnx.models.from_pretrained(directory, abstract=True)
    assert abstract.get_state() == nnx.models.from_pretrained(golden_directory("qwen3"), abstract=True).get_state()


def test_model_saved_again_is_not_quantized(directory, tmp_path):
    model = nnx.models.from_pretrained(directory)
    nnx.models.save_pretrained(model, tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    assert nnx.models.from_pretrained(tmp_path / "again").get_state() == model.get_state()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "awq"}, r"quantized \(awq\), which cannot be read.*nnx.quantize"),
        ({"quant_method": "fp8"}, "weight_block_size=None"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"weight_block_size=\[128, 0\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, "fmt='e5m2'"),
        ("fp8", r"quantized \(.fp8.\), which cannot be read"),
    ],
)
def test_other_formats_are_refused(directory, settings, message):
    write_config(directory, settings)
    with pytest.raises(ValueError, match=message):
        nnx.models.from_pretrained(directory)


def test_scales_that_do_not_fit_are_refused_and_missing_ones_listed(directory):
    write_config(directory, {"quant_method": "fp8", "weight_block_size": [16, 16]})
    with pytest.raises(nnx.CheckpointError, match=r"_scale_inv has shape \[.*expected \[.*one number per block of"):
        nnx.models.from_pretrained(directory)
    write_config(directory, None)
    with pytest.raises(nnx.CheckpointError, match="wrong dtype: .*_proj.weight is float8_e4m3fn"):
        nnx.models.from_pretrained(directory)
