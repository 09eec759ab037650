"""Containers: one value plus metadata. Variables are the containers that belong to a collection.

A *spec* is the type and metadata of a container without its value. Specs are interned: two containers are equivalent
exactly when they have the same spec object. A Module stores the raw value in its `__dict__` and the spec in its
ModuleInfo; a State holds containers. To *box* a value is to make a container of a given spec around it, without the
checks that a user's call to the class goes through.
"""

import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.errors import INCOMPATIBLE_CONTAINER, JAX_REF_IN_CONTAINER, MODULE_IN_CONTAINER
from nnx.core.hints.hints import refuse_axis_names
from nnx.core.module.info import ModuleBase
from nnx.core.repr import short
from nnx.core.statics.statics import Keyed, own_copy
from nnx.core.variables.collection_names import register_collection, snake_case
from nnx.core.variables.foreign_dicts import refuse_foreign_dicts
from nnx.core.variables.trees import find_module, leaf_types

AXIS_NAME_ALONE = """The `sharding` of a Variable has a name (or None) per dimension, got the string {name!r}. Write \
{type}(value, ({name!r},)) for one dimension, or nnx.var({name!r}, value) for a Variable of the collection {name!r}."""

T = TypeVar("T")
V = TypeVar("V")


class Spec:
    """The type and metadata of a container; equal specs are the same object.

    A metadata entry `on_set` is called as `on_set(value, metadata)` with every value assigned to such a variable, and
    when its Module is rebuilt inside a transform; the result is stored.
    """

    __slots__ = ("type", "metadata", "on_set", "is_plain", "is_slotted", "has_mutable", "__weakref__")

    type: "type[Container[Any]]"
    metadata: Mapping[str, Any]
    on_set: Callable[[Any, Mapping[str, Any]], Any] | None
    is_plain: bool  # whether an array can be stored unchanged: there is no hook, and it is data
    is_slotted: bool  # whether its containers have the memory layout of `_Raw`
    has_mutable: bool  # whether the metadata contain a list or the like, which readers must not share

    @staticmethod
    def of(container_type: "type[Container[Any]]", metadata: dict[str, Any]) -> "Spec":
        # Nearly all Variables have no metadata; their spec is cached on the class.
        plain = len(metadata) == 1 and metadata.get("sharding", 0) is None
        if plain and "_nnx_plain" in container_type.__dict__:
            return container_type.__dict__["_nnx_plain"]
        keyed = {name: Keyed(metadata[name], name) for name in sorted(metadata)}
        key = (container_type, tuple([(name, entry.key) for name, entry in keyed.items()]))
        spec = _specs.get(key)
        if spec is None:
            spec = Spec()
            spec.type = container_type
            # A spec is shared by all equivalent containers, so it keeps its own copies and hands out further ones: a
            # change to a list in the metadata of one Variable must not show up in another.
            spec.metadata = types.MappingProxyType({name: own_copy(value) for name, value in metadata.items()})
            spec.has_mutable = any(entry.watched for entry in keyed.values())
            spec.on_set = metadata.get("on_set")
            spec.is_plain = spec.on_set is None and issubclass(container_type, Node)
            spec.is_slotted = _is_slotted(container_type)
            if not metadata.keys() <= {"sharding"} and not hasattr(container_type, "__getattr__"):
                # Types without such metadata have no __getattr__, which would slow down every read.
                container_type.__getattr__ = _metadata_entry  # pyright: ignore[reportAttributeAccessIssue]
            spec = _specs.setdefault(key, spec)
        if plain:
            container_type._nnx_plain = spec  # pyright: ignore[reportAttributeAccessIssue]
        return spec

    def read(self, name: str) -> Any:
        """Returns one entry of the metadata, for users."""
        return own_copy(self.metadata[name]) if self.has_mutable else self.metadata[name]

    def box(self, value: Any) -> Any:
        """Makes a container of this spec around `value`, without checks or copies."""
        if self.is_slotted:  # three plain attribute writes and a change of class take a third of the time
            container: Any = _Raw()
            container.value = value
            container._spec = self
            container.__class__ = self.type
            return container
        container = _new(self.type)
        _set_value(container, value)
        _set_spec(container, self)
        return container

    def __repr__(self) -> str:
        given = [f"{k}={v!r}" for k, v in self.metadata.items() if v is not None]
        return f"{self.type.__name__}({', '.join(given)})"

    def __reduce__(self) -> Any:
        return (Spec.of, (self.type, dict(self.metadata)))


