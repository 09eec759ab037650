"""Small models that can generate, for the tests of this folder."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import nnx


class Table(nnx.Module):
    """A model whose logits depend on the last token alone: row `token` of a table `[vocab, vocab]`.

    Its cache counts tokens. `traces` lists the shapes of the tokens that `decode` was traced with.
    """

    traces: list[tuple[int, ...]] = []  # of the class, so that it is not part of the Module's structure

    def __init__(self, table):
        self.table = nnx.Param(jnp.asarray(table, jnp.float32))

    def init_cache(self, batch, length, dtype=None):
        return {"count": jnp.zeros(batch, jnp.int32), "room": jnp.zeros((3, batch, length), dtype or jnp.float32)}

    def decode(self, tokens, cache, lengths=None):
        type(self).traces.append(tokens.shape)
        added = tokens.shape[1] if lengths is None else lengths
        return self.table[tokens], {**cache, "count": cache["count"] + added}


def counting(vocab: int = 100) -> Table:
    """A model that counts: after token n, n + 1 is the most likely."""
    return Table(9.0 * jnp.eye(vocab, k=1))


def drawing(probabilities) -> Table:
    """A model that draws every token from one distribution."""
    return Table(np.tile(np.log(probabilities), (len(probabilities), 1)))


BASE = {
    "vocab_size": 61,
    "features": 24,
    "hidden_features": 40,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_length": 64,
}
WINDOWED = {"layer_types": ("sliding", "full"), "sliding_window": 4}
CONFIGS = {
    "gpt2": {
        "num_kv_heads": 4,
        "gated": False,
        "activation": "gelu",
        "norm": "layer",
        "use_qkv_bias": True,
        "use_out_bias": True,
        "use_mlp_bias": True,
        "rotary": None,
        "tie_embeddings": True,
    },
    "llama": {"rotary": nnx.models.RotaryConfig(base=500000.0)},
    "mistral": {"layer_types": ("sliding",) * 2, "sliding_window": 5},
    "qwen2": {"use_qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"normalize_qk": True},
    "gemma2": {
        **WINDOWED,
        "activation": "gelu",
        "norm_offset": 1.0,
        "post_norms": True,
        "query_pre_attn_scalar": 12.0,
        "attention_soft_cap": 5.0,
        "logits_soft_cap": 3.0,
        "scale_embeddings": True,
        "tie_embeddings": True,
    },
    "gemma3_text": {
        **WINDOWED,
        "normalize_qk": True,
        "norm_offset": 1.0,
        "post_norms": True,
        "local_rotary": nnx.models.RotaryConfig(base=100.0),
    },
    "phi3": {"rotary": nnx.models.RotaryConfig(fraction=0.5)},
}


def decoder(family: str = "llama", seed: int = 0, changes=(), **options) -> nnx.models.Decoder:
    """A tiny decoder of a family; `changes` are other values in its config."""
    return _decoder(family, seed, tuple(dict(changes).items()), tuple(options.items())).clone()


@functools.cache
def _decoder(family: str, seed: int, changes, options) -> nnx.models.Decoder:
    config = nnx.models.DecoderConfig(model_type=family, **{**BASE, **CONFIGS[family], **dict(changes)})
    return nnx.models.Decoder(config, ctx=nnx.context(seed), **dict(options))


def random_prompts(batch: int, length: int, vocab: int = BASE["vocab_size"], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, (batch, length)).astype(np.int32)


def full_pass(model, prompts, lengths, tokens) -> jax.Array:
    """The logits of each new token according to a pass over prompt and new tokens without a cache."""
    prompts, tokens, lengths = np.asarray(prompts), np.asarray(tokens), np.asarray(lengths)
    new = tokens.shape[1]
    texts = np.zeros((len(prompts), prompts.shape[1] + new), np.int32)
    for text, prompt, length, added in zip(texts, prompts, lengths, tokens, strict=True):
        text[: length + new] = [*prompt[:length], *added]
    logits = nnx.jit(model)(texts)
    at = lengths[:, None] - 1 + np.arange(new)  # the position before each new token
    return jnp.take_along_axis(logits, at[..., None], axis=1)
