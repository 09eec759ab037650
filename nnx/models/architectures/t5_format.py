"""Published T5 models: the entries of `config.json` and the names of tensors, as the `Architecture` `T5_MODELS`."""

from collections.abc import Mapping
from typing import Any

from nnx.models.architecture import Architecture
from nnx.models.architectures.t5 import T5, T5Config, T5Encoder
from nnx.models.family import Family
from nnx.models.files.layouts import LINEAR
from nnx.models.files.table import Table, TableEntry, attention

_HEAD = "lm_head.weight"


def _completed(config: T5Config, names: Mapping[str, Any]) -> T5Config:
    """Returns the config for a checkpoint with these tensors.

    Newer versions of transformers write `"tie_word_embeddings": true` for every model; the output layer is the one in
    the file if there is one, and otherwise the embedding.
    """
    return config.replace(tie_embeddings=_HEAD not in names) if config.task is None else config


def _mlp(name: str, path: str) -> tuple[TableEntry, ...]:
    """Returns the entries of both kinds of MLPs; a model has one of them."""
    return (
        TableEntry(f"{name}.wi.weight", (f"{path}/layers/0/kernel",), LINEAR),
        TableEntry(f"{name}.wo.weight", (f"{path}/layers/1/kernel",), LINEAR),
        TableEntry(f"{name}.wi_0.weight", (f"{path}/gate/kernel",), LINEAR),
        TableEntry(f"{name}.wi_1.weight", (f"{path}/up/kernel",), LINEAR),
        TableEntry(f"{name}.wo.weight", (f"{path}/down/kernel",), LINEAR),
    )


def _stack(name: str, parts: tuple[str, ...]) -> tuple[TableEntry, ...]:
    """Returns the entries of the encoder or the decoder.

    Args:
        name: the name of the stack, which is also its path.
        parts: the names of the parts of a layer, in order: attentions and MLP.
    """
    classes = {"attention": "SelfAttention", "cross_attention": "EncDecAttention", "mlp": "DenseReluDense"}
    entries = [
        # In the files, the first layer holds the positions that all layers use.
        TableEntry(
            f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (f"{name}/positions/embedding",)
        ),
        TableEntry(f"{name}.final_layer_norm.weight", (f"{name}/norm/scale",)),
    ]
    for number, part in enumerate(parts):
        layer, path = f"{name}.block.{{}}.layer.{number}", f"{name}/layers/{{}}/{part}"
        inner = f"{layer}.{classes[part]}"
        entries += _mlp(inner, path) if part == "mlp" else attention(inner, ("q", "k", "v", "o"), path)
        entries.append(TableEntry(f"{layer}.layer_norm.weight", (f"{path}_norm/scale",)))
    return tuple(entries)


_TABLE = Table(
    (
        TableEntry("shared.weight", ("embed/embedding",)),
        *_stack("encoder", ("attention", "mlp")),
        *_stack("decoder", ("attention", "cross_attention", "mlp")),
        TableEntry(_HEAD, ("head/kernel",), LINEAR),
    ),
    # Copies of the embedding, and a table that the first checkpoints have although nothing uses it.
    ignored=(
        r"(encoder|decoder)\.embed_tokens\.weight",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
    older={"shared.weight": "encoder.embed_tokens.weight"},
)

_FAMILY = Family(
    "t5",
    {None: "T5ForConditionalGeneration", "encoding": "T5EncoderModel"},
    _TABLE,
    {
        "vocab_size": "vocab_size",
        "d_model": "features",
        "d_ff": "hidden_features",
        "d_kv": "head_dim",
        "num_layers": "num_layers",
        "num_decoder_layers": "num_decoder_layers",
        "num_heads": "num_heads",
        "relative_attention_num_buckets": "num_buckets",
        "relative_attention_max_distance": "max_distance",
        "feed_forward_proj": "feed_forward",
        "layer_norm_epsilon": "norm_epsilon",
        "tie_word_embeddings": "tie_embeddings",
        "scale_decoder_outputs": "scale_logits",
        "decoder_start_token_id": "start_token",
    },
    # What transformers takes for entries that are absent, as they are in most published files.
    defaults={
        "num_decoder_layers": lambda values: values["num_layers"],
        "scale_logits": lambda values: values["tie_embeddings"],
    },
    only={"is_decoder": False},
    config=T5Config,
)

T5_MODELS = Architecture(
    families=(_FAMILY,),
    modules=(T5, T5Encoder),
    build=lambda config, **options: (T5 if config.task is None else T5Encoder)(config, **options),
    dtype_paths=("embed/embedding",),
    completed=_completed,
)
"""How `t5` models are opened and written."""
