"""Dataclass Modules: fields that say how to store what the constructor received."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform, overload

from nnx.core.errors import MUTABLE_DEFAULT
from nnx.core.refs import Ref
from nnx.core.repr import short
from nnx.core.variables import Container, Node, Param, Static, Variable

T = TypeVar("T")

_WRAP = "nnx.wrap"  # the key in a field's metadata

NO_DEFAULT: Any = dataclasses.MISSING


def field(default: Any = NO_DEFAULT, *, default_factory: Any = NO_DEFAULT, **kwargs: Any) -> Any:
    """A dataclass field like `dataclasses.field`, except that the default can be an array or a container."""
    return _field(None, default, default_factory, kwargs)


def node_field(default: Any = NO_DEFAULT, *, default_factory: Any = NO_DEFAULT, **kwargs: Any) -> Any:
    """A field stored as data, regardless of the type of its value.

    >>> @nnx.dataclass
    ... class Scale(nnx.Module):
    ...     factor: float = nnx.node_field(2.0)
    >>> list(Scale().get_state())
    ['factor']
    """
    return _field(_wrapper(Node), default, default_factory, kwargs)


def static_field(default: Any = NO_DEFAULT, *, default_factory: Any = NO_DEFAULT, **kwargs: Any) -> Any:
    """A field stored as a static value, regardless of its type.

    >>> @nnx.dataclass
    ... class Table(nnx.Pytree):
    ...     sizes: tuple = nnx.static_field()
    >>> jax.tree.leaves(Table((1, 2)))
    []
    """
    return _field(_wrapper(Static), default, default_factory, kwargs)


def param_field(
    default: Any = NO_DEFAULT, *, default_factory: Any = NO_DEFAULT, sharding: Any = None, **kwargs: Any
) -> Any:
    """A field stored as an `nnx.Param`.

    Args:
        default: the value if the constructor receives none.
        default_factory: a function that makes the default, called once per instance.
        sharding: the logical axis names of the Param.
        **kwargs: further arguments of `dataclasses.field`.

    >>> @nnx.dataclass
    ... class Scale(nnx.Module):
    ...     scale: jax.Array = nnx.param_field(sharding=("embed",))
    >>> Scale(jnp.ones(3)).variable("scale").sharding
    ('embed',)
    """
    return _field(_wrapper(Param, sharding=sharding), default, default_factory, kwargs)


def var_field(
    variable_type: type[Variable[Any]],
    default: Any = NO_DEFAULT,
    *,
    default_factory: Any = NO_DEFAULT,
    sharding: Any = None,
    metadata: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """A field stored as a Variable of the given type.

    Args:
        variable_type: the type of the Variable.
        default: the value if the constructor receives none.
        default_factory: a function that makes the default, called once per instance.
        sharding: the logical axis names of the Variable.
        metadata: further metadata of the Variable.
        **kwargs: further arguments of `dataclasses.field`.

    >>> @nnx.dataclass
    ... class Counter(nnx.Module):
    ...     count: int = nnx.var_field(nnx.BatchStat, 0)
    >>> Counter().variable("count")
    BatchStat(0)
    """
    wrap = _wrapper(variable_type, sharding=sharding, **(metadata or {}))
    return _field(wrap, default, default_factory, kwargs)


def _wrapper(cls: type[Container], **metadata: Any) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, Ref) else cls(value, **metadata)


def _field(wrap: Any, default: Any, default_factory: Any, kwargs: dict[str, Any]) -> Any:
    if isinstance(default, (list, dict, set)):
        raise ValueError(MUTABLE_DEFAULT.format(type=type(default).__name__, default=short(default)))
    # Defaults become factories, too, so that the class has no attribute that a missing value would fall back to.
    factory = default_factory if default is NO_DEFAULT else (lambda: default)
    return dataclasses.field(default_factory=factory, metadata={_WRAP: wrap}, **kwargs)


@overload
def dataclass(cls: type[T], /) -> type[T]: ...
@overload
def dataclass(
    *, init: bool = True, repr: bool = False, frozen: bool = False, kw_only: bool = False
) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(eq_default=False, field_specifiers=(field, node_field, static_field, param_field, var_field))
def dataclass(
    cls: Any = None, /, *, init: bool = True, repr: bool = False, frozen: bool = False, kw_only: bool = False
) -> Any:
    """Makes a Module or Pytree class a dataclass, compared by identity.

    Args:
        cls: the class. Without it, a decorator is returned.
        init: whether to generate a constructor from the fields, as in `dataclasses.dataclass`.
        repr: whether to generate a `__repr__` from the fields, in place of the tree that a Module prints.
        kw_only: whether all fields are keyword arguments.
        frozen: whether to forbid assignment to fields after construction; `update_state` and transforms can still
            write.

    >>> @nnx.dataclass
    ... class Linear(nnx.Module):
    ...     kernel: jax.Array = nnx.param_field()
    ...     name: str = "linear"
    >>> Linear(jnp.ones((2, 3)))
    Linear(
      kernel: Param(float32[2,3])
      name: 'linear'
    )
    """

    def decorate(cls: Any) -> Any:
        # The standard decorator takes an inherited attribute for the default of a field, here a method it may hide.
        for name in cls._nnx_hideable.intersection(inspect.get_annotations(cls)).difference(vars(cls)):
            setattr(cls, name, dataclasses.field())
        cls = dataclasses.dataclass(init=init, repr=repr, eq=False, kw_only=kw_only)(cls)
        cls._nnx_frozen = frozen
        return cls

    return decorate if cls is None else decorate(cls)


def prepare_dataclass(cls: Any) -> None:
    """Prepares a dataclass for its first instance: records how its fields wrap values, and cleans up their defaults.

    A container or Ref that is the default of a field stays on the class as an attribute, where an instance without a
    value would find it. It is removed.
    """
    if "_nnx_fields" in cls.__dict__ or not dataclasses.is_dataclass(cls):
        return
    fields = dataclasses.fields(cls)
    owner: Any = cls
    owner._nnx_fields = {f.name: f.metadata[_WRAP] for f in fields if f.metadata.get(_WRAP) is not None}
    for f in fields:
        for base in owner.__mro__:
            if isinstance(base.__dict__.get(f.name), (Container, Ref)):
                delattr(base, f.name)


def constructor_signature(cls: type) -> inspect.Signature:
    """Returns the signature of a class according to its `__init__`, for any metaclass."""
    signature = inspect.signature(cls.__init__)
    return signature.replace(parameters=list(signature.parameters.values())[1:])
