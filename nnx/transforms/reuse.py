"""Traces that are kept outside of `jit`, for the transforms whose bodies JAX stages anyway.

A scan, a loop, a branch or a remat called from plain Python is compiled on its first call. `jax.lax.scan` finds its
earlier trace by the identity of the body, but ours is a new function for each call, because it closes over the Modules
of that call. So the work of a call runs as a jitted function that is kept under everything the trace depends on: the
transform and its options, the signature of the call, and what the user's functions *reach*.

A function reaches what its closure, its defaults, its attributes and the globals named in its code hold, and what
functions found there reach in turn; a global function of another file counts by identity. Numbers and strings count by
value, everything else by identity. A function that reaches something that can change in place (a list, a numpy array, a
Module or another object of a user's class) is traced on every call.

A kept trace holds no Module, and goes when a function goes that reaches an array. At most `MAX_TRACES` are kept.

Tracing under `jit` hides values that a body could read without it, such as a broadcast array that decides an `if`. So
when a call fails this way it is made again without `jit`: it either works, or raises the error that explains it.
"""

import builtins
import dataclasses
import dis
import enum
import functools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from nnx.core.contents import content_of
from nnx.core.context import Context
from nnx.core.info import ModuleBase
from nnx.core.trace import is_eager
from nnx.sharding.rules import current_rules

MAX_TRACES = 256
_MAX_REACHED = 500  # values looked at per call; a function that reaches more is not worth the look

_BY_VALUE = (bool, int, str, bytes, type(None), type(...))
_PACKAGES = ("jax", "jaxlib", "nnx", "numpy", "ml_dtypes", "optax", "functools", "typing")  # instances do not change
_LASTING = (type, types.ModuleType, types.BuiltinFunctionType, np.ufunc, np.dtype)  # held by their packages anyway


class CanChange(Exception):
    """A function reaches something that can change without being replaced."""


class Reach:
    """What functions and options reach, as a key, with the objects that must stay alive for the key to hold."""

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.held: list[Any] = []
        self.lasts: bool = True  # whether all of it would be alive without the functions that reach it
        self._seen: dict[int, int] = {}

    def add(self, value: Any, by_content: bool = False) -> None:
        """Adds a value.

        Args:
          value: the value.
          by_content: whether lists and dicts are compared by content, since they are read in this very call.

        Raises:
          CanChange: it can change in place.
        """
        cls = type(value)
        if cls in _BY_VALUE:
            self.key.append((cls, value))
        elif cls is float or cls is complex:
            self.key.append(repr(value))  # tells 0.0 from -0.0, and a NaN equals itself
        elif cls is types.FunctionType:
            self._add_function(value)
        elif cls is functools.partial:
            self.key.append("partial")
            self._add_all((value.func, value.args, tuple(value.keywords.items())))
        elif cls is types.MethodType:
            self.key.append("method")
            self._add_all((value.__func__, value.__self__))
        elif isinstance(value, tuple) or (by_content and cls is list):
            self._add_identity(cls)
            self.key.append(len(value))
            self._add_all(value, by_content)
        elif by_content and cls is dict:
            self.key.append(("dict", len(value)))
            self._add_all((*value, *value.values()), by_content)
        elif isinstance(value, (*_LASTING, enum.Enum)):
            self._add_identity(value)
        elif dataclasses.is_dataclass(cls) and _is_frozen(cls):
            self._add_identity(cls)
            self._add_all([getattr(value, field.name) for field in dataclasses.fields(cls)], by_content)
        elif isinstance(value, (ModuleBase, Context, np.ndarray)) or cls.__module__.partition(".")[0] not in _PACKAGES:
            raise CanChange  # so can every instance of a user's class
        else:
            self._add_identity(value)

    def _add_all(self, values: Iterable[Any], by_content: bool = False) -> None:
        for value in values:
            self.add(value, by_content)

    def _add_identity(self, value: Any) -> None:
        self.key.append(id(value))
        self.held.append(value)
        self.lasts = self.lasts and isinstance(value, (*_LASTING, types.FunctionType))

    def _add_function(self, function: types.FunctionType) -> None:
        code = function.__code__
        if id(function) in self._seen:
            self.key.append(("seen", self._seen[id(function)]))
            return
        self._seen[id(function)] = len(self._seen)
        if len(self.key) > _MAX_REACHED:
            raise CanChange
        self.key.append(id(code))
        self.held.append(code)
        self.add(function.__defaults__)
        self._add_items(function.__kwdefaults__)
        self._add_items(function.__dict__)
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # a cell that was never filled
                self.key.append("empty")
        home = function.__globals__
        for name in _global_names(code):
            value = home[name] if name in home else getattr(builtins, name, None)
            if type(value) is types.FunctionType and value.__globals__ is not home:
                self._add_identity(value)
            else:
                self.add(value)

    def _add_items(self, values: dict[str, Any] | None) -> None:
        self.add(tuple(values.items()) if values else None)


