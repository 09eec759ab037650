"""Wrappers that normalize the weights of a layer instead of its activations: `SpectralNorm` and `WeightNorm`.

The wrapped layer keeps its stored weights. Each call computes normalized ones and runs a copy of the layer with them,
so gradients flow through the normalization to the stored weights. Anything else that the layer changes during the call,
such as running averages, is written back to it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.dict_sequence import Dict
from nnx.core.module.module import Module
from nnx.core.state.filters import Filter, PathMatches
from nnx.core.state.state import State
from nnx.core.variables.variables import BatchStat, Param
from nnx.nn.initializers import normal
from nnx.nn.support.checks import as_tuple
from nnx.nn.support.parameters import InitializerLike, default_scale_init, initial_value
from nnx.nn.support.settings import (
    Hook,
    PromoteDtype,
    as_dtype,
    as_optional_dtype,
    cast,
    compiled_body,
    default_promote_dtype,
    infer_dtype,
    resolve_mode,
    result_dtype,
    statistics_dtype,
)

KERNELS = PathMatches("**/kernel")

NOT_A_MATRIX = (
    "SpectralNorm is defined for matrices, and `error_on_non_matrix` is set: {path!r} has shape {shape}. "
    "Without it, the leading axes are flattened into one."
)
NOTHING_TO_NORMALIZE = "{wrapper} found no weights to normalize in {layer}; its state has the paths {paths}."


def _key(path: str) -> str:
    """Returns a path as one key of a `Dict`, in which a `/` is not allowed."""
    return path.replace("/", ".")


def _weights(wrapper: Module, layer: Module, filter: Filter, min_axes: int) -> State:
    found = Module.filter(layer, filter)
    weights = State({path: leaf for path, leaf in found.items() if jnp.ndim(leaf.value) >= min_axes})
    if not weights:
        paths = ", ".join(Module.get_state(layer)) or "(none)"
        raise ValueError(
            NOTHING_TO_NORMALIZE.format(wrapper=type(wrapper).__name__, layer=type(layer).__name__, paths=paths)
        )
    return weights


def _run_with(layer: Module, weights: State, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a copy of `layer` with these weights, and writes everything else that the call changes to `layer`."""
    before, moduledef = Module.partition(layer)
    out, after = moduledef.apply(before, weights)(*args, **kwargs)

    def changed(path: str, leaf: Any) -> bool:
        if path in weights:
            return False
        old = jax.tree.leaves(before[path]) if path in before else []
        new = jax.tree.leaves(leaf)
        return len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True))

    changes = State({path: leaf for path, leaf in after.get_state().items() if changed(path, leaf)})
    if changes:
        Module.update_state(layer, changes)
    return out


def _squared_norm(x: Array, axes: tuple[int, ...] | None = None) -> Array:
    """Returns the sum of `|x|²`, which is real for complex `x`; the axes stay with size 1."""
    squares = lax.square(x.real) + lax.square(x.imag) if jnp.iscomplexobj(x) else lax.square(x)
    return jnp.sum(squares, axes, keepdims=True)


def _scaled(x: Array, axes: tuple[int, ...] | None = None) -> Array:
    """Returns `x` with its largest entry brought to 1, so that squares neither underflow nor overflow."""
    largest = lax.stop_gradient(jnp.max(jnp.abs(x), axes, keepdims=True))
    return x / jnp.where(largest > 0, largest, 1)


def _unit(x: Array, otherwise: Array, epsilon: float) -> Array:
    """Returns `x` with norm 1, or `otherwise` if `x` is too short to have a direction."""
    norm = jnp.sqrt(_squared_norm(x))
    return jnp.where(norm > epsilon, x / jnp.where(norm > epsilon, norm, 1), otherwise)


