"""Ring attention: exact attention over a text that is split over a mesh axis (sequence or context parallelism).

Every device holds a *block* of the queries, keys and values. The blocks of keys and values travel around the *ring*,
the devices along the mesh axis, and each device attends from its queries to the block that is passing by (see
`ring_blocks`). This file decides from mesh and rules how the arrays are split, and connects both passes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.lax import PrecisionLike
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from nnx.core.module.module import Module
from nnx.nn.attention.attention_kernel import Implementation, Window
from nnx.nn.attention.dot_product import check_broadcasts, checked_batch, dot_product_attention
from nnx.nn.attention.ring_blocks import Ring, backward, forward
from nnx.nn.support.settings import PromoteDtype, default_promote_dtype
from nnx.sharding.meshes import current_mesh
from nnx.sharding.rules import current_rules, resolve

UNSUPPORTED = (
    "ring_attention cannot {what}, because no device sees all keys at once. Use nnx.dot_product_attention for it, "
    "or drop the rule for 'length'."
)
DIFFERENT_SPLITS = (
    "ring_attention: queries and keys must be split over the same mesh axes, but their lengths {queries} and {keys} "
    "are split over {query_axes} and {key_axes}. Pad them to multiples of the size of the mesh axis."
)


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike = None,
    module: Module | None = None,
    promote_dtype: PromoteDtype = default_promote_dtype,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: Window | None = None,
    implementation: Implementation | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attends like `dot_product_attention`, with the text split over the mesh axis that a rule gives to "length".

    Pass it to a layer, `nnx.MultiHeadAttention(..., attention_fn=nnx.ring_attention, ctx=ctx)`, and run the model
    under a mesh and rules such as `[("length", "sequence"), ...]`. Queries, keys and values have the axis names
    ("batch", "length", "heads", None). The result and its gradients are exact; per device, the memory is that of its
    part of the text. Without a mesh, or without a rule for "length", this is `dot_product_attention`.

    Inside a `shard_map` over that mesh axis, the arguments are the parts of the device, except that a `mask` has all
    keys.

    Args:
        query, key, value, mask, key_value_seq_lengths: as in `dot_product_attention`.
        dtype, precision, promote_dtype, scale, logits_soft_cap: as in `dot_product_attention`.
        is_causal, local_window_size: as in `dot_product_attention`. A causal window shortens the ring to the blocks it
            reaches.
        bias, broadcast_dropout, dropout_rng, dropout_rate, deterministic, module, implementation, sinks: as in
            `dot_product_attention`, where the text is not split. A ring refuses a bias, dropout, recording weights,
            "cudnn" and sinks.

    Returns:
        An array of shape `[batch..., query_length, heads, value_dim]`.

    Raises:
        ValueError: if shapes do not fit together or cannot be divided by the mesh, or an option is not supported.

    >>> from jax.sharding import AxisType
    >>> mesh = jax.make_mesh((jax.device_count(),), ("sequence",), axis_types=(AxisType.Auto,))
    >>> x = jnp.ones((2, 16, 4, 8))
    >>> with jax.set_mesh(mesh), nnx.logical_axis_rules([("length", "sequence")]):
    ...     out = nnx.ring_attention(x, x, x, is_causal=True)
    >>> bool(jnp.allclose(out, nnx.dot_product_attention(x, x, x, is_causal=True)))
    True
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    batch = checked_batch(query, key, value)
    check_broadcasts("mask", mask, (*batch, query.shape[-2], query.shape[-3], key.shape[-3]))
    names = (*["batch"][: len(batch)], *[None] * (len(batch) - 1), "length", "heads", None)
    text_split = _text_split(names, query, key)
    if text_split is None:
        return dot_product_attention(
            query,
            key,
            value,
            bias,
            mask,
            broadcast_dropout,
            dropout_rng,
            dropout_rate,
            deterministic,
            precision=precision,
            module=module,
            is_causal=is_causal,
            scale=scale,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            implementation=implementation,
            logits_soft_cap=logits_soft_cap,
            sinks=sinks,
        )
    wanted = {
        "add a bias": bias is not None,
        "drop attention weights": dropout_rate > 0.0 and not deterministic,
        "record the attention weights": module is not None,
        "use cuDNN's kernel": implementation == "cudnn",
        "add attention sinks": sinks is not None,
    }
    if any(wanted.values()):
        raise ValueError(UNSUPPORTED.format(what=next(what for what, asked in wanted.items() if asked)))
    window = (local_window_size, local_window_size) if isinstance(local_window_size, int) else local_window_size
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    ring = Ring(text_split.ring, is_causal, scale, window, logits_soft_cap, precision)
    return _around_the_ring(text_split, ring, query, key, value, mask, key_value_seq_lengths)


def _around_the_ring(
    text_split: "TextSplit", ring: Ring, query: Any, key: Any, value: Any, mask: Any, lengths: Any
) -> jax.Array:
    """Splits the arrays, groups the query heads by key head, and attends."""
    kv_heads = key.shape[-2]
    query, key, value = (text_split.split(x, text_split.text) for x in (query, key, value))
    grouped = query.reshape(*query.shape[:-2], kv_heads, query.shape[-2] // kv_heads, query.shape[-1])
    if mask is not None:
        mask = _grouped_mask(mask.astype(bool), query.ndim - 3, kv_heads)
        mask = text_split.split(mask, text_split.of_mask(mask))
    if lengths is not None:
        lengths = text_split.split(lengths, PartitionSpec(*text_split.batch))
    out: jax.Array = _attended(text_split, ring, grouped, key, value, mask, lengths)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _grouped_mask(mask: jax.Array, batch_axes: int, kv_heads: int) -> jax.Array:
    """Returns a mask as `[batch..., kv_heads, groups, queries, keys]`, with size 1 for axes it broadcasts over."""
    mask = mask.reshape((1,) * (batch_axes + 3 - mask.ndim) + mask.shape)
    heads = (1, 1) if mask.shape[-3] == 1 else (kv_heads, mask.shape[-3] // kv_heads)
    return mask.reshape(*mask.shape[:-3], *heads, *mask.shape[-2:])


# How the arrays are split


@dataclasses.dataclass(frozen=True)
class TextSplit:
    """How the arrays are split.

    Attributes:
        mesh: the mesh to map over; None inside a `shard_map`, where every array already is the part of one device.
        batch: the mesh axes of the batch axes, one entry per axis.
        ring: the mesh axes along which the text is split.
        heads: the mesh axes of the key heads.
    """

    mesh: Any
    batch: tuple[Any, ...]
    ring: tuple[str, ...]
    heads: Any

    @property
    def text(self) -> PartitionSpec:
        """The spec of queries, keys and values; grouped heads and features are whole."""
        return PartitionSpec(*self.batch, self.ring, self.heads)

    def of_mask(self, mask: jax.Array | None) -> PartitionSpec:
        """Returns the spec of a mask `[batch..., kv_heads, groups, queries, keys]`; every device has all keys."""
        full = (*self.batch, self.heads, None, self.ring, None)
        sizes = () if mask is None else mask.shape
        return PartitionSpec(*(None if size == 1 else axes for size, axes in zip(sizes, full)))

    def split(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Splits an array like `spec` on explicit axes, where `shard_map` checks the split that its type declares."""
        if self.mesh is None or AxisType.Explicit not in self.mesh.axis_types:
            return x
        return jax.sharding.reshard(x, NamedSharding(self.mesh, spec))

    def mapped(self, function: Callable[..., Any], mask: jax.Array | None) -> Callable[..., Any]:
        """Runs a function `(queries, rows, keys, mask, lengths) -> (queries, rows, keys)` on the parts of each device.

        The first three are tuples of arrays with the axes of queries, of their rows of logits, and of keys.
        """
        if self.mesh is None:
            return function
        rows = PartitionSpec(*self.batch, self.heads, None, self.ring)
        free = {name for name, type in zip(self.mesh.axis_names, self.mesh.axis_types) if type is not AxisType.Manual}
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(self.text, rows, self.text, self.of_mask(mask), PartitionSpec(*self.batch)),
            out_specs=(self.text, rows, self.text),
            axis_names=free,
        )


