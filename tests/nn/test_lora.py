"""Low-rank adaptation: alone, as a linear layer, and put into an existing model."""

import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.nn.arrays import normal


class Model(nnx.Module):
    def __init__(self, ctx):
        self.encoder = nnx.MLP(4, 8, 8, ctx=ctx)
        self.heads = nnx.LinearGeneral(8, (2, 3), ctx=ctx)
        self.shared = self.encoder.layers[1]

    def __call__(self, x):
        x = self.encoder(x)  # (..., 8)
        return self.heads(self.shared(x))  # (..., 2, 3)


def model():
    return Model(nnx.context(0))


X = normal(5, 4)


def randomize_b(model):
    for path, leaf in model.filter(nnx.LoRAParam).items():
        model.set_path(path, normal(*leaf.value.shape, seed=1))


def test_lora_starts_as_the_base_module():
    ctx = nnx.context(0)
    base = nnx.Linear(4, 3, ctx=ctx)
    layer = nnx.LoRA(4, 2, 3, base_module=base, ctx=ctx)
    np.testing.assert_array_equal(layer(X), base(X))
    assert not nnx.LoRA(4, 2, 3, ctx=ctx)(X).any()


def test_alpha_scales_by_the_rank():
    plain, scaled = nnx.LoRA(4, 2, 3, ctx=nnx.context(0)), nnx.LoRA(4, 2, 3, alpha=8.0, ctx=nnx.context(0))
    plain.lora_b = scaled.lora_b = jnp.ones((2, 3))
    np.testing.assert_allclose(scaled(X), 4 * plain(X), rtol=1e-5)


def test_lora_linear_takes_the_weights_of_a_linear():
    linear = nnx.Linear(4, 3, ctx=nnx.context(1))
    layer = nnx.LoRALinear(4, 3, lora_rank=2, ctx=nnx.context(0))
    layer.update_state(linear.get_state())
    np.testing.assert_array_equal(layer(X), linear(X))


def test_base_module_must_be_callable():
    with pytest.raises(TypeError, match="base_module.*callable, got Dict"):
        nnx.LoRA(4, 2, 3, base_module=nnx.Dict(), ctx=nnx.context(0))


def test_add_lora_leaves_objects_outputs_and_weights_as_they_are():
    adapted = model()
    linear, before, output = adapted.shared, adapted.get_state(), adapted(X)
    paths = nnx.add_lora(adapted, 2, ctx=nnx.context(1))
    assert paths == ["heads", "shared", "encoder/layers/0"] or set(paths) >= {"heads", "encoder/layers/0"}
    assert adapted.shared is linear is adapted.encoder.layers[1]
    assert isinstance(linear, nnx.LoRALinear)
    np.testing.assert_array_equal(adapted(X), output)
    assert adapted.get_state() - adapted.filter(nnx.LoRAParam) == before


@pytest.mark.parametrize(
    "where",
    ["encoder/layers/0", "encoder/**/0", nnx.PathMatches("encoder/layers/0"), lambda path, module: path.endswith("/0")],
    ids=["path", "glob", "filter", "function"],
)
def test_add_lora_by_path(where):
    adapted = model()
    assert nnx.add_lora(adapted, 2, where=where, ctx=nnx.context(1)) == ["encoder/layers/0"]
    assert len(adapted.filter(nnx.LoRAParam)) == 2


def test_add_lora_by_type():
    adapted = model()
    assert nnx.add_lora(adapted, 2, where=nnx.LinearGeneral, ctx=nnx.context(1)) == ["heads"]


def test_adding_lora_a_second_time_says_that_it_is_there():
    adapted = model()
    nnx.add_lora(adapted, 2, ctx=nnx.context(1))
    with pytest.raises(ValueError, match="have an adaptation already, such as .*merge_lora"):
        nnx.add_lora(adapted, 2, ctx=nnx.context(1))


def test_add_lora_that_matches_nothing_lists_the_linear_layers():
    with pytest.raises(ValueError, match="matches no linear layer.*'heads'"):
        nnx.add_lora(model(), 2, where="decoder/**", ctx=nnx.context(1))


def test_add_lora_to_a_lone_layer():
    layer = nnx.Linear(4, 3, ctx=nnx.context(0))
    assert nnx.add_lora(layer, 2, ctx=nnx.context(1)) == [""]
    assert isinstance(layer, nnx.LoRALinear)


def test_adapted_model_survives_partition_and_clone():
    adapted = model()
    nnx.add_lora(adapted, 2, ctx=nnx.context(1))
    randomize_b(adapted)
    state, moduledef = adapted.partition()
    np.testing.assert_allclose(moduledef.merge(state)(X), adapted(X), rtol=1e-5)
    np.testing.assert_allclose(adapted.clone()(X), adapted(X), rtol=1e-5)


def test_only_the_adaptation_is_trained():
    adapted = model()
    nnx.add_lora(adapted, 2, ctx=nnx.context(1))
    grads = nnx.grad(lambda model: jnp.sum(model(X) ** 2), wrt=nnx.LoRAParam)(adapted)
    assert len(grads) == 6
    assert all(path.split("/")[-1] in ("lora_a", "lora_b") for path in grads)
    assert any(jnp.any(leaf.value != 0) for leaf in grads.values())


def test_merge_lora_gives_plain_layers_with_the_same_output():
    adapted = model()
    plain = adapted.get_module_def()
    paths = nnx.add_lora(adapted, 2, alpha=4.0, ctx=nnx.context(1))
    randomize_b(adapted)
    output = adapted(X)
    assert nnx.merge_lora(adapted) == paths
    np.testing.assert_allclose(adapted(X), output, rtol=1e-4, atol=1e-4)
    assert adapted.get_module_def() == plain
    assert nnx.merge_lora(adapted) == []


