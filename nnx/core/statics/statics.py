"""Static values, copied: how a rebuilt Module gets its own, and how one is kept outside any graph.

`Statics` are the static values of a graph, *detached* from the originals: copies in which bound methods of Modules are
replaced by `BoundMethod`s. *Attaching* makes the values of a rebuilt graph from them. keys decides when
two static values are equal, and contents what they are made of.
"""

import enum
import functools
import types
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

import numpy as np

from nnx.core.errors import STATE_IN_STATIC_VALUE
from nnx.core.module.info import ModuleBase
from nnx.core.statics.contents import content_for, content_of
from nnx.core.statics.keys import (
    ATOMS,
    BoundMethod,
    ForeignMethod,
    HoldsState,
    KeyMaker,
    OpenFunction,
    in_no_graph,
    settle,
)
from nnx.core.statics.watches import watched_unchanged

_SHARED_AS_IS = ATOMS | {float, complex, range, slice, types.FunctionType, types.BuiltinFunctionType, type, np.dtype}

Refill = Callable[[], Any]


class Copier:
    """Copies static values so that they share no mutable value with the original. Sharing among them is preserved.

    Args:
        leaf: a function that returns the replacement of a value that is not compared by content.
    """

    def __init__(self, leaf: Callable[[Any], Any]):
        self.leaf = leaf
        self.made: dict[int, Any] = {}  # the copies by the id of the original, so that one object has one copy

    def copy(self, value: Any) -> Any:
        """Returns a copy of a value, or the value itself if nothing in it can change."""
        cls = type(value)
        if cls in _SHARED_AS_IS:
            return value
        content = None if isinstance(value, (enum.Enum, np.generic)) else content_for(value)
        if content is None or not content.is_copied:
            return self._copy_method(value) if cls is types.MethodType else self.leaf(value)
        found = self.made.get(id(value))
        if found is not None:
            return found
        if content.is_mutable:
            # Entered in `made` before it is filled, so that a value that contains itself is copied once.
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

    def fill(self, target: Any, source: Any) -> list[Refill]:
        """Returns the steps that make a mutable value hold copies of what another one holds."""
        content: Any = content_of(type(source))
        return content.steps(target, *self._copies(content.base.items(source), content.attributes(source)))

    def _copies(self, items: Iterable[Any], attributes: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        return [self.copy(item) for item in items], {name: self.copy(item) for name, item in attributes.items()}


class Statics:
    """The static values of a graph, detached from it: copies that nobody else holds, and that nobody changes.

    `values` has one entry per static attribute; `mutables` has the mutable values among and inside them, by number;
    `functions` has the functions whose keys were open when the keys of the values were made.
    """

    __slots__ = ("values", "mutables", "functions", "_own")

    values: tuple[Any, ...]
    mutables: tuple[Any, ...]
    functions: tuple[OpenFunction, ...]

    def __init__(
        self,
        values: tuple[Any, ...],
        mutables: tuple[Any, ...],
        own: tuple[bool, ...],
        functions: tuple[OpenFunction, ...] = (),
    ):
        self.values = values
        self.mutables = mutables
        self.functions = functions
        self._own = own  # per value: whether a rebuilt Module needs its own copy

    def __getstate__(self) -> Any:
        # Without the open functions: their keys hold identities of this process.
        return None, {"values": self.values, "mutables": self.mutables, "_own": self._own}

    def __setstate__(self, state: Any) -> None:
        for name, value in state[1].items():
            setattr(self, name, value)
        self.functions = ()

    @property
    def can_change(self) -> bool:
        """Whether a body could change one of the values in place."""
        return bool(self.mutables)

    def attach(self, modules: Sequence[Any]) -> tuple[Sequence[Any], list[Any]]:
        """Returns the values for a rebuilt graph with these Modules, and the mutable ones by number."""
        if True not in self._own:
            return self.values, []
        copier = Copier(functools.partial(_attached, modules))
        values = [copier.copy(value) if own else value for value, own in zip(self.values, self._own, strict=True)]
        return values, [copier.made.get(id(mutable), mutable) for mutable in self.mutables]

    def attach_onto(
        self, modules: Sequence[Any], existing: dict[int, Any], changed: Iterable[int]
    ) -> tuple[list[Any], list[Refill]]:
        """Like `attach`, but for a graph in which some mutable values exist already: they keep their identity.

        Args:
            modules: the Modules that methods are bound to.
            existing: the mutable values that exist, by number.
            changed: the numbers of those whose content has to be replaced by the content here.

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


def detach(
    values: Sequence[Any],
    mutables: Sequence[Any],
    functions: Iterable[OpenFunction],
    index_of: Callable[[Any], int | None],
) -> Statics:
    """Returns the Statics of a graph, from its static values and what its KeyMaker has met among them."""
    copier = Copier(functools.partial(_detached, index_of))
    copies = [copier.copy(value) for value in values]
    own = tuple([copy is not value for copy, value in zip(copies, values, strict=True)])
    detached = tuple([copier.made.get(id(mutable), mutable) for mutable in mutables])
    return Statics(tuple(copies), detached, own, tuple(functions))


def _detached(index_of: Callable[[Any], int | None], value: Any) -> Any:
    if isinstance(value, types.MethodType) and isinstance(value.__self__, ModuleBase):
        index = index_of(value.__self__)
        assert index is not None, "keys are not made for methods of other graphs"
        return BoundMethod(index, value.__func__)
    return value


def _attached(modules: Sequence[Any], value: Any) -> Any:
    return types.MethodType(value.function, modules[value.index]) if type(value) is BoundMethod else value


def own_copy(value: Any) -> Any:
    """Returns a copy of a static value outside any graph, such as metadata, or the value itself if it cannot change."""
    return Copier(lambda leaf: leaf).copy(value)


# Static values outside any graph


class Keyed:
    """A static value as hashable auxiliary data, compared by its key; errors refer to it as `name`.

    Raises:
        ValueError: the value is or holds a Module, a Variable or a method of a Module.
    """

    __slots__ = ("value", "key", "_watch")

    def __init__(self, value: Any, name: str = "in nnx.Static"):
        maker = KeyMaker(in_no_graph, arrays_inside=True)
        self.value: Any = value
        try:
            self.key: Any = self._key(maker, value, name)
        except (HoldsState, ForeignMethod) as found:
            is_method = isinstance(found, ForeignMethod)
            what = f"a bound method of a Module ({found.what})" if is_method else found.what
            raise ValueError(STATE_IN_STATIC_VALUE.format(route=found.route, what=what)) from None
        settle(maker.functions.values())  # JAX caches traces by this object, and does not report when it compiles
        self._watch = [watch for watches in maker.watches for watch in watches]

    def _key(self, maker: KeyMaker, value: Any, name: str) -> Any:
        return maker.key(value, name)

    @property
    def watched(self) -> bool:
        """Whether the value holds something mutable, which can change without notice."""
        return bool(self._watch)

    def is_current(self) -> bool:
        """Whether the value is still what it was when its key was made."""
        return watched_unchanged(self._watch)

    def __eq__(self, other: Any) -> bool:
        return self is other or (isinstance(other, Keyed) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.value)

    def __reduce__(self) -> Any:
        return (type(self), (self.value,))


class KeyedFields(Keyed):
    """The static fields of one record by name, keyed together; errors refer to a field as `name.field`.

    The fields go through one KeyMaker, so a list held by two of them is one list in the key. The dict around them is
    private to this object and not watched, so fields that hold nothing mutable never have to be keyed again.
    """

    __slots__ = ()

    def _key(self, maker: KeyMaker, value: dict[str, Any], name: str) -> Any:
        return tuple([(field, maker.key(held, f"{name}.{field}")) for field, held in value.items()])
