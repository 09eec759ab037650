"""Reading parameters from the tensors of a checkpoint: only the rows that are needed, rearranged as they are copied.

A `Piece` is the place of one parameter in a tensor. A `Reader` assembles a parameter (or the *part* of it that one
device holds) from its piece, or from one piece per layer, per expert, or both if it is stacked. Most parameters are the
transpose of their tensor: it is *streamed*, a few rows at a time, and never in memory as a whole. If devices hold
different columns of the tensor's rows, these rows are read once and kept until all devices have theirs.
"""

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nnx.models.files.mxfp4 import BLOCK, PackedFile, unpacked
from nnx.models.files.quantized_files import AnyFile
from nnx.models.files.tables import Layout, Shape
from nnx.storage.aligned_memory import aligned_zeros, populate
from nnx.storage.safetensors.file import THREADS

Bounds = tuple[tuple[int, int], ...]

# The rows and columns of a tile, the part of a matrix that is transposed at once: half a megabyte of bfloat16, which
# stays in the cache of a core.
_TILE = (128, 2048)
# The bytes that a thread reads at once, again and again into the same memory: few enough to stay in the cache of a
# core, and to divide even a small matrix among the threads.
_SCRATCH = 2**20


class Piece(NamedTuple):
    """The place of a parameter in a tensor.

    Attributes:
        file: the file of the tensor.
        name: the name of the tensor.
        layout: the arrangement of its axes.
        shape: the shape of the parameter.
        offset: the position at which a fused parameter begins, along the tensor's output axis; if the parameters take
            turns along it, the number of this one.
    """

    file: AnyFile
    name: str
    layout: Layout
    shape: Shape
    offset: int


