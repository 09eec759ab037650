"""A call, split: Modules and Contexts on one side, everything else as data, and what is static about the call.

*Splitting* a call flattens its arguments. A leaf is a Module, a Context, or *data*: anything else. A leaf's *mark* says
which: -1 for data, n for the n-th Module, -2-n for the n-th Context. Marks are plain integers because they are part of
the `Signature`, which is hashed and compared for every call: small ints in a tuple are the cheapest key there is.

A *callee* is what a transform was given: a function, a Module, or a bound method of one.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from nnx.core.caches import outlives_caches
from nnx.core.context import Context, ContextDef
from nnx.core.foreign_models import refuse_foreign_model
from nnx.core.module.call_chains import Way
from nnx.core.module.info import ModuleBase
from nnx.core.module.scopes import unexplained
from nnx.core.repr import short
from nnx.core.state.paths import join
from nnx.core.statics.statics import NO_STATICS, Statics
from nnx.core.structure.flat import Flat, joint_flat_of
from nnx.core.structure.structure import GraphKey
from nnx.core.structure.walk import refuse_pytree
from nnx.core.variables.refs import Ref
from nnx.core.variables.ties import NO_TIES, Ties

DATA_MARK = -1

NOT_CALLABLE_MODULE = "{transform} was given a {name}, a Module without `__call__`."

CLASS_METHOD = """{transform} takes a function, a Module or a method; got a classmethod, which is neither before a \
class has it. Write @classmethod alone, and call {transform}(Class.{name})."""

NOT_CALLABLE = "{transform} takes a function, a Module or a method; got {value}."

REF_AS_ARGUMENT = """A transform of NNX (nnx.jit, nnx.grad, ...) was given {value}. A Ref ties attributes of Modules \
together and is not an argument by itself: pass the Modules that hold it, whose attributes stay tied inside, or its \
array, `ref.value`."""

RUNS_LATER = """{transform} was given {name}, {kind} function: calling it only makes {kind}, whose body would run \
after the transform has ended. {advice}"""

_RUNS_LATER = {
    inspect.CO_GENERATOR: ("a generator", "Return the values, in a list or stacked by nnx.scan."),
    inspect.CO_COROUTINE: ("a coroutine", "Lift a plain function, and call that in the coroutine."),
    inspect.CO_ASYNC_GENERATOR: ("an async generator", "Lift a plain function, and call that in the generator."),
}


# Leaves


def is_module(leaf: Any) -> bool:
    """Whether a leaf of a call is a Module."""
    return isinstance(leaf, ModuleBase)


def is_context(leaf: Any) -> bool:
    """Whether a leaf of a call is a Context."""
    return isinstance(leaf, Context)


def is_data(leaf: Any) -> bool:
    """Whether a leaf of a call is neither a Module nor a Context."""
    return not isinstance(leaf, (ModuleBase, Context))


def unique(values: Sequence[Any]) -> list[Any]:
    """Returns the distinct objects among values, in order."""
    return list({id(value): value for value in values}.values())


def with_values(values: Sequence[Any], *parts: tuple[Sequence[int], Sequence[Any]]) -> list[Any]:
    """Returns a copy of `values` with replacements; each part is a list of positions and a list of their new values."""
    changed = list(values)
    for positions, news in parts:
        for i, new in zip(positions, news):
            changed[i] = new
    return changed


data_types: set[type] = set()
"""Types whose values have been data in some call, for a quick test on the fast path of `nnx.jit`.

