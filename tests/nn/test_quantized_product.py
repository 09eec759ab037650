"""Products of a few rows with quantized weights: the kernel, interpreted here, computes what XLA does."""

import functools
import importlib.util
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import nnx
from nnx.nn import einsum, embed, linear
from nnx.nn.quantized.quantized import as_operand, to_integers, to_weight
from nnx.nn.quantized.quantized_product import MANY_ROWS, quantized_product
from nnx.nn.quantized.quantized_tiling import MOST_ROWS, make_tiling
from nnx.sharding.target import compiling_for
from tests.nn.arrays import normal

FORMS = [
    (bits, group_size, transposed)
    for bits, group_size in ((8, None), (4, None), (4, 64))
    for transposed in (False, True)
]
forms = pytest.mark.parametrize(("bits", "group_size", "transposed"), FORMS)


# Whole programs are compiled: operation by operation, every shape would be a program of its own.
to_integers_at_once = jax.jit(to_integers, static_argnums=(1, 2, 3))
to_weight_at_once = jax.jit(to_weight, static_argnums=(2, 3))
multiply_at_once = jax.jit(quantized_product, static_argnames=("transposed", "dtype", "implementation"))


def quantized(inputs, outputs, bits, group_size, transposed):
    weight = normal(inputs, outputs)
    integers, scale = to_integers_at_once(weight.T if transposed else weight, (int(transposed),), bits, group_size)
    assert (scale < 0).any() and (scale > 0).any()  # both signs occur
    return integers, scale


def by_hand(x, integers, scale, transposed):
    weight = np.asarray(to_weight_at_once(integers, scale, (int(transposed),), jnp.float32), np.float64)
    return np.asarray(x, np.float64) @ (weight.T if transposed else weight)


def error(found, expected):
    return np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)


def lowered(compiled, *args, platform="cuda"):
    """Returns the program for a platform that need not exist here."""
    gpu = AbstractDevice("NVIDIA H200", 132, "gpu")  # JAX 0.11 wants to know which one
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return compiled.trace(*args).lower(lowering_platforms=(platform,)).as_text()


@forms
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_kernel_multiplies_with_the_weight_that_the_integers_represent(bits, group_size, transposed, dtype):
    weight = quantized(256, 192, bits, group_size, transposed)
    x = normal(5, 256).astype(dtype)
    kernel, xla = (
        multiply_at_once(x, *weight, transposed=transposed, dtype=jnp.float32, implementation=implementation)
        for implementation in ("triton", "xla")
    )
    expected = by_hand(x, *weight, transposed)
    assert error(kernel, expected) < 1e-6  # sums are float32, also of bfloat16
    assert error(xla, expected) < (1e-2 if dtype == jnp.bfloat16 else 1e-6)
    if dtype == jnp.bfloat16:
        half = multiply_at_once(x, *weight, transposed=transposed, implementation="triton")
        assert half.dtype == dtype and error(half, expected) < 4e-3


@pytest.mark.parametrize("rows", [1, 16, 33])
def test_any_number_of_rows_is_padded(rows):
    weight, x = quantized(128, 64, 4, 32, False), normal(rows, 128)
    found = multiply_at_once(x, *weight, implementation="triton")
    assert found.shape == (rows, 64) and error(found, by_hand(x, *weight, False)) < 1e-6


