"""What a static value is made of: its items and attributes, and how to build the same value from them again.

Two static values that are compared *by content* are equal when everything they hold is equal. This file is the one
table that says what that is, per type. A `Content` describes one class: the *base* that stores its items (a built-in
container, or `object` if there are none), its `__slots__`, and whether its instances can change. Attributes are read
and written behind the class's own `__setattr__`, so frozen dataclasses and read-only classes can be copied too.

A class has a Content if it is one of the built-in containers, a subclass of a built-in container or number that
inherits its `__eq__`, a `SimpleNamespace`, a dataclass, or a *config class*. All other objects are compared by their
own `__eq__` or by identity.

A config class is written in Python and defines `__eq__` but no `__hash__`, which is how Python says "a value that can
change": `argparse.Namespace`, ml_collections, pydantic, attrs. Nobody told the library that such a class is a config,
so its values are compared by content only while that is cheap and harmless: up to `MAX_LEAVES`, and unless the class
defines `__del__`, which would run for every copy.
"""

import collections
import dataclasses
import enum
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSet, Sequence, Set
from functools import partial
from itertools import repeat
from operator import call
from typing import Any, NamedTuple

import numpy as np

from nnx.core.caches import made_by_class_statement
from nnx.core.statics.reach import is_member
from nnx.core.statics.watches import ReadAgain


class Base(NamedTuple):
    """How the items of a built-in type are read and written.

    `items` returns them in a list (a dict's keys, then its values). `make` builds an instance of a subclass from items;
    mutable types make it empty, and `fill` returns the steps that give an instance these items, each a call into C.
    """

    items: Callable[[Any], list[Any]]
    make: Callable[[type, Any], Any]
    fill: Callable[[Any, Sequence[Any]], list[Callable[[], Any]]] | None = None  # None: the type is immutable
    settings: tuple[str, ...] = ()  # attributes in C structures, such as a defaultdict's factory
    constants: tuple[str, ...] = ()  # likewise, but fixed at construction: a deque's maximum length


def _dict_items(value: dict[Any, Any]) -> list[Any]:
    return [*dict.keys(value), *dict.values(value)]


def _fill_dict(value: dict[Any, Any], items: Sequence[Any]) -> list[Callable[[], Any]]:
    half = len(items) // 2
    return [partial(dict.clear, value), partial(dict.update, value, dict(zip(items[:half], items[half:])))]


def _fill_ordered(value: Any, items: Sequence[Any]) -> list[Callable[[], Any]]:
    half = len(items) // 2
    store = collections.OrderedDict.__setitem__  # dict.update would bypass the order that this class keeps
    steps = [partial(store, value, key, item) for key, item in zip(items[:half], items[half:])]
    return [partial(collections.OrderedDict.clear, value), *steps]


def _fill_deque(value: Any, items: Sequence[Any]) -> list[Callable[[], Any]]:
    return [partial(collections.deque.clear, value), partial(collections.deque.extend, value, items)]


def _make_empty(base: Any) -> Callable[[type, Any], Any]:
    return lambda cls, like: base.__new__(cls)


def _make_deque(cls: Any, like: Any) -> Any:
    made = collections.deque.__new__(cls)
    collections.deque.__init__(made, (), like.maxlen)
    return made


_dict = Base(_dict_items, _make_empty(dict), _fill_dict)

_BASES: dict[type, Base] = {
    list: Base(
        lambda value: [*list.__iter__(value)],
        _make_empty(list),
        lambda value, items: [partial(list.__setitem__, value, slice(None), items)],
    ),
    dict: _dict,
    collections.Counter: _dict,
    collections.defaultdict: _dict._replace(make=_make_empty(collections.defaultdict), settings=("default_factory",)),
    collections.OrderedDict: Base(
        lambda value: [*collections.OrderedDict.keys(value), *collections.OrderedDict.values(value)],
        _make_empty(collections.OrderedDict),
        _fill_ordered,
    ),
    set: Base(
        lambda value: [*set.__iter__(value)],
        _make_empty(set),
        lambda value, items: [partial(set.clear, value), partial(set.update, value, items)],
    ),
    collections.deque: Base(
        lambda value: [*collections.deque.__iter__(value)], _make_deque, _fill_deque, constants=("maxlen",)
    ),
    frozenset: Base(lambda value: [*frozenset.__iter__(value)], lambda cls, items: frozenset.__new__(cls, items)),
    tuple: Base(lambda value: [*tuple.__iter__(value)], lambda cls, items: tuple.__new__(cls, items)),
    int: Base(lambda value: [int.__int__(value)], lambda cls, items: int.__new__(cls, *items)),
    float: Base(lambda value: [float.__float__(value)], lambda cls, items: float.__new__(cls, *items)),
    complex: Base(lambda value: [complex.__complex__(value)], lambda cls, items: complex.__new__(cls, *items)),
    str: Base(lambda value: [str.__str__(value)], lambda cls, items: str.__new__(cls, *items)),
    bytes: Base(lambda value: [bytes(memoryview(value))], lambda cls, items: bytes.__new__(cls, *items)),
    types.SimpleNamespace: Base(lambda value: [], _make_empty(types.SimpleNamespace)),
    object: Base(lambda value: [], _make_empty(object)),
}

