"""Observed Modules: how `nnx.capture` and its kin see the calls of submodules, with no hook on other calls.

A transform that looks inside runs its function on rebuilt Modules, as every transform does. It gives the
selected ones an *observed class*: a subclass of their own class, whose methods pass through the Module's *observers*.
These are a static attribute, so they are still there when an inner transform rebuilds the Module, and they are part of
what the inner transform compiles for. All other Modules keep their classes, and nothing is added to their calls.

An observer may keep what it saw in an *observation*: a container that it adds to the Module. Observations leave
transforms the way all new state does. scan and vmap stack them, and `stateful=False` keeps them; a body that may run
any number of times has no place for them. A *probe* is the reverse, a value that an observer adds to what the Module
returns: a gradient with respect to the probe is the gradient of the output.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from nnx.core.errors import TraceContextError
from nnx.core.module.attributes import assign, store
from nnx.core.module.dict_sequence import Dict
from nnx.core.module.info import DerivedClass, derive_class, info_of
from nnx.core.module.kinds import STATIC
from nnx.core.module.scopes import function_in
from nnx.core.state.updates import remove
from nnx.core.structure.structure import GraphKey
from nnx.core.trace import same_level
from nnx.core.variables.variables import Node, Spec

OBSERVERS = "_nnx_observers"
OBSERVATION = "_nnx_observation_{position}_{number}"
PROBE = "_nnx_probe_{position}_{number}"

INSIDE_BODY = """{transform} cannot record {path!r} ({kind}): it was called inside {body}, {reason}. Narrow `where=` \
so that it does not select this Module, or use nnx.scan or nnx.vmap, which stack the values."""

RUNS_ANY_NUMBER = "whose body may run any number of times or not at all, so there is no single value to return"
RUNS_PER_DEVICE = "where every device has its own part of the value"


OTHER_LEVEL = """{transform} cannot record {path!r} ({kind}): it was called inside a raw JAX transform (jax.jit, \
jax.vmap, jax.lax.scan ...), and what a Module holds cannot be returned from there. Use the transform of that name in \
nnx and pass the Module to it as an argument, or narrow `where=` so that it does not select this Module."""


class Observation(Node):
    """What an observer saw in one call of a Module; `stacked` counts the axes that scan and vmap have put in front."""

    __slots__ = ()
    is_input = False

    def __init__(self, value: Any, stacked: int = 0):
        super().__init__(value, stacked=stacked)


class Probe(Observation):
    """Zeros to add to what one call of a Module returns."""

    __slots__ = ()
    is_input = True


class Observer:
    """What happens in place of the calls of one Module. Observers are static values, compared by their keys.

    Args:
        transform: the transform's name, for errors.
        path: the path of the Module.
        methods: the names of the methods whose calls are observed.
        key: everything else that two observers must agree on to do the same.
    """

    __slots__ = ("transform", "path", "methods", "key")

    def __init__(self, transform: str, path: str, methods: tuple[str, ...], key: Any = None):
        self.transform, self.path, self.methods, self.key = transform, path, methods, key

    def run(self, module: Any, position: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs in place of a call; `position` is that of the observer among the Module's."""
        raise AssertionError("every observer defines what happens in place of a call")

    def skips(self) -> bool:
        """Whether a body that may run any number of times drops the observations; otherwise they are an error there."""
        return False

    def _parts(self) -> Any:
        return type(self), self.transform, self.path, self.methods, self.key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Observer) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())

    def __repr__(self) -> str:
        return f"<{self.transform} of {self.path!r}>"


# Observed classes


class Observed(DerivedClass):
    """The base of observed classes."""

    __slots__ = ()
    _nnx_original: type


class _ObservedDict(Observed):
    """The base for Dicts, whose attributes are their items: the observers and their observations are not among them."""

    __slots__ = ()

    def __iter__(self) -> Any:
        return (key for key in Dict.__iter__(self) if not key.startswith("_nnx_"))  # pyright: ignore[reportArgumentType]

    def __len__(self) -> int:
        return sum(1 for _ in self)


def observed_class(cls: type, methods: tuple[str, ...]) -> type:
    """Returns the subclass of a Module class whose methods pass through the observers; always the same one.

    It is kept on the class itself, so that it lives as long as the class does and no cache keeps either alive.
    """
    if "_nnx_observed" not in cls.__dict__:
        type.__setattr__(cls, "_nnx_observed", {})
    known: dict[tuple[str, ...], type] = cls.__dict__["_nnx_observed"]
    if methods not in known:
        base = _ObservedDict if issubclass(cls, Dict) else Observed
        observed = derive_class(cls, base, _nnx_original=cls, __slots__=())
        for name in methods:
            original = function_in(next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None))
            if callable(original):
                setattr(observed, name, _observed_method(observed, name, original))
        known.setdefault(methods, observed)  # another thread may have made one by now
    return known[methods]


def _observed_method(cls: type, name: str, original: Any) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        observers = self.__dict__[OBSERVERS]
        call = getattr(super(cls, self), name)
        # The first observer belongs to the outermost transform, so it wraps the others and sees their result.
        for position, observer in reversed(list(enumerate(observers))):
            if name in observer.methods:
                call = functools.partial(observer.run, self, position, call)
        return call(*args, **kwargs)

    return functools.wraps(original)(method)


def observe(module: Any, observer: Observer) -> None:
    """Adds an observer to a Module of the current trace level, after those it has."""
    _set_observers(module, (*module.__dict__.get(OBSERVERS, ()), observer))


