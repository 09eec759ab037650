"""ModuleInfo: what the library keeps about one Module, next to its values.

The values are stored raw in the instance `__dict__`; the *kind* of each attribute is stored here under the same name
(see kinds). The rest is bookkeeping: the trace level, the version, the cached flat form, what `sow` has appended to.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from operator import attrgetter, call, setitem
from typing import Any

from nnx.core.errors import HAS_SLOTS
from nnx.core.state.paths import segment_order
from nnx.core.structure.versions import STRUCTURE, Revision, Version, flat_holders
from nnx.core.trace import current_level
from nnx.core.variables.trees import holds_dicts

MAX_FLAT_FORMS = 6  # per Module; a step that adds variables for the caller to pop needs two


class ModuleInfo:
    """The private half of a Module."""

    is_view = False  # see views

    __slots__ = (
        "kinds", "level", "restructured", "version", "flat", "joint", "flats", "order", "inserted", "ordered_at",
        "constructing", "undecided", "sown", "path", "__weakref__",
    )  # fmt: skip

    def __init__(self, kinds: dict[str, Any], level: Any, constructing: bool = False):
        self.kinds: dict[str, Any] = kinds  # in the order in which the attributes were set, as in the instance dict
        self.level: Any = level
        self.restructured = False  # whether there has been a structural change
        # Made when a flat form starts to watch this Module. Until then nothing cached depends on it, so constructors
        # can assign attributes without replacing the global stamp.
        self.version: Version | None = None
        self.flat: Any = None  # the flat form of the graph that starts here, the one used last
        self.order: list[str] | None = None  # attribute names in path order
        self.inserted: tuple[str, ...] | None = None  # those names as they were set, if that is another order
        self.constructing: bool = constructing
        self.undecided: bool = False  # whether a static list or dict was assigned that may still come to hold Modules
        self.joint: Any = None  # the flat form of several roots, of which this Module is the first; the one used last
        self.flats: tuple[Any, ...] = ()  # all flat forms in use, also those whose revisions may come back
        self.ordered_at: Revision | None = None  # the revision that `order` belongs to
        self.path: str | None = None  # the canonical path, if the Module was rebuilt inside a transform
        self.sown: set[str] | None = None  # names of variables that sow() has ever appended to; see sown_names

    def changed(self) -> None:
        """Notes a structural change that is not undone (see versions)."""
        self.restructured: bool = True
        self.order = None
        version = self.version
        if version is not None:
            self.forget()
            version.changed()

    def change_steps(self) -> list[tuple[Any, str, Any]]:
        """Returns what `changed` does, as assignments `(object, attribute, value)` to be made later."""
        version = self.watch()
        return [
            (self, "flat", None),
            (self, "joint", None),
            (self, "flats", ()),
            (self, "order", None),
            (self, "restructured", True),
            *version.change_steps(),
        ]

    # Plain variables: those that are not on a Ref. Adding and removing them leads to revisions that may come back.

    def bind(self, values: dict[str, Any], name: str, kind: Any, value: Any) -> None:
        """Adds a plain variable, or gives one another kind, and stores its value; not for mutable trees.

        Args:
            values: the instance dict.
            name: the attribute. If it exists, it is a plain variable.
            kind: its new kind: a spec, NODE or TREE.
            value: what to store.
        """
        self.restructured = True
        version = self.version
        if version is None:
            self.kinds[name] = kind
            values[name] = value
            self.order = None
            return
        revision = version.revision.after(name, self.kinds.get(name), revised(kind, value))
        # One C call: a thread that walks the graph meanwhile must not find the new kind under the old revision, nor the
        # reverse. What it wrote down would be taken for valid when that revision comes back.
        writes = map(setitem, (self.kinds, values), (name, name), (kind, value))
        deque(chain(writes, map(setattr, (version, STRUCTURE), _MOVED, (revision, object()))), maxlen=0)

    def unbind(self, values: dict[str, Any], name: str) -> None:
        """Removes a plain variable and its value."""
        self.restructured = True
        version = self.version
        if version is None:
            del self.kinds[name]
            values.pop(name, None)
            self.order = None
            return
        revision = version.revision.after(name, self.kinds[name], None)
        removals = map(dict.pop, (self.kinds, values), (name, name), (None, None))
        deque(chain(removals, map(setattr, (version, STRUCTURE), _MOVED, (revision, object()))), maxlen=0)

    def keep_place(self, values: dict[str, Any]) -> None:
        """Moves a variable that had no state from the end of the instance dict to its place in order."""
        names = [name for name in self.kinds if name in values]
        if [name for name in values if name in self.kinds] != names:
            deque(map(call, arrange(values, names)), maxlen=0)

    # Flat forms

    def watch(self) -> Version:
        """Returns the version, for a flat form to compare later."""
        if self.version is None:
            self.version = Version()
            self.ordered_at = self.version.revision
        return self.version

    def remember(self, flat: Any) -> None:
        """Keeps the flat form of the graph that starts at this Module."""
        self.flat = flat
        self._keep(flat)

    def remember_joint(self, others: tuple[Any, ...], flat: Any) -> None:
        """Keeps the flat form of this Module and others, until one of the others is gone."""
        weak_self = weakref.ref(self)

        def forget(_: Any) -> None:
            info = weak_self()
            if info is not None:
                info.forget()

        self.joint = ([weakref.ref(other, forget) for other in others], flat)
        self._keep(flat)

    def _keep(self, flat: Any) -> None:
        useful = [other for other in self.flats if other is not flat and other.may_come_back()]
        self.flats = (flat, *useful[: MAX_FLAT_FORMS - 1])
        flat_holders.add(self)

    def forget(self) -> None:
        """Drops all flat forms."""
        self.flat = self.joint = None
        self.flats = ()

    # Names

    def mark_sown(self, *names: str) -> None:
        """Notes that `sow` has appended to these variables."""
        if self.sown is None or not self.sown.issuperset(names):
            self.sown = {*(self.sown or ()), *names}
            if self.version is not None:  # flat forms know whether there are sown values
                self.changed()

    def sown_names(self, values: dict[str, Any]) -> list[str]:
        """Returns the variables that hold sown values, given the instance dict.

        A variable that was popped is still in `sown`: the next call will most likely make it again.
        """
        return sorted([name for name in self.sown or () if name in self.kinds and isinstance(values[name], tuple)])

    def sorted_names(self) -> list[str]:
        """Returns the attribute names in path order."""
        order, revision = self.order, None if self.version is None else self.version.revision
        if order is None or self.ordered_at is not revision:
            names = [*self.kinds]
            order = sorted(names, key=segment_order)
            # Unless another thread has just added or removed a variable: then this may be the order before or after.
            if (None if self.version is None else self.version.revision) is revision:
                self.inserted = None if order == names else tuple(names)
                self.order, self.ordered_at = order, revision
        return order

    def printed_names(self) -> list[str]:
        """Returns the attribute names in the order in which they were set, or those of a Sequence by number."""
        names = [*self.kinds]
        return self.sorted_names() if all(map(str.isdecimal, names)) else names

    def insertion_order(self) -> tuple[str, ...] | None:
        """Returns the attribute names in the order in which they were set, or None if that is path order."""
        self.sorted_names()
        return self.inserted


def revised(kind: Any, value: Any) -> Any:
    """Returns what a revision knows of a plain variable.

    That is its kind, and whether it holds dicts: a flat form of this revision has to ask for the order of their items.
    """
    return (kind, dict) if holds_dicts(value) else kind


def arrange(held: dict[str, Any], names: Iterable[str]) -> list[Callable[[], Any]]:
    """Returns the steps that put the items of a dict in order, as calls of C functions.

    The dict is empty in between, so all of them have to run in one C call.

    Args:
        held: the dict.
        names: the names that it has, or will have by then, in order; any others come last.
    """
    items = dict.fromkeys(names)  # a place for every item: `update` fills places that exist
    return [partial(items.update, held), held.clear, partial(held.update, items)]


_MOVED = ("revision", "stamp")  # what `bind` and `unbind` set, on the version and on the global stamp


class DerivedClass:
    """The base of the classes that the library makes of users' Module classes: those of views and observed Modules.

    It comes first in their method resolution order, so its `__init_subclass__` runs instead of the user's: a class that
    registers its subclasses does not register ours.
    """

    __slots__ = ()

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def derive_class(cls: type, base: type[DerivedClass], **attributes: Any) -> Any:
    """Makes a subclass of a Module class that looks like it: same name, same module, same docstring."""
    looks = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (base, cls), {**looks, "_nnx_free_names": set(), **attributes})


class ModuleBase:
    """What every Module has in memory: an instance `__dict__` for the values, and one slot for everything else."""

    __slots__ = ("_nnx_info", "__dict__", "__weakref__")
    _nnx_info: ModuleInfo
    _nnx_holds_state = True
    _nnx_viewed: type | None = None  # of a view class, the class it is made of


def check_slots(cls: type) -> None:
    """Raises TypeError if a Module class declares slots."""
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    if any(name not in ("__dict__", "__weakref__") for name in names):
        raise TypeError(HAS_SLOTS.format(name=cls.__name__, slots=names))


info_of: Callable[[Any], ModuleInfo] = attrgetter("_nnx_info")
"""Returns the ModuleInfo of a Module."""

inserted_names: Callable[[Any], tuple[str, ...] | None] = attrgetter("_nnx_info.inserted")
"""Returns what `insertion_order` last returned for a Module; valid as long as the sorted names are."""

cached_flat: Callable[[Any], Any] = attrgetter("_nnx_info.flat")
"""Returns the cached flat form of the graph that starts at a Module, or None; it may no longer be valid."""


is_view: Callable[[Any], type | None] = attrgetter("_nnx_viewed")
"""Returns the class that a view was made of, or None if the Module is not a view (see views)."""


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


def new_module(
    cls: type,
    kinds: dict[str, Any],
    level: Any = None,
    constructing: bool = False,
    values: dict[str, Any] | None = None,
) -> Any:
    """Makes an instance of `cls` with the given kinds, and `values` for its instance dict; no constructor runs."""
    module = _new(cls)
    # A dict whose keys are not shared with other instances of the class: attribute reads stay specialized.
    _set_dict(module, {} if values is None else values)
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