Only classes that live as long as the process are added, so that the set keeps nothing alive.
"""


# Splitting


class Signature(NamedTuple):
    """What is static about a call: the mark of every leaf, the structure of its Modules, the flags of its Contexts."""

    treedef: Any
    marks: tuple[int, ...]
    key: GraphKey | None
    contexts: tuple[ContextDef, ...]
    ties: Ties = NO_TIES  # which cells are one object with each other, or with something outside the call

    def fill(self, roots: Sequence[Any], contexts: Sequence[Context], data: Sequence[Any]) -> Any:
        """Returns the call's `(args, kwargs)` with these Modules, Contexts and data."""
        rest = iter(data)
        # A Context's mark is -2-n, so that -1 stays free for data and the inverse is the same expression.
        leaves = [next(rest) if m == DATA_MARK else roots[m] if m >= 0 else contexts[-2 - m] for m in self.marks]
        return jax.tree.unflatten(self.treedef, leaves)

    def contexts_from(self, forks: Sequence[Any]) -> list[Context]:
        """Returns the call's Contexts inside a trace, made from their forks."""
        return [definition.from_fork(fork) for definition, fork in zip(self.contexts, forks)]


class LeafPositions(NamedTuple):
    """Where Modules, Contexts and data are among the leaves of a call, if no Module or Context appears twice."""

    modules: list[int]
    contexts: list[int]
    data: list[int]
    marks: tuple[int, ...]

    @staticmethod
    def of(leaves: Sequence[Any]) -> "LeafPositions":
        modules, contexts, data, marks = [], [], [], []
        for i, leaf in enumerate(leaves):
            if is_module(leaf):
                marks.append(len(modules))
                modules.append(i)
            elif isinstance(leaf, Ref):
                raise TypeError(REF_AS_ARGUMENT.format(value=short(leaf)))
            elif is_context(leaf):
                marks.append(-2 - len(contexts))
                contexts.append(i)
            else:
                marks.append(DATA_MARK)
                data.append(i)
                if outlives_caches(type(leaf)):
                    data_types.add(type(leaf))
        return LeafPositions(modules, contexts, data, tuple(marks))


_positions: dict[tuple[type, ...], LeafPositions] = {}  # by the types of the leaves

cached_positions: Callable[[tuple[type, ...]], LeafPositions | None] = _positions.get
"""Returns the positions for leaves of these types, or None if no call has had such leaves."""


def _marks_of_repeated(leaves: Sequence[Any], roots: Sequence[Any], contexts: Sequence[Any]) -> tuple[int, ...]:
    """Returns the marks of a call in which a Module or Context appears twice: both get the mark of the first."""
    marks = {id(root): n for n, root in enumerate(roots)} | {id(ctx): -2 - n for n, ctx in enumerate(contexts)}
    return tuple([DATA_MARK if is_data(leaf) else marks[id(leaf)] for leaf in leaves])


class Call:
    """One call, split."""

    __slots__ = ("signature", "flat", "roots", "contexts", "data", "drawn")

    def __init__(self, args: Any, kwargs: Any):
        leaves, treedef = jax.tree.flatten((args, kwargs))
        # Which leaves are Modules depends on their types alone, so a repeated call needs one lookup and no isinstance.
        types = tuple(map(type, leaves))
        positions = _positions.get(types)
        if positions is None:
            positions = LeafPositions.of(leaves)
            if all(map(outlives_caches, types)):
                _positions[types] = positions
        if kwargs or len(positions.modules) < len(args):  # otherwise all are Modules, and nothing was flattened
            for arg in (*args, *kwargs.values()) if kwargs else args:
                if isinstance(arg, ModuleBase):
                    refuse_pytree(arg)
                refuse_foreign_model(arg, "A transform of NNX (nnx.jit, nnx.grad, ...)")
        roots = [leaves[i] for i in positions.modules]
        contexts = [leaves[i] for i in positions.contexts]
        marks = positions.marks
        if len(set(map(id, roots))) < len(roots) or len(set(map(id, contexts))) < len(contexts):
            roots, contexts = unique(roots), unique(contexts)
            marks = _marks_of_repeated(leaves, roots, contexts)
        self.roots, self.contexts = roots, contexts
        self.data: list[Any] = [leaves[i] for i in positions.data]
        self.drawn: Sequence[list[tuple[Any, Any]]] | None = None  # the forks, if they were made before the split
        self.flat: Flat | None = joint_flat_of(roots) if roots else None
        key, ties = (self.flat.key, self.flat.ties) if self.flat is not None else (None, NO_TIES)
        self.signature: Signature = Signature(treedef, marks, key, tuple([ctx.definition() for ctx in contexts]), ties)

    @property
    def statics(self) -> Statics:
        return self.flat.statics if self.flat is not None else NO_STATICS

    def cells(self) -> list[Any]:
        return self.flat.values() if self.flat is not None else []

    def forks(self) -> Sequence[list[tuple[Any, Any]]]:
        """Forks every Context and returns the forks as data; each Context has then advanced by one."""
        return [ctx.fork_data() for ctx in self.contexts] if self.drawn is None else self.drawn