_specs: "weakref.WeakValueDictionary[Any, Spec]" = weakref.WeakValueDictionary()
_new = object.__new__


class _Raw(Generic[T]):
    """An object with the memory layout of a Container but without its rules, to be filled and turned into one."""

    __slots__ = ("value", "_spec")


def _is_slotted(cls: type) -> bool:
    try:
        _Raw().__class__ = cls
    except TypeError:  # a subclass without __slots__, whose instances have a __dict__
        return False
    return True


def box_all(specs: Iterable[Spec | None], values: Iterable[Any]) -> list[Any]:
    """Returns containers of these specs around the values, like `Spec.box`; values without a spec stay as they are.

    The loop repeats what `box` does: a function call per value would take half as long again.
    """
    boxed = []
    for spec, value in zip(specs, values, strict=True):
        if spec is None:
            boxed.append(value)
        elif spec.is_slotted:
            container: Any = _Raw()
            container.value = value
            container._spec = spec
            container.__class__ = spec.type
            boxed.append(container)
        else:
            boxed.append(spec.box(value))
    return boxed


UNBOX_FN = """{type}(x, unbox_fn=...): no function runs when an attribute is read. The attribute is the raw value, \
which is what makes reading it free. Compute what you need where you use it, or define a property on the Module."""


def refuse_unbox_fn(metadata: Mapping[str, Any], owner: str) -> None:
    """Raises TypeError if metadata has a function that should run at every read; `owner` names the callee."""
    if "unbox_fn" in metadata:
        raise TypeError(UNBOX_FN.format(type=owner))


class ContainerMetadata(Generic[T]):
    """What an initializer returns to attach metadata to the Variable made from its value.

    `nnx.with_metadata` makes initializers that return it.

    >>> nnx.Param(nnx.ContainerMetadata(jnp.ones(3), {"sharding": ("embed",)})).sharding
    ('embed',)
    """

    __slots__ = ("value", "metadata")

    value: T
    metadata: dict[str, Any]

    def __init__(self, value: T, metadata: Mapping[str, Any]):
        refuse_unbox_fn(metadata, "ContainerMetadata")
        self.value = value
        self.metadata = dict(metadata)

    def __repr__(self) -> str:
        return f"ContainerMetadata({short(self.value)}, {self.metadata})"


