"""Checkpoints in 4-bit floats are read as exactly the numbers that they represent."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from nnx.models.files import mxfp4, reading
from nnx.models.files.layouts import IN_TURNS, SAME
from nnx.models.files.mxfp4 import packed_files, unpacked
from nnx.models.files.reading import Reader, Region
from nnx.storage.safetensors.file import TensorFile
from tests.models.published import edited, tiny_model
from tests.models.test_reading import within

NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)
GPT_OSS = {
    "model_type": "gpt_oss",
    "features": 64,
    "hidden_features": 96,
    "num_experts": 3,
    "num_selected": 2,
    "norm_epsilon": 1e-5,
    "layer_types": ("sliding", "full"),
    "sliding_window": 4,
    "swiglu_limit": 7.0,
    **dict.fromkeys(("use_sinks", "use_qkv_bias", "use_out_bias", "use_mlp_bias", "use_router_bias"), True),
}
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def random_packed(*shape, seed=0):
    """Random blocks and scales of a tensor of this shape, as they are stored."""
    experts, inputs, outputs = shape
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
    return blocks, random.integers(115, 130, blocks.shape[:-1], np.uint8)


def decoded(blocks, scales):
    """The numbers by the definition of the format, as `[experts, inputs, outputs]` in float64."""
    numbers = np.stack([NUMBERS[blocks & 15], NUMBERS[blocks >> 4]], axis=-1).reshape(*blocks.shape[:-1], 32)
    numbers = numbers * 2.0 ** (scales[..., None].astype(int) - 127)
    return numbers.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)


def rewritten(directory, change):
    arrays = nnx.load_safetensors(directory / "model.safetensors.index.json")
    arrays = {name: np.array(array) for name, array in arrays.items()}
    change(arrays)
    nnx.save_safetensors(directory / "model.safetensors", nnx.State(arrays), max_shard_size=19_000)


@pytest.fixture
def directory(tmp_path):
    """A gpt_oss whose experts are packed, in files such that some scales are not next to their blocks."""
    model = tiny_model(**GPT_OSS)
    nnx.set_dtypes(model, param_dtype=jnp.bfloat16)
    nnx.models.save_pretrained(model, tmp_path, max_shard_size="20KB")

    def pack(arrays):
        for name in [name for name in arrays if name.endswith(EXPERTS)]:
            blocks, scales = random_packed(*arrays.pop(name).shape, seed=len(name))
            arrays |= {f"{name}_blocks": blocks, f"{name}_scales": scales}

    rewritten(tmp_path, pack)
    edited(tmp_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return tmp_path


def expected_kernels(directory, layer):
    """The kernels of the experts of a layer: gates, values, and back."""
    arrays = nnx.load_safetensors(directory / "model.safetensors.index.json")
    names = (f"model.layers.{layer}.{name}" for name in EXPERTS)
    gate_up, down = (decoded(np.asarray(arrays[f"{n}_blocks"]), np.asarray(arrays[f"{n}_scales"])) for n in names)
    return {"gate": gate_up[..., ::2], "up": gate_up[..., 1::2], "down": down}


@pytest.mark.parametrize("dtype", [None, jnp.float32], ids=["as stored", "float32"])
@pytest.mark.parametrize("scan_layers", [False, True], ids=["list", "scanned"])
def test_experts_are_read_exactly(directory, scan_layers, dtype):
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    packed = [name.removesuffix("_blocks") for name in index if name.endswith("_blocks")]
    assert any(index[f"{name}_blocks"] != index[f"{name}_scales"] for name in packed)
    model = nnx.models.from_pretrained(directory, scan_layers=scan_layers, dtype=dtype).unscanned()
    for layer, block in enumerate(model.layers):
        for name, expected in expected_kernels(directory, layer).items():
            kernel = getattr(block.mlp, name)
            assert kernel.dtype == (dtype or jnp.bfloat16) and type(block.mlp.variable(name)) is nnx.Param
            np.testing.assert_array_equal(np.asarray(kernel, np.float64), expected)
    assert jnp.isfinite(model(jnp.array([[1, 2, 3]]))).all()


def test_inside_a_compiled_function_and_abstractly(directory):
    kernel = jax.jit(lambda: nnx.models.from_pretrained(directory).layers[1].mlp.down)()
    np.testing.assert_array_equal(np.asarray(kernel, np.float64), expected_kernels(directory, 1)["down"])
    abstract = nnx.models.from_pretrained(directory, abstract=True)
    assert abstract.layers[0].mlp.gate.shape == (3, 64, 96) and abstract.layers[0].mlp.gate.dtype == jnp.bfloat16


def test_model_saved_again_is_not_quantized(directory, tmp_path):
    model = nnx.models.from_pretrained(directory)
    nnx.models.save_pretrained(model, tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    assert nnx.models.from_pretrained(tmp_path / "again").get_state() == model.get_state()


@pytest.mark.parametrize("layout, offset", [(SAME, 0), (IN_TURNS, 0), (IN_TURNS, 1)])
def test_any_part_is_decoded(layout, offset, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_TILE", (4, 5))  # so that a small matrix has several tiles, the last ones incomplete
    blocks, scales = random_packed(5, 96, 22)
    nnx.save_safetensors(tmp_path / "x.safetensors", nnx.State({"w_blocks": blocks, "w_scales": scales}))
    parameter = decoded(blocks, scales)[..., offset :: layout.interleaved or 1]
    with TensorFile(tmp_path / "x.safetensors") as file, Reader() as reader:
        files = packed_files({name: file for name in file.tensors})
        assert files.keys() == {"w"} and files["w"].tensors["w"].shape == (5, 96, 22)
        region = Region(files["w"], "w", layout, parameter.shape, offset)
        for bounds in (
            ((0, 5), (0, 96), (0, parameter.shape[2])),
            ((1, 3), (7, 65), (3, 10)),
            ((4, 5), (40, 50), (0, 1)),
        ):
            part = reader.read([region], within(*bounds), np.float32, stack=())
            np.testing.assert_array_equal(part, parameter[tuple(slice(*bound) for bound in bounds)])
            stacked = reader.read([region, region], within((1, 2), *bounds), jnp.bfloat16, stack=(2,))
            np.testing.assert_array_equal(stacked[0].astype(np.float32), part)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside a compiled function"])
def test_every_byte_and_every_scale_is_exact_unless_it_leaves_the_range(inside):
    blocks = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 16, 16), (256, 1, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 16, axis=1)
    found = unpacked(blocks, scales)
    if inside:  # in a thread of XLA, where the processor turns the smallest numbers into zeros
        mxfp4._pairs.cache_clear()
        result = jax.ShapeDtypeStruct(found.shape, np.uint16)
        found = jax.jit(lambda: jax.pure_callback(lambda: unpacked(blocks, scales).view(np.uint16), result))()
        found = np.asarray(found).view(jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    expected = decoded(blocks[:, None].reshape(256, 1, 16, 16), scales.reshape(256, 1, 16)).reshape(256, 512)
    fits = np.abs(expected) < 2.0**128
    fits[255] = False
    np.testing.assert_array_equal(found.astype(np.float64)[fits], expected[fits])
    np.testing.assert_array_equal(np.signbit(found)[fits], np.signbit(expected)[fits])
    assert not fits[254].all() and not fits[253].all() and fits[:253].all()
    beyond = ~fits
    beyond[255] = False
    np.testing.assert_array_equal(found.astype(np.float64)[beyond], np.sign(expected[beyond]) * np.inf)
    assert np.isnan(found[255].astype(np.float64)).all()


@pytest.mark.parametrize(
    ("part", "array", "message"),
    [
        ("_blocks", np.zeros((3, 64, 3, 8), np.uint8), r"down_proj_blocks is uint8\[3, 64, 3, 8\], expected uint8 of"),
        ("_blocks", np.zeros((3, 64, 3, 16), np.int8), r"down_proj_blocks is int8\[3, 64, 3, 16\], expected uint8 of"),
        (
            "_scales",
            np.zeros((3, 64, 2), np.uint8),
            r"down_proj_scales is uint8\[3, 64, 2\], expected uint8\[3, 64, 3\]",
        ),
        (
            "_scales",
            np.zeros((3, 64, 3), np.int8),
            r"down_proj_scales is int8.*one scale per block of .*down_proj_blocks",
        ),
    ],
)
def test_blocks_and_scales_that_do_not_fit_are_refused(directory, part, array, message):
    rewritten(directory, lambda arrays: arrays.update({f"model.layers.0.{EXPERTS[1]}{part}": array}))
    with pytest.raises(nnx.CheckpointError, match=message):
        nnx.models.from_pretrained(directory)


def test_a_missing_part_is_listed(directory):
    rewritten(directory, lambda arrays: arrays.pop(f"model.layers.0.{EXPERTS[1]}_scales"))
    with pytest.raises(nnx.CheckpointError, match=r"missing: model.layers.0.*down_proj \[3, 96, 64\]") as error:
        nnx.models.from_pretrained(directory)
    assert "unexpected: model.layers.0.mlp.experts.down_proj_blocks" in str(error.value)
