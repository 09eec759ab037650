"""`nnx.generate`: continues texts with a model that has a cache of keys and values."""

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import numpy as np
from jax.typing import ArrayLike

from nnx.core.context import Context
from nnx.core.hints.hints import explain_keywords
from nnx.core.module.module import Module
from nnx.core.statics.statics import Keyed
from nnx.core.trace import is_tracer
from nnx.generation.arguments import (
    STREAM_IN_TRANSFORM,
    as_count,
    as_int,
    as_prefix,
    as_prompt,
    as_sampling,
    as_stop_tokens,
    check_model,
    check_room,
    padded,
)
from nnx.generation.buckets import default_chunk, pace_of, rounded_lengths
from nnx.generation.programs import Column, LoopState, Setup, read, write
from nnx.sharding.rules import get_logical_axis_rules
from nnx.sharding.target import target

NOT_FINITE = (
    "nnx.generate: the logits of row(s) {rows} were NaN or infinite, or ruled out every token. These rows end there, "
    "padded with pad_token, and their log-probabilities are NaN from there on. Run the model on such a text to see "
    "where it fails, or check `logits_fn`."
)


Tokens = ArrayLike | Sequence[int] | Sequence[Sequence[int]]
"""Whole numbers as an array or as lists."""


class Options(TypedDict, total=False):
    """The optional arguments of `generate`, for editors and type checkers."""

    lengths: Tokens | None
    temperature: float | jax.Array
    top_k: int | jax.Array | None
    top_p: float | jax.Array | None
    min_p: float | jax.Array | None
    repetition_penalty: float | jax.Array | None
    logits_fn: Callable[[jax.Array], jax.Array] | None
    stop_tokens: int | Iterable[int]
    pad_token: int
    num_samples: int | None
    prefix: Tokens | None
    prefill_chunk: int | None
    stream: Callable[[np.ndarray], Any] | None
    ctx: Context | None


