"""The header of a safetensors file: JSON with the name, dtype, shape and position of every tensor.

Files can come from untrusted sources, so a header is checked as strictly as by the reference package, and slightly more
strictly: every byte of the data belongs to exactly one tensor, no key appears twice, and a number is a plain unsigned
integer. Anything else is a `CheckpointError` that names the file.
"""

import json
import math
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from nnx.storage.errors import CheckpointError

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NUMPY_DTYPES = {name: np.dtype(jnp.dtype(dtype)) for name, dtype in DTYPES.items()}

MAX_LENGTH = 100_000_000  # bytes, the limit of the reference package
METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_INTEGERS = {int}
_MINUS = re.compile(r"[\s\[,:]-")  # before every negative number, and seldom within a name
_MAX_DIMENSIONS = 64  # the limit of NumPy
_MAX_BYTES = 2**63 - 1

INVALID = "{path} is not a valid safetensors file: {reason}."
NO_DTYPE = "Cannot save {name!r} as safetensors: the format has no {dtype}. {advice}"
RESERVED = "Cannot save {name!r} as safetensors: the format reserves that name for its metadata. Rename the attribute."
BAD_TEXT = "Cannot save as safetensors: {what} must be text that UTF-8 can encode, got {got}."


class Tensor(NamedTuple):
    """The dtype and shape of a tensor, and the position of its bytes in the data that follow the header."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class Header(NamedTuple):
    """The tensors of a file by name, and the text stored with them."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


# Reading


def parse_header(path: Path, text: bytes, data_size: int) -> Header:
    """Reads a header and checks it.

    Args:
        path: the file it comes from, for the error.
        text: the bytes of the header.
        data_size: the number of bytes that follow it.

    Raises:
        CheckpointError: the header is malformed, or does not describe the data.
    """
    try:
        fields = _parse_json(text)
        metadata = _metadata(fields.pop(METADATA, None))
        tensors = {name: e if type(e) is Tensor else _tensor(name, e) for name, e in fields.items()}
        _check_coverage(tensors, data_size)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(INVALID.format(path=path, reason=error)) from error
    return Header(tensors, metadata)


def _parse_json(text: bytes) -> dict[str, Any]:
    # Decoded here, because json.loads would guess the encoding and skip a byte order mark.
    decoded = text.decode("utf-8")
    if not decoded.startswith("{"):
        raise ValueError("its header is not a JSON object")
    try:
        return json.loads(
            decoded,
            # Without escapes, text that UTF-8 can decode is text that it can encode.
            object_pairs_hook=_escaped_object if "\\u" in decoded else _object,
            parse_int=_integer if _MINUS.search(decoded) else None,
            parse_float=_refuse_number,
            parse_constant=_refuse_number,
        )
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"its header is not JSON ({error})") from error


def _object(pairs: list[tuple[str, Any]]) -> Any:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key appears twice in its header")
    if len(found) == 3 and found.keys() == _FIELDS:
        # At once, so that the dicts and lists of a million entries do not exist together.
        try:
            return _tensor("", found)
        except ValueError:  # it will be raised again where the name is known
            return found
    return found


def _escaped_object(pairs: list[tuple[str, Any]]) -> Any:
    for key, value in pairs:
        for text in (key, value) if isinstance(value, str) else (key,):
            if not _is_encodable(text):
                raise ValueError("its header contains half of a surrogate pair")
    return _object(pairs)


def _integer(text: str) -> int:
    # The length is checked first, because int() is slow for long numbers. "-0" is not unsigned.
    if text.startswith("-") or len(text) > 20 or int(text) >= 2**64:
        raise ValueError(f"its header contains {reprlib.repr(text)}, which is not a 64-bit unsigned integer")
    return int(text)


def _refuse_number(text: str) -> Any:
    raise ValueError(f"its header contains {reprlib.repr(text)}, which is not a 64-bit unsigned integer")


def _metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError(f"{METADATA} must map names to texts, got {reprlib.repr(value)}")
    return value


