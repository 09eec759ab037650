"""Published CLIP models: the entries of `config.json` and the names of tensors, as the `Architecture` `CLIP_MODELS`."""

from collections.abc import Mapping
from typing import Any

from nnx.models.architecture import Architecture
from nnx.models.architectures.clip import CLIP, CLIPConfig, CLIPTextConfig, CLIPVisionConfig
from nnx.models.families import NOT_A_NUMBER
from nnx.models.files.config_entries import ConfigEntries
from nnx.models.files.name_table import NameTable, attention, linear, norm
from nnx.models.files.tables import KERNEL_2D, LINEAR, TableEntry

_TOWER = {
    "hidden_size": "features",
    "intermediate_size": "hidden_features",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "hidden_act": "activation",
    "layer_norm_eps": "norm_epsilon",
}
_TEXT = ConfigEntries(
    "clip_text_model",
    CLIPTextConfig,
    {**_TOWER, "vocab_size": "vocab_size", "max_position_embeddings": "max_length", "eos_token_id": "end_token"},
    classes={None: "CLIPTextModel"},
)
_VISION = ConfigEntries(
    "clip_vision_model",
    CLIPVisionConfig,
    {**_TOWER, "image_size": "image_size", "patch_size": "patch_size", "num_channels": "channels"},
    classes={None: "CLIPVisionModel"},
)
_WHOLE = ConfigEntries("clip", CLIPConfig, {"projection_dim": "embedding_features"}, classes={None: "CLIPModel"})


def _read_config(fields: Mapping[str, Any], where: str) -> CLIPConfig:
    outer = dict(fields)
    towers: dict[str, Any] = {}
    for name, entries in (("text", _TEXT), ("vision", _VISION)):
        # Older files have a second version, under another name; if it is there, transformers uses it.
        older, newer = outer.pop(f"{name}_config_dict", None), outer.pop(f"{name}_config", None)
        inner = older if older is not None else {} if newer is None else newer
        if not isinstance(inner, Mapping):
            raise ValueError(NOT_A_NUMBER.format(where=where, key=f"{name}_config", expected="an object", got=inner))
        # Each encoder repeats the size of the embeddings, often wrongly: only the outer one counts.
        inner = {key: value for key, value in inner.items() if key != "projection_dim"}
        towers[name] = entries.read(inner, f"{where} ({name}_config)")
    return _WHOLE.read(outer, where).replace(**towers)


def _write_config(config: CLIPConfig) -> dict[str, Any]:
    towers = {"text_config": _TEXT.write(config.text), "vision_config": _VISION.write(config.vision)}
    for fields in towers.values():
        del fields["architectures"]
        fields["projection_dim"] = config.embedding_features
    return {**_WHOLE.write(config), **towers}


def _layers(name: str, path: str) -> tuple[TableEntry, ...]:
    """Returns the entries of the layers of one of the encoders."""
    name, path = f"{name}.encoder.layers.{{}}", f"{path}/layers/{{}}"
    return (
        *attention(f"{name}.self_attn", ("q_proj", "k_proj", "v_proj", "out_proj"), f"{path}/attention"),
        *norm(f"{name}.layer_norm1", f"{path}/attention_norm"),
        *norm(f"{name}.layer_norm2", f"{path}/mlp_norm"),
        *linear(f"{name}.mlp.fc1", f"{path}/mlp/layers/0"),
        *linear(f"{name}.mlp.fc2", f"{path}/mlp/layers/1"),
    )


_TABLE = NameTable(
    (
        TableEntry("text_model.embeddings.token_embedding.weight", ("text/embed/embedding",)),
        TableEntry("text_model.embeddings.position_embedding.weight", ("text/positions/embedding",)),
        *_layers("text_model", "text"),
        *norm("text_model.final_layer_norm", "text/norm"),
        TableEntry("vision_model.embeddings.class_embedding", ("vision/embed/class_token",)),
        TableEntry("vision_model.embeddings.patch_embedding.weight", ("vision/embed/patches/kernel",), KERNEL_2D),
        TableEntry("vision_model.embeddings.position_embedding.weight", ("vision/embed/positions/embedding",)),
        *norm("vision_model.pre_layrnorm", "vision/pre_norm"),  # so spelled in every checkpoint
        *_layers("vision_model", "vision"),
        *norm("vision_model.post_layernorm", "vision/norm"),
        TableEntry("text_projection.weight", ("text_projection/kernel",), LINEAR),
        TableEntry("visual_projection.weight", ("image_projection/kernel",), LINEAR),
        TableEntry("logit_scale", ("logit_scale",)),
    ),
    ignored=(r"(text|vision)_model\.embeddings\.position_ids",),
)

CLIP_MODELS = Architecture(
    model_types=("clip",),
    modules=(CLIP,),
    build=CLIP,
    read_config=_read_config,
    write_config=_write_config,
    links=lambda config, paths, names: _TABLE.links(paths, names),
    is_ignored=lambda config, name: _TABLE.ignores(name),
    dtype_paths=("text/embed/embedding",),
)
"""How `clip` models are opened and written."""
