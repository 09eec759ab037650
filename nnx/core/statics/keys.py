"""The keys of static values: when two of them are equal.

The *key* of a static value is hashable, and two values are equal when their keys are. A key is complete or it is an
identity: types count (1, 1.0 and True differ), floats compare by bit pattern, and a value compared by content
contributes everything it holds (see contents). Functions and partials are keyed by code, defaults, attributes and
closure. An object with its own `__eq__` and `__hash__` is compared by those, anything else by identity.

The key of a function is *open* until a call with that very function is compiled, and *settled* from then on. While it
is open, it follows every change of the closure, so that a function that was changed before its first trace does not get
the trace of one that was not. It has to be settled in the end because some functions change their own closure when they
are called: a schedule of optax does so on its first use, and a step that calls it must not be compiled again.

A `KeyMaker` goes through the static values of one graph. It numbers the *mutable* ones it meets, so that one list held
by two attributes is one list in the key, in every copy and after a transform. It also takes the watches of each, which
tell whether it has changed since (see watches).
"""

import enum
import functools
import struct
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from nnx.core.errors import BY_IDENTITY_FINALIZER, BY_IDENTITY_LARGE, BY_IDENTITY_OMEGACONF
from nnx.core.module.info import ModuleBase
from nnx.core.repr import short
from nnx.core.statics.contents import MAX_LEAVES, Content, content_for, content_of, is_config_class, is_omegaconf
from nnx.core.statics.reach import closure_of
from nnx.core.statics.watches import ReadAgain, Watch, snapshot
from nnx.core.user_warnings import warn_user
from nnx.core.variables.trees import holds_state

ATOMS: frozenset[type] = frozenset({int, bool, str, bytes, type(None), type(...)})


class ById:
    """A key that is equal only to the key of the same object. It does not keep the object alive."""

    __slots__ = ("hash", "get", "type_name")

    def __init__(self, value: Any):
        self.hash: int = id(value)
        self.type_name: str = type(value).__name__
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
        return f"<{self.type_name} at {self.hash:#x}>"


class BoundMethod:
    """A bound method of the Module with this number, while the graph it belongs to is taken apart."""

    __slots__ = ("index", "function")

    def __init__(self, index: int, function: Any):
        self.index: int = index
        self.function: Any = function

    def __repr__(self) -> str:
        return f"<method {self.function.__qualname__}>"


class HoldsState(Exception):
    """Raised when a static value holds a Module or array; `route` leads to it."""

    def __init__(self, value: Any, route: str):
        self.what: str = f"a Module ({type(value).__name__})" if isinstance(value, ModuleBase) else short(value)
        self.route = route


class ForeignMethod(Exception):
    """Raised when a static value is or holds a bound method of a Module outside the graph."""

    def __init__(self, method: Any, route: str):
        self.what: str = short(method.__func__)
        self.route = route


# Keys


class KeyMaker:
    """Makes the keys of the static values of one graph.

    Args:
        index_of: a function that returns the number of a Module in the graph, or None if it is not part of it.
        arrays_inside: whether values can contain arrays, which are compared by identity.
        in_function: whether the values were captured by a function. Bound methods of Modules are refused there, because
            a rebuilt graph cannot replace them.
        functions: functions whose keys are open, with the keys they have here.
    """

    def __init__(
        self,
        index_of: Callable[[Any], int | None],
        arrays_inside: bool = False,
        in_function: bool = False,
        functions: "Iterable[OpenFunction]" = (),
    ):
        self.index_of = index_of
        self.arrays_inside = arrays_inside
        self.in_function = in_function
        self.functions: dict[int, OpenFunction] = {id(open_.function): open_ for open_ in functions}
        self.mutables: list[Any] = []  # by number, in the order they were met
        self.numbers: dict[int, int] = {}
        self.watches: list[list[Watch]] = []  # per mutable value, how to notice a change
        self._active: dict[int, int] = {}

    def key(self, value: Any, route: str = "it") -> Any:
        """Returns the key of one value.

        Raises:
            HoldsState: the value is or holds a Module or an array.
            ForeignMethod: the value is or holds a bound method of a Module that is not in the graph.
        """
        cls = type(value)
        if cls in ATOMS:
            return (cls, value)
        if cls is float:
            return (float, struct.pack("d", value))
        if holds_state(value):
            raise HoldsState(value, route)
        if cls is types.FunctionType or isinstance(value, functools.partial):
            return self._function_key(value, route)
        if isinstance(value, (type, enum.Enum, types.ModuleType)):
            return (cls, ById(value))
        if isinstance(value, np.generic):
            return (cls, value.dtype, value.tobytes())
        content = content_for(value)
        if content is not None:
            return self._content_key(content, value, route)
        return self._other_key(cls, value, route)

    def _function_key(self, value: Any, route: str) -> Any:
        open_ = self.functions.get(id(value))
        if open_ is None:
            settled = _settled.get(value)
            if settled is not None:
                return settled
            watches: list[Watch] = []
            key = _function_key(value, route, {}, watches)
            open_ = self.functions[id(value)] = OpenFunction(value, key, watches)
        return open_.key

    def _content_key(self, content: Content, value: Any, route: str) -> Any:
        if content.is_mutable:
            number = self.numbers.get(id(value))
            if number is not None:
                return ("the mutable value", number)
            # Before the keys of its parts, so that a list that contains itself has a key as well.
            self.numbers[id(value)] = len(self.mutables)
            self.mutables.append(value)
            self.watches.append([snapshot(*views) for views in content.readers(value)])
        elif id(value) in self._active:  # an immutable value can come to contain itself, through object.__setattr__
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
        if cls.__hash__ is None or is_omegaconf(cls):
            _note_identity(cls)
            return ById(value)
        if cls.__eq__ is object.__eq__:
            return ById(value)
        try:
            hash(value)
        except TypeError:
            return ById(value)
        return (cls, value)


