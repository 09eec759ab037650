"""Context: the object that carries randomness and run-time flags.

A *stream* is a key and a counter: each `make_rng` folds the next count into the key. To *fork* a stream is to spend one
count on the key of a new stream, so parent and fork never produce the same key.
"""

import copy
import dataclasses
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter, index, length_hint
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.absent import check_is_here
from nnx.core.errors import CONTEXT_AT_OTHER_LEVEL, TraceContextError
from nnx.core.hints.hints import add_hints
from nnx.core.hints.table import CONTEXT as HINTS
from nnx.core.repr import short
from nnx.core.statics.statics import Keyed, own_copy
from nnx.core.trace import NO_GUARD, current_level, same_level, transfer_guard
from nnx.core.user_warnings import warn_user

RngFilter = Any
"""What selects streams: None, `...`, a name, `f(name) -> bool`, a sequence of these, or a mapping `{filter: bool}`."""

BAD_SEED = """The stream {name!r} was given the seed {value}. A seed is an int, a typed key (jax.random.key(0)) or \
a legacy uint32 key (jax.random.PRNGKey(0))."""

SEED_PER_STREAM = " For a mapping from streams to seeds, write nnx.context(**seeds)."

NOT_A_CONSTRUCTOR = """nnx.Context is the type of a Context, and `nnx.context` makes one: nnx.context(key, \
flags={"deterministic": False}), or with a seed per stream, nnx.context(params=key, dropout=1)."""

SHARED_STREAM = """{transform}: a key was drawn from the stream {name!r}, which `split_rngs` does not select, so every \
step or member draws the same key. To draw a different key in each, add the stream: `split_rngs={name!r}`, or a tuple \
of names. If they are meant to share it, say so: `split_rngs={{{name!r}: False}}`."""


_fold_in = jax.jit(jax.random.fold_in)  # one dispatch where the eager function makes several


@dataclasses.dataclass(frozen=True)
class SharedBy:
    """A scan or vmap whose steps or members all draw the same keys from a stream.

    Attributes:
        transform: the transform and its function, for the warning.
        drawn: the streams drawn from, if it is not yet known whether that was a mistake; otherwise every draw warns.
        warned: the streams it has warned about.
    """

    transform: str
    drawn: set[str] | None = dataclasses.field(default=None, compare=False, repr=False)
    warned: set[str] = dataclasses.field(default_factory=set, compare=False, repr=False)

    def note(self, name: str) -> None:
        """Notes a draw from a stream."""
        if self.drawn is None:
            self.warn(name)
        else:
            self.drawn.add(name)

    def warn(self, name: str) -> None:
        """Warns about a stream, once."""
        if name not in self.warned:
            warn_user(SHARED_STREAM.format(transform=self.transform, name=name))
            # Noted last: where warnings are errors, a call that is made again without a kept trace has to raise again.
            self.warned.add(name)


class Stream:
    """A key and the number of keys drawn from it, which several threads can draw at the same time.

    `shared_by` is the scan or vmap whose runs all get the same stream, if one does and was not told to.
    """

    __slots__ = ("key", "shared_by", "counts")

    def __init__(self, key: Any, count: int = 0, shared_by: SharedBy | None = None):
        self.key: Any = key
        self.shared_by = shared_by
        self.count = count

    @property
    def count(self) -> int:
        """How many keys have been drawn."""
        return sys.maxsize - length_hint(self.counts)

    @count.setter
    def count(self, count: int) -> None:
        # The counts that are left. `next` takes one inside a single C call, so no other thread can take the same one,
        # and unlike `itertools.count`, a range can be asked where it is.
        self.counts: Iterator[int] = iter(range(index(count), sys.maxsize))

    def take(self, n: int) -> int:
        """Skips `n` counts, which are the caller's, and returns the first of them."""
        taken = list(islice(self.counts, n))  # one C call, so they are consecutive
        return taken[0] if taken else self.count

    def next(self) -> Any:
        """Draws a key."""
        key, count = self.key, next(self.counts)
        return _fold_in(key, count if transfer_guard() in NO_GUARD else jax.device_put(count))

    def __reduce__(self) -> Any:
        return (Stream, (self.key, self.count, self.shared_by))


