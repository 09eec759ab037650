"""Tiny published models: the goldens on disk, and decoders of every family with random weights."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import nnx

GOLDEN = Path(__file__).parent / "golden"
ALL_GOLDENS = {  # the model type of each one, by its name
    path.parent.name: json.loads(path.with_name("config.json").read_text())["model_type"]
    for path in sorted(GOLDEN.glob("*/golden.npz"))
}
GOLDENS = [name for name, model_type in ALL_GOLDENS.items() if model_type in nnx.models.FAMILIES]  # the decoders
ENCODERS = [
    name for name, model_type in ALL_GOLDENS.items() if model_type in ("bert", "vit", "clip", "resnet", "t5", "whisper")
]


@functools.cache
def golden_config(name: str) -> nnx.models.DecoderConfig:
    return nnx.models.from_pretrained(GOLDEN / name, abstract=True).config


@functools.cache
def golden_model(name: str) -> Any:
    """The model of a golden; tests must not change it."""
    return nnx.models.from_pretrained(GOLDEN / name)


def tiny_config(**changes: Any) -> nnx.models.DecoderConfig:
    settings: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 32,
        "features": 16,
        "hidden_features": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "max_length": 64,
    }
    return nnx.models.DecoderConfig(**{**settings, **changes})


def randomized(model: Any, seed: int = 0) -> Any:
    """The model with every parameter drawn anew, norms and biases as well, in place."""
    random = np.random.default_rng(seed)

    def draw(path: str, leaf: Any) -> Any:
        return leaf.replace(jnp.asarray(0.4 * random.standard_normal(leaf.value.shape), leaf.value.dtype))

    model.update_state(model.filter(nnx.Param).map(draw))
    return model


def tiny_model(seed: int = 0, scan_layers: bool = False, **changes: Any) -> nnx.models.Decoder:
    return randomized(nnx.models.Decoder(tiny_config(**changes), scan_layers=scan_layers, ctx=nnx.context(0)), seed)


def tokens_for(config: nnx.models.DecoderConfig, *shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, config.vocab_size, shape), jnp.int32)


def edited(directory: Path, **changes: Any) -> None:
    """Changes entries of a `config.json`; `...` removes one."""
    file = directory / "config.json"
    fields = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in fields.items() if value is not ...}))


def golden_arrays(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs of the golden of an encoder, and its outputs."""
    with np.load(GOLDEN / name / "golden.npz") as file:
        arrays = dict(file)
    inputs, outputs = (
        {key.removeprefix(start): array for key, array in arrays.items() if key.startswith(start)}
        for start in ("in.", "out.")
    )
    return inputs, outputs


def encoder_outputs(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What an encoder computes, by name; "logits" if it returns an array."""
    out = nnx.jit(lambda model, inputs: model(**inputs))(model, inputs)
    named = out._asdict() if isinstance(out, tuple) else {"logits": out}
    return {key: array for key, array in named.items() if array is not None}
