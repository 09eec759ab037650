"""Pytree: immutable records that JAX understands.

Fields that hold containers or nodes are children, boxed in their container (`TreeNode` for plain data); attributes read
back the raw value. The other fields are static, and part of the tree's structure.

A *record type* is one whose values are data by their type: `State`, `Pure`, `Pytree`, and every state class that optax
defines (`optax.EmptyState`, `optax.ScaleByAdamState`). A field that holds one, or a tuple, list or dict of them, is a
child even if it is empty or contains nothing but Python numbers. State classes that you define are treated like any
other pytree: they are data if they hold arrays. `nnx.register_node_type(MyState)` makes them data in any case.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar

import jax
import numpy as np
import optax

from nnx.core.module.attributes import is_node_type
from nnx.core.module.fields import constructor_signature, prepare_dataclass
from nnx.core.repr import short
from nnx.core.state.flax_serialization import register_with_flax
from nnx.core.state.pure import Pure
from nnx.core.state.state import State
from nnx.core.statics.statics import KeyedFields
from nnx.core.variables.trees import is_pytree_leaf
from nnx.core.variables.variables import Container, Spec, Static, TreeNode, spec_of

P = TypeVar("P", bound="Pytree")

IMMUTABLE = """{owner} is immutable, trying to update field {name!r}. Use `.replace({name}=...)` for a changed copy, \
or declare `class {owner}(nnx.Pytree, mutable=True)`."""
ASSIGNS_FIELD = "cannot assign to field {name!r}: "  # what the standard library says of frozen dataclasses
DELETES_FIELD = "cannot delete field {name!r}: "
IMMUTABLE_DELETE = """{owner} is immutable, trying to update field {name!r} by deleting it. A record keeps the fields \
its constructor set; give the field another value with `.replace({name}=None)`."""
NEW_FIELD = "Cannot add new fields to {owner}: {name!r} was not set by its constructor; its fields are {fields}."
UNKNOWN_FIELDS = "Trying to replace unknown fields {unknown} of {owner}; its fields are {fields}."

_TREE_NODE = Spec.of(TreeNode, {})
_set_slot = object.__setattr__


class PytreeType(type):
    """The metaclass of Pytrees: makes an instance immutable when its constructor has returned."""

    def __call__(cls: type[P], *args: Any, **kwargs: Any) -> P:  # pyright: ignore[reportGeneralTypeIssues]
        _prepare(cls)
        record = super().__call__(*args, **kwargs)
        if isinstance(record, Pytree):
            if _is_frozen_dataclass(type(record)):
                record._adopt_fields()
            record._nnx_closed = True
            register_with_flax(type(record), Pytree, _data_fields)
        return record  # pyright: ignore[reportReturnType]  (the check above has narrowed it to Pytree)

    @property
    def __signature__(cls) -> inspect.Signature:
        return constructor_signature(cls)


class Pytree(metaclass=PytreeType):
    """The base of immutable records.

    `class Foo(nnx.Pytree, mutable=True)` allows assignment to existing fields.

    >>> class Point(nnx.Pytree):
    ...     def __init__(self, x, name):
    ...         self.x = jnp.asarray(x)
    ...         self.name = name
    >>> point = Point(1.0, "here")
    >>> jax.tree.map(lambda x: x + 1, point).x
    Array(2., dtype=float32, weak_type=True)
    """

    __slots__ = ("_nnx_specs", "_nnx_closed", "_nnx_statics", "__dict__", "__weakref__")
    _nnx_fields: ClassVar[dict[str, Callable[[Any], Any]]] = {}
    _nnx_frozen: ClassVar[bool] = False
    _nnx_mutable: ClassVar[bool] = False
    _nnx_hideable: ClassVar[frozenset[str]] = frozenset()

    _nnx_specs: dict[str, Spec]
    _nnx_closed: bool
    _nnx_statics: Any

    def __init_subclass__(cls, mutable: bool | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if mutable is not None:
            cls._nnx_mutable = mutable
        jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, _unflatten, _flatten)
        register_with_flax(cls, Pytree, _data_fields)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return _open(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Pytree.__slots__ or hasattr(type(getattr(type(self), name, None)), "__set__"):
            object.__setattr__(self, name, value)
            return
        if self._nnx_closed:
            cls = type(self)
            if cls._nnx_frozen or not cls._nnx_mutable:
                text = ASSIGNS_FIELD + IMMUTABLE if dataclasses.is_dataclass(cls) else IMMUTABLE
                raise dataclasses.FrozenInstanceError(text.format(owner=cls.__name__, name=name))
            if name not in self.__dict__:
                raise AttributeError(NEW_FIELD.format(owner=cls.__name__, name=name, fields=_field_names(self)))
        self._set_field(name, value)

    def _set_field(self, name: str, value: Any) -> None:
        if name in self._nnx_fields and name not in self.__dict__:
            value = self._nnx_fields[name](value)
        spec = self._nnx_specs.get(name)
        if isinstance(value, Container):
            if spec is not None and spec is not _TREE_NODE:
                # `replace` raises if the new container has another type or other metadata.
                value = spec.box(self.__dict__[name]).replace(value)
            if isinstance(value, Static):
                self._nnx_specs.pop(name, None)
            else:
                self._nnx_specs[name] = spec_of(value)
            value = value.value
        elif spec is None and _is_data(value):
            self._nnx_specs[name] = _TREE_NODE
        # A number in a field of data stays data: `record.replace(rate=0.1)` must not become another structure.
        elif spec is _TREE_NODE and not (_is_data(value) or isinstance(value, (int, float, complex, np.generic))):
            del self._nnx_specs[name]
        self._nnx_statics = None
        vars(self)[name] = value

    def _nnx_field(self, name: str) -> Container[Any]:
        """Returns a field in its container."""
        spec, value = self._nnx_specs.get(name), getattr(self, name)
        return Static(value) if spec is None else spec.box(value)

    def _adopt_fields(self) -> None:
        """Decides what the fields are that were written directly into `__dict__`, as frozen dataclasses do."""
        values = vars(self)
        for name in [name for name in values if name not in self._nnx_specs]:
            self._set_field(name, values.pop(name))

    def __delattr__(self, name: str) -> None:
        cls = type(self)
        text = DELETES_FIELD + IMMUTABLE_DELETE if dataclasses.is_dataclass(cls) else IMMUTABLE_DELETE
        raise dataclasses.FrozenInstanceError(text.format(owner=cls.__name__, name=name))

    def replace(self: P, **changes: Any) -> P:
        """Returns a copy with other values for some fields.

        Raises:
            ValueError: there is no such field.
        """
        unknown = sorted(set(changes) - set(self.__dict__))
        if unknown:
            raise ValueError(
                UNKNOWN_FIELDS.format(unknown=unknown, owner=type(self).__name__, fields=_field_names(self))
            )
        record = _open(type(self))
        record.__dict__.update(self.__dict__)
        record._nnx_specs = dict(self._nnx_specs)
        for name, value in changes.items():
            record._set_field(name, value)
        record._nnx_closed = True
        return record

    def __repr__(self) -> str:
        def text(name: str) -> str:
            spec, value = self._nnx_specs.get(name), self.__dict__[name]
            return short(value) if spec is None or spec is _TREE_NODE else repr(spec.box(value))

        return f"{type(self).__name__}({', '.join(f'{name}={text(name)}' for name in sorted(self.__dict__))})"

    def __getstate__(self) -> Any:
        return dict(self.__dict__), dict(self._nnx_specs)

    def __setstate__(self, state: Any) -> None:
        _prepare(type(self))
        values, specs = state
        vars(self).update(values)
        self._nnx_specs = specs
        self._nnx_closed = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_open, (type(self),), self.__getstate__())

    def __copy__(self: P) -> P:
        return self.replace()


def _open(cls: type) -> Any:
    record = object.__new__(cls)
    _set_slot(record, "_nnx_specs", {})  # bypasses `__setattr__`, which a subclass may define
    _set_slot(record, "_nnx_closed", False)
    _set_slot(record, "_nnx_statics", None)
    return record


def _field_names(record: Pytree) -> str:
    return ", ".join(sorted(record.__dict__))


def _is_frozen_dataclass(cls: Any) -> bool:
    """Whether the constructor is that of a `dataclasses.dataclass(frozen=True)`."""
    return dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen  # pyright: ignore[reportAttributeAccessIssue]


def _prepare(cls: Any) -> None:
    """Makes a class ready for its first instance.

    `dataclasses.dataclass(frozen=True)` writes a `__setattr__` and a `__delattr__` that know nothing about containers.
    They are removed: a Pytree is immutable already.
    """
    if "_nnx_prepared" in cls.__dict__:
        return
    cls._nnx_prepared = True
    prepare_dataclass(cls)
    for base in cls.__mro__:
        if "__dataclass_params__" in base.__dict__ and _is_frozen_dataclass(base) and "__setattr__" in base.__dict__:
            base._nnx_frozen = True
            del base.__setattr__
            del base.__delattr__


def is_node(value: Any) -> bool:
    """Whether a value is data by its type: an array, a Node container, a record, or of a registered type.

    Arrays include tracers and `jax.ShapeDtypeStruct`s; records are `State`, `Pure`, `Pytree` and optimizer states.

    >>> nnx.is_node(jnp.ones(2)), nnx.is_node(nnx.Param(1)), nnx.is_node(nnx.State()), nnx.is_node(1)
    (True, True, True, False)
    """
    return is_node_type(value) or _is_record(value)


def _is_data(value: Any) -> bool:
    if is_node(value):
        return True
    try:
        leaves = jax.tree.leaves(value, is_leaf=_is_record)
        return not is_pytree_leaf(value) and any(map(is_node, leaves))
    except (TypeError, ValueError):  # a dict whose keys cannot be sorted is not a pytree
        return False


def _is_record(value: Any) -> bool:
    """Whether a value is a record by its type: a State, Pure, Pytree or optax state."""
    if isinstance(value, (State, Pure, Pytree)):
        return True
    # The transformations of optax are tuples from the same package, but they hold functions.
    from_optax = isinstance(value, tuple) and type(value).__module__.startswith("optax.")
    return from_optax and not isinstance(value, optax.GradientTransformation)


def _statics(record: Pytree) -> Any:
    """Returns the auxiliary data of a record: its type, the names of its data fields, and its static fields.

    They are kept until a field is assigned, unless a static field is mutable and so could change in the meantime.
    """
    statics = record._nnx_statics
    if statics is None:
        specs = record._nnx_specs
        data = tuple(sorted(specs))
        fields = {name: record.__dict__[name] for name in sorted(record.__dict__) if name not in specs}
        keyed = KeyedFields(fields, type(record).__name__)
        statics = (type(record), data, keyed)
        if not keyed.watched:
            record._nnx_statics = statics
    return statics


def _flatten(record: Pytree) -> Any:
    statics = _statics(record)
    values, specs = record.__dict__, record._nnx_specs
    return [specs[name].box(values[name]) for name in statics[1]], statics


def _flatten_with_keys(record: Pytree) -> Any:
    children, statics = _flatten(record)
    return [(jax.tree_util.GetAttrKey(name), child) for name, child in zip(statics[1], children, strict=True)], statics


def _unflatten(statics: Any, children: Any) -> Any:
    cls, data, keyed = statics
    record = _open(cls)
    values = record.__dict__
    values.update(keyed.value)
    for name, child in zip(data, children, strict=True):
        if isinstance(child, Container):
            record._nnx_specs[name] = spec_of(child)
            values[name] = child.value
        else:
            record._nnx_specs[name] = _TREE_NODE
            values[name] = child
    if not keyed.watched:
        record._nnx_statics = statics
    record._nnx_closed = True
    return record


def _data_fields(record: Pytree) -> list[str]:
    return sorted(record._nnx_specs)
