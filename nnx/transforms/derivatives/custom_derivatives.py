"""`custom_vjp` and `custom_jvp`: derivatives written by hand, for functions that take Modules.

The rules see Modules as Modules; their tangents and cotangents are States of the `wrt` part. Changes made in the
forward pass are kept; the backward pass must not change anything. Where one Module, or one cell, is reached from
several arguments, the backward pass returns one cotangent for each of them and they are added.

Everything traced that a rule needs travels as an argument of the function JAX sees, never in a closure: JAX runs the
rules later, at another trace level. That includes the arguments in `nondiff_argnums`: their Modules are rebuilt for the
backward pass.
"""

import dataclasses
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, Protocol, TypeVar, Unpack, overload

import jax

from nnx.core.state.moduledef import ModuleDef
from nnx.core.structure.flat import joint_flat_of
from nnx.core.variables.variables import Param
from nnx.transforms.control.body_order import BodyOrder
from nnx.transforms.derivatives.differentiated_part import (
    DifferentiatedPart,
    positions_of,
    with_modules,
    without_modules,
    zero_tangent,
)
from nnx.transforms.engine.annotations import CustomOptions, P, Q, R, T
from nnx.transforms.engine.call import Call, Signature, callee_of, cell_paths, with_values
from nnx.transforms.engine.commit import commit
from nnx.transforms.engine.decorators import decorator, named_after
from nnx.transforms.engine.enter import Entered, enter_call
from nnx.transforms.engine.leave import leave
from nnx.transforms.engine.outcome import Effects, Outcome
from nnx.transforms.engine.shared_traces import run_body
from nnx.transforms.engine.tracebacks import boundary

F = TypeVar("F", bound=Callable[..., Any])

CHANGED_IN_BACKWARD = """The backward pass of {name} changed a Module: {path!r}. It may run at any time, more than \
once or never, so it must not change anything: do it in the forward pass."""

RULE_CHANGES_OTHERS = """{name}: the function changes {function} and its forward rule changes {rule}. JAX runs one or \
the other, so both must make the same changes to Modules."""

NO_RULE = "No {rule} rule has been given for {name}: use {name}.{method}(...)."


