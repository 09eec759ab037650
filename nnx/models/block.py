"""`DecoderBlock`: one layer of a decoder, a mixer of tokens and an MLP, and `Period`, what a scanned decoder stacks."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.dict_sequence import Sequence
from nnx.core.module.module import Module
from nnx.models.activations_by_name import ClampedSwiGLU, activation_of
from nnx.models.config import DecoderConfig
from nnx.models.layer_spec import LayerSpec
from nnx.models.mixers.mixers import MIXERS
from nnx.models.mixers.norms import make_norm
from nnx.nn.mlp import MLP, GatedMLP
from nnx.nn.moe.moe import MoE
from nnx.nn.norms.norm import LayerNorm, RMSNorm
from nnx.sharding.constraints import with_logical_constraint
from nnx.sharding.rules import RulesFallback
from nnx.transforms.control.remat import remat as checkpointed

BLOCK_OF_A_BOOL = (
    "DecoderBlock(config, {got}, ...): say which layer it is instead of whether it has a window, "
    "`DecoderBlock(config, config.layers[i], ...)`. The next minor version refuses a bool."
)


class DecoderBlock(Module):
    """One layer of a decoder.

    Args:
        config: the architecture.
        spec: what this layer is made of, one of `config.layers`.
        dtype, param_dtype, ctx: as in `Decoder`.

    Attributes:
        attention_norm, mlp_norm: the norms of the inputs of mixer and MLP, or None.
        attention: the mixer, such as a `MultiHeadAttention`.
        mlp: a `GatedMLP`, `MLP` or `MoE`.
        attention_post_norm, mlp_post_norm: the norms of their outputs, or None.
    """

    attention_norm: RMSNorm | LayerNorm | None
    attention: Any  # a Mixer; a protocol would hide the attributes of attention from an editor
    attention_post_norm: RMSNorm | LayerNorm | None
    mlp_norm: RMSNorm | LayerNorm | None
    mlp: GatedMLP | MLP | MoE
    mlp_post_norm: RMSNorm | LayerNorm | None
    parallel: bool
    residual_scale: float
    is_causal: bool

    def __init__(
        self,
        config: DecoderConfig,
        spec: LayerSpec | bool,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ctx: Context,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ctx": ctx}
        if isinstance(spec, bool):
            warnings.warn(BLOCK_OF_A_BOOL.format(got=spec), DeprecationWarning, stacklevel=2)
            kind = "sliding" if spec else "full"
            spec = config.replace(layer_types=(kind,) * config.num_layers).layers[0]

        def norm(needed: bool) -> RMSNorm | LayerNorm | None:
            return make_norm(config, config.features, options) if needed else None

        self.attention_norm = norm(config.pre_norms and spec.mixer_norm)
        self.attention = MIXERS[spec.mixer](config, spec, options)
        self.attention_post_norm = norm(config.post_norms)
        self.mlp_norm = norm(config.pre_norms and not config.shared_norm)
        self.mlp = _mlp(config, spec, options)
        self.mlp_post_norm = norm(config.post_norms)
        self.parallel, self.residual_scale, self.is_causal = config.parallel, config.residual_scale, config.causal

    def __call__(
        self, x: jax.Array, positions: jax.Array | None = None, mask: jax.Array | None = None
    ) -> jax.Array:  # [batch, length, features]
        """Applies the layer to whole texts, `[batch, length, features]`."""
        read = _normed(self.attention_norm, x)
        attended = self.attention(read, is_causal=self.is_causal, positions=positions, mask=mask)
        return constrained(self._with_mlp(x, read, attended))

    def decode_step(
        self, x: jax.Array, cache: Any, lengths: jax.Array, seq_lengths: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Applies the layer to the next tokens; the arguments are those of its mixer's `decode_step`."""
        read = _normed(self.attention_norm, x)
        attended, cache = self.attention.decode_step(read, cache, lengths, seq_lengths)
        # A mixture of experts in training mode would store its losses.
        mlp = {"update_stats": False} if isinstance(self.mlp, MoE) else {}
        return self._with_mlp(x, read, attended, **mlp), cache

    def _with_mlp(self, x: jax.Array, read: jax.Array, attended: jax.Array, **options: Any) -> jax.Array:
        """Adds the output of attention, which read `read`, and that of the MLP."""
        attended = self._scaled(_normed(self.attention_post_norm, attended))
        if self.parallel:
            hidden = self.mlp(read if self.mlp_norm is None else self.mlp_norm(x), **options)
            return x + attended + self._scaled(_normed(self.mlp_post_norm, hidden))
        x = x + attended
        hidden = self.mlp(_normed(self.mlp_norm, x), **options)
        return x + self._scaled(_normed(self.mlp_post_norm, hidden))

    def _scaled(self, x: jax.Array) -> jax.Array:
        return x if self.residual_scale == 1.0 else x * self.residual_scale


class Period(Module):
    """The blocks of one period of the pattern of layers; what a scanned decoder stacks.

    Attributes:
        layers: the blocks, in order.
    """

    layers: Sequence

    def __init__(self, config: DecoderConfig, **options: Any) -> None:
        stack = config.stack
        self.layers = Sequence(
            DecoderBlock(config, spec, **options) for spec in config.layers[stack.lead : stack.lead + stack.period]
        )

    def __call__(self, x: jax.Array, _: None, positions: Any, mask: Any, remat: Any) -> tuple[jax.Array, None]:
        """Applies the blocks, as the body of a scan."""
        for block in self.layers:
            x = run_block(block, x, positions, mask, remat)
        return x, None


def _mlp(config: DecoderConfig, spec: LayerSpec, options: dict[str, Any]) -> GatedMLP | MLP | MoE:
    hidden = config.hidden_features if spec.mlp == "experts" else config.dense_features or config.hidden_features
    sizes = (config.features, hidden)
    options = {**options, "activation": activation_of(config.activation), "use_bias": config.use_mlp_bias}
    if config.swiglu_limit is not None:
        options["gated_activation"] = ClampedSwiGLU(config.swiglu_limit, config.swiglu_alpha)
    if spec.mlp == "experts" and config.num_experts is not None and config.num_selected is not None:
        return MoE(
            *sizes,
            config.num_experts,
            config.num_selected,
            normalize=config.normalize_experts,
            weight_scale=config.expert_weight_scale,
            weigh_inputs=config.weigh_expert_inputs,
            scores=config.router_scores,
            use_correction=config.use_router_correction,
            groups=config.expert_groups,
            shared_features=config.shared_features,
            use_shared_gate=config.use_shared_gate,
            use_router_bias=config.use_router_bias,
            update_stats=False,  # `model.train()` turns it on
            **options,
        )
    mlp: Any = GatedMLP if config.gated else MLP
    return mlp(*sizes, config.features, **options)


def constrained(x: jax.Array) -> jax.Array:
    """Constrains the features between layers as the current rules say.

    Without a constraint, the compiler splits them by features, like the parameters of FSDP, and sums partial products
    instead of gathering the parameters.
    """
    return with_logical_constraint(x, ("batch", "length", "embed"), fallback=RulesFallback.NO_CONSTRAINT)


def run_block(block: Any, x: jax.Array, positions: Any, mask: Any, remat: Any) -> jax.Array:
    """Applies a block; `remat` is that of `Decoder`."""
    if remat is False:
        return block(x, positions, mask)
    policy = None if remat is True else remat

    def layer(block: Any, x: jax.Array, positions: Any, mask: Any) -> jax.Array:
        return block(x, positions, mask)

    return checkpointed(layer, policy=policy)(block, x, positions, mask)


def _normed(norm: RMSNorm | LayerNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)
