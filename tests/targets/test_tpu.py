"""A few programs compiled by the real compiler for TPUs, if it is here; `compile_everything` has the others."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import nnx
from tests.targets import topologies
from tests.targets.programs import decode

# Attention


def gradient_bytes(length: int, dtype: Any = jnp.bfloat16, **options: Any) -> int:
    """The temporary bytes of the gradient of attention with 8 query heads of 64 and 2 key heads."""

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return nnx.dot_product_attention(query, key, value, **options).astype(jnp.float32).sum()

    mesh = topologies.mesh()
    shapes = [jax.ShapeDtypeStruct((1, length, heads, 64), dtype) for heads in (8, 2, 2)]
    return topologies.temporary(topologies.compiled(jax.grad(loss, (0, 1, 2)), *topologies.whole(shapes, mesh)))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(jnp.bfloat16, {"is_causal": True}), (jnp.float32, {"logits_soft_cap": 30.0})],
    ids=["splash", "blocks"],
)
def test_memory_of_attention_grows_linearly(dtype, options):
    short, long = (gradient_bytes(length, dtype, **options) for length in (2048, 8192))
    assert long < 5 * short and long < 8 * 8192 * 8192  # an eighth of the weights in float32


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_splash_attention_is_split_over_batch_and_heads(kind):
    mesh = topologies.mesh(kind=kind, data=4, model=2)
    split = NamedSharding(mesh, PartitionSpec("data", None, "model"))
    x = jax.ShapeDtypeStruct((8, 2048, 4, 64), jnp.bfloat16, sharding=split)

    def loss(x: jax.Array) -> jax.Array:
        return nnx.dot_product_attention(x, x, x, is_causal=True).astype(jnp.float32).sum()

    with nnx.logical_axis_rules([("batch", "data"), ("heads", "model")]):
        program = topologies.compiled(jax.value_and_grad(loss), x, on=mesh)
    assert "tpu_custom_call" in program.as_text()
    assert topologies.collectives(program) <= {"all-reduce"}  # of the loss


# Decoding


@pytest.mark.parametrize("in_mesh", [True, False])
@pytest.mark.parametrize(("features", "rows", "aligned"), [(64, 8, False), (64, 8, True), (128, 8, True)])
def test_decoding_never_copies_the_cache(features, rows, aligned, in_mesh):
    program, size = decode(features, rows, aligned, in_mesh=in_mesh)
    assert topologies.copies(program, size) == []
    assert topologies.temporary(program) < size  # half of an array of the cache


# Devices that are not here


class Two(nnx.Module):
    def __init__(self, *, ctx):
        self.first = nnx.Linear(256, 512, ctx=ctx)
        self.second = nnx.Linear(512, 256, ctx=ctx)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_abstract_models_are_placed_on_devices_that_are_not_here(kind):
    mesh, rules = topologies.mesh(kind=kind, data=8), nnx.fsdp_rules()
    model = nnx.eval_shape(lambda: Two(ctx=nnx.context(0)))
    assert nnx.sharding_report(model, mesh, rules).bytes_per_device < 2**18
    with jax.set_mesh(mesh):
        nnx.shard(model, None, rules)
    assert model.first.kernel.sharding == NamedSharding(mesh, PartitionSpec("data", None))


def test_arrays_on_devices_that_are_not_here_are_refused():
    mesh, rules, advice = topologies.mesh(data=8), nnx.fsdp_rules(), r"TPU v5 lite\) are not here.*nnx.eval_shape"
    build = lambda ctx: Two(ctx=ctx)  # noqa: E731
    with pytest.raises(ValueError, match=rf"(?s)nnx.shard: .*{advice}"):
        nnx.shard(build(nnx.context(0)), mesh, rules)
    with pytest.raises(ValueError, match=rf"(?s)nnx.init_sharded: .*{advice}"):
        nnx.init_sharded(build, mesh, rules, nnx.context(0))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=rf"(?s)nnx.context: .*{advice}"):
        nnx.context(0)
