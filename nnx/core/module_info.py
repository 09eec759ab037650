"""ModuleInfo: what the library keeps about one Module, next to its values.

The values are stored raw in the instance `__dict__`; the *kind* of each attribute is stored here under the same name
(see kinds). The rest is bookkeeping: the trace level, the version, the cached flat form, what `sow` has appended to.
"""

import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from nnx.core.paths import segment_order
from nnx.core.trace import current_level
from nnx.core.versions import Version, flat_holders


class ModuleInfo:
    """The private half of a Module."""

    is_view = False  # see views

    __slots__ = (
        "kinds", "level", "restructured", "version", "flat", "joint", "order", "constructing", "unsettled", "sown",
        "path", "__weakref__",
    )  # fmt: skip

    def __init__(self, kinds: dict[str, Any], level: Any, constructing: bool = False):
        self.kinds: dict[str, Any] = kinds
        self.level: Any = level
        self.restructured = False  # whether there has been a structural change
        # Made when a flat form starts to watch this Module. Until then nothing cached depends on it, so constructors
        # can assign attributes without replacing the global stamp.
        self.version: Version | None = None
        self.flat: Any = None  # the cached flat form of the graph that starts here
        self.order: list[str] | None = None  # attribute names in path order
        self.constructing: bool = constructing
        self.unsettled: bool = False  # whether a static list or dict was assigned that may still come to hold Modules
        self.joint: Any = None  # the cached flat form of several roots, of which this Module is the first
        self.path: str | None = None  # the canonical path, if the Module was rebuilt inside a transform
        self.sown: set[str] | None = None  # names of variables that sow() has appended to

    def changed(self) -> None:
        """Notes a structural change."""
        self.restructured: bool = True
        self.order = None
        version = self.version
        if version is not None:
            self.flat = self.joint = None
            version.changed()

    def change_steps(self) -> list[tuple[Any, str, Any]]:
        """Returns what `changed` does, as assignments `(object, attribute, value)` to be made later."""
        version = self.watch()
        return [
            (self, "flat", None),
            (self, "joint", None),
            (self, "order", None),
            (self, "restructured", True),
            *version.change_steps(),
        ]

    def watch(self) -> Version:
        """Returns the version, for a flat form to compare later."""
        if self.version is None:
            self.version = Version()
        return self.version

    def remember(self, flat: Any) -> None:
        """Keeps the flat form of the graph that starts at this Module."""
        self.flat = flat
        flat_holders.add(self)

    def remember_joint(self, others: tuple[Any, ...], flat: Any) -> None:
        """Keeps the flat form of this Module and others, until one of the others is gone."""
        weak_self = weakref.ref(self)

        def forget(_: Any) -> None:
            info = weak_self()
            if info is not None:
                info.joint = None

        self.joint = ([weakref.ref(other, forget) for other in others], flat)
        flat_holders.add(self)

    def mark_sown(self, *names: str) -> None:
        """Notes that `sow` has appended to these variables."""
        self.sown = {*(self.sown or ()), *names}

    def sorted_names(self) -> list[str]:
        """Returns the attribute names in path order."""
        order = self.order
        if order is None:
            order = self.order = sorted(self.kinds, key=segment_order)
        return order


class ModuleBase:
    """The layout of a Module: an instance `__dict__` for values and one slot for the rest."""

    __slots__ = ("_nnx_info", "__dict__", "__weakref__")
    _nnx_info: ModuleInfo
    _nnx_holds_state = True
    _nnx_viewed: type | None = None  # of a view class, the class it is made of


info_of: Callable[[Any], ModuleInfo] = attrgetter("_nnx_info")
"""Returns the ModuleInfo of a Module."""

cached_flat: Callable[[Any], Any] = attrgetter("_nnx_info.flat")
"""Returns the cached flat form of the graph that starts at a Module, or None; it may no longer be valid."""


is_view: Callable[[Any], type | None] = attrgetter("_nnx_viewed")
"""Returns something true if a Module is a view of another one (see views)."""


def values_of(module: Any) -> dict[str, Any]:
    """Returns what the attributes of a Module hold, to be read only.

    This is the instance dict. But the submodules of a view, and its own static values, are not in there: it shares the
    instance dict with the Module it is a view of.
    """
    info = module._nnx_info
    return info.values() if info.is_view else module.__dict__


def class_of(module: Any) -> type:
    """Returns the class of a Module as its author wrote it; that of a view is a subclass."""
    return module._nnx_viewed or type(module)


def new_module(cls: type, kinds: dict[str, Any], level: Any = None, constructing: bool = False) -> Any:
    """Makes an instance of `cls` with the given kinds and no values; no constructor runs."""
    module = _new(cls)
    # A dict whose keys are not shared with other instances of the class: attribute reads stay specialized.
    _set_dict(module, {})
    _set_info(module, ModuleInfo(kinds, current_level() if level is None else level, constructing))
    return module


def new_view(cls: type, info: Any, instance_dict: dict[str, Any]) -> Any:
    """Makes an instance of a view class around an existing instance dict."""
    view = _new(cls)
    _set_dict(view, instance_dict)
    _set_info(view, info)
    return view


_new = object.__new__
_set_info = ModuleBase.__dict__["_nnx_info"].__set__
_set_dict = ModuleBase.__dict__["__dict__"].__set__
