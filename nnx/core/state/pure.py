"""Pure: a Module as the pair of its States and its ModuleDef, which any JAX API can take."""

import types
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload

from nnx.core.hints.hints import add_hints
from nnx.core.hints.table import PURE as HINTS
from nnx.core.module.call_chains import Access
from nnx.core.state.filters import Filter, describe
from nnx.core.state.state import State
from nnx.core.state.updates import to_states

if TYPE_CHECKING:
    from nnx.core.state.moduledef import ModuleDef

M = TypeVar("M")


class Pure(NamedTuple, Generic[M]):
    """The `(states, moduledef)` tuple of a Module, as a pytree.

    `states` is one State, or a tuple of them if `partition` had several filters.

    >>> pure = nnx.Sequence([jnp.sin]).partition()
    >>> states, moduledef = pure
    >>> module = pure.merge()

    In annotations, `nnx.Pure[MyModule]` and `nnx.PureModule[MyModule]` name the class of the Module. At run time
    `nnx.Pure[nnx.State, MyModule]`, an older spelling, means the same; a type checker knows the others only.
    """

    states: Any
    moduledef: "ModuleDef[M]"

    if not TYPE_CHECKING:

        @classmethod
        def __class_getitem__(cls, item: Any) -> Any:
            return types.GenericAlias(cls, item[-1:] if isinstance(item, tuple) else item)

    @classmethod
    def new(cls, states: Any, moduledef: "ModuleDef[M]") -> "Pure[M]":
        """Makes a Pure of its two parts: `Pure(states, moduledef)`."""
        return cls(states, moduledef)

    def merge(self) -> M:
        """Builds a Module from this structure and these States."""
        return self.moduledef.merge(*_tuple(self.states))

    @property
    def apply(self) -> Access:
        """A proxy of the Module; a call returns `(out, Pure)`, with one State."""
        return self.moduledef.apply(*_tuple(self.states))

    @property
    def call(self) -> Access:
        """Like `apply`, but a call returns only the output."""
        return Access(lambda find, args, kwargs: find(self.merge())(*args, **kwargs))

    def get_state(self) -> State:
        """Returns all States merged into one."""
        return State.merge(*_tuple(self.states))

    @overload
    def filter(self, filter: Filter = ..., /) -> State: ...
    @overload
    def filter(self, first: Filter, second: Filter, /, *more: Filter) -> tuple[State, ...]: ...
    def filter(self, *filters: Filter) -> State | tuple[State, ...]:
        """Returns one State per filter; entries that match no filter are left out."""
        return self.get_state().filter(*filters)

    def partition(self, *filters: Filter) -> "Pure[M]":
        """Returns the same Module with its State split by the filters; every entry must match one."""
        return Pure(self.get_state().partition(*filters), self.moduledef)

    @overload
    def pop_state(self, filter: Filter, /) -> "tuple[State, Pure[M]]": ...
    @overload
    def pop_state(self, first: Filter, second: Filter, /, *more: Filter) -> "tuple[tuple[State, ...], Pure[M]]": ...
    def pop_state(self, *filters: Filter) -> "tuple[State | tuple[State, ...], Pure[M]]":
        """Returns `(states, rest)`: the entries that match the filters, and a Pure without them."""
        if not filters:
            raise ValueError(
                "pop_state needs at least one filter that says what to take out, e.g. pop_state(nnx.Intermediate); "
                f"got {describe(filters)}."
            )
        state = self.get_state()
        taken = state.filter(*filters)
        return taken, Pure(state - State.merge(*_tuple(taken)), self.moduledef)

    def update_state(self, *updates: Any) -> "Pure[M]":
        """Returns a new Pure in which the updates (States, tuples of them, a Pure or a Module) win."""
        updated = map(self.moduledef.canonical, to_states(updates))
        return Pure(State.merge(self.get_state(), *updated), self.moduledef)


add_hints(Pure, HINTS)

PureModule = Pure
"""The annotation of a Module in pure form: `nnx.PureModule[MyModule]`."""


def _tuple(states: Any) -> tuple[State, ...]:
    return (states,) if isinstance(states, State) else tuple(states)
