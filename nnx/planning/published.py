"""Steps of published models, from their `config.json` alone: what the command line plans."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from nnx.generation.generate import generate
from nnx.models.architecture import abstract_model
from nnx.models.decoder import Decoder
from nnx.models.registry import architecture_named
from nnx.nn.cross_entropy import cross_entropy
from nnx.training.optimizer import Optimizer
from nnx.transforms.derivatives.grad import value_and_grad
from nnx.transforms.jit.jit import jit

NO_CONFIG = "{path} is neither a config.json nor a directory with one, nor SCRIPT.py:FUNCTION."
NOT_A_DECODER = "{path} describes a model of type {family!r}. Steps are planned for decoder-only language models."


def training_step(path: pathlib.Path, batch: int, length: int) -> tuple[Callable[..., Any], Any, Any]:
    """Returns a training step of a published model with its arguments, which are abstract.

    Parameters and the moments of AdamW are float32, the computation is in bfloat16, layers are scanned and recomputed
    in the backward pass.
    """
    optimizer = Optimizer(decoder_of(path, jnp.float32, remat=True), optax.adamw(1e-4))

    @jit(donate_argnums=0)
    def train_step(optimizer: Any, tokens: jax.Array) -> jax.Array:
        def loss_fn(model: Any) -> jax.Array:
            return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

        loss, grads = value_and_grad(loss_fn)(optimizer.model)
        optimizer.update(grads)
        return loss

    return train_step, optimizer, jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)


def writing_step(path: pathlib.Path, batch: int, length: int, new: int) -> tuple[Callable[..., Any], Any, Any]:
    """Returns a function that continues prompts of a length by so many tokens, with its arguments; in bfloat16."""

    @jit
    def write(model: Any, prompts: jax.Array) -> jax.Array:
        return generate(model, prompts, max_new_tokens=new, temperature=0.0)

    return write, decoder_of(path, jnp.bfloat16, remat=False), jax.ShapeDtypeStruct((batch, length), jnp.int32)


def decoder_of(path: pathlib.Path, param_dtype: Any, remat: bool) -> Any:
    """Returns the model that a `config.json` describes, without values; no weights are read."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(NO_CONFIG.format(path=path))
    fields = json.loads(file.read_text(encoding="utf-8"))
    architecture = architecture_named(fields.get("model_type"), str(file))
    if Decoder not in architecture.modules:
        raise ValueError(NOT_A_DECODER.format(path=file, family=fields.get("model_type")))
    config = architecture.read_config(fields, str(file))
    return abstract_model(architecture, config, param_dtype, dtype=jnp.bfloat16, scan_layers=True, remat=remat)
