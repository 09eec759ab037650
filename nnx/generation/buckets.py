"""Which shapes are compiled: lengths are rounded up to *buckets*, and a few rows to eight.

A compiled function serves exactly one set of shapes. Rounding makes texts of many lengths share it: the number of
compilations is the number of buckets, not of lengths.
"""

SMALLEST_PROMPT = 16
SMALLEST_CACHE = 64
ROWS_THAT_PAY = 8


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


def rows_to_run(rows: int, platform: str, cache_bytes_per_row: int, weight_bytes: int) -> int:
    """Returns the number of rows the loop runs with; those beyond `rows` are computed and thrown away.

    On a GPU, XLA multiplies fewer than eight rows by a matrix with kernels that are slower than those for eight rows:
    a token of GPT-2 small on an H200 took 0.65 ms for one row and 0.41 ms for eight. The extra rows also need a cache.
    Where that would be larger than the weights, reading it would cost more than the faster kernels save.

    >>> from nnx.generation.buckets import rows_to_run
    >>> [rows_to_run(rows, "gpu", cache_bytes_per_row=1, weight_bytes=100) for rows in (1, 5, 8, 9)]
    [8, 8, 8, 9]
    >>> rows_to_run(1, "cpu", cache_bytes_per_row=1, weight_bytes=100)
    1
    """
    if platform not in ("gpu", "cuda") or rows >= ROWS_THAT_PAY:
        return rows
    return ROWS_THAT_PAY if ROWS_THAT_PAY * cache_bytes_per_row <= weight_bytes else rows


def _power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
