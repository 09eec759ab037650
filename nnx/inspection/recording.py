"""Which Module was called, with what output: one abstract run of a model, written down.

The run happens on a copy, inside a trace. Each Module of the copy carries a *mark*, a static attribute with its number,
so that it is known again when a lifted transform rebuilds it. For the time of the run the `__call__` of the model's
classes is wrapped: a marked Module that is called runs under the named scope of its number, which is how its operations
are found in the jaxpr later (see flops), and leaves the shapes of its output.
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

from nnx.core.attributes import assign
from nnx.core.containers import Dict
from nnx.core.context import Context, PureContext
from nnx.core.module import Module
from nnx.core.pure import Pure
from nnx.inspection.flops import count_by_scope, scope

MARK = "_nnx_mark"

NOT_CALLABLE = """nnx.summary was given inputs for {name}, which has no method {method!r}. Name the one to run with \
`method=`, or leave the inputs out for a table without output shapes."""


class Mark:
    """The number of a Module in the run; new for each run, so that no function compiled in an earlier one fits."""

    __slots__ = ("number",)

    def __init__(self, number: int):
        self.number = number


class Recording(NamedTuple):
    """What one run showed, by the number of the Module in `named_modules()`."""

    outputs: dict[int, list[Any]]  # pytrees of ShapeDtypeStruct, those that differ
    flops: Counter[int]


class _Run:
    """A run in progress: the Modules being called, innermost last, and what came out so far."""

    def __init__(self) -> None:
        self.active: list[Any] = []
        self.outputs: dict[int, list[Any]] = {}
        self.unmarked: dict[int, int] = {}  # the numbers of Dicts by id: every attribute of a Dict is an item

    def mark(self, root: Module) -> None:
        for number, (_, module) in enumerate(root.named_modules()):
            if isinstance(module, Dict):
                self.unmarked[id(module)] = number
            else:
                assign(module, MARK, Mark(number))

    def number_of(self, module: Any) -> int | None:
        mark = vars(module).get(MARK)
        return mark.number if isinstance(mark, Mark) else self.unmarked.get(id(module))

    def call(self, module: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number = self.number_of(module)
        if number is None or (self.active and self.active[-1] is module):  # the latter: a call of super().__call__
            return function(*args, **kwargs)
        self.active.append(module)
        try:
            with scope(number):
                out = function(*args, **kwargs)
        finally:
            self.active.pop()
        shapes, seen = jax.tree.map(_shape, out), self.outputs.setdefault(number, [])
        if shapes not in seen:
            seen.append(shapes)
        return out


_running: ContextVar[_Run | None] = ContextVar("nnx_summary_run", default=None)

_wrapping = threading.RLock()
"""Held while classes are wrapped: two runs at once would each restore what the other had put there."""


def record(model: Module, method: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Recording:
    """Calls a method of a copy of the model on abstract values.

    Args:
      method: the name of a method, or a function whose first argument is the Module.
      args: arrays and `ShapeDtypeStruct`s are abstracted; Contexts are copied, so that the caller's does not advance;
        anything else is passed as it is.
    """
    state, moduledef = model.partition()
    leaves, treedef = jax.tree.flatten((tuple(args), kwargs), is_leaf=_is_split)
    traced = {i: _split(leaf) for i, leaf in enumerate(leaves) if _is_split(leaf) or _is_array(leaf)}
    run = _Run()

    def trace(state: Any, traced: dict[int, Any]) -> Any:
        module = moduledef.merge(state)
        run.mark(module)
        inner = [_merge(traced[i]) if i in traced else leaf for i, leaf in enumerate(leaves)]
        inner_args, inner_kwargs = jax.tree.unflatten(treedef, inner)
        out = run.call(module, _method(module, method), inner_args, inner_kwargs)
        return [leaf for leaf in jax.tree.leaves(out) if isinstance(leaf, jax.Array)], module.get_state()

    with _wrapped_calls({type(module) for module in model.modules()}), _silent_about_marks():
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
    return leaf.partition() if isinstance(leaf, Module) else leaf


def _merge(value: Any) -> Any:
    return value.merge() if isinstance(value, (Pure, PureContext)) else value


def _shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if _is_array(leaf) else leaf


@contextlib.contextmanager
def _wrapped_calls(classes: set[type]) -> Iterator[None]:
    """Wraps `__call__` on each class; afterwards the classes are as they were."""
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
    """What a class or its bases define as `__call__`; `getattr` would find the metaclass's."""
    return next((base.__dict__["__call__"] for base in cls.__mro__ if "__call__" in base.__dict__), None)


def _recorded(original: Any) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = original.__get__(self, type(self)) if hasattr(original, "__get__") else original
        run = _running.get()
        return function(*args, **kwargs) if run is None else run.call(self, function, args, kwargs)

    return functools.wraps(original)(__call__)


@contextlib.contextmanager
def _silent_about_marks() -> Iterator[None]:
    """Marks make functions compile anew on purpose; nobody needs to hear of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f"(?s).*{MARK}")
        yield
