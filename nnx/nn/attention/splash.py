"""Splash attention, the fused kernel for TPUs that comes with JAX, for the calls of `dot_product_attention`.

The kernel takes one group of query heads with the key head they share, so it is mapped over key heads and batch. XLA
cannot split a kernel over devices; under a mesh it runs in a `shard_map` over batch and heads.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import PartitionSpec

from nnx.nn.attention.splits import is_whole, splits_of_heads
from nnx.nn.attention.weights import AttentionArrays, AttentionSettings, zero_padding, zero_unseeing
from nnx.sharding.meshes import current_mesh
from nnx.sharding.target import target

BLOCKS = (512, 256, 128)  # of queries and keys; the largest that divides both lengths


def splash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_lengths: jax.Array | None,
    key_lengths: jax.Array | None,
    settings: AttentionSettings,
) -> jax.Array:
    """Attends with the splash kernel; `splash_obstacle` says when it can.

    Args:
        query: `[batch..., queries, heads, head_dim]`.
        key, value: `[batch..., keys, kv_heads, head_dim]`.
        query_lengths, key_lengths: `[batch...]`, the numbers of real queries and keys; None for all.
        settings: the settings of the call, of which it knows causality, scale, window and soft cap.
    """
    queries, keys = query.shape[-3], key.shape[-3]
    scale = 1.0 / math.sqrt(query.shape[-1]) if settings.scale is None else settings.scale
    scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)  # the kernel has no scale of its own
    run = functools.partial(_on_device, settings, target(query, key, value).interpreted)
    spec = splits_of_heads(query, key)
    if spec is not None and not is_whole(spec):
        text = PartitionSpec(*spec[:-3])
        run = jax.shard_map(
            run, mesh=current_mesh(), in_specs=(spec, spec, spec, text), out_specs=spec, check_vma=False
        )
    out = run(scaled, key, value, key_lengths)

    options = AttentionArrays(query_lengths=query_lengths, key_lengths=key_lengths)
    return zero_padding(zero_unseeing(out, options, settings, keys), options, jnp.arange(queries))


def _on_device(
    settings: AttentionSettings, interpret: bool, query: jax.Array, key: jax.Array, value: jax.Array, key_lengths: Any
) -> jax.Array:
    """Attends on one device, to all of its rows and heads."""
    *batch, queries, heads, features = query.shape
    keys, kv_heads = key.shape[-3:-1]
    kernel = _kernel(settings, queries, keys, heads // kv_heads, interpret)
    grouped = jnp.swapaxes(query, -3, -2).reshape(math.prod(batch), kv_heads, heads // kv_heads, queries, features)
    by_head = [jnp.swapaxes(x, -3, -2).reshape(math.prod(batch), kv_heads, keys, features) for x in (key, value)]
    segments = None
    if key_lengths is not None:
        # Real keys are in segment 0, like all queries, and the others in segment 1, which no query sees.
        hidden = (jnp.arange(keys) >= key_lengths.reshape(-1, 1)).astype(jnp.int32)
        segments = splash_attention_kernel.SegmentIds(jnp.zeros((math.prod(batch), queries), jnp.int32), hidden)
    over_heads = jax.vmap(kernel, in_axes=(0, 0, 0, None))
    out = jax.vmap(over_heads)(grouped, *by_head, segments)
    return jnp.swapaxes(out.reshape(*batch, heads, queries, features), -3, -2).astype(query.dtype)


def _kernel(settings: AttentionSettings, queries: int, keys: int, heads: int, interpret: bool) -> Any:
    """Returns the kernel for so many query heads of one key head."""
    block = next(size for size in BLOCKS if queries % size == 0 and keys % size == 0)
    sizes = splash_attention_kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    return splash_attention_kernel.make_splash_mqa_single_device(
        splash_attention_mask.MultiHeadMask([_mask(settings, queries, keys)] * heads),
        block_sizes=sizes,
        attn_logits_soft_cap=settings.soft_cap,
        interpret=interpret,
    )


def _mask(settings: AttentionSettings, queries: int, keys: int) -> Any:
    shape = queries, keys
    if settings.window is not None:
        left, right = settings.window
        return splash_attention_mask.LocalMask(shape, (left, min(right, 0) if settings.is_causal else right), 0)
    causal, full = splash_attention_mask.CausalMask, splash_attention_mask.FullMask
    return causal(shape) if settings.is_causal else full(shape)
