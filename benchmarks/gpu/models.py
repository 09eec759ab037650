"""The models that `decode` measures, with the same weights as an nnx Module and as nested dicts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import nnx
from benchmarks.gpu import raw_train
from benchmarks.llamas import BASE, Sizes, decoder_config
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
    "llama": Shape(128256, 16, 2048, 32, 8, 8192, BASE),  # the sizes of Llama 3.2 1B
}
TINY_SHAPES = {
    "gpt2": Shape(64, 2, 32, 2, 2, 128, None, jnp.float32),
    "llama": Shape(64, 2, 32, 4, 2, 64, BASE, jnp.float32),
}


def llama(shape: Shape) -> Sizes:
    """Returns the sizes of a Llama, whose embedding is its output layer."""
    return Sizes(shape.vocab, shape.layers, shape.width, shape.heads, shape.kv_heads, shape.hidden, tied=True)


@functools.cache
def make_model(shape: Shape, scanned: bool) -> Any:
    """Makes the Module with random weights, the same for scanned layers and for layers in a list."""
    if not scanned:
        return _unscanned(make_model(shape, True))
    if shape.base is None:
        config = Config(shape.vocab, 1024, shape.layers, shape.heads, shape.width, dtype=shape.dtype)
        model = GPT(config, ctx=nnx.context(0))
        _set_dtype(model, shape.dtype)
        return model
    return _decoder(decoder_config(llama(shape)), shape.dtype)


def raw_params(shape: Shape) -> dict[str, Any]:
    """Returns the weights of `make_model` for `raw_decode`."""
    params = make_model(shape, shape.base is None).filter(nnx.Param).map(lambda _, param: param.value).to_nested()
    return raw_train.from_model(params) if shape.base is None else _raw_llama(params)


def _raw_llama(params: dict[str, Any]) -> dict[str, Any]:
    layers = []
    for number in sorted(params["layers"], key=int):
        block = params["layers"][number]
        out = block["attention"]["out"]["kernel"]
        layers.append(
            {
                "norm1": block["attention_norm"],
                **{name: block["attention"][name] for name in ("query", "key", "value")},
                "out": {"kernel": out.reshape(-1, out.shape[-1])},
                "norm2": block["mlp_norm"],
                **{name: block["mlp"][name] for name in ("gate", "up", "down")},
            }
        )
    return {"embed": params["embed"]["embedding"], "norm": params["norm"], "layers": layers}


def num_weights(shape: Shape) -> int:
    """Returns how many weights a step reads: all matrices, of the tables of positions and tokens only the output."""
    head = shape.width // shape.heads
    attention = 2 * shape.width * shape.width + 2 * shape.width * shape.kv_heads * head
    mlp = (2 if shape.base is None else 3) * shape.width * shape.hidden
    return shape.layers * (attention + mlp) + shape.vocab * shape.width


@nnx.jit(static_argnums=(0, 1))
def _decoder(config: Any, dtype: Any) -> Any:
    return nnx.models.Decoder(config, dtype=dtype, param_dtype=dtype, scan_layers=True, ctx=nnx.context(0))


@nnx.jit
def _unscanned(model: Any) -> Any:
    return model.unscanned()


@nnx.jit(static_argnums=1, donate_argnums=0)
def _set_dtype(model: Any, dtype: Any) -> None:
    model.update_state(jax.tree.map(lambda x: x.astype(dtype), model.get_state()))
