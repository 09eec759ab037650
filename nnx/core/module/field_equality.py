"""Equality of dataclasses: what `nnx.dataclass(eq=True)` generates.

Two instances of one class are equal if their fields are equal: static ones as static values, data by container,
shape, dtype and content. The fields that count are those with `compare=True`, as in the standard library.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from nnx.core.trace import is_tracer
from nnx.core.variables.variables import Container, Static

COMPARES_TRACERS = """Cannot compare two objects of {owner}: the field {name!r} holds a tracer, and JAX does not know \
its content while it is tracing. Compare the arrays you mean, with jnp.array_equal(a.{name}, b.{name}), or compare \
the objects outside of the transform."""


def fields_equal(self: Any, other: Any) -> Any:
    """The `__eq__` of a dataclass.

    Raises:
        TypeError: the static fields are equal, and another one holds a tracer.
    """
    if self is other:
        return True
    if type(self) is not type(other):
        return NotImplemented
    names = [field.name for field in dataclasses.fields(self) if field.compare]
    if list(_statics(self, names)) != list(_statics(other, names)):
        return False
    pairs = [(name, self._nnx_field(name), other._nnx_field(name)) for name in names]
    for name, *values in pairs:
        if any(isinstance(value, Container) and any(map(is_tracer, jax.tree.leaves(value))) for value in values):
            raise TypeError(COMPARES_TRACERS.format(owner=type(self).__name__, name=name))
    return all(x == y for _, x, y in pairs)


def hash_of_fields(self: Any) -> int:
    """The `__hash__` of a dataclass: that of its static fields, so that no array has to be read."""
    names = [field.name for field in dataclasses.fields(self) if (field.compare if field.hash is None else field.hash)]
    return hash((type(self), *_statics(self, names)))


def _statics(self: Any, names: list[str]) -> Iterator[tuple[str, Static[Any]]]:
    fields = ((name, self._nnx_field(name)) for name in names)
    return ((name, field) for name, field in fields if type(field) is Static)
