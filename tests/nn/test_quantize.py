"""Quantization of layers: the error it makes, that it can be undone, what it composes with, and what it refuses."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models.published import tiny_model
from tests.nn.arrays import normal
from tests.sharding.programs import ROOT, finish, start

LIMIT = 200  # seconds


def linear(ctx):
    return nnx.Linear(256, 6, ctx=ctx)


LAYERS = {
    "Linear": (linear, (5, 256)),
    "LinearGeneral": (lambda ctx: nnx.LinearGeneral((4, 64), (3, 2), axis=(-2, -1), ctx=ctx), (5, 4, 64)),
    "LinearGeneral, batched": (lambda ctx: nnx.LinearGeneral(256, 6, batch_axis={0: 2}, ctx=ctx), (2, 3, 256)),
    "Einsum": (lambda ctx: nnx.Einsum("...xy,yhxb->b...h", (16, 3, 16, 2), (2, 3), ctx=ctx), (5, 16, 16)),
}
STORED = {8: jnp.int8, 4: jnp.int4}


def error(found, expected):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("bits", "group_size", "bound"), [(8, None, 0.01), (8, 32, 0.01), (4, None, 0.12)])
def test_layers_compute_the_same_up_to_rounding(name, bits, group_size, bound):
    make, shape = LAYERS[name]
    layer, x = make(nnx.context(0)), normal(*shape)
    expected = layer(x)
    assert nnx.quantize(layer, bits, group_size) == [""]
    assert layer.kernel.dtype == STORED[bits] and layer.kernel.shape == make(nnx.context(0)).kernel.shape
    found = layer(x)
    assert 0 < error(found, expected) < bound
    assert nnx.dequantize(layer) == [""]
    np.testing.assert_allclose(layer(x), found, rtol=2e-5, atol=2e-5)
    assert type(layer.variable("kernel")) is nnx.Param and layer.kernel_scale is None


def test_weights_come_back_within_half_a_step_and_the_largest_one_exactly():
    kernel = normal(256, 6).at[7, 2].set(5.0)
    for bits, group_size in ((8, None), (4, None), (4, 32)):
        layer = nnx.Linear(256, 6, ctx=nnx.context(0))
        layer.kernel = kernel
        nnx.quantize(layer, bits, group_size)
        scale = layer.kernel_scale if layer.kernel_scale.ndim == 2 else layer.kernel_scale[None]
        steps = np.abs(np.repeat(scale, 256 // len(scale), axis=0))
        # Where both signs have large values, the positive integers end one step before the negative ones.
        clipped = np.asarray(layer.kernel) == 2 ** (bits - 1) - 1
        nnx.dequantize(layer)
        difference = np.abs(layer.kernel - kernel)
        assert (difference <= np.where(clipped, 1.0, 0.5001) * steps).all()
        assert float(layer.kernel[7, 2]) == 5.0


@pytest.mark.parametrize(
    ("make", "settings", "shape"),
    [
        (linear, (8,), (6,)),
        (linear, (4,), (2, 6)),  # groups of 128
        (linear, (8, 64), (4, 6)),
        (linear, (4, 256), (6,)),
        (lambda ctx: nnx.Linear(96, 6, ctx=ctx), (4,), (6,)),
        (lambda ctx: nnx.Linear(160, 6, ctx=ctx), (4,), (5, 6)),
        (LAYERS["LinearGeneral"][0], (4,), (2, 3, 2)),  # groups can span heads
        (LAYERS["Einsum"][0], (4,), (2, 3, 2)),
        (lambda ctx: nnx.Embed(9, 256, ctx=ctx), (4,), (9, 2)),
    ],
)
def test_there_is_one_scale_per_output_or_per_output_and_group(make, settings, shape):
    def build():
        layer = make(nnx.context(0))
        nnx.quantize(layer, *settings)
        return layer

    state = nnx.eval_shape(build).filter(nnx.QuantizedParam)
    assert [leaf.value.shape for path, leaf in state.items() if path.endswith("_scale")] == [shape]


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.01), (4, 0.12)])
def test_embeddings_look_up_and_attend(bits, bound):
    layer = nnx.Embed(20, 256, ctx=nnx.context(0))
    tokens, query = jnp.array([[3, -1, 20]]), normal(2, 256)
    vectors, logits = layer(tokens), layer.attend(query)
    nnx.quantize(layer, bits)
    found = layer(tokens)
    assert error(found[:, :2], vectors[:, :2]) < bound and error(layer.attend(query), logits) < bound
    assert jnp.isnan(found[0, 2]).all()  # outside of the table, as before


def experts(**options):
    return nnx.MoE(256, 64, 6, 2, num_shared=1, update_stats=False, ctx=nnx.context(0), **options)


BIASES = {"use_bias": True, "use_router_bias": True, "bias_init": nnx.initializers.normal()}


@nnx.jit
def output_and_slopes(layer, x):
    return layer(x), jax.grad(lambda x: layer(x).sum())(x)


@pytest.mark.parametrize(
    ("bits", "group_size", "bound", "options"),
    [(8, 32, 0.01, {}), (4, 32, 0.15, {}), (8, None, 0.01, BIASES)],
)
def test_experts_compute_the_same_up_to_rounding(bits, group_size, bound, options):
    layer, x = experts(**options), normal(20, 256)
    layer.router = layer.router * 30  # so that no choice hangs on rounding
    expected, _ = output_and_slopes(layer, x)
    assert nnx.quantize(layer, bits, group_size, where="") == [""]
    assert all(array.dtype == STORED[bits] for array in (layer.gate, layer.up, layer.down))
    groups = () if group_size is None else (64 // group_size,)
    assert layer.down_scale.shape == (6, *groups, 256)
    found, slopes = output_and_slopes(layer, x)
    assert 0 < error(found, expected) < bound
    assert nnx.dequantize(layer) == [""] and layer.gate_scale is None
    again, slopes_again = output_and_slopes(layer, x)
    np.testing.assert_allclose(again, found, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(slopes_again, slopes, rtol=1e-4, atol=1e-4)


def test_quantized_experts_are_saved_and_loaded_and_write_text(tmp_path):
    def decoder():
        return tiny_model(model_type="mixtral", num_experts=4, num_selected=2)

    model, tokens = decoder(), jnp.array([[3, 1, 4]])
    paths = nnx.quantize(model)
    assert "layers/0/mlp" in paths and model.layers[0].mlp.up.dtype == jnp.int8
    nnx.save(tmp_path / "model", model)
    again = nnx.eval_shape(decoder)
    nnx.quantize(again)
    nnx.load(tmp_path / "model", again)
    assert again.get_state() == model.get_state()
    text = nnx.generate(again, tokens, max_new_tokens=4, temperature=0)
    logits = nnx.jit(again)(jnp.concatenate([tokens, text[:, :-1]], 1))
    np.testing.assert_array_equal(jnp.argmax(logits[:, 2:], -1), text)


def test_half_precision_experts_compute_in_half_precision():
    layer, x = experts(param_dtype=jnp.float16), normal(3, 256).astype(jnp.float16)
    compute = nnx.jit(lambda layer, x: layer(x))
    expected = compute(layer, x)
    nnx.quantize(layer)
    found = compute(layer, x)
    assert found.dtype == jax.eval_shape(layer, x[:0]).dtype == jnp.float16
    assert error(found, expected) < 0.02


@pytest.mark.parametrize(("dtype", "scales"), [(jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float32)])
def test_half_precision_layers_compute_in_half_precision_and_do_not_overflow(dtype, scales):
    layer = nnx.Linear(256, 6, param_dtype=dtype, ctx=nnx.context(0))
    x = (20 * normal(3, 256)).astype(dtype)
    expected = layer(x)
    nnx.quantize(layer)
    assert layer.kernel_scale.dtype == scales and layer(x).dtype == dtype
    assert error(layer(x), expected) < 0.02
    large = jnp.full((1, 256), 100.0, dtype) * jnp.sign(layer.kernel[:, 0]).astype(dtype)
    assert jnp.isfinite(layer(large)).all()  # the sum with integers, about 10 ** 6, is beyond float16


@pytest.mark.parametrize("magnitude", [1, 1e-5, 1e-6])
@pytest.mark.parametrize(("bits", "group_size", "bound"), [(8, None, 0.005), (8, 32, 0.005), (4, 32, 0.1)])
def test_small_float16_weights_are_as_precise_as_large_ones(magnitude, bits, group_size, bound):
    """Float16 has few numbers below 6e-5 and none below 6e-8, and a scale is a fraction of the weights."""
    layer = nnx.Linear(64, 6, use_bias=False, param_dtype=jnp.float16, ctx=nnx.context(0))
    layer.kernel = kernel = jnp.asarray(magnitude * np.linspace(-1, 0.9, 384).reshape(64, 6), jnp.float16)
    nnx.quantize(layer, bits, group_size)
    assert error(layer(jnp.eye(64)), kernel) < bound
    assert layer(jnp.eye(64, dtype=jnp.float16)).dtype == jnp.float16
    nnx.dequantize(layer)
    assert layer.kernel.dtype == jnp.float16 and error(layer.kernel, kernel) < bound


def test_every_quantized_layer_with_float16_weights_computes_in_float16():
    x = normal(2, 16, 16).astype(jnp.float16)
    options = {"param_dtype": jnp.float16, "ctx": nnx.context(0)}
    embed, tokens = nnx.Embed(20, 16, **options), jnp.array([3])
    layers = [nnx.Einsum("...x,xy->...y", (16, 4), **options), nnx.LinearGeneral(16, 4, **options), embed]
    for layer in layers:
        nnx.quantize(layer)
    assert [jax.eval_shape(layer, x).dtype for layer in layers[:2]] == [jnp.float16] * 2
    assert jax.eval_shape(embed, tokens).dtype == jax.eval_shape(embed.attend, x).dtype == jnp.float16
    model = nnx.eval_shape(tiny_model)
    nnx.set_dtypes(model, param_dtype=jnp.float16)
    nnx.quantize(model)
    cache = model.init_cache(1, 4)
    logits, _ = nnx.eval_shape(lambda model: model.decode(tokens[None], cache), model)
    assert cache.layers[0].key.dtype == logits.dtype == jnp.float16


def test_scales_of_float16_weights_that_were_saved_in_float16_are_loaded_and_used(tmp_path):
    def build():
        return nnx.Linear(64, 6, param_dtype=jnp.float16, ctx=nnx.context(0))

    before, x = build(), normal(2, 64).astype(jnp.float16)
    nnx.quantize(before)
    before.kernel_scale = before.kernel_scale.astype(jnp.float16)  # as in an earlier version
    assert before.kernel_scale.dtype == before(x).dtype == jnp.float16
    nnx.save(tmp_path / "model", before)
    nnx.save_safetensors(tmp_path / "model.safetensors", before)
    for load in (
        lambda model: nnx.load(tmp_path / "model", model),
        lambda model: model.update_state(nnx.load_safetensors(tmp_path / "model.safetensors", model)),
        lambda model: model.load_state(before.get_state()),
    ):
        model = build()
        nnx.quantize(model)
        model.kernel_scale = 0 * model.kernel_scale
        load(model)
        assert model.kernel_scale.dtype == jnp.float32 and (model.kernel_scale == before.kernel_scale).all()
        assert model(x).dtype == jnp.float16 and error(model(x), before(x)) < 1e-3


def test_computation_dtype_and_hooks_are_those_of_the_layer():
    seen = []

    def dot_general(x, kernel, *args, **kwargs):
        seen.append(kernel.dtype)
        return jax.lax.dot_general(x, kernel, *args, **kwargs)

    layer = nnx.Linear(64, 6, dtype=jnp.bfloat16, dot_general=dot_general, ctx=nnx.context(0))
    expected = layer(normal(2, 64))
    nnx.quantize(layer, 8)
    assert layer(normal(2, 64)).dtype == jnp.bfloat16 and seen[-1] == jnp.bfloat16
    assert error(layer(normal(2, 64)), expected) < 0.02
    layer = nnx.Linear(64, 6, preferred_element_type=jnp.float32, dtype=jnp.bfloat16, ctx=nnx.context(0))
    nnx.quantize(layer, 8)
    assert layer(normal(2, 64)).dtype == jnp.float32


def test_a_weight_of_zeros_stays_zero_and_one_that_is_not_finite_is_not_hidden():
    layer = linear(nnx.context(0))
    layer.kernel = layer.kernel.at[:, 0].set(0.0).at[3, 1].set(jnp.nan).at[3, 2].set(jnp.inf)
    nnx.quantize(layer, 8)
    y = layer(jnp.ones(256))
    assert y[0] == 0 and jnp.isnan(y[1]) and not jnp.isfinite(y[2]) and jnp.isfinite(y[3:]).all()


def mlp(**options):
    return nnx.MLP(64, 32, 4, ctx=nnx.context(0), **options)


@pytest.mark.parametrize(
    ("where", "paths"),
    [
        (..., ["layers/0", "layers/1"]),
        ("layers/1", ["layers/1"]),
        (nnx.Linear, ["layers/0", "layers/1"]),
        (lambda path, module: path.endswith("0"), ["layers/0"]),
    ],
    ids=["all", "glob", "type", "function"],
)
def test_a_selector_picks_layers(where, paths):
    model = mlp()
    assert nnx.quantize(model, 8, where=where) == paths
    assert list(model.filter(nnx.QuantizedParam)) == [f"{p}/{n}" for p in paths for n in ("kernel", "kernel_scale")]
    assert nnx.dequantize(model, where=where) == paths
    assert model.get_module_def() == mlp().get_module_def()


def test_bits_differ_from_layer_to_layer():
    model = mlp()
    nnx.quantize(model, 8, where="layers/1")
    nnx.quantize(model, 4, where="layers/0")
    assert [layer.kernel.dtype for layer in model.layers] == [jnp.int4, jnp.int8]
    assert nnx.dequantize(model) == ["layers/0", "layers/1"]


def test_quantized_models_are_cloned_split_merged_and_compiled():
    model, x = mlp(), normal(3, 64)
    nnx.quantize(model, 4)
    expected = model(x)
    state, moduledef = model.partition()
    np.testing.assert_array_equal(moduledef.merge(state)(x), expected)
    np.testing.assert_array_equal(model.clone()(x), expected)
    np.testing.assert_allclose(nnx.jit(lambda model, x: model(x))(model, x), expected, rtol=1e-5)
    inside = mlp()
    nnx.jit(lambda model: nnx.quantize(model, 4) and None)(inside)
    assert inside.get_state() == model.get_state() and inside.get_module_def() == model.get_module_def()


def test_set_dtypes_changes_scales_and_leaves_integers():
    model = mlp()
    nnx.quantize(model, 8)
    nnx.set_dtypes(model, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    assert model.layers[0].kernel.dtype == jnp.int8 and model.layers[0].kernel_scale.dtype == jnp.bfloat16
    assert model(normal(3, 64)).dtype == jnp.bfloat16
    nnx.set_dtypes(model, dtype=jnp.float16, param_dtype=jnp.float16)
    assert model.layers[0].kernel_scale.dtype == jnp.float32 and model(normal(3, 64)).dtype == jnp.float16
    nnx.dequantize(model)
    assert model.layers[0].kernel.dtype == jnp.float16


def test_only_what_is_not_quantized_is_trained():
    model, x = mlp(), normal(3, 64)
    nnx.quantize(model, 4)
    assert list(nnx.grad(lambda model: model(x).sum())(model)) == ["layers/0/bias", "layers/1/bias"]
    nnx.add_lora(model, 2, ctx=nnx.context(1))
    grads = nnx.grad(lambda model: jnp.sum(model(x) ** 2), wrt=nnx.LoRAParam)(model)
    assert len(grads) == 4 and all(jnp.isfinite(leaf.value).all() for leaf in grads.values())


def test_adaptations_work_on_quantized_layers_and_are_merged_after_dequantizing():
    model, x = mlp(), normal(3, 64)
    nnx.add_lora(model, 2, where="layers/0", ctx=nnx.context(1))
    nnx.quantize(model, 8)
    nnx.add_lora(model, 2, where="layers/1", ctx=nnx.context(1))
    model.update_state(model.filter(nnx.LoRAParam).map(lambda _, leaf: leaf.replace(leaf.value + 0.1)))
    expected = model(x)
    with pytest.raises(ValueError, match=r"kernel at 'layers/0' is quantized.*nnx.dequantize\(model\)"):
        nnx.merge_lora(model)
    nnx.dequantize(model)
    assert nnx.merge_lora(model) == ["layers/0", "layers/1"]
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-4)


class Block(nnx.Module):
    def __init__(self, ctx):
        self.linear = nnx.Linear(64, 64, ctx=ctx)

    def __call__(self, x, _):
        return self.linear(x), None


def stack(axes):
    return nnx.Scan(Block, variable_axes=axes, split_rngs="params", length=3)(ctx=nnx.context(0))


def test_every_layer_of_a_stack_is_quantized_like_a_layer_alone():
    layers, x = stack({...: 0}), normal(2, 64)
    whole = layers.scan_module.linear.kernel
    nnx.quantize(layers, 4, 32)
    assert layers.scan_module.linear.kernel_scale.shape == (3, 2, 64)
    alone = nnx.Linear(64, 64, ctx=nnx.context(0))
    alone.kernel = whole[1]
    nnx.quantize(alone, 4, 32)
    np.testing.assert_array_equal(layers.scan_module.linear.kernel[1], alone.kernel)
    found = layers(x, None)[0]
    nnx.dequantize(layers)
    np.testing.assert_allclose(layers(x, None)[0], found, rtol=1e-4, atol=1e-4)


def test_scan_that_does_not_slice_quantized_weights_raises():
    layers = stack({nnx.Param: 0})
    nnx.quantize(layers, 8)
    with pytest.raises(ValueError, match=r"\(3, 64, 64\).*\(3, 64\).*nnx.QuantizedParam: 0"):
        layers(normal(2, 64), None)


def test_an_abstract_model_is_quantized_without_values_and_filled_from_a_file(tmp_path):
    model = mlp()
    nnx.quantize(model, 4)
    nnx.save(tmp_path / "model", model)
    target = nnx.eval_shape(mlp)
    nnx.quantize(target, 4)
    assert isinstance(target.layers[0].kernel, jax.ShapeDtypeStruct) and target.layers[0].kernel.dtype == jnp.int4
    nnx.load(tmp_path / "model", target)
    assert target.get_state() == model.get_state()


def test_integers_of_eight_bits_are_saved_as_safetensors(tmp_path):
    model = mlp()
    nnx.quantize(model, 8)
    nnx.save_safetensors(tmp_path / "model.safetensors", model)
    assert nnx.load_safetensors(tmp_path / "model.safetensors", model) == model.get_state()


def test_summaries_count_the_bytes_on_the_device():
    model = nnx.Linear(256, 64, use_bias=False, ctx=nnx.context(0))
    sizes = []
    for bits in (8, 4):
        layer = model.clone()
        nnx.quantize(layer, bits)
        sizes.append(str(nnx.summary(layer)))
    assert "16.25 KiB" in sizes[0]  # a byte per weight, and 64 scales
    assert "8.50 KiB" in sizes[1]  # half a byte per weight, and 2 * 64 scales


def test_scales_take_the_axis_names_of_their_weight():
    attention = nnx.MultiHeadAttention(4, 256, ctx=nnx.context(0))
    nnx.quantize(attention, 4)
    specs = nnx.get_partition_spec(attention)
    assert tuple(specs["query/kernel"]) == ("embed", "heads", "head_dim") == tuple(specs["query/kernel_scale"])
    assert tuple(specs["out/kernel_scale"]) == ("heads", "embed")
    named = nnx.Linear(256, 8, ctx=nnx.context(0), kernel_metadata={"sharding": ("a", "b"), "note": 1})
    nnx.quantize(named, 8)
    assert named.variable("kernel").sharding == ("a", "b") and named.variable("kernel").note == 1
    assert tuple(named.variable("kernel_scale").sharding) == ("b",)
    nnx.dequantize(named)
    assert named.variable("kernel").sharding == ("a", "b") and named.variable("kernel").note == 1


# What is refused


@pytest.mark.parametrize("bits", [2, 16, "8", True])
def test_other_numbers_of_bits_are_refused(bits):
    with pytest.raises(ValueError, match=f"`bits` is 8 or 4, got {bits!r}"):
        nnx.quantize(mlp(), bits)


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_group_sizes_are_positive_integers(size):
    with pytest.raises(ValueError, match=f"positive number of inputs.*got {size!r}"):
        nnx.quantize(mlp(), 4, size)


def test_groups_must_divide_the_inputs_and_nothing_changes_otherwise():
    model = nnx.MLP(64, 48, 4, ctx=nnx.context(0))
    before = model.get_state()
    with pytest.raises(ValueError, match="'layers/1/kernel' sums over 48 inputs, which groups of 64 do not divide"):
        nnx.quantize(model, 4, 64)
    assert model.get_state() == before
    with pytest.raises(ValueError, match="sums over 200 inputs, which groups of 128, 64, 32 do not divide"):
        nnx.quantize(nnx.Linear(200, 4, ctx=nnx.context(0)), 4)


def test_a_layer_is_not_quantized_twice():
    model = mlp()
    nnx.quantize(model, 8, where="layers/1")
    with pytest.raises(ValueError, match=r"'layers/1' is quantized already, to int8.*where='layers/1'"):
        nnx.quantize(model, 8)
    assert model.layers[0].kernel.dtype == jnp.float32


def test_selecting_nothing_lists_what_could_be_selected():
    with pytest.raises(ValueError, match=r"quantize: where='head' selects no layer.*MLP.*'layers/0', 'layers/1'"):
        nnx.quantize(mlp(), 8, where="head")
    with pytest.raises(ValueError, match=r"selects no layer that can be quantized.*LayerNorm, those are: \(none\)"):
        nnx.quantize(nnx.LayerNorm(4), 8)
    with pytest.raises(ValueError, match=r"dequantize: .* selects no layer that is quantized"):
        nnx.dequantize(mlp())
    with pytest.raises(TypeError, match="does not select Modules"):
        nnx.quantize(mlp(), 8, where=nnx.Param)
    with pytest.raises(TypeError, match="takes a Module, got dict"):
        nnx.quantize({}, 8)


def test_tied_weights_are_refused():
    first, second = (nnx.Linear(8, 8, ctx=nnx.context(0)) for _ in range(2))
    first.kernel = second.kernel = nnx.Ref(nnx.Param(jnp.ones((8, 8))))
    with pytest.raises(ValueError, match="'0/kernel' is a Ref, so another layer may use the same weight"):
        nnx.quantize(nnx.Sequence([first, second]), 8)


def test_weights_that_are_not_plain_parameters_are_refused():
    layer = nnx.Linear(8, 8, ctx=nnx.context(0))
    del layer.kernel
    layer.kernel = nnx.BatchStat(jnp.ones((8, 8)))
    with pytest.raises(ValueError, match="'kernel' is BatchStat.*expected a Param of floating-point numbers"):
        nnx.quantize(layer, 8)


def test_weights_stacked_along_other_axes_are_refused():
    layers = stack({...: 1})
    with pytest.raises(ValueError, match=r"has shape \(64, 3, 64\), expected \(64, 64\).*Stack along axis 0"):
        nnx.quantize(layers, 8)


def test_equations_that_do_not_say_what_is_summed_are_refused():
    with pytest.raises(ValueError, match="Einsum at '' gets its equation in the call"):
        nnx.quantize(nnx.Einsum(None, (4, 4), ctx=nnx.context(0)), 8)
    with pytest.raises(ValueError, match="sums over no axis of its kernel"):
        nnx.quantize(nnx.Einsum("ab,b->ab", (4,), kernel_init=nnx.initializers.ones(), ctx=nnx.context(0)), 8)


def test_an_ordinary_weight_written_into_a_quantized_layer_is_noticed():
    layer = linear(nnx.context(0))
    wrapper = nnx.WeightNorm(layer, ctx=nnx.context(0))
    nnx.quantize(layer, 8)
    with pytest.raises(ValueError, match="This layer is quantized.*must be integers, got float32.*nnx.dequantize"):
        wrapper(normal(2, 256))


# On several devices


@pytest.fixture(scope="module")
def seen():
    (output,) = finish([start(ROOT / "tests" / "nn" / "quantize_program.py", devices=8)], LIMIT)
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("case", ["per channel, automatic axes", "groups, automatic axes", "groups, explicit axes"])
def test_a_split_model_computes_what_it_computes_on_one_device(seen, case):
    assert seen[case]["difference"] < 1e-4
    assert seen[case]["after"] == "('data', 'model')"


def test_scales_are_split_like_their_weights(seen):
    assert seen["per channel, automatic axes"]["splits"] == {
        "up": ["('data', 'model')", "('model',)"],
        "out": ["('model', None, 'data')", "('data',)"],
        "embed": ["('model', 'data')", "('model',)"],
    }
    for axes in ("automatic", "explicit"):
        assert seen[f"groups, {axes} axes"]["splits"] == {
            "up": ["('data', 'model')"] * 2,
            "out": ["('model', None, 'data')", "('model', 'data')"],
            "embed": ["('model', 'data')"] * 2,
        }
