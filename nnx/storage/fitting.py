"""Fitting: whether a loaded value can replace another one, and how it is converted to do so."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

LOSES_IMAGINARY_PART = ", whose imaginary part would be lost (if that is meant, load its `.real`),"


class Described(Protocol):
    """What `fits` compares: the kind ("array", "key", "number" or "text"), dtype and shape of a value."""

    @property
    def kind(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Description(NamedTuple):
    """The description of a value in memory; `dtype` is the name of a dtype, or of the Python type of a number."""

    kind: str
    dtype: str
    shape: tuple[int, ...] = ()


def describe_value(value: Any) -> Description | None:
    """Returns the description of an array, a typed key or a Python number; None for anything else."""
    if isinstance(value, (bool, int, float, complex)) and not isinstance(value, np.generic):
        return Description("number", type(value).__name__)
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return None
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return Description("key" if is_key else "array", str(value.dtype), tuple(value.shape))


def fits(have: Described, want: Described, cast: bool) -> bool:
    """Whether a loaded value can replace another one; with `cast`, dtypes may differ.

    A complex value never replaces a real one, not even with `cast`: its imaginary part would be lost.
    """
    kinds = have.kind, want.kind
    if have.shape != want.shape or loses_imaginary_part(have, want):
        return False
    if "text" in kinds or "key" in kinds:
        return kinds[0] == kinds[1] and have.dtype == want.dtype
    if "number" in kinds:  # a Python number, or the scalar array that a compiled step made from it
        return cast or sort_of_number(have.dtype) == sort_of_number(want.dtype)
    return cast or have.dtype == want.dtype


def was_narrower(have: Described, want: Described, type_name: str) -> bool:
    """Whether earlier versions stored a value of this Variable type in a narrower dtype, which loading widens exactly.

    They are the scales of quantized float16 weights, which had their weight's dtype.
    """
    return type_name == "QuantizedParam" and (have.dtype, want.dtype) == ("float16", "float32")


def loses_imaginary_part(have: Described, want: Described) -> bool:
    """Whether a complex value would replace a real one."""
    numbers = {"array", "number"}
    return {have.kind, want.kind} <= numbers and _is_complex(have) and not _is_complex(want)


def described_misfit(text: str, have: Described, want: Described) -> str:
    """Returns the text of a value that does not fit, with the reason where `cast=True` would not help."""
    return text + LOSES_IMAGINARY_PART if loses_imaginary_part(have, want) else text


def sort_of_number(dtype: Any) -> Any:
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