def _text_split(names: tuple[Any, ...], query: jax.Array, key: jax.Array) -> TextSplit | None:
    """Returns how mesh and rules split the arrays; None if they leave the text whole."""
    rules, mesh = current_rules(), current_mesh()
    if mesh is None or not rules:
        return None
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    ring = _axes(resolve(names, rules, None, mesh.shape).spec[-3])
    if ring and all(types[axis] is AxisType.Manual for axis in ring):
        return TextSplit(None, (None,) * (len(names) - 3), ring, None)
    specs = []
    for what, array in (("queries", query), ("keys", key)):
        resolution = resolve(names, rules, array.shape, mesh.shape)
        resolution.check(f"ring_attention: {what} of shape {array.shape}")
        specs.append(resolution.spec)
    of_queries, (*batch, ring, heads, _) = specs  # key heads are split, and the query heads of each go along
    if of_queries[-3] != ring:
        lengths = {"queries": query.shape[-3], "keys": key.shape[-3]}
        raise ValueError(DIFFERENT_SPLITS.format(**lengths, query_axes=of_queries[-3], key_axes=ring))
    if math.prod(mesh.shape[axis] for axis in _axes(ring)) == 1:
        return None
    return TextSplit(mesh, tuple(batch), _axes(ring), heads)


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


# The derivative


# Its derivative is written by hand: automatic differentiation of the loop would keep every block that passed by.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attended(
    text_split: TextSplit, ring: Ring, query: Any, key: Any, value: Any, mask: Any, lengths: Any
) -> jax.Array:
    return _attended_forward(text_split, ring, query, key, value, mask, lengths)[0]


def _attended_forward(
    text_split: TextSplit, ring: Ring, query: Any, key: Any, value: Any, mask: Any, lengths: Any
) -> Any:
    run = text_split.mapped(functools.partial(forward, ring), mask)
    (out,), rows, _ = run((query,), (), (key, value), mask, lengths)
    return out, (query, key, value, mask, lengths, out, rows)


def _attended_backward(text_split: TextSplit, ring: Ring, kept: Any, grad_out: jax.Array) -> Any:
    query, key, value, mask, lengths, out, rows = kept
    run = text_split.mapped(functools.partial(backward, ring), mask)
    (grad_query,), _, (grad_key, grad_value) = run((query, out, grad_out), rows, (key, value), mask, lengths)
    return grad_query, grad_key, grad_value, None, None


_attended.defvjp(_attended_forward, _attended_backward)
