"""Published ViT models: the entries of `config.json` and the names of tensors, as the `Architecture` `VIT`."""

from collections.abc import Mapping
from typing import Any

from nnx.models.architecture import Architecture
from nnx.models.architectures.vit import ViT, ViTClassifier, ViTConfig
from nnx.models.families import NOT_SUPPORTED
from nnx.models.files.config_entries import ConfigEntries
from nnx.models.files.name_table import NameTable, attention, linear, norm
from nnx.models.files.tables import KERNEL_2D, TableEntry, TensorLayout

_ENTRIES = ConfigEntries(
    "vit",
    ViTConfig,
    {
        "image_size": "image_size",
        "patch_size": "patch_size",
        "num_channels": "channels",
        "hidden_size": "features",
        "intermediate_size": "hidden_features",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "hidden_act": "activation",
        "layer_norm_eps": "norm_epsilon",
        "qkv_bias": "use_qkv_bias",
    },
    only={"pooler_act": "tanh"},
    classes={None: "ViTModel", "image_classification": "ViTForImageClassification"},
)
_LAYER = "encoder.layer.{}"
_PROJECTIONS = ("attention.query", "attention.key", "attention.value", "output.dense")
_TABLE = NameTable(
    (
        TableEntry("embeddings.cls_token", ("embed/class_token",), TensorLayout(leading=2)),
        TableEntry("embeddings.position_embeddings", ("embed/positions/embedding",), TensorLayout(leading=1)),
        *linear("embeddings.patch_embeddings.projection", "embed/patches", KERNEL_2D),
        *attention(f"{_LAYER}.attention", _PROJECTIONS, "layers/{}/attention"),
        *norm(f"{_LAYER}.layernorm_before", "layers/{}/attention_norm"),
        *norm(f"{_LAYER}.layernorm_after", "layers/{}/mlp_norm"),
        *linear(f"{_LAYER}.intermediate.dense", "layers/{}/mlp/layers/0"),
        *linear(f"{_LAYER}.output.dense", "layers/{}/mlp/layers/1"),
        *norm("layernorm", "norm"),
        *linear("pooler.dense", "pooler"),
    ),
    linear("classifier", "head"),
    "vit.",
    "encoder/",
)


def _read_config(fields: Mapping[str, Any], where: str) -> ViTConfig:
    fields = dict(fields)
    pooled, features = fields.pop("pooler_output_size", None), fields.get("hidden_size", ViTConfig.features)
    if pooled not in (None, features):
        message = NOT_SUPPORTED.format(where=where, key="pooler_output_size", got=pooled, family="vit", only=features)
        raise ValueError(message)
    return _ENTRIES.read(fields, where)


VIT = Architecture(
    model_types=("vit",),
    modules=(ViT, ViTClassifier),
    build=lambda config, **options: (ViT if config.task is None else ViTClassifier)(config, **options),
    read_config=_read_config,
    write_config=lambda config: {**_ENTRIES.write(config), "pooler_output_size": config.features},
    links=lambda config, paths, names: _TABLE.links(paths, names),
    is_ignored=lambda config, name: _TABLE.ignores(name),
    dtype_paths=("embed/class_token", "encoder/embed/class_token"),
)
"""How `vit` models are opened and written."""