def test_several_axes_of_inputs_and_outputs_are_those_of_attention():
    kernel = normal(4, 32, 2, 32)
    integers, scale = to_integers(kernel, (0, 1), 4, 64)  # a group spans two heads
    x = normal(2, 3, 4, 32)
    found = quantized_product(x, integers, scale, 2, implementation="triton")
    weight = to_weight(integers, scale, (0, 1), jnp.float32)
    np.testing.assert_allclose(found, jnp.tensordot(x, weight, 2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("inputs", "outputs", "group_size"), [(256, 50, 128), (256, 48, 128), (240, 64, 240)])
def test_sizes_that_tiles_do_not_divide_are_left_to_xla(inputs, outputs, group_size):
    assert make_tiling(2, inputs, outputs, group_size, 8) is None
    integers, scale = quantized(inputs, outputs, 8, group_size, False)
    assert quantized_product(normal(2, inputs), integers, scale, implementation="triton") is None


def test_tilings_divide_the_inputs_the_outputs_and_the_groups():
    for inputs, outputs, group_size in ((2048, 2048, 128), (2048, 512, 2048), (8192, 2048, 32), (11008, 4096, 64)):
        for rows, bits in ((8, 4), (8, 8), (64, 4), (64, 8)):
            tiling = make_tiling(rows, inputs, outputs, group_size, bits)
            assert tiling is not None
            assert outputs % tiling.columns == group_size % tiling.depth == inputs % (tiling.depth * tiling.splits) == 0


def test_many_rows_wide_numbers_and_other_devices_are_left_to_xla(monkeypatch, pretend):
    weight = quantized(128, 64, 4, 64, False)
    few = normal(MOST_ROWS, 128).astype(jnp.bfloat16)

    def left_to_xla(x):
        return jax.eval_shape(quantized_product, x, *weight) is None  # traced: arrays know which device they are on

    pretend("cpu")
    assert left_to_xla(few)
    pretend("gpu")
    assert not left_to_xla(few)
    assert left_to_xla(normal(MOST_ROWS + 1, 128).astype(jnp.bfloat16))
    assert left_to_xla(few[:0])
    assert left_to_xla(few.astype(jnp.float32))
    for two_or_old in ({"devices": 2}, {"capability": "7.5"}):
        pretend("gpu", **two_or_old)
        assert left_to_xla(few)
    pretend("gpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # a JAX without Triton
    assert left_to_xla(few)


def test_many_rows_are_multiplied_with_the_dequantized_weight(pretend):
    weight, x = quantized(128, 64, 8, 64, False), normal(MANY_ROWS, 128).astype(jnp.bfloat16)
    pretend("gpu")
    text = lowered(jax.jit(quantized_product), x, *weight)
    assert "optimization_barrier" in text and "custom_call" not in text
    assert error(jax.jit(quantized_product)(x, *weight), by_hand(x, *weight, False)) < 6e-3
    # The gradient converts the integers again, so that no weight is kept in bfloat16 for it.
    slope = jax.grad(lambda x, *weight: quantized_product(x, *weight).astype(jnp.float32).sum())
    assert str(jax.make_jaxpr(slope)(x, *weight)).count("optimization_barrier") <= 1


@pytest.mark.usefixtures("without_triton")
def test_a_jax_without_triton_multiplies_with_xla(pretend):
    weight, x = quantized(128, 64, 4, 64, False), normal(8, 128).astype(jnp.bfloat16)
    pretend("gpu")
    assert quantized_product(x, *weight) is None
    layer = nnx.Linear(128, 64, dtype=jnp.bfloat16, ctx=nnx.context(0))
    nnx.quantize(layer, 4)
    assert "triton" not in lowered(jax.jit(lambda x: layer(x)), x)


@pytest.mark.usefixtures("without_triton")
def test_a_jax_without_triton_computes_losses_and_experts_with_xla(pretend):
    pretend("gpu")
    logits, targets = normal(16, 50).astype(jnp.bfloat16), jnp.arange(16)
    loss = jax.jit(jax.value_and_grad(lambda logits: nnx.cross_entropy(logits, targets)))
    assert "triton" not in lowered(loss, logits)
    experts = nnx.MoE(8, 16, 4, 2, ctx=nnx.context(0)).eval()
    assert "triton" not in lowered(jax.jit(lambda x: experts(x)), normal(512, 8))


@pytest.fixture
def without_triton(monkeypatch):
    """A JAX that has removed Pallas's Triton backend, as it announced."""
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    for kernel in ("quantized.quantized_kernel", "cross_entropy_kernel", "moe.grouped_kernel"):
        monkeypatch.delitem(sys.modules, f"nnx.nn.{kernel}", raising=False)


def test_a_program_for_another_platform_than_the_default_one_has_no_kernel(pretend):
    weight, x = quantized(128, 64, 4, None, False), normal(2, 128).astype(jnp.bfloat16)
    pretend("gpu")
    compiled = jax.jit(quantized_product)
    assert "custom_call @__gpu$xla.gpu.triton" in lowered(compiled, x, *weight)
    assert "custom_call" not in lowered(compiled, x, *weight, platform="cpu")
    assert error(jax.jit(quantized_product)(x, *weight), by_hand(x, *weight, False)) < 4e-3


def test_a_scale_that_does_not_fit_is_an_error():
    integers, scale = quantized(128, 64, 8, None, False)
    with pytest.raises(ValueError, match=r"weight of shape \(128, 64\) does not fit its scale of shape \(32,\)"):
        quantized_product(normal(2, 128), integers, scale[:32])


# Four bits, by XLA


def test_gpus_convert_four_bits_before_a_product_and_not_inside_of_it():
    @functools.partial(jax.jit, static_argnums=(2, 3))
    def operand(integers, scale, dtype, whole):
        return as_operand(integers, scale, (0,), dtype, whole)[0]

    for group_size, whole in ((None, False), (None, True), (64, False)):
        four, eight = (quantized(128, 64, bits, group_size, False) for bits in (4, 8))
        assert lowered(operand, *four, jnp.bfloat16, whole).count("optimization_barrier") == 1
        assert "optimization_barrier" not in lowered(operand, *eight, jnp.bfloat16, whole)
        with compiling_for("cpu"):
            assert "optimization_barrier" not in operand.lower(*four, jnp.bfloat16, whole).as_text()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("group_size", [None, 64], ids=["per channel", "groups"])
def test_xla_multiplies_four_bits_alone_and_in_a_scan(dtype, group_size):
    x = normal(5, 128).astype(dtype)
    for transposed in (False, True):
        weights = [quantized(128, 128, 4, group_size, transposed)] * 2
        integers, scale = (jnp.stack(arrays) for arrays in zip(*weights, strict=True))

        def layer(x, weight, transposed=transposed):
            y = quantized_product(x, *weight, transposed=transposed, implementation="xla")
            return y.astype(x.dtype), y

        _, (first, second) = jax.jit(functools.partial(jax.lax.scan, layer))(x, (integers, scale))
        tolerance = 1e-2 if dtype == jnp.bfloat16 else 1e-6
        assert error(first, by_hand(x, *weights[0], transposed)) < tolerance
        assert error(second, by_hand(first, *weights[1], transposed)) < tolerance


# Transforms


@forms
def test_product_is_differentiated_in_both_modes(bits, group_size, transposed):
    integers, scale = quantized(128, 64, bits, group_size, transposed)
    x, direction = normal(3, 128), normal(3, 128, seed=1)

    def multiply(x, scale, implementation):
        return quantized_product(x, integers, scale, transposed=transposed, implementation=implementation)

    @functools.partial(jax.jit, static_argnums=2)
    def derivatives(x, scale, implementation):
        of_both = functools.partial(multiply, implementation=implementation)
        of_x = functools.partial(of_both, scale=scale)
        pulled_back = jax.vjp(of_both, x, scale)[1](normal(3, 64))
        return pulled_back, jax.jvp(of_x, (x,), (direction,))[1], jax.grad(lambda x: of_x(x).sum())(x)

    found, expected = (derivatives(x, scale, name) for name in ("triton", "xla"))
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3)
    jax.tree.map(compare, found, expected)
    compare(found[1], multiply(direction, scale, "xla"))


def kernel_calls(f, *args):
    return lowered(jax.jit(f), *args).count("custom_call @__gpu$xla.gpu.triton")


@pytest.mark.parametrize(("size", "calls"), [(MOST_ROWS, 1), (MOST_ROWS + 1, 0)])
def test_vmap_puts_rows_together_and_leaves_many_to_xla(size, calls):
    weight, x = quantized(128, 64, 4, 64, False), normal(size, 128)
    multiply = jax.vmap(lambda x: quantized_product(x, *weight, implementation="triton"))
    np.testing.assert_allclose(multiply(x), by_hand(x, *weight, False), rtol=1e-4, atol=1e-3)
    assert kernel_calls(multiply, x) == calls


def test_vmap_over_weights_is_left_to_xla():
    pairs = [quantized(128, 64, 8, None, False), quantized(128, 64, 8, None, False)]
    integers, scale = (jnp.stack(arrays) for arrays in zip(*pairs, strict=True))
    x = normal(2, 3, 128)
    multiply = jax.vmap(functools.partial(quantized_product, implementation="triton"))
    found = multiply(x, integers, 2 * scale)
    np.testing.assert_allclose(found[1], 2 * by_hand(x[1], *pairs[1], False), rtol=1e-4, atol=1e-3)
    assert kernel_calls(multiply, x, integers, scale) == 0
    slope = jax.grad(lambda x: multiply(x, integers, scale).sum())(x)
    assert slope.shape == x.shape and jnp.isfinite(slope).all()


# Lowering to Triton, which needs no GPU


@forms
def test_the_kernel_is_lowered_for_gpus(bits, group_size, transposed):
    weight = quantized(256, 128, bits, group_size, transposed)
    multiply = functools.partial(quantized_product, transposed=transposed, implementation="triton")
    assert kernel_calls(multiply, jnp.zeros((8, 256), jnp.bfloat16), *weight) == 1


def test_weights_reach_the_kernel_as_they_are_stored():
    integers, scale = quantized(256, 128, 4, 64, False)
    multiply = functools.partial(quantized_product, implementation="triton")
    x = jnp.zeros((8, 256), jnp.bfloat16)
    text = lowered(jax.jit(multiply), x, integers, scale)
    (call,) = (line for line in text.splitlines() if "custom_call" in line)
    assert "tensor<256x32xui16>" in call
    # XLA views the same memory as words; it does not convert, move or copy what is in it.
    assert text.count("bitcast_convert") == 1
    assert not any(name in text for name in ("stablehlo.convert %arg1", "transpose", "pad"))


# Layers

LAYERS = {
    "Linear": (lambda ctx: nnx.Linear(256, 192, ctx=ctx), (5, 256)),
    "LinearGeneral, into heads": (lambda ctx: nnx.LinearGeneral(256, (4, 32), ctx=ctx), (2, 3, 256)),
    "LinearGeneral, out of heads": (lambda ctx: nnx.LinearGeneral((4, 64), 64, axis=(-2, -1), ctx=ctx), (5, 4, 64)),
    "Einsum": (lambda ctx: nnx.Einsum("...xy,xyhb->...hb", (4, 64, 2, 32), (2, 32), ctx=ctx), (5, 4, 64)),
    "LoRALinear": (lambda ctx: nnx.LoRALinear(256, 64, lora_rank=2, ctx=ctx), (5, 256)),
    "Embed": (lambda ctx: nnx.Embed(96, 256, ctx=ctx), (5, 256)),
}
ELSEWHERE = {
    "LinearGeneral, batched": (lambda ctx: nnx.LinearGeneral(256, 32, batch_axis={0: 2}, ctx=ctx), (2, 3, 256)),
    "LinearGeneral, other axes": (lambda ctx: nnx.LinearGeneral(256, 32, axis=0, ctx=ctx), (256, 3)),
    "Einsum, outputs first": (lambda ctx: nnx.Einsum("...xy,xyb->b...", (4, 64, 32), (32,), ctx=ctx), (5, 4, 64)),
    "Einsum, kernel out of order": (lambda ctx: nnx.Einsum("...xy,yxb->...b", (64, 4, 32), (32,), ctx=ctx), (5, 4, 64)),
    "precision": (lambda ctx: nnx.Linear(256, 64, precision="highest", ctx=ctx), (5, 256)),
    "outputs": (lambda ctx: nnx.Linear(256, 90, ctx=ctx), (5, 256)),
}


@pytest.fixture
def with_kernel(monkeypatch):
    """Makes layers use the interpreted kernel, as they would use it on a GPU."""
    for module in (linear, einsum, embed):
        forced = functools.partial(quantized_product, implementation="triton")
        monkeypatch.setattr(module, "quantized_product", forced)
    jax.clear_caches()  # bodies of layers are compiled once per shape
    yield
    jax.clear_caches()


def call(layer, x):
    return layer.attend(x) if isinstance(layer, nnx.Embed) else layer(x)


@pytest.mark.parametrize("name", LAYERS | ELSEWHERE)
def test_layers_compute_the_same_with_the_kernel(name, with_kernel):
    make, shape = (LAYERS | ELSEWHERE)[name]
    layer, x = make(nnx.context(0)), normal(*shape)
    if getattr(layer, "bias", None) is not None:
        layer.bias = normal(*layer.bias.shape)
    assert nnx.quantize(layer, 4) == [""]
    found = call(layer, x)
    assert kernel_calls(lambda x: call(layer, x), x) == (name in LAYERS)
    nnx.dequantize(layer)
    np.testing.assert_allclose(found, call(layer, x), rtol=1e-4, atol=1e-4)


def test_the_computation_dtype_and_the_preferred_one_are_those_of_the_layer(with_kernel):
    layer = nnx.Linear(64, 32, dtype=jnp.bfloat16, preferred_element_type=jnp.float32, ctx=nnx.context(0))
    nnx.quantize(layer, 8)
    x = normal(3, 64)
    found = layer(x)
    assert found.dtype == jnp.float32
    weight = to_weight(layer.kernel, layer.kernel_scale, (0,), jnp.float32)
    np.testing.assert_allclose(found, x.astype(jnp.bfloat16).astype(jnp.float32) @ weight, rtol=1e-5, atol=1e-5)


def test_adapters_below_a_quantized_layer_have_the_same_gradients(with_kernel):
    model, x = nnx.MLP(64, 128, 64, ctx=nnx.context(0)), normal(3, 64)
    nnx.quantize(model, 4, 32)
    nnx.add_lora(model, 2, ctx=nnx.context(1))

    def gradients():
        return nnx.grad(lambda model: jnp.sum(model(x) ** 2), wrt=nnx.LoRAParam)(model)

    found = gradients()
    nnx.dequantize(model)
    expected = gradients()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3), found, expected)


def test_a_quantized_model_writes_the_same_text_with_the_kernel(with_kernel):
    config = nnx.models.DecoderConfig(
        model_type="llama",
        vocab_size=96,
        features=64,
        hidden_features=128,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        max_length=64,
        tie_embeddings=True,
    )
    model = nnx.models.Decoder(config, ctx=nnx.context(0))
    nnx.quantize(model, 4)
    prompts = jnp.array([[3, 1, 4], [1, 5, 9]])
    text = nnx.generate(model, prompts, max_new_tokens=4, temperature=0)
    nnx.dequantize(model)
    np.testing.assert_array_equal(nnx.generate(model, prompts, max_new_tokens=4, temperature=0), text)
