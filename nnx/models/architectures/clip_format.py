"""Published CLIP models: the entries of `config.json` and the names of tensors, as the `Architecture` `CLIP_MODELS`."""

from collections.abc import Mapping
from typing import Any, ClassVar

from nnx.models.architecture import Architecture
from nnx.models.architectures.clip import CLIP, CLIPConfig, CLIPTextConfig, CLIPVisionConfig
from nnx.models.family import Family
from nnx.models.files.config_entries import ENCODER, NOT_A_NUMBER
from nnx.models.files.layouts import KERNEL_2D, LINEAR
from nnx.models.files.table import Table, TableEntry, attention, linear, norm


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


_TABLE = Table(
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

_TEXT = Family(
    "clip_text_model",
    "CLIPTextModel",
    _TABLE,
    {**ENCODER, "vocab_size": "vocab_size", "max_position_embeddings": "max_length", "eos_token_id": "end_token"},
    config=CLIPTextConfig,
)
_VISION = Family(
    "clip_vision_model",
    "CLIPVisionModel",
    _TABLE,
    {**ENCODER, "image_size": "image_size", "patch_size": "patch_size", "num_channels": "channels"},
    config=CLIPVisionConfig,
)


class _Towers:
    """The part of the config that describes the two encoders, each in its own object."""

    FAMILIES: ClassVar[Mapping[str, Family]] = {"text": _TEXT, "vision": _VISION}

    def known(self, entries: Mapping[str, Any]) -> set[str]:
        return {f"{name}_config{end}" for name in self.FAMILIES for end in ("", "_dict")}

    def read(self, entries: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        towers: dict[str, Any] = {}
        for name, family in self.FAMILIES.items():
            # Older files have a second version, under another name; if it is there, transformers uses it.
            older, newer = (entries.get(f"{name}_config{end}") for end in ("_dict", ""))
            inner = older if older is not None else {} if newer is None else newer
            if not isinstance(inner, Mapping):
                raise ValueError(
                    NOT_A_NUMBER.format(where=where, key=f"{name}_config", expected="an object", got=inner)
                )
            # Each encoder repeats the size of the embeddings, often wrongly: only the outer one counts.
            inner = {key: value for key, value in inner.items() if key != "projection_dim"}
            towers[name] = family.read(inner, f"{where} ({name}_config)")
        return towers

    def write(self, config: Any) -> dict[str, Any]:
        towers = {f"{name}_config": family.write(getattr(config, name)) for name, family in self.FAMILIES.items()}
        for entries in towers.values():
            del entries["architectures"]
            entries["projection_dim"] = config.embedding_features
        return towers


_FAMILY = Family(
    "clip", "CLIPModel", _TABLE, {"projection_dim": "embedding_features"}, parts=(_Towers(),), config=CLIPConfig
)

CLIP_MODELS = Architecture(families=(_FAMILY,), modules=(CLIP,), build=CLIP, dtype_paths=("text/embed/embedding",))
"""How `clip` models are opened and written."""
