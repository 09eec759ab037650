"""What a Module knows of itself, beside its values: the kinds of its attributes, its version, its trace level.

The values sit raw in the instance `__dict__`; the *kind* of each attribute sits here under the same name:

- a `Spec` (see variables): a variable of that type and metadata
- a `Ref` (see variables): a variable whose cell is shared
- `NODE`: a bare array; `TREE`: a pytree of arrays; `MODULE`: a submodule; `STATIC`: anything else
- an `Absent`: a variable for which no state was given

A change of kinds, static values or submodules is *structural*. If a cached flat form has seen the Module, it raises the
Module's version and replaces the global stamp, so that flat forms can tell in one comparison that nothing has changed.
"""

import sys
import weakref
from collections.abc import Iterator
from typing import Any

from nnx.core.errors import NO_STATE_GIVEN
from nnx.core.trace import current_level


class Kind:
    """A marker for the kinds of attribute that need no data of their own."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name: str = name

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name.upper()


NODE = Kind("node")
TREE = Kind("tree")
MODULE = Kind("module")
STATIC = Kind("static")


class Absent:
    """The kind of a variable that is part of the structure but was given no state."""

    __slots__ = ("spec",)

    def __init__(self, spec: Any):
        self.spec: Any = spec


class Structure:
    """The global stamp: a fresh object at every structural change of what a flat form has seen."""

    __slots__ = ("stamp",)

    def __init__(self) -> None:
        self.stamp: object = object()


STRUCTURE = Structure()


class WeakRegistry:
    """Objects to be found again while they are alive. Unlike a WeakSet it can be used from several threads.

    Every operation on the dict is a single C call, so that no other thread can come in between.
    """

    __slots__ = ("_references",)

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}

    def add(self, item: Any) -> None:
        references, number = self._references, id(item)
        references[number] = weakref.ref(item, lambda _: references.pop(number, None))

    def take_all(self) -> Iterator[Any]:
        """Removes and yields every object that is still alive."""
        while self._references:
            try:
                _, reference = self._references.popitem()
            except KeyError:  # another thread took the last one
                return
            item = reference()
            if item is not None:
                yield item


_flat_holders = WeakRegistry()


class Version:
    """How often the structure of one object has changed; apart from it, so that a cache can watch and not own."""

    __slots__ = ("count",)

    count: int

    def __init__(self) -> None:
        self.count = 0

    def changed(self) -> None:
        self.count += 1
        STRUCTURE.stamp = object()


class ModuleInfo:
    """The private half of a Module."""

    __slots__ = (
        "kinds", "level", "restructured", "version", "flat", "joint", "order", "constructing", "unsettled", "sown",
        "__weakref__",
    )  # fmt: skip

    def __init__(self, kinds: dict[str, Any], level: Any, constructing: bool = False):
        self.kinds: dict[str, Any] = kinds
        self.level: Any = level
        self.restructured = False  # whether there has been a structural change
        self.version: Version | None = None  # made when a flat form watches it: till then nothing cached depends on it
        self.flat: Any = None  # the cached flat form of the graph that starts here
        self.order: list[str] | None = None  # attribute names in path order
        self.constructing: bool = constructing
        self.unsettled: bool = False  # whether a static list or dict was assigned, which may yet come to hold Modules
        self.joint: Any = None  # the cached flat form of several roots, of which this Module is the first
        self.sown: set[str] | None = None  # names of variables that sow() has appended to

    def changed(self) -> None:
        """Notes a structural change."""
        self.restructured: bool = True
        self.order = None
        version = self.version
        if version is not None:
            self.flat = self.joint = None
            version.changed()

    def watch(self) -> Version:
        """The version, for a flat form to compare later."""
        if self.version is None:
            self.version = Version()
        return self.version

    def remember(self, flat: Any) -> None:
        self.flat = flat
        _flat_holders.add(self)

    def remember_joint(self, others: tuple[Any, ...], flat: Any) -> None:
        """Keeps the flat form of this Module and others, until one of the others is gone."""
        weak_self = weakref.ref(self)

        def forget(_: Any) -> None:
            info = weak_self()
            if info is not None:
                info.joint = None

        self.joint = ([weakref.ref(other, forget) for other in others], flat)
        _flat_holders.add(self)

    def sorted_names(self) -> list[str]:
        order = self.order
        if order is None:
            order = self.order = sorted(self.kinds, key=segment_order)
        return order


def forget_flat_forms() -> None:
    """Drops every cached flat form: one of them may be the last thing that keeps a removed submodule alive."""
    for info in _flat_holders.take_all():
        info.flat = info.joint = None


_MADE_BY_CLASS_STATEMENT = 1 << 9  # CPython's flag for types on the heap; the built-in ones are never freed


def outlives_caches(cls: type) -> bool:
    """Whether a class lives as long as the process, so that a cache may hold on to it.

    Classes defined in functions or in a notebook come and go; a cache that keeps them would keep all they refer to.
    """
    if not cls.__flags__ & _MADE_BY_CLASS_STATEMENT:
        return True
    if cls.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls


class ModuleBase:
    """The layout of a Module: an instance `__dict__` for values and one slot for the rest."""

    __slots__ = ("_nnx_info", "__dict__", "__weakref__")
    _nnx_info: ModuleInfo
    _nnx_holds_state = True


def new_module(cls: type, kinds: dict[str, Any], level: Any = None, constructing: bool = False) -> Any:
    """An instance of `cls` with the given kinds and no values; no constructor runs."""
    module = _new(cls)
    _set_dict(module, {})  # a dict of its own, not split with the class's: attribute reads stay specialised
    _set_info(module, ModuleInfo(kinds, current_level() if level is None else level, constructing))
    return module


_new = object.__new__
_set_info = ModuleBase.__dict__["_nnx_info"].__set__
_set_dict = ModuleBase.__dict__["__dict__"].__set__


def absent(cls: type, spec: Any) -> Absent:
    """The kind of a variable without state. From now on instances of `cls` say so when it is read.

    A class without such variables has no `__getattr__`: having one would slow down every attribute read.
    """
    if not hasattr(cls, "__getattr__"):
        cls.__getattr__ = _explain_missing
    return Absent(spec)


def _explain_missing(module: Any, name: str) -> Any:
    if hasattr(type(module), name):  # a property that raised AttributeError itself: let that one be seen
        return object.__getattribute__(module, name)
    kind = module._nnx_info.kinds.get(name)
    if type(kind) is Absent:
        text = NO_STATE_GIVEN.format(owner=type(module).__name__, name=name, kind=kind.spec)
        raise AttributeError(text, name=name, obj=module)
    raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}", name=name, obj=module)


# Names in __dict__ and segments of paths are the same, but for items of a Dict whose key is also the name of something
# on the class: those are stored under "/key", where attribute access does not find them.


def segment_of(name: str) -> str:
    """What a path calls the attribute stored under `name`."""
    return name[1:] if name[0] == "/" else name


def segment_order(name: str) -> tuple[int, int, str]:
    """Sorts path segments: numbers by value, then names."""
    segment = segment_of(name)
    if segment.isdecimal() and segment.isascii():
        return (0, int(segment), segment)
    return (1, 0, segment)


def join(prefix: str, name: str) -> str:
    """The path of the attribute `name` of the Module at `prefix`."""
    segment = segment_of(name)
    return f"{prefix}/{segment}" if prefix else segment
