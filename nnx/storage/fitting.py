"""Fitting: whether a loaded value can replace another one.

The rules of every way to load are here: checkpoints, safetensors, mappings, state dicts of PyTorch, published models.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from nnx.storage.entry import Entry

LOSES_IMAGINARY_PART = ", whose imaginary part would be lost (if that is meant, load its `.real`),"
NEEDS_X64 = ", which JAX can hold only with jax_enable_x64 (or cast=True),"

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
