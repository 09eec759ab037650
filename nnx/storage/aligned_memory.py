"""Memory for arrays that are read from files, which JAX can use without copying it.

On a CPU, XLA requires an alignment of 64 bytes. Large blocks come from the system, which gets them back as soon as they
are freed: malloc would keep and fragment them, which made a sharded load peak at 1.35 times the size of the model.

The system provides fresh memory page by page, as it is used, and the processor stops at each page. `populate` asks for
many pages at once. Whether they are small or huge is left to the settings of the system.
"""

import ctypes
import functools
import math
import mmap
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

ALIGNMENT = 64
LARGE = 2**20  # blocks of at least this many bytes come from the system
POPULATE_WRITE = 23  # the advice of `madvise` that provides pages at once; Linux 5.14 and later


def aligned_bytes(size: int) -> np.ndarray:
    """Returns zeros as an array of bytes, aligned for XLA."""
    if size >= LARGE and hasattr(mmap, "MAP_ANONYMOUS"):
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(pages, np.uint8)
    memory = np.zeros(size + ALIGNMENT - 1, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns a new array of zeros, aligned for XLA."""
    dtype = np.dtype(dtype)
    return aligned_bytes(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def aligned_arrays(arrays: Sequence[tuple[tuple[int, ...], Any]]) -> list[np.ndarray]:
    """Returns an array for each shape and dtype, aligned for XLA, without values.

    Many small arrays share a block, which is quicker than a block for each. A block is small too, so an array that is
    kept does not keep much more than itself in memory.
    """
    found: list[np.ndarray] = []
    block, used = np.empty(0, np.uint8), 0
    for shape, dtype in arrays:
        size = math.prod(shape) * dtype.itemsize
        if size > LARGE // 16:
            found.append(aligned_zeros(shape, dtype))
            continue
        if used + size > len(block):
            block, used = aligned_bytes(LARGE), 0
        found.append(block[used : used + size].view(dtype).reshape(shape))
        used += -(-size // ALIGNMENT) * ALIGNMENT
    return found


def aligned_copy(array: np.ndarray) -> np.ndarray:
    """Returns a contiguous copy, aligned for XLA."""
    copy = aligned_zeros(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


def populate(array: np.ndarray) -> None:
    """Provides the memory of an array that is about to be filled, where the system can do that all at once.

    The array must be contiguous. Its contents do not change. The caller waits, but other threads run, so several can
    populate parts of one array.
    """
    start = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (array.ctypes.data + array.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    advise = _madvise()
    if advise is not None and size > 0:
        advise(start, size, POPULATE_WRITE)  # if it fails, the pages are provided one by one, as they are used


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Returns the function of the C library, which `mmap.madvise` calls without letting other threads run."""
    if sys.platform != "linux":
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
