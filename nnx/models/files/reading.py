"""Reading parameters from the tensors of a checkpoint: only the rows that are needed, rearranged as they are copied.

A `Region` says where one parameter is in a tensor. A `Reader` assembles a parameter, or the *part* of it that one
device holds: from its region, or from one region per layer, per expert, or both if it is stacked. Most parameters
are the transpose of their tensor. These are *streamed*, a few rows at a time, and never in memory as a whole. If
devices hold different columns of the tensor's rows, these rows are read once and kept until all devices have theirs.
"""

import functools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nnx.models.files.layouts import Shape, TensorLayout
from nnx.models.files.mxfp4 import BLOCK, PackedFile, unpacked
from nnx.models.files.quantized_files import AnyFile
from nnx.storage.aligned_memory import aligned_zeros, populate
from nnx.storage.placing import Box, place_parts
from nnx.storage.safetensors.file import THREADS
from nnx.storage.transfer_bar import moved

# The rows and columns of a tile, the part of a matrix that is transposed at once: half a megabyte of bfloat16, which
# stays in the cache of a core.
_TILE = (128, 2048)
# The bytes that a thread reads at once, again and again into the same memory: few enough to stay in the cache of a
# core, and to divide even a small matrix among the threads.
_SCRATCH = 2**20


class Region(NamedTuple):
    """Where a parameter is: in a tensor of an open file.

    Attributes:
        file: the file of the tensor.
        name: the name of the tensor.
        layout: the arrangement of its axes.
        shape: the shape of the parameter.
        offset: the position at which a fused parameter begins, along the tensor's output axis (or in a group); if the
            parameters take turns along it, the number of this one.
        groups: the number of groups in which fused heads take turns; 0 if they do not.
        stride: the number of rows of such a group.
    """

    file: AnyFile
    name: str
    layout: TensorLayout
    shape: Shape
    offset: int
    groups: int = 0
    stride: int = 0


