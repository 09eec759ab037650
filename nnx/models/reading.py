"""Reading parameters from the tensors of a checkpoint: only the rows that are needed, rearranged as they are copied.

A `Piece` is the place of one parameter in a tensor. A `Reader` assembles a parameter (or the *part* of it that one
device holds) from its piece, or from one piece per layer if it is stacked. A tensor is read once even if several devices
hold different columns of it, and only one is in memory at a time.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from nnx.interop.safetensors_file import THREADS, TensorFile, aligned_empty
from nnx.models.tables import Layout, Shape

Bounds = tuple[tuple[int, int], ...]

# The number of rows of a tensor that are transposed at once: each row of the result then gets about one cache line at a
# time. NumPy's own transposed copy fills the result row by row, and misses the cache with every entry it reads.
_ROWS = 16
_SMALL = 2**20  # bytes; below this, threads cost more than they save


class Piece(NamedTuple):
    """The place of a parameter in a tensor.

    Attributes:
        file: the file of the tensor.
        name: the name of the tensor.
        layout: the arrangement of its axes.
        shape: the shape of the parameter.
        offset: the position at which a fused parameter begins, along the tensor's output axis.
    """

    file: TensorFile
    name: str
    layout: Layout
    shape: Shape
    offset: int


class Reader:
    """Reads parameters. It keeps the rows it read last, because the next device may need other columns of them."""

    def __init__(self) -> None:
        self._rows_at: Any = None
        self._rows = np.empty(0)

    def place(self, pieces: Sequence[Piece], target: jax.ShapeDtypeStruct, stacked: bool) -> jax.Array:
        """Returns a parameter on its devices.

        Args:
            pieces: the place of the parameter; if it is stacked, that of each layer.
            target: the shape and dtype of the parameter, and its sharding, if any.
            stacked: whether the first axis of the parameter numbers the pieces.
        """
        shape, sharding = target.shape, target.sharding
        try:
            if sharding is None:
                part = self.read(pieces, _bounds((slice(None),) * len(shape), shape), target.dtype, stacked)
                return jax.device_put(part).block_until_ready()
            indices = sharding.addressable_devices_indices_map(shape)
            devices = sorted(indices.items(), key=lambda item: (_bounds(item[1], shape), item[0].id))
            arrays: list[jax.Array] = []
            part, part_at = np.empty(0), None
            for device, index in devices:  # sorted, so that copies of the same part are adjacent
                if _bounds(index, shape) != part_at:
                    del part  # frees its memory before the next one is made
                    part_at = _bounds(index, shape)
                    part = self.read(pieces, part_at, target.dtype, stacked)
                arrays.append(jax.device_put(part, device))
            array = jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=target.dtype)
            # JAX copies in the background. Without waiting, the host copies of many arrays would be in memory at once.
            return array.block_until_ready()
        finally:
            self._forget()

    def read(self, pieces: Sequence[Piece], bounds: Bounds, dtype: Any, stacked: bool) -> np.ndarray:
        """Returns the part of a parameter within `bounds`, one range per axis."""
        if not stacked:
            return self._read(pieces[0], bounds, dtype, None)
        (first, last), inner = bounds[0], bounds[1:]
        part = aligned_empty((last - first, *_sizes(inner)), dtype)
        for i in range(first, last):
            self._read(pieces[i], inner, dtype, part[i - first])
        return part

    def _read(self, piece: Piece, bounds: Bounds, dtype: Any, into: np.ndarray | None) -> np.ndarray:
        view = self._view(piece, bounds)
        if into is None:
            if view.dtype == dtype and view.flags.c_contiguous:
                self._forget()  # the caller keeps these rows, and no other device needs them
                return view
            into = aligned_empty(view.shape, dtype)
        if piece.layout.transposed:
            inputs = math.prod(view.shape[: piece.layout.inputs])
            _copy_transposed(into.reshape(inputs, -1), view.reshape(inputs, -1))
        else:
            np.copyto(into, view, casting="unsafe")
        return into

    def _view(self, piece: Piece, bounds: Bounds) -> np.ndarray:
        """Reads the rows of a tensor that hold a part of a parameter, and returns the part as a view of them."""
        layout, shape = piece.layout, piece.shape
        inputs = len(shape) if layout.inputs is None else layout.inputs
        # The rows of a tensor are numbered by the outputs if it is transposed, and by the inputs otherwise (a parameter
        # that is not a matrix has only inputs). Only the first of these axes narrows the range of rows.
        axis = inputs if layout.transposed else 0
        others = shape[inputs + 1 :] if layout.transposed else shape[1:inputs]
        start, stop = bounds[axis]
        step = math.prod(others) if layout.flat or layout.inputs is not None else 1
        first = piece.offset if layout.output_axis == 0 else 0
        rows = self._read_rows(piece, first + start * step, first + stop * step)
        if layout.output_axis == 1:
            rows = rows[:, piece.offset : piece.offset + math.prod(shape[inputs:])]
        if layout.transposed:
            rows = rows.reshape(stop - start, *others, *shape[:inputs])
            outputs = rows.ndim - inputs
            rows = rows.transpose(*range(outputs, rows.ndim), *range(outputs))
        else:
            rows = rows.reshape(stop - start, *others, *shape[inputs:])
        cut = [slice(*bound) for bound in bounds]
        cut[axis] = slice(None)
        return rows[tuple(cut)]

    def _read_rows(self, piece: Piece, start: int, stop: int) -> np.ndarray:
        at = (id(piece.file), piece.name, start, stop)
        if at != self._rows_at:
            self._forget()  # frees their memory before more is read
            self._rows, self._rows_at = piece.file.read(piece.name, start, stop), at
        return self._rows

    def _forget(self) -> None:
        self._rows, self._rows_at = np.empty(0), None


def _copy_transposed(into: np.ndarray, view: np.ndarray) -> None:
    """Copies a matrix whose columns are contiguous into one whose rows are."""
    if view.dtype == into.dtype and into.itemsize in (1, 2, 4, 8):
        # NumPy copies its own dtypes faster than bfloat16, which another package defines.
        plain = np.dtype(f"u{into.itemsize}")
        into, view = into.view(plain), view.view(plain)
    columns = into.shape[1]

    def copy(block: range) -> None:
        for i in block:
            np.copyto(into[:, i : i + _ROWS], view[:, i : i + _ROWS], casting="unsafe")

    if into.nbytes < _SMALL or THREADS == 1:
        return copy(range(0, columns, _ROWS))
    share = -(-columns // (4 * THREADS * _ROWS)) * _ROWS
    blocks = [range(i, min(i + share, columns), _ROWS) for i in range(0, columns, share)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(copy, blocks))


def _bounds(index: Any, shape: Shape) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _sizes(bounds: Bounds) -> Shape:
    return tuple(stop - start for start, stop in bounds)
