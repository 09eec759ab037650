"""The architectures that `from_pretrained` and `save_pretrained` know. To add one, list it in `_ALL`."""

import functools
import json
from collections.abc import Collection, Mapping
from typing import Any

from nnx.core.module.module import Module
from nnx.core.repr import short
from nnx.models.architecture import Architecture
from nnx.models.architectures.bert_format import BERT
from nnx.models.architectures.clip_format import CLIP_MODELS
from nnx.models.architectures.resnet_format import RESNET
from nnx.models.architectures.t5_format import T5_MODELS
from nnx.models.architectures.vit_format import VIT
from nnx.models.architectures.whisper_format import WHISPER
from nnx.models.config import DecoderConfig
from nnx.models.decoder import Decoder
from nnx.models.families.families import FAMILIES, UNKNOWN_MODEL
from nnx.models.files.table import Parameter
from nnx.transforms.control.class_forms import Scan

NOT_A_MODEL = "save_pretrained takes a model of nnx.models ({known}), got {got}."


def located(config: DecoderConfig, paths: Collection[str]) -> dict[str, Parameter]:
    """Returns the parameters of a decoder by the paths they have if its layers are in a list."""
    found = {path: Parameter(path) for path in paths if not path.startswith(("layers/", "lead/", "tail/"))}
    by_place: dict[str, list[str]] = {}
    for path in paths:
        parts = path.split("/", 4 if path.startswith("layers/scan_module/") else 2)
        by_place.setdefault("/".join(parts[:-1]), []).append(parts[-1])
    scanned = any(place.startswith("layers/scan_module/") for place in by_place)
    for number, (place, index) in enumerate(_layer_places(config, scanned)):
        found |= {f"layers/{number}/{rest}": Parameter(f"{place}/{rest}", index) for rest in by_place.get(place, ())}
    return found


def _layer_places(config: DecoderConfig, scanned: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the path of each layer, and its index in the stack if it is in one."""
    stack = config.stack
    if not scanned or stack.count < 2:  # a Decoder does not scan a single period either
        return [(f"layers/{i}", ()) for i in range(config.num_layers)]
    numbers = range(stack.count * stack.period)
    stacked = [(f"layers/scan_module/layers/{i % stack.period}", (i // stack.period,)) for i in numbers]
    rest = range(config.num_layers - stack.lead - len(numbers))
    return [*((f"lead/{i}", ()) for i in range(stack.lead)), *stacked, *((f"tail/{i}", ()) for i in rest)]


def _completed(config: DecoderConfig, found: Mapping[str, Any]) -> DecoderConfig:
    """Returns the config with the output layer that the tensors of a checkpoint have, by name, with their shapes."""
    if "score.weight" in found:
        number, listed = found["score.weight"].shape[0], json.loads(dict(config.extra).get("id2label", "{}"))
        labels = tuple(listed.get(str(i), f"LABEL_{i}") for i in range(number))
        return config.replace(head="labels", labels=labels)
    table = FAMILIES[config.model_type].table_of(config)
    # A model saved without its head has other names; one that lacks it under the usual names is incomplete.
    is_bare = table.body[0].name in found and not any(entry.name in found for entry in table.head)
    has_head = config.head_activation is not None or not config.tie_embeddings
    return config.replace(head="none") if is_bare and has_head else config


DECODERS = Architecture(
    families=tuple(FAMILIES.values()),
    modules=(Decoder,),
    build=Decoder,
    dtype_paths=("embed/embedding",),
    options=("scan_layers", "remat"),
    options_of=lambda model: {"scan_layers": isinstance(model.layers, Scan)},
    located=located,
    completed=_completed,
)

_ALL = (DECODERS, BERT, VIT, CLIP_MODELS, RESNET, T5_MODELS, WHISPER)

ARCHITECTURES = {model_type: architecture for architecture in _ALL for model_type in architecture.model_types}
"""The known architectures by the `model_type` of `config.json`."""


@functools.cache
def entry_names(*fields: str) -> frozenset[str]:
    """Returns the names that entries for these fields have in the `config.json` of any family."""
    families = (family for architecture in _ALL for family in architecture.families)
    return frozenset().union(*(family.names_of(fields) for family in families))


def architecture_named(model_type: Any, where: str) -> Architecture:
    """Returns the architecture of a `model_type`; `where` is named in the error."""
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise ValueError(UNKNOWN_MODEL.format(where=where, got=model_type, known=", ".join(ARCHITECTURES)))
    return ARCHITECTURES[model_type]


def architecture_of(model: Module) -> Architecture:
    """Returns the architecture of a model."""
    for architecture in ARCHITECTURES.values():
        if isinstance(model, architecture.modules):
            return architecture
    known = dict.fromkeys(cls.__name__ for each in ARCHITECTURES.values() for cls in each.modules)
    raise TypeError(NOT_A_MODEL.format(known=", ".join(known), got=short(model)))
