"""The choice of the kernel that computes dot-product attention: a fused one where it can, else XLA.

Shapes, options and the target decide (see `nnx.sharding.target`): cuDNN's kernel on NVIDIA GPUs, JAX's splash attention
on TPUs.
"""

import math
from typing import Any, Literal, NamedTuple, Protocol

import jax.numpy as jnp
from jax.lax import PrecisionLike

from nnx.nn.attention.splits import splits_of_heads
from nnx.sharding.target import Target, target

Implementation = Literal["cudnn", "splash", "xla"]
Window = int | tuple[int, int]


LANES = 128  # of a TPU's vector unit; the splash kernel divides texts into blocks of a multiple of it
SPLASH_FROM = 1024  # the number of queries from which on splash attention is chosen


class Shaped(Protocol):
    """An array or a `jax.ShapeDtypeStruct`: the choice of a kernel depends on shapes and dtypes alone."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        ...

    @property
    def dtype(self) -> Any:
        """The dtype."""
        ...


class Features(NamedTuple):
    """What a call asks for besides its arrays, as far as it matters for the choice; see `attention_implementation`."""

    is_causal: bool
    local_window_size: Window | None
    dropout: bool
    weights: bool
    precision: PrecisionLike
    logits_soft_cap: float | None
    sinks: bool


def attention_implementation(
    query: Shaped,
    key: Shaped,
    value: Shaped,
    bias: Shaped | None = None,
    mask: Shaped | None = None,
    *,
    is_causal: bool = False,
    local_window_size: Window | None = None,
    dropout: bool = False,
    weights: bool = False,
    precision: PrecisionLike = None,
    logits_soft_cap: float | None = None,
    sinks: bool = False,
    platform: str | None = None,
    compute_capability: str | None = None,
) -> Implementation:
    """Returns the kernel that `dot_product_attention` chooses for such a call: a fused one where possible, else "xla".

    Args:
        query, key, value, bias, mask: arrays, or `jax.ShapeDtypeStruct`s in their place.
        is_causal, local_window_size, precision, logits_soft_cap: the arguments of `dot_product_attention`.
        dropout: whether dropout is active.
        weights: whether the weights are requested.
        sinks: whether there are attention sinks.
        platform: "gpu", "cpu" or "tpu"; by default, the one that the program at this point is compiled for.
        compute_capability: the compute capability of the GPU, as in "9.0"; by default, that of the same target.

    >>> x = jax.ShapeDtypeStruct((8, 1024, 12, 64), jnp.bfloat16)
    >>> nnx.attention_implementation(x, x, x, is_causal=True, platform="gpu", compute_capability="9.0")
    'cudnn'
    >>> nnx.attention_implementation(x, x, x, is_causal=True, platform="tpu")
    'splash'
    >>> nnx.attention_implementation(x, x, x, is_causal=True, platform="cpu")
    'xla'
    """
    at = _target(platform, compute_capability, query, key, value)
    features = Features(is_causal, local_window_size, dropout, weights, precision, logits_soft_cap, sinks)
    return best_implementation(features, at, query, key, value, bias, mask)


def best_implementation(
    features: Features, at: Target, query: Shaped, key: Shaped, value: Shaped, bias: Any, mask: Any
) -> Implementation:
    """Returns a fused kernel that can compute such a call on the target, else "xla"."""
    arrays = query, key, value, bias, mask
    if at.platform == "gpu" and fusion_obstacle(features, at, *arrays) is None:
        return "cudnn"
    long = isinstance(query.shape[-3], int) and query.shape[-3] >= SPLASH_FROM
    if at.platform == "tpu" and long and splash_obstacle(features, at, *arrays) is None:
        return "splash"
    return "xla"


def _target(platform: str | None, compute_capability: str | None, *arrays: Any) -> Target:
    at = target(*arrays)
    if platform is not None:
        platform = "gpu" if platform == "cuda" else platform
        at = Target(platform, at.capability if platform == at.platform else "", 1, certain=True)
    return at if compute_capability is None else at._replace(capability=compute_capability)


def fusion_obstacle(
    features: Features, at: Target, query: Any, key: Any, value: Any, bias: Any, mask: Any
) -> str | None:
    """Returns why cuDNN's kernel cannot compute this call, or `None` if it can."""
    return (
        _device_obstacle(at)
        or _input_obstacle(query, key, value, at)
        or _option_obstacle(features)
        or _cap_obstacle(features.logits_soft_cap)
        or _window_obstacle(query, key, features.is_causal, features.local_window_size)
        or _bias_obstacle(query, key, bias, mask)
    )


