"""Making Variables without naming a class: types made on demand from a collection name, and short constructors."""

import copyreg
import re
from typing import Any, TypeVar

from nnx.core.variables.collection_names import collection_type
from nnx.core.variables.variables import Node, Param, Static, Variable

T = TypeVar("T")


class OnDemandType(type):
    """The metaclass of Variable types made from a name alone; they pickle as that name."""


def _reduce_on_demand(cls: Any) -> Any:
    return variable_type, (cls.collection,)


copyreg.pickle(OnDemandType, _reduce_on_demand)


def variable_type(name: str) -> type[Variable[Any]]:
    """Returns the Variable type of a collection; makes one if no class has that name."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"The name of a collection must be a non-empty string, got {name!r}.")
    cls = collection_type(name)
    if cls is None:
        title = "".join(part.capitalize() for part in re.split(r"\W|_", name)) or name
        cls = OnDemandType(title, (Variable,), {"collection": name, "__module__": __name__, "__slots__": ()})
        _on_demand[name] = cls
    return cls


_on_demand: dict[str, type[Variable[Any]]] = {}  # keeps the types alive: a name means one type for the whole process


def var(collection: str, value: T, sharding: Any = None, **metadata: Any) -> T:
    """Makes a Variable of the collection with this name; its type is made on demand.

    >>> count = nnx.var("counts", 0)
    >>> type(count).collection
    'counts'
    """
    cls: Any = variable_type(collection)
    return cls(value, sharding, **metadata)


def param(value: T, sharding: Any = None, **metadata: Any) -> T:
    """Makes a Param: `nnx.Param(value, sharding, **metadata)`."""
    return Param(value, sharding, **metadata)


def node(value: T, **metadata: Any) -> T:
    """Makes a Node: `nnx.Node(value, **metadata)`."""
    return Node(value, **metadata)


def static(value: T) -> T:
    """Makes a Static: `nnx.Static(value)`."""
    return Static(value)
