"""Every layer, the published models, generation and training, compiled by the real compiler for TPUs: `make tpu`.

This takes minutes, so pytest does not find it by itself.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

import nnx
from tests.models.published import ALL_GOLDENS, GOLDENS, golden_arrays, golden_directory
from tests.nn.registry import LAYERS
from tests.targets import topologies
from tests.targets.pages import PAGES, compile_page
from tests.targets.programs import decode

# Attention


@pytest.mark.parametrize("features", [64, 128, 192, 256])
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "local_window_size": (500, 0), "logits_soft_cap": 9.0}])
def test_splash_attention_compiles(features, options):
    x = topologies.whole(jax.ShapeDtypeStruct((2, 1024, 4, features), jnp.bfloat16), topologies.mesh())
    lengths = topologies.whole(jax.ShapeDtypeStruct((2,), jnp.int32), topologies.mesh())

    def loss(x: jax.Array, lengths: jax.Array) -> jax.Array:
        options["key_value_seq_lengths"] = lengths
        return nnx.dot_product_attention(x, x, x, implementation="splash", **options).astype(jnp.float32).sum()

    topologies.compiled(jax.grad(loss), x, lengths)


@pytest.mark.parametrize(("features", "rows", "aligned"), [(64, 100, False), (128, 8, False), (96, 8, False)])
def test_decoding_never_copies_the_cache(features, rows, aligned):
    program, size = decode(features, rows, aligned)
    assert topologies.copies(program, size) == []
    assert topologies.temporary(program) < size


# Layers and models


@pytest.mark.parametrize("entry", LAYERS, ids=lambda entry: entry.name)
def test_layers_and_their_gradients_compile(entry):
    mesh = topologies.mesh()
    layer = entry.build()
    pure = nnx.Module.partition(layer) if isinstance(layer, nnx.Module) else layer
    inputs = entry.sample(*((2,) if entry.leading else ()))
    floats = tuple(i for i, x in enumerate(inputs) if jnp.issubdtype(x.dtype, jnp.floating))

    def run(pure: Any, *inputs: Any) -> Any:
        return entry.run(pure.merge() if isinstance(pure, nnx.Pure) else pure, *inputs)

    def loss(pure: Any, *inputs: Any) -> Any:
        return jnp.sum(run(pure, *inputs).astype(jnp.float32))

    arguments = topologies.whole((pure, *inputs), mesh)
    topologies.compiled(run, *arguments)
    if entry.differentiable and floats:
        topologies.compiled(jax.grad(loss, tuple(i + 1 for i in floats)), *arguments)


@pytest.mark.parametrize("name", GOLDENS)
def test_decoders_train_and_write(name):
    mesh = topologies.mesh()
    model = nnx.models.from_pretrained(golden_directory(name), abstract=True)
    pure = topologies.whole(nnx.Module.partition(model), mesh)
    tokens = topologies.whole(jax.ShapeDtypeStruct((2, 16), jnp.int32), mesh)

    def loss(pure: Any, tokens: jax.Array) -> jax.Array:
        return nnx.cross_entropy(pure.merge()(tokens[:, :-1]), tokens[:, 1:])

    def write(pure: Any, tokens: jax.Array) -> jax.Array:
        return nnx.generate(pure.merge(), tokens, max_new_tokens=4, temperature=0.0)

    topologies.compiled(jax.grad(loss, allow_int=True), pure, tokens)
    if model.config.causal:
        topologies.compiled(write, pure, tokens)


@pytest.mark.parametrize("name", sorted(set(ALL_GOLDENS) - set(GOLDENS)))
def test_other_models_compile(name):
    mesh = topologies.mesh()
    model = nnx.models.from_pretrained(golden_directory(name), abstract=True)
    inputs = topologies.whole(jax.tree.map(jnp.asarray, golden_arrays(name)[0]), mesh)
    pure = topologies.whole(nnx.Module.partition(model), mesh)
    topologies.compiled(lambda pure, inputs: jax.tree.leaves(pure.merge()(**inputs)), pure, inputs)


# Meshes


RULES = {
    "data parallelism": (nnx.data_parallel_rules(), {"data": 8}, {"all-reduce"}),
    # What the lookup of tokens finds is split by features, and exchanged for what is split by rows.
    "FSDP": (nnx.fsdp_rules(), {"data": 8}, {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}),
    "tensor parallelism": (nnx.tensor_parallel_rules(), {"model": 8}, {"all-reduce", "all-gather"}),
    "both": (
        nnx.fsdp_tensor_parallel_rules(),
        {"data": 4, "model": 2},
        {"all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all"},
    ),
}


SMALL = {
    **{"features": 256, "hidden_features": 512, "num_heads": 8, "num_kv_heads": 8, "num_layers": 2},
    "vocab_size": 512,
}
ONE_BILLION = {
    **{"features": 2048, "hidden_features": 8192, "num_heads": 32, "num_kv_heads": 8, "num_layers": 16},
    "vocab_size": 128256,
}


def train_step(mesh: Any, rules: Any, length: int = 64, rows: int = 16, sizes: dict[str, int] = SMALL) -> Any:
    """The compiled step of a Llama with Adam."""
    config = nnx.models.DecoderConfig(model_type="llama", max_length=length, **sizes)

    @nnx.jit(donate_argnums=0)
    def step(optimizer: Any, tokens: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: nnx.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]))(
            optimizer.model
        )
        optimizer.update(grads)
        return loss

    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        build = lambda ctx: nnx.models.Decoder(config, dtype=jnp.bfloat16, scan_layers=True, remat=True, ctx=ctx)  # noqa: E731
        model = nnx.eval_shape(lambda: build(nnx.context(0)))
        optimizer = nnx.shard(nnx.Optimizer(model, optax.adam(1e-3)), mesh, rules)
        tokens = jax.ShapeDtypeStruct(
            (rows, length + 1), jnp.int32, sharding=nnx.logical_to_mesh_sharding(PartitionSpec("batch"), mesh, rules)
        )
        return topologies.optimized(step.lower(optimizer, tokens))


@pytest.mark.parametrize("topology", [topologies.V5E, topologies.LARGER])
@pytest.mark.parametrize("name", RULES)
def test_rules_mean_their_collectives(name, topology):
    rules, axes, expected = RULES[name]
    program = train_step(topologies.mesh(topology, **axes), rules)
    found = topologies.collectives(program)
    assert found and found <= expected, found


def test_a_billion_parameters_train_at_8k_tokens_per_chip():
    program = train_step(topologies.mesh(data=8), nnx.fsdp_rules(), 8192, 8, ONE_BILLION)
    assert topologies.temporary(program) < 6 * 2**30  # without splash attention, 16 GiB: more than the chip has
    assert "tpu_custom_call" in program.as_text()


@pytest.mark.parametrize("page", PAGES)
def test_pages_about_many_devices_compile(page):
    assert compile_page(page) > 0
