"""Which arguments of a call an option selects: static ones, donated ones."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from nnx.core.module.info import ModuleBase
from nnx.core.repr import short
from nnx.core.statics.statics import Keyed

WRONG_COUNT = "{option} has {given} entries for a call with {count} arguments."

UNHASHABLE_STATIC = """The static argument {label} of {name} is {value}, of type {kind}, which has no hash: a function \
is compiled once per value of its static arguments, so they must be hashable. Pass a tuple for a list, or make the \
argument dynamic."""

STATIC_MODULE = """The static argument {label} of {name} is a Module ({kind}). Modules are never static: take it out \
of static_argnums/static_argnames, and its state is passed as data and its structure compared by itself."""


class StaticArgument(Keyed):
    """A static argument of a call: a pytree without leaves, compared as static attributes are."""

    __slots__ = ()


jax.tree_util.register_static(StaticArgument)


class Selection:
    """Some arguments of a function, by position and by name; one is inferred from the other, as in `jax.jit`.

    Args:
        fun: the function.
        argnums, argnames: the selected arguments, as the user gave them.
        offset: the number of arguments before those the user counts (a Module that the function is bound to).
    """

    def __init__(self, fun: Callable[..., Any], argnums: Any, argnames: Any, offset: int = 0):
        self.argnums = _tuple(argnums, int)
        self.argnames = _tuple(argnames, str)
        names = _parameter_names(fun)[offset:]
        if self.argnums and argnames is None:
            self.argnames = tuple(names[i] for i in self.argnums if -len(names) <= i < len(names))
        elif self.argnames and argnums is None:
            self.argnums = tuple(i for i, name in enumerate(names) if name in self.argnames)
        self.offset = offset

    def __bool__(self) -> bool:
        return bool(self.argnums or self.argnames)

    def positions(self, count: int) -> set[int]:
        """Returns the selected positions in a call with `count` positional arguments, the bound Module included."""
        shift, counted = self.offset, count - self.offset
        return {shift + (i + counted if i < 0 else i) for i in self.argnums if -counted <= i < counted}


def _tuple(value: Any, cls: type) -> tuple[Any, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, cls) else tuple(value)


def _parameter_names(fun: Callable[..., Any]) -> list[str]:
    try:
        parameters: Iterable[inspect.Parameter] = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds]


def make_static(selection: Selection, args: Sequence[Any], kwargs: dict[str, Any], name: str) -> tuple[Any, Any]:
    """Returns the call with its static arguments wrapped.

    Raises:
        ValueError: one of them cannot be hashed.
    """
    positions = selection.positions(len(args))
    args = tuple([_static(a, f"number {i}", name) if i in positions else a for i, a in enumerate(args)])
    kwargs = {k: _static(v, repr(k), name) if k in selection.argnames else v for k, v in kwargs.items()}
    return args, kwargs


def _static(value: Any, label: str, name: str) -> StaticArgument:
    if isinstance(value, ModuleBase):
        raise ValueError(STATIC_MODULE.format(label=label, name=name, kind=type(value).__name__))
    try:
        hash(value)
    except TypeError:
        text = UNHASHABLE_STATIC.format(label=label, name=name, value=short(value), kind=type(value).__name__)
        raise ValueError(text) from None
    return StaticArgument(value, f"the static argument {label} of {name}")


def static_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> list[StaticArgument]:
    """Returns the wrapped static arguments of a call."""
    return [value for value in (*args, *kwargs.values()) if type(value) is StaticArgument]


def unwrap_static(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that takes wrapped static arguments."""

    def unwrapped(*args: Any, **kwargs: Any) -> Any:
        args = tuple([a.value if type(a) is StaticArgument else a for a in args])
        return fun(*args, **{k: v.value if type(v) is StaticArgument else v for k, v in kwargs.items()})

    unwrapped.__wrapped__ = fun
    return unwrapped


def leaf_flags(selection: Selection, args: Sequence[Any], kwargs: dict[str, Any]) -> list[bool]:
    """Returns, for every leaf of the call, whether it is in a selected argument."""
    positions = selection.positions(len(args))
    marked = (
        [
            jax.tree.map(lambda _: True, a) if i in positions else jax.tree.map(lambda _: False, a)
            for i, a in enumerate(args)
        ],
        {k: jax.tree.map(lambda _, s=k in selection.argnames: s, v) for k, v in kwargs.items()},
    )
    return jax.tree.leaves(marked)
