"""The architectures that `from_pretrained` and `save_pretrained` know. To add one, list it in `_ALL`."""

from collections.abc import Collection
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
from nnx.models.families import FAMILIES, UNKNOWN_MODEL, config_from_dict, config_to_dict
from nnx.models.files.tables import Link, checkpoint_prefix, is_ignored, links
from nnx.transforms.control.class_forms import Scan

NOT_A_MODEL = "save_pretrained takes a model of nnx.models ({known}), got {got}."


def _decoder_links(config: DecoderConfig, paths: Collection[str], names: Collection[str]) -> list[Link]:
    scanned = any(path.startswith("layers/scan_module/") for path in paths)
    return links(config, scanned, paths, checkpoint_prefix(config, names))


DECODERS = Architecture(
    model_types=tuple(FAMILIES),
    modules=(Decoder,),
    build=Decoder,
    read_config=config_from_dict,
    write_config=config_to_dict,
    links=_decoder_links,
    is_ignored=is_ignored,
    dtype_paths=("embed/embedding",),
    options=("scan_layers", "remat"),
    options_of=lambda model: {"scan_layers": isinstance(model.layers, Scan)},
)

_ALL = (DECODERS, BERT, VIT, CLIP_MODELS, RESNET, T5_MODELS, WHISPER)

ARCHITECTURES = {model_type: architecture for architecture in _ALL for model_type in architecture.model_types}
"""The known architectures by the `model_type` of `config.json`."""


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
