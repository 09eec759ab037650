"""Data iterators: objects that say where they are in their data, so that a resumed run reads the same batches.

An *iterator* here is an object with `get_state` and `set_state` (the iterators of Grain, a `numpy.random.RandomState`),
or with `state_dict` and `load_state_dict` (those of torchdata). A checkpoint has the state of each process's iterator.
A state is plain data; it is stored as JSON, in which every object is marked with the Python type it stands for, so that
it comes back exactly.
"""

import base64
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from nnx.core.context import Context
from nnx.core.module.info import ModuleBase
from nnx.core.repr import short
from nnx.storage.errors import CheckpointError, first_line

NOT_PLAIN = """Cannot save {path!r}: the state of this {kind} contains {value}. States of data iterators consist of \
numbers, strings, bytes, None, NumPy arrays, and lists, tuples and dicts of them."""
REFUSED = """The {kind} at {path!r} did not accept the state that was saved for it ({reason}). No array was loaded."""


_KINDS = "biufcSU"  # of NumPy dtypes: booleans, numbers and strings
_DTYPE = re.compile(rf"[<>|=][{_KINDS}]\d{{1,9}}")


class Methods(NamedTuple):
    """How to ask an iterator for its state and to set it."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


def methods_of(value: Any) -> Methods | None:
    """Returns the methods of a data iterator; None if a value is none."""
    if isinstance(value, (ModuleBase, Context, jax.Array, np.ndarray, np.generic, type)):
        return None
    for get, set_ in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if callable(getattr(value, get, None)) and callable(getattr(value, set_, None)):
            return Methods(getattr(value, get), getattr(value, set_))
    return None


def state_of(path: str, iterator: Any) -> Any:
    """Returns the state of a data iterator as JSON.

    Raises:
        TypeError: the state is not plain data.
    """
    methods = methods_of(iterator)
    assert methods is not None
    try:
        return encode(methods.get())
    except TypeError as error:
        raise TypeError(NOT_PLAIN.format(path=path, kind=type(iterator).__name__, value=error)) from error


def set_state(path: str, iterator: Any, state: Any) -> None:
    """Sets the state of a data iterator.

    Raises:
        CheckpointError: the iterator does not accept it.
    """
    methods = methods_of(iterator)
    assert methods is not None
    try:
        methods.set(state)
    except Exception as error:
        text = REFUSED.format(kind=type(iterator).__name__, path=path, reason=first_line(error))
        raise CheckpointError(text) from error


def encode(value: Any) -> Any:
    """Returns plain data as JSON.

    Raises:
        TypeError: a value is something else; the message shows it.

    >>> encode({"seen": 3, "rng": (b"ab", None)})
    {'dict': [['seen', 3], ['rng', {'tuple': [{'bytes': 'YWI='}, None]}]]}
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode(item) for item in value]
    if type(value) is tuple:
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, dict):  # also of a subclass, such as the OrderedDict of a state_dict
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in _KINDS:
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {kind: data, "dtype": value.dtype.str, "shape": list(value.shape)}
    raise TypeError(short(value))


def decode(value: Any) -> Any:
    """Returns the data that `encode` was given.

    Raises:
        ValueError: it is not what `encode` returns.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [decode(item) for item in value]
    match value:
        case {"tuple": list(items), **rest} if not rest:
            return tuple([decode(item) for item in items])
        case {"dict": list(items), **rest} if not rest and all(isinstance(i, list) and len(i) == 2 for i in items):
            return _decoded_dict(items)
        case {"bytes": str(text), **rest} if not rest:
            return base64.b64decode(text, validate=True)
        case {"array": str(text), "dtype": str(dtype), "shape": list(shape), **rest} if not rest:
            return _decoded_array(text, dtype, shape)
        case {"scalar": str(text), "dtype": str(dtype), "shape": [], **rest} if not rest:
            return _decoded_array(text, dtype, [])[()]
    raise ValueError(f"a state contains {short(value)}")


def _decoded_dict(items: list[list[Any]]) -> dict[Any, Any]:
    try:
        return {decode(key): decode(item) for key, item in items}
    except TypeError as error:  # a list as a key
        raise ValueError(f"a state contains {short(items)}") from error


def _decoded_array(text: str, name: str, shape: list[Any]) -> np.ndarray:
    if any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"a state contains an array of the shape {short(shape)}")
    if _DTYPE.fullmatch(name) is None:
        raise ValueError(f"a state contains an array of the dtype {name!r}")
    return np.frombuffer(base64.b64decode(text, validate=True), name).reshape(shape).copy()