class ReadRequest(NamedTuple):
    """A parameter to be read.

    Attributes:
        regions: the region of the parameter; if it is stacked, those of the stack's entries, in order.
        target: the shape and dtype of the parameter, and its sharding, if any.
        stack: the sizes of the leading axes of the parameter that number the regions.
    """

    regions: Sequence[Region]
    target: jax.ShapeDtypeStruct
    stack: Shape


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

    def place(self, request: ReadRequest) -> jax.Array:
        """Returns a parameter on its devices."""
        regions, target, stack = request
        try:
            if target.sharding is None:
                part = self.read(regions, Box.whole(target.shape), target.dtype, stack)
                return jax.device_put(part).block_until_ready()
            read = functools.partial(self.read, regions, dtype=target.dtype, stack=stack)
            # Waiting, because the host's copies of many arrays would be in memory at once.
            return place_parts(target.shape, target.sharding, target.dtype, read).block_until_ready()
        finally:
            self._forget()
            moved(math.prod(target.shape) * target.dtype.itemsize)

    def read(self, regions: Sequence[Region], box: Box, dtype: Any, stack: Shape) -> np.ndarray:
        """Returns the part of a parameter within a box."""
        if not stack:
            return self._read(regions[0], box, dtype, None)
        outer, inner = box.axes(0, len(stack)), box.axes(len(stack))
        part = self._fresh(box.shape, dtype)
        for index in np.ndindex(*outer.shape):
            number = np.ravel_multi_index([i + start for i, start in zip(index, outer.start, strict=True)], stack)
            self._read(regions[int(number)], inner, dtype, part[(*index, ...)])  # `...`: an array even of a scalar
        return part

    def _read(self, region: Region, box: Box, dtype: Any, into: np.ndarray | None) -> np.ndarray:
        inputs = region.layout.inputs or 0
        # A part that is cut only along the first input and the first output axis is a rectangle of its tensor.
        others = (*range(1, inputs), *range(inputs + 1, len(box.shape)))
        if isinstance(region.file, PackedFile) and region.file.is_packed(region.name):
            into = self._fresh(box.shape, dtype) if into is None else into
            self._read_packed(region.file, region, box, into)
            return into
        if (
            region.layout.transposed
            and not region.groups
            and all(box.shape[axis] == region.shape[axis] for axis in others)
        ):
            if into is None:
                into = self._fresh(box.shape, dtype)
            self._read_transposed(region, box, into)
            return into
        view = view_of(region, box, self._read_rows)
        if into is None:
            if view.dtype == dtype and view.flags.c_contiguous:
                self._forget()  # the caller keeps these rows, and no other device needs them
                return view
            into = self._fresh(view.shape, dtype)
        _convert(view, into)
        return into

    def _read_transposed(self, region: Region, box: Box, into: np.ndarray) -> None:
        """Reads a rectangle of a transposed tensor, a few rows at a time, each into a column of the parameter."""
        inputs = region.layout.inputs or 0
        output_step, input_step = math.prod(region.shape[inputs + 1 :]), math.prod(region.shape[1:inputs])
        first, last = (region.offset + n * output_step for n in (box.start[inputs], box.end[inputs]))
        width = region.shape[0] * input_step
        low, high = box.start[0] * input_step, box.end[0] * input_step
        columns = into.reshape(high - low, last - first)
        tile = width * region.file.tensors[region.name].dtype.itemsize * _TILE[0]
        # Parts of a chunk with a checksum are read with the rest of it, so there should be few of them.
        scratch = 2 * region.file.chunk if region.file.has_checksums else _SCRATCH
        # Whole tiles, so that no cache line of the result is written by two threads.
        count = max(1, scratch // tile) * _TILE[0]
        # The next device needs other columns of the same rows.
        kept = None if (low, high) == (0, width) else self._read_rows(region, first, last)

        def copy(start: int) -> None:
            stop = min(start + count, last)
            rows = self._scratch_rows(region, start, stop) if kept is None else kept[start - first : stop - first]
            _transpose(rows[:, low:high], columns[:, start - first : stop - first])

        list(self._pool.map(copy, range(first, last, count)))

    def _read_packed(self, file: PackedFile, region: Region, box: Box, into: np.ndarray) -> None:
        """Decodes a part of a packed stack of matrices, a few outputs at a time, each into a column of its matrix."""
        (first, low, left), (last, high, right) = box.start, box.end
        blocks = slice(low // BLOCK, -(-high // BLOCK))
        inputs = slice(low % BLOCK, low % BLOCK + high - low)
        step = region.layout.interleaved or 1

        def decode(number: int) -> None:
            of_outputs = (part[region.offset :: step] for part in file.packed(region.name, number))
            packed, scales = (part[left:right, blocks] for part in of_outputs)
            for start in range(0, len(packed), _TILE[0]):
                rows = unpacked(packed[start : start + _TILE[0]], scales[start : start + _TILE[0]])
                _transpose(rows[:, inputs], into[number - first][:, start : start + len(rows)])

        list(self._pool.map(decode, range(first, last)))

    def _scratch_rows(self, region: Region, start: int, stop: int) -> np.ndarray:
        """Reads rows of a tensor into memory that this thread uses again for the next ones."""
        tensor = region.file.tensors[region.name]
        size = (stop - start) * tensor.nbytes // tensor.shape[0]
        if not hasattr(self._local, "scratch") or len(self._local.scratch) < size:
            self._local.scratch = np.empty(size, np.uint8)
        return region.file.read(region.name, start, stop, into=self._local.scratch)

    def _fresh(self, shape: Shape, dtype: Any) -> np.ndarray:
        """Returns new memory for an array, provided by all threads together."""
        array = aligned_zeros(shape, dtype)
        list(self._pool.map(populate, np.array_split(array.reshape(-1), THREADS)))
        return array

    def _read_rows(self, region: Region, start: int, stop: int | None) -> np.ndarray:
        at = (id(region.file), region.name, start, stop)
        if at != self._rows_at:
            self._forget()  # frees their memory before more is read
            self._rows, self._rows_at = region.file.read(region.name, start, stop), at
        return self._rows

    def _forget(self) -> None:
        self._rows, self._rows_at = np.empty(0), None


ReadRows = Callable[[Region, int, int | None], np.ndarray]
"""Reads a range of the rows of a tensor, or all from the first one on."""


class RowAxis(NamedTuple):
    """The axis of a parameter along which the rows of its tensor follow each other, and the rows per entry of it."""

    number: int
    rows: int


def row_axis(region: Region) -> RowAxis | None:
    """Returns the axis of a parameter that is read in ranges; None if its tensor is always read whole."""
    layout, shape = region.layout, region.shape
    if layout.order is not None or layout.leading or not shape:
        return None
    if layout.transposed:
        axis = layout.inputs or 0
        return RowAxis(axis, math.prod(shape[axis + 1 :]))
    inputs = len(shape) if layout.inputs is None else layout.inputs  # without outputs, it has inputs only
    is_matrix = layout.flat or layout.inputs is not None
    return RowAxis(0, math.prod(shape[1:inputs]) if is_matrix else 1)


def view_of(region: Region, box: Box, read_rows: ReadRows) -> np.ndarray:
    """Reads the rows of a tensor that hold a part of a parameter, and returns the part as a view of them."""
    axis = row_axis(region)
    if axis is None:
        return _small_view(region, box, read_rows)
    if region.groups:
        return _grouped_view(region, box, read_rows)
    view = (_rows_of_outputs if region.layout.transposed else _rows_of_inputs)(region, box, axis, read_rows)
    cut = [*box.slices()]
    cut[axis.number] = slice(None)  # only the rows of this part were read
    return view[tuple(cut)]


def _rows_of_outputs(region: Region, box: Box, axis: RowAxis, read_rows: ReadRows) -> np.ndarray:
    """Reads a tensor `[outputs, inputs]`, such as the weight of a PyTorch `Linear`.

    For example, the kernel of a query projection has the shape `[features 8, heads 4, head_dim 2]`. Its tensor is
    `[8, 8]`, with two rows per head. If a device holds heads 2 and 3, rows 4 to 7 are read. As `[heads 2, head_dim
    2, features 8]`, transposed, they are the part of the parameter, complete along all axes but that of the heads.
    """
    inputs, others = region.shape[: axis.number], region.shape[axis.number + 1 :]
    start, stop = box.start[axis.number], box.end[axis.number]
    rows = read_rows(region, region.offset + start * axis.rows, region.offset + stop * axis.rows)
    rows = rows.reshape(stop - start, *others, *inputs)
    outputs = rows.ndim - axis.number
    return rows.transpose(*range(outputs, rows.ndim), *range(outputs))


def _rows_of_inputs(region: Region, box: Box, axis: RowAxis, read_rows: ReadRows) -> np.ndarray:
    """Reads a tensor `[inputs, outputs]`, one that has the axes of the parameter, or a flat one.

    For example, the fused kernel of GPT-2 is `[features 8, 24]`, with the outputs of queries, keys and values next
    to each other. The keys have the offset 8; their parameter `[features 8, heads 4, head_dim 2]` is columns 8 to
    15 of every row.
    """
    layout, shape = region.layout, region.shape
    first = region.offset if layout.output_axis == 0 else 0
    start, stop = box.start[0], box.end[0]
    rows = read_rows(region, first + start * axis.rows, first + stop * axis.rows)
    if layout.interleaved:
        rows = rows[..., region.offset :: layout.interleaved]
    elif layout.output_axis == 1:
        rows = rows[:, region.offset : region.offset + math.prod(shape[layout.inputs :])]
    return rows.reshape(stop - start, *shape[1:])


def _grouped_view(region: Region, box: Box, read_rows: ReadRows) -> np.ndarray:
    """Reads the groups of rows that hold some heads of a fused projection, and returns a part of it."""
    shape, number = region.shape, region.layout.inputs or 0
    heads, step = shape[number] // region.groups, math.prod(shape[number + 1 :])  # of a group, and rows of a head
    start, stop = box.start[number], box.end[number]
    first, last = start // heads, -(-stop // heads)
    rows = read_rows(region, first * region.stride, last * region.stride)
    rows = rows.reshape(last - first, region.stride, *rows.shape[1:])[:, region.offset :][:, : heads * step]
    rows = rows.reshape((last - first) * heads, *shape[number + 1 :], *shape[:number])
    outputs = rows.ndim - number
    cut = [*box.slices()]
    cut[number] = slice(start - first * heads, stop - first * heads)
    return rows.transpose(*range(outputs, rows.ndim), *range(outputs))[tuple(cut)]


def _small_view(region: Region, box: Box, read_rows: ReadRows) -> np.ndarray:
    """Reads a whole tensor that cannot be read in ranges (a convolution, a scalar), and returns a part of it."""
    tensor, order = read_rows(region, 0, None), region.layout.order
    if order is not None:  # it may be fused
        cut = slice(region.offset, region.offset + region.shape[-1])
        tensor = tensor[(slice(None),) * region.layout.output_axis + (cut,)]
    array = tensor.reshape(region.shape) if order is None else tensor.transpose(np.argsort(order))
    return array[(..., *box.slices())]


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
