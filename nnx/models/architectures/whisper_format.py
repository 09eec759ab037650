"""Published Whisper models: the entries of `config.json` and the names of tensors, as the `Architecture` `WHISPER`."""

from nnx.models.architecture import Architecture
from nnx.models.architectures.whisper import Whisper, WhisperConfig
from nnx.models.family import Family
from nnx.models.files.config_entries import SpecialTokens
from nnx.models.files.layouts import KERNEL_1D
from nnx.models.files.table import Table, TableEntry, attention, linear, norm

_DEFAULT_TOKEN = 50256  # what transformers takes for a special token that is absent
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def _block(name: str, path: str) -> tuple[TableEntry, ...]:
    """Returns the entries of an `EncoderBlock`."""
    return (
        *attention(f"{name}.self_attn", _PROJECTIONS, f"{path}/attention"),
        *norm(f"{name}.self_attn_layer_norm", f"{path}/attention_norm"),
        *linear(f"{name}.fc1", f"{path}/mlp/layers/0"),
        *linear(f"{name}.fc2", f"{path}/mlp/layers/1"),
        *norm(f"{name}.final_layer_norm", f"{path}/mlp_norm"),
    )


_ENCODER, _DECODER = "model.encoder", "model.decoder"
_LAYER = f"{_DECODER}.layers.{{}}"
_TABLE = Table(
    (
        *linear(f"{_ENCODER}.conv1", "encoder/conv", KERNEL_1D),
        *linear(f"{_ENCODER}.conv2", "encoder/halving_conv", KERNEL_1D),
        TableEntry(f"{_ENCODER}.embed_positions.weight", ("encoder/positions/embedding",)),
        *_block(f"{_ENCODER}.layers.{{}}", "encoder/layers/{}"),
        *norm(f"{_ENCODER}.layer_norm", "encoder/norm"),
        TableEntry(f"{_DECODER}.embed_tokens.weight", ("embed/embedding",)),
        TableEntry(f"{_DECODER}.embed_positions.weight", ("positions/embedding",)),
        *_block(_LAYER, "layers/{}/text"),
        *attention(f"{_LAYER}.encoder_attn", _PROJECTIONS, "layers/{}/cross_attention"),
        *norm(f"{_LAYER}.encoder_attn_layer_norm", "layers/{}/cross_attention_norm"),
        *norm(f"{_DECODER}.layer_norm", "norm"),
    ),
    ignored=(r"proj_out\.weight",),  # a copy of the embedding
)

_FAMILY = Family(
    "whisper",
    "WhisperForConditionalGeneration",
    _TABLE,
    {
        "vocab_size": "vocab_size",
        "d_model": "features",
        "num_mel_bins": "num_bands",
        "max_source_positions": "max_source_length",
        "max_target_positions": "max_length",
        "encoder_layers": "num_layers",
        "encoder_attention_heads": "num_encoder_heads",
        "encoder_ffn_dim": "hidden_features",
        "decoder_layers": "num_decoder_layers",
        "decoder_attention_heads": "num_decoder_heads",
        "decoder_ffn_dim": "decoder_hidden_features",
        "activation_function": "activation",
        "decoder_start_token_id": "start_token",
    },
    only={"tie_word_embeddings": True, "is_encoder_decoder": True, "scale_embedding": False},
    # transformers refuses to pad with a token outside the vocabulary.
    parts=(SpecialTokens(lambda config: config.vocab_size <= _DEFAULT_TOKEN),),
    config=WhisperConfig,
)

WHISPER = Architecture(families=(_FAMILY,), modules=(Whisper,), build=Whisper, dtype_paths=("embed/embedding",))
"""How `whisper` models are opened and written."""