class Container(Generic[T]):
    """The base of everything that wraps one value plus metadata.

    Metadata are attributes of the container. Two containers are equivalent if their type and metadata agree, and equal
    if their values agree as well. Containers are immutable; `replace` returns a changed copy.

    >>> container = nnx.Param(jnp.ones(3), name="scale")
    >>> container.name, container.replace(name="shift").name
    ('scale', 'shift')
    """

    __slots__ = ("value", "_spec")
    _nnx_holds_state: ClassVar[bool] = True  # must not hide in a static value

    value: T
    _spec: Spec

    if TYPE_CHECKING:  # to a type checker, `Param(x)` has the type of `x`, which is what the attribute reads back as
        # Its own type variable, so that a subclass without parameters (`class Count(nnx.Variable)`) works the same.
        def __new__(cls, value: V, *args: Any, **metadata: Any) -> V: ...
        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, value: T, **metadata: Any):
        if isinstance(value, (Container, ContainerMetadata)):
            if isinstance(value, Container) and type(value) is not type(self):
                raise ValueError(_wrong_wrap(value, type(self)))
            inner = value._spec.metadata if isinstance(value, Container) else value.metadata
            given = {k: v for k, v in metadata.items() if v is not None}
            metadata = {**metadata, **inner, **given}
            value = value.value
        refuse_modules(type(self), value)
        _set_value(self, value)
        _set_spec(self, Spec.of(type(self), metadata))

    @property
    def metadata(self) -> Mapping[str, Any]:
        """All metadata, as a read-only mapping."""
        spec = self._spec
        return types.MappingProxyType(own_copy(dict(spec.metadata))) if spec.has_mutable else spec.metadata

    def replace(self, value: Any = ..., **metadata: Any) -> Any:
        """Returns a copy with another value, other metadata, or both.

        Raises:
            ValueError: `value` is a container that is not equivalent, or a key is not among the metadata.
        """
        spec = self._spec
        unknown = sorted(set(metadata) - set(spec.metadata))
        if unknown:
            known = ", ".join(spec.metadata) or "none"
            raise ValueError(f"Unknown metadata key {unknown[0]!r} for {spec!r}. Its metadata are: {known}.")
        if isinstance(value, Container):
            if value._spec is not spec:
                raise ValueError(INCOMPATIBLE_CONTAINER.format(target="the container", old=spec, new=value._spec))
            value = value.value
        refuse_modules(spec.type, value)
        if metadata:
            spec = Spec.of(spec.type, {**spec.metadata, **metadata})
        return spec.box(self.value if value is ... else value)

    def copy(self) -> Any:
        """Returns a copy; the value is the same."""
        return self._spec.box(self.value)

    def is_equivalent(self, other: Any) -> bool:
        """Whether type and metadata agree; the values may differ."""
        return isinstance(other, Container) and other._spec is self._spec

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: use `.replace({name}=...)` to make a changed copy.")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: {name!r} cannot be deleted.")

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        return isinstance(other, Container) and other._spec is self._spec and values_equal(self.value, other.value)

    def __hash__(self) -> int:
        return hash(self._spec)

    def __repr__(self) -> str:
        given = [f"{k}={v!r}" for k, v in self._spec.metadata.items() if v is not None]
        return f"{type(self).__name__}({', '.join([short(self.value), *given])})"

    def __reduce__(self) -> Any:
        return (_rebox, (self._spec, self.value))

    def __copy__(self) -> Any:
        return self._spec.box(self.value)


spec_of: Callable[[Any], Spec] = attrgetter("_spec")
"""Returns the spec of a container, or of the Variable that a Ref shares."""


def raw_value(leaf: Any) -> Any:
    """Returns the value of a leaf of a State: what its container holds, or the bare array itself."""
    return leaf.value if isinstance(leaf, Container) else leaf


def _metadata_entry(container: Container, name: str) -> Any:
    if not name.startswith("_"):
        try:
            return container._spec.read(name)
        except KeyError:
            pass
    raise AttributeError(f"{type(container).__name__!r} has no attribute or metadata {name!r}")


_set_value = Container.__dict__["value"].__set__
_set_spec = Container.__dict__["_spec"].__set__


def _rebox(spec: Spec, value: Any) -> Any:
    return spec.box(value)


def refuse_modules(cls: type[Container[Any]], value: Any) -> None:
    """Raises ValueError if a value for this type of container holds a Module, a Ref, a `jax.Ref`, or a foreign dict."""
    if leaf_types.get(type(value)) or issubclass(cls, Static):
        return
    refuse_foreign_dicts(value, cls.__name__, with_arrays=False)
    found = find_module(value)
    if isinstance(found, jax.Ref):
        raise ValueError(JAX_REF_IN_CONTAINER.format(type=cls.__name__))
    if found is not None:
        what = f"a Module ({type(found).__name__})" if isinstance(found, ModuleBase) else short(found)
        raise ValueError(MODULE_IN_CONTAINER.format(type=cls.__name__, what=what))


def _wrong_wrap(container: Container, cls: type) -> str:
    return (
        f"{container!r} of type {type(container).__name__!r} is not compatible with return type {cls.__name__!r}. "
        f"A container keeps its type; to change it, wrap its value: {cls.__name__}(container.value)."
    )


