"""Keys of functions: when the trace of a user's function can be used again.

As in JAX, a trace is used again only for the same function object, or the same partial. Unlike in JAX, it ends when a
name the function reads means something else: the contents of its closure cells, its defaults, and the globals that its
code names. Numbers and strings count by value, other immutable objects by identity, a Module by identity and structure.
A function that names something that can change without being replaced (a list, a dict, a numpy array, an instance of a
user's class) has no key. What a function reads indirectly, through a helper or an attribute, is not part of the key.
"""

import contextvars
import dataclasses
import enum
import functools
import os
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax

from nnx.core.module.info import ModuleBase
from nnx.core.module.scopes import unexplained
from nnx.core.state.filters import Matcher
from nnx.core.statics.keys import ById
from nnx.core.statics.reach import closure_of, globals_of
from nnx.core.structure.flat import flat_of
from nnx.core.user_warnings import PACKAGE


class CanChange(Exception):
    """A function names something that can change unnoticed."""


_BY_VALUE = {type(None), type(...), bool, int, str, bytes}

_BY_IDENTITY = (
    type,
    enum.Enum,
    contextvars.ContextVar,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    np.ufunc,
    np.dtype,
    jax.Array,
    jax.custom_jvp,
    jax.custom_vjp,
    type(jax.jit(lambda: None)),
)

_LIBRARIES: tuple[str, ...] = (
    PACKAGE,
    *(os.path.dirname(os.path.abspath(file)) + os.sep for file in (jax.__file__, np.__file__, optax.__file__)),
)


def function_key(fun: Any) -> Any:
    """Returns a key that equals a later one of the same function only while its names mean the same.

    Raises:
        CanChange: the function names something that can change unnoticed.
    """
    if isinstance(fun, functools.partial):
        return ById(fun), function_key(fun.func), stable_key((fun.args, *fun.keywords.items()))
    if isinstance(fun, types.MethodType):
        return function_key(unexplained(fun.__func__)), stable_key(fun.__self__)
    if not isinstance(fun, types.FunctionType):
        return stable_key(fun)
    # A library's function does not change; but a lifted function does what the user's function under it does.
    own = () if is_of_library(fun) else tuple(map(stable_key, _reads(fun)))
    # Its code is replaced by tools that reload a file while a notebook runs.
    return ById(fun), ById(fun.__code__), own, function_key(getattr(fun, "__wrapped__", None))


def is_of_library(fun: types.FunctionType) -> bool:
    """Whether a function belongs to JAX, NumPy, Optax or this package, whose functions do not change."""
    return fun.__code__.co_filename.startswith(_LIBRARIES)


def stable_key(value: Any) -> Any:
    """Returns a key of a value that cannot change without being replaced.

    Raises:
        CanChange: it can.
    """
    cls = type(value)
    if cls in _BY_VALUE:
        return cls, value
    if cls is float or cls is complex or isinstance(value, np.generic):
        return cls, np.asarray(value).tobytes()  # bit by bit: 0.0 and -0.0 differ, and a NaN equals itself
    if isinstance(value, _BY_IDENTITY):
        return ById(value)
    if isinstance(value, ModuleBase):
        return ById(value), flat_of(value).key
    if isinstance(value, Matcher):
        return cls, value
    if isinstance(value, (functools.partial, types.MethodType)):
        return function_key(value)
    if cls is tuple or (isinstance(value, tuple) and hasattr(cls, "_fields")):
        return cls, *map(stable_key, value)
    if dataclasses.is_dataclass(value) and cls.__dataclass_params__.frozen:
        fields = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        return cls, stable_key((*fields, *getattr(value, "__dict__", {}).items()))
    raise CanChange


def options_key(value: Any) -> Any:
    """Returns the key of a transform's options. Lists and dicts count by content, since this very call reads them."""
    if isinstance(value, dict):
        return "dict", *[(key, options_key(item)) for key, item in value.items()]
    if type(value) in (list, tuple):
        return type(value), *map(options_key, value)
    return stable_key(value)


def _reads(fun: types.FunctionType) -> Iterator[Any]:
    """Yields the values of the names that a function reads."""
    yield fun.__defaults__
    yield tuple((fun.__kwdefaults__ or {}).items())
    yield from closure_of(fun)
    yield from (value for _, value in globals_of(fun))