class Reader:
    """Reads parameters; a context manager.

    It keeps the rows it read last, because the next device may need other columns of them.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS)
        self._local = threading.local()
        self._rows_at: Any = None
        self._rows = np.empty(0)

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *error: Any) -> None:
        self._pool.shutdown()

    def place(self, pieces: Sequence[Piece], target: jax.ShapeDtypeStruct, stack: Shape) -> jax.Array:
        """Returns a parameter on its devices.

        Args:
            pieces: the place of the parameter; if it is stacked, that of each entry of the stack, in order.
            target: the shape and dtype of the parameter, and its sharding, if any.
            stack: the sizes of the leading axes of the parameter that number the pieces.
        """
        shape, sharding = target.shape, target.sharding
        try:
            if sharding is None:
                part = self.read(pieces, _whole(shape), target.dtype, stack)
                return jax.device_put(part).block_until_ready()
            indices = sharding.addressable_devices_indices_map(shape)
            devices = sorted(indices.items(), key=lambda item: (_bounds(item[1], shape), item[0].id))
            arrays: list[jax.Array] = []
            part, part_at = np.empty(0), None
            for device, index in devices:  # sorted, so that copies of the same part are adjacent
                if _bounds(index, shape) != part_at:
                    del part  # frees its memory before the next one is made
                    part_at = _bounds(index, shape)
                    part = self.read(pieces, part_at, target.dtype, stack)
                arrays.append(jax.device_put(part, device))
            array = jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=target.dtype)
            # JAX copies in the background. Without waiting, the host copies of many arrays would be in memory at once.
            return array.block_until_ready()
        finally:
            self._forget()

    def read(self, pieces: Sequence[Piece], bounds: Bounds, dtype: Any, stack: Shape) -> np.ndarray:
        """Returns the part of a parameter within `bounds`, one range per axis."""
        if not stack:
            return self._read(pieces[0], bounds, dtype, None)
        outer, inner = bounds[: len(stack)], bounds[len(stack) :]
        part = self._fresh(_sizes(bounds), dtype)
        for index in np.ndindex(*_sizes(outer)):
            number = np.ravel_multi_index([i + start for i, (start, _) in zip(index, outer, strict=True)], stack)
            self._read(pieces[int(number)], inner, dtype, part[(*index, ...)])  # `...`: an array even of a scalar
        return part

    def _read(self, piece: Piece, bounds: Bounds, dtype: Any, into: np.ndarray | None) -> np.ndarray:
        inputs, whole = piece.layout.inputs or 0, _whole(piece.shape)
        others = (*range(1, inputs), *range(inputs + 1, len(bounds)))
        if isinstance(piece.file, PackedFile) and piece.file.is_packed(piece.name):
            into = self._fresh(_sizes(bounds), dtype) if into is None else into
            self._read_packed(piece.file, piece, bounds, into)
            return into
        if piece.layout.transposed and all(bounds[axis] == whole[axis] for axis in others):
            if into is None:
                into = self._fresh(_sizes(bounds), dtype)
            self._read_transposed(piece, bounds, into)
            return into
        view = self._view(piece, bounds)
        if into is None:
            if view.dtype == dtype and view.flags.c_contiguous:
                self._forget()  # the caller keeps these rows, and no other device needs them
                return view
            into = self._fresh(view.shape, dtype)
        _convert(view, into)
        return into

    def _read_transposed(self, piece: Piece, bounds: Bounds, into: np.ndarray) -> None:
        """Reads a rectangle of a transposed tensor, a few rows at a time, each into a column of the parameter."""
        inputs = piece.layout.inputs or 0
        output_step, input_step = math.prod(piece.shape[inputs + 1 :]), math.prod(piece.shape[1:inputs])
        first, last = (piece.offset + n * output_step for n in bounds[inputs])
        width = piece.shape[0] * input_step
        low, high = (n * input_step for n in bounds[0])
        columns = into.reshape(high - low, last - first)
        tile = width * piece.file.tensors[piece.name].dtype.itemsize * _TILE[0]
        # Parts of a chunk with a checksum are read with the rest of it, so there should be few of them.
        scratch = 2 * piece.file.chunk if piece.file.has_checksums else _SCRATCH
        # Whole tiles, so that no cache line of the result is written by two threads.
        count = max(1, scratch // tile) * _TILE[0]
        # The next device needs other columns of the same rows.
        kept = None if (low, high) == (0, width) else self._read_rows(piece, first, last)

        def copy(start: int) -> None:
            stop = min(start + count, last)
            rows = self._scratch_rows(piece, start, stop) if kept is None else kept[start - first : stop - first]
            _transpose(rows[:, low:high], columns[:, start - first : stop - first])

        list(self._pool.map(copy, range(first, last, count)))

    def _read_packed(self, file: PackedFile, piece: Piece, bounds: Bounds, into: np.ndarray) -> None:
        """Decodes a part of a packed stack of matrices, a few outputs at a time, each into a column of its matrix."""
        (first, last), (low, high), outputs = bounds
        blocks = slice(low // BLOCK, -(-high // BLOCK))
        inputs = slice(low % BLOCK, low % BLOCK + high - low)
        step = piece.layout.interleaved or 1

        def decode(number: int) -> None:
            of_outputs = (part[piece.offset :: step] for part in file.packed(piece.name, number))
            packed, scales = (part[slice(*outputs), blocks] for part in of_outputs)
            for start in range(0, len(packed), _TILE[0]):
                rows = unpacked(packed[start : start + _TILE[0]], scales[start : start + _TILE[0]])
                _transpose(rows[:, inputs], into[number - first][:, start : start + len(rows)])

        list(self._pool.map(decode, range(first, last)))

    def _scratch_rows(self, piece: Piece, start: int, stop: int) -> np.ndarray:
        """Reads rows of a tensor into memory that this thread uses again for the next ones."""
        tensor = piece.file.tensors[piece.name]
        size = (stop - start) * tensor.nbytes // tensor.shape[0]
        if not hasattr(self._local, "scratch") or len(self._local.scratch) < size:
            self._local.scratch = np.empty(size, np.uint8)
        return piece.file.read(piece.name, start, stop, into=self._local.scratch)

    def _view(self, piece: Piece, bounds: Bounds) -> np.ndarray:
        """Reads the rows of a tensor that hold a part of a parameter, and returns the part as a view of them."""
        layout, shape = piece.layout, piece.shape
        if layout.order is not None or layout.leading or not shape:
            return self._small_view(piece, bounds)
        inputs = len(shape) if layout.inputs is None else layout.inputs
        # The rows of a tensor are numbered by the outputs if it is transposed, and by the inputs otherwise (a parameter
        # that is not a matrix has only inputs). Only the first of these axes narrows the range of rows.
        axis = inputs if layout.transposed else 0
        others = shape[inputs + 1 :] if layout.transposed else shape[1:inputs]
        start, stop = bounds[axis]
        step = math.prod(others) if layout.flat or layout.inputs is not None else 1
        first = piece.offset if layout.output_axis == 0 else 0
        rows = self._read_rows(piece, first + start * step, first + stop * step)
        if layout.interleaved:
            rows = rows[..., piece.offset :: layout.interleaved]
        elif layout.output_axis == 1:
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

    def _small_view(self, piece: Piece, bounds: Bounds) -> np.ndarray:
        """Reads a whole tensor of a kind that is never large (a convolution, a scalar), and returns a part of it."""
        whole = self._read_rows(piece, 0, None)
        order = piece.layout.order
        whole = whole.reshape(piece.shape) if order is None else whole.transpose(np.argsort(order))
        return whole[(..., *(slice(*bound) for bound in bounds))]

    def _fresh(self, shape: Shape, dtype: Any) -> np.ndarray:
        """Returns new memory for an array, provided by all threads together."""
        array = aligned_zeros(shape, dtype)
        list(self._pool.map(populate, np.array_split(array.reshape(-1), THREADS)))
        return array

    def _read_rows(self, piece: Piece, start: int, stop: int | None) -> np.ndarray:
        at = (id(piece.file), piece.name, start, stop)
        if at != self._rows_at:
            self._forget()  # frees their memory before more is read
            self._rows, self._rows_at = piece.file.read(piece.name, start, stop), at
        return self._rows

    def _forget(self) -> None:
        self._rows, self._rows_at = np.empty(0), None


def _transpose(rows: np.ndarray, into: np.ndarray) -> None:
    """Writes the rows of a matrix into the columns of another one, converting them to its dtype.

    NumPy's own transposed copy is several times slower: it reads column by column, and if the length of a row is a
    power of two, all entries of a column fall into the same few cache lines. So each tile is first copied row by row
    into a buffer whose rows are a cache line longer.
    """
    height, width = _TILE
    buffer = np.empty((height, width + 64 // into.itemsize), into.dtype)
    # NumPy copies its own dtypes faster than bfloat16, which another package defines.
    plain = np.dtype(f"u{into.itemsize}")
    for i in range(0, len(rows), height):
        for j in range(0, rows.shape[1], width):
            part = rows[i : i + height, j : j + width]
            tile = buffer[: part.shape[0], : part.shape[1]]
            _convert(part, tile)
            np.copyto(into.view(plain)[j : j + part.shape[1], i : i + part.shape[0]], tile.view(plain).T)


def _convert(source: np.ndarray, into: np.ndarray) -> None:
    if source.dtype == into.dtype:
        plain = np.dtype(f"u{into.itemsize}")
        np.copyto(into.view(plain), source.view(plain))
    elif source.dtype == jnp.bfloat16 and into.dtype == np.float32:
        # A bfloat16 is the upper half of a float32; shifting is ten times as fast as converting.
        np.left_shift(source.view(np.uint16), 16, out=into.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(into, source, casting="unsafe")


def _bounds(index: Any, shape: Shape) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _whole(shape: Shape) -> Bounds:
    return tuple((0, size) for size in shape)


def _sizes(bounds: Bounds) -> Shape:
    return tuple(stop - start for start, stop in bounds)