@compiled_body
def _spectral(weight: Array, u: Array, *, n_steps: int, epsilon: float, dtype: Any) -> tuple[Array, Array, Array]:
    """Returns the weight divided by its largest singular value, the new `u`, and that value.

    The singular value is estimated by power iteration from `u`.
    """
    out_dtype = infer_dtype((weight,), dtype)
    wide = cast(weight, statistics_dtype(weight.dtype))
    matrix = jnp.reshape(wide, (-1, weight.shape[-1]))  # (inputs, outputs)
    fixed = _scaled(lax.stop_gradient(matrix))

    # u: (1, outputs), v: (1, inputs). A weight of zeros has no direction, so the vectors stay what they are: a stored
    # `u` of zeros would never recover.
    def step(_: int, vectors: tuple[Array, Array]) -> tuple[Array, Array]:
        u, v = vectors
        v = _unit(u @ fixed.T, v, epsilon)
        return _unit(v @ fixed.conj(), u, epsilon), v

    u, v = lax.fori_loop(0, n_steps, step, (cast(u, wide.dtype), jnp.zeros_like(fixed[:, 0])[None]))
    sigma = (v.conj() @ matrix @ u.T)[0, 0].real
    normalized = wide / jnp.where(sigma != 0, sigma, 1)
    return cast(normalized, out_dtype), u, sigma


class SpectralNorm(Module):
    """Runs a layer with its weights divided by their largest singular value.

    All `Param`s with at least two axes are normalized, with leading axes flattened into one. Every call that updates
    the stored vectors `u` refines the estimate by power iteration from them.

    Args:
        layer_instance: the layer.
        n_steps: the number of steps of power iteration per call.
        epsilon: a bound; power iteration keeps a vector that would become shorter, relative to the largest weight.
        dtype: the dtype of the normalized weights; by default, that of the stored ones.
        param_dtype: the dtype of the stored vectors, which use at least float32, and are complex if the weights are.
        error_on_non_matrix: whether weights with more than two axes are an error.
        update_stats: whether a call stores the refined `u` and `sigma` (`BatchStat`); `None` to decide in the call or
            by the Context flag of that name. `train()` sets it to true, `eval()` to false.
        ctx: the Context; its stream "params" initializes `u`.

    >>> ctx = nnx.context(0)
    >>> layer = nnx.SpectralNorm(nnx.Linear(4, 5, ctx=ctx), n_steps=20, ctx=ctx)
    >>> layer(jnp.ones((3, 4)), update_stats=True).shape
    (3, 5)
    >>> list(layer.sigma)
    ['kernel']
    """

    layer_instance: Module
    n_steps: int
    epsilon: float
    dtype: np.dtype | None
    param_dtype: np.dtype
    error_on_non_matrix: bool
    update_stats: bool | None
    u: Dict
    sigma: Dict

    def __init__(
        self,
        layer_instance: Module,
        *,
        n_steps: int = 1,
        epsilon: float = 1e-12,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        error_on_non_matrix: bool = False,
        update_stats: bool | None = True,
        ctx: Context,
    ):
        if n_steps < 1:
            raise ValueError(f"SpectralNorm: `n_steps` must be at least 1, got {n_steps}.")
        self.layer_instance = layer_instance
        self.n_steps = n_steps
        self.epsilon = epsilon
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.error_on_non_matrix = error_on_non_matrix
        self.update_stats = update_stats
        stat_dtype = statistics_dtype(self.param_dtype)
        vectors, values = {}, {}
        for path, leaf in _weights(self, layer_instance, Param, 2).items():
            if error_on_non_matrix and leaf.value.ndim > 2:
                raise ValueError(NOT_A_MATRIX.format(path=path, shape=leaf.value.shape))
            is_complex = jnp.iscomplexobj(leaf.value)
            vector_dtype = jnp.promote_types(stat_dtype, jnp.complex64) if is_complex else stat_dtype
            first = initial_value(self, normal(1.0), ctx, (1, leaf.value.shape[-1]), vector_dtype)
            vectors[_key(path)] = BatchStat(first)
            values[_key(path)] = BatchStat(jnp.ones((), jnp.finfo(stat_dtype).dtype))
        self.u = Dict(vectors)
        self.sigma = Dict(values)

    def __call__(self, x: Any, update_stats: bool | None = None, **kwargs: Any) -> Any:
        update = resolve_mode(self, "update_stats", update_stats, kwargs.get("ctx"))
        normalized = {}
        for path, leaf in _weights(self, self.layer_instance, Param, 2).items():
            key = _key(path)
            value, u, sigma = _spectral(
                leaf.value, self.u[key], n_steps=self.n_steps, epsilon=self.epsilon, dtype=self.dtype
            )
            normalized[path] = leaf.replace(value)
            if update:
                self.u[key] = cast(u, self.u[key].dtype)
                self.sigma[key] = cast(sigma, self.sigma[key].dtype)
        return _run_with(self.layer_instance, State(normalized), (x,), kwargs)


