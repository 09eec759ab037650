"""The families of published decoders: how the `config.json` of each one translates to a `DecoderConfig`, and back.

A `Family` is mostly data: which entry of the file sets which field, the fields that are the same in all models of the
family, the meaning of absent entries, and the entries of which only one value is supported. Three things differ in more
than a name and are read by functions: rotary embeddings (`files/rope_entries`), windows (`_windows`), and fields that
follow from two entries.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from nnx.models.config import FILE_ENTRIES, SIZES, DecoderConfig, frozen_extra
from nnx.models.files.quantized_files import decoding
from nnx.models.files.rope_entries import read_rope, write_rope

UNKNOWN_MODEL = "{where}: the model_type {got!r} is not among the known ones: {known}."
NO_KEY = "{where}: the entry {key!r}, which a {family} model needs, is missing."
NOT_A_NUMBER = "{where}: expected {key!r} to be {expected}, got {got!r}."
NOT_SUPPORTED = "{where}: {key}={got!r} is not supported for {family}; only {only!r} is."
BAD_LAYER_TYPE = "{where}: expected layer_types of 'full_attention' and 'sliding_attention', got {got!r}."

CANNOT_EXPRESS = (
    "A {family} config.json cannot express {field}={got!r} (it would mean {means!r}). Change the DecoderConfig, or "
    "save the model with nnx.save."
)

_COMMON = {
    "vocab_size": "vocab_size",
    "hidden_size": "features",
    "intermediate_size": "hidden_features",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_length",
    "rms_norm_eps": "norm_epsilon",
    "hidden_act": "activation",
    "tie_word_embeddings": "tie_embeddings",
}
_EXPERTS = {"num_experts": "num_experts", "num_experts_per_tok": "num_selected"}
_BIASES = {"attention_bias": "use_qkv_bias"}
_GEMMA = {
    **{key: field for key, field in _COMMON.items() if key != "hidden_act"},
    **_BIASES,
    "hidden_activation": "activation",
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "attn_logit_softcapping": "attention_soft_cap",
    "final_logit_softcapping": "logits_soft_cap",
}
_GEMMA_CONSTANTS = {"norm_offset": 1.0, "post_norms": True, "scale_embeddings": True}
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "activation": "gelu_pytorch_tanh",
    "tie_embeddings": True,
    "sliding_window": 4096,
}
_DERIVED = {"num_key_value_heads", "head_dim", "n_inner"}  # entries that follow from others when absent or null
_COUNTS = {*SIZES, "num_experts", "num_selected"}
_NULLABLE = {*_DERIVED, "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"}
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of decoders.

    Attributes:
        model_type: its name in `config.json`.
        architecture: the class name that `transformers` expects there.
        keys: for each entry of the file, the field of `DecoderConfig` that it sets.
        constants: the fields that no entry sets.
        defaults: the values of fields whose entry is absent.
        only: for each entry that must have one value (or be absent), that value.
        sliding: which layers have a window if the file does not list them: a function of the layer's number and the
            entries; `None` if the family has no windows.
        rotary_base: the default base of rotary embeddings; `None` for learned positions.
        rope_scaling: the rotary scaling of a file that mentions none, as such a file would write it.
        aliases: other names of entries, which some versions of `transformers` write.
    """

    model_type: str
    architecture: str
    keys: Mapping[str, str]
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sliding: Callable[[int, Mapping[str, Any]], bool] | None = None
    rotary_base: float | None = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def has_local_rotary(self) -> bool:
        """Whether layers with a window have their own rotary embedding."""
        return self.model_type == "gemma3_text"


_OPTIONAL_WINDOWS = ("qwen2", "qwen3", "qwen3_moe")  # only with `use_sliding_window`
_always = lambda i, fields: True  # noqa: E731  (a table entry)

FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            {
                "vocab_size": "vocab_size",
                "n_embd": "features",
                "n_inner": "hidden_features",
                "n_layer": "num_layers",
                "n_head": "num_heads",
                "n_positions": "max_length",
                "layer_norm_epsilon": "norm_epsilon",
                "activation_function": "activation",
                "tie_word_embeddings": "tie_embeddings",
            },
            {
                "norm": "layer",
                "gated": False,
                "rotary": None,
                **dict.fromkeys(("use_qkv_bias", "use_out_bias", "use_mlp_bias"), True),
            },
            {"norm_epsilon": 1e-5, "activation": "gelu_new", "tie_embeddings": True},
            {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
            rotary_base=None,
        ),
        Family("llama", "LlamaForCausalLM", {**_COMMON, **_BIASES, "mlp_bias": "use_mlp_bias"}),
        Family("mistral", "MistralForCausalLM", _COMMON, defaults={"sliding_window": 4096}, sliding=_always),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            {key: field for key, field in _COMMON.items() if key != "head_dim"},
            {"use_qkv_bias": True},
            {"sliding_window": 4096},
            sliding=lambda i, fields: i >= fields.get("max_window_layers", 28),
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            {**_COMMON, **_BIASES},
            {"normalize_qk": True},
            {"head_dim": 128, "sliding_window": 4096},
            sliding=lambda i, fields: i >= fields.get("max_window_layers", 28),
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            {**_COMMON, "num_local_experts": "num_experts", "num_experts_per_tok": "num_selected"},
            {},
            {"norm_epsilon": 1e-5, "num_experts": 8, "num_selected": 2, "sliding_window": None},
            sliding=_always,
            rotary_base=1_000_000.0,
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            {
                **{key: field for key, field in _COMMON.items() if key != "intermediate_size"},
                **_BIASES,
                **_EXPERTS,
                "moe_intermediate_size": "hidden_features",
                "norm_topk_prob": "normalize_experts",
            },
            {"normalize_qk": True},
            {
                "hidden_features": 768,
                "num_experts": 128,
                "num_selected": 8,
                "normalize_experts": False,
                "sliding_window": 4096,
            },
            # Dense MLPs in some layers; no published model has them.
            {"decoder_sparse_step": 1, "mlp_only_layers": []},
            sliding=_always,
            aliases={"num_local_experts": "num_experts"},
        ),
        Family(
            "gemma2",
            "Gemma2ForCausalLM",
            _GEMMA,
            _GEMMA_CONSTANTS,
            {**_GEMMA_DEFAULTS, "attention_soft_cap": 50.0, "logits_soft_cap": 30.0},
            {"use_bidirectional_attention": False},
            sliding=lambda i, fields: bool((i + 1) % 2),
        ),
        Family(
            "gemma3_text",
            "Gemma3ForCausalLM",
            _GEMMA,
            {**_GEMMA_CONSTANTS, "normalize_qk": True},
            _GEMMA_DEFAULTS,
            {"use_bidirectional_attention": False},
            sliding=lambda i, fields: bool((i + 1) % fields.get("sliding_window_pattern", 6)),
            rotary_base=1_000_000.0,
        ),
        Family(
            "gpt_oss",
            "GptOssForCausalLM",
            {
                # The file does not name the activation.
                **{key: field for key, field in _COMMON.items() if key != "hidden_act"},
                **_BIASES,
                "num_local_experts": "num_experts",
                "num_experts_per_tok": "num_selected",
                "swiglu_limit": "swiglu_limit",
                "swiglu_alpha": "swiglu_alpha",
            },
            dict.fromkeys(("use_sinks", "use_mlp_bias", "use_router_bias"), True),
            {
                "norm_epsilon": 1e-5,
                "head_dim": 64,
                "use_qkv_bias": True,
                "num_experts": 128,
                "num_selected": 4,
                "swiglu_limit": 7.0,
                "sliding_window": 128,
            },
            sliding=lambda i, fields: bool((i + 1) % 2),
            rotary_base=150_000.0,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            aliases={"experts_per_token": "num_experts_per_tok"},
        ),
        Family(
            "phi3",
            "Phi3ForCausalLM",
            {key: field for key, field in _COMMON.items() if key != "head_dim"},
            {},
            {"norm_epsilon": 1e-5, "sliding_window": None},
            sliding=_always,
        ),
    )
}
"""The known families by `model_type`."""

