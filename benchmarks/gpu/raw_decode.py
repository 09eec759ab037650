"""Decoding a careful person would write without a library: parameters in dicts, one cache per layer, no ragged rows.

Reads a prompt, then writes tokens greedily in one compiled loop. All rows have the same length, so a token goes into
the caches with one `dynamic_update_slice` each; a fused kernel reads only the filled part. A norm with a bias is a
LayerNorm, one without is an RMSNorm; a layer with a "gate" is gated; without a position table, queries and keys are
rotated. That covers the shapes of GPT-2 and Llama.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]
IMPLEMENTATION: Any = "cudnn" if jax.default_backend() == "gpu" else "xla"


def _norm(params: Params, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    if "bias" not in params:
        variance = jnp.mean(wide * wide, -1, keepdims=True)
        return (wide * jax.lax.rsqrt(variance + 1e-5) * params["scale"]).astype(x.dtype)
    mean = jnp.mean(wide, -1, keepdims=True)
    variance = jnp.mean(wide * wide, -1, keepdims=True) - mean * mean
    return ((wide - mean) * (jax.lax.rsqrt(variance + 1e-5) * params["scale"]) + params["bias"]).astype(x.dtype)


def _linear(params: Params, x: jax.Array) -> jax.Array:
    y = jax.lax.dot_general(x, params["kernel"], (((x.ndim - 1,), (0,)), ((), ())))
    return y + params["bias"] if "bias" in params else y


def _rotate(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:  # [B, T, H, D], [T]
    half = x.shape[-1] // 2
    angles = positions[:, None, None] / base ** (jnp.arange(half) / half)  # [T, 1, D / 2]
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def _layer(params: Params, x: jax.Array, cache: Any, start: Any, base: float | None) -> tuple[jax.Array, Any]:
    h = _norm(params["norm1"], x)
    query, key, value = (_linear(params[name], h) for name in ("query", "key", "value"))  # [B, T, H, D]
    if base is not None:
        positions = start + jnp.arange(x.shape[1])
        query, key = _rotate(query, positions, base), _rotate(key, positions, base)
    keys, values = (
        jax.lax.dynamic_update_slice(held, new, (0, start, 0, 0)) for held, new in zip(cache, (key, value), strict=True)
    )
    attend = functools.partial(jax.nn.dot_product_attention, implementation=IMPLEMENTATION)
    if x.shape[1] == 1:
        filled = jnp.full(x.shape[0], start + 1, jnp.int32)
        attended = attend(query, keys, values, key_value_seq_lengths=filled)
    else:
        attended = attend(query, key, value, is_causal=True)
    x = x + _linear(params["out"], attended.reshape(*x.shape[:2], -1))
    h = _norm(params["norm2"], x)
    if "gate" in params:
        return x + _linear(params["down"], jax.nn.silu(_linear(params["gate"], h)) * _linear(params["up"], h)), (
            keys,
            values,
        )
    return x + _linear(params["down"], jax.nn.gelu(_linear(params["up"], h))), (keys, values)


def _next_token(params: Params, tokens: jax.Array, caches: Any, start: Any, base: float | None) -> Any:
    """Returns the most likely next token of each row, `[B]`, and the caches with the tokens appended."""
    x = params["embed"][tokens]
    if "position" in params:
        x = x + jax.lax.dynamic_slice_in_dim(params["position"], start, tokens.shape[1])
    filled = []
    for layer, cache in zip(params["layers"], caches, strict=True):
        x, cache = _layer(layer, x, cache, start, base)
        filled.append(cache)
    x = _norm(params["norm"], x[:, -1:])
    logits = jax.lax.dot_general(x, params["embed"], (((2,), (1,)), ((), ())))[:, 0]
    return jnp.argmax(logits, -1).astype(jnp.int32), filled


@functools.partial(jax.jit, static_argnames=("new", "length", "base"))
def generate(params: Params, prompts: jax.Array, *, new: int, length: int, base: float | None) -> jax.Array:
    """Returns `new` tokens for each prompt, `[rows, new]`; `length` is the size of the caches."""
    rows, read = prompts.shape
    key = params["layers"][0]["key"]["kernel"]
    empty = jnp.zeros((rows, length, *key.shape[1:]), key.dtype)
    token, caches = _next_token(params, prompts, [(empty, empty) for _ in params["layers"]], 0, base)

    def body(carry: Any, _: None) -> Any:
        token, caches, start = carry
        following, caches = _next_token(params, token[:, None], caches, start, base)
        return (following, caches, start + 1), following

    _, tokens = jax.lax.scan(body, (token, caches, jnp.int32(read)), None, length=new - 1)
    return jnp.concatenate([token[None], tokens]).T
