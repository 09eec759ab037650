"""Entries of a checkpoint: what is saved about a leaf besides its data, and the dtypes that can be saved."""

import base64
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from nnx.core.repr import short
from nnx.storage.states import decode, methods_of

NOT_SAVABLE = """Cannot save {path!r}: {value} is not data. Arrays, keys, numbers, strings, bytes, data iterators, \
Modules, Contexts and pytrees of them can be saved."""
ABSTRACT = """Cannot save {path!r}: it is {value}, which has no values. An abstract model (from nnx.eval_shape) can \
only be a target of nnx.load."""
TRACED = "Cannot save {path!r}: it is {value}. Save it outside jit and other transforms."
DELETED = """Cannot save {path!r}: its buffer was deleted, most likely donated to a compiled step. Save the values \
that the step returned or updated."""
UNKNOWN_DTYPE = """Cannot save {path!r}: it is a {dtype} array, and checkpoints hold booleans, integers, floats and \
complex numbers of up to 64 bits per part, in the byte order of this machine. {advice}"""

_ADVICE = {
    "m": "Save it as integers: array.astype('int64').",
    "M": "Save it as integers: array.astype('int64').",
    "f": "Save it as float64.",
    "c": "Save it as complex128.",
    "U": "Save a list of Python strings instead.",
    "S": "Save a list of Python strings instead, or the bytes as uint8.",
    "O": "Save a list of its elements instead.",
}

IN_MANIFEST = {"text": "a string", "bytes": "bytes", "state": "the state of a data iterator"}
"""Kinds of entries whose values are in the manifest and have no dtype, in words."""

_PARTS = {"bool": (bool,), "int": (int,), "float": (float,), "complex": (list,)}  # JSON types of Python's numbers
_PLAIN_DTYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}


class Entry(NamedTuple):
    """The description of a value, in memory or saved, without its data.

    Attributes:
        kind: "array", "key" (typed random keys), "number" (a Python number), "text" (a string), "bytes", or "state"
            (that of a data iterator).
        dtype: the name of the dtype, or of the Python type of a number.
        shape: the shape; that of keys does not include the words of each key.
        type: the name of the Variable type that held it, if any.
        value: the number (a complex one as its two parts), the text, the bytes in base64, or the states by process.
        impl: the implementation of the keys.
        weak: whether it was a scalar of weak type.
        stored: the dtype in the files, if version 1 of the format could not store the original one.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    type: str = ""
    value: Any = None
    impl: str = ""
    weak: bool = False
    stored: str = ""

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"type": self.type} if self.type else {}
        fields["kind"] = self.kind
        if self.kind in IN_MANIFEST:
            return {**fields, "value": self.value}
        fields["dtype"] = self.dtype
        if self.kind == "number":
            return {**fields, "value": self.value}
        fields["shape"] = list(self.shape)
        fields |= {"impl": self.impl} if self.kind == "key" else {}
        return fields | ({"weak": True} if self.weak else {})

    @property
    def has_data(self) -> bool:
        """Whether the entry has bytes in the data files."""
        return self.kind in ("array", "key") and 0 not in self.shape

    @property
    def plain_value(self) -> Any:
        """The value of anything but an array, which is part of the manifest; of states, the list of them."""
        if self.kind == "bytes":
            return base64.b64decode(self.value)
        if self.kind == "state":
            return [decode(state) for state in self.value]
        return complex(*self.value) if self.dtype == "complex" else self.value

    @property
    def data_shape(self) -> tuple[int, ...]:
        """The shape of the data in the files; that of keys includes the words of each key."""
        return (*self.shape, *key_words(self.impl)) if self.kind == "key" else self.shape

    @property
    def data_dtype(self) -> Any:
        """The dtype of the data in the files."""
        return jnp.dtype(np.uint32 if self.kind == "key" else self.dtype)

    def __str__(self) -> str:
        if self.kind in IN_MANIFEST:
            return IN_MANIFEST[self.kind]
        if self.kind == "number":
            return f"the number {self.plain_value!r}"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


_FIELDS = set(Entry._fields)


def key_words(impl: str) -> tuple[int, ...]:
    """Returns the shape of one key's data."""
    return jax.random.key_data(jax.random.key(0, impl=impl)).shape


def entry_of(path: str, value: Any, type_name: str) -> Entry:
    """Returns the entry of a leaf; that of a data iterator without its states, which only a save asks for.

    Raises:
        TypeError: the value cannot be saved.
    """
    entry = describe(value, type_name)
    if entry is not None:
        return entry
    if isinstance(value, str):
        return Entry("text", type=type_name, value=str(value))
    if isinstance(value, bytes):
        return Entry("bytes", type=type_name, value=base64.b64encode(value).decode())
    if methods_of(value) is not None:
        return Entry("state", type=type_name, value=[])
    raise TypeError(NOT_SAVABLE.format(path=path, value=short(value)))


def describe(value: Any, type_name: str = "") -> Entry | None:
    """Returns the entry of an array, typed keys or a Python number; None for anything else."""
    number = None if hasattr(value, "dtype") else _number_type(value)
    if number is not None:
        stored = [value.real, value.imag] if number is complex else number(value)
        return Entry("number", number.__name__, type=type_name, value=stored)
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return None
    name, shape = dtype_text(value.dtype), tuple(value.shape)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return Entry("key", name, shape, type_name, impl=_impl(value))
    weak = shape == () and bool(getattr(value, "weak_type", False))
    return Entry("array", name, shape, type_name, weak=weak)


