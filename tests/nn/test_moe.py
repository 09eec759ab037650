"""Mixtures of experts: what a loop over the experts computes, at the cost of the selected ones."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.checks import AS_OUTSIDE_THE_TESTS

EXPERTS, SELECTED = 6, 2


def make(seed: int = 0, **options) -> nnx.MoE:
    return nnx.MoE(8, 12, EXPERTS, SELECTED, ctx=nnx.context(seed), **options)


def inputs(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((*shape, 8)), jnp.float32)


def weights_of_all(layer: nnx.MoE, x: jax.Array) -> jax.Array:
    """The weight of every expert for every token, 0 for those that are not selected."""
    logits = x @ layer.router + (0 if layer.router_bias is None else layer.router_bias)
    scores = jax.nn.softmax(logits) if layer.scores == "softmax" else jax.nn.sigmoid(logits)
    least = jnp.sort(scores, axis=-1)[..., -layer.num_selected, None]
    weights = jnp.where(scores >= least, scores, 0.0)
    return weights / weights.sum(-1, keepdims=True) if layer.normalize else weights


def looped(layer: nnx.MoE, x: jax.Array) -> jax.Array:
    """Every expert on every token, one after the other."""
    weights, out = weights_of_all(layer, x), 0.0
    biases = [layer.gate_bias, layer.up_bias, layer.down_bias]
    gate_bias, up_bias, down_bias = (jnp.zeros(layer.num_experts) if bias is None else bias for bias in biases)
    for e in range(layer.num_experts):
        weight = weights[..., e, None]
        read, weight = (x * weight, weight > 0) if layer.weigh_inputs else (x, weight)
        gate, up = read @ layer.gate[e] + gate_bias[e], read @ layer.up[e] + up_bias[e]
        hidden = layer.gated_activation(gate, up) if layer.gated_activation else layer.activation(gate) * up
        out = out + weight * (hidden @ layer.down[e] + down_bias[e])
    return out if layer.shared is None else out + layer.shared(x)


def close(out, expected) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), out, expected)


def clipped(gate: jax.Array, up: jax.Array) -> jax.Array:
    return (jnp.clip(up, -0.5, 0.5) + 1) * jnp.minimum(gate, 0.5)


BIASES = {"use_bias": True, "use_router_bias": True, "bias_init": nnx.initializers.normal(0.5)}
OPTIONS = {
    "default": {},
    "sigmoid, weighted inputs": {"scores": "sigmoid", "weigh_inputs": True},
    "shared experts": {"num_shared": 2, "scores": "sigmoid", "normalize": False},
    "another activation and width": {"activation": nnx.gelu, "out_features": 5},
    "biases": {**BIASES, "out_features": 5},
    "biases, gated activation, shared experts": {**BIASES, "gated_activation": clipped, "num_shared": 1},
}


@nnx.jit
def both(layer, x):
    return layer(x), looped(layer, x)


CASES = [("default", (3,)), ("default", (400,)), *((name, (7, 13)) for name in OPTIONS if name != "default")]


@pytest.mark.parametrize("name, tokens", CASES)
def test_moe_equals_a_loop_over_the_experts(name, tokens):
    close(*both(make(**OPTIONS[name]), inputs(*tokens)))


@pytest.mark.parametrize("tokens", [3, 400], ids=["few", "many"])
@pytest.mark.parametrize("options", [{}, {**BIASES, "gated_activation": clipped}], ids=["default", "biases"])
def test_gradients_are_those_of_a_loop_over_the_experts(tokens, options):
    layer, x, target = make(num_shared=1, **options), inputs(tokens), inputs(tokens, seed=1)

    def gradient(function, layer, x):
        return nnx.grad(lambda layer, x: jnp.mean((function(layer, x) - target) ** 2), argnums=(0, 1))(layer, x)

    @nnx.jit
    def gradients(layer, x):
        return gradient(lambda layer, x: layer(x), layer, x), gradient(looped, layer, x)

    close(*gradients(layer, x))


def test_no_token_is_dropped_if_all_choose_the_same_experts():
    layer, x = make(), jnp.abs(inputs(300))
    layer.router = jnp.zeros((8, EXPERTS)).at[:, 4].set(9.0).at[:, 1].set(5.0)
    assert (weights_of_all(layer, x)[:, [1, 4]] > 0).all()
    close(*both(layer, x))


def test_the_weights_are_a_softmax_over_the_selected_scores():
    layer, x = make(**BIASES), inputs(50)
    layer.down = jnp.zeros_like(layer.down)  # so that the biases of `down` are the outputs of the experts
    scores, chosen = jax.lax.top_k(x @ layer.router + layer.router_bias, SELECTED)
    expected = jnp.einsum("tk,tko->to", jax.nn.softmax(scores), layer.down_bias[chosen])
    close(layer(x), expected)


def test_half_precision_sums_the_gradients_of_biases_in_float32():
    options = {"use_bias": True, "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    layer, x = nnx.MoE(8, 12, 64, 1, ctx=nnx.context(0), **options), jnp.ones((400, 8), jnp.bfloat16)
    grads = nnx.jit(nnx.grad(lambda layer, x: layer(x).astype(jnp.float32).sum()))(layer, x)
    # All tokens choose the same expert, each in its own block. One by one, a sum in bfloat16 would stop at 256.
    np.testing.assert_array_equal(grads["down_bias"].value.astype(jnp.float32).max(0), 400)


def test_forward_mode_derivatives_work():
    layer, x = make(), inputs(9)
    tangents = jax.jit(lambda x: jax.jvp(lambda x: (layer(x, update_stats=False), looped(layer, x)), (x,), (x,)))
    for ours, expected in tangents(x):
        close(ours, expected)


def test_the_router_is_exact_in_half_precision():
    layer, x = make(dtype=jnp.bfloat16), inputs(64).astype(jnp.bfloat16)
    out, expected = nnx.jit(lambda layer, x: (layer(x), looped(layer, x.astype(jnp.float32))))(layer, x)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=0.05)  # another expert would be far off


def test_an_empty_batch_has_an_empty_output_and_finite_gradients():
    layer = make()
    assert layer(inputs(0, 3)).shape == (0, 3, 8)
    grads = nnx.grad(lambda layer: layer(inputs(0)).sum())(layer)
    assert all(np.all(np.isfinite(leaf.value)) for leaf in grads.values())


# Cost


def cost(function, *arguments) -> float:
    return jax.jit(function).lower(*arguments).compile(AS_OUTSIDE_THE_TESTS).cost_analysis()["flops"]


@pytest.mark.parametrize("experts, selected, tokens", [(64, 2, 512), (64, 8, 16)])
def test_its_operations_are_those_of_the_selected_experts(experts, selected, tokens):
    layer = nnx.MoE(64, 96, experts, selected, update_stats=False, ctx=nnx.context(0))
    state, moduledef = layer.partition()
    x, needed = jnp.ones((tokens, 64)), tokens * selected * 3 * 2 * 64 * 96

    def forward(state, x):
        return moduledef.merge(state)(x).sum()

    assert needed <= cost(forward, state, x) <= 1.3 * needed
    # A product has two gradients, each of which costs as much as the product.
    assert 3 * needed <= cost(jax.value_and_grad(forward, argnums=(0, 1)), state, x) <= 1.3 * 3 * needed


def dot_operations(function, *arguments) -> int:
    """The operations of the matrix products in a compiled program; conversions and other arithmetic do not count."""
    text, total = jax.jit(function).lower(*arguments).compile().as_text(), 0
    shapes = {name: sizes(shape) for name, shape in re.findall(r"(%[\w.-]+) = \w+\[([\d,]*)\]", text)}
    for out, left, axes in re.findall(r"= \w+\[([\d,]*)\]\S* dot\((%[\w.-]+).*?lhs_contracting_dims={([\d,]*)}", text):
        total += 2 * math.prod(sizes(out)) * math.prod(shapes[left][axis] for axis in sizes(axes))
    return total


def sizes(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def test_few_tokens_in_half_precision_need_no_more_products_than_their_experts():
    if jax.default_backend() != "cpu":
        pytest.skip("about CPUs")
    # XLA counts the conversion of each gathered number as an operation, about as many as the products of one row have.
    options = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "update_stats": False}
    layer = nnx.MoE(64, 96, 64, 8, ctx=nnx.context(0), **options)
    (state, moduledef), x = layer.partition(), jnp.ones((8, 64), jnp.bfloat16)
    needed = 8 * 8 * 3 * 2 * 64 * 96

    def forward(state, x):
        return moduledef.merge(state)(x).astype(jnp.float32).sum()

    assert needed <= dot_operations(forward, state, x) <= 1.3 * needed
    # The gradient of a kernel is a product of two vectors per token, for which the compiler needs no dot.
    assert 2 * needed <= dot_operations(jax.value_and_grad(forward, argnums=(0, 1)), state, x) <= 1.3 * 3 * needed


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_program_of_a_large_layer_has_no_more_operations_on_any_platform(platform):
    if jax.default_backend() == "gpu":
        pytest.skip("XLA does not count for a GPU that is here, nor the operations of a kernel")
    options = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "update_stats": False}
    layer = nnx.eval_shape(lambda: nnx.MoE(1024, 4096, 64, 8, ctx=nnx.context(0), **options))
    (state, moduledef), x = layer.partition(), jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16)
    traced = jax.jit(jax.grad(lambda state, x: moduledef.merge(state)(x).sum(), argnums=(0, 1))).trace(state, x)
    # Counted before it is compiled: XLA does not count the operations of cuBLAS.
    operations = traced.lower(lowering_platforms=(platform,)).cost_analysis()["flops"]
    needed = 3 * 8192 * 8 * 6 * 1024 * 4096
    assert 0.9 * needed <= operations <= 1.3 * needed


def test_a_ragged_product_would_compute_every_expert_on_a_cpu():
    if jax.default_backend() != "cpu":
        pytest.skip("about CPUs")
    x, kernels, sizes = jnp.ones((64, 16)), jnp.ones((8, 16, 16)), jnp.full(8, 8)
    assert cost(jax.lax.ragged_dot, x, kernels, sizes) > 7 * 2 * 64 * 16 * 16  # if this fails, use it


# Losses


def expected_losses(layer, x):
    logits = x @ layer.router
    probabilities = jax.nn.softmax(logits)
    chosen = (weights_of_all(layer, x) > 0).mean(axis=0) / layer.num_selected
    balance = layer.num_experts * jnp.sum(chosen * probabilities.mean(axis=0))
    return nnx.RouterLosses(balance, jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2))


def test_losses_are_stored_in_variables():
    layer, x = make(), inputs(50)
    assert set(layer.filter(nnx.Loss)) == set(layer.filter("losses")) == {"load_balancing_loss", "z_loss"}
    close(nnx.router_losses(layer), nnx.RouterLosses(0.0, 0.0))
    layer(x)
    close(nnx.router_losses(layer), expected_losses(layer, x))


def test_an_even_distribution_has_a_balance_of_one():
    layer = make()
    layer.router = jnp.zeros((8, EXPERTS))
    layer(inputs(12))
    close(layer.load_balancing_loss, 1.0)
    close(layer.z_loss, np.log(EXPERTS) ** 2)


def test_evaluation_stores_no_losses():
    layer, x = make().eval(), inputs(5)
    close(nnx.jit(lambda layer, x: layer(x))(layer, x), looped(layer, x))
    assert layer.z_loss == 0
    layer(x, update_stats=True)
    assert layer.z_loss > 0
    with pytest.raises(ValueError, match="update_stats"):
        make(update_stats=None)(x)
    make(update_stats=None)(x, ctx=nnx.context(flags={"update_stats": False}))


class Stack(nnx.Module):
    def __init__(self, *, ctx):
        self.moe = nnx.MoE(8, 12, EXPERTS, SELECTED, ctx=ctx)

    def __call__(self, x, _):
        return x + self.moe(x), None


def by_hand(kernels, x):
    moduledef = make().get_module_def()
    rest, total = make().filter(nnx.Loss), 0.0
    for i in range(3):
        layer = moduledef.merge(nnx.State({name: nnx.Param(kernel[i]) for name, kernel in kernels.items()}), rest)
        losses = expected_losses(layer, x)
        total, x = total + losses.load_balancing + 0.1 * losses.z, x + looped(layer, x)
    return total


def test_losses_and_their_gradients_come_out_of_remat_scan_grad_and_jit():
    model = nnx.Scan(nnx.Remat(Stack), variable_axes={...: 0}, split_rngs="params", length=3)(ctx=nnx.context(0))
    inner = model.scan_module.remat_module
    x = inputs(10)

    def loss(model, x):
        model(x, None)
        losses = nnx.router_losses(model)
        return losses.load_balancing + 0.1 * losses.z

    kernels = {name: getattr(inner.moe, name) for name in ("router", "gate", "up", "down")}
    expected, expected_grads = jax.jit(jax.value_and_grad(by_hand))(kernels, x)
    value, grads = nnx.jit(nnx.value_and_grad(loss))(model, x)
    close(value, expected)
    close({name: grads[f"scan_module/remat_module/moe/{name}"].value for name in kernels}, expected_grads)
    assert inner.moe.z_loss.shape == (3,) and (inner.moe.z_loss > 0).all()


def test_balancing_spreads_the_tokens():
    layer, x = make(), jnp.abs(inputs(200))
    layer.router = layer.router.at[:, 0].add(1.0)

    def balance(layer):
        layer(x)
        return nnx.router_losses(layer).load_balancing

    @nnx.jit
    def step(layer):
        loss, grads = nnx.value_and_grad(balance)(layer)
        layer.update_state(jax.tree.map(lambda w, g: w - 0.3 * g, layer.filter(nnx.Param), grads))
        return loss

    values = [step(layer) for _ in range(30)]
    assert values[-1] < 0.8 * values[0]


def test_changing_dtypes_leaves_the_losses_alone():
    layer = make()
    nnx.set_dtypes(layer, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    assert layer.gate.dtype == layer.router.dtype == jnp.bfloat16 and layer.z_loss.dtype == jnp.float32
    step = nnx.jit(lambda layer, x: layer(x))
    step(layer, inputs(4))
    assert step(layer, inputs(4)).dtype == jnp.bfloat16 and step.trace_count == 1


# Names and errors


def test_axes_have_names():
    specs = nnx.get_partition_spec(nnx.name_axes(make(num_shared=1, **BIASES)))
    assert specs["gate"] == specs["up"] == jax.P("expert", "embed", "mlp")
    assert specs["down"] == jax.P("expert", "mlp", "embed")
    assert specs["router"] == jax.P("embed", None)
    assert specs["router_bias"] == jax.P(None)
    assert specs["gate_bias"] == specs["up_bias"] == jax.P("expert", "mlp")
    assert specs["down_bias"] == jax.P("expert", "embed")
    assert specs["shared/up/kernel"] == jax.P("embed", "mlp")


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ((4, 5), {}, r"num_selected within 1\.\.num_experts \(4\), got 5"),
        ((4, 0), {}, "got 0"),
        ((4, 2), {"scores": "relu"}, "'softmax' or 'sigmoid', got 'relu'"),
        ((4, 2), {"implementation": "mosaic"}, "'triton', 'xla' or None, got 'mosaic'"),
        ((4, 2), {"capacity_factor": 0.5}, "capacity_factor >= 1, got 0.5"),
        ((4, 2), {"activation": nnx.relu, "gated_activation": clipped}, "MoE: `gated_activation` replaces .*relu"),
    ],
)
def test_wrong_settings_are_errors(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        nnx.MoE(8, 8, *arguments, ctx=nnx.context(0), **options)


def test_biases_that_are_not_split_like_their_kernels_are_refused():
    layer = make(**BIASES)
    layer.gate_bias = layer.gate_bias[:3]
    with pytest.raises(ValueError, match="kernels have 6 experts and the biases 3. Inside a shard_map"):
        layer(inputs(4))


def test_a_model_without_routers_has_no_router_losses():
    with pytest.raises(ValueError, match="no nnx.MoE in this Linear"):
        nnx.router_losses(nnx.Linear(2, 2, ctx=nnx.context(0)))
