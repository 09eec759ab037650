"""Static values: when two of them are equal, and how they are snapshotted.

`freeze(value)` gives a hashable *key*: two static values are equal when their keys are. Types count (1, 1.0 and True
differ), floats compare by bit pattern, lists, dicts, sets and dataclass instances by content, functions and partials by
code and by what they close over, arrays and objects without an `__eq__` and `__hash__` of their own by identity.

While freezing, a `Freezer` also collects the *watch list*, the mutable containers it passed with the items they had,
and makes a *detached* copy: fresh lists, dicts and sets, with bound methods of Modules replaced by `BoundMethod`
records.
"""

import collections
import copy
import dataclasses
import enum
import functools
import operator
import struct
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from nnx.core.errors import STATE_IN_STATIC_VALUE
from nnx.core.info import ModuleBase
from nnx.core.repr import short
from nnx.core.trees import holds_state

_ATOMS: frozenset[type] = frozenset({int, bool, str, bytes, type(None), type(...), range})
_CONTAINERS = (list, dict, set, tuple)
_MAX_OBJECTS = 256  # how many plain objects a search for captured Modules looks into


class ById:
    """A key that is equal only to the key of the same object."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, ById) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__} at {id(self.value):#x}>"


class BoundMethod:
    """A method bound to the Module with this index of the graph, until the graph is rebuilt."""

    __slots__ = ("index", "function")

    def __init__(self, index: int, function: Any):
        self.index = index
        self.function = function

    def __repr__(self) -> str:
        return f"<method {self.function.__qualname__}>"


class HoldsState(Exception):
    """A static value holds a Module or array; `route` says where."""

    def __init__(self, value: Any, route: str):
        self.what = f"a Module ({type(value).__name__})" if isinstance(value, ModuleBase) else short(value)
        self.route = route


class ForeignMethod(Exception):
    """A static value is, or holds, a bound method of a Module outside the graph."""

    def __init__(self, method: Any, route: str):
        self.what = short(method.__func__)
        self.route = route


class Freezer:
    """Makes keys and detached copies of static values of one graph.

    Args:
      index_of: the index in the graph of a Module a bound method belongs to, or None if it is not in it.
      arrays_inside: allow arrays inside a value, too, and compare them by identity.
    """

    def __init__(self, index_of: Callable[[Any], int | None], arrays_inside: bool = False):
        self.index_of = index_of
        self.arrays_inside = arrays_inside
        self.watch: list[tuple[Any, list[Any]]] = []
        self._active: dict[int, int] = {}

    def key_and_copy(self, value: Any) -> tuple[Any, Any]:
        """The key of `value`, and a copy that shares no list, dict or set with it."""
        cls = type(value)
        if cls in _ATOMS:
            return (cls, value), value
        if cls is types.FunctionType or cls is float:
            return self.key(value, "it"), value
        key = self.key(value, "it")
        return key, self._detach(value)

    def key(self, value: Any, route: str) -> Any:
        cls = type(value)
        if cls in _ATOMS:
            return (cls, value)
        if cls is float:
            return (float, struct.pack("d", value))
        if holds_state(value):
            raise HoldsState(value, route)
        if id(value) in self._active:  # a value that contains itself: refer to it by its place
            return ("again", self._active[id(value)])
        self._active[id(value)] = len(self._active)
        try:
            return self._compound_key(cls, value, route)
        finally:
            del self._active[id(value)]

    def _compound_key(self, cls: type, value: Any, route: str) -> Any:
        if isinstance(value, types.FunctionType):
            return self._function_key(value, route)
        if isinstance(value, (list, tuple)):
            if isinstance(value, list):
                self.watch.append((value, list(value)))
            elif type(value).__eq__ is not tuple.__eq__:  # e.g. a PartitionSpec, with an equality of its own
                return _opaque_key(cls, value)
            return (cls, *self._items(value, route))
        if isinstance(value, dict):
            self.watch.append((value, _dict_items(value)))
            keys = self._items(value, f"a key of {route}")
            return (cls, keys, tuple(self.key(v, f"{route}[{k!r}]") for k, v in value.items()))
        if isinstance(value, (set, frozenset)):
            if isinstance(value, set):
                self.watch.append((value, list(value)))
            return (cls, frozenset(self._items(value, route)))
        if cls is slice:
            return (slice, *self._items((value.start, value.stop, value.step), route))
        if cls is complex:
            return (complex, struct.pack("dd", value.real, value.imag))
        if isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
            if route != "it" and not self.arrays_inside:
                raise HoldsState(value, route)
            return ById(value)
        if isinstance(value, np.generic):
            return (cls, value.tobytes())
        if isinstance(value, functools.partial):
            parts = {"func": value.func, "args": value.args, "keywords": value.keywords, "__dict__": vars(value)}
            return (cls, *(self._captured_key(part, f"{name} of {route}") for name, part in parts.items()))
        if isinstance(value, types.MethodType):
            if isinstance(value.__self__, ModuleBase):
                index = self.index_of(value.__self__)
                if index is None:
                    raise ForeignMethod(value, route)
                return (cls, index, self.key(value.__func__, route))
            return (cls, self.key(value.__func__, route), self._captured_key(value.__self__, f"self of {route}"))
        if isinstance(value, BoundMethod):
            return (types.MethodType, value.index, self.key(value.function, route))
        if isinstance(value, (type, enum.Enum, types.ModuleType)):
            return (cls, ById(value))
        if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            return (cls, *((f.name, self.key(getattr(value, f.name, None), f"{route}.{f.name}")) for f in fields))
        return _opaque_key(cls, value)

    def _items(self, values: Iterable[Any], route: str) -> tuple[Any, ...]:
        return tuple([self.key(item, f"{route}[{i}]") for i, item in enumerate(values)])

    def _captured_key(self, value: Any, route: str) -> Any:
        """Like `key`, for what a function captured: arrays by identity, methods of Modules never."""
        if isinstance(value, (jax.Array, np.ndarray)):
            return ById(value)
        if type(value) in (tuple, list):
            items = enumerate(value)
            return (type(value), *(self._captured_key(item, f"{route}[{i}]") for i, item in items))
        if type(value) is dict:
            return (dict, *((self.key(k, route), self._captured_key(v, f"{route}[{k!r}]")) for k, v in value.items()))
        if isinstance(value, types.MethodType) and isinstance(value.__self__, ModuleBase):
            raise HoldsState(value.__self__, f"self of {route}")
        return self.key(value, route)

    def _function_key(self, function: types.FunctionType, route: str) -> Any:
        closure = []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                contents = cell.cell_contents
            except ValueError:  # not filled yet
                contents = None
            closure.append(self._captured_key(contents, f"{name!r} in the closure of {function.__qualname__}"))
        return (
            types.FunctionType,
            function.__code__,
            ById(function.__globals__),
            self._captured_key(function.__defaults__, f"a default of {route}"),
            self._captured_key(function.__kwdefaults__, f"a default of {route}"),
            self._captured_key(function.__dict__, f"attributes of {route}"),
            tuple(closure),
        )

    def _detach(self, value: Any) -> Any:
        if isinstance(value, _CONTAINERS):
            return _map_items(value, self._detach)
        if isinstance(value, types.MethodType) and isinstance(value.__self__, ModuleBase):
            index = self.index_of(value.__self__)
            assert index is not None, "freezing has refused methods of other graphs"
            return BoundMethod(index, value.__func__)
        return value


def _map_items(value: Any, fn: Callable[[Any], Any]) -> Any:
    """A copy of a list, dict, set or tuple, of the same type, with `fn` of its items; a tuple only if one differs."""
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({k: fn(v) for k, v in value.items()})
        return copied
    if isinstance(value, tuple):
        if type(value).__eq__ is not tuple.__eq__:
            return value
        items = [fn(item) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    copied = copy.copy(value)
    if isinstance(value, list):
        copied[:] = [fn(item) for item in value]
    return copied


def _dict_items(value: dict[Any, Any]) -> list[Any]:
    return [*value.keys(), *value.values()]


def _opaque_key(cls: type, value: Any) -> Any:
    if cls.__eq__ is object.__eq__ or cls.__hash__ is None:
        return ById(value)
    try:
        hash(value)
    except TypeError:
        return ById(value)
    return (cls, value)


def watched_unchanged(watch: list[tuple[Any, list[Any]]]) -> bool:
    """Whether every watched container holds the very items it held when it was frozen."""
    for container, items in watch:
        now = _dict_items(container) if isinstance(container, dict) else container
        if len(now) != len(items) or not all(map(operator.is_, now, items)):
            return False
    return True


def attach(value: Any, modules: list[Any]) -> Any:
    """A fresh static value from a detached one, with its methods bound to `modules`."""
    if isinstance(value, _CONTAINERS):
        return _map_items(value, lambda item: attach(item, modules))
    if type(value) is BoundMethod:
        return types.MethodType(value.function, modules[value.index])
    return value


_SHARED_AS_IS = _ATOMS | {float, complex, types.FunctionType, types.BuiltinFunctionType, type}


def needs_attach(value: Any) -> bool:
    """Whether a rebuilt Module needs its own copy of this detached static value."""
    cls = type(value)
    if cls in _SHARED_AS_IS:
        return False
    if isinstance(value, tuple):
        return any(map(needs_attach, value))
    return isinstance(value, _CONTAINERS) or cls is BoundMethod


def freeze(value: Any, name: str) -> Any:
    """The key of a static value that stands outside any graph, such as metadata.

    Raises:
      ValueError: it is or holds a Module, a Variable or a method of a Module; `name` says which value it was.
    """
    return _freeze_alone(Freezer(_in_no_graph, arrays_inside=True), value, name)


def _in_no_graph(module: Any) -> None:
    return None


def _freeze_alone(freezer: Freezer, value: Any, name: str) -> Any:
    try:
        return freezer.key(value, name)
    except HoldsState as found:
        text = STATE_IN_STATIC_VALUE.format(route=found.route, what=found.what)
    except ForeignMethod as found:
        text = STATE_IN_STATIC_VALUE.format(route=found.route, what=f"a bound method of a Module ({found.what})")
    raise ValueError(text)


class Frozen:
    """A static value as hashable auxiliary data, compared by its key; `name` stands for it in errors."""

    __slots__ = ("value", "key", "watched")

    def __init__(self, value: Any, name: str = "in nnx.Static"):
        freezer = Freezer(_in_no_graph, arrays_inside=True)
        self.value = value
        self.key = _freeze_alone(freezer, value, name)
        self.watched = bool(freezer.watch)

    def __eq__(self, other: Any) -> bool:
        return self is other or (isinstance(other, Frozen) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.value)

    def __reduce__(self) -> Any:
        return (Frozen, (self.value,))


def find_captured_module(value: Any) -> tuple[Any, str] | None:
    """The first Module that a function, partial or plain object holds, and where; None if there is none.

    Bound methods of Modules stand for themselves at the top and in plain containers: they can be bound anew.
    """
    seen: set[int] = set()
    stack: list[tuple[Any, str, bool]] = [(value, "it", False)]
    while stack and len(seen) < _MAX_OBJECTS:
        item, route, inside = stack.pop()
        if type(item) in _ATOMS or isinstance(item, (float, type, types.ModuleType, jax.Array, np.ndarray)):
            continue
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, ModuleBase):
            return item, route
        if isinstance(item, types.MethodType):
            if inside or not isinstance(item.__self__, ModuleBase):
                stack.append((item.__self__, f"self of {route}", True))
        elif isinstance(item, (list, tuple, set, frozenset, collections.deque)):
            inside = inside or isinstance(item, collections.deque)  # an object like any other: it is not rebuilt
            stack.extend((x, f"{route}[{i}]", inside) for i, x in enumerate(item))
        elif isinstance(item, dict):
            stack.extend((k, f"a key of {route}", True) for k in item)
            stack.extend((x, f"{route}[{k!r}]", inside) for k, x in item.items())
        elif isinstance(item, types.FunctionType):
            stack.extend(_captures(item))
        elif isinstance(item, functools.partial):
            stack.extend((x, f"an argument of {route}", True) for x in (item.func, *item.args, *item.keywords.values()))
        else:
            stack.extend((x, f"{route}.{name}", True) for name, x in _attributes(item))
    return None


def _attributes(item: Any) -> Iterable[tuple[str, Any]]:
    """The names and values of what an object holds in its `__dict__` and its slots."""
    yield from getattr(item, "__dict__", {}).items()
    for cls in type(item).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield name, member.__get__(item)
                except AttributeError:  # a slot that was not filled
                    continue


def _captures(function: types.FunctionType) -> Iterable[tuple[Any, str, bool]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield cell.cell_contents, f"{name!r} in the closure of {function.__qualname__}", True
        except ValueError:
            continue
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield value, f"a default of {function.__qualname__}", True
    for name, value in function.__dict__.items():
        yield value, f"{function.__qualname__}.{name}", True
