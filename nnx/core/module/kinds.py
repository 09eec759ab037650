"""Kinds: what an attribute of a Module is. Assignment decides the kind (see attributes).

- a `Spec` (see variables): a variable of that type and metadata, or, if the type is `nnx.Static`, a static value
- a `Ref` (see refs): a variable whose cell several attributes share
- `NODE`: a bare array
- `TREE`: a pytree of arrays
- `SUBMODULE`: a Module
- `STATIC`: anything else
- an `Absent`: a variable for which no state was given

Attributes of the first four kinds (but for `nnx.Static`) hold data: each has a *cell*, the place of one State entry.
In the structure of a graph, which knows no Refs and no live objects, an `Absent` appears as `ABSENT`.
"""

from typing import Any

from nnx.core.errors import NO_STATE_GIVEN
from nnx.core.hints.hints import Hint, called
from nnx.core.hints.table import MODULE
from nnx.core.module.info import ModuleBase, info_of
from nnx.core.variables.variables import Node, Spec, Static, Variable


class Kind:
    """A marker for the kinds of attribute that carry no data themselves."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name: str = name

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name.upper()  # the constant below: pickle stores its name, so that `is` still holds afterward


NODE = Kind("node")
TREE = Kind("tree")
SUBMODULE = Kind("submodule")
STATIC = Kind("static")
ABSENT = Kind("absent")

TREE_SPEC = Spec.of(Node, {})  # the container in which a State holds a pytree that is not a Variable


def is_static(kind: Any) -> bool:
    """Whether an attribute of this kind is part of the structure, not data; includes those made by `nnx.Static`."""
    return kind is STATIC or (type(kind) is Spec and kind.type is Static)


def is_cell(kind: Any) -> bool:
    """Whether an attribute of this kind, as it appears in a structure, holds data and so has a cell."""
    return kind is NODE or kind is TREE or (type(kind) is Spec and kind.type is not Static)


def is_variable(kind: Any) -> bool:
    """Whether this kind is the spec of a Variable."""
    return type(kind) is Spec and issubclass(kind.type, Variable)


def container_spec(kind: Any) -> Spec | None:
    """Returns the spec of the container in which a State holds a value of this kind; None for bare arrays."""
    return None if kind is NODE else TREE_SPEC if kind is TREE else kind


def box(kind: Any, value: Any) -> Any:
    """Returns the State leaf of a value in a cell of this kind: a container around it, or the bare array."""
    spec = container_spec(kind)
    return value if spec is None else spec.box(value)


class Absent:
    """The kind of a variable that is part of the structure but was given no state."""

    __slots__ = ("spec",)

    def __init__(self, spec: Any):
        self.spec: Any = spec  # the kind it would have: a Spec, NODE or TREE


def absent(cls: type, spec: Any) -> Absent:
    """Returns the kind of a variable without state. From now on, reading it from an instance of `cls` explains that.

    A class without such variables has no `__getattr__`: having one would slow down every attribute read.
    """
    if not hasattr(cls, "__getattr__"):
        cls.__getattr__ = explain_missing
    return Absent(spec)


def explain_missing(module: Any, name: str) -> Any:
    """Raises the AttributeError for a name that a Module does not have; the `__getattr__` of some classes."""
    kind = info_of(module).kinds.get(name)
    if type(kind) is Absent:
        text = NO_STATE_GIVEN.format(owner=type(module).__name__, name=name, kind=kind.spec)
        raise AttributeError(text, name=name, obj=module)
    if hasattr(type(module), name):  # a property that raised AttributeError itself: show that error
        return object.__getattribute__(module, name)
    hint = called(name, MODULE)
    if hint:
        Hint(ModuleBase, name, hint).__get__(module, type(module))
    raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}", name=name, obj=module)