def splash_obstacle(
    features: Features, at: Target, query: Any, key: Any, value: Any, bias: Any, mask: Any
) -> str | None:
    """Returns why the splash kernel of TPUs cannot compute this call, or `None` if it can."""
    if at.platform != "tpu" and not at.interpreted:
        return f"it needs a TPU, and the platform is {at.platform!r}"
    if not query.dtype == key.dtype == value.dtype == jnp.bfloat16:
        return f"it is used for bfloat16, and the inputs are {query.dtype}, {key.dtype}, {value.dtype}"
    lengths, head_dim = (query.shape[-3], key.shape[-3]), query.shape[-1]
    if any(not isinstance(n, int) or n == 0 or n % LANES for n in lengths):
        return f"it takes lengths that are multiples of {LANES}, and they are {lengths[0]} and {lengths[1]}"
    if head_dim % 64 or value.shape[-1] != head_dim:
        return f"it takes one head size, a multiple of 64, and these are {head_dim} and {value.shape[-1]}"
    if bias is not None or mask is not None:
        return f"it takes no {'mask' if bias is None else 'bias'}"
    if features.local_window_size is not None and lengths[0] > lengths[1]:
        return f"with a window it takes no more queries than keys, and there are {lengths[0]} and {lengths[1]}"
    if at.devices > 1 and splits_of_heads(query, key) is None:
        return "it needs to know how the mesh splits batch and heads: use logical_axis_rules or explicit axes"
    return _option_obstacle(features)  # it caps the logits itself


def _device_obstacle(at: Target) -> str | None:
    if at.platform != "gpu":
        return f"it needs an NVIDIA GPU, and the platform is {at.platform!r}"
    if at.major < 8:
        return f"it needs compute capability 8.0, and the GPU has {at.capability!r}"
    return None


def _input_obstacle(query: Any, key: Any, value: Any, at: Target) -> str | None:
    if not query.dtype == key.dtype == value.dtype or query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, and the inputs are {query.dtype}, {key.dtype}, {value.dtype}"
    query_length, key_length, head_dim = query.shape[-3], key.shape[-3], query.shape[-1]
    if query_length == 0 or key_length == 0:  # its gradient would end the process
        return f"it needs queries and keys, and there are {query_length} and {key_length}"
    largest = 256 if at.major >= 9 else 128  # Hopper and later take twice the head size of Ampere
    if head_dim % 8 or head_dim > largest:
        return f"it takes head sizes up to {largest} that are multiples of 8, and this one is {head_dim}"
    if value.shape[-1] != head_dim:
        return f"keys and values must have one head size, and have {head_dim} and {value.shape[-1]}"
    return None


def _option_obstacle(features: Features) -> str | None:
    if features.dropout:
        return "it is only used without dropout"
    if features.weights:
        return "it does not produce the attention weights"
    if features.precision is not None:
        return f"it takes no precision, and precision={features.precision!r} was given"
    return "it has no attention sinks, and sinks were given" if features.sinks else None


def _cap_obstacle(logits_soft_cap: float | None) -> str | None:
    if logits_soft_cap is None:
        return None
    return f"it does not cap the logits, and logits_soft_cap={logits_soft_cap} was given"


def _window_obstacle(query: Any, key: Any, is_causal: bool, local_window_size: Window | None) -> str | None:
    if local_window_size is None:
        return None
    right = local_window_size if isinstance(local_window_size, int) else local_window_size[1]
    if not is_causal and right != 0:
        return "it only supports windows into the past: pass is_causal=True"
    query_length, key_length = query.shape[-3], key.shape[-3]
    if query_length > key_length:
        return f"with a window it takes no more queries than keys, and there are {query_length} and {key_length}"
    return None


def _bias_obstacle(query: Any, key: Any, bias: Any, mask: Any) -> str | None:
    if bias is None and mask is None:
        return None
    query_length, key_length, heads = query.shape[-3], key.shape[-3], query.shape[-2]
    if query_length % 2 or key_length % 2:
        return f"with a bias or mask it takes even lengths, and they are {query_length} and {key_length}"
    if bias is not None and (
        mask is not None or bias.shape[-3:] != (heads, query_length, key_length) or _rows(bias) > 1
    ):
        return (
            "it only differentiates a bias of shape [heads, query_length, key_length] without a mask, and this one is "
            f"{bias.shape}{'' if mask is None else ' with a mask'}"
        )
    return None


def _rows(array: Any) -> int:
    return math.prod(array.shape[:-3])
