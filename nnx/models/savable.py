"""Whether a model can be saved as a published checkpoint: whoever loads it must get the same model."""

from collections.abc import Mapping
from typing import Any, cast

import jax

from nnx.core.module.module import Module
from nnx.core.repr import short
from nnx.core.trace import is_tracer
from nnx.models.architecture import Architecture, abstract_model, values_by_path
from nnx.models.files.table import Link
from nnx.nn.quantized.quantize import is_quantized

NOT_IN_TABLE = (
    "Cannot save this model as a published {family} checkpoint: the format has no place for {paths}. (Low-rank "
    "adaptations are merged into the weights with `nnx.merge_lora(model)`; nnx.save saves any model.)"
)
QUANTIZED = (
    "Cannot save a quantized model as a published {family} checkpoint, whose format has no place for integers and "
    "scales (those of {paths}). Call `nnx.dequantize(model)` first; nnx.save saves any model."
)
NOT_ITS_CONFIG = (
    "Cannot save this model as a published checkpoint: it is not the one that its config describes, so whoever loads "
    "it would compute something else.\n{differences}\nChange the model or `model.config`; nnx.save saves any model."
)
ABSTRACT = "Cannot save a model without values: {path!r} is {value}."

# The attributes of layers that the config sets and that change the output. (A norm's scale is a parameter, that of
# attention a setting.)
_SETTINGS = (
    *("activation", "gated_activation", "epsilon", "scale_offset", "sliding_window", "scale", "logits_soft_cap"),
    *("base", "rotary_dim", "interleaved", "scaling", "post_norm", "strides", "padding"),
    *("num_buckets", "max_distance", "bidirectional", "reduction_axes", "normalize_after_rotary"),
    *("parallel", "residual_scale", "is_causal", "normalize", "scores", "weight_scale", "weigh_inputs", "groups"),
    *("section_size", "query_scale"),
)
SHOWN = 30  # lines of an error; a wrong config makes every tensor wrong


def check_savable(model: Module, architecture: Architecture, values: Mapping[str, Any], known: list[Link]) -> None:
    """Raises `ValueError` if whoever loads the checkpoint would not get this model."""
    config = cast(Any, model).config
    for name, value in values.items():
        if isinstance(value, jax.ShapeDtypeStruct) or is_tracer(value):
            raise ValueError(ABSTRACT.format(path=name, value=short(value)))
    quantized = [name for name, module in Module.named_modules(model) if is_quantized(module)]
    if quantized:
        raise ValueError(QUANTIZED.format(family=config.model_type, paths=_listed(quantized)))
    covered = {parameter.path for link in known for parameter in link.parameters}
    if covered != values.keys():
        raise ValueError(NOT_IN_TABLE.format(family=config.model_type, paths=_listed(values.keys() - covered)))
    dtype = cast(Any, model).param_dtype
    expected = abstract_model(architecture, config, dtype, **architecture.options_of(model))
    differences = _differences(model, expected)
    if differences:
        raise ValueError(NOT_ITS_CONFIG.format(differences="\n".join(f"  {line}" for line in differences[:SHOWN])))


def _differences(model: Module, expected: Module) -> list[str]:
    """Lists the differences between a model and the one its config describes, as far as they affect the output."""
    ours, theirs = values_by_path(model), values_by_path(expected)
    lines = [f"{path} is missing" for path in theirs if path not in ours]
    for path, value in ours.items():
        if path in theirs and value.shape != theirs[path].shape:
            lines.append(f"{path} is {list(value.shape)}, the config means {list(theirs[path].shape)}")
    modules = dict(Module.named_modules(model))
    for path, described in Module.named_modules(expected):
        for name in _SETTINGS:
            wanted, got = getattr(described, name, None), getattr(modules.get(path), name, None)
            if not isinstance(wanted, (jax.Array, jax.ShapeDtypeStruct)) and wanted != got:
                lines.append(f"{path}: {name} is {short(got)}, the config means {short(wanted)}")
    return lines


def _listed(names: Any) -> str:
    names = sorted(names)
    shown = ", ".join(map(repr, names[:8]))
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
