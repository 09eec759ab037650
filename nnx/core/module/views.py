"""Views: a second graph of Modules on the variables of a first one, with other values for some static attributes.

A view shares the *instance dict* and the kinds with the Module it is a view of, its *source*. So both have the same
variables, in the same cells, and the source does not know that it has views: a value that a training step writes into a
cell of the source is there for the view. What differs is kept in the ViewInfo of the view: its *own* static values, and
the views of the submodules. Everything that is not the view's own is assigned to the source.

The class of a view is a subclass of the source's class, which shows these two in place of what the dict holds.
The structure of a graph does not know views. It names the class of the source, so a view has the ModuleDef that the
model would have with these attributes, and transforms rebuild it as an ordinary Module. *Twins* are Modules of one
graph with the same instance dict: a Module and its view, or two views. Their cells are shared, as by a Ref.
"""

import copy
import types
import weakref
from typing import Any

from nnx.core.errors import NOTHING_TO_VIEW
from nnx.core.module.attributes import static_value, store
from nnx.core.module.info import (
    DerivedClass,
    ModuleBase,
    ModuleInfo,
    class_of,
    derive_class,
    info_of,
    is_view,
    new_view,
    values_of,
)
from nnx.core.module.kinds import SUBMODULE, is_static
from nnx.core.state.paths import listing
from nnx.core.structure.versions import Version
from nnx.core.structure.walk import number_modules


class ViewGraph:
    """The views made by one call of `Module.view`: one per Module they have been asked for.

    Submodules are looked up when they are read, so a submodule that the source gets later has its view as well.

    Args:
        attributes: the static values that differ, by name.
    """

    __slots__ = ("attributes", "_views")

    def __init__(self, attributes: dict[str, Any]):
        self.attributes = attributes
        # By the id of the source. A view holds its source, so no id is used again while its entry is there. The views
        # themselves are held by their parents: a submodule that was replaced must not stay alive in here.
        self._views: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def view_of(self, source: Any) -> Any:
        """Returns the view of a Module, always the same one."""
        info = info_of(source)
        if type(info) is ViewInfo and info.graph is self:
            return source
        view = self._views.get(id(source))
        if view is None:
            info = ViewInfo(source, self, dict(self.attributes))
            view = new_view(view_class(class_of(source)), info, source.__dict__)
            view = self._views.setdefault(id(source), view)
        return view

    def __reduce__(self) -> Any:
        return (ViewGraph, (self.attributes,))