class Context:
    """Named random streams and flags, for one trace level. `nnx.context` makes one.

    Lifted transforms take it as an argument and pass a fork of it to the function. Under a raw JAX transform, pass
    `ctx.partition()` and call `.merge()` on it inside.

    >>> ctx = nnx.context(0, flags={"deterministic": True})
    >>> first, second = ctx.make_rng("params"), ctx.make_rng("params")
    >>> bool(first == second), ctx.get_flag("deterministic")
    (False, True)
    """

    __slots__ = ("_streams", "_flags", "_level", "_def", "_live", "__weakref__")

    def __new__(cls, *args: Any, **kwargs: Any) -> "Context":
        streams = args[0] if len(args) == 2 and not kwargs else None
        if type(streams) is not dict or not all(type(stream) is Stream for stream in streams.values()):
            raise TypeError(NOT_A_CONSTRUCTOR)
        return object.__new__(cls)

    def __init__(self, streams: dict[str, Stream], flags: Mapping[str, Any]):
        self._streams = streams
        self._flags = dict(flags)
        self._level = current_level()
        self._def: ContextDef | None = None
        self._live: Keyed | None = None  # the flags as they were when `_def` was made, if their values can change

    def make_rng(self, name: str) -> jax.Array:
        """Returns a new key from a stream, different every time.

        Raises:
            ValueError: there is no such stream.
            TraceContextError: the Context was made at another trace level.

        Inside scan and vmap, it warns once per function about a stream that `split_rngs` does not select: all steps or
        members draw the same key from it.
        """
        self.check_level(name)
        stream = self._streams.get(name)
        if stream is None:
            known = ", ".join(map(repr, self._streams)) or "none"
            raise ValueError(
                f"Unknown Rng Stream: {name}. The streams of this Context are: {known}. "
                f"Give it a seed where the Context is made: nnx.context(..., {name}=0)."
            )
        if stream.shared_by is not None:
            stream.shared_by.note(name)
        return stream.next()

    def check_level(self, name: str) -> None:
        """Raises TraceContextError if the Context was made at another trace level; `name` is the stream asked for."""
        if not same_level(self._level):
            raise TraceContextError(CONTEXT_AT_OTHER_LEVEL.format(name=name))

    def has_rng(self, name: str) -> bool:
        """Whether there is a stream with this name."""
        return name in self._streams

    def has_flag(self, name: str) -> bool:
        """Whether the flag is set, to any value."""
        return name in self._flags

    def get_flag(self, name: str, default: Any = None) -> Any:
        """Returns the value of a flag, or `default` if it is not set."""
        return self._flags.get(name, default)

    @property
    def flags(self) -> Mapping[str, Any]:
        """All flags."""
        return dict(self._flags)

    def copy(self, *, flags: Mapping[str, Any] | None = None) -> "Context":
        """Returns a Context that shares the streams and has these flags in addition."""
        self.check_level("...")
        return Context(self._streams, {**self._flags, **(flags or {})})

    def fork(self) -> "Context":
        """Returns an independent Context at this level, with the same flags."""
        return self.partition().merge()

    def partition(self) -> "PureContext":
        """Returns a fork as `(keys, ctxdef)`, which can pass through any JAX transform."""
        self.check_level("...")
        return PureContext({name: stream.next() for name, stream in self._streams.items()}, self.definition())

    def definition(self) -> "ContextDef":
        """Returns the static half; it is made again only if the value of a flag was changed in place."""
        if self._def is None or (self._live is not None and not self._live.is_current()):
            shared = tuple([(name, by) for name, s in self._streams.items() if (by := s.shared_by) is not None])
            self._def = ContextDef(self._flags, tuple(self._streams), shared)
            self._live = Keyed(tuple(self._flags.values()), "flags") if self._def.is_watched else None
        return self._def

    def fork_data(self) -> list[tuple[Any, Any]]:
        """Returns a fork as data: key and count of each stream, to be folded later by `ContextDef.from_fork`."""
        self.check_level("...")
        forks = [(stream.key, next(stream.counts)) for stream in self._streams.values()]
        # A Python number in a call is an implicit transfer. An explicit one takes longer than the rest of a fork, so it
        # is made only where a guard asks for it.
        return forks if transfer_guard() in NO_GUARD else [(key, jax.device_put(count)) for key, count in forks]

    def split(self, n: int, filter: RngFilter = ...) -> "PureContext":
        """Returns a fork in which each stream the filter selects has `n` stacked keys, for a manual vmap or scan."""
        if not isinstance(n, (int, np.integer)) or n < 1:
            raise ValueError(f"ctx.split(n) makes n keys per stream, so n must be a positive int; got {n!r}.")
        keys, ctxdef = self.partition()
        selects = rng_predicate(filter)
        return PureContext({k: jax.random.split(key, n) if selects(k) else key for k, key in keys.items()}, ctxdef)

    def __reduce__(self) -> Any:
        return (Context, (self._streams, self._flags))

    def __repr__(self) -> str:
        streams = [f"{name}: {stream.count} drawn" for name, stream in self._streams.items()]
        flags = [f"{name}={value!r}" for name, value in self._flags.items()]
        return f"Context({', '.join([*streams, *flags])})"