@compiled_body
def _weight_norm(
    weight: Array,
    scale: Array | None,
    *,
    feature_axes: tuple[int, ...] | None,
    epsilon: float,
    dtype: Any,
    promote: Hook[PromoteDtype] = default_promote_dtype,
) -> Array:
    out_dtype = result_dtype((weight, scale), dtype, promote)
    wide = cast(weight, statistics_dtype(weight.dtype))
    features = () if feature_axes is None else tuple(axis % weight.ndim for axis in feature_axes)
    axes = tuple(axis for axis in range(weight.ndim) if axis not in features)
    scaled = _scaled(wide, axes)
    normalized = scaled * lax.rsqrt(_squared_norm(scaled, axes) + epsilon)
    if scale is not None:
        layout = tuple(size if axis in features else 1 for axis, size in enumerate(weight.shape))
        normalized = normalized * jnp.reshape(scale, layout)
    return cast(normalized, out_dtype)


class WeightNorm(Module):
    """Runs a layer with its weights divided by their norm and multiplied by a learned scale.

    Args:
        layer_instance: the layer.
        feature_axes: the axes of a weight along which each entry has its own norm (over all other axes) and scale;
            `None` for one norm and one scale per weight.
        use_scale: whether there is a learned scale.
        scale_init: the initializer of the scales.
        epsilon: a small number added to squared norms, relative to the largest weight.
        dtype: the dtype of the normalized weights; by default, the dtype that stored weights and scales promote to.
        param_dtype: the dtype in which the scales are stored.
        variable_filter: a filter that picks the Variables to normalize; by default, those named `kernel`.
        promote_dtype: a replacement for the function that decides the dtype of the normalized weights.
        ctx: the Context; needed only for initializers that draw random numbers.

    >>> ctx = nnx.context(0)
    >>> layer = nnx.WeightNorm(nnx.Linear(8, 4, ctx=ctx), ctx=ctx)
    >>> layer(jnp.ones((5, 8))).shape, layer.scale["kernel"].shape
    ((5, 4), (4,))
    """

    layer_instance: Module
    feature_axes: tuple[int, ...] | None
    use_scale: bool
    epsilon: float
    dtype: np.dtype | None
    param_dtype: np.dtype
    promote_dtype: PromoteDtype
    paths: tuple[str, ...]
    scale: Dict

    def __init__(
        self,
        layer_instance: Module,
        *,
        feature_axes: int | Sequence[int] | None = -1,
        use_scale: bool = True,
        scale_init: InitializerLike = default_scale_init,
        epsilon: float = 1e-12,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        variable_filter: Filter = KERNELS,
        promote_dtype: PromoteDtype = default_promote_dtype,
        ctx: Context | None = None,
    ):
        self.layer_instance = layer_instance
        self.feature_axes = None if feature_axes is None else as_tuple(feature_axes)
        self.use_scale = use_scale
        self.epsilon = epsilon
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.promote_dtype = promote_dtype
        weights = _weights(self, layer_instance, variable_filter, 0)
        self.paths = tuple(weights)
        scales = {}
        for path, leaf in weights.items() if use_scale else ():
            shape = tuple(leaf.value.shape[axis] for axis in self.feature_axes or ())
            scales[_key(path)] = Param(initial_value(self, scale_init, ctx, shape, self.param_dtype))
        self.scale = Dict(scales)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        state = Module.get_state(self.layer_instance)
        settings: Any = {"feature_axes": self.feature_axes, "epsilon": self.epsilon, "dtype": self.dtype}
        normalized = {}
        for path in self.paths:
            scale = self.scale[_key(path)] if self.use_scale else None
            value = _weight_norm(state[path].value, scale, **settings, promote=self.promote_dtype)
            normalized[path] = state[path].replace(value)
        return _run_with(self.layer_instance, State(normalized), (x, *args), kwargs)