_CONSUMED = {
    *("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "partial_rotary_factor"),
    "original_max_position_embeddings",
    *("sliding_window", "use_sliding_window", "layer_types", "sliding_window_pattern", "max_window_layers"),
}


def family_of(model_type: Any, where: str) -> Family:
    """Returns a family by its name; `where` is named in the error."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(UNKNOWN_MODEL.format(where=where, got=model_type, known=", ".join(FAMILIES)))
    return FAMILIES[model_type]


def config_from_dict(fields: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """Translates the entries of a `config.json`.

    Args:
        fields: the entries.
        where: the name of the file, for errors.

    Raises:
        ValueError: the model type is unknown, an entry is missing or malformed, or a setting is not supported.
    """
    family = family_of(fields.get("model_type"), where)
    renamed = {key: fields[alias] for alias, key in family.aliases.items() if alias in fields and key not in fields}
    fields = {**renamed, **{key: value for key, value in fields.items() if key not in family.aliases}}
    decoding(fields, where)  # raises if the weights are quantized in a way that cannot be read
    for key, only in family.only.items():
        if fields.get(key) not in (None, only):
            raise ValueError(
                NOT_SUPPORTED.format(where=where, key=key, got=fields[key], family=family.model_type, only=only)
            )
    values: dict[str, Any] = dict(family.constants)
    for key, field in family.keys.items():
        values[field] = _entry(family, fields, key, field, where)
    if "attention_bias" in family.keys:
        values["use_out_bias"] = values["use_qkv_bias"]
    if values["hidden_features"] is None:
        values["hidden_features"] = 4 * values["features"]
    values.update(_windows(family, fields, values["num_layers"], where))
    if family.rope_scaling and not fields.get("rope_scaling") and not fields.get("rope_parameters"):
        fields = {**fields, "rope_scaling": family.rope_scaling}
    if family.rotary_base is not None:
        values["rotary"] = read_rope(fields, "full_attention", family.rotary_base, values["max_length"], where)
        if family.has_local_rotary:
            values["local_rotary"] = read_rope(fields, "sliding_attention", 10000.0, values["max_length"], where)
    known = {*family.keys, *FILE_ENTRIES, *_CONSUMED, *family.only}
    known |= {key for key in _SPECIAL_TOKENS if fields.get(key) is None}
    extra = {key: value for key, value in fields.items() if key not in known}
    return DecoderConfig(model_type=family.model_type, extra=frozen_extra(extra), **values)


def config_to_dict(config: DecoderConfig) -> dict[str, Any]:
    """Returns the entries of the `config.json` with which `transformers` loads such a model.

    Raises:
        ValueError: a field has a value that no model of the family has, so the file cannot express it.
    """
    family = family_of(config.model_type, "DecoderConfig")
    values = {field: getattr(config, field) for field in config.__dataclass_fields__}
    # Without these entries, transformers would assume those of the family's first model, such as 32000 for phi3, and
    # refuse a smaller vocabulary. A config that was read from a file has them if it needs them.
    fields: dict[str, Any] = {} if config.extra else dict.fromkeys(_SPECIAL_TOKENS)
    fields |= {name: json.loads(text) for name, text in config.extra}
    fields |= {"model_type": family.model_type, "architectures": [family.architecture]}
    fields |= {key: values[field] for key, field in family.keys.items()}
    if config.rotary is not None:
        fields |= write_rope(config.rotary, config.local_rotary, config.max_length)
    if family.sliding is not None:
        types = [f"{kind}_attention" for kind in config.layer_types]
        fields |= {"sliding_window": config.sliding_window, "layer_types": types}
        if family.sliding is _always:
            # Their configs have no layer_types; transformers takes a mistral that has them for a ministral.
            del fields["layer_types"]
        if family.model_type in _OPTIONAL_WINDOWS:
            fields["use_sliding_window"] = "sliding" in config.layer_types
    again = config_from_dict(fields, "DecoderConfig")
    for field in config.__dataclass_fields__:
        if getattr(again, field) != getattr(config, field) and field != "extra":
            raise ValueError(
                CANNOT_EXPRESS.format(
                    family=family.model_type, field=field, got=getattr(config, field), means=getattr(again, field)
                )
            )
    return fields


def _entry(family: Family, fields: Mapping[str, Any], key: str, field: str, where: str) -> Any:
    """Returns the value of one field, after checking the entry that sets it."""
    default = DecoderConfig.__dataclass_fields__[field].default
    required = default is dataclasses.MISSING and key not in _DERIVED
    value = fields.get(key)
    if key not in fields or (value is None and key not in _NULLABLE):
        if required and field not in family.defaults:
            raise ValueError(NO_KEY.format(where=where, key=key, family=family.model_type))
        return family.defaults.get(field, None if default is dataclasses.MISSING else default)
    if value is None:
        return None
    if field in _COUNTS:
        fits, expected = isinstance(value, int) and not isinstance(value, bool) and value > 0, "a positive integer"
    elif isinstance(default, bool):
        fits, expected = isinstance(value, bool), "true or false"
    elif field == "activation":
        fits, expected = isinstance(value, str), "the name of an activation"
    else:
        fits, expected = isinstance(value, (int, float)) and not isinstance(value, bool), "a number"
    if not fits:
        raise ValueError(NOT_A_NUMBER.format(where=where, key=key, expected=expected, got=value))
    return value


def _windows(family: Family, fields: Mapping[str, Any], num_layers: int, where: str) -> dict[str, Any]:
    """Returns the fields `layer_types` and `sliding_window`."""
    if family.sliding is None:
        return {"layer_types": ("full",) * num_layers, "sliding_window": None}
    window = fields.get("sliding_window", family.defaults["sliding_window"])
    if family.model_type in _OPTIONAL_WINDOWS and not fields.get("use_sliding_window", False):
        window = None
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(
            NOT_A_NUMBER.format(where=where, key="sliding_window", expected="a positive integer or null", got=window)
        )
    listed = fields.get("layer_types")
    if listed is None:
        types = ["sliding_attention" if family.sliding(i, fields) else "full_attention" for i in range(num_layers)]
    else:
        types = listed
        if not isinstance(types, list) or not set(types) <= {"full_attention", "sliding_attention"}:
            raise ValueError(BAD_LAYER_TYPE.format(where=where, got=listed))
        if len(types) != num_layers:
            raise ValueError(
                NOT_A_NUMBER.format(
                    where=where, key="layer_types", expected=f"a list of {num_layers} entries", got=listed
                )
            )
    if window is None:
        types = ["full_attention"] * num_layers
    kinds = tuple(kind.removesuffix("_attention") for kind in types)
    return {"layer_types": kinds, "sliding_window": window if "sliding" in kinds else None}
