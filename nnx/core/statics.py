"""Static values: when two of them are equal, how a change is noticed, and how a rebuilt Module gets its own copies.

The *key* of a static value is hashable, and two values are equal when their keys are. A key is complete or it is an
identity: types count (1, 1.0 and True differ), floats compare by bit pattern, and a value compared by content
contributes everything it holds (see contents). Functions and partials are keyed by code, defaults, attributes and
closure, once per function object, because some of them change their own closure when they are called. An object with
its own `__eq__` and `__hash__` is compared by those, anything else by identity.

A `Freezer` goes through the static values of one graph. It numbers the *mutable* ones it meets, so that one list held
by two attributes is one list in the key, in every copy and after a transform. For each it also takes a *watch*: live
views of what it holds, together with what they showed. `Statics` are the frozen values of a graph, *detached* from
the originals: copies in which bound methods of Modules are replaced by `BoundMethod` records. Attaching makes the
values of a rebuilt graph from them.
"""

import enum
import functools
import struct
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

import jax
import numpy as np

from nnx.core.contents import Content, content_of
from nnx.core.errors import STATE_IN_STATIC_VALUE
from nnx.core.info import ModuleBase
from nnx.core.repr import short
from nnx.core.trees import holds_state

_ATOMS: frozenset[type] = frozenset({int, bool, str, bytes, type(None), type(...)})
_SHARED_AS_IS = _ATOMS | {float, complex, range, slice, types.FunctionType, types.BuiltinFunctionType, type, np.dtype}

Step = Callable[[], Any]


class ById:
    """A key that is equal only to the key of the same object. It does not keep the object alive."""

    __slots__ = ("hash", "get", "kind")

    def __init__(self, value: Any):
        self.hash: int = id(value)
        self.kind: str = type(value).__name__
        try:
            self.get: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self.get = lambda: value

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        if not isinstance(other, ById):
            return False
        value = self.get()
        return value is not None and value is other.get()

    def __hash__(self) -> int:
        return self.hash

    def __repr__(self) -> str:
        return f"<{self.kind} at {self.hash:#x}>"


class BoundMethod:
    """A bound method of the Module with this index, while the graph it belongs to is taken apart."""

    __slots__ = ("index", "function")

    def __init__(self, index: int, function: Any):
        self.index: int = index
        self.function: Any = function

    def __repr__(self) -> str:
        return f"<method {self.function.__qualname__}>"


class HoldsState(Exception):
    """A static value holds a Module or array; `route` says where."""

    def __init__(self, value: Any, route: str):
        self.what: str = f"a Module ({type(value).__name__})" if isinstance(value, ModuleBase) else short(value)
        self.route = route


class ForeignMethod(Exception):
    """A static value is, or holds, a bound method of a Module outside the graph."""

    def __init__(self, method: Any, route: str):
        self.what: str = short(method.__func__)
        self.route = route


# Keys


