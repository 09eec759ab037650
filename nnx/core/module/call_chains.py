"""Access proxies: objects that record a chain of attributes and items, and a call at the end."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Way(NamedTuple):
    """The way from a Module to something in it: steps of `(is an attribute, name or key)`."""

    steps: tuple[tuple[bool, Any], ...]

    def __call__(self, module: Any) -> Any:
        """Returns what is at its end."""
        target = module
        for is_attribute, key in self.steps:
            target = getattr(target, key) if is_attribute else target[key]
        return target


class Access:
    """A place in a Module that does not exist yet: `.attr` and `[key]` extend the chain, a call runs it.

    Args:
        run: a function that receives the Way from a Module to what is to be called, and the arguments. It chooses the
            Module to run on and what to return.
        steps: the chain so far, as pairs `(is_attribute, name or key)`.
    """

    __slots__ = ("_run", "_steps")

    def __init__(self, run: Callable[[Way, Any, Any], Any], steps: tuple[tuple[bool, Any], ...] = ()):
        self._run = run
        self._steps = steps

    def __getattr__(self, name: str) -> "Access":
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Access(self._run, (*self._steps, (True, name)))

    def __getitem__(self, key: Any) -> "Access":
        return Access(self._run, (*self._steps, (False, key)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(Way(self._steps), args, kwargs)

    def __repr__(self) -> str:
        chain = "".join(f".{key}" if is_attribute else f"[{key!r}]" for is_attribute, key in self._steps)
        return f"<access {chain or 'the Module'}>"