def _tensor(name: str, entry: Any) -> Tensor:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise ValueError(f"the entry of {name!r} must have dtype, shape and data_offsets, got {reprlib.repr(entry)}")
    dtype_name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = _NUMPY_DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise ValueError(f"{name!r} has the dtype {reprlib.repr(dtype_name)}, which is not one of {', '.join(DTYPES)}")
    if not _are_integers(shape) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"{name!r} has the shape {reprlib.repr(shape)}")
    if not _are_integers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name!r} has the data_offsets {reprlib.repr(offsets)}")
    start, end = offsets
    # Zeros are left out of this product, because NumPy cannot represent an empty array with huge dimensions either.
    if math.prod(filter(None, shape)) * dtype.itemsize > _MAX_BYTES:
        raise ValueError(f"{name!r} has the shape {reprlib.repr(shape)}, which is too large for any memory")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} ({dtype_name} of shape {reprlib.repr(shape)}) has {end - start} bytes")
    return Tensor(dtype, tuple(shape), start, end)


def _are_integers(value: Any) -> bool:
    return isinstance(value, list) and _INTEGERS.issuperset(map(type, value))  # not bool, which is an int as well


def _check_coverage(tensors: Mapping[str, Tensor], data_size: int) -> None:
    """Checks that the tensors follow each other without gaps or overlaps, up to the end of the data."""
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != position:
            raise ValueError(f"the data of {name!r} start at {tensor.start}, but those before it end at {position}")
        position = tensor.end
    if position != data_size:
        raise ValueError(f"it has {data_size} bytes of data, but its header describes {position}")


# Writing


def make_header(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, Tensor]]:
    """Builds a header.

    Args:
        tensors: values with a `dtype` and a `shape`, by name.
        metadata: the text to store, by name.

    Returns:
        The header, and the tensors in the order of their data.

    Raises:
        ValueError: the format cannot express a name, a dtype or the metadata.
    """
    for key, text in metadata.items():
        if not isinstance(key, str) or not isinstance(text, str) or not _is_encodable(key + text):
            raise ValueError(BAD_TEXT.format(what="the metadata", got=reprlib.repr({key: text})))
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    placed: dict[str, Tensor] = {}
    position = 0
    for name in data_order(tensors):
        dtype, shape = tensors[name].dtype, tuple(tensors[name].shape)
        text = dtype_name(name, dtype)
        tensor = placed[name] = Tensor(dtype, shape, position, position + math.prod(shape) * dtype.itemsize)
        position = tensor.end
        header[name] = {"dtype": text, "shape": list(shape), "data_offsets": [tensor.start, tensor.end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    return encoded + b" " * (-len(encoded) % 8), placed


def data_order(tensors: Mapping[str, Any]) -> list[str]:
    """Returns the names of tensors in the order of their data in a file."""
    # Largest items first, so that every tensor is aligned to its items.
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def dtype_name(name: str, dtype: Any) -> str:
    """Returns the name of a dtype in the format.

    Raises:
        ValueError: the format cannot store the dtype, or a tensor of that name.
    """
    if name == METADATA:
        raise ValueError(RESERVED.format(name=name))
    if not _is_encodable(name):
        raise ValueError(BAD_TEXT.format(what="a path", got=repr(name)))
    try:
        return NAMES[str(dtype)]
    except KeyError:
        raise ValueError(NO_DTYPE.format(name=name, dtype=dtype, advice=_advice(dtype))) from None


def _advice(dtype: Any) -> str:
    if isinstance(dtype, np.dtype) and not dtype.isnative and str(dtype.newbyteorder("=")) in NAMES:
        return f"Convert it to the byte order of this machine first: x.astype({str(dtype.newbyteorder('='))!r})."
    if dtype.kind in "OSUTMm" or dtype.names:  # objects, bytes, text, dates, durations, records
        return "Leave it out, or keep it as text in the metadata."
    instead = next(
        name
        for kind, name in ((jnp.integer, "int8"), (jnp.complexfloating, "complex64"), (jnp.generic, "float32"))
        if jnp.issubdtype(dtype, kind)
    )
    return f"Convert it first, e.g. to {instead}."


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