@overload
def generate(
    model: Module,
    prompts: Tokens,
    *,
    max_new_tokens: int,
    return_logprobs: Literal[False] = False,
    **options: Unpack[Options],
) -> jax.Array: ...
@overload
def generate(
    model: Module,
    prompts: Tokens,
    *,
    max_new_tokens: int,
    return_logprobs: Literal[True],
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...
@explain_keywords
def generate(
    model: Module,
    prompts: Tokens,
    *,
    max_new_tokens: int,
    lengths: Tokens | None = None,
    temperature: float | jax.Array = 1.0,
    top_k: int | jax.Array | None = None,
    top_p: float | jax.Array | None = None,
    min_p: float | jax.Array | None = None,
    repetition_penalty: float | jax.Array | None = None,
    logits_fn: Callable[[jax.Array], jax.Array] | None = None,
    stop_tokens: int | Iterable[int] = (),
    pad_token: int = 0,
    num_samples: int | None = None,
    prefix: Tokens | None = None,
    prefill_chunk: int | None = None,
    return_logprobs: bool = False,
    stream: Callable[[np.ndarray], Any] | None = None,
    ctx: Context | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Continues texts, one token at a time, with a cache of keys and values.

    The model runs in evaluation mode and is not changed. Reading the prompts and writing tokens are one compiled
    function each. They are compiled once for each combination of batch size, *bucket* of lengths and set of rules in
    use; the values of the rules, the weights, and lengths within a bucket can change freely.

    Args:
        model: a Module with the methods `init_cache(batch, length, dtype=None)`, which returns a cache, and
            `decode(tokens, cache, lengths=None)`, which returns logits `[batch, length, vocab]` and the cache with the
            tokens appended, `lengths` of them in each row. If it has an attribute `max_length`, texts are limited to
            it. If it has a method `unscanned`, the loop runs the result of it.
        prompts: the texts to continue, whole numbers `[batch, length]`, padded on the right.
        max_new_tokens: the number of tokens to write.
        lengths: `[batch]`, the number of real tokens in each prompt; all of them by default.
        temperature: the number that logits are divided by; 0 takes the most likely token each time.
        top_k: the number of most likely tokens to draw from; tokens as likely as the last of them are included.
        top_p: the total probability, above 0 and at most 1, of the tokens to draw from, most likely first.
        min_p: the lowest probability to draw from, as a fraction of the highest.
        repetition_penalty: the number by which the logits of tokens that already occurred are divided (multiplied, if
            they are negative).
        logits_fn: a function from logits `[rows, vocab]` in float32 to logits, applied after the repetition penalty
            and before the temperature. It is compiled: functions with equal code and equal captured values share a
            compiled loop.
        stop_tokens: tokens that end a row.
        pad_token: the number that fills a row after a stop token.
        num_samples: the number of texts to write for each prompt, which is read only once. The result then has an axis
            for them.
        prefix: `[length]`, tokens before all prompts, read only once.
        prefill_chunk: the number of tokens of each prompt to read at a time. Smaller chunks need less memory. By
            default, 8,192 tokens of all prompts together, and at least 1,024 of each.
        return_logprobs: whether to return log-probabilities as well. They are those of the model itself, before any
            rule is applied.
        stream: a function that is called with the tokens of each step, a numpy array `[batch]` or `[batch,
            num_samples]`, as soon as they are known.
        ctx: the Context; its stream "sample" is required unless `temperature=0`.

    Returns:
        The new tokens, int32 `[batch, max_new_tokens]`, or `[batch, num_samples, max_new_tokens]` with `num_samples`;
        with `return_logprobs`, also their log-probabilities in float32, which are 0 after a stop token.

    Raises:
        ValueError: if an argument is out of range, or prompt and new tokens do not fit into the model's `max_length`.

    Warns:
        RuntimeWarning: if the logits of a row are not finite. The row ends there.

    >>> class Next(nnx.Module):  # a model that counts: after token n comes n + 1
    ...     def init_cache(self, batch, length, dtype=None):
    ...         return jnp.zeros(batch, jnp.int32)  # it needs none, but a cache has to be a pytree
    ...
    ...     def decode(self, tokens, cache, lengths=None):
    ...         return 9.0 * jax.nn.one_hot(tokens + 1, 100), cache
    >>> prompts = jnp.array([[5, 6, 7], [20, 0, 0]])
    >>> nnx.generate(Next(), prompts, lengths=[3, 1], max_new_tokens=4, temperature=0, stop_tokens=[10]).tolist()
    [[8, 9, 10, 0], [21, 22, 23, 24]]
    """
    check_model(model)
    prompt, prompt_length = as_prompt(prompts, lengths)
    shared, shared_length = (None, 0) if prefix is None else as_prefix(prefix)
    new = as_count("max_new_tokens", max_new_tokens)
    rows = prompt.tokens.shape[0]
    chunk = default_chunk(rows) if prefill_chunk is None else as_count("prefill_chunk", prefill_chunk)
    samples = 1 if num_samples is None else as_count("num_samples", num_samples)
    sampling = as_sampling(temperature, top_k, top_p, min_p, repetition_penalty, ctx)
    stops = as_stop_tokens(stop_tokens)
    limit = check_room(model, shared_length + prompt_length, new)
    key = None if sampling.temperature is None or ctx is None else ctx.make_rng("sample")
    pad = np.int32(as_int("pad_token", pad_token))

    boundary = getattr(model, "rotary_boundary", None)
    room = rounded_lengths(prompt_length, shared_length, new, chunk, limit, boundary)
    rules = get_logical_axis_rules()
    setup = Setup(
        cache_length=room.cache,
        chunk=chunk,
        width=room.new,
        num_samples=samples,
        logprobs=bool(return_logprobs),
        penalty=sampling.repetition_penalty is not None,
        aligned=not is_tracer(prompt.lengths) and bool((prompt.lengths == prompt_length).all()),
        rules=rules,
    )
    pure = Module.partition(model)
    shared = None if shared is None else padded(shared, room.prefix)
    loop, unstacked = read(pure, padded(prompt, room.prompt + 1), shared, pad, setup=setup)
    # A scan over layers would copy the whole cache for each token. The copy of the weights lives as long as this call
    # and costs one pass over them, about as much as one token. Keeping it for the next call would hold the weights
    # twice in the meantime, and would have to notice every update.
    pure = unstacked or pure

    pace = pace_of(new, stops is not None, stream is not None, target().platform)
    keyed_fn = None if logits_fn is None else Keyed(logits_fn, "logits_fn")
    options: Any = {"logits_fn": keyed_fn, "pace": pace, "rules": rules}

    def advance(loop: LoopState, until: int) -> tuple[LoopState, Column]:
        return write(pure, loop, np.int32(until), sampling, key, stops, pad, **options)

    wanted = _Wanted((rows,) if num_samples is None else (rows, samples), new)
    if stream is None:
        loop, _ = advance(loop, new)
    elif is_tracer(loop.step):
        raise ValueError(STREAM_IN_TRANSFORM)
    else:
        loop = _streamed(advance, loop, new, lambda tokens: stream(wanted.rows(np.asarray(tokens))))
    _warn_of_broken_rows(loop.broken)
    tokens = wanted.columns(loop.tokens)
    return tokens if loop.logprobs is None else (tokens, wanted.columns(loop.logprobs))


class _Wanted(NamedTuple):
    """The part of the loop's arrays that the caller gets: the shape of the texts, and the number of new tokens.

    The loop may have more rows and columns, because both are rounded up.
    """

    shape: tuple[int, ...]
    new: int

    def rows(self, array: Any) -> Any:
        """Returns an array `[rows, ...]` of the loop as `[*shape, ...]`."""
        shape = (*self.shape, *array.shape[1:])
        # On a GPU, even a slice of everything is an operation that takes as long as half a token.
        return array if array.shape == shape else array[: math.prod(self.shape)].reshape(shape)

    def columns(self, array: jax.Array) -> jax.Array:
        """Returns an array `[rows, width]` of the loop as `[*shape, new]`."""
        shape = (*self.shape, self.new)
        return array if array.shape == shape else _cut(array, shape)


@functools.partial(jax.jit, static_argnums=1)
def _cut(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    # Compiled, because slices and reshapes one by one take the host longer than the device.
    return array[: math.prod(shape[:-1]), : shape[-1]].reshape(shape)


def _streamed(
    advance: Callable[[LoopState, int], tuple[LoopState, Column]],
    loop: LoopState,
    new: int,
    deliver: Callable[[jax.Array], None],
) -> LoopState:
    """Writes one token per call of the compiled loop, and delivers each.

    The next step is started before the tokens of the last are delivered, so that the device does not wait for the
    receiver. After every row has stopped, one such step finds nothing to do.
    """
    loop, step = advance(loop, 1)
    for until in range(2, new + 1):
        loop, later = advance(loop, until)
        deliver(step.tokens)
        if step.is_last:
            return loop
        step = later
    deliver(step.tokens)
    return loop


def _warn_of_broken_rows(broken: jax.Array) -> None:
    if is_tracer(broken) or not (broken.is_fully_addressable or broken.is_fully_replicated):
        return  # inside a transform, or split over processes: this one cannot know
    rows = np.flatnonzero(np.asarray(broken))
    if rows.size:
        warnings.warn(NOT_FINITE.format(rows=", ".join(map(str, rows))), RuntimeWarning, stacklevel=3)