def values_equal(a: Any, b: Any) -> bool:
    """Whether two pytrees have the same structure and equal leaves; arrays must also agree in shape and dtype."""
    if a is b:
        return True
    a_leaves, a_def = jax.tree.flatten(a)
    b_leaves, b_def = jax.tree.flatten(b)
    return a_def == b_def and all(map(_leaves_equal, a_leaves, b_leaves))


def _leaves_equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    a_shape, b_shape = getattr(a, "shape", None), getattr(b, "shape", None)
    if a_shape is None or b_shape is None:
        return a_shape is b_shape and type(a) is type(b) and bool(a == b)
    if a_shape != b_shape or a.dtype != b.dtype:
        return False
    if isinstance(a, jax.ShapeDtypeStruct) or isinstance(b, jax.ShapeDtypeStruct):
        return type(a) is type(b)
    if jnp.issubdtype(a.dtype, jax.dtypes.extended):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return bool(np.array_equal(np.asarray(a), np.asarray(b)))


def _flatten(container: Container) -> tuple[tuple[Any], Spec]:
    return (container.value,), container._spec


def _flatten_with_keys(container: Container) -> Any:
    return ((_VALUE_KEY, container.value),), container._spec


def _unflatten(spec: Spec, children: Any) -> Any:
    if not spec.is_slotted:
        return spec.box(children[0])
    # What `box` does, again: optax states bring dozens of containers out of every step, and a second call per container
    # costs as much as the first.
    container: Any = _Raw()
    (container.value,) = children
    container._spec = spec
    container.__class__ = spec.type
    return container


_VALUE_KEY = jax.tree_util.GetAttrKey("value")


def register_container(cls: type) -> None:
    """Makes a container type a pytree with one child, `.value`, and its spec as auxiliary data."""
    jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, _unflatten, _flatten)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex)) and not isinstance(value, np.generic)


