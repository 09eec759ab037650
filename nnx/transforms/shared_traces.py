"""Bodies that are traced once for all calls of equal structure: what keeps tracing 64 rematerialized blocks cheap.

JAX caches the trace of a checkpointed function by the identity of the function it is given. A lifted function is given
other Modules in each call, so it has to be a new function object each time, unless two calls are known to run the same
body on the same structure. Then the second call can pass JAX the object of the first, and its trace is a cache hit.

Two calls *share* a trace if both are made within one run of an enclosing lifted function (the *scope*), at one trace
level, with equal signatures and an equal `body_key`. The key covers everything a body can reach by name: its code, its
defaults, its closure and the globals it reads, the same for the functions among those, and all context variables.
Whatever could change without a name being rebound has no key (a list, a dict, an ordinary object), and a body that
reaches such a thing is traced again for each call. Nothing outlives the scope, so no later call sees an old trace.
"""

import contextvars
import dataclasses
import enum
import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

from nnx.core.trace import current_level
from nnx.transforms.call import Call
from nnx.transforms.global_names import global_chains


class _Scope(threading.local):
    """The bodies that the function now running in this thread has passed to JAX; None outside lifted functions."""

    bodies: dict[Any, "_Shared"] | None = None


class _Shared:
    """A function for JAX to trace, and the call to trace it with if it has to be traced for new shapes."""

    __slots__ = ("function", "call", "kept")

    def __init__(self, trace: Callable[..., Any], kept: list[Any]):
        self.kept = kept  # what the key knows by identity: an object that is gone could give its id to another

        def function(*args: Any) -> Any:
            return trace(self.call, *args)

        self.function = function


_scope = _Scope()


def run_in_scope(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls the function of a lifted call, as a scope for the traces of the bodies it runs in turn."""
    outer, _scope.bodies = _scope.bodies, {}
    try:
        return fun(*args, **kwargs)
    finally:
        _scope.bodies = outer


def shared_body(fun: Any, call: Call, trace: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function to pass to JAX for a call.

    Args:
      fun: the user's function.
      call: the call, split.
      trace: what to do when JAX traces the result: `trace(call, *args)`.
    """
    bodies = _scope.bodies
    kept: list[Any] = []
    try:
        key = None if bodies is None else (call.signature, current_level(), _context_key(kept), body_key(fun, kept))
        shared = None if bodies is None else bodies.get(key)
    except (_Unshareable, TypeError):  # a TypeError: something in the signature has no hash
        return functools.partial(trace, call)
    if bodies is None:
        return functools.partial(trace, call)
    if shared is None:
        shared = bodies[key] = _Shared(trace, kept)
    shared.call = call
    return shared.function


# Keys of bodies


class _Unshareable(Exception):
    """Raised where a body reaches something that can change unnoticed."""


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
      _Unshareable: there is no such key.
    """
    return _value_key(fun, kept, {})


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
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, tuple(value.keywords.items()), tuple(value.__dict__.items()))
        return cls, _value_key(parts, kept, seen)
    if cls is tuple or (isinstance(value, tuple) and hasattr(cls, "_fields")):
        return cls, *[_value_key(item, kept, seen) for item in value]
    if dataclasses.is_dataclass(value) and cls.__dataclass_params__.frozen:
        fields = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        return cls, _value_key((*fields, *getattr(value, "__dict__", {}).items()), kept, seen)
    raise _Unshareable


def _function_key(fun: types.FunctionType, kept: list[Any], seen: dict[int, int]) -> Any:
    if id(fun) in seen:  # it calls itself, or is reached twice
        return "seen", seen[id(fun)]
    seen[id(fun)] = len(seen)
    kept.append(fun)
    if fun.__code__.co_filename.startswith(_LIBRARIES):
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
    return fun.__code__, id(fun.__globals__), *[_value_key(value, kept, seen) for value in values]


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


def _context_key(kept: list[Any]) -> Any:
    """Returns a key of all context variables, by identity: logical axis rules, and what users keep in theirs."""
    items = list(contextvars.copy_context().items())
    kept.extend(items)
    return tuple([(id(variable), id(value)) for variable, value in items])