@functools.lru_cache(maxsize=256)
def dtype_text(dtype: Any) -> str:
    """Returns the name of a dtype. Remembered, because NumPy takes ten times as long to make it."""
    return str(dtype)


def _impl(keys: Any) -> str:
    concrete = isinstance(keys, jax.Array) and not isinstance(keys, jax.core.Tracer)
    return str(jax.random.key_impl(keys)) if concrete else ""


def _number_type(value: Any) -> Any:
    return next((cls for cls in (bool, int, float, complex) if isinstance(value, cls)), None)


def check_savable(path: str, value: Any) -> None:
    """Raises a ValueError if a leaf has no values to save."""
    if isinstance(value, jax.ShapeDtypeStruct):
        raise ValueError(ABSTRACT.format(path=path, value=short(value)))
    if isinstance(value, jax.core.Tracer):
        raise ValueError(TRACED.format(path=path, value=short(value)))
    if isinstance(value, jax.Array) and value.is_deleted():
        raise ValueError(DELETED.format(path=path))


def check_dtype(path: str, value: Any) -> None:
    """Raises a TypeError if a leaf is a NumPy array of a dtype that checkpoints cannot hold."""
    if isinstance(value, (np.ndarray, np.generic)) and not is_storable(value.dtype):
        dtype = value.dtype
        if dtype.isnative:
            advice = _ADVICE.get(dtype.kind, "Save its fields one by one.")
        else:
            advice = "Convert it: array.astype(array.dtype.newbyteorder('='))."
        raise TypeError(UNKNOWN_DTYPE.format(path=path, dtype=dtype, advice=advice))


def is_storable(dtype: Any) -> bool:
    """Whether arrays of a dtype can be saved: those are the dtypes of JAX, which every host can read."""
    return dtype.isnative and (dtype.name in _PLAIN_DTYPES or dtype.type.__module__ == "ml_dtypes")


# Reading entries, which may come from an untrusted source


def parse_entry(fields: Any) -> Entry:
    """Returns the entry described by the fields of a manifest.

    Raises:
        ValueError: the fields are not what `Entry.to_json` returns.
    """
    if not isinstance(fields, dict):
        raise ValueError(f"an entry is {short(fields)} instead of an object")
    unknown = set(fields) - _FIELDS
    if unknown:
        raise ValueError(f"an entry has the unknown field {sorted(unknown)[0]!r}")
    shape = fields.get("shape", [])
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape) or len(shape) > 64:
        raise ValueError(f"the shape of an entry is {short(shape)}")
    texts = {name: fields.get(name, "") for name in ("kind", "dtype", "type", "impl", "stored")}
    if not all(isinstance(text, str) for text in texts.values()) or not isinstance(fields.get("weak", False), bool):
        raise ValueError(f"an entry has a field of the wrong type: {short(fields)}")
    entry = Entry(**texts, shape=tuple(shape), value=fields.get("value"), weak=fields.get("weak", False))
    _check_entry(entry)
    return entry


def _check_entry(entry: Entry) -> None:
    if entry.kind == "text":
        if not isinstance(entry.value, str):
            raise ValueError(f"a text is {short(entry.value)}")
    elif entry.kind == "bytes":
        if not isinstance(entry.value, str):
            raise ValueError(f"bytes are {short(entry.value)}")
        base64.b64decode(entry.value, validate=True)
    elif entry.kind == "state":
        if not isinstance(entry.value, list):
            raise ValueError(f"the states of an iterator are {short(entry.value)}")
        _ = entry.plain_value
    elif entry.kind == "number":
        if not isinstance(entry.value, _PARTS.get(entry.dtype, ())) or (
            entry.dtype != "bool" and isinstance(entry.value, bool)
        ):
            raise ValueError(f"a number of type {entry.dtype!r} is {short(entry.value)}")
        if entry.dtype == "complex" and [type(part) for part in entry.value] != [float, float]:
            raise ValueError(f"a complex number is {short(entry.value)}")
    elif entry.kind == "array":
        _check_dtype(entry.dtype)
        if entry.stored:
            _check_dtype(entry.stored)
    elif entry.kind == "key":
        try:
            key_words(entry.impl)
        except Exception:
            raise ValueError(f"a key has the unknown implementation {entry.impl!r}") from None
    else:
        raise ValueError(f"an entry is of the unknown kind {entry.kind!r}")
    if entry.kind in ("array", "key") and math.prod(entry.shape) * 64 >= 2**63:
        raise ValueError(f"an array has the impossible shape {list(entry.shape)}")


@functools.lru_cache(maxsize=64)  # a model has many arrays and few dtypes
def _check_dtype(name: str) -> None:
    try:
        dtype = jnp.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        raise ValueError(f"an array has the unknown dtype {name!r}") from None
    if str(dtype) != name or not is_storable(dtype):
        raise ValueError(f"an array has the dtype {name!r}, which checkpoints cannot hold")
