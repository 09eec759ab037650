"""The settings of a decoder: `DecoderConfig`, one frozen record for all families, and its rotary part.

The fields have NNX's names. `families` translates the `config.json` of a published model into them, and back.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

from nnx.nn.attention.rotary_scaling import RotaryScaling

LayerType = Literal["full", "sliding"]

NOT_POSITIVE = "DecoderConfig: expected {name} to be a positive integer, got {got!r}."
HEADS_DO_NOT_DIVIDE = "DecoderConfig: num_kv_heads={kv_heads} does not divide num_heads={heads}."
WRONG_LAYER_TYPES = (
    "DecoderConfig: expected layer_types to be 'full' or 'sliding' for each of the {layers} layers, got {got!r}."
)
NO_WINDOW = "DecoderConfig: layer_types has 'sliding' layers, which need a sliding_window >= 1, got {got!r}."
WRONG_EXPERTS = (
    "DecoderConfig: expected num_experts and num_selected to be both None, or integers with 1 <= num_selected <= "
    "num_experts, got num_experts={experts!r} and num_selected={selected!r}."
)
NO_GATES = "DecoderConfig: swiglu_limit={limit!r} is about gates, which MLPs with gated=False do not have."
UNKNOWN_NORM = "DecoderConfig: expected norm to be 'rms' or 'layer', got {got!r}."

SIZES = (
    "vocab_size",
    "features",
    "hidden_features",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_length",
)


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
    """The rotary position embedding of a layer.

    Args:
        base: the base of the geometric series of frequencies.
        scaling: the change of frequencies for long contexts, if any.
        fraction: the part of each head's features that rotate.
    """

    base: float = 10000.0
    scaling: RotaryScaling | None = None
    fraction: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The architecture of a decoder-only language model.

    Args:
        model_type: the family, such as "llama"; it decides how checkpoints are read and written.
        vocab_size: the number of tokens.
        features: the number of features of a token between layers.
        hidden_features: the number of hidden features of the MLPs, or of each expert.
        num_layers: the number of layers.
        num_heads: the number of query heads.
        num_kv_heads: the number of heads of keys and values; `num_heads` by default.
        head_dim: the number of features of a head; `features // num_heads` by default.
        max_length: the context length. Learned positions end there; rotary ones do not.
        activation: the name of the activation of the MLPs; one of `nnx.models.ACTIVATIONS`.
        gated: whether the MLPs are gated (`nnx.GatedMLP`).
        swiglu_limit: a bound, if gates and values are combined as in gpt_oss: gates are at most the limit, values are
            between minus and plus the limit, and the result is `(value + 1) * gate * sigmoid(swiglu_alpha * gate)`. By
            default, it is `activation(gate) * value`.
        swiglu_alpha: the slope of that sigmoid.
        num_experts: the number of experts, if the MLPs are mixtures of experts (`nnx.MoE`).
        num_selected: the number of experts that each token uses.
        normalize_experts: whether the weights of the selected experts are divided by their sum.
        norm: "rms" for `nnx.RMSNorm`, "layer" for `nnx.LayerNorm`.
        norm_epsilon: the epsilon of every norm.
        norm_offset: the `scale_offset` of every `RMSNorm`.
        post_norms: whether the outputs of attention and MLP are normalized as well, before they are added.
        normalize_qk: whether queries and keys are normalized per head.
        use_qkv_bias, use_out_bias, use_mlp_bias: whether these projections have biases; those of experts are an MLP's.
        use_router_bias: whether the routers of mixtures of experts have biases.
        use_sinks: whether attention has sinks (`nnx.MultiHeadAttention`).
        rotary: the rotary embedding; `None` means learned positions.
        local_rotary: the rotary embedding of "sliding" layers, where it differs.
        layer_types: "full" or "sliding" for each layer; all "full" by default.
        sliding_window: the number of tokens that a token of a "sliding" layer sees, including itself.
        query_pre_attn_scalar: attention logits are divided by the square root of this number; `head_dim` by default.
        attention_soft_cap, logits_soft_cap: the soft caps of attention logits and of the output, if any.
        scale_embeddings: whether embeddings are multiplied by the square root of `features`.
        tie_embeddings: whether the output layer is the transposed embedding.
        extra: the other entries of the `config.json` this was read from, as JSON by name. They are written back.

    >>> config = nnx.models.DecoderConfig(
    ...     model_type="llama", vocab_size=64, features=16, hidden_features=32, num_layers=2, num_heads=4, max_length=9)
    >>> config.num_kv_heads, config.head_dim, config.layer_types
    (4, 4, ('full', 'full'))
    """

    model_type: str
    vocab_size: int
    features: int
    hidden_features: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = None  # type: ignore[assignment]  (an int after __post_init__)
    head_dim: int = None  # type: ignore[assignment]
    max_length: int
    activation: str = "silu"
    gated: bool = True
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    num_experts: int | None = None
    num_selected: int | None = None
    normalize_experts: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norm_epsilon: float = 1e-6
    norm_offset: float = 0.0
    post_norms: bool = False
    normalize_qk: bool = False
    use_qkv_bias: bool = False
    use_out_bias: bool = False
    use_mlp_bias: bool = False
    use_router_bias: bool = False
    use_sinks: bool = False
    rotary: RotaryConfig | None = RotaryConfig()
    local_rotary: RotaryConfig | None = None
    layer_types: tuple[LayerType, ...] = None  # type: ignore[assignment]
    sliding_window: int | None = None
    query_pre_attn_scalar: float | None = None
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    scale_embeddings: bool = False
    tie_embeddings: bool = False
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", self.features // self.num_heads)
        if self.layer_types is None:
            object.__setattr__(self, "layer_types", ("full",) * self.num_layers)
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        for name in SIZES:
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(NOT_POSITIVE.format(name=name, got=size))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(HEADS_DO_NOT_DIVIDE.format(heads=self.num_heads, kv_heads=self.num_kv_heads))
        if len(self.layer_types) != self.num_layers or not set(self.layer_types) <= {"full", "sliding"}:
            raise ValueError(WRONG_LAYER_TYPES.format(layers=self.num_layers, got=self.layer_types))
        window = self.sliding_window
        if "sliding" in self.layer_types and not (isinstance(window, int) and window >= 1):
            raise ValueError(NO_WINDOW.format(got=window))
        experts, selected = self.num_experts, self.num_selected
        both = isinstance(experts, int) and isinstance(selected, int) and 1 <= selected <= experts
        if not both and (experts is not None or selected is not None):
            raise ValueError(WRONG_EXPERTS.format(experts=experts, selected=selected))
        if self.swiglu_limit is not None and not self.gated:
            raise ValueError(NO_GATES.format(limit=self.swiglu_limit))
        if self.norm not in ("rms", "layer"):
            raise ValueError(UNKNOWN_NORM.format(got=self.norm))

    @property
    def period(self) -> int:
        """The length of the shortest pattern of layer types that repeats from the first layer to the last."""
        types = self.layer_types
        # A pattern of length n repeats if the list agrees with itself moved by n.
        return next(n for n in range(1, len(types) + 1) if types[n:] == types[:-n])

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end a text: the `eos_token_id` of the published config."""
        found = json.loads(dict(self.extra).get("eos_token_id", "null"))
        return tuple(found) if isinstance(found, list) else () if found is None else (found,)

    def replace(self, **changes: Any) -> "DecoderConfig":
        """Returns a copy with other values in some fields."""
        return dataclasses.replace(self, **changes)


# Entries of a `config.json` that describe the file or the class rather than the architecture. They are never kept, and
# written from what is known.
FILE_ENTRIES = {
    *("model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path"),
    "quantization_config",  # weights are read, and written again, without their scales
}


def frozen_extra(fields: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Returns entries of a `config.json` as a hashable value."""
    return tuple((name, json.dumps(value)) for name, value in sorted(fields.items()))
