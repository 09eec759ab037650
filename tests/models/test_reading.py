"""Reading parameters: any part of any layout, streamed or not, equals the rearranged tensor."""

import itertools
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import nnx
from nnx.models.files import reading
from nnx.models.files.layouts import (
    CONV1D,
    CONV1D_FROM_HEADS,
    FLAT,
    FLAT_IN_GROUPS,
    FROM_HEADS,
    IN_GROUPS,
    IN_TURNS,
    KERNEL_2D,
    LINEAR,
    SAME,
    TensorLayout,
)
from nnx.models.files.reading import Reader, ReadRequest, Region
from nnx.models.files.sending import Sender, is_sent, placed
from nnx.storage.placing import Box
from nnx.storage.safetensors import file as safetensors_file
from nnx.storage.safetensors.file import TensorFile
from tests.models.published import sending_to_cpus

# The layout, the shape of the parameter, and where a fused one begins.
CASES = {
    "same": (SAME, (6, 5), 0),
    "flat": (FLAT, (3, 4), 0),
    "flat, fused": (FLAT, (3, 4), 7),
    "linear": (LINEAR, (6, 5), 0),
    "linear to heads, fused": (LINEAR, (6, 4, 3), 5),
    "linear from heads": (FROM_HEADS, (4, 3, 6), 0),
    "conv1d to heads, fused": (CONV1D, (6, 4, 3), 5),
    "conv1d from heads": (CONV1D_FROM_HEADS, (4, 3, 6), 0),
    "kernel": (KERNEL_2D, (3, 2, 4, 5), 0),
    "leading axes": (TensorLayout(leading=2), (4, 3), 0),
    "scalar": (SAME, (), 0),
}


def within(*bounds):
    """The box with these ranges."""
    return Box(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))


