"""Pytree: immutable records that JAX understands.

Fields that hold containers or nodes are children, boxed in their container (`TreeNode` for plain data); attributes read
back the raw value. The other fields are static, and part of the tree's structure.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar

import jax
import numpy as np

from nnx.core.attributes import is_node
from nnx.core.fields import constructor_signature, prepare_dataclass
from nnx.core.repr import short
from nnx.core.statics import Frozen
from nnx.core.trees import is_pytree_leaf
from nnx.core.variables import Container, Spec, Static, TreeNode

P = TypeVar("P", bound="Pytree")

_TREE_NODE = Spec.of(TreeNode, {})


class PytreeType(type):
    """The metaclass of Pytrees: closes an instance when its constructor has returned."""

    def __call__(cls: type[P], *args: Any, **kwargs: Any) -> P:  # pyright: ignore[reportGeneralTypeIssues]
        prepare_dataclass(cls)
        record = super().__call__(*args, **kwargs)
        if isinstance(record, Pytree):
            record._nnx_closed = True
            _register_with_flax(type(record))
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

    _nnx_specs: dict[str, Spec]
    _nnx_closed: bool
    _nnx_statics: Any

    def __init_subclass__(cls, mutable: bool | None = None, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if mutable is not None:
            cls._nnx_mutable = mutable
        jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, _unflatten, _flatten)
        _register_with_flax(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return _open(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Pytree.__slots__ or hasattr(type(getattr(type(self), name, None)), "__set__"):
            object.__setattr__(self, name, value)
            return
        if self._nnx_closed:
            cls = type(self)
            if not cls._nnx_mutable:
                raise AttributeError(
                    f"{cls.__name__} is immutable, trying to update field {name!r}. Use `.replace({name}=...)` for a "
                    f"changed copy, or declare `class {cls.__name__}(nnx.Pytree, mutable=True)`."
                )
            if name not in self.__dict__:
                raise AttributeError(
                    f"Cannot add new fields to {cls.__name__}: {name!r} was not set by its constructor; its fields are "
                    f"{', '.join(sorted(self.__dict__))}."
                )
        self._set_field(name, value)

    def _set_field(self, name: str, value: Any) -> None:
        if name in self._nnx_fields and name not in self.__dict__:
            value = self._nnx_fields[name](value)
        spec = self._nnx_specs.get(name)
        if isinstance(value, Container):
            if spec is not None and spec is not _TREE_NODE:
                value = spec.box(self.__dict__[name]).replace(value)
            if isinstance(value, Static):
                self._nnx_specs.pop(name, None)
            else:
                self._nnx_specs[name] = value._spec
            value = value.value
        elif spec is None and _is_data(value):
            self._nnx_specs[name] = _TREE_NODE
        elif spec is _TREE_NODE and not (_is_data(value) or isinstance(value, (int, float, complex, np.generic))):
            del self._nnx_specs[name]
        self._nnx_statics = None
        vars(self)[name] = value

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable, trying to update field {name!r} by deleting it.")

    def replace(self: P, **changes: Any) -> P:
        """A copy with other values for some fields.

        Raises:
          ValueError: there is no such field.
        """
        unknown = sorted(set(changes) - set(self.__dict__))
        if unknown:
            raise ValueError(
                f"Trying to replace unknown fields {unknown} of {type(self).__name__}; its fields are "
                f"{', '.join(sorted(self.__dict__))}."
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
    record._nnx_specs = {}
    record._nnx_closed = False
    record._nnx_statics = None
    return record


def _is_data(value: Any) -> bool:
    if is_node(value):
        return True
    try:
        return not is_pytree_leaf(value) and any(map(is_node, jax.tree.leaves(value)))
    except (TypeError, ValueError):  # a dict whose keys cannot be sorted is no pytree
        return False


def _statics(record: Pytree) -> Any:
    """The names and containers of the data, and the static fields, as hashable auxiliary data."""
    statics = record._nnx_statics
    if statics is None:
        specs = record._nnx_specs
        data = tuple(sorted(specs))
        fields = {name: record.__dict__[name] for name in sorted(record.__dict__) if name not in specs}
        frozen = Frozen(fields, type(record).__name__)
        statics = (type(record), data, frozen)
        if not frozen.watched:
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
    cls, data, frozen = statics
    record = _open(cls)
    values = record.__dict__
    values.update(frozen.value)
    for name, child in zip(data, children, strict=True):
        if isinstance(child, Container):
            record._nnx_specs[name] = child._spec
            values[name] = child.value
        else:
            record._nnx_specs[name] = _TREE_NODE
            values[name] = child
    if not frozen.watched:
        record._nnx_statics = statics
    record._nnx_closed = True
    return record


# flax.serialization, if the program uses it

_known_to_flax: set[type] = set()


def _register_with_flax(cls: type) -> None:
    serialization = sys.modules.get("flax.serialization")
    if serialization is None or cls in _known_to_flax or not hasattr(serialization, "register_serialization_state"):
        return
    _known_to_flax.add(cls)
    serialization.register_serialization_state(cls, _to_state_dict, _from_state_dict, override=True)


def _to_state_dict(record: Pytree) -> dict[str, Any]:
    serialization = sys.modules["flax.serialization"]
    return {name: serialization.to_state_dict(record.__dict__[name]) for name in sorted(record._nnx_specs)}


def _from_state_dict(record: Pytree, state: dict[str, Any]) -> Any:
    serialization = sys.modules["flax.serialization"]
    names = sorted(record._nnx_specs)
    for name in names:
        if name not in state:
            raise ValueError(f"Missing field {name!r} in the state dict of {type(record).__name__}.")
    for name in state:
        if name not in names:
            raise ValueError(f"Unknown field {name!r} in the state dict of {type(record).__name__}.")
    restored = {name: serialization.from_state_dict(record.__dict__[name], state[name], name=name) for name in names}
    return record.replace(**restored)