def cell_paths(key: GraphKey | None) -> list[str]:
    """Returns the path of every cell, with the number of its Module in front if the call has several."""
    if key is None:
        return []
    if len(key.roots) == 1:
        return [path for _, path in key.cell_roots()]
    return [join(f"(Module {key.roots.index(root)})", path) for root, path in key.cell_roots()]


# The function that is lifted


class Callee(NamedTuple):
    """A function to lift. A Module, or a bound method of one, becomes the first argument of the function."""

    fun: Callable[..., Any]
    bound: tuple[Any, ...]  # the Module, if the function came with one
    name: str


def callee_of(fun: Any, transform: str) -> Callee:
    """Returns what to call, and the Module to pass before the arguments.

    Raises:
        TypeError: it is not callable.
    """
    refuse_foreign_model(fun, transform)
    refuse_class_method(fun, transform)
    check_runs_now(fun, transform)
    if isinstance(fun, ModuleBase):
        if not callable(fun):
            raise TypeError(NOT_CALLABLE_MODULE.format(transform=transform, name=type(fun).__name__))
        return Callee(type(fun).__call__, (fun,), type(fun).__name__)
    owner = getattr(fun, "__self__", None)
    if isinstance(owner, ModuleBase) and hasattr(fun, "__func__"):
        return Callee(unexplained(fun.__func__), (owner,), getattr(fun, "__name__", "method"))
    if not callable(fun):
        raise TypeError(NOT_CALLABLE.format(transform=transform, value=short(fun)))
    return Callee(fun, (), fun.name if isinstance(fun, CallAt) else getattr(fun, "__name__", type(fun).__name__))


def refuse_class_method(fun: Any, transform: str) -> None:
    """Raises TypeError for what stands under `@classmethod` in the body of a class."""
    if isinstance(fun, classmethod):
        raise TypeError(CLASS_METHOD.format(transform=transform, name=fun.__name__))


def check_runs_now(fun: Any, transform: str) -> None:
    """Raises TypeError for a function whose body does not run when it is called."""
    if not callable(fun):
        return
    called = type(fun).__call__ if isinstance(fun, ModuleBase) else fun
    while isinstance(called, functools.partial):
        called = called.func
    code = getattr(inspect.unwrap(called), "__code__", None)
    for flag, (kind, advice) in _RUNS_LATER.items():
        if code is not None and code.co_flags & flag:
            raise TypeError(RUNS_LATER.format(transform=transform, name=code.co_qualname, kind=kind, advice=advice))


class CallAt(NamedTuple):
    """Calls what is at the end of a Way from a Module: the Module itself, or one of its methods.

    A value rather than a closure, so two with the same way compare equal and Modules of equal structure share a trace.
    """

    way: Way

    @property
    def name(self) -> str:
        """The name of what is called: `__call__`, or that of the method."""
        return next((str(key) for is_attribute, key in self.way.steps[::-1] if is_attribute), "__call__")

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return self.way(module)(*args, **kwargs)

    def function(self, module: Any) -> Callable[..., Any] | None:
        """Returns the function that really runs."""
        found = self.way(module)
        return type(found).__call__ if is_module(found) else unexplained(getattr(found, "__func__", None))
