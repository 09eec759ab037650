"""What an object holds, one level deep, and how to get from the object to each thing in it.

Several searches look behind users' functions and objects: for Modules and arrays that hide in a static value
(captures), and for the weights that a traced function reads (routes, in the transforms). A search decides where to
start, what to skip and when to stop. What Python objects consist of is decided here alone.

No user code runs: no property, no `__getattr__`, and no `__iter__` of a subclass of a built-in container.
"""

import collections
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

HOLD_NOTHING = frozenset({int, float, complex, str, bytes, bool, type(None), type(...), types.ModuleType})
"""The types whose values hold nothing that anybody looks for; `held_by` leaves such values out."""

NOT_THERE = (AttributeError, LookupError, TypeError, ValueError)
"""What `Step.take` raises if the object no longer holds anything there."""


class Step(NamedTuple):
    """One step from an object to something it holds. It has a kind and a name only, so it keeps nothing alive."""

    kind: str
    name: Any = None

    def take(self, owner: Any) -> Any:
        """Returns what the step leads to now."""
        return _TAKE[self.kind](owner, self.name)

    def text(self, owner: Any, owner_text: str) -> str:
        """Returns what the step leads to, as error messages call it."""
        if isinstance(owner, types.FunctionType):
            owner_text = owner.__qualname__
        return _TEXT[self.kind].format(owner=owner_text, name=self.name)


_TAKE = {
    "item": lambda owner, name: owner[name],
    "attribute": lambda owner, name: attribute(owner, name),
    "self": lambda owner, _: owner.__self__,
    "function": lambda owner, _: owner.__func__ if isinstance(owner, types.MethodType) else owner.func,
    "argument": lambda owner, name: (owner.args if type(name) is int else owner.keywords)[name],
    "cell": lambda owner, name: owner.__closure__[owner.__code__.co_freevars.index(name)].cell_contents,
    "default": lambda owner, name: (owner.__defaults__ if type(name) is int else owner.__kwdefaults__)[name],
    "global": lambda owner, name: owner.__globals__[name],
    "imported": lambda owner, name: sys.modules[name],
    "context": lambda owner, _: owner.get(),
    "class": lambda _, name: name(),  # a weak reference to the class, because no name leads to it
}  # a "key" or an "element" cannot be found again

_TEXT = {
    "item": "{owner}[{name!r}]",
    "key": "a key of {owner}",
    "element": "an element of {owner}",
    "attribute": "{owner}.{name}",
    "self": "self of {owner}",
    "function": "the function of {owner}",
    "argument": "an argument of {owner}",
    "cell": "{name!r} in the closure of {owner}",
    "default": "a default of {owner}",
}

Held = tuple[Step, Any]
"""A thing that an object holds, with the step to it."""


def held_by(value: Any) -> Iterator[Held]:
    """Yields what a value holds: items, attributes, and what a function, method or partial is made of."""
    if isinstance(value, types.MethodType):
        yield Step("function"), value.__func__
        yield Step("self"), value.__self__
        return
    if isinstance(value, types.FunctionType):
        yield from _steps("cell", zip(value.__code__.co_freevars, closure_of(value), strict=True))
        yield from _steps("default", enumerate(value.__defaults__ or ()))
        yield from _steps("default", (value.__kwdefaults__ or {}).items())
    elif isinstance(value, functools.partial):
        yield Step("function"), value.func
        yield from _steps("argument", enumerate(value.args))
        yield from _steps("argument", value.keywords.items())
    elif isinstance(value, (dict, types.MappingProxyType)):
        items = list(dict.items(value) if isinstance(value, dict) else value.items())
        yield from ((Step("key"), key) for key, _ in items if type(key) not in HOLD_NOTHING)
        yield from _steps("item", items)
    elif isinstance(value, (list, tuple, collections.deque, set, frozenset)):
        base: Any = next(parent for parent in type(value).__mro__ if parent in _ITEM_KINDS)
        yield from _steps(_ITEM_KINDS[base], enumerate([*base.__iter__(value)]))
    if type(value) not in _ITEM_KINDS:  # of these types only the subclasses have attributes
        yield from _steps("attribute", attributes_of(value))


_ITEM_KINDS: dict[type, str] = {
    dict: "item", list: "item", tuple: "item", collections.deque: "item", set: "element", frozenset: "element",
}  # fmt: skip


def _steps(kind: str, held: Iterable[tuple[Any, Any]]) -> Iterator[Held]:
    return ((Step(kind, name), item) for name, item in held if type(item) not in HOLD_NOTHING)


def closure_of(function: Any) -> list[Any]:
    """Returns what the cells of a function's closure hold, with `...` for one that was never filled."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(...)
    return found


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of what an object holds in its `__dict__` and its slots."""
    yield from list(getattr(value, "__dict__", {}).items())
    if isinstance(value, (types.FunctionType, type)):
        return
    for name in member_names(type(value)):
        if isinstance(value, functools.partial) and name in member_names(functools.partial):
            continue
        try:
            yield name, object.__getattribute__(value, name)  # a `__getattr__` might compute the value and store it
        except AttributeError:  # a slot that was never set
            continue


def attribute(value: Any, name: str) -> Any:
    """Returns an attribute, inherited or not, without running a property or a `__getattr__`."""
    found = inspect.getattr_static(value, name)
    is_in_slot = isinstance(found, (types.MemberDescriptorType, types.GetSetDescriptorType))
    return getattr(value, name) if is_in_slot else found


_members: "weakref.WeakKeyDictionary[type, tuple[str, ...]]" = weakref.WeakKeyDictionary()


def member_names(cls: type) -> tuple[str, ...]:
    """Returns the names of all `__slots__` of a class, and of what built-in types store the same way."""
    names = _members.get(cls)
    if names is None:
        found = (name for parent in cls.__mro__ for name, member in vars(parent).items() if is_member(member))
        names = _members[cls] = tuple(found)
    return names


def is_member(member: Any) -> bool:
    """Whether what a class has under a name is a slot."""
    return isinstance(member, types.MemberDescriptorType)


# The names that a function's code mentions


_names: "weakref.WeakKeyDictionary[types.CodeType, tuple[str, ...]]" = weakref.WeakKeyDictionary()


def code_names(code: types.CodeType) -> tuple[str, ...]:
    """Returns the global and attribute names that a function's code mentions, functions defined inside it included."""
    names = _names.get(code)
    if names is None:
        found, codes = {}, [code]
        while codes:
            inner = codes.pop(0)
            found.update(dict.fromkeys(inner.co_names))
            codes += [const for const in inner.co_consts if isinstance(const, types.CodeType)]
        names = _names[code] = tuple(found)
    return names


def globals_of(function: types.FunctionType) -> Iterator[Held]:
    """Yields the globals whose names the code of a function mentions, atoms included."""
    for name in code_names(function.__code__):
        if name in function.__globals__:
            yield Step("global", name), function.__globals__[name]
