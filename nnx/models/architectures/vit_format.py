"""Published ViT models: the entries of `config.json` and the names of tensors, as the `Architecture` `VIT`."""

from nnx.models.architecture import Architecture
from nnx.models.architectures.vit import ViT, ViTClassifier, ViTConfig
from nnx.models.family import Family
from nnx.models.files.config_entries import ENCODER, Labels
from nnx.models.files.layouts import KERNEL_2D, TensorLayout
from nnx.models.files.table import Table, TableEntry, attention, linear, norm

_LAYER = "encoder.layer.{}"
_PROJECTIONS = ("attention.query", "attention.key", "attention.value", "output.dense")
_TABLE = Table(
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

_FAMILY = Family(
    "vit",
    {None: "ViTModel", "image_classification": "ViTForImageClassification"},
    _TABLE,
    {
        **{"image_size": "image_size", "patch_size": "patch_size", "num_channels": "channels"},
        **ENCODER,
        "qkv_bias": "use_qkv_bias",
    },
    only={"pooler_act": "tanh", "pooler_output_size": lambda values: values["features"]},
    parts=(Labels(),),
    config=ViTConfig,
)

VIT = Architecture(
    families=(_FAMILY,),
    modules=(ViT, ViTClassifier),
    build=lambda config, **options: (ViT if config.task is None else ViTClassifier)(config, **options),
    dtype_paths=("embed/class_token", "encoder/embed/class_token"),
)
"""How `vit` models are opened and written."""