class Node(Container[T]):
    """A container whose value is pytree data.

    Assigned to an attribute of a Module, it makes a value data that would otherwise be static.

    >>> model = nnx.Dict(lr=nnx.Node(0.1), name="sgd")
    >>> model.get_state()
    State({
      'lr': Node(0.1),
    })

    Around an array it is array-like: it has the array's `shape` and `dtype`, and NumPy functions accept it.
    """

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        value: Any = self.value
        return () if _is_number(value) else value.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the value; for a Python number, the dtype of the array that JAX would make of it."""
        value: Any = self.value
        return jnp.result_type(value) if _is_number(value) else value.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is None:
            return np.asarray(self.value, dtype)
        return np.array(self.value, dtype, copy=copy)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register_container(cls)


class TreeNode(Node[T]):
    """The container of plain data inside an `nnx.Pytree`."""

    __slots__ = ()


class Variable(Node[T]):
    """A Node that belongs to a collection. Subclass it freely to define your own collections.

    Args:
        value: an array, a pytree of arrays, or the result of an initializer wrapped by `with_metadata`.
        sharding: logical axis names, one per dimension, or a `PartitionSpec`.
        **metadata: further metadata; each entry is an attribute of the container.

    A subclass can set `collection`, its name as a filter; the default is the class name in snake_case.

    >>> class Count(nnx.Variable): pass
    >>> Count.collection
    'count'
    """

    __slots__ = ()
    collection: ClassVar[str] = "variable"

    @property
    def sharding(self) -> Any:
        """The logical axis names, one per dimension, or a `PartitionSpec`; None if it has no names."""
        return self._spec.metadata["sharding"]

    def __init__(self, value: T, sharding: Any = None, **metadata: Any):
        plain = type(self).__dict__.get("_nnx_plain")
        if plain is not None and sharding is None and not metadata and leaf_types.get(type(value)):
            _set_value(self, value)  # an array without metadata, as nearly all are
            _set_spec(self, plain)
            return
        if isinstance(sharding, list):
            sharding = tuple(sharding)
        elif isinstance(sharding, str):
            raise TypeError(AXIS_NAME_ALONE.format(type=type(self).__name__, name=sharding))
        refuse_axis_names(metadata, type(self).__name__)
        refuse_unbox_fn(metadata, type(self).__name__)
        super().__init__(value, sharding=sharding, **metadata)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "collection" not in cls.__dict__:
            cls.collection = snake_case(cls.__name__)
        register_collection(cls)


register_collection(Variable)
register_container(Node)


class Param(Variable[T]):
    """A parameter, which an optimizer trains. Its collection is "params".

    >>> model = nnx.Dict(w=nnx.Param(jnp.ones((2, 3)), ("embed", "mlp")))
    >>> model.w.shape, model.variable("w").sharding
    ((2, 3), ('embed', 'mlp'))
    """

    __slots__ = ()
    collection = "params"


class BatchStat(Variable[T]):
    """Running statistics of a normalization layer. Its collection is "batch_stats"."""

    __slots__ = ()
    collection = "batch_stats"


class Cache(Variable[T]):
    """A value that a layer keeps between calls, e.g. keys and values while decoding. Its collection is "cache"."""

    __slots__ = ()
    collection = "cache"


class Intermediate(Variable[T]):
    """A value recorded with `Module.sow`. Its collection is "intermediates".

    >>> model = nnx.Dict()
    >>> model.sow(nnx.Intermediate, "activation", 1.0)
    >>> model.pop_state(nnx.Intermediate)["activation"].value
    (1.0,)
    """

    __slots__ = ()
    collection = "intermediates"


class Loss(Variable[T]):
    """A term of the training loss that a layer computes on the side. Its collection is "losses".

    The layer overwrites it in each call, and the loss function reads it after the call.

    >>> model = nnx.Dict(penalty=nnx.Loss(0.0))
    >>> model.penalty = 0.5
    >>> sum(loss.value for loss in model.filter(nnx.Loss).values())
    0.5
    """

    __slots__ = ()
    collection = "losses"


class Static(Container[T]):
    """A container that is not data: a pytree without leaves, hashed by its value.

    Assigned to an attribute of a Module, it makes a value static that would otherwise be data.

    >>> model = nnx.Dict(table=nnx.Static((1, 2)))
    >>> len(model.get_state())
    0
    """

    __slots__ = ()
    _nnx_holds_state = False

    def __hash__(self) -> int:
        return hash((type(self), Keyed(self.value)))

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Static) and Keyed(self.value) == Keyed(other.value)


jax.tree_util.register_pytree_node(
    Static, lambda static: ((), Keyed(static.value)), lambda keyed, _: Static(keyed.value)
)


def with_metadata(initializer: Callable[..., Any], **metadata: Any) -> Callable[..., Any]:
    """Wraps an initializer so that its result carries metadata into the Variable.

    >>> init = nnx.with_metadata(jax.nn.initializers.zeros, sharding=("din", "dout"))
    >>> nnx.Param(init(jax.random.key(0), (2, 3))).sharding
    ('din', 'dout')
    """
    refuse_axis_names(metadata, "nnx.with_metadata")
    refuse_unbox_fn(metadata, "with_metadata")

    def wrapped(*args: Any, **kwargs: Any) -> ContainerMetadata[Any]:
        value = initializer(*args, **kwargs)
        if isinstance(value, ContainerMetadata):
            return ContainerMetadata(value.value, {**value.metadata, **metadata})
        return ContainerMetadata(value, metadata)

    return wrapped


def with_partitioning(initializer: Callable[..., Any], sharding: Any, **metadata: Any) -> Callable[..., Any]:
    """Wraps an initializer so that its Variable has these axis names: `with_metadata(initializer, sharding=...)`.

    >>> init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
    >>> layer = nnx.Linear(2, 4, kernel_init=init, ctx=nnx.context(0))
    >>> layer.variable("kernel").sharding
    ('embed', 'mlp')
    """
    return with_metadata(initializer, sharding=sharding, **metadata)
