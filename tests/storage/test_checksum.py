"""The checksum of array data notices what goes wrong on disks."""

import random

import numpy as np
import pytest

from nnx.storage.checksum import BLOCK, checksum


def data(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("size", [0, 1, 7, 4095, 4096, 4097, 100_000, BLOCK, BLOCK + 5, 2 * BLOCK + 4096])
def test_every_flipped_bit_is_noticed(size):
    whole, draw = data(size), random.Random(size)
    right = checksum(whole)
    for at in {0, 8 * size - 1, *(draw.randrange(8 * size) for _ in range(50))} if size else ():
        damaged = whole.copy()
        damaged[at // 8] ^= 1 << at % 8
        assert checksum(damaged) != right


def test_moved_exchanged_and_lost_pages_are_noticed():
    whole = data(2 * BLOCK + 8192)
    right = checksum(whole)
    pages = whole.reshape(-1, 4096)
    for first, second in ((0, 1), (0, 255), (3, 300), (510, 513)):
        damaged = pages.copy()
        damaged[[first, second]] = damaged[[second, first]]
        assert checksum(damaged.reshape(-1)) != right
    assert checksum(np.roll(whole, 8)) != right and checksum(np.roll(whole, 4096)) != right
    for page in (0, 100, 513):
        damaged = pages.copy()
        damaged[page] = 0
        assert checksum(damaged.reshape(-1)) != right
    words = whole[:BLOCK].view(np.uint64).copy()
    words[[5, 700]] = words[[700, 5]]
    assert checksum(words.view(np.uint8)) != checksum(whole[:BLOCK])


def test_every_length_of_zeros_has_its_own_checksum():
    sizes = [0, 1, 8, 4096, 8192, BLOCK, BLOCK + 4096, 2 * BLOCK]
    assert len({checksum(np.zeros(size, np.uint8)) for size in sizes}) == len(sizes)


def test_blocks_can_be_checked_one_after_the_other_and_at_any_address():
    whole = data(3 * BLOCK + 100)
    value = 0
    for first in range(0, len(whole), BLOCK):
        value = checksum(whole[first : first + BLOCK], value)
    assert value == checksum(whole)
    odd = np.empty(len(whole) + 1, np.uint8)
    odd[1:] = whole
    assert checksum(odd[1:]) == value