_UNSET: Any = type("Unset", (), {"__repr__": lambda self: "<unset>", "__slots__": ()})()


class Content:
    """How values of one class are taken apart and rebuilt. It holds names only, never the class itself."""

    __slots__ = (
        "base", "base_type", "slots", "derived", "has_dict", "is_mutable", "is_copied", "is_config", "iterates_plainly",
    )  # fmt: skip

    def __init__(self, cls: Any, base_type: Any, is_config: bool):
        self.base: Base = _BASES[base_type]
        self.base_type: Any = base_type
        self.is_config = is_config
        self.iterates_plainly = base_type in (object, types.SimpleNamespace) or (
            getattr(cls, "__iter__", None) is getattr(base_type, "__iter__", None)
            and getattr(cls, "__len__", None) is getattr(base_type, "__len__", None)
        )
        # A built-in type has members as well, such as a defaultdict's factory: see `Base.settings`.
        self.slots = tuple(
            name
            for parent in cls.__mro__
            if "__slots__" in vars(parent)
            for name, member in vars(parent).items()
            if is_member(member) and not name.startswith("_nnx_")
        )
        # What functools.cached_property stores follows from the rest; counting it would make a read look like a change.
        self.derived = frozenset(
            name
            for parent in cls.__mro__
            for name, member in vars(parent).items()
            if isinstance(member, functools.cached_property)
        )
        self.has_dict = cls.__dictoffset__ != 0
        parameters = getattr(cls, "__dataclass_params__", None)
        self.is_copied = not hasattr(cls, "_nnx_statics")  # an nnx.Pytree: a record that does not change
        is_frozen = (parameters is not None and parameters.frozen) or not self.is_copied
        has_attributes = self.has_dict or bool(self.slots)
        self.is_mutable = self.base.fill is not None or (has_attributes and not is_frozen)

    def attributes(self, value: Any) -> dict[str, Any]:
        """Returns everything a value holds under a name: its `__dict__` and the slots that are set."""
        found = {}
        if self.has_dict:
            found = {name: item for name, item in vars(value).items() if name not in self.derived}
        for name in (*self.slots, *self.base.settings):
            item = _read(value, name)
            if item is not _UNSET:
                found[name] = item
        return found

    def parts(self, value: Any) -> list[Any]:
        """Returns the items and the attributes of a value; of a dict, not the keys."""
        items = self.base.items(value)
        held = items[len(items) // 2 :] if issubclass(self.base_type, dict) else items
        return [*held, *self.attributes(value).values()]

    def unordered(self, value: Any) -> list[dict[Any, Any]]:
        """Returns the dicts of a value whose order `==` ignores: its items, if it is a dict, and its `__dict__`."""
        is_dict = issubclass(self.base_type, dict) and self.base_type is not collections.OrderedDict
        return [*([value] if is_dict else []), *([vars(value)] if self.has_dict else [])]

    def make(self, cls: type, items: Any, like: Any) -> Any:
        """Makes an instance with these items (none yet if the class is mutable) and no attributes."""
        return self.base.make(cls, like if self.base.fill is not None else items)

    def steps(self, value: Any, items: Sequence[Any], attributes: dict[str, Any]) -> list[Callable[[], Any]]:
        """Returns the calls that make a value hold exactly these items and attributes."""
        steps = self.base.fill(value, items) if self.base.fill is not None else []
        rest = dict(attributes)
        for name in (*self.slots, *self.base.settings):
            if name in rest:
                steps.append(partial(object.__setattr__, value, name, rest.pop(name)))
            elif _read(value, name) is not _UNSET:
                steps.append(partial(object.__delattr__, value, name))
        if self.has_dict:
            held = vars(value)
            kept = {name: held[name] for name in self.derived if name in held}
            steps += [partial(dict.clear, held), partial(dict.update, held, {**rest, **kept})]
        return steps

    def readers(self, value: Any) -> list[tuple[Any, Any]]:
        """Returns what reads a value afresh on each iteration: `(keys, values)` of a dict, else `(None, items)`."""
        found: list[tuple[Any, Any]] = []
        if issubclass(self.base_type, dict):
            found.append((self.base_type.keys(value), self.base_type.values(value)))
        elif self.base.fill is not None:
            found.append((None, value if self.iterates_plainly else ReadAgain(partial(self.base.items, value))))
        if self.has_dict:
            held = vars(value)
            found.append((held.keys(), held.values()))
        names = (*self.slots, *self.base.settings)
        if names:
            found.append((None, ReadAgain(partial(_read_all, value, names))))
        return found


def _read_all(value: Any, names: Sequence[str]) -> list[Any]:
    """Returns what a value holds under some names outside its `__dict__`."""
    try:
        # In C, because every call of a jitted function reads them; it fails if one is not set.
        return [*map(object.__getattribute__, repeat(value), names)]
    except AttributeError:
        return [_read(value, name) for name in names]


def _read(value: Any, name: str) -> Any:
    """Returns what a slot holds, or `_UNSET`. A `__getattr__` of the class is not asked: it may compute and store."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return _UNSET


def put_in_order(held: dict[Any, Any], names: Iterable[Any]) -> None:
    """Puts the items of a dict in the order of these keys, as far as it has them; any others come last."""
    before = [*dict.keys(held)]
    after = [*dict.fromkeys([*(name for name in names if dict.__contains__(held, name)), *before])]
    if after != before:
        steps = _fill_dict(held, [*after, *(dict.__getitem__(held, name) for name in after)])
        collections.deque(map(call, steps), maxlen=0)  # one C call, because the dict is empty in between


_contents: "weakref.WeakKeyDictionary[type, Content | None]" = weakref.WeakKeyDictionary()


def content_of(cls: type) -> Content | None:
    """Returns the Content of a class, or None if its values are not compared by content."""
    try:
        return _contents[cls]
    except KeyError:
        content = _contents[cls] = _find_content(cls)
        return content


MAX_LEAVES = 1_000
"""How many values an instance of a config class may hold and still be compared by content."""

_SCALARS = (int, float, complex, str, bytes, enum.Enum, np.generic)


def content_for(value: Any) -> Content | None:
    """Returns the Content of a value, or None if the value is not compared by content."""
    content = content_of(type(value))
    return content if content is None or not content.is_config or has_few_leaves(value) else None


def has_few_leaves(value: Any) -> bool:
    """Whether a value holds at most `MAX_LEAVES` others that are not taken apart any further."""
    count, seen, stack = 0, set(), [value]
    while stack:
        item = stack.pop()
        content = None if isinstance(item, _SCALARS) else content_of(type(item))
        if content is None:
            count += 1
        elif id(item) not in seen:
            seen.add(id(item))
            stack += content.parts(item)
        if count > MAX_LEAVES:
            return False
    return True


def _find_content(cls: type) -> Content | None:
    base = next(parent for parent in cls.__mro__ if parent in _BASES)
    is_value = dataclasses.is_dataclass(cls) or (base is not object and (cls is base or cls.__eq__ is base.__eq__))
    is_config = not is_value and is_config_class(cls) and not hasattr(cls, "__del__")
    if not is_value and not is_config:
        return None
    if base is object:
        try:
            object.__new__(cls)
        except TypeError:  # a class derived from a type that keeps data in C, e.g. an exception
            return None
    return Content(cls, base, is_config)


def is_config_class(cls: type) -> bool:
    """Whether a class defines `__eq__` and no `__hash__`, as classes do whose instances are values that can change."""
    if cls.__hash__ is not None or is_omegaconf(cls):
        return False
    if cls.__eq__ in (Mapping.__eq__, Set.__eq__) and not issubclass(cls, (MutableMapping, MutableSet)):
        return False  # not the author's choice: a read-only interface comes with this `__eq__`
    base = next(parent for parent in cls.__mro__ if parent in _BASES)
    own = [parent for parent in cls.__mro__ if parent not in base.__mro__]
    return cls.__eq__ is not base.__eq__ and all(map(_is_written_in_python, own))


def is_omegaconf(cls: type) -> bool:
    """Whether a class is a config of OmegaConf. Taking one apart costs microseconds per entry, in every call."""
    return any(parent.__module__ == "omegaconf.base" and parent.__name__ == "Node" for parent in cls.__mro__)


def _is_written_in_python(cls: type) -> bool:
    """Whether `__dict__` and `__slots__` are all that a class adds to its instances."""
    return made_by_class_statement(cls) and not isinstance(vars(cls).get("__new__"), types.BuiltinFunctionType)
