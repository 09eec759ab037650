"""Activations: every function in `jax.nn` under its own name, and `PReLU`, which has a parameter."""

import copyreg
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import celu as celu
from jax.nn import elu as elu
from jax.nn import gelu as gelu
from jax.nn import get_scaled_dot_general_config as get_scaled_dot_general_config
from jax.nn import glu as glu
from jax.nn import hard_sigmoid as hard_sigmoid
from jax.nn import hard_silu as hard_silu
from jax.nn import hard_swish as hard_swish
from jax.nn import hard_tanh as hard_tanh
from jax.nn import identity as identity
from jax.nn import leaky_relu as leaky_relu
from jax.nn import log1mexp as log1mexp
from jax.nn import log_sigmoid as log_sigmoid
from jax.nn import log_softmax as log_softmax
from jax.nn import logmeanexp as logmeanexp
from jax.nn import logsumexp as logsumexp
from jax.nn import mish as mish
from jax.nn import one_hot as one_hot
from jax.nn import relu as relu
from jax.nn import relu6 as relu6
from jax.nn import scaled_dot_general as scaled_dot_general
from jax.nn import scaled_matmul as scaled_matmul
from jax.nn import selu as selu
from jax.nn import sigmoid as sigmoid
from jax.nn import silu as silu
from jax.nn import soft_sign as soft_sign
from jax.nn import softmax as softmax
from jax.nn import softplus as softplus
from jax.nn import sparse_plus as sparse_plus
from jax.nn import sparse_sigmoid as sparse_sigmoid
from jax.nn import squareplus as squareplus
from jax.nn import standardize as standardize
from jax.nn import swish as swish
from jax.nn import tanh as tanh
from jax.typing import DTypeLike

from nnx.core.module.module import Module
from nnx.core.variables.variables import Param
from nnx.nn.support.checks import shape_of
from nnx.nn.support.settings import (
    Hook,
    PromoteDtype,
    as_dtype,
    as_optional_dtype,
    compiled_body,
    default_promote_dtype,
)


def _reduce_by_name(function: Any) -> Any:
    """Lets pickle store a function that JAX has wrapped by its name, as it does for plain functions."""
    found = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return function.__qualname__ if found is function else function.__reduce_ex__(2)


# `jax.nn.relu` is a `custom_jvp` object and `jax.nn.silu` a jitted function. Pickle stores neither by name, and would
# refuse every layer that holds one.
copyreg.pickle(jax.custom_jvp, _reduce_by_name)
copyreg.pickle(type(silu), _reduce_by_name)


normalize = standardize
"""The name that `standardize` had in `jax.nn` before."""


@compiled_body
def _prelu(
    x: jax.Array, slope: jax.Array, *, dtype: Any, promote: Hook[PromoteDtype] = default_promote_dtype
) -> jax.Array:
    x, slope = promote((x, slope), dtype=dtype)
    return jnp.where(x >= 0, x, slope * x)


class PReLU(Module):
    """Parametric ReLU: `x` where positive, a learned multiple of `x` elsewhere; shape `(...) -> (...)`.

    Args:
        negative_slope_init: the first value of the slope, one number for all features.
        dtype: the computation dtype; by default, the dtype that input and slope promote to.
        param_dtype: the dtype in which the slope is stored.
        promote_dtype: a replacement for the function that converts input and slope to one dtype.
        negative_slope_metadata: metadata of the slope's Variable.

    >>> nnx.PReLU(0.5)(jnp.array([-2.0, 3.0])).tolist()
    [-1.0, 3.0]
    """

    dtype: np.dtype | None
    param_dtype: np.dtype
    promote_dtype: PromoteDtype
    negative_slope: jax.Array

    def __init__(
        self,
        negative_slope_init: float = 0.01,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        promote_dtype: PromoteDtype = default_promote_dtype,
        negative_slope_metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.promote_dtype = promote_dtype
        slope = jnp.asarray(negative_slope_init, self.param_dtype)
        self.negative_slope = Param(slope, **(negative_slope_metadata or {}))

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Applies the activation to an array of any shape."""
        shape_of(self, inputs)
        return _prelu(inputs, self.negative_slope, dtype=self.dtype, promote=self.promote_dtype)
