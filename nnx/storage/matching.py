"""Matching: which value of a source belongs to which path of a target, whether it fits there, and what does not.

A *source* is whatever is loaded: a checkpoint, tensors in files, a mapping, a state dict of PyTorch. Each of them knows
under which of its *names* the value of a path can be; what is done with the answer is the same for all, and so are the
rules of what can replace what.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from nnx.storage.entry import Entry
from nnx.storage.errors import LoadReport

TWO_VALUES = "{have}, a different value from {other!r}, which it is shared with,"
LOSES_IMAGINARY_PART = ", whose imaginary part would be lost (if that is meant, load its `.real`),"
NEEDS_X64 = ", which JAX can hold only with jax_enable_x64 (or cast=True),"

Texts = tuple[str, str]
"""Two values that do not fit, as text: the one in the source and the one in the target."""


def match(
    names: Mapping[str, Sequence[str]],
    offered: Iterable[str],
    misfit: Callable[[str, str], Texts | None],
    report: LoadReport,
    conflict: Callable[[str, str, str], Texts | None] = lambda path, name, other: None,
) -> dict[str, str]:
    """Finds the value for each path of the target.

    Args:
        names: the names in the source that lead to the value of each path, the one to be loaded first; none if the
            source does not have it.
        offered: all names in the source.
        misfit: a function of a path and a name that returns why the value does not fit, or None if it does.
        report: the report to which everything missing, unexpected and mismatched is added.
        conflict: a function of a path, its first name and another one, that returns how their values differ, or None.

    Returns:
        The names of the values that fit, by path.
    """
    found: dict[str, str] = {}
    known: set[str] = set()
    for path, candidates in names.items():
        if not candidates:
            report.missing.append(path)
            continue
        known.update(candidates)
        first, *others = candidates
        texts = misfit(path, first)
        if texts is None:
            found[path] = first
        else:
            report.mismatched[path] = texts
        for other in others:
            texts = conflict(path, first, other)
            if texts is not None:
                report.mismatched[other] = texts
    report.unexpected += [name for name in offered if name not in known]
    return found


# Whether a value fits


Dtypes = Literal["same", "sort", "any"]
"""Which dtypes fit: the same one; any that stores the same sort of number in 16 bits or more; or any (`cast=True`)."""


def misfit(have: Entry, want: Entry, dtypes: Dtypes, *, on_host: bool = True) -> str | None:
    """Returns why a loaded value cannot replace another one, or None if it can.

    Args:
        have: the loaded value.
        want: the value that it would replace.
        dtypes: which dtypes fit. A complex value never replaces a real one: its imaginary part would be lost.
        on_host: whether the target keeps 64-bit values although JAX may have no such types.

    Returns:
        A text to put after that of the loaded value. It is empty if the two values explain themselves.
    """
    if want.type == "QuantizedParam" and (have.dtype, want.dtype) == ("float16", "float32"):
        dtypes = "any"  # earlier versions stored the scales of float16 weights in float16, which is widened exactly
    if _loses_imaginary_part(have, want):
        return LOSES_IMAGINARY_PART
    if have.shape != want.shape or not _kinds_fit(have, want, dtypes) or not _in_range(have, want):
        return ""
    if have.kind == "array" and dtypes == "same" and not on_host:
        dtype = jnp.dtype(have.dtype)
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            return NEEDS_X64
    return None


def _kinds_fit(have: Entry, want: Entry, dtypes: Dtypes) -> bool:
    kinds = have.kind, want.kind
    if not {"array", "number"}.issuperset(kinds):
        return kinds[0] == kinds[1] and have.dtype == want.dtype
    if dtypes == "any" or (have.dtype == want.dtype and "number" not in kinds):
        return True
    if "number" in kinds:  # a Python number, or the scalar array that a compiled step made from it
        return _sort_of_number(have.dtype) == _sort_of_number(want.dtype)
    if dtypes == "same" or _sort_of_number(have.dtype) != _sort_of_number(want.dtype):
        return False
    # Floats of eight bits or fewer come with scales, without which they mean nothing.
    return _sort_of_number(have.dtype) is not jnp.floating or jnp.dtype(have.dtype).itemsize >= 2


def _loses_imaginary_part(have: Entry, want: Entry) -> bool:
    return {have.kind, want.kind} <= {"array", "number"} and _is_complex(have) and not _is_complex(want)


def _in_range(have: Entry, want: Entry) -> bool:
    """Whether a Python integer can be stored in the array that it will become."""
    if have.kind != "number" or have.dtype != "int" or want.kind != "array":
        return True
    dtype = jnp.dtype(want.dtype)
    if not jnp.issubdtype(dtype, np.integer):
        return abs(have.value) < 2**1023 and not (jnp.issubdtype(dtype, np.bool_) and have.value not in (0, 1))
    return jnp.iinfo(dtype).min <= have.value <= jnp.iinfo(dtype).max


def _sort_of_number(dtype: Any) -> Any:
    """Returns the sort of number that a dtype stores, whatever its width; None if it stores something else."""
    sorts = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next((sort for sort in sorts if jnp.issubdtype(dtype, sort)), None)


def _is_complex(entry: Entry) -> bool:
    # Not `jnp.dtype(name)`, which refuses structured dtypes. NumPy's name of a foreign byte order is ">c8".
    return entry.dtype.lstrip("<>").startswith("c")
