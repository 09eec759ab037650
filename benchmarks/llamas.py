"""The sizes of the Llamas that benchmarks measure, in the words of NNX, of a `config.json` and of a checkpoint."""

from typing import Any, NamedTuple

import nnx


class Sizes(NamedTuple):
    """The sizes of a Llama; `tied` if the embedding is the output layer, too."""

    vocab: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    tied: bool = False
    max_length: int = 8192

    @property
    def of_keys(self) -> int:
        """The features of all keys together."""
        return self.width * self.kv_heads // self.heads


EIGHT_BILLION = Sizes(128256, 32, 4096, 32, 8, 14336)
TINY = Sizes(256, 2, 64, 4, 2, 128)
BASE = 500000.0


def decoder_config(sizes: Sizes) -> nnx.models.DecoderConfig:
    """Returns the config of NNX."""
    return nnx.models.DecoderConfig(
        model_type="llama",
        vocab_size=sizes.vocab,
        features=sizes.width,
        hidden_features=sizes.hidden,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        max_length=sizes.max_length,
        norm_epsilon=1e-5,
        rotary=nnx.models.RotaryConfig(base=BASE),
        tie_embeddings=sizes.tied,
    )


def published_config(sizes: Sizes) -> dict[str, Any]:
    """Returns the entries of a `config.json`, which are also the arguments of `transformers.LlamaConfig`."""
    return {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.width,
        "intermediate_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": sizes.max_length,
        "rope_theta": BASE,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": sizes.tied,
    }


def tensors(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor of a checkpoint, by name."""
    layer = {
        "self_attn.q_proj.weight": (sizes.width, sizes.width),
        "self_attn.k_proj.weight": (sizes.of_keys, sizes.width),
        "self_attn.v_proj.weight": (sizes.of_keys, sizes.width),
        "self_attn.o_proj.weight": (sizes.width, sizes.width),
        "mlp.gate_proj.weight": (sizes.hidden, sizes.width),
        "mlp.up_proj.weight": (sizes.hidden, sizes.width),
        "mlp.down_proj.weight": (sizes.width, sizes.hidden),
        "input_layernorm.weight": (sizes.width,),
        "post_attention_layernorm.weight": (sizes.width,),
    }
    inner = {f"model.layers.{i}.{name}": shape for i in range(sizes.layers) for name, shape in layer.items()}
    outer = {"model.embed_tokens.weight": (sizes.vocab, sizes.width), "model.norm.weight": (sizes.width,)}
    return {**outer, **inner, **({} if sizes.tied else {"lm_head.weight": (sizes.vocab, sizes.width)})}
