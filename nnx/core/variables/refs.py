"""Shared Variables: a `Ref` is one cell that several attributes, of one Module or of many, have in common.

The value is stored in the `__dict__` of every *owner* (and in that of the Ref), so reading an attribute is still
Python's own lookup; a write goes to all of them. An owner is a Module and an attribute name. The reference to the
Module is weak: tying its weights must not keep a model alive.
"""

import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from nnx.core.errors import INCOMPATIBLE_CONTAINER, REF_AT_OTHER_LEVEL, TraceContextError
from nnx.core.module.info import ModuleBase, info_of
from nnx.core.repr import short
from nnx.core.structure.versions import Version
from nnx.core.trace import current_level, same_level
from nnx.core.variables.ties import is_news
from nnx.core.variables.trees import fresh
from nnx.core.variables.variables import Container, Node, Spec, refuse_modules, spec_of

T = TypeVar("T")


class Ref:
    """One cell for several attributes: tied weights.

    Args:
        container: the Variable to share.

    >>> class Tied(nnx.Module):
    ...     def __init__(self):
    ...         table = nnx.Ref(nnx.Param(jnp.ones((3, 2))))
    ...         self.embed, self.head = table, table
    >>> list(Tied().get_state())
    ['embed']
    """

    __slots__ = ("_spec", "_level", "_owners", "version", "__dict__", "__weakref__")
    _nnx_holds_state = True

    version: Version

    if TYPE_CHECKING:  # to a type checker, `Ref(Param(x))` has the type of `x`, just like `Param(x)`

        def __new__(cls, container: T) -> T: ...

    def __init__(self, container: Any):
        if isinstance(container, Ref):
            text = "nnx.Ref takes a Variable, got a Ref. Assign the same Ref to every attribute that shares it."
            raise TypeError(text)
        if not isinstance(container, Node):
            raise TypeError(
                f"nnx.Ref takes a Variable or Node, got {short(container)}. Wrap the value: nnx.Ref(nnx.Param(x))."
            )
        self._bind(spec_of(container), fresh(container.value), current_level())

    def _bind(self, spec: Spec, value: Any, level: Any) -> None:
        self._spec = spec
        self._level = level
        self._owners: list[tuple[weakref.ref[Any], str]] = []
        self.version = Version()
        self.__dict__["value"] = value

    @classmethod
    def rebuilt(cls, spec: Spec, value: Any, level: Any) -> "Ref":
        """Makes a Ref around a value as it is, without owners."""
        ref = object.__new__(cls)
        ref._bind(spec, value, level)
        return ref

    @classmethod
    def around(cls, owner: ModuleBase, name: str, spec: Spec) -> "Ref":
        """Puts an attribute of a newly built Module on a new Ref, as its only owner."""
        ref = cls.rebuilt(spec, owner.__dict__[name], info_of(owner).level)
        ref.adopt(owner, name)
        return ref

    def adopt(self, owner: ModuleBase, name: str) -> None:
        """Ties an attribute of a newly built Module, which nothing cached depends on yet."""
        self._owners.append((weakref.ref(owner), name))
        info_of(owner).kinds[name] = self
        owner.__dict__[name] = self.__dict__["value"]

    def owners(self) -> list[tuple[Any, str]]:
        """Returns the Modules that hold this Ref now, each with the attribute name."""
        found = [(owner(), name) for owner, name in self._owners]
        return [(owner, name) for owner, name in found if owner is not None]

    def weak_owners(self) -> list[tuple[weakref.ref[Any], str]]:
        """Returns the owners as they are kept: weak references, some of which may be dead."""
        return list(self._owners)

    def owner_steps(self, owners: list[tuple[weakref.ref[Any], str]]) -> list[tuple[Any, str, Any]]:
        """Returns the assignments `(object, attribute, value)` that will give the Ref these owners."""
        return [(self, "_owners", owners), *self.version.change_steps()]

    def respecify(self, spec: Spec) -> None:
        """Gives the shared Variable another type or other metadata."""
        self._spec = spec
        self.version.changed()

    def attach(self, owner: ModuleBase, name: str) -> None:
        """Ties an attribute of a Module to this Ref; the caller stores its kind and value."""
        self.check_level(f"attaching it to {name!r} of {type(owner).__name__}")
        self._owners = [(o, n) for o, n in self._owners if o() is not None]
        self._owners.append((weakref.ref(owner), name))
        self.version.changed()

    def detach(self, owner: ModuleBase, name: str) -> None:
        """Unties an attribute of a Module."""
        self._owners = [(o, n) for o, n in self._owners if o() is not None and not (o() is owner and n == name)]
        self.version.changed()

    def check_level(self, action: str) -> None:
        """Raises TraceContextError if the Ref was made at another trace level."""
        if not same_level(self._level):
            raise TraceContextError(REF_AT_OTHER_LEVEL.format(action=action))

    def write(self, value: Any) -> None:
        """Writes a raw value, or that of an equivalent container, to every owner."""
        self.check_level("writing to it")
        spec = self._spec
        if isinstance(value, Container):
            if spec_of(value) is not spec:
                raise ValueError(INCOMPATIBLE_CONTAINER.format(target="the Ref", old=spec, new=spec_of(value)))
            value = fresh(value.value)
        refuse_modules(spec.type, value)
        if spec.on_set is not None:
            value = spec.on_set(value, spec.metadata)
        if is_news(value, self.__dict__["value"]):
            self.version.changed()
        for owner, name in self.owners():
            owner.__dict__[name] = value
        self.__dict__["value"] = value

    def targets(self) -> list[tuple[dict[str, Any], str]]:
        """Returns every `(dict, name)` a write must reach."""
        return [(self.__dict__, "value"), *((owner.__dict__, name) for owner, name in self.owners())]

    @property
    def variable(self) -> Any:
        """The shared container: its type and metadata with the current value."""
        return self._spec.box(self.__dict__["value"])

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._spec.metadata:
            return self._spec.read(name)
        raise AttributeError(f"'Ref' has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "value":
            self.write(value)
        elif name in Ref.__slots__:
            object.__setattr__(self, name, value)
        else:
            raise AttributeError(f"'Ref' has no attribute {name!r} to set; write `ref.value = ...`.")

    def __repr__(self) -> str:
        return f"Ref({self.variable!r})"

    def __reduce__(self) -> Any:
        return (_unpickle, (self._spec, self.__dict__["value"]))


def _unpickle(spec: Spec, value: Any) -> Ref:
    return Ref.rebuilt(spec, value, current_level())
