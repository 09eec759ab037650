"""Fitting: whether a loaded value can replace another one, and how it is converted to do so.

The rules of every way to load are here: checkpoints, safetensors, mappings, state dicts of PyTorch, published models.
"""

from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

LOSES_IMAGINARY_PART = ", whose imaginary part would be lost (if that is meant, load its `.real`),"
NEEDS_X64 = ", which JAX can hold only with jax_enable_x64 (or cast=True),"

Dtypes = Literal["same", "sort", "any"]
"""Which dtypes fit: the same one; any that stores the same sort of number in 16 bits or more; or any (`cast=True`)."""


class Described(Protocol):
    """What `misfit` compares: the kind ("array", "key", "number" or "text"), dtype, shape and number of a value."""

    @property
    def kind(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def value(self) -> Any: ...


class Description(NamedTuple):
    """The description of a value in memory or in a file.

    Attributes:
        kind: "array", "key" or "number".
        dtype: the name of the dtype, or of the Python type of a number.
        shape: the shape.
        value: the number.
        on_host: whether a target keeps the value as it is, in NumPy, rather than in an array of JAX.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...] = ()
    value: Any = None
    on_host: bool = False

    def __str__(self) -> str:
        if self.kind == "number":
            return f"the number {self.value!r}"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def describe_value(value: Any) -> Description | None:
    """Returns the description of an array, a typed key or a Python number; None for anything else."""
    if isinstance(value, (bool, int, float, complex)) and not isinstance(value, np.generic):
        return Description("number", type(value).__name__, value=value)
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return None
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    on_host = isinstance(value, (np.ndarray, np.generic))
    return Description("key" if is_key else "array", str(value.dtype), tuple(value.shape), on_host=on_host)


def misfit(
    have: Described, want: Described, dtypes: Dtypes, *, on_host: bool = True, type_name: str = ""
) -> str | None:
    """Returns why a loaded value cannot replace another one, or None if it can.

    Args:
        have: the loaded value.
        want: the value that it would replace.
        dtypes: which dtypes fit. A complex value never replaces a real one: its imaginary part would be lost.
        on_host: whether the target keeps 64-bit values although JAX may have no such types.
        type_name: the type of the Variable that holds the value.

    Returns:
        A text to put after that of the loaded value. It is empty if the two values explain themselves.
    """
    if type_name == "QuantizedParam" and (have.dtype, want.dtype) == ("float16", "float32"):
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


def _kinds_fit(have: Described, want: Described, dtypes: Dtypes) -> bool:
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


def _loses_imaginary_part(have: Described, want: Described) -> bool:
    return {have.kind, want.kind} <= {"array", "number"} and _is_complex(have) and not _is_complex(want)


def _in_range(have: Described, want: Described) -> bool:
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


def _is_complex(described: Described) -> bool:
    # Not `jnp.dtype(name)`, which refuses structured dtypes. NumPy's name of a foreign byte order is ">c8".
    return described.dtype.lstrip("<>").startswith("c")


def bound_sharding(old: Any) -> Any:
    """Returns the sharding that the replacement of a value must have; None if JAX may choose."""
    is_bound = isinstance(old, jax.ShapeDtypeStruct) or (isinstance(old, jax.Array) and old.committed)
    return old.sharding if is_bound else None


def converted(new: Any, old: Any) -> Any:
    """Converts a value that fits to what replaces `old`: with its dtype, its devices and its kind of array.

    NumPy arrays are copied, so that later changes to them do not reach the Module.
    """
    if isinstance(new, jax.core.Tracer) or isinstance(old, jax.core.Tracer):
        return new if getattr(new, "dtype", None) == old.dtype else jnp.asarray(new, old.dtype)
    if isinstance(old, np.generic):
        return np.asarray(new, old.dtype)[()]
    if isinstance(old, np.ndarray):
        return np.array(new, old.dtype)
    if not hasattr(old, "dtype"):  # a Python number
        return new if isinstance(new, jax.Array) else type(old)(new)
    if not isinstance(new, jax.Array):
        new = np.array(new, old.dtype)
    elif new.dtype != old.dtype:
        new = new.astype(old.dtype)
    sharding = bound_sharding(old)
    return jnp.asarray(new) if sharding is None else jax.device_put(new, sharding)