add_hints(Context, HINTS)

streams_of: Callable[[Any], dict[str, Stream]] = attrgetter("_streams")
"""Returns the live streams of a Context, by name."""


class ContextDef:
    """The static half of a Context: its flags and the names of its streams. Hashable, a pytree without leaves.

    `shared` are the streams that all steps or members of an enclosing scan or vmap share. It is part of the definition
    so that forks warn as well.
    """

    __slots__ = ("_flags", "streams", "shared")

    streams: tuple[str, ...]

    def __init__(
        self, flags: Mapping[str, Any], streams: tuple[str, ...], shared: tuple[tuple[str, SharedBy], ...] = ()
    ):
        # A snapshot, because the caller's values may change.
        self._flags = tuple([(name, Keyed(own_copy(value), f"flags[{name!r}]")) for name, value in flags.items()])
        self.streams = streams
        self.shared = shared

    @property
    def is_watched(self) -> bool:
        """Whether the value of a flag can be changed in place."""
        return any(flag.watched for _, flag in self._flags)

    def flags(self) -> dict[str, Any]:
        """Returns the flags; values that can change are copies."""
        return {name: own_copy(flag.value) for name, flag in self._flags}

    def sharing(self, names: Sequence[str], shared_by: SharedBy) -> "ContextDef":
        """Returns this definition with some streams shared by the runs of a scan or vmap."""
        definition = copy.copy(self)
        definition.shared = tuple({**dict(self.shared), **dict.fromkeys(names, shared_by)}.items())
        return definition

    def merge(self, keys: Mapping[str, Any]) -> Context:
        """Returns a Context with these keys as its streams."""
        ctx = Context({name: Stream(key) for name, key in keys.items()}, self.flags())
        for name, shared_by in self.shared:
            if name in keys:
                ctx._streams[name].shared_by = shared_by
        if tuple(keys) == self.streams and not self.is_watched:
            ctx._def = self
        return ctx

    def from_fork(self, data: Sequence[tuple[Any, Any]]) -> Context:
        """Returns the Context that `Context.fork_data` described."""
        return self.merge({name: _fold_in(*pair) for name, pair in zip(self.streams, data, strict=True)})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ContextDef) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash((self._flags, self.streams))

    def _parts(self) -> Any:
        return self.streams, self._flags, self.shared

    def __repr__(self) -> str:
        return f"ContextDef(streams={self.streams!r}, flags={self.flags()!r})"


jax.tree_util.register_static(ContextDef)


