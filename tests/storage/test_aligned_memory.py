"""Memory to read into, which JAX uses without a copy."""

import mmap
import platform
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from nnx.storage.aligned_memory import LARGE, aligned_bytes, aligned_copy, aligned_zeros, populate


@pytest.mark.parametrize("size", [1, LARGE - 1, LARGE, 3 * LARGE + 5])
def test_jax_uses_the_memory_without_copying_it(size):
    array = aligned_zeros((size,), np.uint8)
    assert array.shape == (size,) and not array.any()
    assert array.ctypes.data % 64 == 0
    if jax.default_backend() == "cpu":
        assert jax.device_put(array).unsafe_buffer_pointer() == array.ctypes.data


def test_a_copy_is_contiguous():
    source = np.arange(12).reshape(3, 4).T
    copy = aligned_copy(source)
    assert copy.flags.c_contiguous
    np.testing.assert_array_equal(copy, source)


@pytest.mark.parametrize("size", [0, 100, 5000, 3 * LARGE + 17])
def test_populating_does_not_change_the_contents(size):
    memory = aligned_bytes(size + 50)[50:]
    memory[:] = np.arange(size) % 251
    populate(memory)
    np.testing.assert_array_equal(memory, np.arange(size) % 251)


@pytest.mark.skipif(sys.platform != "linux", reason="about Linux")
def test_populating_provides_the_memory():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    memory = aligned_bytes(16 * LARGE)
    before = resident()
    populate(memory)
    # Linux before 5.14 leaves it to the first use.
    assert resident() - before > 14 * LARGE or tuple(map(int, platform.release().split(".")[:2])) < (5, 14)
