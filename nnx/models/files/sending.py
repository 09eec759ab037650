"""Sending parameters to accelerators: rows leave the host as they are stored, and are rearranged on the devices.

A parameter is sent in *steps*. In a step every device gets one piece of its part: some rows of a tensor, or those of
its columns that it needs. A step is a box in the part of each device. Threads read the rows of several steps at the
same time, each into memory that it uses again and again, and wait until the devices have them; meanwhile the devices
rearrange the pieces of earlier steps.
"""

import collections
import math
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from nnx.models.files.mxfp4 import PackedFile
from nnx.models.files.reading import Reader, ReadRequest, Region, row_axis, view_of
from nnx.storage.placing import Assembly, Box, parts_of, takes_pieces
from nnx.storage.transfer_bar import moved, transfer

PIECE = 32 << 20
"""The bytes of the rows that are read for one step, unless a single row has more."""
SENDERS = min(16, os.cpu_count() or 1)
"""The threads that read and send. 16 GB onto an H200 took 12 s of the processor and 2.6 s on the clock."""
COMPILERS = 4
"""The threads that compile the programs for the shapes of pieces."""
SMALL = 4 << 20
"""The bytes of a parameter that the host rearranges itself: a program for each shape would take longer to compile."""


class Sender:
    """Sends parameters, several at a time; a context manager."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(SENDERS, thread_name_prefix="nnx-send")
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="nnx-send-compile")
        self._local = threading.local()
        self._sent: collections.deque[tuple[Assembly, Box, Future[list[jax.Array]]]] = collections.deque()

    def __enter__(self) -> "Sender":
        return self

    def __exit__(self, *error: Any) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._compilers.shutdown(cancel_futures=True)

    def send(self, request: ReadRequest) -> Assembly:
        """Begins to send a parameter; its assembly is complete after `finish`."""
        region, sharding = request.regions[0], request.target.sharding
        depth = len(request.stack)
        order = (*range(depth), *[depth + axis for axis in _stored_order(region)])
        assembly = Assembly(request.target.shape, request.target.dtype, sharding, order)
        parts = parts_of(request.target.shape, sharding)
        steps, dtype = list(_steps(region, assembly.part, depth)), region.file.tensors[region.name].dtype
        for shape in dict.fromkeys(step.shape for step in steps):  # compiled while the first rows are read
            self._compilers.submit(assembly.prepare, shape, dtype)
        for step in steps:
            while len(self._sent) >= 2 * SENDERS:  # what the devices have not rearranged yet takes their memory
                self._add_first()
            self._sent.append((assembly, step, self._pool.submit(self._pieces, request, order, parts, step)))
        return assembly

    def finish(self) -> None:
        """Waits until everything is on its devices."""
        while self._sent:
            self._add_first()

    def _add_first(self) -> None:
        assembly, step, pieces = self._sent.popleft()
        assembly.add(pieces.result(), step.start)
        moved(assembly.bytes_per_step(step.shape))

    def _pieces(
        self, request: ReadRequest, order: tuple[int, ...], parts: list[tuple[Box, Any]], step: Box
    ) -> list[jax.Array]:
        """Reads the pieces of one step and returns them on their devices."""
        depth, found, rows_at, rows = len(request.stack), {}, None, np.empty(0)

        def read_rows(region: Region, start: int, stop: int | None) -> np.ndarray:
            nonlocal rows, rows_at
            if rows_at != (region.name, start, stop):  # neighbors need other columns of the same rows
                rows, rows_at = self._read_rows(region, start, stop), (region.name, start, stop)
            return rows

        devices: dict[Box, list[Any]] = {}
        for part, device in parts:
            start = tuple([first + at for first, at in zip(part.start, step.start, strict=True)])
            devices.setdefault(Box(start, step.shape), []).append(device)
        for box, copies in sorted(devices.items(), key=lambda item: item[0].start):
            number = np.ravel_multi_index(box.start[:depth], request.stack) if depth else 0
            view = view_of(request.regions[int(number)], box.axes(depth), read_rows)
            view = view[(None,) * depth].transpose(order)
            pieces = [jax.device_put(_unshared(view), device) for device in copies]
            found.update(zip(copies, jax.block_until_ready(pieces), strict=True))  # then the memory is free again
        return [found[device] for _, device in parts]

    def _read_rows(self, region: Region, start: int, stop: int | None) -> np.ndarray:
        """Reads rows of a tensor into the memory of this thread."""
        tensor = region.file.tensors[region.name]
        size = tensor.nbytes if stop is None else (stop - start) * tensor.nbytes // tensor.shape[0]
        if not hasattr(self._local, "memory") or len(self._local.memory) < size:
            self._local.memory = np.empty(size, np.uint8)
        return region.file.read(region.name, start, stop, into=self._local.memory)


def placed(requests: Sequence[ReadRequest]) -> list[jax.Array]:
    """Returns parameters on their devices."""
    size = sum([math.prod(request.target.shape) * request.target.dtype.itemsize for request in requests])
    with transfer("loading", "parameters", size), Reader() as reader, Sender() as sender:
        found = [sender.send(request) if is_sent(request) else reader.place(request) for request in requests]
        sender.finish()
        return [array.finish() if isinstance(array, Assembly) else array for array in found]


def is_sent(request: ReadRequest) -> bool:
    """Whether a parameter is sent as it is stored, rather than rearranged by the host."""
    target = request.target
    if math.prod(target.shape) * target.dtype.itemsize < SMALL or not takes_pieces(target.sharding):
        return False
    for region in request.regions:
        if isinstance(region.file, PackedFile) and region.file.is_packed(region.name):
            return False
        if region.groups:  # its rows are not next to each other
            return False
        stored = region.file.tensors[region.name].dtype
        if jax.dtypes.canonicalize_dtype(stored) != stored:  # JAX would convert it, to yet another dtype
            return False
    return True


def _unshared(view: np.ndarray) -> np.ndarray:
    """Returns what can be sent from memory that will be overwritten: a copy for a CPU, which uses memory as it is."""
    # `device_put(..., may_alias=False)` does not help: JAX ignores it for NumPy arrays.
    return np.array(view) if jax.default_backend() == "cpu" else view


def _stored_order(region: Region) -> tuple[int, ...]:
    """Returns the axes of a parameter in the order in which they are stored."""
    layout, axes = region.layout, tuple(range(len(region.shape)))
    if layout.order is not None:
        return layout.order
    inputs = layout.inputs or 0
    return (*axes[inputs:], *axes[:inputs]) if layout.transposed else axes


def _steps(region: Region, part: tuple[int, ...], depth: int) -> Iterator[Box]:
    """Yields the steps in which the parts of all devices are sent: one per layer or expert, and per so many rows."""
    inner, axis = part[depth:], row_axis(region)
    size = inner[axis.number] if axis is not None else 1
    tensor = region.file.tensors[region.name]
    count = 1
    if axis is not None:
        row = max(1, tensor.nbytes // max(1, tensor.shape[0])) * axis.rows
        most = max(1, PIECE // row)
        count = -(-size // -(-size // most))  # equal pieces, if possible, have one program
    for index in np.ndindex(*part[:depth]):
        for start in range(0, size, count):
            shape, at = list(inner), [0] * len(inner)
            if axis is not None:
                shape[axis.number], at[axis.number] = min(count, size - start), start
            yield Box((*index, *at), (*[1] * depth, *shape))