class ViewInfo(ModuleInfo):
    """The private half of a view: everything about structure is that of the source."""

    __slots__ = ("source", "graph", "own", "children")

    is_view = True

    def __init__(self, source: Any, graph: ViewGraph, own: dict[str, Any]):
        info = info_of(source)
        self.source, self.graph = source, graph
        self.own = own  # static values by name, whether or not the source has such an attribute at the moment
        self.children: dict[str, Any] = {}  # the views of the submodules, as far as they have been asked for
        self.kinds, self.level = info.kinds, info.level
        self.forget()

    # In a class with slots, these properties hide the slots of ModuleInfo.
    restructured = property(lambda self: info_of(self.source).restructured)  # type: ignore[assignment]
    sown = property(lambda self: info_of(self.source).sown)  # type: ignore[assignment]
    path = property(lambda self: info_of(self.source).path)  # type: ignore[assignment]
    inserted = property(lambda self: info_of(self.source).inserted)  # type: ignore[assignment]
    constructing = undecided = False

    def changed(self) -> None:
        self.forget()
        info_of(self.source).changed()

    def change_steps(self) -> list[tuple[Any, str, Any]]:
        return [(self, "flat", None), (self, "joint", None), (self, "flats", ()), *info_of(self.source).change_steps()]

    def bind(self, values: dict[str, Any], name: str, kind: Any, value: Any) -> None:
        info_of(self.source).bind(values, name, kind, value)

    def unbind(self, values: dict[str, Any], name: str) -> None:
        info_of(self.source).unbind(values, name)

    def watch(self) -> Version:
        return info_of(self.source).watch()

    def mark_sown(self, *names: str) -> None:
        info_of(self.source).mark_sown(*names)

    def sorted_names(self) -> list[str]:
        return info_of(self.source).sorted_names()

    def owns(self, name: str) -> bool:
        """Whether a static attribute has a value that is the view's own."""
        return name in self.own and is_static(self.kinds.get(name))

    def shown(self, name: str, stored: Any) -> Any:
        """Returns what an attribute of the view is, given what the same attribute of the source is."""
        kind = self.kinds.get(name)
        if kind is SUBMODULE:
            view = self.children.get(name)
            if view is None or _info(view).source is not stored:
                view = self.children[name] = self.graph.view_of(stored)
            return view
        if is_static(kind):
            if name in self.own:
                return self.own[name]
            if type(stored) is types.MethodType and isinstance(stored.__self__, ModuleBase):
                return types.MethodType(stored.__func__, self.graph.view_of(stored.__self__))
        return stored

    def values(self) -> dict[str, Any]:
        """Returns what every attribute of the view is."""
        return {name: self.shown(name, stored) for name, stored in values_of(self.source).items()}

    def stored(self, value: Any) -> Any:
        """Returns what the source holds for a value that is assigned to the view: the sources of views of this graph.

        If the value is a new Module, the views that it holds are replaced as well.
        """
        if not isinstance(value, ModuleBase) or is_view(value):
            return self._unviewed(value)
        for module in number_modules((value,)).modules:
            if not is_view(module):
                for name, held in list(module.__dict__.items()):
                    if self._unviewed(held) is not held:
                        store(module, name, info_of(module).kinds[name], self._unviewed(held))
        return value

    def _unviewed(self, value: Any) -> Any:
        if type(value) is types.MethodType:
            owner = self._unviewed(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        info = info_of(value) if isinstance(value, ModuleBase) else None
        return info.source if type(info) is ViewInfo and info.graph is self.graph else value


class View(DerivedClass):
    """The base of view classes."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name[:5] == "_nnx_" or name[:2] == "__":
            return value
        info = _info(self)
        kind = info.kinds.get(name)
        if kind is not SUBMODULE and not is_static(kind):  # data, or a method
            return value
        return info.shown(name, values_of(info.source)[name] if info_of(info.source).is_view else value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _deep_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        info = _info(self)
        children = {name: value for name, value in info.values().items() if info.kinds.get(name) is SUBMODULE}
        return (ViewGraph.view_of, (info.graph, info.source), (info.own, children))

    def __setstate__(self, state: Any) -> None:
        info = _info(self)
        info.own, info.children = state


_info: Any = ModuleBase.__dict__["_nnx_info"].__get__


def view_class(cls: type) -> type:
    """Returns the class of the views of a Module class; always the same one.

    It is kept on the class itself, so that it lives as long as the class does and no cache keeps either alive.
    """
    if "_nnx_view" not in cls.__dict__:
        made = derive_class(cls, View, _nnx_viewed=cls)
        if "_nnx_view" not in cls.__dict__:  # another thread may have made one by now
            type.__setattr__(cls, "_nnx_view", made)
    return cls.__dict__["_nnx_view"]


def make_view(model: Any, attributes: dict[str, Any]) -> Any:
    """Returns a view of a Module with these static attributes.

    Raises:
        ValueError: no Module in it has a static attribute of that name, or the value is not static.
    """
    values = {name: static_value(model, name, value) for name, value in attributes.items()}
    modules = number_modules((model,)).modules
    known = {name for module in modules for name, kind in info_of(module).kinds.items() if is_static(kind)}
    unknown = [name for name in values if name not in known]
    if unknown:
        text = {"names": ", ".join(map(repr, unknown)), "known": listing(sorted(known)) if known else "none"}
        raise ValueError(NOTHING_TO_VIEW.format(owner=type(model).__name__, **text))
    return ViewGraph(values).view_of(model)


def _deep_copy(view: Any, memo: dict[int, Any]) -> Any:
    """Returns a view of a copy of the source; `memo` keeps it a view of the same copy that others get."""
    info = _info(view)
    graph = memo.setdefault(id(info.graph), ViewGraph(copy.deepcopy(info.graph.attributes, memo)))
    copies = []  # held until the walk below has given them to their parents
    for module in number_modules((view,)).modules:
        held = info_of(module)
        if type(held) is ViewInfo and held.graph is info.graph:
            copied = graph.view_of(copy.deepcopy(held.source, memo))
            _info(copied).own = copy.deepcopy(held.own, memo)
            copies.append(copied)
    number_modules(copies[:1])
    memo[id(view)] = copies[0]
    return copies[0]
