"""What a target expects at a path, so that the old value itself need not be kept.

That is the kind of value (a NumPy array, a Python number, a `jax.Array` with its sharding), from which follows which
boxes of the saved array this process has to read.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx.storage.checkpoints.boxes import Box, box_of
from nnx.storage.entry import IN_MANIFEST, Entry
from nnx.storage.fitting import bound_sharding

_TINY = 1 << 14  # bytes


@dataclasses.dataclass(frozen=True)
class Expected:
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
        weak = bool(getattr(old, "weak_type", False))
        return cls("jax", dtype, shape, bound_sharding(old), weak, isinstance(old, jax.ShapeDtypeStruct))

    def boxes(self, entry: Entry) -> list[Box]:
        """Returns the boxes of a saved array that this process reads: those of its devices, each once."""
        shape = entry.data_shape
        whole = [Box((0,) * len(shape), shape)]
        if not self._is_sharded(entry):
            return whole
        indices = self.sharding.addressable_devices_indices_map(shape).values()
        return list(dict.fromkeys(box_of(index, shape) for index in indices if index is not None))

    def _is_sharded(self, entry: Entry) -> bool:
        """Whether each device gets its own part, instead of a whole value made on the host."""
        if self.kind != "jax" or self.sharding is None or entry.weak:
            return False
        return entry.kind == "array" or isinstance(self.sharding, jax.sharding.NamedSharding)

    def value(self, entry: Entry, parts: Sequence[np.ndarray] | None) -> Any:
        """Returns the new value.

        Args:
            entry: the entry of the saved value.
            parts: the data of `boxes`; None if the entry has no data.
        """
        if entry.kind in IN_MANIFEST:
            return entry.plain_value
        if entry.kind == "number":
            value = entry.plain_value
            if self.kind == "number" or self.weak:
                return value if self.number is None else self.number(value)
            return self._put(np.asarray(value, self.dtype))
        if parts is None:  # an array without elements
            shape = entry.data_shape
            parts = [np.zeros(box.shape, entry.data_dtype) for box in self.boxes(entry)]
            if not parts:
                parts = [np.zeros(shape, entry.data_dtype)]
        if entry.kind == "array" and self.dtype is not None and entry.data_dtype != self.dtype:
            parts = [part.astype(self.dtype) for part in parts]
        if self._is_sharded(entry):
            data = self._assemble(entry, parts)
            return data if entry.kind == "array" else jax.random.wrap_key_data(data, impl=entry.impl)
        if entry.kind == "key":
            return self._put(jax.random.wrap_key_data(jnp.asarray(parts[0]), impl=entry.impl))
        if entry.weak and self.kind in ("number", "jax"):
            weak = jnp.asarray(parts[0].item())
            if self.kind == "number" or weak.dtype == parts[0].dtype:
                return self._put(weak)
        return jnp.asarray(parts[0]) if self.kind == "number" else self._put(parts[0])

    def _assemble(self, entry: Entry, parts: Sequence[np.ndarray]) -> Any:
        shape = entry.data_shape
        by_box: Mapping[Box, np.ndarray] = dict(zip(self.boxes(entry), parts, strict=True))
        dtype = parts[0].dtype if parts else (self.dtype if entry.kind == "array" else np.dtype(np.uint32))

        def part(index: Any) -> np.ndarray:
            return by_box[box_of(index, shape)]

        return jax.make_array_from_callback(shape, self.sharding, part, dtype=dtype)

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
