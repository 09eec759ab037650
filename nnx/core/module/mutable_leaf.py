"""The entries of `Module.mutable_state_dict()`."""

from typing import Any

from nnx.core.module.attributes import variable_of
from nnx.core.state.updates import get_path, resolve, set_path


class MutableLeaf:
    """One entry of `Module.mutable_state_dict()`: `value` reads and writes the Module, the rest is metadata."""

    __slots__ = ("_root", "_path")

    def __init__(self, root: Any, path: str):
        object.__setattr__(self, "_root", root)
        object.__setattr__(self, "_path", path)

    @property
    def value(self) -> Any:
        return get_path(self._root, self._path)

    @value.setter
    def value(self, value: Any) -> None:
        set_path(self._root, self._path, value)

    @property
    def variable(self) -> Any:
        """The container: its type and metadata, with the current value."""
        owner, name = resolve(self._root, self._path)
        return variable_of(owner, name)

    @property
    def sharding(self) -> Any:
        """The logical axis names; None if there are none, as for a bare array."""
        return getattr(self.variable, "sharding", None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.variable, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "value":
            raise AttributeError(f"Cannot set {name!r} of {self._path!r}: only `.value` can be set, metadata cannot.")
        set_path(self._root, self._path, value)

    def __repr__(self) -> str:
        return f"MutableLeaf({self._path!r}, {self.variable!r})"
