"""A recording of one abstract run of a model: which Modules were called, and what they returned.

The run uses a copy, inside a trace. Each Module of the copy carries a *mark*, a static attribute with its number, which
identifies it even after a lifted transform has rebuilt it. During the run the `__call__` of the model's classes is
wrapped. When a marked Module is called, it runs under the named scope of its number, by which its operations are later
found in the jaxpr (see flops), and the shapes of its output are recorded.
"""

import contextlib
import copy
import functools
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import numpy as np

from nnx.core.context import Context, PureContext
from nnx.core.module.attributes import assign
from nnx.core.module.dict_sequence import Dict
from nnx.core.module.info import class_of
from nnx.core.module.module import Module
from nnx.core.module.scopes import function_in
from nnx.core.state.pure import Pure
from nnx.inspection.flops import count_by_scope, scope

MARK = "_nnx_mark"

NOT_CALLABLE = """nnx.summary was given inputs for {name}, which has no method {method!r}. Name the one to run with \
`method=`, or leave the inputs out for a table without output shapes."""


class Mark:
    """The number of a Module in one run.

    A mark is equal only to itself, so a function that was compiled in an earlier run is not reused but traced again.
    """

    __slots__ = ("number",)

    def __init__(self, number: int):
        self.number: int = number


class Recording(NamedTuple):
    """The results of one run, by the number of the Module in `named_modules()`."""

    outputs: dict[int, list[Any]]  # the distinct outputs, as pytrees of ShapeDtypeStruct; in the order of the calls
    flops: Counter[int]


class _Run:
    """A run in progress: the Modules being called, innermost last, and the outputs so far."""

    def __init__(self) -> None:
        self.active: list[Any] = []
        self.outputs: dict[int, list[Any]] = {}
        self.unmarked: dict[int, int] = {}  # the numbers of Dicts by id; a mark on a Dict would become an item

    def mark(self, root: Module) -> None:
        for number, (_, module) in enumerate(Module.named_modules(root)):
            if isinstance(module, Dict):
                self.unmarked[id(module)] = number
            else:
                assign(module, MARK, Mark(number))

    def number_of(self, module: Any) -> int | None:
        mark = vars(module).get(MARK)
        return mark.number if isinstance(mark, Mark) else self.unmarked.get(id(module))

    def call(self, module: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number = self.number_of(module)
        if number is None or (self.active and self.active[-1] is module):  # the latter is a super().__call__
            return function(*args, **kwargs)
        self.active.append(module)
        seen = self.outputs.setdefault(number, [])
        try:
            with scope(number):
                out = function(*args, **kwargs)
        finally:
            self.active.pop()
        shapes = jax.tree.map(_shape, out)
        if shapes not in seen:
            seen.append(shapes)
        return out


_running: ContextVar[_Run | None] = ContextVar("nnx_summary_run", default=None)

_wrapping = threading.RLock()
"""Held while classes are wrapped: of two runs at once, each would restore what the other had installed."""


def record(model: Module, method: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Recording:
    """Calls a method of a copy of the model on abstract values.

    Args:
        model: the Module to copy.
        method: the name of a method, or a function whose first argument is the Module.
        args: the positional arguments. Arrays and `ShapeDtypeStruct`s become abstract; Contexts are copied, so that the
            caller's does not advance; anything else is passed unchanged.
        kwargs: the keyword arguments, treated likewise.
    """
    state, moduledef = Module.partition(model)
    leaves, treedef = jax.tree.flatten((tuple(args), kwargs), is_leaf=_is_split)
    traced = {i: _split(leaf) for i, leaf in enumerate(leaves) if _is_split(leaf) or _is_array(leaf)}
    run = _Run()

    def trace(state: Any, traced: dict[int, Any]) -> Any:
        module = moduledef.merge(state)
        run.mark(module)
        inner = [_merge(traced[i]) if i in traced else leaf for i, leaf in enumerate(leaves)]
        inner_args, inner_kwargs = jax.tree.unflatten(treedef, inner)
        out = run.call(module, _method(module, method), inner_args, inner_kwargs)
        return [leaf for leaf in jax.tree.leaves(out) if isinstance(leaf, jax.Array)], Module.get_state(module)

    with _wrapped_calls({class_of(module) for module in Module.modules(model)}), _silent_about_marks():
        token = _running.set(run)
        try:
            jaxpr = jax.make_jaxpr(trace)(state, traced)
        finally:
            _running.reset(token)
    return Recording(run.outputs, count_by_scope(jaxpr))


def _method(module: Module, method: Any) -> Callable[..., Any]:
    if not isinstance(method, str):
        return functools.partial(method, module)
    if not hasattr(module, method):
        raise ValueError(NOT_CALLABLE.format(name=type(module).__name__, method=method))
    return getattr(module, method)


def _is_split(leaf: Any) -> bool:
    return isinstance(leaf, (Context, Module))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic))


def _split(leaf: Any) -> Any:
    if isinstance(leaf, Context):
        return copy.deepcopy(leaf).partition()
    return Module.partition(leaf) if isinstance(leaf, Module) else leaf


def _merge(value: Any) -> Any:
    return value.merge() if isinstance(value, (Pure, PureContext)) else value


def _shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if _is_array(leaf) else leaf


@contextlib.contextmanager
def _wrapped_calls(classes: set[type]) -> Iterator[None]:
    """Wraps `__call__` on each class, and restores the classes afterwards."""
    with _wrapping:
        found = {cls: _find_call(cls) for cls in classes}
        originals = {cls: original for cls, original in found.items() if original is not None}
        own = {cls: cls.__dict__["__call__"] for cls in originals if "__call__" in cls.__dict__}
        try:
            for cls, original in originals.items():
                cls.__call__ = _recorded(original)
            yield
        finally:
            for cls in originals:
                if cls in own:
                    cls.__call__ = own[cls]
                elif "__call__" in cls.__dict__:
                    del cls.__call__


def _find_call(cls: type) -> Any:
    """Returns the `__call__` that a class or its bases define; `getattr` would find that of the metaclass."""
    return function_in(next((base.__dict__["__call__"] for base in cls.__mro__ if "__call__" in base.__dict__), None))


def _recorded(original: Any) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = original.__get__(self, type(self)) if hasattr(original, "__get__") else original
        run = _running.get()
        return function(*args, **kwargs) if run is None else run.call(self, function, args, kwargs)

    return functools.wraps(original)(__call__)


@contextlib.contextmanager
def _silent_about_marks() -> Iterator[None]:
    """Silences warnings about recompilation caused by marks, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f"(?s).*{MARK}")
        yield
