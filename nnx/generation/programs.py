"""The compiled functions of generation: read the prompts, write tokens.

*Reading* (prefill) appends all tokens of a prompt but the last to the cache, and ignores the logits, so that XLA drops
the output layer from it. *Writing* is a loop: it decodes the newest token, which at first is the prompt's last, chooses
the next one, and stops when every row has stopped. `LoopState` is what the loop carries; its buffers are donated, so a
cache is written in place and never copied.

Both are pure functions of a `Pure`. The model is rebuilt inside, in evaluation mode, wherever a trace begins: a
`decode` that changes its Module changes the copy.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nnx.core.module.modes import set_mode
from nnx.core.module.module import Module
from nnx.core.sizes import size_in_bytes
from nnx.core.state.pure import Pure
from nnx.core.statics.statics import Keyed
from nnx.generation.buckets import Pace, rows_to_run
from nnx.generation.sampling import Sampling, choose
from nnx.nn.attention.kv_cache import LayerCache
from nnx.sharding.rules import Rules
from nnx.sharding.target import target

TWO_BATCH_AXES = (
    "{name}.init_cache: expected arrays with at most one axis of the size of the batch, got shapes {few} for a batch "
    "of 2 and {many} for a batch of 3."
)
WRONG_LOGITS = (
    "{name}.decode: expected logits of shape {expected} (batch, length, vocab) for {count} tokens, got {got}."
)


class Setup(NamedTuple):
    """What is static about a call.

    Attributes:
        cache_length: the number of slots of the cache.
        chunk: the number of prompt tokens to read at a time.
        width: the number of columns for new tokens.
        num_samples: the number of texts to write for each prompt.
        logprobs: whether to record log-probabilities.
        penalty: whether to record which tokens occurred.
        aligned: whether all prompts have the same length, so that all rows always hold equally many tokens.
        rules: the logical axis rules. A model may read them while it is traced, so they are part of the key.
    """

    cache_length: int
    chunk: int
    width: int
    num_samples: int
    logprobs: bool
    penalty: bool
    aligned: bool
    rules: Rules


class LoopState(NamedTuple):
    """The state of the writing loop.

    Attributes:
        step: the number of tokens written to each row.
        cache: the model's cache.
        newest: int32 `[rows]`, the token to decode next.
        finished: boolean `[rows]`, the rows that have stopped.
        broken: boolean `[rows]`, the rows that stopped because their logits were not finite.
        tokens: int32 `[rows, width]`, the new tokens.
        logprobs: float32 `[rows, width]`, their log-probabilities, or None.
        seen: boolean `[rows, vocab]`, the tokens that occurred in each row, or None.
    """

    step: jax.Array
    cache: Any
    newest: jax.Array
    finished: jax.Array
    broken: jax.Array
    tokens: jax.Array
    logprobs: jax.Array | None
    seen: jax.Array | None


class Column(NamedTuple):
    """The result of writing that the host looks at: the last column, `[rows]`, and whether every row has stopped."""

    tokens: jax.Array
    is_last: jax.Array


class Prompt(NamedTuple):
    """Padded texts to continue: tokens `[batch, length]` and the number of real ones in each row, both int32."""

    tokens: Any
    lengths: Any


@functools.partial(jax.jit, static_argnames="setup")
def read(
    pure: Pure, prompts: Prompt, prefix: Prompt | None, pad_token: Any, *, setup: Setup
) -> tuple[LoopState, Pure | None]:
    """Reads the prompts.

    Returns:
        The state in which the writing loop begins, and the model with its layers in a list, one array per layer and
        parameter; None in place of a model that has no scan over layers.
    """
    unstacked = _unstacked(pure)
    pure = unstacked or pure
    batch = prompts.tokens.shape[0]
    cache = _rebuilt(pure).init_cache(batch if prefix is None else 1, setup.cache_length)
    if prefix is not None:
        cache = _append(pure, prefix.tokens, prefix.lengths, cache, setup.chunk, first=True)
        cache = _take_rows(pure, cache, jnp.zeros(batch, jnp.int32), setup)
    if prompts.tokens.shape[1] > 1:
        cache = _append(pure, prompts.tokens[:, :-1], prompts.lengths - 1, cache, setup.chunk, first=prefix is None)
    newest = jnp.take_along_axis(prompts.tokens, prompts.lengths[:, None] - 1, axis=1)[:, 0]
    seen = _tokens_seen(pure, cache, prompts, prefix) if setup.penalty else None

    # From here on there is one row per text to write. Their prompts have been read once.
    wanted = batch * setup.num_samples
    rows = rows_to_run(wanted, target().platform, _bytes(cache) // batch, _bytes(pure))
    if rows != batch:
        source = jnp.minimum(jnp.arange(rows) // setup.num_samples, batch - 1)
        cache = _take_rows(pure, cache, source, setup)
        newest = newest[source]
        seen = None if seen is None else seen[source]
    loop = LoopState(
        step=jnp.zeros((), jnp.int32),
        cache=_promised(cache, aligned=True) if setup.aligned else cache,
        newest=newest,
        finished=jnp.arange(rows) >= wanted,
        broken=jnp.zeros(rows, bool),
        tokens=jnp.full((rows, setup.width), pad_token, jnp.int32),
        logprobs=jnp.zeros((rows, setup.width), jnp.float32) if setup.logprobs else None,
        seen=seen,
    )
    return loop, unstacked


@functools.partial(jax.jit, static_argnames=("logits_fn", "pace", "rules"), donate_argnames="loop")
def write(
    pure: Pure,
    loop: LoopState,
    until: Any,
    sampling: Sampling,
    key: jax.Array | None,
    stop_tokens: Any,
    pad_token: Any,
    *,
    logits_fn: Keyed | None,
    pace: Pace,
    rules: Rules,
) -> tuple[LoopState, Column]:
    """Writes tokens until there are `until` of them in each row, or every row has stopped.

    Whether to go on is decided after each group of steps. Steps that turn out to be too many write padding.
    """
    # A key per row: what is drawn for a row does not depend on the number of rows.
    rows = jnp.arange(loop.newest.shape[0])
    row_keys = None if key is None else jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
    writer = _Writer(pure, until, sampling, row_keys, stop_tokens, pad_token, logits_fn)

    def goes_on(loop: LoopState) -> jax.Array:
        return (loop.step < until) & ~jnp.all(loop.finished)

    def write_group(loop: LoopState) -> LoopState:
        first = loop.step
        # The loop counts by itself: a second counter among its values would be one more kernel per token.
        loop = jax.lax.fori_loop(0, pace.steps, lambda i, loop: writer.step(loop, first + i), loop)
        return loop._replace(step=first + pace.steps)

    loop = write_group(loop) if pace.is_one_group else jax.lax.while_loop(goes_on, write_group, loop)
    return loop, Column(jnp.take(loop.tokens, until - 1, axis=1), jnp.all(loop.finished))


class _Writer(NamedTuple):
    """One step of the loop: what it needs besides the loop's state."""

    pure: Pure
    until: Any
    sampling: Sampling
    row_keys: jax.Array | None
    stop_tokens: Any
    pad_token: Any
    logits_fn: Keyed | None

    def step(self, loop: LoopState, step: jax.Array) -> LoopState:
        """Decodes the newest token of every row and chooses the next one."""
        finished, seen = loop.finished, loop.seen
        raw, cache = _decoded(self.pure, loop.newest[:, None], loop.cache)
        logits = raw[:, 0]  # [rows, vocab]
        keys = None if self.row_keys is None else jax.vmap(jax.random.fold_in, (0, None))(self.row_keys, step)
        logits_fn = None if self.logits_fn is None else self.logits_fn.value
        token, valid = choose(logits, self.sampling, keys, seen, logits_fn)

        idle = finished | (step >= self.until)
        broken = loop.broken | (~idle & ~valid)
        tokens = loop.tokens.at[:, step].set(jnp.where(idle | broken, self.pad_token, token))
        logprobs = loop.logprobs
        if logprobs is not None:
            logprob = jnp.where(idle, 0, _logprob(logits.astype(jnp.float32), token))
            logprobs = logprobs.at[:, step].set(jnp.where(broken, jnp.nan, logprob))
        finished = finished | broken
        if self.stop_tokens is not None:
            finished = finished | jnp.any(token[:, None] == self.stop_tokens, axis=-1)
        if seen is not None:
            seen = seen.at[jnp.arange(token.shape[0]), token].set(True)
        return loop._replace(
            cache=cache, newest=token, finished=finished, broken=broken, tokens=tokens, logprobs=logprobs, seen=seen
        )


