"""The settings most layers share: dtypes and modes, and how the arithmetic of a layer is compiled.

A layer has up to three dtypes. The *parameter dtype* (`param_dtype`) is how parameters are stored. The *computation
dtype* (`dtype`) is how the layer computes; `None` means the dtype that inputs and parameters promote to. Layers that
average also have a *statistics dtype*, which is never narrower than float32.

A *mode* (`deterministic`, `use_running_average`) is a flag on which a layer behaves differently in training. A *body*
is the arithmetic of a layer as one function of arrays (see `compiled_body`); a *hook* is a function inside a body that
a user can replace, such as `dot_general` or `promote_dtype`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.info import info_of

P = ParamSpec("P")
R = TypeVar("R")

PromoteDtype = Callable[..., tuple[Any, ...]]
"""A replacement for `promote_dtype`."""

MODE_NOT_SET = (
    "{layer}{where} does not know its mode: `{name}` is not set. For a whole model, call `model.train()` or "
    "`model.eval()` once. Or set it for this layer in one of three ways: "
    "in the call, `layer(x, {name}={example})`; "
    "on the instance, `{layer}(..., {name}={example})`; "
    "or as a flag of the Context passed to the call, "
    "`ctx = nnx.context(0, flags={{'{name}': {example}}})` and `layer(x, ctx=ctx)`."
)

_FLOAT32 = np.dtype(np.float32)
_INEXACT = frozenset(np.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64, jnp.complex64))


# Dtypes


@functools.cache
def as_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns `dtype`, in any spelling that JAX accepts, as a `numpy.dtype`."""
    return np.dtype(dtype)


def as_optional_dtype(dtype: DTypeLike | None) -> np.dtype | None:
    """Like `as_dtype`, but passes `None` ("infer it") through."""
    return None if dtype is None else as_dtype(dtype)


def cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns `x` in `dtype`. An array that already has the dtype is returned unchanged, with nothing traced."""
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


def infer_dtype(arrays: tuple[Any, ...], dtype: DTypeLike | None = None, inexact: bool = True) -> np.dtype:
    """Returns the dtype to which `promote_dtype` converts these arrays."""
    if dtype is not None:
        return as_dtype(dtype)
    present = [a for a in arrays if a is not None]
    first = present[0].dtype
    # The common case, all arrays of one float dtype, skips JAX's promotion lattice, which is slow in Python.
    if first in _INEXACT and all(a.dtype == first for a in present):
        return first
    target = jnp.result_type(*present)
    if inexact and not jnp.issubdtype(target, jnp.inexact):
        target = jnp.promote_types(target, jnp.float32)
    return target


def promote_dtype(arrays: tuple[Any, ...], /, dtype: DTypeLike | None = None, inexact: bool = True) -> tuple[Any, ...]:
    """Converts arrays to one dtype.

    Args:
        arrays: the arrays; a `None` among them stays `None`.
        dtype: the dtype to convert to; by default, the one the arrays promote to.
        inexact: whether an inferred dtype must be floating-point or complex.

    Returns:
        The arrays in order. Those that already have the dtype are returned unchanged.

    >>> x, w, b = promote_dtype((jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float32), None))
    >>> x.dtype, w.dtype, b
    (dtype('float32'), dtype('float32'), None)
    """
    target = infer_dtype(arrays, dtype, inexact)
    return tuple(None if a is None else cast(a, target) for a in arrays)


default_promote_dtype: PromoteDtype = promote_dtype


def result_dtype(arrays: tuple[Any, ...], dtype: DTypeLike | None, promote: PromoteDtype) -> np.dtype:
    """Returns the dtype to which `promote` converts the first array, without converting if the answer is known."""
    if promote is default_promote_dtype:
        return infer_dtype(arrays, dtype)
    return promote(arrays, dtype=dtype)[0].dtype


def statistics_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which values of `dtype` are averaged: at least float32."""
    return dtype if dtype == _FLOAT32 else jnp.promote_types(dtype, jnp.float32)


# Modes


def resolve_mode(layer: object, name: str, given: bool | None, ctx: Context | None, *, example: bool = True) -> bool:
    """Returns the mode `name` ("deterministic", "use_running_average") for one call of `layer`.

    The call wins over the instance, and the instance over the Context.

    Args:
        layer: the layer being called; its attribute `name` is the mode of the instance.
        name: the name of the argument, the attribute and the Context flag.
        given: the value passed to the call, or `None`.
        ctx: the Context passed to the call, if any.
        example: the value to show in the error message.

    Raises:
        ValueError: if none of the three sets the mode.
    """
    if given is not None:
        return given
    on_instance = getattr(layer, name)
    if on_instance is not None:
        return on_instance
    flag = None if ctx is None else ctx.get_flag(name)
    if flag is None:
        path = info_of(layer).path
        where = f" at {path!r}" if path else ""
        raise ValueError(MODE_NOT_SET.format(layer=type(layer).__name__, where=where, name=name, example=example))
    return flag


# Bodies


_HOOK = "hook"
Hook = Annotated[R, _HOOK]
"""The type of an argument of a `compiled_body` that is a hook, such as `Hook[PromoteDtype]`."""


def compiled_body(body: Callable[P, R]) -> Callable[P, R]:
    """Compiles the arithmetic of a layer; the signature of `body` says how.

    Positional arguments are arrays. Keyword-only arguments are settings, which are static, or hooks, which have the
    type `Hook[...]` and a default. An eager call is then a single dispatch, and a model that repeats a layer traces,
    differentiates and lowers it once; XLA inlines the call, so the compiled program is the same.

    A call that replaces a hook runs `body` itself: a user's function must run on every trace, and may hold arrays or
    state that must not end up in a cache.
    """
    parameters = inspect.signature(body).parameters.values()
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    hooks = tuple((p.name, p.default) for p in keywords if _HOOK in getattr(p.annotation, "__metadata__", ()))
    assert not [p for p in keywords if callable(p.default) and p.name not in dict(hooks) and p.default is not p.empty]
    static = tuple(p.name for p in keywords if p.name not in dict(hooks))
    compiled: Any = jax.jit(body, static_argnames=static)
    if not hooks:
        return compiled

    @functools.wraps(body)
    def run(*arrays: Any, **settings: Any) -> Any:
        for name, default in hooks:
            hook = settings.pop(name, default)
            if hook is not default:
                settings[name] = hook  # the hooks popped before this one were the defaults that `body` has anyway
                return body(*arrays, **settings)
        return compiled(*arrays, **settings)

    return run