_noted: "weakref.WeakSet[type]" = weakref.WeakSet()


def _note_identity(cls: type) -> None:
    """Warns once per class of configs that is compared by identity, although its instances can change."""
    if cls in _noted or not (is_config_class(cls) or is_omegaconf(cls)):
        return
    _noted.add(cls)
    has_content = content_of(cls) is not None
    text = BY_IDENTITY_OMEGACONF if is_omegaconf(cls) else BY_IDENTITY_LARGE if has_content else BY_IDENTITY_FINALIZER
    warn_user(text.format(type=f"{cls.__module__}.{cls.__qualname__}", limit=MAX_LEAVES))


# Functions


class OpenFunction(NamedTuple):
    """A function or partial whose key is open, the key it had when it was seen, and how to notice that it changed."""

    function: Any
    key: Any
    watches: list[Watch]


def settle(functions: Iterable[OpenFunction]) -> None:
    """Settles the keys of functions: a call with them is about to be compiled."""
    for open_ in functions:
        _settled.setdefault(open_.function, open_.key)


# Values are keys, which refer to captured objects weakly (see ById), so that no entry keeps its own function alive.
_settled: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


class _CaptureKeyMaker(KeyMaker):
    """Makes the keys of what a function captured. A function that captures itself is keyed by its depth of nesting."""

    def __init__(self, around: dict[int, int], function_watches: list[Watch]):
        super().__init__(in_no_graph, arrays_inside=True, in_function=True)
        self.around = around
        self.function_watches = function_watches

    def key(self, value: Any, route: str = "it") -> Any:
        if type(value) is types.FunctionType or isinstance(value, functools.partial):
            if id(value) in self.around:
                return ("the function around it", self.around[id(value)])
            return _settled.get(value) or _function_key(value, route, self.around, self.function_watches)
        return super().key(value, route)


def _function_key(value: Any, route: str, around: dict[int, int], watches: list[Watch]) -> Any:
    """Returns the key of a function or partial, and appends the watches on everything it was made from."""
    maker = _CaptureKeyMaker({**around, id(value): len(around)}, watches)
    if isinstance(value, functools.partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords, "__dict__": vars(value)}
        key: Any = (type(value), *(maker.key(part, f"{name} of {route}") for name, part in parts.items()))
    else:
        # Read again at each comparison; the dicts among it are watched by themselves.
        made_of = ReadAgain(lambda: [value.__code__, value.__defaults__, value.__kwdefaults__, *closure_of(value)])
        watches.append(snapshot(None, made_of))
        names = value.__code__.co_freevars
        closure = [
            maker.key(contents, f"{name!r} in the closure of {value.__qualname__}")
            for name, contents in zip(names, closure_of(value), strict=True)
        ]
        key = (
            types.FunctionType,
            value.__code__,
            id(value.__globals__),  # unique: a key is kept together with the values, and they keep this dict alive
            maker.key(value.__defaults__, f"a default of {route}"),
            maker.key(value.__kwdefaults__, f"a default of {route}"),
            maker.key(value.__dict__, f"attributes of {route}"),
            tuple(closure),
        )
    watches += [watch for found in maker.watches for watch in found]
    return key


def in_no_graph(module: Any) -> None:
    """The `index_of` of a KeyMaker for values outside any graph."""
    return None
