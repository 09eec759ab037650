"""The kernels of grouped products next to the batched product: values, gradients, where they are used, and lowering."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

import nnx
from nnx.nn.moe.grouped import (
    LARGE,
    PADDING,
    PADDING_OF_LARGE,
    block_dots,
    block_size,
    choose_implementation,
    from_blocks,
    make_blocks,
    tile_size,
    to_blocks,
)
from nnx.nn.moe.grouped_kernel import block_products
from tests.nn.arrays import numpy_normal

IMPLEMENTATIONS = ["xla", "triton"]
# The kernel multiplies float32 as GPUs do by default, in TF32: all but ten bits of both operands are cut off. What that
# changes adds up over products that follow one another.
FLOAT32 = 2 * 2**-10 if jax.default_backend() == "gpu" else 1e-5
interpreted = pytest.mark.usefixtures("interpreted")


def random_groups(num_rows: int, num_groups: int) -> jax.Array:
    """Uneven groups; the second is empty, and a few rows belong to none."""
    groups = np.random.default_rng(num_rows).integers(0, num_groups + 1, num_rows)
    groups = np.where(np.arange(num_rows) < num_rows // 3, 0, groups)
    return jnp.asarray(np.where(groups == 1, num_groups, groups), jnp.int32)


def multiply(implementation, groups, x, *kernels):
    """The products of rows with the matrices of their groups, one array `[rows, outputs]` for each of the kernels."""
    blocks = make_blocks(groups, kernels[0].shape[0], implementation)
    out = block_dots(to_blocks(x, blocks, implementation), kernels, blocks, implementation=implementation)
    return tuple(from_blocks(array, blocks, implementation) for array in out)


def value_and_gradients(implementation, groups, x, *kernels):
    out, pullback = jax.vjp(functools.partial(multiply, implementation, groups), x, *kernels)
    return out, pullback(tuple(jnp.asarray(numpy_normal(*array.shape, seed=9), array.dtype) for array in out))


compiled = jax.jit(value_and_gradients, static_argnums=0)


def arrays(rows, groups, inputs, outputs, dtype=jnp.float32, param_dtype=None, kernels=1):
    shapes = [(rows, inputs)] + [(groups, inputs, outputs)] * kernels
    dtypes = [dtype] + [param_dtype or dtype] * kernels
    drawn = (jnp.asarray(numpy_normal(*shape, seed=i), d) for i, (shape, d) in enumerate(zip(shapes, dtypes)))
    return random_groups(rows, groups), *drawn


def close(out, expected, rtol: float) -> None:
    """Compares the norm of the difference, relative to that of the expected array."""

    def check(a, b):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = (np.asarray(array, np.float64) for array in (a, b))
        assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b)

    jax.tree.map(check, out, expected)


SIZES = {  # rows, groups, inputs, outputs
    "small tiles": (300, 4, 16, 32),
    "one block": (90, 1, 32, 16),
    "parts of tiles": (300, 4, 24, 40),
    "several tiles and parts": (700, 3, 200, 300),
    "whole tiles": (1600, 3, 128, 256),
}


@pytest.mark.parametrize(
    "sizes, kernels",
    [*((sizes, 2) for sizes in SIZES.values()), (SIZES["several tiles and parts"], 1)],
    ids=[*SIZES, "one kernel"],
)
@interpreted
def test_the_kernel_computes_the_batched_product_and_its_gradients(sizes, kernels):
    inputs = arrays(*sizes, kernels=kernels)
    ours, expected = (compiled(way, *inputs) for way in ("triton", "xla"))
    close(ours, expected, rtol=FLOAT32)
    rows_of_none, (x_gradient, *kernel_gradients) = inputs[0] == sizes[1], ours[1]
    assert not x_gradient[rows_of_none].any() and not any(out[rows_of_none].any() for out in ours[0])
    assert sizes[1] == 1 or not any(gradient[1].any() for gradient in kernel_gradients)  # no row is in group 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
@interpreted
def test_half_precision_is_summed_in_float32(dtype):
    groups, *inputs = arrays(700, 3, 200, 300, dtype)
    ours = compiled("triton", groups, *inputs)
    expected = compiled("xla", groups, *(array.astype(jnp.float32) for array in inputs))
    close(ours, jax.tree.map(lambda array: array.astype(dtype), expected), rtol=4e-3)


@interpreted
def test_gradients_of_wide_parameters_are_not_rounded():
    groups, x, kernel = arrays(700, 3, 64, 32, jnp.bfloat16, jnp.float32)
    out, (x_gradient, kernel_gradient) = compiled("triton", groups, x, kernel)
    assert out[0].dtype == x_gradient.dtype == jnp.bfloat16 and kernel_gradient.dtype == jnp.float32
    wide = (x.astype(jnp.float32), kernel.astype(jnp.bfloat16).astype(jnp.float32))
    cotangent = jnp.asarray(numpy_normal(*out[0].shape, seed=9), jnp.bfloat16).astype(jnp.float32)
    pull_back = jax.jit(lambda *wide: jax.vjp(functools.partial(multiply, "xla", groups), *wide)[1]((cotangent,)))
    close(kernel_gradient, pull_back(*wide)[1], rtol=1e-5)


@interpreted
def test_blocks_that_are_not_needed_are_zero():
    groups, x, kernel = arrays(300, 4, 16, 32)
    blocks = jax.jit(make_blocks, static_argnums=(1, 2))(groups, 4, "triton")
    needed = int(blocks.bounds[-1])
    assert needed < blocks.rows.shape[0]
    anything = jnp.ones((*blocks.rows.shape, 16))
    (out,) = jax.jit(block_products)(anything, (kernel,), blocks.groups, blocks.bounds)
    assert out[:needed].all() and not out[needed:].any()


@pytest.mark.parametrize("batched", [(0, 0, 0), (0, 0, None), (None, None, 0)], ids=str)
@interpreted
def test_grouped_product_can_be_mapped(batched):
    examples = [arrays(300, 4, 16, 32), [array[::-1] for array in arrays(300, 4, 16, 32)]]
    inputs = [pair[0] if axis is None else jnp.stack(pair) for pair, axis in zip(zip(*examples), batched)]
    ours, expected = (
        jax.jit(jax.vmap(functools.partial(value_and_gradients, way), batched))(*inputs) for way in IMPLEMENTATIONS
    )
    close(ours, expected, rtol=FLOAT32)


@interpreted
def test_grouped_product_can_be_recomputed_and_scanned():
    groups, x, kernel = arrays(300, 4, 16, 16)

    def loss(implementation, x, kernels):
        @jax.checkpoint
        def layer(x, kernel):
            return x + jnp.tanh(multiply(implementation, groups, x, kernel)[0]), None

        return jnp.sum(jax.lax.scan(layer, x, kernels)[0] ** 2)

    kernels = jnp.stack([kernel, -kernel])
    ours, expected = (jax.jit(jax.grad(functools.partial(loss, way), (0, 1)))(x, kernels) for way in ("triton", "xla"))
    close(ours, expected, rtol=4 * FLOAT32)  # two layers, forward and backward


# The layer


@interpreted
def test_the_layer_computes_the_same_with_the_kernel():
    x, target = (jnp.asarray(numpy_normal(200, 8, seed=seed)) for seed in (0, 1))

    def gradients(implementation):
        layer = nnx.MoE(8, 24, 4, 2, implementation=implementation, ctx=nnx.context(0))
        loss = nnx.jit(nnx.value_and_grad(lambda layer, x: jnp.mean((layer(x) - target) ** 2), argnums=(0, 1)))
        assert ("pallas_call" in str(jax.make_jaxpr(lambda x: layer(x, update_stats=False))(x))) == (
            implementation == "triton"
        )
        return loss(layer, x)

    close(*(gradients(implementation) for implementation in IMPLEMENTATIONS), rtol=4 * FLOAT32)


@interpreted
def test_scanned_layers_can_be_differentiated_with_the_kernel():
    class Block(nnx.Module):
        def __init__(self, implementation, *, ctx):
            self.moe = nnx.MoE(8, 24, 4, 2, implementation=implementation, ctx=ctx)

        def __call__(self, x, _):
            return x + self.moe(x), None

    x = jnp.asarray(numpy_normal(200, 8))

    def gradients(implementation):
        blocks = nnx.Scan(nnx.Remat(Block), variable_axes={...: 0}, split_rngs="params", length=2)
        stack: Any = blocks(implementation, ctx=nnx.context(0))
        return nnx.jit(nnx.grad(lambda stack, x: jnp.sum(stack(x, None)[0] ** 2)))(stack, x)

    close(*(gradients(implementation) for implementation in IMPLEMENTATIONS), rtol=8 * FLOAT32)


@interpreted
def test_quantized_experts_use_the_batched_product_if_asked_for_the_kernel():
    x = jnp.asarray(numpy_normal(200, 8))

    def output(implementation):
        layer = nnx.MoE(8, 24, 4, 2, implementation=implementation, ctx=nnx.context(0)).eval()
        nnx.quantize(layer)
        return layer(x)

    np.testing.assert_array_equal(output("triton"), output("xla"))


# Where it is used


def chosen(rows=512, dtype=jnp.float32, param_dtype=jnp.float32, precision=None, scales=(None,), wanted=None):
    x: Any = jax.ShapeDtypeStruct((rows, 8), dtype)
    kernels: Any = jax.ShapeDtypeStruct((4, 8, 16), param_dtype)
    return choose_implementation(x, [kernels], precision, scales, wanted)


def test_a_cpu_uses_the_batched_product():
    if jax.default_backend() != "cpu":
        pytest.skip("about CPUs")
    assert chosen() == chosen(wanted="xla") == chosen(wanted="triton", dtype=jnp.float64) == "xla"
    with pytest.raises(ValueError, match="MoE: implementation='triton' is not possible here: it needs an NVIDIA GPU"):
        chosen(wanted="triton")


def test_a_single_gpu_uses_the_kernel_where_it_can(pretend):
    pretend("gpu")
    assert chosen() == chosen(dtype=jnp.bfloat16) == chosen(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16) == "triton"
    assert chosen(rows=64) == "xla"  # decoding
    assert chosen(wanted="xla") == "xla"
    assert chosen(dtype=jnp.float64) == chosen(param_dtype=jnp.int8, scales=(jnp.ones((4, 16)),)) == "xla"


def test_more_than_the_default_precision_uses_the_batched_product(pretend):
    pretend("gpu")
    assert chosen(precision="highest") == chosen(precision=jax.lax.Precision.HIGH) == "xla"
    assert chosen(precision="default") == chosen(precision="highest", dtype=jnp.bfloat16) == "triton"
    with jax.default_matmul_precision("highest"):
        assert chosen() == "xla"
        assert chosen(precision="default") == "triton"


@pytest.mark.parametrize(
    "backend, devices, capability, expected",
    [
        ("gpu", 1, "9.0", True),
        ("gpu", 2, "9.0", False),
        ("gpu", 1, "8.9", False),
        ("cpu", 1, "9.0", False),
    ],
)
def test_kernel_needs_one_gpu_with_enough_shared_memory(pretend, backend, devices, capability, expected):
    pretend(backend, devices, capability)
    assert (chosen() == "triton") == expected


def test_manual_axes_of_a_mesh_use_the_batched_product(pretend):
    pretend("gpu")
    seen = []

    def body(x):
        seen.append(chosen())
        return x

    with use_abstract_mesh(AbstractMesh((1,), ("expert",), axis_types=(AxisType.Auto,))):
        assert chosen() == "triton"
        mapped = jax.shard_map(body, in_specs=jax.P(), out_specs=jax.P())
        jax.eval_shape(mapped, jax.ShapeDtypeStruct((2,), jnp.float32))
    assert seen == ["xla"]


@pytest.mark.parametrize("rows, groups, expected", [(4096, 8, 128), (2048, 8, 64), (512, 8, 16), (256, 8, None)])
def test_tiles_are_as_large_as_their_padding_allows(rows, groups, expected):
    assert tile_size(rows, groups) == expected


# Lowering


@pytest.mark.parametrize(
    "dtype, rows, inputs, outputs",
    [(jnp.bfloat16, 16_384, 1024, 4096), (jnp.float32, 16_384, 1024, 4096), (jnp.bfloat16, 600, 72, 40)],
    ids=["bfloat16", "float32", "parts of tiles"],
)
def test_the_kernels_are_lowered_to_triton(dtype, rows, inputs, outputs):
    h200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")

    def function(x, gate, up, groups):
        return sum(out.sum() for out in multiply("triton", groups, x, gate, up))

    shapes = jax.ShapeDtypeStruct((rows, inputs), dtype), *[jax.ShapeDtypeStruct((8, inputs, outputs), dtype)] * 2
    groups = jax.ShapeDtypeStruct((rows,), jnp.int32)
    with use_abstract_mesh(AbstractMesh((1,), ("gpu",), abstract_device=h200)):
        traced = jax.jit(jax.value_and_grad(function, (0, 1, 2))).trace(*shapes, groups)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 3


def test_a_layer_with_the_kernel_can_be_exported(tmp_path):
    h200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    layer = nnx.MoE(32, 16, 4, 2, update_stats=False, implementation="triton", ctx=nnx.context(0))
    x = jnp.ones((64, 32))
    with use_abstract_mesh(AbstractMesh((1,), ("gpu",), abstract_device=h200)):
        nnx.export(tmp_path, layer, x, platforms=("cuda",))
    assert nnx.load_exported(tmp_path).platforms == ("cuda",)


def test_a_program_lowered_elsewhere_computes_the_same(pretend):
    inputs = arrays(512, 4, 16, 32, kernels=2)
    expected = compiled("xla", *inputs)
    pretend("gpu")
    lowered = jax.jit(functools.partial(value_and_gradients, "triton")).trace(*inputs)
    assert "triton" not in lowered.lower(lowering_platforms=("tpu",)).as_text()
    close(lowered.lower().compile()(*inputs), expected, rtol=FLOAT32)


# Blocks


@pytest.mark.parametrize("rows, groups", [(1, 1), (5, 64), (300, 4), (1000, 7), (5000, 3), (100_000, 8)])
def test_blocks_waste_little(rows, groups):
    size = block_size(rows, groups)
    assert groups * (size - 1) <= (PADDING if size < LARGE else PADDING_OF_LARGE) * rows


@pytest.mark.parametrize("num_rows, num_groups", [(1, 3), (40, 3), (500, 5)])
def test_every_row_is_in_one_slot_of_a_block_of_its_group(num_rows, num_groups):
    random = np.random.default_rng(num_rows)
    groups = random.integers(0, num_groups + 1, num_rows)  # the last number means none
    blocks = jax.tree.map(np.asarray, make_blocks(jnp.asarray(groups, jnp.int32), num_groups))
    for row, group in enumerate(groups):
        place = blocks.places[row]
        if group == num_groups:
            assert place >= blocks.rows.size
        else:
            block, within = divmod(place, blocks.rows.shape[1])
            assert blocks.groups[block] == group and blocks.rows[block, within] == row
    assert (blocks.rows < num_rows).sum() == (groups < num_groups).sum()
    assert len({*blocks.rows.reshape(-1)}) == blocks.rows.size and len({*blocks.places}) == num_rows
    assert (np.diff(blocks.groups) >= 0).all()
    needed = np.unique(blocks.groups[np.any(blocks.rows < num_rows, axis=1)], return_counts=True)
    counts = np.zeros(num_groups, int)
    counts[needed[0]] = needed[1]
    np.testing.assert_array_equal(blocks.bounds, [0, *np.cumsum(counts)])
