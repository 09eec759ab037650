"""The settings of a decoder: `DecoderConfig`, one frozen record for all families.

The fields have NNX's names. `families` translates the `config.json` of a published model into them, and back. What they
mean for one layer is its `LayerSpec`; blocks are built from these, and scanning looks for the pattern in their list.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any, Literal

from nnx.core.hints.hints import add_hints
from nnx.core.hints.table import CONFIG
from nnx.models.layer_spec import LayerSpec, LayerType, PositionScale, RotaryConfig, Stack, stack_of
from nnx.nn.moe.routing import ExpertGroups

NOT_POSITIVE = "DecoderConfig: expected {name} to be a positive integer, got {got!r}."
HEADS_DO_NOT_DIVIDE = "DecoderConfig: num_kv_heads={kv_heads} does not divide num_heads={heads}."
WRONG_LAYER_TYPES = (
    "DecoderConfig: expected layer_types to be 'full', 'sliding', 'section' or 'linear' for each of the {layers} "
    "layers, got {got!r}."
)
NO_SUCH_LAYER = "DecoderConfig: expected {name} to list numbers of the {layers} layers, in order, got {got!r}."
DENSE_AMONG_NO_EXPERTS = "DecoderConfig: dense_layers={got!r} is about models with experts; num_experts is None."
INCOMPLETE = "DecoderConfig: {what} needs {name}, a positive integer, got {got!r}."
LABELS_AND_HEAD = "DecoderConfig: labels={labels!r} are those of head='labels', and head={head!r} was given."
NO_BIAS = "DecoderConfig: use_head_bias is for an output layer of its own, and tie_embeddings says that there is none."
NO_WINDOW = "DecoderConfig: layer_types has 'sliding' layers, which need a sliding_window >= 1, got {got!r}."
WRONG_EXPERTS = (
    "DecoderConfig: expected num_experts and num_selected to be both None, or integers with 1 <= num_selected <= "
    "num_experts, got num_experts={experts!r} and num_selected={selected!r}."
)
NO_GATES = "DecoderConfig: swiglu_limit={limit!r} is about gates, which MLPs with gated=False do not have."
UNKNOWN_CHOICE = "DecoderConfig: expected {name} to be {known}, got {got!r}."

CHOICES = {
    "norm": ("rms", "layer"),
    "qk_norm": ("shared", "separate", "joint", "unit"),
    "router_scores": ("softmax", "sigmoid"),
    "head": ("tokens", "labels", "none"),
}

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
        expert_weight_scale: a number that multiplies these weights.
        weigh_expert_inputs: whether they multiply what experts read instead of what they return.
        router_scores: "softmax" if experts compete for a token, "sigmoid" if each is scored by itself.
        use_router_correction: whether a bias takes part in choosing experts, but not in their weights.
        expert_groups: the groups of experts of which a token uses a few, if any.
        shared_features: the number of hidden features of the experts that every token uses, if there are any.
        use_shared_gate: whether the output of these is multiplied by a gate.
        norm: "rms" for `nnx.RMSNorm`, "layer" for `nnx.LayerNorm`.
        norm_epsilon: the epsilon of every norm.
        norm_offset: the `scale_offset` of every norm.
        use_norm_scale, use_norm_bias: whether norms have scales, and layer norms biases.
        pre_norms: whether the inputs of attention and MLP are normalized.
        embed_norm: whether embeddings are normalized; the attention of the first layer then reads them as they are.
        post_norms: whether their outputs are normalized, before they are added.
        parallel: whether the MLP reads the input of the layer, like attention, instead of its output.
        shared_norm: whether it then also shares its norm.
        normalize_qk: whether queries and keys are normalized: each head alone, with one scale for all.
        qk_norm: "shared" for that; "separate" if every head has its own scale, "joint" if all heads of a token are one
            vector; "unit" if there is no scale, and only layers with a rotary embedding normalize.
        qk_norm_after_rotary: whether they are normalized after the rotary embedding.
        use_qkv_bias, use_out_bias, use_mlp_bias: whether these projections have biases; those of experts are an MLP's.
        use_head_bias: whether the output layer has a bias.
        head_activation: the activation of a `MaskedLMHead`, if the output layer is one: a layer, this activation and a
            norm before the transposed embedding, and a bias.
        dense_layers: the numbers of the layers that have a dense MLP although `num_experts` is set.
        dense_features: the number of hidden features of these; `hidden_features` by default.
        use_router_bias: whether the routers of mixtures of experts have biases.
        use_sinks: whether attention has sinks (`nnx.MultiHeadAttention`).
        use_attention_gate: whether the output of each head is multiplied by a gate.
        latent_rank: the number of features of the latents of keys and values, if attention is `nnx.LatentAttention`.
        query_rank: the number of features of the latents of its queries, if there are any.
        rotary_dim: the number of features of its heads that rotate, in addition to `head_dim`.
        value_dim: the number of features of its values; `head_dim` by default.
        delta_heads, delta_key_heads: the numbers of heads of "linear" layers, which are `nnx.GatedDeltaNet`s.
        delta_key_dim, delta_value_dim: the numbers of features of their keys and values.
        delta_taps: the number of tokens that their convolutions see.
        causal: whether a token sees only those before it. A model in which it sees all tokens fills in masked ones, and
            cannot write with a cache.
        rotary: the rotary embedding; `None` means learned positions.
        local_rotary: the rotary embedding of "sliding" layers, where it differs.
        unrotated_layers: the numbers of the layers without a rotary embedding.
        layer_types: "full", "sliding", "section" or "linear" for each layer; all "full" by default.
        sliding_window: the number of tokens that a token of a "sliding" layer sees, including itself.
        section_size: the number of tokens in a section of the text; a token of a "section" layer sees those of its own.
        unrotated_scale: a factor of the queries of layers without a rotary embedding that grows with their positions.
        query_pre_attn_scalar: attention logits are divided by the square root of this number; `head_dim` by default.
        attention_scale: a number that multiplies them instead.
        attention_soft_cap, logits_soft_cap: the soft caps of attention logits and of the output, if any.
        scale_embeddings: whether embeddings are multiplied by the square root of `features`.
        embedding_scale, residual_scale, logits_scale: numbers that multiply embeddings, what attention and MLP add to
            their inputs, and logits.
        tie_embeddings: whether the output layer is the transposed embedding.
        head: what the output layer tells apart: "tokens", or the "labels" of a classifier; "none" if there is none.
        labels: the names of the classes.
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
    expert_weight_scale: float = 1.0
    weigh_expert_inputs: bool = False
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    use_router_correction: bool = False
    expert_groups: ExpertGroups | None = None
    shared_features: int | None = None
    use_shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    dense_features: int | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_epsilon: float = 1e-6
    norm_offset: float = 0.0
    use_norm_scale: bool = True
    use_norm_bias: bool = True
    pre_norms: bool = True
    embed_norm: bool = False
    post_norms: bool = False
    parallel: bool = False
    shared_norm: bool = False
    normalize_qk: bool = False
    qk_norm: Literal["shared", "separate", "joint", "unit"] = "shared"
    qk_norm_after_rotary: bool = False
    use_qkv_bias: bool = False
    use_out_bias: bool = False
    use_mlp_bias: bool = False
    use_head_bias: bool = False
    head_activation: str | None = None
    use_router_bias: bool = False
    use_sinks: bool = False
    use_attention_gate: bool = False
    latent_rank: int | None = None
    query_rank: int | None = None
    rotary_dim: int | None = None
    value_dim: int | None = None
    delta_heads: int | None = None
    delta_key_heads: int | None = None
    delta_key_dim: int | None = None
    delta_value_dim: int | None = None
    delta_taps: int = 4
    causal: bool = True
    rotary: RotaryConfig | None = RotaryConfig()
    local_rotary: RotaryConfig | None = None
    unrotated_layers: tuple[int, ...] = ()
    layer_types: tuple[LayerType, ...] = None  # type: ignore[assignment]
    sliding_window: int | None = None
    section_size: int | None = None
    unrotated_scale: PositionScale | None = None
    query_pre_attn_scalar: float | None = None
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    scale_embeddings: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    tie_embeddings: bool = False
    head: Literal["tokens", "labels", "none"] = "tokens"
    labels: tuple[str, ...] = ()
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
        if len(self.layer_types) != self.num_layers or not set(self.layer_types) <= {
            "full",
            "sliding",
            "section",
            "linear",
        }:
            raise ValueError(WRONG_LAYER_TYPES.format(layers=self.num_layers, got=self.layer_types))
        self._check_mixers()
        if (self.head == "labels") != bool(self.labels):
            raise ValueError(LABELS_AND_HEAD.format(head=self.head, labels=self.labels))
        if self.use_head_bias and self.tie_embeddings:
            raise ValueError(NO_BIAS)
        window = self.sliding_window
        if "sliding" in self.layer_types and not (isinstance(window, int) and window >= 1):
            raise ValueError(NO_WINDOW.format(got=window))
        experts, selected = self.num_experts, self.num_selected
        both = isinstance(experts, int) and isinstance(selected, int) and 1 <= selected <= experts
        if not both and (experts is not None or selected is not None):
            raise ValueError(WRONG_EXPERTS.format(experts=experts, selected=selected))
        for name in ("dense_layers", "unrotated_layers"):
            listed = tuple(getattr(self, name))
            object.__setattr__(self, name, listed)
            if list(listed) != sorted(set(listed) & set(range(self.num_layers))):
                raise ValueError(NO_SUCH_LAYER.format(name=name, layers=self.num_layers, got=listed))
        if self.dense_layers and experts is None:
            raise ValueError(DENSE_AMONG_NO_EXPERTS.format(got=self.dense_layers))
        if self.swiglu_limit is not None and not self.gated:
            raise ValueError(NO_GATES.format(limit=self.swiglu_limit))
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                listed = " or ".join(map(repr, known))
                raise ValueError(UNKNOWN_CHOICE.format(name=name, known=listed, got=getattr(self, name)))

    def _check_mixers(self) -> None:
        """Raises `ValueError` if a size that a mixer needs is missing."""
        needed: dict[str, tuple[str, ...]] = {}
        if self.latent_rank is not None:
            needed["latent_rank"] = ("rotary_dim",)
        if "section" in self.layer_types:
            needed["a 'section' layer"] = ("section_size",)
        if "linear" in self.layer_types:
            needed["a 'linear' layer"] = ("delta_heads", "delta_key_heads", "delta_key_dim", "delta_value_dim")
        for what, names in needed.items():
            for name in names:
                got = getattr(self, name)
                if not isinstance(got, int) or isinstance(got, bool) or got < 1:
                    raise ValueError(INCOMPLETE.format(what=what, name=name, got=got))

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer is made of."""
        return tuple(map(self._layer, range(self.num_layers)))

    def _layer(self, number: int) -> LayerSpec:
        kind = self.layer_types[number]
        sliding = kind == "sliding"
        rotary = self.local_rotary if sliding and self.local_rotary is not None else self.rotary
        return LayerSpec(
            mixer="gated_delta" if kind == "linear" else "attention" if self.latent_rank is None else "latent",
            window=self.sliding_window if sliding else None,
            rotary=None if number in self.unrotated_layers or kind == "linear" else rotary,
            mlp="dense" if self.num_experts is None or number in self.dense_layers else "experts",
            section=self.section_size if kind == "section" else None,
            mixer_norm=number > 0 or not self.embed_norm,
        )

    @functools.cached_property
    def stack(self) -> Stack:
        """Which layers can be scanned: as many as possible, so that few are compiled one by one."""
        return stack_of(self.layers)

    @property
    def period(self) -> int:
        """The length of the shortest pattern of layers that repeats up to the last one."""
        return self.stack.period

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


add_hints(DecoderConfig, CONFIG)
