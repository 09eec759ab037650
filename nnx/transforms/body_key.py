"""Keys of functions: two functions with equal keys do the same to equal arguments, now and later.

A key covers everything a function *reaches*: its code, its defaults, its attributes, its closure and the globals it
reads, with the attributes read from the user's Python modules and classes, and the same for the functions among those.
Numbers and strings count by value, other immutable objects by identity, functions of libraries by identity. A function
that reaches something that can change without a name being rebound (a list, a dict, a numpy array, an instance of a
user's class) has no key.
"""

import contextvars
import dataclasses
import enum
import functools
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax

from nnx.core.filters import Matcher
from nnx.transforms.global_names import global_chains


class CanChange(Exception):
    """A function reaches something that can change unnoticed."""


_BY_VALUE = {type(None), type(...), bool, int, str, bytes}

_BY_IDENTITY = (
    type,
    enum.Enum,
    contextvars.ContextVar,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    np.ufunc,
    np.dtype,
    jax.Array,
    jax.custom_jvp,
    jax.custom_vjp,
    type(jax.jit(lambda: None)),
)

_LIBRARIES: tuple[str, ...] = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (jax.__file__, np.__file__, optax.__file__, os.path.dirname(__file__))
)


def body_key(fun: Any, kept: list[Any]) -> Any:
    """Returns a key that two functions share only if they do the same to equal arguments.

    Args:
        fun: the function.
        kept: a list to which the objects are added that the key knows by identity, for the caller to keep.

    Raises:
        CanChange: there is no such key.
    """
    return _value_key(fun, kept, {})


def content_key(value: Any, kept: list[Any]) -> Any:
    """Returns the key of options, in which lists and dicts count by content: they are read in this very call."""
    return _value_key(_as_tuples(value), kept, {})


def _as_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return ("dict", *[(key, _as_tuples(item)) for key, item in value.items()])
    if type(value) in (list, tuple):
        return (type(value), *map(_as_tuples, value))
    return value


def _value_key(value: Any, kept: list[Any], seen: dict[int, int]) -> Any:
    cls = type(value)
    if cls in _BY_VALUE:
        return cls, value
    if cls is float or cls is complex or isinstance(value, np.generic):
        return cls, np.asarray(value).tobytes()  # bit by bit: 0.0 and -0.0 differ, and a NaN equals itself
    if isinstance(value, _BY_IDENTITY):
        kept.append(value)
        return id(value)
    if cls is types.FunctionType:
        return _function_key(value, kept, seen)
    if isinstance(value, Matcher):
        return cls, value
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, tuple(value.keywords.items()), tuple(value.__dict__.items()))
        return cls, _value_key(parts, kept, seen)
    if isinstance(value, types.MethodType):
        return cls, _value_key((value.__func__, value.__self__), kept, seen)
    if cls is tuple or (isinstance(value, tuple) and hasattr(cls, "_fields")):
        return cls, *[_value_key(item, kept, seen) for item in value]
    if dataclasses.is_dataclass(value) and cls.__dataclass_params__.frozen:
        fields = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        return cls, _value_key((*fields, *getattr(value, "__dict__", {}).items()), kept, seen)
    raise CanChange


def _function_key(fun: types.FunctionType, kept: list[Any], seen: dict[int, int]) -> Any:
    if id(fun) in seen:  # it calls itself, or is reached twice
        return "seen", seen[id(fun)]
    seen[id(fun)] = len(seen)
    if fun.__code__.co_filename.startswith(_LIBRARIES):
        kept.append(fun)
        # A library's function does not change; but a lifted function does what the user's function under it does.
        return id(fun), _value_key(getattr(fun, "__wrapped__", None), kept, seen)
    values: list[Any] = [fun.__defaults__, tuple((fun.__kwdefaults__ or {}).items()), tuple(fun.__dict__.items())]
    for cell in fun.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            values.append(...)
    for name, *attributes in global_chains(fun.__code__):
        if name in fun.__globals__:
            values.extend(_read(fun.__globals__[name], attributes))
    return fun.__code__, *[_value_key(value, kept, seen) for value in values]


def _read(value: Any, attributes: list[str]) -> Iterator[Any]:
    """Yields a global value and what is read from it, as far as it is a user's Python module or class."""
    yield value
    for attribute in attributes:
        if not isinstance(value, (types.ModuleType, type)) or _file_of(value).startswith(_LIBRARIES):
            return
        value = getattr(value, attribute, None)
        yield value


def _file_of(value: Any) -> str:
    module = sys.modules.get(value.__module__) if isinstance(value, type) else value
    return getattr(module, "__file__", None) or ""
