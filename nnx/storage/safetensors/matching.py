"""Matching: which tensor belongs to which path of the target, and what does not fit."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from nnx.storage.fitting import Description, describe_value, described_misfit, fits, was_narrower
from nnx.storage.leaves import Leaf, Leaves, resolve_alias
from nnx.storage.load_report import LoadReport
from nnx.storage.safetensors.source import Source

TWO_VALUES = "two different values, {path!r} and {alias!r}, for an entry that is shared in the target"
NEEDS_X64 = "{dtype}[{shape}], which JAX converts to {narrow} unless jax_enable_x64 is set (cast=True allows it)"


def match(source: Source, leaves: Leaves, aliases: Mapping[str, str], cast: bool) -> tuple[dict[str, str], LoadReport]:
    """Finds the tensor for each path of the target, and reports everything that does not fit.

    Returns:
        The names of the tensors by path, and the report.
    """
    report = LoadReport()
    found: dict[str, str] = {}
    by_path: dict[str, list[str]] = {}
    for name in source.names:
        by_path.setdefault(resolve_alias(name, aliases), []).append(name)
    known: set[str] = set()
    present = set(source.names)
    for path, leaf in leaves.by_path.items():
        names = by_path.get(path) or [n for n in (resolve_alias(path, source.notes.aliases),) if n in present]
        if not names:
            report.missing.append(path)
            continue
        known.update(names)
        name = path if path in names else names[0]
        other = next((other for other in names if not _is_same(source, other, name)), None)
        problem = None if other is None else TWO_VALUES.format(path=name, alias=other)
        problem = problem or _problem(*source.describe(name), leaf, cast)
        if problem is None:
            found[path] = name
        else:
            report.mismatched[path] = (problem, _text_of_value(leaf.value))
    report.unexpected = [name for name in source.names if name not in known]
    return found, report


def _is_same(source: Source, a: str, b: str) -> bool:
    if a == b:
        return True
    if source.tensor(a)[:2] != source.tensor(b)[:2]:  # dtype and shape
        return False
    # Compared as bytes, so that NaN equals itself.
    return source.read(a, verify=False).tobytes() == source.read(b, verify=False).tobytes()


def _problem(kind: str, dtype: Any, shape: tuple[int, ...], leaf: Leaf, cast: bool) -> str | None:
    """Describes a tensor if it cannot replace the value of an entry; None if it can."""
    value, type_name = leaf
    have, want = Description(kind, str(dtype), shape), describe_value(value)
    sizes = ",".join(map(str, shape))
    if want is None:
        return f"{dtype}[{sizes}]"
    if not fits(have, want, cast or was_narrower(have, want, type_name)):
        return described_misfit(f"{dtype}[{sizes}]", have, want)
    if kind == "array" and want.kind == "array" and not cast and not isinstance(value, (np.ndarray, np.generic)):
        narrow = jax.dtypes.canonicalize_dtype(dtype)
        if narrow != dtype:
            return NEEDS_X64.format(dtype=dtype, shape=sizes, narrow=narrow)
    return None


def _text_of_value(value: Any) -> str:
    if not hasattr(value, "shape"):
        return f"the number {value!r}"
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"
