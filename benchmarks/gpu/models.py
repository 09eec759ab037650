"""The models that `decode` measures, with the same weights as an nnx Module and as nested dicts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import nnx
from benchmarks.gpu import raw_train
from examples.gpt.model import GPT, Config


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a decoder; `base` is that of the rotary embedding, None for the architecture of GPT-2."""

    vocab: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    base: float | None
    dtype: Any = jnp.bfloat16


SHAPES = {
    "gpt2": Shape(50304, 12, 768, 12, 12, 3072, None),
    "llama": Shape(128256, 16, 2048, 32, 8, 8192, 500000.0),  # the sizes of Llama 3.2 1B
}
TINY_SHAPES = {
    "gpt2": Shape(64, 2, 32, 2, 2, 128, None, jnp.float32),
    "llama": Shape(64, 2, 32, 4, 2, 64, 500000.0, jnp.float32),
}


@functools.cache
def make_model(shape: Shape, scanned: bool) -> nnx.Module:
    """Makes the Module with random weights, the same for scanned layers and for layers in a list."""
    if not scanned:
        return nnx.jit(lambda model: model.unscanned())(make_model(shape, True))
    config = Config(shape.vocab, 1024, shape.layers, shape.heads, shape.width, dtype=shape.dtype)
    return _cast(GPT(config, ctx=nnx.context(0)), shape.dtype)


def raw_params(shape: Shape) -> dict[str, Any]:
    """Returns the weights of `make_model` for `raw_decode`."""
    params = make_model(shape, True).filter(nnx.Param).map(lambda _, param: param.value).to_nested()
    return raw_train.from_model(params)


def num_weights(shape: Shape) -> int:
    """Returns how many weights a step reads: all matrices, of the tables of positions and tokens only the output."""
    head = shape.width // shape.heads
    attention = 2 * shape.width * shape.width + 2 * shape.width * shape.kv_heads * head
    mlp = (2 if shape.base is None else 3) * shape.width * shape.hidden
    return shape.layers * (attention + mlp) + shape.vocab * shape.width


@nnx.jit(static_argnums=1, donate_argnums=0)
def _set_dtype(model: nnx.Module, dtype: Any) -> None:
    model.update_state(jax.tree.map(lambda x: x.astype(dtype), model.get_state()))


def _cast(model: Any, dtype: Any) -> Any:
    _set_dtype(model, dtype)
    return model