class PureContext(NamedTuple):
    """A Context as the pair of its keys and its ContextDef, which any JAX API can take.

    >>> draw = jax.jit(lambda pure: jax.random.uniform(pure.merge().make_rng("noise")))
    >>> draw(nnx.context(noise=0).partition()).shape
    ()
    """

    keys: dict[str, Any]
    ctxdef: ContextDef

    @classmethod
    def new(cls, keys: dict[str, Any], ctxdef: ContextDef) -> "PureContext":
        """Makes a PureContext of its two parts: `PureContext(keys, ctxdef)`."""
        return cls(keys, ctxdef)

    @property
    def contextdef(self) -> ContextDef:
        """An older name of `ctxdef`."""
        return self.ctxdef

    def merge(self) -> Context:
        """Returns a Context with these keys as its streams."""
        return self.ctxdef.merge(self.keys)


def context(params: Any = None, *, flags: Mapping[str, Any] | None = None, **rngs: Any) -> Context:
    """Makes a Context: named random streams and run-time flags.

    Args:
        params: the seed of the stream "params".
        flags: run-time flags, e.g. `{"deterministic": True}`.
        **rngs: the seeds of further streams. A seed is an int, a typed key, or a legacy uint32 key. Streams with equal
            ints are independent; keys are used unchanged.

    >>> ctx = nnx.context(0, dropout=1, flags={"deterministic": False})
    >>> key = ctx.make_rng("dropout")
    """
    seeds = rngs if params is None else {"params": params, **rngs}
    return Context({name: Stream(_to_key(name, seed)) for name, seed in seeds.items()}, flags or {})


def _to_key(name: str, seed: Any) -> Any:
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
        return _named_key(name, int(seed))
    if isinstance(seed, (jax.Array, np.ndarray)):
        if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
            if seed.shape == ():
                return seed
        elif seed.shape == () and jnp.issubdtype(seed.dtype, jnp.integer):
            return _named_key(name, seed)
        elif seed.shape in ((2,), (4,)) and seed.dtype == jnp.uint32:
            return seed
    text = BAD_SEED.format(name=name, value=short(seed))
    raise TypeError(text + SEED_PER_STREAM if isinstance(seed, Mapping) else text)


def _named_key(name: str, seed: Any) -> Any:
    """Returns the key of a stream seeded by an int; it depends on the name, so equal seeds make independent streams."""
    try:
        key = jax.random.key(seed)
    except AttributeError:  # under `jax.set_mesh` of devices that can hold no arrays, JAX fails somewhere inside
        check_is_here("nnx.context", jax.sharding.get_mesh())
        raise
    return key if name == "params" else jax.random.fold_in(key, zlib.crc32(name.encode()))


def rng_predicate(filter: RngFilter) -> Callable[[str], bool]:
    """Returns an RNG filter as a predicate on stream names.

    Raises:
        TypeError: `filter` is not an RNG filter.
    """
    answer_of = rng_answers(filter)
    return lambda name: bool(answer_of(name))


def rng_answers(filter: RngFilter) -> Callable[[str], bool | None]:
    """Returns a function from stream names to what an RNG filter decides about them.

    That is True, False if a mapping assigns False to the stream, or None if the filter does not mention it.

    Raises:
        TypeError: `filter` is not an RNG filter.
    """
    if filter is None:
        return lambda name: None
    if filter is ...:
        return lambda name: True
    if isinstance(filter, str):
        return lambda name: True if name == filter else None
    if isinstance(filter, Mapping):
        cases = [(rng_predicate(inner), bool(answer)) for inner, answer in filter.items()]
        return lambda name: next((answer for selects, answer in cases if selects(name)), None)
    if isinstance(filter, (Sequence, set, frozenset)):
        parts = [rng_answers(inner) for inner in filter]
        return lambda name: _any_answer([part(name) for part in parts])
    if callable(filter):
        return lambda name: True if filter(name) else None
    raise TypeError(
        f"Invalid RNG filter {short(filter)}. An RNG filter is None, `...`, the name of a stream, a function "
        "f(name) -> bool, a sequence of these, or a mapping {filter: bool}."
    )


def _any_answer(answers: list[bool | None]) -> bool | None:
    return True if True in answers else False if False in answers else None
