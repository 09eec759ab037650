"""Memory for arrays that are read from files, which JAX can use without copying it.

On a CPU, XLA requires an alignment of 64 bytes. Large blocks come from the system, which gets them back as soon as they
are freed: malloc would keep and fragment them, which made a sharded load peak at 1.35 times the size of the model.

Fresh memory costs more than the data that are copied into it, because the processor stops at every page that is used
for the first time. *Huge* pages (2 MB instead of 4 KB) make that several times faster, except in a virtual machine that
*reports* its free memory: the host takes back every free huge page, and fetching one again takes longer than the 512
small ones that it replaces. Loading one gigabyte there took 2.6 s of CPU time with huge pages and 0.7 s without.
Asking for many small pages at once (`populate`) saves a third of that again: 0.37 instead of 0.55 s per gigabyte.
"""

import contextlib
import ctypes
import functools
import math
import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT = 64
LARGE = 2**20  # blocks of at least this many bytes come from the system
DEVICES = Path("/sys/bus/virtio/devices")
POPULATE_WRITE = 23  # the advice of `madvise` that provides pages at once; Linux 5.14 and later
BALLOON, REPORTING = 5, 5  # the type of device that manages a guest's memory, and the bit of the feature; VIRTIO 1.2


@functools.cache
def reports_free_memory(devices: Path = DEVICES) -> bool:
    """Whether this is a virtual machine that gives free huge pages back to its host.

    Args:
        devices: the directory in which Linux lists the devices that the host provides.
    """
    with contextlib.suppress(OSError, ValueError):  # not Linux, or a system that hides its devices
        for device in devices.iterdir():
            if int((device / "device").read_text(), 16) == BALLOON:
                features = (device / "features").read_text()  # one digit per bit, the lowest one first
                return features[REPORTING : REPORTING + 1] == "1"
    return False


def aligned_bytes(size: int) -> np.ndarray:
    """Returns zeros, as bytes."""
    if size >= LARGE and hasattr(mmap, "MAP_ANONYMOUS"):
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_NOHUGEPAGE if reports_free_memory() else mmap.MADV_HUGEPAGE)
        return np.frombuffer(pages, np.uint8)
    memory = np.zeros(size + ALIGNMENT - 1, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns a new array of zeros."""
    dtype = np.dtype(dtype)
    return aligned_bytes(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def aligned_copy(array: np.ndarray) -> np.ndarray:
    """Returns a contiguous copy."""
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
