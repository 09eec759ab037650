"""`nnx.cross_entropy`: the loss of classifiers and language models, without arrays of the size of the logits.

The logits of a language model are the largest array of a training step. Automatic differentiation of the textbook
formula keeps several float32 arrays of that size; the gradient here is written by hand and needs the logits alone,
which can stay in bfloat16. A *weight* per position says what it counts: one over the number of positions, or 0.
"""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from nnx.nn.support.checks import shape_of
from nnx.sharding.target import Target, lowered_on, target

LARGEST_KERNEL_SIZE = 2**31  # the kernel counts entries in int32

NOT_INTEGERS = "{name}: targets are the numbers of the right classes: expected integers, got {dtype}{hint}."
WRONG_TARGETS = "{name}: expected targets of shape {}, one for each row of the logits {}, got {}.{hint}"
ONE_HOT = " Targets that are one-hot or probabilities are for `optax.softmax_cross_entropy(logits, targets)`."
WRONG_MASK = "{name}: expected a boolean mask of shape {expected}, as the targets, got {dtype} {got}."
NO_CLASSES = "{name}: expected logits [..., classes] of a floating-point dtype, got {dtype} {got}."
NO_KERNEL = "nnx.cross_entropy: implementation='triton' is not possible here: {obstacle}."

Implementation = Literal["triton", "xla"]


def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    *,
    mask: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Returns the mean negative log-probability of the targets, in at least float32.

    It can be differentiated in reverse mode, with respect to the logits. Forward mode, and so a Hessian, needs a loss
    that JAX differentiates itself, such as `optax.softmax_cross_entropy_with_integer_labels`.

    Args:
        logits: `[..., classes]`, unnormalized log-probabilities.
        targets: integers `[...]`, the right classes. A target outside of the classes makes the loss NaN.
        mask: boolean `[...]`, false for positions that do not count, such as padding; their targets can be anything.
        implementation: "triton" for a GPU kernel that reads the logits once and replaces them by their gradient, "xla"
            for ordinary operations. By default, the kernel is used on a single GPU. On several devices XLA has to
            split the work, which it cannot do for a kernel; inside of `shard_map` you can ask for the kernel.

    Returns:
        A scalar; 0 if no position counts.

    Raises:
        ValueError: shapes or dtypes do not fit together, or "triton" is requested where there is no GPU for it.

    >>> logits = jnp.array([[2.0, 0.0, 0.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]])
    >>> round(float(nnx.cross_entropy(logits, jnp.array([0, 2, 1]))), 4)
    0.4777
    >>> mask = jnp.array([True, True, False])
    >>> round(float(nnx.cross_entropy(logits, jnp.array([0, 2, -1]), mask=mask)), 4)
    0.1672
    """
    check_targets("nnx.cross_entropy", logits, targets, mask)
    weights = position_weights(targets, mask)
    return _weighted_sum(logits, narrow(targets, logits.shape[-1]), weights, _kernel_target(logits, implementation))


def position_weights(targets: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Returns what each position counts in the mean, as one number if all count the same."""
    if mask is None:
        return jnp.float32(1 / max(targets.size, 1))
    return mask / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1)


def narrow(targets: jax.Array, classes: int) -> jax.Array:
    """Returns the targets as int32; those outside of the classes, which int32 may not be able to hold, as -1."""
    if targets.dtype.itemsize > 4:
        # With NumPy if they are NumPy's: unless 64 bits are enabled, JAX would narrow them before they are compared.
        where: Any = np.where if isinstance(targets, np.ndarray | np.generic) else jnp.where
        targets = where((targets >= 0) & (targets < classes), targets, -1)
    return targets.astype(jnp.int32)


def check_targets(name: str, logits: Any, targets: jax.Array, mask: jax.Array | None) -> None:
    """Raises if targets and mask do not fit the logits; `name` is the function that they were given to."""
    for given in (logits, targets) if mask is None else (logits, targets, mask):
        shape_of(name, given)
    if logits.ndim == 0 or logits.shape[-1] == 0 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(NO_CLASSES.format(name=name, dtype=logits.dtype, got=logits.shape))
    if targets.shape != logits.shape[:-1]:
        hint, shapes = (
            ONE_HOT if targets.shape == logits.shape else "",
            (logits.shape[:-1], logits.shape, targets.shape),
        )
        raise ValueError(WRONG_TARGETS.format(*shapes, name=name, hint=hint))
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        hint = ""
        if jnp.issubdtype(targets.dtype, jnp.floating):
            hint = " (for a distribution over classes, use `optax.softmax_cross_entropy`)"
        raise ValueError(NOT_INTEGERS.format(name=name, dtype=targets.dtype, hint=hint))
    if mask is not None and (mask.shape != targets.shape or mask.dtype != jnp.bool_):
        raise ValueError(WRONG_MASK.format(name=name, expected=targets.shape, dtype=mask.dtype, got=mask.shape))


