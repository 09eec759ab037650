"""Which shapes are compiled: lengths are rounded up to *buckets*, a few rows to eight, and steps run in groups.

A compiled function serves exactly one set of shapes. Rounding makes texts of many lengths share it: the number of
compilations is the number of buckets, not of lengths.
"""

from typing import NamedTuple

SMALLEST_PROMPT = 16
LONG_PROMPT = 1024
TOKENS_AT_ONCE = 8192  # of all prompts together; a GPU multiplies so many rows at its full speed
SMALLEST_CACHE = 64
ROWS_THAT_PAY = 8
# Tokens per group. Both divide SMALLEST_CACHE, so that there is a column for each step. The longer group is for texts
# of LONG_TEXT tokens and more: there, fewer pauses save about as much as the wasted half of the last group costs.
SHORT_GROUP, LONG_GROUP = 16, 32
LONG_TEXT = 256


def prompt_bucket(length: int, chunk: int) -> int:
    """Returns the number of tokens to pad a prompt to; 0 stays 0.

    Up to one chunk, this is a power of two, and for long prompts also three quarters of one. Longer prompts take a
    number of chunks that is a power of two, of which only those with real tokens are computed.

    >>> from nnx.generation.buckets import prompt_bucket
    >>> [prompt_bucket(length, chunk=1000) for length in (0, 1, 17, 700, 1001, 2500)]
    [0, 16, 32, 1000, 2000, 4000]
    >>> [prompt_bucket(length, chunk=8192) for length in (700, 1025, 2500, 4095)]
    [1024, 1536, 3072, 4096]
    """
    if length == 0:
        return 0
    if length <= chunk:
        power = _power_of_two(max(length, SMALLEST_PROMPT))
        fits = length > LONG_PROMPT and length <= power // 4 * 3
        return min(power // 4 * 3 if fits else power, chunk)
    return chunk * _power_of_two(-(-length // chunk))


def default_chunk(rows: int) -> int:
    """Returns the number of tokens of each prompt to read at a time.

    A chunk that comes first attends to its own tokens alone, and large products are faster than several smaller ones,
    but the memory for what is computed grows with the tokens of all rows.

    >>> from nnx.generation.buckets import default_chunk
    >>> [default_chunk(rows) for rows in (1, 4, 64)]
    [8192, 2048, 1024]
    """
    return max(TOKENS_AT_ONCE // _power_of_two(rows), LONG_PROMPT)


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


class Pace(NamedTuple):
    """How the loop proceeds.

    Attributes:
        steps: the number of tokens written in one *group*, before the loop can end.
        is_one_group: whether one group is all there is, so that nothing has to be checked.
    """

    steps: int
    is_one_group: bool


def pace_of(new: int, may_stop: bool, is_streamed: bool, platform: str) -> Pace:
    """Returns how many tokens the loop writes before it checks whether to go on; elsewhere than on a GPU, one.

    On a GPU, XLA copies the answer to the host and waits for it there. Nothing is launched ahead meanwhile, which takes
    as long as one token of GPT-2 small on an H200. A group with a fixed number of steps has no such pause, but does not
    end early: steps after the last token, or after every row has stopped, write padding.

    Args:
        new: the number of tokens to write.
        may_stop: whether a stop token can end a text earlier.
        is_streamed: whether each token is wanted as soon as it is known.
        platform: the name of the JAX backend.

    >>> from nnx.generation.buckets import pace_of
    >>> [pace_of(new, False, False, "gpu").steps for new in (1, 5, 100, 512)]  # 512 is a bucket, so no step is wasted
    [1, 8, 16, 512]
    >>> [pace_of(new, True, False, "gpu").steps for new in (1, 5, 100, 512)]
    [1, 8, 16, 32]
    >>> pace_of(512, False, False, "cpu"), pace_of(512, False, True, "gpu")
    (Pace(steps=1, is_one_group=False), Pace(steps=1, is_one_group=True))
    """
    if platform not in ("gpu", "cuda"):
        return Pace(1, False)
    if is_streamed:
        return Pace(1, True)
    if new <= SHORT_GROUP:
        return Pace(_power_of_two(new), True)
    if not may_stop and new == cache_bucket(new):
        return Pace(new, True)
    return Pace(LONG_GROUP if new >= LONG_TEXT else SHORT_GROUP, False)


def _power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