def _is_frozen(cls: type) -> bool:
    content = content_of(cls)
    return content is not None and not content.is_mutable


_names_by_code: dict[int, tuple[Any, tuple[str, ...]]] = {}


def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of globals in a function's code and in the functions defined inside of it."""
    found = _names_by_code.get(id(code))  # by identity: comparing code objects compares their bytes
    if found is None:
        if len(_names_by_code) > 10 * MAX_TRACES:
            _names_by_code.clear()
        names = tuple(dict.fromkeys(_named(code)))
        found = _names_by_code[id(code)] = (code, names)  # keeps the code, so that its id stays its own
    return found[1]


def _named(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named(constant)


class Trace:
    """The work of a call, jitted. Whenever JAX traces it, it is that of the call being made."""

    __slots__ = ("jitted", "reached", "held", "guards", "needs_values")

    def __init__(self, reached: tuple[Any, ...], held: list[Any]):
        self.reached, self.held = reached, held
        self.guards: list[Any] = []  # weak references to functions that end it
        self.needs_values: bool = False  # whether it only works without jit

        def traced(*operands: Any) -> Any:
            return _current.work(*operands)

        self.jitted = jax.jit(traced)


class _Current(threading.local):
    """The work that this thread is doing, for a Trace to be traced with."""

    work: Any = None


_current = _Current()
_traces: OrderedDict[Any, Trace] = OrderedDict()
_lock = threading.Lock()


def reused(
    work: Callable[..., Any],
    operands: tuple[Any, ...],
    *,
    functions: Sequence[Callable[..., Any]],
    options: Any,
    signature: Any,
) -> Any:
    """Returns `work(*operands)`, with an earlier trace if this is plain Python and there is one that still holds.

    Args:
      work: what to do; depends on `functions`, `options` and `signature` alone, and on the structure of the operands.
      operands: the arrays of the call.
      functions: the user's functions that it runs.
      options: the transform and its options, compared by content.
      signature: what is static about the call, hashable.
    """
    if not is_eager() or jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return work(*operands)
    trace = _find(functions, options, signature)
    if trace is None or trace.needs_values:
        return work(*operands)
    outer, _current.work = _current.work, work
    try:
        return trace.jitted(*operands)
    except Exception:  # noqa: S110  (the call below works, or raises the error as it should be)
        pass
    finally:
        _current.work = outer
    result = work(*operands)
    trace.needs_values = True
    return result


def _find(functions: Sequence[Callable[..., Any]], options: Any, signature: Any) -> Trace | None:
    """Returns the trace of such a call, made now if there is none; `None` if it cannot be kept."""
    reach, passing = Reach(), []
    try:
        for function in functions:
            reach.lasts = True
            reach.add(function)
            if not reach.lasts:
                passing.append(function)  # the trace goes with it, so it must be this very function
        reached = tuple(reach.key)
        reach.add(options, by_content=True)
        # Such a function has one trace at a time: a cell that holds another array at every call must not pile them up.
        by_reach: Any = tuple(map(id, passing)) or reached
        key = (by_reach, tuple(reach.key[len(reached) :]), signature, current_rules())
        with _lock:
            trace = _traces.get(key)
            if trace is not None and trace.reached == reached:
                _traces.move_to_end(key)
                return trace
        trace = Trace(reached, reach.held)
        trace.guards = [weakref.ref(function, lambda _: _traces.pop(key, None)) for function in passing]
    except (CanChange, TypeError):  # or it has a part that cannot be hashed, or referred to weakly
        return None
    with _lock:
        _traces[key] = trace
        if len(_traces) > MAX_TRACES:
            _traces.popitem(last=False)
    return trace


def kept_traces() -> int:
    """Returns how many traces are kept now."""
    return len(_traces)


def clear_traces() -> None:
    """Forgets every trace."""
    with _lock:
        _traces.clear()