def _logprob(logits: jax.Array, token: jax.Array) -> jax.Array:
    """Returns the log-probability of a token of each row, before any rule is applied."""
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _unstacked(pure: Pure) -> Pure | None:
    """Returns the model with its layers in a list; None if it has no `unscanned` or if its layers already are."""
    model: Any = pure.merge()
    if not callable(getattr(model, "unscanned", None)):
        return None
    unscanned = model.unscanned()
    # A model that is returned as it is would be copied: the outputs of a compiled function are new arrays.
    return None if unscanned is model else Module.partition(unscanned)


def _rebuilt(pure: Pure) -> Any:
    """Returns the model at the current trace level, in evaluation mode."""
    model = pure.merge()
    set_mode(model, training=False)
    return model


def _decoded(pure: Pure, tokens: jax.Array, cache: Any, lengths: jax.Array | None = None) -> tuple[jax.Array, Any]:
    model = _rebuilt(pure)
    logits, cache = model.decode(tokens, cache, lengths=lengths)
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape:
        expected = f"({tokens.shape[0]}, {tokens.shape[1]}, vocab)"
        name = type(model).__name__
        raise ValueError(WRONG_LOGITS.format(name=name, expected=expected, count=tokens.shape, got=logits.shape))
    return logits, cache


def _append(pure: Pure, tokens: jax.Array, lengths: jax.Array, cache: Any, chunk: int, first: bool) -> Any:
    """Returns the cache after `lengths` of the tokens in each row, read in chunks; `first` if it holds none yet."""
    if tokens.shape[1] <= chunk:
        cache = _decoded(pure, tokens, _promised(cache, is_empty=first), lengths)[1]
        return _promised(cache, is_empty=False)
    tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % chunk)))

    def read_chunk(index: jax.Array, cache: Any) -> Any:
        part = jax.lax.dynamic_slice_in_dim(tokens, index * chunk, chunk, axis=1)
        return _decoded(pure, part, cache, jnp.clip(lengths - index * chunk, 0, chunk))[1]

    # The number of chunks is a value, not a shape: chunks of padding alone are not computed.
    return jax.lax.fori_loop(0, -(-jnp.max(lengths) // chunk), read_chunk, cache)


def _promised(cache: Any, **promises: bool) -> Any:
    """Returns a cache whose layers make these promises: `aligned`, `is_empty`."""

    def is_layer(node: Any) -> bool:
        return isinstance(node, LayerCache)

    return jax.tree.map(
        lambda node: dataclasses.replace(node, **promises) if is_layer(node) else node, cache, is_leaf=is_layer
    )


def _take_rows(pure: Pure, cache: Any, source: jax.Array, setup: Setup) -> Any:
    """Returns a cache whose row `i` is row `source[i]` of this one."""

    def shapes(batch: int) -> list[Any]:
        return jax.tree.leaves(jax.eval_shape(lambda: _rebuilt(pure).init_cache(batch, setup.cache_length)))

    leaves, treedef = jax.tree.flatten(cache)
    taken = []
    for leaf, few, many in zip(leaves, shapes(2), shapes(3), strict=True):
        # A cache can be any pytree. Its batch axis is the one whose size follows the batch.
        axes = [axis for axis, sizes in enumerate(zip(few.shape, many.shape, strict=True)) if sizes[0] != sizes[1]]
        if len(axes) > 1:
            name = type(_rebuilt(pure)).__name__
            raise ValueError(TWO_BATCH_AXES.format(name=name, few=few.shape, many=many.shape))
        taken.append(jnp.take(leaf, source, axis=axes[0]) if axes else leaf)
    return treedef.unflatten(taken)


def _tokens_seen(pure: Pure, cache: Any, prompts: Prompt, prefix: Prompt | None) -> jax.Array:
    """Returns which tokens occur in each row, boolean `[batch, vocab]`."""
    batch = prompts.tokens.shape[0]
    one = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    vocab = jax.eval_shape(lambda tokens, cache: _decoded(pure, tokens, cache)[0], one, cache).shape[-1]
    seen = jnp.zeros((batch, vocab), bool)
    for text in (prompts,) if prefix is None else (prefix, prompts):
        is_real = jnp.arange(text.tokens.shape[1]) < text.lengths[:, None]
        seen = seen.at[jnp.arange(batch)[:, None], text.tokens].max(is_real)
    return seen


def _bytes(tree: Any) -> int:
    return sum(size_in_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))
