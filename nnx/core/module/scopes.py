"""Named scopes: in profiles and HLO, the operations of a submodule appear under its path.

A Module that was rebuilt inside a transform knows its path (`ModuleInfo.path`), and calling it opens a
`jax.named_scope` of that name. Scopes nest as calls do, so a scope is named by what its path adds to the path of the
caller: `layers/0/attention` runs in the scope `attention` inside the scope `layers/0`. Names are metadata of the
compiled program and cost it nothing. Any other Module has no path, and calling it opens no scope.
"""

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import jax

from nnx.core.module.call_errors import explain_call
from nnx.core.module.info import info_of


class _Scope(threading.local):
    """The path of the innermost Module that this thread is in a call of."""

    path: str = ""


_scope = _Scope()
_calls = 0


def count_calls() -> int:
    """Returns how many calls of Modules have been traced in this process; it tells whether a model has run."""
    return _calls


class ScopedCall:
    """The `__call__` of a Module class, as a descriptor that returns one of two methods.

    One is for calls inside a transform, where the Module has a path, and one for eager calls, which opens no scope
    and is in no traceback. Both explain errors.
    """

    def __init__(self, function: types.FunctionType):
        functools.update_wrapper(self, function)  # pyright: ignore[reportArgumentType]  (for its name and docstring)
        self.function = function
        self._scoped = _scoped(function)
        self._eager = _explained(function)

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self.function
        return types.MethodType(self._eager if info_of(module).path is None else self._scoped, module)


def _explained(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of a Module, with hints in the errors of its calls."""

    @functools.wraps(function)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        except BaseException as error:
            if isinstance(error, (TypeError, ValueError)):
                explain_call(self, function, args, kwargs, error)
            # A bare `raise` goes on with this traceback and adds no entry, so this frame is not in it.
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            raise

    setattr(__call__, "_nnx_explains", function)  # noqa: B010  type checkers know functions without it
    return __call__


def unexplained(function: Any) -> Any:
    """Returns the function that an author wrote as `__call__`, behind the one that a bound method has."""
    return getattr(function, "_nnx_explains", function)


def _scoped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of a Module, run in the scope of the Module's path, with hints in its errors."""

    @functools.wraps(function)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _calls
        _calls += 1
        path: Any = info_of(self).path
        outer = _scope.path
        try:
            if path in ("", outer):  # a root, or a super().__call__()
                return function(self, *args, **kwargs)
            name = path[len(outer) + 1 :] if outer and path.startswith(f"{outer}/") else path
            _scope.path = path
            with jax.named_scope(name):
                return function(self, *args, **kwargs)
        except (TypeError, ValueError) as error:
            explain_call(self, function, args, kwargs, error)
            raise
        finally:
            _scope.path = outer

    return __call__


def scope_calls(cls: type) -> None:
    """Makes the calls of a Module class open scopes, if it defines `__call__` as a function."""
    call = vars(cls).get("__call__")
    if type(call) is types.FunctionType and not getattr(call, "__isabstractmethod__", False):
        type.__setattr__(cls, "__call__", ScopedCall(call))


def function_in(member: Any) -> Any:
    """Returns the function behind what a class holds as a method."""
    return member.function if type(member) is ScopedCall else member