class CustomCall:
    """One call of a function with custom derivatives: its differentiated part, and how the rest is passed on."""

    def __init__(self, custom: "Custom[Any, Any]", args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.name: str = custom.name
        args, kwargs = _by_position(custom.fun, (*custom.bound, *args), kwargs)
        bound = len(custom.bound)
        numbers = positions_of(custom.name, "nondiff_argnums", custom.nondiff_argnums, len(args) - bound)
        self.nondiff: list[int] = [number + bound for number in numbers]
        argnums = tuple(i for i in range(len(args)) if i not in self.nondiff)
        self.part: DifferentiatedPart = DifferentiatedPart(
            custom.name, args, kwargs, argnums, custom.wrt, allow_int=True, allow_empty=True
        )
        self.call: Call = self.part.call
        chosen = set(self.part.data)
        data = enumerate(self.call.data)
        # Other arrays are arguments as well, because they may be tracers. Python values stay Python values.
        self.constants: list[int] = [i for i, value in data if i not in chosen and isinstance(value, jax.Array)]
        self.effects: dict[str, Effects] = {}
        self.order: BodyOrder = BodyOrder()

    def arguments(self) -> tuple[Any, ...]:
        """Returns the arguments of the function JAX sees: cells, differentiated data, other arrays, and forks."""
        data = self.call.data
        return (
            self.call.cells(),
            [data[i] for i in self.part.data],
            [data[i] for i in self.constants],
            self.call.forks(),
        )

    def enter(self, cells: Any, data: Any, constants: Any, forks: Any) -> tuple[Entered, Any, Any]:
        """Rebuilds the call's Modules inside the trace; returns them, and the arguments with them in place."""
        signature = self.call.signature
        full = with_values(self.call.data, (self.part.data, data), (self.constants, constants))
        return enter_call(signature, self.call.statics, cells, full, signature.contexts_from(forks))

    def leave(self, entered: Entered, out: Any, runner: str) -> Outcome:
        """Finds what the function or its forward rule did; `runner` is "function" or "rule".

        Raises:
            ValueError: they do not change the same state.
        """
        self.order.keep(entered, out)
        outcome = leave(entered, out, self.name)
        self.effects[runner] = outcome.effects
        # Whatever JAX runs in the end, the effects that it finds must be those of both.
        if any(effects != outcome.effects for effects in self.effects.values()):
            texts = {runner: self._changes(effects) for runner, effects in self.effects.items()}
            raise ValueError(RULE_CHANGES_OTHERS.format(name=self.name, **texts))
        return outcome

    def _changes(self, effects: Effects) -> str:
        if effects.rewrite is not None:
            return "the structure of a Module"
        paths = cell_paths(self.call.signature.key)
        return ", ".join(repr(paths[i]) for i in effects.changed) or "nothing"


def _by_position(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the call with its arguments at their positions, as JAX counts them; keyword-only ones stay."""
    try:
        bound = inspect.signature(fun).bind(*args, **kwargs)
    except (TypeError, ValueError):  # no signature, or a call that does not fit: the function raises the best error
        return args, kwargs
    given = set(bound.kwargs)
    bound.apply_defaults()
    return bound.args, {name: value for name, value in bound.kwargs.items() if name in given}


class Custom(Generic[P, R]):
    """A function with custom derivatives."""

    __name__: str
    fun: Callable[..., Any]
    bound: tuple[Any, ...]
    wrt: Any
    name: str
    nondiff_argnums: Any

    def __init__(self, fun: Any, transform: str, wrt: Any, nondiff_argnums: Any):
        callee = callee_of(fun, transform)
        self.fun, self.bound, self.wrt = callee.fun, callee.bound, wrt
        self.name = f"{transform}({callee.name})"
        self.nondiff_argnums = nondiff_argnums
        named_after(self, fun)

    @overload
    def __get__(self, instance: None, owner: Any = None, /) -> "Custom[P, R]": ...
    @overload
    def __get__(self: "Custom[Concatenate[T, Q], R]", instance: T, owner: Any = None, /) -> Callable[Q, R]: ...
    def __get__(self, instance: Any, owner: Any = None, /) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        raise AssertionError("each subclass implements the call")

    def __repr__(self) -> str:
        return f"<{self.name}>"


def _stopped(outcome: Outcome) -> Outcome:
    """Returns the outcome with no gradient through changed state: the rule covers the output alone."""
    return Outcome(jax.lax.stop_gradient(outcome.values), outcome.out, outcome.effects)


@dataclasses.dataclass(slots=True, eq=False)
class ResidualsDef:
    """The part of a `Residuals` that is not data; compared by identity, since every forward pass makes its own."""

    signature: Signature
    statics: Any
    fixed: list[Any]  # per datum: None for an array, else a tuple of the Python value


@dataclasses.dataclass(slots=True, eq=False)
class Residuals:
    """What the forward pass keeps for the backward pass, Modules and Contexts included; a pytree.

    Arrays are its leaves. The definition holds the rest: the signature, static values, and data other than arrays.
    """

    arrays: Any  # cells, data, forks
    definition: ResidualsDef

    @staticmethod
    def of(value: Any) -> "Residuals":
        call = Call((value,), {})
        fixed = [None if isinstance(x, jax.Array) else (x,) for x in call.data]
        data = [x for x, python_value in zip(call.data, fixed) if python_value is None]
        return Residuals((call.cells(), data, call.forks()), ResidualsDef(call.signature, call.statics, fixed))

    def enter(self) -> tuple[Entered, Any]:
        """Rebuilds the value, with its Modules at the current trace level."""
        cells, data, forks = self.arrays
        signature, rest = self.definition.signature, iter(data)
        full = [next(rest) if python_value is None else python_value[0] for python_value in self.definition.fixed]
        contexts = signature.contexts_from(forks)
        entered, (value,), _ = enter_call(signature, self.definition.statics, cells, full, contexts)
        return entered, value


jax.tree_util.register_pytree_node(
    Residuals,
    lambda residuals: ((residuals.arrays,), residuals.definition),
    lambda definition, children: Residuals(children[0], definition),
)


class CustomVJP(Custom[P, R]):
    """A function whose cotangents are pulled back by a rule; see `nnx.custom_vjp`."""

    _forward: Callable[..., Any] | None = None
    _backward: Callable[..., Any] | None = None

    def defvjp(self, fwd: Callable[P, tuple[Any, Any]], bwd: Callable[..., Any]) -> None:
        """Sets the rule.

        Args:
            fwd: `fwd(*args)` returns `(out, residuals)`; residuals can hold Modules.
            bwd: `bwd(*nondiff_args, residuals, cotangent)` returns one cotangent per differentiated argument: a State
                of the `wrt` part for a Module, or None for zeros.
        """
        self._forward, self._backward = fwd, bwd

    @boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        forward, backward = self._forward, self._backward
        if forward is None or backward is None:
            raise AttributeError(NO_RULE.format(rule="backward", name=self.__name__, method="defvjp"))
        custom = CustomCall(self, args, kwargs)
        part = custom.part

        @jax.custom_vjp
        def pure(*arguments: Any) -> Outcome:
            entered, inner, inner_kwargs = custom.enter(*arguments)
            return _stopped(custom.leave(entered, run_body(self.fun, inner, inner_kwargs), "function"))

        def pure_forward(*arguments: Any) -> tuple[Outcome, Residuals]:
            entered, inner, inner_kwargs = custom.enter(*arguments)
            out, residuals = run_body(forward, inner, inner_kwargs)
            kept = Residuals.of(([inner[i] for i in custom.nondiff], residuals))
            return _stopped(custom.leave(entered, out, "rule")), kept

        def pure_backward(kept: Residuals, cotangent: Outcome) -> Any:
            entered, (nondiff, residuals) = kept.enter()
            check = Unchanged(self.name, entered.roots)
            cotangents = backward(*nondiff, residuals, without_modules(cotangent.out))
            check()
            cotangents = cotangents if isinstance(cotangents, (tuple, list)) else (cotangents,)
            cells, data = part.unpack(cotangents, "the cotangents", complete=True)
            all_cells = with_values([None] * len(part.call.cells()), (part.cells, cells))
            return all_cells, data, None, None  # None is zero to JAX

        pure.defvjp(pure_forward, pure_backward)
        return commit(part.call, pure(*custom.arguments()))


class Unchanged:
    """A function that raises if the Modules have changed since it was made."""

    def __init__(self, name: str, roots: Sequence[Any]):
        self.name, self.roots = name, roots
        self.flat = joint_flat_of(roots) if roots else None
        self.held: list[Any] = self.flat.values() if self.flat is not None else []

    def __call__(self) -> None:
        before = self.flat
        if before is None:
            return
        after = joint_flat_of(self.roots)
        if after.key is not before.key:
            labels = [f"(Module {i})" for i in range(len(self.roots))] if len(self.roots) > 1 else [""]
            difference = ModuleDef(before.key, before.statics).diff(ModuleDef(after.key, after.statics), labels)[0]
            raise ValueError(CHANGED_IN_BACKWARD.format(name=self.name, path=difference.path))
        for path, old, new in zip(cell_paths(before.key), self.held, after.values()):
            if old is not new:
                raise ValueError(CHANGED_IN_BACKWARD.format(name=self.name, path=path))


class CustomJVP(Custom[P, R]):
    """A function whose tangents are pushed forward by a rule; see `nnx.custom_jvp`."""

    _rule: Callable[..., Any] | None = None

    def defjvp(self, jvp: F) -> F:
        """Sets the rule: `jvp(*nondiff_args, primals, tangents)` returns `(out, tangent_out)`.

        The tangent of a Module is a State of its `wrt` part. A cell that several Modules share is in the State of each.
        """
        self._rule = jvp
        return jvp

    @boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        rule = self._rule
        if rule is None:
            raise AttributeError(NO_RULE.format(rule="forward", name=self.__name__, method="defjvp"))
        custom = CustomCall(self, args, kwargs)
        part = custom.part

        @jax.custom_jvp
        def pure(*arguments: Any) -> Outcome:
            entered, inner, inner_kwargs = custom.enter(*arguments)
            return custom.leave(entered, run_body(self.fun, inner, inner_kwargs), "function")

        @pure.defjvp
        def pure_jvp(primals: Any, tangents: Any) -> Any:
            cell_tangents, data_tangents, _, _ = tangents
            entered, inner, _ = custom.enter(*primals)
            given = part.spread([cell_tangents[i] for i in part.cells], data_tangents)
            nondiff = [inner[i] for i in custom.nondiff]
            chosen = tuple(inner[i] for i in part.positions)
            out, tangent = rule(*nondiff, chosen, given)
            outcome = custom.leave(entered, out, "rule")
            zeros = jax.tree.map(zero_tangent, outcome.values)
            return outcome, Outcome(zeros, with_modules(outcome.out, tangent), outcome.effects)

        return commit(part.call, pure(*custom.arguments()))


class CustomVJPDecorator(Protocol):
    """What `nnx.custom_vjp(**options)` returns."""

    def __call__(self, fun: Callable[P, R], /) -> CustomVJP[P, R]: ...


class CustomJVPDecorator(Protocol):
    """What `nnx.custom_jvp(**options)` returns."""

    def __call__(self, fun: Callable[P, R], /) -> CustomJVP[P, R]: ...


@overload
def custom_vjp(fun: Callable[P, R], **options: Unpack[CustomOptions]) -> CustomVJP[P, R]: ...
@overload
def custom_vjp(**options: Unpack[CustomOptions]) -> CustomVJPDecorator: ...
@decorator
def custom_vjp(fun: Any, *, wrt: Any = Param, nondiff_argnums: int | Sequence[int] = ()) -> Any:
    """Gives a function its own backward pass, set by `defvjp(fwd, bwd)` as for `jax.custom_vjp`.

    If one Module is passed twice, or two share a cell, `bwd` still returns a complete State for each of them; the
    contributions to a shared cell are added.

    Args:
        fun: the function. It can take Modules anywhere in its arguments, and change them.
        wrt: a filter for the part of a Module that has a cotangent.
        nondiff_argnums: arguments that have no gradient and are passed on to the backward pass; a Module among them is
            rebuilt there, as the forward pass left it. Keyword-only arguments have no gradient either.

    >>> @nnx.custom_vjp
    ... def f(m, x):
    ...     return m.w * x
    >>> f.defvjp(lambda m, x: (m.w * x, (m, x)),
    ...          lambda residuals, g: (jax.tree.map(lambda w: 10 * g, residuals[0].filter(nnx.Param)), g))
    >>> float(nnx.grad(f)(nnx.Dict(w=nnx.Param(jnp.array(1.0))), 2.0)["w"].value)
    10.0
    """
    return CustomVJP(fun, "nnx.custom_vjp", wrt, nondiff_argnums)


@overload
def custom_jvp(fun: Callable[P, R], **options: Unpack[CustomOptions]) -> CustomJVP[P, R]: ...
@overload
def custom_jvp(**options: Unpack[CustomOptions]) -> CustomJVPDecorator: ...
@decorator
def custom_jvp(fun: Any, *, wrt: Any = Param, nondiff_argnums: int | Sequence[int] = ()) -> Any:
    """Gives a function its own forward derivative, set by `defjvp(rule)` as for `jax.custom_jvp`.

    Args:
        fun: the function. It can take Modules anywhere in its arguments, and change them.
        wrt: a filter for the part of a Module that has a tangent.
        nondiff_argnums: arguments that have no tangent and are passed to the rule before the others. Keyword-only
            arguments have no tangent either.

    >>> @nnx.custom_jvp
    ... def f(m):
    ...     return m.w**2
    >>> @f.defjvp
    ... def rule(primals, tangents):
    ...     return f(*primals), 10 * tangents[0]["w"].value
    >>> float(nnx.grad(f)(nnx.Dict(w=nnx.Param(jnp.array(1.0))))["w"].value)
    10.0
    """
    return CustomJVP(fun, "nnx.custom_jvp", wrt, nondiff_argnums)
