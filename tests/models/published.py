"""Tiny published models: the goldens on disk, and decoders of every family with random weights."""

import contextlib
import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import nnx
from nnx.models.files import sending
from nnx.storage import placing
from tests.models import golden_files

ALL_GOLDENS = {  # the model type of each one, by its name
    path.stem: json.loads(path.read_text())["config"]["model_type"]
    for path in sorted(golden_files.FOLDER.glob("*.json"))
}
GOLDENS = [name for name, model_type in ALL_GOLDENS.items() if model_type in nnx.models.FAMILIES]  # the decoders
# Those whose tensors or layers are arranged in a way that no other of them has, for tests that take long.
DIFFERENT = [
    *(
        "cohere",
        "deepseek_v3",
        "ernie4_5_moe",
        "falcon",
        "gemma2",
        "gemma3_text",
        "glm4_moe",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
    ),
    *("llama", "llama4_text", "phi3", "phi3_long", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "stablelm"),
]
WRITERS = [name for name in GOLDENS if "greedy" in json.loads((golden_files.FOLDER / f"{name}.json").read_text())]
ENCODERS = [name for name in ALL_GOLDENS if name not in GOLDENS]


# Goldens become directories when a test asks for them, and go with the process.
_DIRECTORIES = tempfile.TemporaryDirectory(prefix="goldens-")


@functools.cache
def golden_directory(name: str) -> Path:
    """The published directory of a golden; tests must not change it."""
    golden, directory = golden_files.read(name), Path(_DIRECTORIES.name) / name
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(golden["config"], indent=2))
    tensors, number = golden_files.weights(golden), golden.get("shards", 1)
    if number == 1:
        nnx.save_safetensors(directory / "model.safetensors", nnx.State(tensors))
        return directory
    shards = {f"model-{i + 1:05}-of-{number:05}.safetensors": list(tensors)[i::number] for i in range(number)}
    for file, names in shards.items():
        nnx.save_safetensors(directory / file, nnx.State({name: tensors[name] for name in names}))
    weight_map = {name: file for file, names in shards.items() for name in names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


@contextlib.contextmanager
def sending_to_cpus(piece: int = 700) -> Iterator[None]:
    """Loads parameters as on an accelerator: sent as they are stored, a few rows at a time, and rearranged there."""
    with (
        mock.patch.object(placing, "rearranges", lambda platforms: True),
        mock.patch.multiple(sending, SMALL=2, PIECE=piece),
    ):
        yield


@functools.cache
def golden_config(name: str) -> nnx.models.DecoderConfig:
    return nnx.models.from_pretrained(golden_directory(name), abstract=True).config


@functools.cache
def golden_model(name: str) -> Any:
    """The model of a golden; tests must not change it."""
    return nnx.models.from_pretrained(golden_directory(name))


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


@functools.cache
def golden_text(name: str) -> np.ndarray:
    """The most likely text in the golden of a model that writes."""
    return golden_files.read(name)["greedy"]


@functools.cache
def golden_arrays(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs of a golden, and the `sums` of its outputs."""
    golden = golden_files.read(name)
    return golden["inputs"], golden["outputs"]


def relative_error(output: Any, expected: np.ndarray) -> float:
    """How far the `sums` of an output are from those of a golden."""
    found = golden_files.sums(output)
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def encoder_outputs(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What an encoder computes, by name; "logits" if it returns an array."""
    out = nnx.jit(lambda model, inputs: model(**inputs))(model, inputs)
    named = out._asdict() if isinstance(out, tuple) else {"logits": out}
    return {key: array for key, array in named.items() if array is not None}
