"""Dataclass Modules: fields that say how to store what the constructor received."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, Unpack, dataclass_transform, overload

from nnx.core.errors import MUTABLE_DEFAULT
from nnx.core.module.field_equality import fields_equal, hash_of_fields
from nnx.core.module.info import ModuleBase
from nnx.core.repr import short
from nnx.core.variables.on_demand import variable_type as collection_named
from nnx.core.variables.refs import Ref
from nnx.core.variables.variables import Container, Node, Param, Static, Variable

T = TypeVar("T")

_WRAP = "nnx.wrap"  # the key in a field's metadata

NO_SLOTS = """nnx.dataclass: slots=True makes a second class without the first one's `__dict__`, in which a Module or \
Pytree keeps its values. Leave it out."""

NOT_A_VARIABLE_TYPE = """nnx.var_field takes a type of Variables, such as nnx.BatchStat, or the name of a collection; \
got {got}."""

NO_DEFAULT: Any = dataclasses.MISSING


def field(default: Any = NO_DEFAULT, *, default_factory: Any = NO_DEFAULT, **kwargs: Any) -> Any:
    """A dataclass field like `dataclasses.field`, except that the default can be an array or a container.

    The other fields take its options as well, such as `repr`, `compare`, `kw_only` and `metadata`.
    """
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
    variable_type: type[Variable[Any]] | str,
    default: Any = NO_DEFAULT,
    *,
    default_factory: Any = NO_DEFAULT,
    sharding: Any = None,
    **kwargs: Any,
) -> Any:
    """A field stored as a Variable of the given type.

    Args:
        variable_type: the type of the Variable, or the name of its collection.
        default: the value if the constructor receives none.
        default_factory: a function that makes the default, called once per instance.
        sharding: the logical axis names of the Variable.
        **kwargs: further arguments of `dataclasses.field`. Metadata of the Variable come with the value:
            `nnx.BatchStat(x, unit="m")`.

    >>> @nnx.dataclass
    ... class Counter(nnx.Module):
    ...     count: int = nnx.var_field(nnx.BatchStat, 0)
    >>> Counter().variable("count")
    BatchStat(0)
    """
    cls = collection_named(variable_type) if isinstance(variable_type, str) else variable_type
    if not (isinstance(cls, type) and issubclass(cls, Variable)):
        raise TypeError(NOT_A_VARIABLE_TYPE.format(got=short(variable_type)))
    return _field(_wrapper(cls, sharding=sharding), default, default_factory, kwargs)


def _wrapper(cls: type[Container], **metadata: Any) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, Ref) else cls(value, **metadata)


def _field(wrap: Any, default: Any, default_factory: Any, kwargs: dict[str, Any]) -> Any:
    if isinstance(default, (list, dict, set)):
        raise ValueError(MUTABLE_DEFAULT.format(type=type(default).__name__, default=short(default)))
    if default is not NO_DEFAULT and default_factory is not NO_DEFAULT:
        raise ValueError("cannot specify both default and default_factory")  # as the standard library says it
    # Defaults become factories, too, so that the class has no attribute that a missing value would fall back to.
    factory = default_factory if default is NO_DEFAULT else (lambda: default)
    if wrap is not None:
        kwargs = {**kwargs, "metadata": {**(kwargs.get("metadata") or {}), _WRAP: wrap}}
    return dataclasses.field(default_factory=factory, **kwargs)


class DataclassOptions(TypedDict, total=False):
    """The options of `nnx.dataclass`."""

    init: bool
    repr: bool
    eq: bool
    order: bool
    unsafe_hash: bool
    frozen: bool
    match_args: bool
    kw_only: bool


@overload
def dataclass(cls: type[T], /) -> type[T]: ...
@overload
def dataclass(**options: Unpack[DataclassOptions]) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(eq_default=False, field_specifiers=(field, node_field, static_field, param_field, var_field))
def dataclass(
    cls: Any = None,
    /,
    *,
    init: bool = True,
    repr: bool = False,
    eq: bool | None = None,
    order: bool = False,
    unsafe_hash: bool = False,
    frozen: bool = False,
    match_args: bool = True,
    kw_only: bool = False,
    slots: bool = False,
) -> Any:
    """Makes a Module or Pytree class a dataclass.

    Args:
        cls: the class. Without it, a decorator is returned.
        init: whether to generate a constructor from the fields, as in `dataclasses.dataclass`.
        repr: whether to generate a `__repr__` from the fields, in place of the tree that a Module prints.
        eq: whether to compare the fields: static ones as static values, arrays by shape, dtype and content. By default,
            a Pytree does, and a Module is only equal to itself. The hash of a Pytree is that of its static fields, so a
            record remains a valid static argument.
        order: whether to generate `<` and its relatives, which compare the fields as tuples; needs `eq`.
        unsafe_hash: whether a Module compared by its fields has a hash, that of the static ones.
        frozen: whether to forbid assignment to fields after construction; `update_state` and transforms can still
            write.
        match_args, kw_only: as in `dataclasses.dataclass`.
        slots: not possible; a `TypeError`.

    >>> @nnx.dataclass
    ... class Linear(nnx.Module):
    ...     kernel: jax.Array = nnx.param_field()
    ...     name: str = "linear"
    >>> Linear(jnp.ones((2, 3)))
    Linear(
      kernel: Param(float32[2,3])
      name: 'linear'
    )

    >>> @nnx.dataclass
    ... class Point(nnx.Pytree):
    ...     x: jax.Array
    ...     name: str = "here"
    >>> Point(jnp.ones(2)) == Point(jnp.ones(2)), Point(jnp.ones(2)) == Point(jnp.zeros(2))
    (True, False)
    """
    if slots:
        raise TypeError(NO_SLOTS)

    def decorate(cls: Any) -> Any:
        # The standard decorator takes an inherited attribute for the default of a field, here a method it may hide.
        for name in cls._nnx_hideable.intersection(inspect.get_annotations(cls)).difference(vars(cls)):
            setattr(cls, name, dataclasses.field())
        is_module = issubclass(cls, ModuleBase)
        compares = not is_module if eq is None else eq
        own = "__eq__" in vars(cls), "__hash__" in vars(cls)
        options: Any = {"init": init, "repr": repr, "order": order, "match_args": match_args, "kw_only": kw_only}
        cls = dataclasses.dataclass(eq=compares, **options)(cls)
        if compares and own == (False, False):
            cls.__eq__ = fields_equal
            cls.__hash__ = None if is_module and not (frozen or unsafe_hash) else hash_of_fields
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