def parts_of(shape):
    """Some ranges of each axis: all of it, and two places."""
    return itertools.product(*([(0, n), (0, n // 2), (n // 2, n)] for n in shape))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("case", CASES)
def test_every_part_of_every_layout_is_found(case, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_TILE", (2, 3))  # so that a small matrix has several tiles, the last ones incomplete
    monkeypatch.setattr(safetensors_file, "CHUNK", 16)
    layout, shape, offset = CASES[case]
    random = np.random.default_rng(0)
    parameter = random.standard_normal(shape).astype(jnp.bfloat16)
    tensor = layout.to_tensor(parameter)
    assert tensor.shape == layout.tensor_shape(shape)
    if offset:
        around = [(offset, 3) if axis == layout.output_axis else (0, 0) for axis in range(tensor.ndim)]
        tensor = np.pad(tensor, around)
    nnx.save_safetensors(tmp_path / "x.safetensors", nnx.State({"w": tensor}))
    with TensorFile(tmp_path / "x.safetensors") as file, Reader() as reader:
        region = Region(file, "w", layout, shape, offset)
        for bounds in parts_of(shape):
            expected = parameter[tuple(slice(*bound) for bound in bounds)].astype(dtype)
            part = reader.read([region], within(*bounds), dtype, stack=())
            assert part.dtype == dtype
            np.testing.assert_array_equal(part, expected)
            stacked = reader.read([region, region, region], within((1, 3), *bounds), dtype, stack=(3,))
            np.testing.assert_array_equal(stacked, np.stack([expected, expected]))


@pytest.mark.parametrize("shape", [(3, 4), (3, 5, 4)])
def test_interleaved_parameters_are_separated(shape, tmp_path):
    parameters = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    tensor = np.asarray(IN_TURNS.joined(jnp.asarray(parameters)))
    assert tensor.shape == (*shape[:-1], 2 * shape[-1])
    np.testing.assert_array_equal(tensor[..., 1], parameters[1, ..., 0])
    nnx.save_safetensors(tmp_path / "x.safetensors", nnx.State({"w": tensor}))
    with TensorFile(tmp_path / "x.safetensors") as file, Reader() as reader:
        for number, bounds in itertools.product(range(2), parts_of(shape)):
            part = reader.read([Region(file, "w", IN_TURNS, shape, number)], within(*bounds), np.float32, stack=())
            np.testing.assert_array_equal(part, parameters[number][tuple(slice(*bound) for bound in bounds)])


@pytest.mark.parametrize("layout", [IN_GROUPS, FLAT_IN_GROUPS])
def test_heads_that_take_turns_by_groups_are_separated(layout, tmp_path):
    inputs = (5,) * (layout.inputs or 0)
    shapes = [(*inputs, heads, width) for heads, width in ((6, 3), (2, 3), (2, 4))]  # two groups of 3 + 1 + 1 heads
    parameters = [np.random.default_rng(n).standard_normal(shape).astype(np.float32) for n, shape in enumerate(shapes)]
    tensor = np.asarray(layout.joined([layout.to_tensor(parameter) for parameter in parameters], shapes))
    np.testing.assert_array_equal(tensor[9:12], np.moveaxis(parameters[1], -2, 0)[0].T.reshape(3, *inputs))
    nnx.save_safetensors(tmp_path / "x.safetensors", nnx.State({"w": tensor}))
    with TensorFile(tmp_path / "x.safetensors") as file, Reader() as reader:
        for parameter, offset in zip(parameters, (0, 9, 12), strict=True):
            region = Region(file, "w", layout, parameter.shape, offset, groups=2, stride=16)
            for bounds in parts_of(parameter.shape):
                part = reader.read([region], within(*bounds), np.float32, stack=())
                np.testing.assert_array_equal(part, parameter[tuple(slice(*bound) for bound in bounds)])


def test_pieces_of_layers_and_experts_are_read_in_order(tmp_path):
    tensors = np.random.default_rng(0).standard_normal((2, 3, 5, 4)).astype(np.float32)  # layers, experts, out, in
    names = {f"{layer}.{expert}": tensors[layer, expert] for layer in range(2) for expert in range(3)}
    nnx.save_safetensors(tmp_path / "x.safetensors", nnx.State(names))
    with TensorFile(tmp_path / "x.safetensors") as file, Reader() as reader:
        regions = [Region(file, name, LINEAR, (4, 5), 0) for name in names]
        part = reader.read(regions, within((1, 2), (1, 3), (0, 4), (2, 5)), np.float32, stack=(2, 3))
    np.testing.assert_array_equal(part, tensors[1:, 1:, 2:].swapaxes(-1, -2))


@pytest.mark.parametrize("checksums", [False, True])
def test_matrices_larger_than_a_tile_are_transposed(checksums, tmp_path):
    weight = np.random.default_rng(0).standard_normal((700, 2100), np.float32)
    if checksums:
        nnx.save_safetensors(tmp_path / "x.safetensors", nnx.State({"w": weight}))
    else:
        safetensors.numpy.save_file({"w": weight}, tmp_path / "x.safetensors")
    with TensorFile(tmp_path / "x.safetensors") as file, Reader() as reader:
        assert file.has_checksums is checksums
        region = Region(file, "w", LINEAR, (2100, 700), 0)
        for first, last in ((0, 2100), (0, 30), (1000, 2100)):
            part = reader.read([region], within((first, last), (0, 700)), np.float32, ())
            np.testing.assert_array_equal(part, weight.T[first:last])


def test_special_values_survive_conversion_to_float32(tmp_path):
    values = np.array([[0.0, -0.0, np.inf], [-np.inf, 1e-40, np.nan]], jnp.bfloat16)
    nnx.save_safetensors(tmp_path / "x.safetensors", nnx.State({"w": values}))
    with TensorFile(tmp_path / "x.safetensors") as file, Reader() as reader:
        part = reader.read([Region(file, "w", LINEAR, (3, 2), 0)], within((0, 3), (0, 2)), np.float32, ())
    np.testing.assert_array_equal(part, values.T.astype(np.float32))
    assert math.copysign(1.0, part[1, 0]) == -1.0


class TestSending:
    """To accelerators, which rearrange parameters themselves; the CPU has to do it here."""

    @pytest.mark.parametrize("case", CASES)
    def test_every_layout_arrives(self, case, tmp_path):
        layout, shape, offset = CASES[case]
        random = np.random.default_rng(0)
        parameters = random.standard_normal((3, *shape)).astype(np.float32)
        tensors = {}
        for number, parameter in enumerate(parameters):
            tensor = layout.to_tensor(parameter)
            around = [(offset, 3) if axis == layout.output_axis else (0, 0) for axis in range(tensor.ndim)]
            tensors[f"w{number}"] = np.pad(tensor, around) if offset else tensor
        nnx.save_safetensors(tmp_path / "x.safetensors", nnx.State(tensors))
        with TensorFile(tmp_path / "x.safetensors") as file, sending_to_cpus(piece=40):
            regions = [Region(file, name, layout, shape, offset) for name in tensors]
            one = ReadRequest(regions[1:2], jax.ShapeDtypeStruct(shape, jnp.bfloat16), ())
            stacked = ReadRequest(regions, jax.ShapeDtypeStruct((3, *shape), jnp.float32), (3,))
            assert is_sent(one) and is_sent(stacked)
            arrived = placed([one, stacked])
        np.testing.assert_array_equal(arrived[0], parameters[1].astype(jnp.bfloat16))
        np.testing.assert_array_equal(arrived[1], parameters)
        assert arrived[0].dtype == jnp.bfloat16

    def test_special_values_survive_conversion(self, tmp_path):
        values = np.array([[0.0, -0.0, np.inf], [-np.inf, 1e-40, 1e-3]], jnp.bfloat16)
        nnx.save_safetensors(tmp_path / "x.safetensors", nnx.State({"w": values}))
        with TensorFile(tmp_path / "x.safetensors") as file, sending_to_cpus():
            request = ReadRequest([Region(file, "w", LINEAR, (3, 2), 0)], jax.ShapeDtypeStruct((3, 2), jnp.float32), ())
            (array,) = placed([request])
        assert np.asarray(array).tobytes() == np.ascontiguousarray(values.T.astype(np.float32)).tobytes()

    def test_damage_is_reported_and_threads_end(self, tmp_path):
        path = tmp_path / "x.safetensors"
        nnx.save_safetensors(path, nnx.State({"w": np.ones((64, 64), np.float32)}))
        raw = bytearray(path.read_bytes())
        raw[-5] ^= 1
        path.write_bytes(raw)
        with TensorFile(path) as file, sending_to_cpus():
            request = ReadRequest(
                [Region(file, "w", LINEAR, (64, 64), 0)], jax.ShapeDtypeStruct((64, 64), jnp.float32), ()
            )
            with pytest.raises(nnx.CheckpointError, match="damaged"), Sender() as sender:
                sender.send(request)
                sender.finish()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("nnx-send")]

    def test_what_jax_would_convert_on_the_way_is_rearranged_by_the_host(self, tmp_path):
        values = np.array([1 + 2**-8 + 2**-40, 1.0]).reshape(
            1, 2
        )  # rounding it to float32 first would lose the last bit
        nnx.save_safetensors(tmp_path / "x.safetensors", nnx.State({"w": values}))
        with TensorFile(tmp_path / "x.safetensors") as file, sending_to_cpus():
            request = ReadRequest([Region(file, "w", SAME, (1, 2), 0)], jax.ShapeDtypeStruct((1, 2), jnp.bfloat16), ())
            assert not is_sent(request)
            (array,) = placed([request])
        assert array.tolist() == values.astype(jnp.bfloat16).tolist()