def release(modules: Iterable[Any], observers: Collection[Observer]) -> None:
    """Removes these observers from Modules, and what they have added."""
    for module in modules:
        held = module.__dict__.get(OBSERVERS, ()) if isinstance(module, Observed) else ()
        if held and held[-1] in observers:
            for prefix in (OBSERVATION, PROBE):
                for name in _numbered(module, prefix, len(held) - 1):
                    remove(module, name)
            _set_observers(module, held[:-1])


def _set_observers(module: Any, observers: tuple[Observer, ...]) -> None:
    cls = type(module)._nnx_original if isinstance(module, Observed) else type(module)
    if observers:
        cls = observed_class(cls, tuple(sorted({name for observer in observers for name in observer.methods})))
        store(module, OBSERVERS, STATIC, observers)
    else:
        remove(module, OBSERVERS)
    object.__setattr__(module, "__class__", cls)
    info_of(module).changed()


# Observations


def check_recordable(module: Any, position: int) -> None:
    """Raises TraceContextError if a Module belongs to another trace level, so that it cannot hold a new observation."""
    if not same_level(info_of(module).level):
        observer, kind = module.__dict__[OBSERVERS][position], type(module).__name__
        raise TraceContextError(OTHER_LEVEL.format(transform=observer.transform, path=observer.path, kind=kind))


def _numbered(module: Any, prefix: str, position: int) -> list[str]:
    """Returns the names of an observer's observations or probes on a Module, in order."""
    kinds, names = info_of(module).kinds, []
    while (name := prefix.format(position=position, number=len(names))) in kinds:
        names.append(name)
    return names


def add_observation(module: Any, position: int, value: Any) -> None:
    """Keeps a value as the next observation of an observer.

    Raises:
        TraceContextError: the Module belongs to another trace level.
    """
    check_recordable(module, position)
    number = len(_numbered(module, OBSERVATION, position))
    assign(module, OBSERVATION.format(position=position, number=number), Observation(value))


def observations_of(module: Any) -> list[tuple[Any, int]]:
    """Returns the observations of a Module's last observer, each with the number of its stacked axes."""
    position = len(module.__dict__[OBSERVERS]) - 1
    kinds = info_of(module).kinds
    names = _numbered(module, OBSERVATION, position)
    return [(module.__dict__[name], kinds[name].metadata["stacked"]) for name in names]


def add_probes(module: Any, probes: Sequence[Any], stacked: Sequence[int]) -> None:
    """Gives the last observer of a Module one probe for each call it will see."""
    position = len(module.__dict__[OBSERVERS]) - 1
    for number, (value, count) in enumerate(zip(probes, stacked)):
        assign(module, PROBE.format(position=position, number=number), Probe(value, count))


def next_probe(module: Any, position: int) -> Any:
    """Returns the probe for the call whose observation comes next, or None."""
    number = len(_numbered(module, OBSERVATION, position))
    return module.__dict__.get(PROBE.format(position=position, number=number))


def is_observation(kind: Any) -> bool:
    """Whether an attribute of this kind is an observation or a probe."""
    return type(kind) is Spec and issubclass(kind.type, Observation)


# What transforms do with observations


def is_sliced(leaf: Observation, size: int | None) -> bool:
    """Whether a scan or vmap of this size, if it is known, slices an observation or probe on entry.

    Observations of earlier calls, and probes for another scan with another length, just pass through.
    """
    if not leaf.is_input or leaf.stacked == 0:
        return False
    return size is None or all(value.shape[0] == size for value in leaf.value)


def restacked(key: GraphKey, groups: Iterable[tuple[int, Any]], by: int) -> GraphKey:
    """Returns a structure in which the stacked observations and probes have `by` more stacked axes."""
    specs = {}
    for cell, group in groups:
        kind = key.kinds[cell]
        if isinstance(group, int) and is_observation(kind):
            specs[cell] = Spec.of(kind.type, {**kind.metadata, "stacked": kind.metadata["stacked"] + by})
    return key.with_specs(specs)


def refuse_observations(entered: Any, body: str, reason: str = RUNS_ANY_NUMBER) -> None:
    """Raises ValueError if a body from which observations cannot be returned has added some.

    Args:
        entered: the Modules of the body.
        body: the name of the transform that runs the body.
        reason: why observations cannot be returned, for the error.
    """
    for number, module in enumerate(entered.graph.modules):
        if not isinstance(module, Observed):
            continue
        for position, observer in enumerate(module.__dict__[OBSERVERS]):
            for name in _numbered(module, OBSERVATION, position):
                if entered.key.cell_at(number, name) is not None:
                    continue
                if not observer.skips():
                    kind = type(module).__name__
                    text = {"transform": observer.transform, "path": observer.path, "kind": kind}
                    raise ValueError(INSIDE_BODY.format(**text, body=body, reason=reason))
                remove(module, name)


def has_observations(rewrite: Any) -> bool:
    """Returns whether a call recorded something, which comes out even where all changes are discarded."""
    return rewrite is not None and any(is_observation(rewrite.key.cells[cell].kind) for cell in rewrite.outputs())


def keep_observations(modules: Callable[[], Sequence[Any]], rewrite: Any, values: Sequence[Any]) -> None:
    """Writes the observations of a call into the caller's Modules, where everything else is discarded.

    Args:
        modules: returns the Modules before, by number.
        rewrite: what the call did to their structure, or None.
        values: what came out of it.
    """
    if rewrite is None:
        return
    for cell, value in zip(rewrite.outputs(), values):
        number, name, kind = rewrite.key.cells[cell]
        if is_observation(kind) and number < rewrite.old_count:
            module = modules()[number]
            check_recordable(module, len(module.__dict__[OBSERVERS]) - 1)
            store(module, name, kind, value)