def _kernel_target(logits: jax.Array, implementation: Implementation | None) -> Target | None:
    """Returns the target for which the loss is computed by the kernel; None if it is not."""
    at = target(logits)
    if implementation == "triton":
        if at.triton_obstacle is not None:
            raise ValueError(NO_KERNEL.format(obstacle=at.triton_obstacle))
        return at._replace(certain=True)
    pays = (
        implementation is None
        and at.platform == "gpu"
        and at.devices == 1
        and logits.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
        and logits.size < LARGEST_KERNEL_SIZE
        and at.triton_obstacle is None
    )
    return at if pays else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _weighted_sum(logits: jax.Array, targets: jax.Array, weights: jax.Array, kernel_target: Target | None) -> jax.Array:
    """Returns the sum of the rows' losses times their weights; a row of weight 0 contributes nothing, even if NaN."""
    del kernel_target  # the kernel computes the gradient as well, which nobody asked for here
    losses, _ = _losses(logits, targets)
    return jnp.sum(jnp.where(weights == 0, 0, losses * weights))


def _losses(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the loss of each position, and the logarithm of the sum of its exponentials."""
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    log_sum = jax.nn.logsumexp(logits.astype(wide), axis=-1)
    spec = jax.typeof(logits).sharding.spec
    if len(spec) == logits.ndim and spec[-1] is not None:
        # On an explicit mesh axis, indexing would need all classes in one place.
        chosen = jnp.sum(jnp.where(is_target(logits, targets), logits.astype(wide), 0), axis=-1)
        chosen = jnp.where((targets >= 0) & (targets < logits.shape[-1]), chosen, jnp.nan)
    else:
        # Out of range, also below zero, is NaN: the default would count negative targets from the end.
        known = jnp.where(targets < 0, logits.shape[-1], targets)
        chosen = jnp.take_along_axis(logits, known[..., None], axis=-1, mode="fill", fill_value=jnp.nan)[..., 0]
    return log_sum - chosen.astype(wide), log_sum


def is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns a boolean array of the shape of the logits, true for the right classes."""
    return targets[..., None] == jax.lax.broadcasted_iota(
        jnp.int32, (1,) * targets.ndim + logits.shape[-1:], targets.ndim
    )


def _forward(logits: jax.Array, targets: jax.Array, weights: jax.Array, kernel_target: Target | None) -> Any:
    if kernel_target is not None:
        from nnx.nn.cross_entropy_kernel import losses_and_gradient  # Pallas takes long to import

        rows = math.prod(targets.shape)
        per_row = jnp.reshape(targets, rows), jnp.reshape(jnp.broadcast_to(weights, targets.shape), rows)
        kernel = functools.partial(losses_and_gradient, interpret=kernel_target.interpreted)
        flat = jnp.reshape(logits, (rows, logits.shape[-1]))
        losses, gradient = lowered_on(kernel_target, kernel, _losses_and_gradient, flat, *per_row)
        return jnp.sum(losses), (jnp.reshape(gradient, logits.shape), None)
    losses, log_sum = _losses(logits, targets)
    return jnp.sum(jnp.where(weights == 0, 0, losses * weights)), (logits, (targets, weights, log_sum))


def _losses_and_gradient(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what the kernel does, by ordinary operations."""
    losses, log_sum = _losses(logits, targets)
    return jnp.where(weights == 0, 0, losses * weights), _gradient(logits, targets, weights, log_sum)


def _gradient(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, log_sum: jax.Array, cotangent: Any = 1
) -> jax.Array:
    softmax = jnp.exp(logits.astype(log_sum.dtype) - log_sum[..., None])
    factor = (weights * cotangent)[..., None]
    gradient = jnp.where(weights[..., None] == 0, 0, (softmax - is_target(logits, targets)) * factor)
    return gradient.astype(logits.dtype)


def _backward(kernel_target: Target | None, kept: Any, cotangent: jax.Array) -> Any:
    logits, rest = kept
    if rest is None:
        # In the usual case the cotangent is the constant 1, and XLA leaves out the product.
        return logits * cotangent.astype(logits.dtype), None, None
    targets, weights, log_sum = rest
    return _gradient(logits, targets, weights, log_sum, cotangent), None, None


_weighted_sum.defvjp(_forward, _backward)
