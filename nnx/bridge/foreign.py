"""`Foreign`: a model of another library as an ordinary Module.

An *adapter* is the static half of a foreign model: what it takes to run the model once its arrays are put back. There
is one class of adapters per library. The arrays are the variables of the `Foreign`, at the paths they have there.
"""

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from nnx.bridge.call import ForeignCall
from nnx.core.context import Context
from nnx.core.module.dict_sequence import Dict
from nnx.core.module.info import info_of
from nnx.core.module.kinds import Absent, explain_missing, is_static
from nnx.core.module.module import Module
from nnx.core.state.paths import segment_of
from nnx.core.variables.variables import Node

PATH_TAKEN = """Two variables of the model have the path {path!r}, or one lies below the other. Give one of them \
another name."""


class Ran(NamedTuple):
    """What a call did.

    Attributes:
        out: what it returned.
        updates: the variables afterward, by path: a value, or a Variable where a new one may be needed.
        adapter: the adapter for the next call, if the structure of the model has changed.
    """

    out: Any
    updates: Mapping[str, Any]
    adapter: "Adapter | None" = None


class Adapter(Protocol):
    """How to run a model of some library. It is a static value, and equal ones share their traces."""

    def run(self, call: ForeignCall, variables: Mapping[str, Any]) -> Ran:
        """Runs the model with these variables, which are containers by path."""
        ...

    def has_method(self, name: str) -> bool:
        """Whether the model has a method of this name that its author wrote."""
        ...


class Foreign(Dict):
    """A model of another library as a Module: its variables are items, at the paths they have there.

    `nnx.bridge` makes it from a model of Flax, Equinox or Haiku, or from functions. Call it as you would call the
    original, with `ctx` for the keys; other methods are called by their names. It has the mode that `train()` and
    `eval()` set, and passes it on.

    >>> model = nnx.bridge.from_functions(lambda params, x: params["w"] * x, {"w": jnp.ones(3)})
    >>> model.get_state()
    State({
      'w': Param(float32[3]),
    })
    """

    _adapter: Adapter | None = None
    deterministic: bool | None = None

    def __init__(self, adapter: Adapter, variables: Mapping[str, Any]):
        self._adapter = adapter
        self.deterministic = None
        for path, variable in variables.items():
            _write(self, path, variable)

    def __call__(self, *args: Any, ctx: Context | None = None, **kwargs: Any) -> Any:
        """Calls the model."""
        return self.run("__call__", *args, ctx=ctx, **kwargs)

    def run(self, method: str, *args: Any, ctx: Context | None = None, **kwargs: Any) -> Any:
        """Calls a method of the model by its name, which an item or a method of Modules may hide."""
        adapter, variables = self._adapter, dict(_variables(self))
        assert adapter is not None
        training = None if self.deterministic is None else not self.deterministic
        ran = adapter.run(ForeignCall(method, args, kwargs, ctx, training), variables)
        for path, new in ran.updates.items():
            value = new.value if isinstance(new, Node) else new
            if path not in variables:
                _write(self, path, new)
            elif value is not variables[path].value:
                _write(self, path, value)
        if ran.adapter is not None:
            self._adapter = ran.adapter
        return ran.out

    def __getattr__(self, name: str) -> Any:
        if self._adapter is not None and self._adapter.has_method(name):
            return types.MethodType(_method(name), self)
        return explain_missing(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter([segment_of(name) for name in info_of(self).kinds if name not in ("_adapter", "deterministic")])

    def __len__(self) -> int:
        return sum(1 for _ in self)


@functools.cache
def _method(name: str) -> Callable[..., Any]:
    """Returns the function behind a bound method; the same one each time, so that its traces are found again."""

    def method(self: Foreign, *args: Any, ctx: Context | None = None, **kwargs: Any) -> Any:
        return self.run(name, *args, ctx=ctx, **kwargs)

    method.__name__ = method.__qualname__ = name
    return method


def _variables(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the variables of a foreign model, in their containers, with their paths."""
    for name, kind in info_of(node).kinds.items():
        segment = segment_of(name)
        if is_static(kind) or type(kind) is Absent:
            continue
        value = node[segment]
        if isinstance(value, Module):
            yield from _variables(value, f"{prefix}{segment}/")
        else:
            yield f"{prefix}{segment}", Module.variable(node, segment)


def _write(root: Dict, path: str, value: Any) -> None:
    """Sets the item at a path; makes the Dicts on the way to it."""
    *parents, name = path.split("/")
    node: Any = root
    for parent in parents:
        if parent not in node:
            node[parent] = Dict()
        node = node[parent]
        if not isinstance(node, Dict):
            raise ValueError(PATH_TAKEN.format(path=path))
    if name in node and isinstance(node[name], Dict):
        raise ValueError(PATH_TAKEN.format(path=path))
    node[name] = value
