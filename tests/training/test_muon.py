"""`nnx.muon_dimensions`: which parameters are matrices, and steps that are those of Muon by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

import nnx


def dimensions_of(model, **options):
    """Returns the axes of the matrices by path: those summed over and those of the result."""
    found = nnx.muon_dimensions(model, **options)(model.filter(nnx.Param))
    return {path: tuple(leaf.value) for path, leaf in found.items() if leaf.value is not None}


LAYERS = {
    "Linear": (lambda ctx: nnx.Linear(3, 4, ctx=ctx), {"kernel": ((0,), (1,))}),
    "LinearGeneral": (
        lambda ctx: nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), ctx=ctx),
        {"kernel": ((0, 1), (2, 3))},
    ),
    "Conv": (lambda ctx: nnx.Conv(3, 4, (5, 5), ctx=ctx), {"kernel": ((0, 1, 2), (3,))}),
    "Embed": (lambda ctx: nnx.Embed(8, 4, ctx=ctx), {}),
    "LayerNorm": (lambda ctx: nnx.LayerNorm(4, ctx=ctx), {}),
    "MoE": (
        lambda ctx: nnx.MoE(4, 8, 3, 1, ctx=ctx),
        {name: ((1,), (2,)) for name in ("gate", "up", "down")},
    ),
    "attention": (
        lambda ctx: nnx.MultiHeadAttention(2, 4, ctx=ctx),
        {"out/kernel": ((0, 1), (2,))} | {f"{name}/kernel": ((0,), (1, 2)) for name in ("query", "key", "value")},
    ),
    "a stack": (
        lambda ctx: nnx.Scan(nnx.Linear, variable_axes={nnx.Param: 0}, split_rngs="params", length=3)(4, 4, ctx=ctx),
        {"scan_module/kernel": ((1,), (2,))},
    ),
}


@pytest.mark.parametrize(("build", "expected"), LAYERS.values(), ids=LAYERS)
def test_each_layer_says_what_its_matrices_are(build, expected):
    assert dimensions_of(build(nnx.context(0))) == expected


class OwnLayer(nnx.Module):
    logical_axes = {"declared": ("in", "out"), "scale": ("out",)}

    def __init__(self):
        self.matrix = nnx.Param(jnp.ones((3, 4)))
        self.head = nnx.Param(jnp.ones((3, 4)), ("embed", "vocab"))
        self.declared = nnx.Param(jnp.ones((2, 3, 4)))
        self.scale = nnx.Param(jnp.ones((2, 4)))
        self.cube = nnx.Param(jnp.ones((2, 3, 4)))
        self.rows = nnx.BatchStat(jnp.ones((3, 4)))


def test_an_own_module_trains_its_matrices_unless_names_say_otherwise():
    assert dimensions_of(OwnLayer()) == {"matrix": ((0,), (1,)), "declared": ((1,), (2,))}
    assert dimensions_of(OwnLayer(), where=nnx.Not(nnx.PathMatches("matrix"))) == {"declared": ((1,), (2,))}


def test_a_tied_table_is_no_matrix():
    embed, linear = nnx.Embed(4, 4, ctx=nnx.context(0)), nnx.Linear(4, 4, ctx=nnx.context(1))
    table = nnx.Ref(embed.variable("embedding"))
    embed.embedding = table
    linear.kernel = table
    assert dimensions_of(nnx.Sequence([embed, linear])) == {}


def test_the_head_of_a_decoder_is_trained_by_adam():
    config = nnx.models.DecoderConfig(
        model_type="llama", vocab_size=16, features=8, hidden_features=8, num_layers=1, num_heads=2, max_length=4
    )
    model = nnx.eval_shape(lambda ctx: nnx.models.Decoder(config, ctx=ctx), nnx.context(0))
    paths = set(dimensions_of(model))
    assert any(path.endswith("query/kernel") for path in paths)
    assert not any("head/" in path or "embed" in path or "norm" in path for path in paths)


def test_a_step_is_that_of_muon_and_adamw_by_hand():
    model = nnx.Sequence([nnx.Embed(8, 4, ctx=nnx.context(0)), nnx.Linear(4, 6, ctx=nnx.context(1))])
    tx = optax.contrib.muon(0.1, muon_weight_dimension_numbers=nnx.muon_dimensions(model), adam_learning_rate=0.01)
    params = {path: leaf.value for path, leaf in model.filter(nnx.Param).items()}
    by_hand = optax.contrib.muon(
        0.1,
        muon_weight_dimension_numbers={path: MuonDimensionNumbers() if path == "1/kernel" else None for path in params},
        adam_learning_rate=0.01,
    )
    state, optimizer = by_hand.init(params), nnx.Optimizer(model, tx)
    tokens = jnp.arange(8)

    def loss(model):
        return jnp.mean((model(tokens) - 1.0) ** 2)

    @nnx.jit
    def step(optimizer):
        grads = nnx.grad(loss)(optimizer.model)
        optimizer.update(grads)
        return {path: leaf.value for path, leaf in grads.items()}

    update = jax.jit(by_hand.update)
    for _ in range(2):
        updates, state = update(step(optimizer), state, params)
        params = optax.apply_updates(params, updates)
    for path, leaf in model.filter(nnx.Param).items():
        np.testing.assert_allclose(leaf.value, params[path], atol=1e-6)
    assert step.trace_count == 1
