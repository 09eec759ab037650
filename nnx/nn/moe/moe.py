"""`MoE`: a mixture of experts, of which every token uses only a few.

The *router* scores all *experts* for each token. The token goes to those with the highest scores, and its output is
the sum of theirs, weighted by the scores. No token is ever dropped, however many choose the same expert. *Shared
experts* are used by every token.

Nothing in this makes the router use all experts. Two *router losses* do, if a training loss includes them: the layer
stores them in Variables of type `Loss`, and `router_losses` adds them up over a model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.module import Module
from nnx.core.variables.variables import Loss
from nnx.nn.activations import silu
from nnx.nn.mlp import GatedActivation, GatedMLP, check_activations
from nnx.nn.moe.expert_parallel import manual_axis, on_each_device
from nnx.nn.moe.grouped import Implementation
from nnx.nn.moe.mixture import Kernels, floats_of, mixture
from nnx.nn.moe.routing import ExpertGroups, RouterLosses, Scores
from nnx.nn.support.checks import check_last_axis, check_sizes
from nnx.nn.support.draws import fan_in_initializer
from nnx.nn.support.parameters import (
    AxisNames,
    InitializerLike,
    default_bias_init,
    default_kernel_init,
    make_param,
)
from nnx.nn.support.settings import (
    as_dtype,
    as_optional_dtype,
    cast,
    infer_dtype,
    resolve_mode,
)

WRONG_SELECTION = "MoE: expected num_selected within 1..num_experts ({experts}), got {got!r}."
WRONG_GROUPS = (
    "MoE: expected groups=ExpertGroups(count, selected) with a count that divides num_experts={experts} and groups "
    "enough for num_selected experts, got {got!r}."
)
UNKNOWN_SCORES = "MoE: expected scores to be 'softmax' or 'sigmoid', got {got!r}."
UNKNOWN_IMPLEMENTATION = "MoE: expected implementation to be 'triton', 'xla' or None, got {got!r}."
WRONG_CAPACITY = "MoE: expected a capacity_factor >= 1, got {got!r}."
NOT_DIVISIBLE = (
    "MoE: num_experts={experts} cannot be divided by the mesh axis {axis!r} of size {size}. Choose a mesh on which "
    "each device holds the same number of experts, or build the layer without `expert_axis`."
)
NO_MOE = "nnx.router_losses: there is no nnx.MoE in this {model}."

# Of the three axes, the first numbers the experts; it is not an input.
_expert_init: InitializerLike = fan_in_initializer(1.0, "truncated_normal", batch_axis=0)


class MoE(Module):
    """A mixture of gated feed-forward experts; shape `(..., in_features) -> (..., out_features)`.

    Each token is routed to `num_selected` of the experts, and none is dropped. Only their products are computed, so the
    cost does not grow with the number of experts. (Tokens are padded to blocks, which adds at most 25 %.)

    Args:
        in_features: the size of the input's last axis.
        hidden_features: the number of hidden features of each expert.
        num_experts: the number of experts to choose from.
        num_selected: the number of experts that each token uses.
        out_features: the size of the output's last axis; `in_features` by default.
        num_shared: the number of experts that every token uses in addition.
        shared_features: the number of hidden features of the shared experts; by default, those of as many others.
        use_shared_gate: whether their output is multiplied by a gate, the sigmoid of a learned product with the input.
        scores: "softmax" if the experts compete for a token, "sigmoid" if each is scored by itself.
        normalize: whether the weights of the selected experts are divided by their sum.
        weight_scale: a number that multiplies these weights.
        weigh_inputs: whether the weights multiply what the experts read instead of what they return.
        groups: the groups of experts of which a token uses a few, see `ExpertGroups`.
        use_correction: whether there is a bias that takes part in choosing experts but not in their weights. Training
            sets it so that all experts are used; it has no gradient.
        activation: the activation of the gates.
        gated_activation: a function of gates and values, in place of `activation(gate) * up`.
        use_bias: whether the three products of every expert add biases.
        use_router_bias: whether the router adds a bias to its scores, before they become probabilities.
        update_stats: whether a call stores the router's losses; `None` to decide in the call or by the Context's flag.
            `model.train()` turns it on, `model.eval()` off.
        expert_axis: the mesh axis over which experts are distributed, if there is a mesh that has it. Tokens are then
            sent to the devices of their experts and back.
        capacity_factor: the number of tokens that a device sends to another at once, relative to an even distribution.
            If there are more, they are sent in further rounds.
        dtype: the computation dtype; by default, the dtype that input and parameters promote to. The router always
            computes in at least float32.
        param_dtype: the dtype in which the parameters are stored.
        precision: the precision of the experts' products, see `jax.lax.Precision`.
        implementation: "triton" for a GPU kernel that reads the experts in place, "xla" for batched products of copies.
            By default, the kernel is used on a single GPU (H100 or later), if there are enough tokens and the precision
            is the default one. It can be differentiated in reverse mode only: `nnx.jvp` and `nnx.hessian` need "xla".
            Quantized experts and float64 always use "xla".
        kernel_init: the initializer of the experts' kernels, called with `(num_experts, inputs, outputs)`.
        router_init: the initializer of the router's kernel, of shape `(in_features, num_experts)`.
        bias_init: the initializer of the biases.
        ctx: the Context; its stream "params" initializes the parameters.

    Attributes:
        router: the kernel of the router.
        router_bias: its bias, of shape `(num_experts,)`, or None.
        correction: the bias of the choice alone, likewise.
        shared_gate: the kernel of the gate of the shared experts, of shape `(in_features, 1)`, or None.
        gate, up: the kernels from the input to the hidden features, of all experts.
        down: the kernels from the hidden features to the output, of all experts.
        gate_bias, up_bias, down_bias: their biases, of shape `(num_experts, outputs)`, or None.
        gate_scale, up_scale, down_scale: the scales of quantized kernels (`nnx.quantize`), or None.
        shared: a `GatedMLP` with the hidden features of all shared experts, or None.
        load_balancing_loss, z_loss: the router's losses in the last call that stored them, of type `Loss`; see
            `RouterLosses`. Use `nnx.router_losses` to read them.

    >>> layer = nnx.MoE(4, 16, num_experts=8, num_selected=2, ctx=nnx.context(0))
    >>> layer(jnp.ones((5, 4))).shape
    (5, 4)
    """

    logical_axes: ClassVar[AxisNames] = {
        "router": ("embed", None),
        **dict.fromkeys(("router_bias", "correction"), (None,)),
        "shared_gate": ("embed", None),
        **dict.fromkeys(("gate", "up"), ("expert", "embed", "mlp")),
        "down": ("expert", "mlp", "embed"),
        **dict.fromkeys(("gate_bias", "up_bias"), ("expert", "mlp")),
        "down_bias": ("expert", "embed"),
    }

    in_features: int
    hidden_features: int
    num_experts: int
    num_selected: int
    out_features: int
    num_shared: int
    scores: Scores
    normalize: bool
    weight_scale: float
    weigh_inputs: bool
    groups: ExpertGroups | None
    activation: Callable[[jax.Array], jax.Array]
    gated_activation: GatedActivation | None
    update_stats: bool | None
    expert_axis: str | None
    capacity_factor: float
    dtype: np.dtype | None
    param_dtype: np.dtype
    precision: PrecisionLike
    implementation: Implementation | None
    router: jax.Array
    router_bias: jax.Array | None
    correction: jax.Array | None
    shared_gate: jax.Array | None
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    gate_bias: jax.Array | None
    up_bias: jax.Array | None
    down_bias: jax.Array | None
    gate_scale: jax.Array | None = None
    up_scale: jax.Array | None = None
    down_scale: jax.Array | None = None
    shared: GatedMLP | None
    load_balancing_loss: jax.Array
    z_loss: jax.Array

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_experts: int,
        num_selected: int,
        *,
        out_features: int | None = None,
        num_shared: int = 0,
        shared_features: int | None = None,
        use_shared_gate: bool = False,
        scores: Scores = "softmax",
        normalize: bool = True,
        weight_scale: float = 1.0,
        weigh_inputs: bool = False,
        groups: ExpertGroups | None = None,
        use_correction: bool = False,
        activation: Callable[[jax.Array], jax.Array] = silu,
        gated_activation: GatedActivation | None = None,
        use_bias: bool = False,
        use_router_bias: bool = False,
        update_stats: bool | None = True,
        expert_axis: str | None = None,
        capacity_factor: float = 1.25,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: PrecisionLike = None,
        implementation: Implementation | None = None,
        kernel_init: InitializerLike = _expert_init,
        router_init: InitializerLike = default_kernel_init,
        bias_init: InitializerLike = default_bias_init,
        ctx: Context,
    ) -> None:
        check_sizes(
            self,
            in_features=in_features,
            hidden_features=hidden_features,
            num_experts=num_experts,
            num_selected=num_selected,
        )
        if not 1 <= num_selected <= num_experts:
            raise ValueError(WRONG_SELECTION.format(experts=num_experts, got=num_selected))
        if groups is not None and (num_experts % groups.count or not 1 <= groups.selected <= groups.count):
            raise ValueError(WRONG_GROUPS.format(experts=num_experts, got=groups))
        if groups is not None and num_selected > groups.selected * (num_experts // groups.count):
            raise ValueError(WRONG_GROUPS.format(experts=num_experts, got=groups))
        if scores not in ("softmax", "sigmoid"):
            raise ValueError(UNKNOWN_SCORES.format(got=scores))
        if implementation not in ("triton", "xla", None):
            raise ValueError(UNKNOWN_IMPLEMENTATION.format(got=implementation))
        if capacity_factor < 1:
            raise ValueError(WRONG_CAPACITY.format(got=capacity_factor))
        check_activations("MoE", activation, gated_activation)
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.num_experts = num_experts
        self.num_selected = num_selected
        self.out_features = in_features if out_features is None else out_features
        self.num_shared = num_shared
        self.scores = scores
        self.normalize = normalize
        self.weight_scale = weight_scale
        self.weigh_inputs = weigh_inputs
        self.groups = groups
        self.activation = activation
        self.gated_activation = gated_activation
        self.update_stats = update_stats
        self.expert_axis = expert_axis
        self.capacity_factor = float(capacity_factor)
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.precision = precision
        self.implementation = implementation
        self.router = make_param(self, router_init, ctx, (in_features, num_experts))
        self.gate = make_param(self, kernel_init, ctx, (num_experts, in_features, hidden_features))
        self.up = make_param(self, kernel_init, ctx, (num_experts, in_features, hidden_features))
        self.down = make_param(self, kernel_init, ctx, (num_experts, hidden_features, self.out_features))

        def bias(*shape: int, use: bool = use_bias) -> jax.Array | None:
            return make_param(self, bias_init, ctx, shape) if use else None

        self.router_bias = bias(num_experts, use=use_router_bias)
        self.correction = bias(num_experts, use=use_correction)
        self.gate_bias = bias(num_experts, hidden_features)
        self.up_bias = bias(num_experts, hidden_features)
        self.down_bias = bias(num_experts, self.out_features)
        options: dict[str, Any] = {
            "activation": activation,
            "gated_activation": gated_activation,
            "use_bias": use_bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "bias_init": bias_init,
            "ctx": ctx,
        }
        shared_features = num_shared * hidden_features if shared_features is None else shared_features
        self.shared = GatedMLP(in_features, shared_features, out_features, **options) if shared_features else None
        self.shared_gate = make_param(self, router_init, ctx, (in_features, 1)) if use_shared_gate else None
        self.load_balancing_loss = Loss(jnp.zeros((), jnp.float32))
        self.z_loss = Loss(jnp.zeros((), jnp.float32))

    def __call__(self, x: jax.Array, *, update_stats: bool | None = None, ctx: Context | None = None) -> jax.Array:
        """Applies the layer.

        Args:
            x: an array of shape `(..., in_features)`.
            update_stats: whether to store the router's losses; overrides the instance's and the Context's setting.
            ctx: the Context; only its flag "update_stats" is used.

        Returns:
            An array of shape `(..., out_features)`.
        """
        check_last_axis(self, x, self.in_features, "in_features")
        update = resolve_mode(self, "update_stats", update_stats, ctx)
        tokens = x.reshape(-1, self.in_features)
        if tokens.shape[0] == 0:
            return jnp.zeros(
                (*x.shape[:-1], self.out_features),
                infer_dtype((x, *floats_of(*self._weights(), self.param_dtype)), self.dtype),
            )
        out, losses = self._routed(tokens)
        if update:
            self.load_balancing_loss, self.z_loss = (loss.astype(jnp.float32) for loss in losses)
        if self.shared is not None:
            shared = self.shared(tokens)
            if self.shared_gate is not None:
                shared = shared * jax.nn.sigmoid(tokens @ cast(self.shared_gate, shared.dtype))
            out = out + shared
        return out.reshape(*x.shape[:-1], self.out_features)

    def _routed(self, tokens: jax.Array) -> tuple[jax.Array, RouterLosses]:
        """Returns the output of the routed experts for `[tokens, in_features]`, on all devices that have some."""
        axis = self.expert_axis
        size, is_manual = manual_axis(axis)
        if size > 1 and self.num_experts % size:
            raise ValueError(NOT_DIVISIBLE.format(experts=self.num_experts, axis=axis, size=size))
        # A few tokens that cannot be distributed evenly (decoding) are left to JAX's partitioner.
        distributed = is_manual or (size > 1 and tokens.shape[0] % size == 0)
        body = partial(
            mixture,
            num_selected=self.num_selected,
            scores=self.scores,
            normalize=self.normalize,
            groups=self.groups,
            weight_scale=self.weight_scale,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            implementation=self.implementation,
            axis=axis if distributed else None,
            capacity_factor=self.capacity_factor,
            weigh_inputs=self.weigh_inputs,
            activation=self.activation,
            gated_activation=self.gated_activation,
        )
        correction = None if self.correction is None else lax.stop_gradient(self.correction)
        arguments = tokens, self.router, self.router_bias, *self._weights(), correction
        if distributed and not is_manual and axis is not None:
            return on_each_device(body, axis, arguments, split=(True, False, False, True, True, True, False))
        return body(*arguments)

    def _weights(self) -> tuple[Kernels, Kernels, Kernels]:
        """Returns the kernels of the experts, their scales and their biases."""
        return (
            Kernels(self.gate, self.up, self.down),
            Kernels(self.gate_scale, self.up_scale, self.down_scale),
            Kernels(self.gate_bias, self.up_bias, self.down_bias),
        )


def router_losses(model: Module) -> RouterLosses:
    """Returns the losses that the routers of a model stored in their last call, added up over its `MoE` layers.

    Call it in the loss function, after the model. Under `nnx.grad`, `jit`, `scan` and `remat` the values are those of
    the trace, so their gradients reach the routers.

    Args:
        model: the model, which must have been called in training mode (`update_stats`); the losses are 0 before.

    Raises:
        ValueError: there is no `MoE` in the model.

    >>> model = nnx.Sequence([nnx.MoE(4, 8, 4, 2, ctx=nnx.context(0)), nnx.Linear(4, 3, ctx=nnx.context(1))])
    >>> def loss(model, x, y):
    ...     error = jnp.mean((model(x) - y) ** 2)
    ...     losses = nnx.router_losses(model)
    ...     return error + 0.01 * losses.load_balancing + 0.001 * losses.z
    >>> grads = nnx.grad(loss)(model, jnp.ones((6, 4)), jnp.ones((6, 3)))
    >>> bool(jnp.any(grads["0/router"].value != 0))
    True
    """
    layers = [module for module in Module.modules(model) if isinstance(module, MoE)]
    if not layers:
        raise ValueError(NO_MOE.format(model=type(model).__name__))
    # Summed, because the layers of a scanned stack hold one value each in one Variable.
    return RouterLosses(
        sum((jnp.sum(layer.load_balancing_loss) for layer in layers), jnp.zeros(())),
        sum((jnp.sum(layer.z_loss) for layer in layers), jnp.zeros(())),
    )
