"""What a target expects at a path, and how a loaded value becomes that, whatever it was loaded from.

An `Expected` describes the old value, which need not be kept: a NumPy array, a Python number, a `jax.Array` with its
sharding. From it follows which boxes of the stored array this process has to read.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from nnx.storage.entry import IN_MANIFEST, Entry
from nnx.storage.placing import Box, parts_of, place_parts

_TINY = 1 << 14  # bytes


class Expected(NamedTuple):
    """The description of one value in the target.

    Attributes:
        kind: "number" (a Python number or string), "scalar" (a NumPy scalar), "numpy" or "jax".
        dtype: the dtype of an array.
        shape: the shape of an array.
        sharding: the sharding of an array that is committed to its devices, or None.
        weak: whether it is a scalar of weak type.
        abstract: whether there is no value yet.
        number: the type of a Python number.
    """

    kind: str
    dtype: Any = None
    shape: tuple[int, ...] = ()
    sharding: Any = None
    weak: bool = False
    abstract: bool = False
    number: type | None = None

    @classmethod
    def of(cls, old: Any) -> "Expected":
        """Returns the description of a value."""
        if not hasattr(old, "shape"):
            return cls("number", number=type(old) if type(old) in (bool, int, float, complex) else None)
        shape, dtype = tuple(old.shape), old.dtype
        if isinstance(old, (np.ndarray, np.generic)):
            return cls("scalar" if isinstance(old, np.generic) else "numpy", dtype, shape)
        abstract = isinstance(old, jax.ShapeDtypeStruct)
        is_bound = abstract or (isinstance(old, jax.Array) and not isinstance(old, jax.core.Tracer) and old.committed)
        weak = shape == () and bool(getattr(old, "weak_type", False))
        return cls("jax", dtype, shape, old.sharding if is_bound else None, weak, abstract)

    @property
    def on_host(self) -> bool:
        """Whether a value is kept as it is, although JAX may have no such dtype."""
        return self.kind != "jax"

    def boxes(self, entry: Entry) -> list[Box]:
        """Returns the boxes of a stored array that this process reads: those of its devices, each once."""
        shape = entry.data_shape
        if not self._is_split(entry):
            return [Box.whole(shape)]
        return list(dict.fromkeys(box for box, _ in parts_of(shape, self.sharding)))

    def _is_split(self, entry: Entry) -> bool:
        """Whether each device gets its own part, instead of a whole value made on the host."""
        if self.sharding is None or isinstance(self.sharding, jax.sharding.SingleDeviceSharding) or entry.weak:
            return False
        return entry.kind == "array" or isinstance(self.sharding, jax.sharding.NamedSharding)

    def value(self, entry: Entry, read: Callable[[Box], np.ndarray]) -> Any:
        """Returns the new value.

        Args:
            entry: the description of the loaded value.
            read: a function that returns the data within one of the `boxes`; it is not called if there are none.
        """
        if entry.kind in IN_MANIFEST:
            return entry.plain_value
        if entry.kind == "number":
            value = entry.plain_value
            if self.kind == "number" or self.weak:
                return value if self.number is None else self.number(value)
            return self._put(np.asarray(value, self.dtype))
        if not entry.has_data:
            return self._array(entry, lambda box: np.zeros(box.shape, entry.data_dtype))
        return self._array(entry, read)

    def _array(self, entry: Entry, read: Callable[[Box], np.ndarray]) -> Any:
        shape, dtype = entry.data_shape, entry.data_dtype
        if entry.kind == "array" and self.dtype is not None:
            dtype = self.dtype

        def part(box: Box) -> np.ndarray:
            return read(box).astype(dtype, copy=False)

        if self._is_split(entry):
            data = place_parts(shape, self.sharding, jax.dtypes.canonicalize_dtype(dtype), part)
            return data if entry.kind == "array" else jax.random.wrap_key_data(data, impl=entry.impl)
        array = part(Box.whole(shape))
        if entry.kind == "key":
            return self._put(jax.random.wrap_key_data(jnp.asarray(array), impl=entry.impl))
        if entry.weak and self.kind in ("number", "jax"):
            weak = jnp.asarray(array.item())
            if self.kind == "number" or weak.dtype == array.dtype:
                return self._put(weak)
        return jnp.asarray(array) if self.kind == "number" else self._put(array)

    def _put(self, array: Any) -> Any:
        if self.kind == "scalar":
            return np.asarray(array)[()]
        if self.kind == "numpy":
            return np.asarray(array)
        if self.sharding is not None:
            return jax.device_put(array, self.sharding)
        # An uncommitted array goes where JAX would put it. On a CPU, `device_put` uses aligned memory without a copy,
        # and `asarray` copies, but takes half as long for an array that is hardly there.
        return jnp.asarray(array) if array.nbytes < _TINY else jax.device_put(array)


def converted(new: Any, old: Any) -> Any:
    """Converts a value in memory that fits to what replaces `old`: its dtype, its devices and its kind of array.

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
    sharding = Expected.of(old).sharding
    return jnp.asarray(new) if sharding is None else jax.device_put(new, sharding)
