"""JSON files that begin with the checksum of the rest, so that a changed one is noticed before it is believed."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnx.core.repr import short
from nnx.storage.files import open_regular

_OPENING = '{{\n "crc32": "{:08x}",\n'  # every sealed file begins like this; the checksum covers everything after it
_OPENING_LENGTH = len(_OPENING.format(0))


def seal(fields: Mapping[str, Any]) -> str:
    """Returns fields as JSON that begins with the checksum of the rest."""
    rest = ",\n".join([f" {json.dumps(name)}: {_lines(value)}" for name, value in fields.items()]) + "\n}\n"
    return _OPENING.format(zlib.crc32(rest.encode())) + rest


def _lines(value: Any) -> str:
    """Returns a value as JSON, the items of a dict on lines of their own."""
    # `json.dumps` with an indent is written in Python, which takes seconds for the entries of 100,000 arrays.
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return "{\n" + ",\n".join([f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items()]) + "\n }"


def is_intact(raw: bytes) -> bool:
    """Whether the bytes of a sealed file are those that were written."""
    return raw[:_OPENING_LENGTH] == _OPENING.format(zlib.crc32(raw[_OPENING_LENGTH:])).encode()


def read_object(file: Path) -> tuple[dict[str, Any], bytes]:
    """Reads a JSON file, sealed or not; returns its fields and its bytes.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        ValueError, RecursionError: it is not a JSON object.
    """
    with open_regular(file) as opened:
        raw = opened.read()
    return parse_object(raw), raw


def parse_object(raw: bytes) -> dict[str, Any]:
    """Returns the fields of a JSON object, sealed or not.

    Raises:
        ValueError, RecursionError: it is not a JSON object.
    """
    fields = json.loads(raw.decode("utf-8"))
    if not isinstance(fields, dict):
        raise ValueError(f"it is {short(fields)} instead of an object")
    return fields