def test_linear_general_over_inner_axes_is_adapted_and_merged():
    layer = nnx.LinearGeneral((2, 3), (4, 5), axis=(0, 2), ctx=nnx.context(0))
    x = normal(2, 6, 3)
    nnx.add_lora(layer, 2, ctx=nnx.context(1))
    randomize_b(layer)
    output = layer(x)
    assert output.shape == (6, 4, 5)
    nnx.merge_lora(layer)
    np.testing.assert_allclose(layer(x), output, rtol=1e-4, atol=1e-4)


def test_batched_linear_general_is_refused_before_anything_changes():
    holder = nnx.Sequence([nnx.Linear(3, 3, ctx=nnx.context(0))])
    holder.append(nnx.LinearGeneral(3, 4, batch_axis={0: 2}, ctx=nnx.context(0)))
    with pytest.raises(ValueError, match="'1' has batch axes"):
        nnx.add_lora(holder, 2, ctx=nnx.context(1))
    assert len(holder.filter(nnx.LoRAParam)) == 0


class Block(nnx.Module):
    def __init__(self, ctx):
        self.linear = nnx.Linear(4, 4, ctx=ctx)

    def __call__(self, x, _):
        return self.linear(x), None


def stack(axes, **options):
    return nnx.Scan(Block, variable_axes=axes, split_rngs="params", length=3, **options)(ctx=nnx.context(0))


def test_every_layer_of_a_stack_has_its_own_adaptation():
    layers = stack({...: 0}, metadata_params={nnx.PARTITION_NAME: "layers"})
    output = layers(X, None)[0]
    assert nnx.add_lora(layers, 2, ctx=nnx.context(1)) == ["scan_module/linear"]
    lora = layers.scan_module.linear.lora
    assert lora.lora_a.shape == (3, 4, 2) and not np.array_equal(lora.lora_a[0], lora.lora_a[1])
    assert lora.variable("lora_b").sharding == ("layers", None, "out")
    np.testing.assert_allclose(layers(X, None)[0], output, rtol=1e-5)
    randomize_b(layers)
    output = layers(X, None)[0]
    nnx.merge_lora(layers)
    np.testing.assert_allclose(layers(X, None)[0], output, rtol=1e-4, atol=1e-4)


def test_stacks_of_stacks_are_adapted():
    members = nnx.Vmap(
        lambda *, ctx: stack({...: 0}), variable_axes={...: 0}, split_rngs="params", axis_size=2, in_axes=None
    )(ctx=nnx.context(0))
    nnx.add_lora(members, 2, ctx=nnx.context(1))
    assert members.vmap_module.scan_module.linear.lora.lora_b.shape == (2, 3, 2, 4)


def test_scan_that_does_not_slice_the_adaptations_raises():
    layers = stack({nnx.Param: 0})
    nnx.add_lora(layers, 2, ctx=nnx.context(1))
    with pytest.raises(ValueError, match=r"\(3, 4, 2\), expected \(4, 2\).*nnx.LoRAParam: 0"):
        layers(X, None)


@pytest.mark.parametrize("base", [{"param_dtype": jnp.bfloat16}, {"dtype": jnp.bfloat16}], ids=str)
def test_an_adaptation_keeps_the_dtype_of_the_model(base):
    ctx = nnx.context(0)
    layer = nnx.Linear(4, 4, **base, ctx=ctx)
    heads = nnx.LinearGeneral(4, (2, 2), **base, ctx=ctx)
    around = nnx.LoRA(4, 2, 4, base_module=nnx.Linear(4, 4, **base, ctx=ctx), ctx=ctx)
    nnx.add_lora(layer, 2, ctx=ctx)
    nnx.add_lora(heads, 2, ctx=ctx)
    x = X.astype(jnp.bfloat16)
    assert [adapted(x).dtype for adapted in (layer, heads, around)] == [jnp.bfloat16] * 3

    @nnx.scan(length=2)
    def twice(layer, x, _):
        return layer(x), None

    assert twice(layer, x, None)[0].dtype == jnp.bfloat16


def test_merging_replaces_a_lora_by_its_base_module_everywhere():
    ctx = nnx.context(0)
    inner = nnx.LoRA(4, 1, 4, base_module=nnx.Linear(4, 4, ctx=ctx), ctx=ctx)
    outer = nnx.LoRA(4, 2, 4, base_module=inner, alpha=3.0, ctx=ctx)
    net = nnx.Sequence([outer, nnx.LoRA(4, 2, 4, ctx=ctx), outer])
    randomize_b(net)
    expected = net(X)
    assert sorted(nnx.merge_lora(net)) == ["0", "0/base_module"]
    assert [type(layer) for layer in net] == [nnx.Linear, nnx.LoRA, nnx.Linear]
    assert net[0] is net[2]
    np.testing.assert_allclose(net(X), expected, rtol=1e-4, atol=1e-4)


def test_a_lora_that_cannot_be_merged_is_an_error_and_nothing_changes():
    ctx = nnx.context(0)
    layer = nnx.LoRA(4, 2, 4, base_module=nnx.MLP(4, 4, 4, ctx=ctx), ctx=ctx)
    net = nnx.Sequence([nnx.LoRALinear(4, 4, lora_rank=2, ctx=ctx), layer])
    with pytest.raises(ValueError, match=r"LoRA at '1': its base_module is a MLP.*Nothing was changed"):
        nnx.merge_lora(net)
    assert isinstance(net[0], nnx.LoRALinear)
    alone = nnx.LoRA(4, 2, 4, base_module=nnx.Linear(4, 4, ctx=ctx), ctx=ctx)
    with pytest.raises(ValueError, match="the model itself.*Merge a Module that holds it"):
        nnx.merge_lora(alone)
