"""The mixture: the outputs of the experts of each token, weighted and added up, on one device or on several."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.lax import PrecisionLike

from nnx.nn.activations import silu
from nnx.nn.mlp import GatedActivation
from nnx.nn.moe.expert_parallel import exchange
from nnx.nn.moe.grouped import (
    Blocks,
    Implementation,
    block_dots,
    choose_implementation,
    from_blocks,
    make_blocks,
    to_blocks,
)
from nnx.nn.moe.routing import ExpertGroups, RouterLosses, Scores, route
from nnx.nn.quantized.quantized import weight_dtype
from nnx.nn.support.settings import Hook, cast, compiled_body, infer_dtype, statistics_dtype

UNSPLIT_BIAS = (
    "MoE: the kernels have {kernels} experts and the biases {biases}. Inside a shard_map over `expert_axis`, split the "
    "biases of the experts (gate_bias, up_bias, down_bias) along with their kernels (gate, up, down)."
)


class Kernels(NamedTuple):
    """The kernels of all experts, from the input to gates and values, and back; or their scales, or their biases."""

    gate: Any
    up: Any
    down: Any


def _experts(
    x: jax.Array,
    experts: jax.Array,
    kernels: Kernels,
    scales: Kernels,
    biases: Kernels,
    *,
    precision: PrecisionLike,
    implementation: Implementation | None,
    activation: Callable[[jax.Array], jax.Array],
    gated_activation: GatedActivation | None,
) -> jax.Array:
    """Applies to each row `[rows, features]` its expert `[rows]`; rows with a number past the last return zeros."""
    way = choose_implementation(x, kernels, precision, scales, implementation)
    blocks = make_blocks(experts, kernels.gate.shape[0], way)

    def project(x: jax.Array, *names: str) -> tuple[jax.Array, ...]:
        """Multiplies the blocks with those of the kernels, and adds their biases."""
        used, scaled, added = ([getattr(each, name) for name in names] for each in (kernels, scales, biases))
        products = block_dots(x, used, blocks, precision, scaled, way)
        return tuple(_with_bias(out, bias, used[0], blocks) for out, bias in zip(products, added, strict=True))

    gated, raised = (checkpoint_name(out, "mlp_hidden") for out in project(to_blocks(x, blocks, way), "gate", "up"))
    hidden = activation(gated) * raised if gated_activation is None else gated_activation(gated, raised)
    (out,) = project(hidden, "down")
    return from_blocks(out, blocks, way)


def _with_bias(out: jax.Array, bias: jax.Array | None, kernels: jax.Array, blocks: Blocks) -> jax.Array:
    """Adds to the blocks `[blocks, size, features]` the bias of their expert, if experts have any."""
    if bias is None:
        return out
    if bias.shape[0] != kernels.shape[0]:
        raise ValueError(UNSPLIT_BIAS.format(kernels=kernels.shape[0], biases=bias.shape[0]))
    # The gradient of gathering is a sum over the blocks of an expert. The conversions make it a sum in float32.
    wide = cast(bias, statistics_dtype(bias.dtype))
    return out + cast(wide.at[blocks.groups].get(mode="promise_in_bounds"), out.dtype)[:, None]


@compiled_body
def mixture(
    x: jax.Array,
    router: jax.Array,
    router_bias: jax.Array | None,
    kernels: Kernels,
    scales: Kernels,
    biases: Kernels,
    correction: jax.Array | None = None,
    *,
    num_selected: int,
    scores: Scores,
    normalize: bool,
    groups: ExpertGroups | None,
    weight_scale: float,
    dtype: Any,
    param_dtype: Any,
    precision: PrecisionLike,
    implementation: Implementation | None,
    axis: str | None,
    capacity_factor: float,
    weigh_inputs: bool,
    activation: Hook[Callable[[jax.Array], jax.Array]] = silu,
    gated_activation: Hook[GatedActivation | None] = None,
) -> tuple[jax.Array, RouterLosses]:
    """Returns the weighted outputs of the experts of each token, and the router's losses.

    With an `axis`, this runs on each of its devices, with the tokens and experts that the device has.
    """
    routing, losses = route(
        x, router, router_bias, num_selected, scores, normalize, axis, correction, groups, weight_scale
    )
    x = cast(x, infer_dtype((x, *floats_of(kernels, scales, biases, param_dtype)), dtype))
    rows, choices = jnp.repeat(x, num_selected, axis=0), routing.experts.reshape(-1)  # [tokens * num_selected, …]
    if weigh_inputs:
        rows = rows * cast(routing.weights, rows.dtype).reshape(-1, 1)
    run = partial(
        _experts,
        kernels=kernels,
        scales=scales,
        biases=biases,
        precision=precision,
        implementation=implementation,
        activation=activation,
        gated_activation=gated_activation,
    )
    if axis is None:
        out = run(rows, choices)
    else:
        out = exchange(run, rows, choices, kernels.gate.shape[0], axis, capacity_factor)
    out = out.reshape(*routing.weights.shape, -1)
    summed = out.sum(axis=1) if weigh_inputs else jnp.einsum("tko,tk->to", out, cast(routing.weights, out.dtype))
    return checkpoint_name(summed, "mlp_out"), losses


def floats_of(kernels: Kernels, scales: Kernels, biases: Kernels, param_dtype: Any) -> tuple[Any, ...]:
    """Returns the arrays that decide the dtype of the computation: kernels (or their scales), and biases."""
    weights = (
        kernel if scale is None else cast(scale, weight_dtype(scale, param_dtype))
        for kernel, scale in zip(kernels, scales, strict=True)
    )
    return *weights, *biases
