"""`nnx.linear_cross_entropy`: the loss of a language model straight from its features, without its logits.

The logits of a large vocabulary are the largest array of a training step: 4,096 positions and 128,256 tokens are a
gigabyte in bfloat16, and the loss needs a few arrays of that size. But the mean over the positions is a sum over
blocks of them, so it is enough to have the logits of one *block* at a time. The gradient of a block is computed right
after its loss, while its logits are there. That is why nothing is computed twice.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nnx.nn.cross_entropy import check_targets, is_target, narrow, position_weights
from nnx.nn.support.checks import shape_of
from nnx.sharding.meshes import current_mesh
from nnx.sharding.rules import get_logical_axis_rules, names_in_entry, resolve

BLOCK_ENTRIES = 2**27  # logits per block and device, half a gigabyte in float32: large enough for efficient products

NAME = "nnx.linear_cross_entropy"
WRONG_KERNEL = (
    f"{NAME}: expected features [..., width] and a kernel [width, classes], both of a floating-point dtype, got "
    "{features_dtype} {features} and {kernel_dtype} {kernel}{hint}."
)
WRONG_BIAS = f"{NAME}: expected a bias of shape {{expected}}, one entry per class, got {{got}}."
WRONG_SETTING = f"{NAME}: expected {{expected}}, got {{name}}={{got!r}}."


class Terms(NamedTuple):
    """What the loss of a position consists of, besides its cross-entropy."""

    soft_cap: float | None
    label_smoothing: float
    z_loss: float


def linear_cross_entropy(
    features: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    block_size: int | None = None,
) -> jax.Array:
    """Returns the mean cross-entropy of `features @ kernel`, of which only a block exists at any time.

    The same as `nnx.cross_entropy(features @ kernel, targets)` within rounding, with a fraction of its memory if there
    are many classes. It can be differentiated in reverse mode with respect to features, kernel and bias; what nobody
    differentiates, such as the kernel of a frozen head, costs nothing. Under a mesh, the batch, the width and the
    vocabulary can be split as in the plain form.

    Args:
        features: `[..., width]`, what the last layer before the head returns.
        kernel: `[width, classes]`, the weights of the head; of a tied embedding, `embed.embedding.T`.
        targets: integers `[...]`, the right classes. A target outside of the classes makes the loss NaN.
        bias: `[classes]`, what is added to the logits.
        mask: boolean `[...]`, false for positions that do not count, such as padding; their targets can be anything.
        soft_cap: the bound that `soft_cap * tanh(logits / soft_cap)` keeps the logits below, as Gemma 2 does.
        label_smoothing: the part of the probability that all classes share, instead of the right one alone.
        z_loss: the factor of the squared log-partition function, which keeps logits from drifting.
        block_size: the number of positions whose logits exist at a time; by default, as many as 2²⁷ logits make up on
            each of the devices that share the batch.

    Returns:
        A scalar in at least float32; 0 if no position counts.

    Raises:
        ValueError: shapes or dtypes do not fit together, or a setting is out of range.

    >>> features, kernel = jnp.eye(3), 2 * jnp.eye(3)
    >>> round(float(nnx.linear_cross_entropy(features, kernel, jnp.array([0, 1, 0]))), 4)
    0.9062
    >>> round(float(nnx.cross_entropy(features @ kernel, jnp.array([0, 1, 0]))), 4)
    0.9062
    """
    _check(features, kernel, bias, soft_cap, label_smoothing, z_loss, block_size)
    classes = kernel.shape[-1]
    check_targets(NAME, jax.ShapeDtypeStruct((*features.shape[:-1], classes), features.dtype), targets, mask)
    terms = Terms(soft_cap, label_smoothing, z_loss)
    axis, blocks = _blocks(features, classes, block_size)
    weights = jnp.broadcast_to(position_weights(targets, mask), targets.shape)
    head = (kernel,) if bias is None else (kernel, bias)
    if blocks == 1:
        return _block_loss(terms, narrow(targets, classes), weights, features, *head)
    split = partial(_split, axis=axis, blocks=blocks)
    return _sum_of_blocks(terms, split(narrow(targets, classes)), split(weights), split(features), *head)


def _blocks(features: jax.Array, classes: int, block_size: int | None) -> tuple[int, int]:
    """Returns the axis of positions that is divided into blocks, the longest one, and the number of blocks."""
    positions = features.shape[:-1]
    spec = (*jax.typeof(features).sharding.spec, *[None] * features.ndim)
    # What is split over an explicit mesh axis cannot be divided further.
    lengths = [length if spec[axis] is None else 0 for axis, length in enumerate(positions)]
    if not any(lengths):
        return 0, 1
    axis = lengths.index(max(lengths))
    at_once = block_size or max(BLOCK_ENTRIES // classes, 1) * _devices(spec[: len(positions)])
    return axis, min(math.ceil(math.prod(positions) / at_once), lengths[axis])


def _devices(spec: tuple[Any, ...]) -> int:
    """Returns the number of devices that share the positions, as far as types and rules tell.

    Every block gathers the kernel and sums up its gradient over the devices, so there should be few of them.
    """
    mesh = current_mesh()
    if mesh is None:
        return 1
    by_rules = resolve(("batch", "length"), get_logical_axis_rules()).spec
    split = {axis for entry in (*spec, *by_rules) for axis in names_in_entry(entry)}
    sizes = {name: size for name, size in mesh.shape.items() if name not in mesh.manual_axes}
    return math.prod(size for name, size in sizes.items() if name in split)


def _split(values: jax.Array, axis: int, blocks: int) -> jax.Array:
    """Returns `[blocks, ...]`, with every `blocks`-th position of the axis in the same block, filled up with zeros.

    Neighbors come into different blocks, so if the axis is split over devices, each of them has its share of every
    block.
    """
    length = values.shape[axis]
    each = math.ceil(length / blocks)
    padding = [(0, each * blocks - length if at == axis else 0) for at in range(values.ndim)]
    values = jnp.pad(values, padding) if each * blocks != length else values
    shape = (*values.shape[:axis], each, blocks, *values.shape[axis + 1 :])
    return jnp.moveaxis(jnp.reshape(values, shape), axis + 1, 0)


def _block_loss(terms: Terms, targets: jax.Array, weights: jax.Array, features: jax.Array, *head: jax.Array) -> Any:
    """Returns the sum of the losses of a block times their weights; a position of weight 0 contributes nothing."""
    features = jnp.where(weights[..., None] == 0, 0, features)  # even if it is NaN
    logits = features @ head[0]
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if len(head) > 1:
        logits += head[1]
    if terms.soft_cap is not None:
        logits = terms.soft_cap * jnp.tanh(logits / terms.soft_cap)
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    # A comparison instead of indexing: its derivative is no scatter, and the classes can be split over devices.
    chosen = jnp.sum(jnp.where(is_target(logits, targets), logits, 0), axis=-1)
    chosen = jnp.where((targets >= 0) & (targets < logits.shape[-1]), chosen, jnp.nan)
    losses = log_sum - (1 - terms.label_smoothing) * chosen
    if terms.label_smoothing:
        losses -= terms.label_smoothing * jnp.mean(logits, axis=-1)
    if terms.z_loss:
        losses += terms.z_loss * log_sum**2
    return jnp.sum(jnp.where(weights == 0, 0, losses * weights))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_blocks(terms: Terms, targets: jax.Array, weights: jax.Array, features: jax.Array, *head: jax.Array) -> Any:
    def add(loss: jax.Array, block: Any) -> tuple[jax.Array, None]:
        return loss + _block_loss(terms, *block, *head), None

    return jax.lax.scan(add, jnp.zeros((), _loss_dtype(features, head)), (targets, weights, features))[0]


def _loss_dtype(features: jax.Array, head: tuple[jax.Array, ...]) -> Any:
    return jnp.result_type(features, *head, jnp.float32)


def _forward(terms: Terms, targets: Any, weights: Any, features: Any, *head: Any) -> Any:
    """Returns the loss and its gradients; those that nobody asked for are None."""
    wanted = [at for at, given in enumerate((features, *head)) if given.perturbed]
    values = [given.value for given in (features, *head)]

    def add(sums: Any, block: Any) -> Any:
        block_targets, block_weights, block_features = block

        def loss_of(*chosen: jax.Array) -> jax.Array:
            given = [block_features, *values[1:]]
            for at, value in zip(wanted, chosen):
                given[at] = value
            return _block_loss(terms, block_targets, block_weights, *given)

        loss, gradients = jax.value_and_grad(loss_of, argnums=tuple(range(len(wanted))))(
            *[block_features if at == 0 else values[at] for at in wanted]
        )
        of = dict(zip(wanted, gradients))
        total, head_sums = sums
        return (total + loss, [held + of[at] for held, at in zip(head_sums, _head(wanted))]), of.get(0)

    # Sums over blocks are float32, whatever the weights are: small terms would be lost in a large bfloat16.
    zeros = [jnp.zeros_like(values[at], jnp.promote_types(values[at].dtype, jnp.float32)) for at in _head(wanted)]
    start = (jnp.zeros((), _loss_dtype(values[0], tuple(values[1:]))), zeros)
    (loss, sums), feature_gradients = jax.lax.scan(add, start, (targets.value, weights.value, values[0]))
    gradients: list[Any] = [None] * len(values)
    gradients[0] = feature_gradients
    for at, found in zip(_head(wanted), sums):
        gradients[at] = found.astype(values[at].dtype)
    return loss, gradients


def _head(wanted: list[int]) -> list[int]:
    return [at for at in wanted if at > 0]


def _backward(terms: Terms, gradients: list[Any], cotangent: Any) -> Any:
    del terms
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return None, None, *[None] * len(gradients)
    scaled = [None if found is None else found * cotangent.astype(found.dtype) for found in gradients]
    return None, None, *scaled


_sum_of_blocks.defvjp(_forward, _backward, symbolic_zeros=True)


def _check(features: Any, kernel: Any, bias: Any, soft_cap: Any, smoothing: Any, z_loss: Any, block_size: Any) -> None:
    for given in (features, kernel) if bias is None else (features, kernel, bias):
        shape_of(NAME, given)
    floating = all(jnp.issubdtype(given.dtype, jnp.floating) for given in (features, kernel))
    fits = features.ndim > 0 and kernel.ndim == 2 and features.shape[-1] == kernel.shape[0] and kernel.shape[1] > 0
    if not (floating and fits):
        swapped = kernel.ndim == 2 and features.ndim > 0 and features.shape[-1] == kernel.shape[1]
        hint = "; the kernel of a tied embedding is `embed.embedding.T`" if swapped else ""
        raise ValueError(
            WRONG_KERNEL.format(
                features_dtype=features.dtype,
                features=features.shape,
                kernel_dtype=kernel.dtype,
                kernel=kernel.shape,
                hint=hint,
            )
        )
    if bias is not None and bias.shape != kernel.shape[1:]:
        raise ValueError(WRONG_BIAS.format(expected=kernel.shape[1:], got=bias.shape))
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(WRONG_SETTING.format(expected="a positive bound of the logits", name="soft_cap", got=soft_cap))
    if not 0 <= smoothing < 1:
        expected = "a probability below 1"
        raise ValueError(WRONG_SETTING.format(expected=expected, name="label_smoothing", got=smoothing))
    if not z_loss >= 0:
        raise ValueError(WRONG_SETTING.format(expected="a factor of at least 0", name="z_loss", got=z_loss))
    if block_size is not None and not (isinstance(block_size, int) and block_size > 0):
        raise ValueError(WRONG_SETTING.format(expected="a number of positions", name="block_size", got=block_size))