class Freezer:
    """Makes the keys of the static values of one graph.

    Args:
      index_of: returns the index in the graph of the Module a bound method belongs to, or None if it is not in there.
      arrays_inside: whether arrays may be inside a value, where they are compared by identity.
      in_function: whether the values were captured by a function. Bound methods of Modules are refused there, since a
        rebuilt graph has no way to replace them.
    """

    def __init__(self, index_of: Callable[[Any], int | None], arrays_inside: bool = False, in_function: bool = False):
        self.index_of = index_of
        self.arrays_inside = arrays_inside
        self.in_function = in_function
        self.mutables: list[Any] = []  # by number, in the order they were met
        self.numbers: dict[int, int] = {}
        self.watches: list[list[tuple[Any, Any, Any, Any]]] = []  # per mutable value, how to notice a change
        self._active: dict[int, int] = {}

    def key(self, value: Any, route: str = "it") -> Any:
        """Returns the key of one value.

        Raises:
          HoldsState: it is or holds a Module or an array; `route` leads there.
          ForeignMethod: it is or holds a bound method of a Module that is not in the graph.
        """
        cls = type(value)
        if cls in _ATOMS:
            return (cls, value)
        if cls is float:
            return (float, struct.pack("d", value))
        if holds_state(value):
            raise HoldsState(value, route)
        if cls is types.FunctionType or isinstance(value, functools.partial):
            return _once(value, route)
        if isinstance(value, (type, enum.Enum, types.ModuleType)):
            return (cls, ById(value))
        if isinstance(value, np.generic):
            return (cls, value.dtype, value.tobytes())
        content = content_of(cls)
        if content is not None:
            return self._content_key(content, value, route)
        return self._other_key(cls, value, route)

    def _content_key(self, content: Content, value: Any, route: str) -> Any:
        if content.is_mutable:
            number = self.numbers.get(id(value))
            if number is not None:
                return ("the mutable value", number)
            self.numbers[id(value)] = len(self.mutables)
            self.mutables.append(value)
            self.watches.append([_snapshot(*views) for views in content.views(value)])
        elif id(value) in self._active:  # an immutable value can contain itself behind the back of its class
            return ("the value around it", self._active[id(value)])
        self._active[id(value)] = len(self._active)
        try:
            return self._parts_key(content, value, route)
        finally:
            del self._active[id(value)]

    def _parts_key(self, content: Content, value: Any, route: str) -> Any:
        cls, items = type(value), content.base.items(value)
        if isinstance(value, dict):
            names = items[: len(items) // 2]
            keys: Any = (
                tuple([self.key(name, f"a key of {route}") for name in names]),
                tuple([self.key(item, f"{route}[{n!r}]") for n, item in zip(names, items[len(names) :])]),
            )
        elif type(value) is complex:
            keys = struct.pack("dd", value.real, value.imag)
        else:
            keys = tuple([self.key(item, f"{route}[{i}]") for i, item in enumerate(items)])
            if isinstance(value, (set, frozenset)):
                keys = frozenset(keys)
        constants = tuple([getattr(value, name) for name in content.base.constants])
        attributes = content.attributes(value)
        if not attributes:
            return (cls, keys, constants) if constants else (cls, keys)
        named = tuple([(name, self.key(item, f"{route}.{name}")) for name, item in attributes.items()])
        return (cls, keys, constants, named)

    def _other_key(self, cls: type, value: Any, route: str) -> Any:
        if isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
            if route != "it" and not self.arrays_inside:
                raise HoldsState(value, route)
            return ById(value)
        if cls is range or cls is slice:
            return (cls, *(self.key(getattr(value, name), route) for name in ("start", "stop", "step")))
        if isinstance(value, types.MethodType):
            if isinstance(value.__self__, (jax.Array, np.ndarray)):
                return (cls, self.key(value.__func__, route), ById(value.__self__))
            if not isinstance(value.__self__, ModuleBase):
                return (cls, self.key(value.__func__, route), self.key(value.__self__, f"self of {route}"))
            if self.in_function:
                raise HoldsState(value.__self__, f"self of {route}")
            index = self.index_of(value.__self__)
            if index is None:
                raise ForeignMethod(value, route)
            return (cls, index, self.key(value.__func__, route))
        if isinstance(value, BoundMethod):
            return (types.MethodType, value.index, self.key(value.function, route))
        if cls.__eq__ is object.__eq__ or cls.__hash__ is None:
            return ById(value)
        try:
            hash(value)
        except TypeError:
            return ById(value)
        return (cls, value)


def _once(value: Any, route: str) -> Any:
    """The key of a function or partial, computed the first time it is asked for."""
    key = _function_keys.get(value)
    if key is None:
        key = _function_keys.setdefault(value, _function_key(value, route, {}))
    return key


# Values are keys, which refer to captured objects weakly (see ById), so that no entry keeps its own function alive.
_function_keys: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


class _CaptureFreezer(Freezer):
    """Keys what a function captured; a function that captures itself, directly or not, is named by its place."""

    def __init__(self, around: dict[int, int]):
        super().__init__(_in_no_graph, arrays_inside=True, in_function=True)
        self.around = around

    def key(self, value: Any, route: str = "it") -> Any:
        if type(value) is types.FunctionType or isinstance(value, functools.partial):
            if id(value) in self.around:
                return ("the function around it", self.around[id(value)])
            return _function_keys.get(value) or _function_key(value, route, self.around)
        return super().key(value, route)


def _function_key(value: Any, route: str, around: dict[int, int]) -> Any:
    freezer = _CaptureFreezer({**around, id(value): len(around)})
    if isinstance(value, functools.partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords, "__dict__": vars(value)}
        return (type(value), *(freezer.key(part, f"{name} of {route}") for name, part in parts.items()))
    closure = []
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            contents = cell.cell_contents
        except ValueError:  # a cell that was never filled
            contents = None
        closure.append(freezer.key(contents, f"{name!r} in the closure of {value.__qualname__}"))
    return (
        types.FunctionType,
        value.__code__,
        id(value.__globals__),  # unique: whoever keeps a key keeps the values as well, and so this dict
        freezer.key(value.__defaults__, f"a default of {route}"),
        freezer.key(value.__kwdefaults__, f"a default of {route}"),
        freezer.key(value.__dict__, f"attributes of {route}"),
        tuple(closure),
    )


def _in_no_graph(module: Any) -> None:
    return None


# Noticing changes


def _snapshot(keys: Any, values: Any) -> tuple[Any, Any, Any, Any]:
    """A watch: live views, and what they showed. Names are compared by value, everything else by identity."""
    held = [*values]
    if keys is None:
        return None, None, values, held
    names = [*keys]
    if all(type(name) is str for name in names):
        return keys, names, values, held
    return None, None, _KeysAndValues(keys, values), [*names, *held]


class _KeysAndValues:
    """The keys of a dict, then its values, as one view: keys that are not strings are watched by identity."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: Any, values: Any):
        self.keys, self.values = keys, values

    def __len__(self) -> int:
        return 2 * len(self.keys)

    def __iter__(self) -> Any:
        return iter([*self.keys, *self.values])


def watched_unchanged(watch: list[tuple[Any, Any, Any, Any]]) -> bool:
    """Whether every watched value holds the very objects it held when it was frozen."""
    for keys, names, values, held in watch:
        if keys is not None:
            if [*keys] != names:
                return False
        elif len(values) != len(held):
            return False
        if not all(map(is_, values, held)):  # identity, compared in C: 1 -> 1.0 is a change, and == may be anything
            return False
    return True


def comparison(watch: list[tuple[Any, Any, Any, Any]]) -> Callable[[], bool]:
    """Returns `watched_unchanged` for this watch, as a function without arguments.

    A call of a jitted function pays for it, so the usual case, one config that all Modules share, has its own code.
    """
    if len(watch) != 1 or watch[0][0] is None or not 0 < len(watch[0][1]) <= _UNROLLED:
        return functools.partial(watched_unchanged, watch)
    keys, names, values, held = watch[0]
    return _unrolled_comparison(len(names))(keys, names, values, *held)


_UNROLLED = 32  # fields; beyond that, a loop in C is as fast


@functools.cache
def _unrolled_comparison(count: int) -> Callable[..., Callable[[], bool]]:
    """Returns a function that makes the comparison for a config of `count` fields.

    The code is generated, as `dataclasses` generates `__init__`: unpacking into locals and comparing them one by one
    takes 0.19 µs for five fields, where `any(map(is_not, values, held))` takes 0.33.
    """
    now, then = [f"now{i}" for i in range(count)], [f"then{i}" for i in range(count)]
    same = " and ".join(f"{a} is {b}" for a, b in zip(now, then, strict=True))
    source = f"""
def make(keys, names, values, {", ".join(then)}):
    def unchanged():
        if [*keys] != names:
            return False
        try:
            {", ".join(now)}, = values
        except ValueError:  # another thread is changing it
            return False
        return {same}
    return unchanged
"""
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return namespace["make"]


# Copies


class Copier:
    """Copies static values so that they share no mutable value with the original. Sharing among them is kept.

    Args:
      leaf: returns what takes the place of a value that is not compared by content.
    """

    def __init__(self, leaf: Callable[[Any], Any]):
        self.leaf = leaf
        self.made: dict[int, Any] = {}  # the copies by the id of the original: what was one object stays one

    def copy(self, value: Any) -> Any:
        """Returns the copy of a value: the value itself if nothing in it can change."""
        cls = type(value)
        if cls in _SHARED_AS_IS:
            return value
        content = None if isinstance(value, (enum.Enum, np.generic)) else content_of(cls)
        if content is None or not content.is_copied:
            return self._copy_method(value) if cls is types.MethodType else self.leaf(value)
        found = self.made.get(id(value))
        if found is not None:
            return found
        if content.is_mutable:
            items = content.base.items(value) if content.base.fill is None else ()
            found = self.made[id(value)] = content.make(cls, [self.copy(item) for item in items], value)
            for step in self.fill(found, value):
                step()
            return found
        items, attributes = content.base.items(value), content.attributes(value)
        new_items, new_attributes = self._copies(items, attributes)
        if all(map(is_, items, new_items)) and all(map(is_, attributes.values(), new_attributes.values())):
            return value
        made = self.made[id(value)] = content.make(cls, new_items, value)
        for step in content.steps(made, new_items, new_attributes):
            step()
        return made

    def _copy_method(self, method: Any) -> Any:
        if isinstance(method.__self__, ModuleBase):
            return self.leaf(method)
        owner = self.copy(method.__self__)
        return method if owner is method.__self__ else types.MethodType(method.__func__, owner)

    def fill(self, target: Any, source: Any) -> list[Step]:
        """The steps that make a mutable value hold copies of what another one holds."""
        content: Any = content_of(type(source))
        return content.steps(target, *self._copies(content.base.items(source), content.attributes(source)))

    def _copies(self, items: Iterable[Any], attributes: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        return [self.copy(item) for item in items], {name: self.copy(item) for name, item in attributes.items()}


class Statics:
    """The static values of a graph, detached from it: immutable to everyone, and shared by nobody.

    `values` has one entry per static attribute, `mutables` the mutable values among them and inside of them by number.
    """

    __slots__ = ("values", "mutables", "_own")

    values: tuple[Any, ...]
    mutables: tuple[Any, ...]

    def __init__(self, values: tuple[Any, ...], mutables: tuple[Any, ...], own: tuple[bool, ...]):
        self.values = values
        self.mutables = mutables
        self._own = own  # per value: whether a rebuilt Module needs its own copy

    @property
    def can_change(self) -> bool:
        """Whether a body could change one of the values in place."""
        return bool(self.mutables)

    def attach(self, modules: Sequence[Any]) -> tuple[Sequence[Any], list[Any]]:
        """The values for a rebuilt graph with these Modules, and the mutable ones by number."""
        if True not in self._own:
            return self.values, []
        copier = Copier(functools.partial(_attached, modules))
        values = [copier.copy(value) if own else value for value, own in zip(self.values, self._own, strict=True)]
        return values, [copier.made.get(id(mutable), mutable) for mutable in self.mutables]

    def attach_onto(
        self, modules: Sequence[Any], existing: dict[int, Any], changed: Iterable[int]
    ) -> tuple[list[Any], list[Step]]:
        """Like `attach`, but some mutable values are there already, by number: they keep their identity.

        Args:
          modules: the Modules that methods are bound to.
          existing: the mutable values that are there.
          changed: the numbers of those that have to be given the content they have here.

        Returns:
          The values, and the steps that refill the ones that changed.
        """
        copier = Copier(functools.partial(_attached, modules))
        copier.made = {id(self.mutables[number]): value for number, value in existing.items()}
        steps = [step for number in changed for step in copier.fill(existing[number], self.mutables[number])]
        return [copier.copy(value) if own else value for value, own in zip(self.values, self._own)], steps

    def is_own(self, at: int) -> bool:
        """Whether a rebuilt Module needs its own copy of a value."""
        return self._own[at]


NO_STATICS = Statics((), (), ())


def detach(values: Sequence[Any], mutables: Sequence[Any], index_of: Callable[[Any], int | None]) -> Statics:
    """The Statics of a graph, from its static values and the mutable ones that its Freezer has met."""
    copier = Copier(functools.partial(_detached, index_of))
    copies = [copier.copy(value) for value in values]
    own = tuple([copy is not value for copy, value in zip(copies, values, strict=True)])
    return Statics(tuple(copies), tuple([copier.made.get(id(mutable), mutable) for mutable in mutables]), own)


def _detached(index_of: Callable[[Any], int | None], value: Any) -> Any:
    if isinstance(value, types.MethodType) and isinstance(value.__self__, ModuleBase):
        index = index_of(value.__self__)
        assert index is not None, "freezing refuses methods of other graphs"
        return BoundMethod(index, value.__func__)
    return value


def _attached(modules: Sequence[Any], value: Any) -> Any:
    return types.MethodType(value.function, modules[value.index]) if type(value) is BoundMethod else value


def own_copy(value: Any) -> Any:
    """A copy of a static value outside any graph, such as metadata; the value itself if nothing in it can change."""
    return Copier(lambda leaf: leaf).copy(value)


# Static values outside any graph


class Frozen:
    """A static value as hashable auxiliary data, compared by its key; errors call it `name`.

    Raises:
      ValueError: it is or holds a Module, a Variable or a method of a Module.
    """

    __slots__ = ("value", "key", "_watch")

    def __init__(self, value: Any, name: str = "in nnx.Static"):
        freezer = Freezer(_in_no_graph, arrays_inside=True)
        self.value: Any = value
        try:
            self.key: Any = self._key(freezer, value, name)
        except (HoldsState, ForeignMethod) as found:
            is_method = isinstance(found, ForeignMethod)
            what = f"a bound method of a Module ({found.what})" if is_method else found.what
            raise ValueError(STATE_IN_STATIC_VALUE.format(route=found.route, what=what)) from None
        self._watch = [watch for watches in freezer.watches for watch in watches]

    def _key(self, freezer: Freezer, value: Any, name: str) -> Any:
        return freezer.key(value, name)

    @property
    def watched(self) -> bool:
        """Whether the value holds something mutable, which can change without anyone noticing."""
        return bool(self._watch)

    def is_current(self) -> bool:
        """Whether the value still is what it was when it was frozen."""
        return watched_unchanged(self._watch)

    def __eq__(self, other: Any) -> bool:
        return self is other or (isinstance(other, Frozen) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.value)

    def __reduce__(self) -> Any:
        return (type(self), (self.value,))


class FrozenFields(Frozen):
    """The static fields of one record by name, frozen together; errors call a field `name.field`.

    The fields go through one Freezer, so that a list held by two of them is one list in the key. The dict around them
    belongs to this object alone and is not watched: fields that hold nothing mutable never have to be frozen again.
    """

    __slots__ = ()

    def _key(self, freezer: Freezer, value: dict[str, Any], name: str) -> Any:
        return tuple([(field, freezer.key(held, f"{name}.{field}")) for field, held in value.items()])
