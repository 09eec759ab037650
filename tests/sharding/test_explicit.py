"""Layers on explicit mesh axes: how their results are split, and that gradients are split like parameters."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx


@pytest.fixture
def mesh():
    return jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


RULES = nnx.fsdp_tensor_parallel_rules()


def lora(ctx):
    return nnx.LoRA(8, 2, 4, base_module=nnx.Linear(8, 4, ctx=ctx), ctx=ctx)


LAYERS = {
    "Linear": (lambda ctx: nnx.Linear(8, 4, ctx=ctx), "float32[2@data,3,4@model]"),
    "LinearGeneral": (lambda ctx: nnx.LinearGeneral(8, (2, 4), ctx=ctx), "float32[2@data,3,2@model,4]"),
    "MLP": (lambda ctx: nnx.MLP(8, 16, 8, ctx=ctx), "float32[2@data,3,8]"),
    "MultiHeadAttention": (lambda ctx: nnx.MultiHeadAttention(2, 8, ctx=ctx), "float32[2@data,3,8]"),
    "LearnedPositionEmbed": (lambda ctx: nnx.LearnedPositionEmbed(5, 8, ctx=ctx), "float32[2@data,3,8]"),
    "Conv": (lambda ctx: nnx.Conv(8, 4, (2,), ctx=ctx), "float32[2@data,3,4@model]"),
    "LayerNorm": (lambda ctx: nnx.LayerNorm(8, ctx=ctx), "float32[2@data,3,8]"),
    "LoRA": (lora, "float32[2@data,3,4@model]"),
}


def split(x, mesh, *axes):
    return jax.device_put(x, NamedSharding(mesh, P(*axes)))


@pytest.mark.parametrize("name", LAYERS)
def test_results_keep_the_split_of_the_batch_and_of_what_the_parameters_add(mesh, name):
    build, expected = LAYERS[name]
    model = nnx.shard(build(nnx.context(0)), mesh, RULES)
    grads, y = nnx.grad(lambda model, x: (jnp.sum(model(x) ** 2), model(x)), wrt=..., has_aux=True)(
        model, split(jnp.ones((2, 3, 8)), mesh, "data")
    )
    assert str(jax.typeof(y)) == expected
    for path, leaf in model.get_state().items():
        assert jax.typeof(grads[path].value) == jax.typeof(leaf.value), path


def test_tokens_are_looked_up_and_scored_in_a_split_table(mesh):
    model = nnx.shard(nnx.Embed(6, 8, ctx=nnx.context(0)), mesh, RULES)
    assert str(jax.typeof(model.embedding)) == "float32[6@model,8@data]"
    x = model(split(jnp.zeros((2, 3), int), mesh, "data"))
    assert str(jax.typeof(x)) == "float32[2@data,3,8]"
    assert str(jax.typeof(model.attend(x))) == "float32[2@data,3,6@model]"


@pytest.mark.parametrize("broadcast_dims", [(), (1,)])
def test_dropout_keeps_the_sharding_and_the_mask_of_one_device(mesh, broadcast_dims):
    layer, x = nnx.Dropout(0.5, broadcast_dims, deterministic=False), jnp.ones((2, 3, 8))
    y = layer(split(x, mesh, "data"), ctx=nnx.context(dropout=0))
    assert str(jax.typeof(y)) == "float32[2@data,3,8]"
    assert (jax.device_get(y) == layer(x, ctx=nnx.context(dropout=0))).all()


def test_out_sharding_of_a_call_overrides_the_rules(mesh):
    layer = nnx.shard(nnx.Linear(8, 4, ctx=nnx.context(0)), mesh, RULES)
    y = layer(split(jnp.ones((2, 8)), mesh, "data"), NamedSharding(mesh, P("data", None)))
    assert str(jax.typeof(y)) == "float32[2@data,4]"


def test_an_axis_split_over_two_mesh_axes_keeps_those_that_are_free(mesh):
    layer = nnx.shard(nnx.Linear(8, 4, ctx=nnx.context(0)), mesh, [("out", ("data", "model"))])
    assert str(jax.typeof(layer.kernel)) == "float32[8,4@(data,model)]"
    assert str(jax.typeof(layer(split(jnp.ones((2, 8)), mesh, "data")))) == "float32[2@data,4@model]"


def test_ambiguous_sharding_raises_with_out_sharding(mesh):
    scores = split(jnp.ones((2, 6)), mesh, "data", "model")
    with pytest.raises(Exception, match="out_sharding"), jax.set_mesh(mesh):
        jnp.take_along_axis(scores, split(jnp.zeros((2, 1), int), mesh, "data"), -1)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        whole = nnx.with_logical_constraint(scores, ("batch", None))
        assert jnp.take_along_axis(whole, split(jnp.zeros((2, 1), int), mesh, "data"), -1).shape == (2, 1)
