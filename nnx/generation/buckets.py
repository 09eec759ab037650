"""Which shapes are compiled: lengths are rounded up to *buckets*, a few rows to eight, and steps run in groups.

A compiled function serves exactly one set of shapes. Rounding makes texts of many lengths share it: the number of
compilations is the number of buckets, not of lengths.
"""

from typing import NamedTuple

SMALLEST_PROMPT = 16
SMALLEST_CACHE = 64
ROWS_THAT_PAY = 8
# Both divide SMALLEST_CACHE, so that there is a column for each step.
STEPS_WITHOUT_CHECK = 16
STEPS_WITHOUT_STOPS = 64


def prompt_bucket(length: int, chunk: int) -> int:
    """Returns the number of tokens to pad a prompt to; 0 stays 0.

    Up to one chunk, this is a power of two. Longer prompts take a number of chunks that is a power of two, of which
    only those with real tokens are computed.

    >>> from nnx.generation.buckets import prompt_bucket
    >>> [prompt_bucket(length, chunk=1000) for length in (0, 1, 17, 700, 1001, 2500)]
    [0, 16, 32, 1000, 2000, 4000]
    """
    if length == 0:
        return 0
    if length <= chunk:
        return min(_power_of_two(max(length, SMALLEST_PROMPT)), chunk)
    return chunk * _power_of_two(-(-length // chunk))


def cache_bucket(length: int) -> int:
    """Returns the number of slots of a cache that has to hold `length` tokens.

    The steps are finer than those of prompts, at most a quarter of the length, because attention without a fused
    kernel reads every slot for every token.

    >>> from nnx.generation.buckets import cache_bucket
    >>> [cache_bucket(length) for length in (1, 64, 65, 576, 1025)]
    [64, 64, 128, 640, 1280]
    """
    step = max(SMALLEST_CACHE, _power_of_two(length) // 8)
    return -(-length // step) * step


class Lengths(NamedTuple):
    """The rounded lengths of one call: tokens to read of prompts and prefix, slots of the cache, and new tokens."""

    prompt: int
    prefix: int
    cache: int
    new: int


def rounded_lengths(
    prompt: int, prefix: int, new: int, chunk: int, limit: int | None, boundary: int | None = None
) -> Lengths:
    """Returns the buckets for texts of so many tokens.

    Args:
        prompt: the length of the longest prompt. All its tokens but the last are read, and the last new token is never
            decoded: neither needs a slot.
        prefix: the length of the prefix, 0 for none.
        new: the number of new tokens.
        chunk: the number of tokens to read at a time.
        limit: the length of the longest text that the model can hold, which no bucket exceeds.
        boundary: the length above which the model treats a text differently, which rounding must not exceed.

    >>> from nnx.generation.buckets import rounded_lengths
    >>> rounded_lengths(prompt=100, prefix=0, new=60, chunk=1024, limit=None)
    Lengths(prompt=128, prefix=0, cache=192, new=64)
    >>> rounded_lengths(prompt=100, prefix=0, new=60, chunk=1024, limit=160).cache
    160
    >>> [rounded_lengths(100, 0, new, 1024, None, boundary=160).cache for new in (60, 61, 62)]
    [160, 160, 192]
    """
    read, shared = prompt_bucket(prompt - 1, chunk), prompt_bucket(prefix, chunk)
    cache = cache_bucket(max(prefix + prompt + new - 1, read, shared))
    if boundary is not None and prefix + prompt + new - 1 <= boundary:
        limit = boundary if limit is None else min(limit, boundary)
    if limit is not None:
        read, shared, cache = min(read, limit), min(shared, limit), min(cache, limit)
    return Lengths(read, shared, cache, cache_bucket(new))


def rows_to_run(rows: int, platform: str, cache_bytes_per_row: int, weight_bytes: int) -> int:
    """Returns the number of rows the loop runs with; those beyond `rows` are computed and thrown away.

    On a GPU, XLA multiplies fewer than eight rows by a matrix with kernels that are slower than those for eight rows:
    a token of GPT-2 small on an H200 took 0.65 ms for one row and 0.41 ms for eight. The extra rows also need caches,
    which are half full on average. Where reading them would take longer than reading the weights, they do not pay.

    >>> from nnx.generation.buckets import rows_to_run
    >>> [rows_to_run(rows, "gpu", cache_bytes_per_row=1, weight_bytes=100) for rows in (1, 5, 8, 9)]
    [8, 8, 8, 9]
    >>> rows_to_run(1, "cpu", 1, 100), rows_to_run(1, "gpu", cache_bytes_per_row=50, weight_bytes=100)
    (1, 1)
    """
    if platform not in ("gpu", "cuda") or rows >= ROWS_THAT_PAY:
        return rows
    return ROWS_THAT_PAY if ROWS_THAT_PAY * cache_bytes_per_row / 2 <= weight_bytes else rows


def steps_between_checks(new: int, may_stop: bool, platform: str) -> int:
    """Returns how many tokens the loop writes before it looks whether to go on.

    On a GPU, XLA copies the answer to the host and waits for it there, so that nothing is launched ahead meanwhile. A
    loop with a fixed number of steps has no such pause. The price is at most fifteen steps too many. Where no stop
    token can end a text, the loop only ends after `new` tokens, and longer groups that fit exactly cost nothing.

    >>> from nnx.generation.buckets import steps_between_checks
    >>> [steps_between_checks(new, True, "gpu") for new in (5, 100, 512)]
    [1, 16, 16]
    >>> [steps_between_checks(new, False, "gpu") for new in (5, 100, 512)]
    [1, 16, 64]
    >>> steps_between_checks(512, False, "cpu")
    1
    """
    if platform not in ("gpu", "cuda") or new < SMALLEST_CACHE:
        return 1
    return STEPS_WITHOUT_STOPS if not may_stop and new % STEPS_WITHOUT_STOPS == 0 else STEPS_WITHOUT_CHECK


def _power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
