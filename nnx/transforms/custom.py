"""`custom_vjp` and `custom_jvp`: derivatives written by hand, for functions that take Modules.

The rules see Modules as Modules; their tangents and cotangents are States of the `wrt` part. What the forward pass
changes in a Module stands; the backward pass may change nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.graph import flat_of
from nnx.core.info import ModuleBase
from nnx.core.moduledef import ModuleDef
from nnx.core.pure import Pure
from nnx.core.variables import Param
from nnx.transforms.differentiate import Part
from nnx.transforms.lift import Outcome, commit, enter_call, leave, target_of
from nnx.transforms.wrapper import decorator, dress

CHANGED_IN_BACKWARD = """The backward pass of {name} changed a Module: {path!r}. It may run at any time, more than \
once or \
never, so it must not change anything: do it in the forward pass."""

NO_RULE = "No {rule} rule has been given for {name}: use {name}.{method}(...)."


class Custom:
    """A function with derivatives of its own."""

    def __init__(self, fun: Any, transform: str, wrt: Any, nondiff_argnums: Any):
        target = target_of(fun, transform)
        self.fun, self.bound, self.wrt = target.fun, target.bound, wrt
        self.name = f"{transform}({target.name})"
        numbers = (nondiff_argnums,) if isinstance(nondiff_argnums, int) else tuple(nondiff_argnums)
        self.nondiff = tuple(n + len(target.bound) for n in numbers)
        dress(self, fun)

    def part(self, args: tuple[Any, ...], kwargs: Any) -> Part:
        argnums = tuple(i for i in range(len(args)) if i not in self.nondiff)
        return Part(self.name, args, kwargs, argnums, self.wrt, True)

    def enter(self, part: Part, cells: Any, data: Any, forks: Any) -> tuple[Any, Any, Any]:
        """The call with its Modules inside the trace; the non-differentiated data are as they were given."""
        contexts = [d.from_fork(fork) for d, fork in zip(part.call.signature.contexts, forks)]
        full = list(part.call.data)
        for i, value in zip(part.data, data):
            full[i] = value
        return enter_call(part.call.signature, part.call.statics, cells, full, contexts)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else lambda *args, **kwargs: self(instance, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("each kind says how it is called")

    def __repr__(self) -> str:
        return f"<{self.name}>"


def _stopped(outcome: Outcome) -> Outcome:
    """The outcome with no gradient through changed state: the rule speaks of the output alone."""
    return Outcome(jax.lax.stop_gradient(outcome.values), outcome.out, outcome.effects)


class CustomVJP(Custom):
    """A function whose cotangents are pulled back by a rule; see `nnx.custom_vjp`."""

    _forward: Callable[..., Any] | None = None
    _backward: Callable[..., Any] | None = None

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Sets the rule.

        Args:
          fwd: `fwd(*args)` gives `(out, residuals)`; residuals may hold Modules.
          bwd: `bwd(*nondiff_args, residuals, cotangent)` gives one cotangent per differentiated argument; for a
            Module a State of its `wrt` part.
        """
        self._forward, self._backward = fwd, bwd

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward, backward = self._forward, self._backward
        if forward is None or backward is None:
            raise AttributeError(NO_RULE.format(rule="backward", name=self.__name__, method="defvjp"))  # type: ignore[attr-defined]
        args = (*self.bound, *args)
        part = self.part(args, kwargs)
        nondiff = [args[i] for i in self.nondiff]

        @jax.custom_vjp
        def pure(cells: Any, data: Any, forks: Any) -> Outcome:
            entered, inner, inner_kwargs = self.enter(part, cells, data, forks)
            return _stopped(leave(entered, self.fun(*inner, **inner_kwargs), self.name))

        def pure_forward(cells: Any, data: Any, forks: Any) -> Any:
            entered, inner, inner_kwargs = self.enter(part, cells, data, forks)
            out, residuals = forward(*inner, **inner_kwargs)
            kept = jax.tree.map(_detached, residuals)
            return _stopped(leave(entered, out, self.name)), kept

        def pure_backward(kept: Any, cotangent: Outcome) -> Any:
            modules: list[Any] = []
            residuals = jax.tree.map(lambda x: _attached(x, modules), kept, is_leaf=lambda x: isinstance(x, Pure))
            before = [flat_of(module) for module in modules]
            values = [flat.values() for flat in before]
            cotangents = backward(*nondiff, residuals, cotangent.out)
            for module, flat, held in zip(modules, before, values):
                self._check_unchanged(module, flat, held)
            cotangents = cotangents if isinstance(cotangents, (tuple, list)) else (cotangents,)
            part.require_all(cotangents)
            cells, data = part.unpack(tuple(cotangents), "the cotangents")
            all_cells: list[Any] = [None] * len(part.call.cells())
            for i, value in zip(part.cells, cells):
                all_cells[i] = value
            return all_cells, data, None

        pure.defvjp(pure_forward, pure_backward)
        arguments = (part.call.cells(), [part.call.data[i] for i in part.data], part.call.forks())
        return commit(part.call, pure(*arguments))

    def _check_unchanged(self, module: Any, flat: Any, held: list[Any]) -> None:
        after = flat_of(module)
        if after.key is not flat.key:
            difference = ModuleDef(flat.key, flat.statics).diff(ModuleDef(after.key, after.statics))[0]
            raise ValueError(CHANGED_IN_BACKWARD.format(name=self.name, path=difference.path))
        for path, old, new in zip(flat.key.layout.paths, held, after.values()):
            if old is not new:
                raise ValueError(CHANGED_IN_BACKWARD.format(name=self.name, path=path))


def _detached(leaf: Any) -> Any:
    return leaf.partition() if isinstance(leaf, ModuleBase) else leaf  # type: ignore[attr-defined]


def _attached(leaf: Any, modules: list[Any]) -> Any:
    if not isinstance(leaf, Pure):
        return leaf
    modules.append(leaf.merge())
    return modules[-1]


class CustomJVP(Custom):
    """A function whose tangents are pushed forward by a rule; see `nnx.custom_jvp`."""

    _rule: Callable[..., Any] | None = None

    def defjvp(self, jvp: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the rule: `jvp(*nondiff_args, primals, tangents)` gives `(out, tangent_out)`.

        The tangent of a Module is a State of its `wrt` part.
        """
        self._rule = jvp
        return jvp

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rule = self._rule
        if rule is None:
            raise AttributeError(NO_RULE.format(rule="forward", name=self.__name__, method="defjvp"))  # type: ignore[attr-defined]
        args = (*self.bound, *args)
        part = self.part(args, kwargs)
        nondiff = [args[i] for i in self.nondiff]
        forks = part.call.forks()

        @jax.custom_jvp
        def pure(cells: Any, data: Any) -> Outcome:
            entered, inner, inner_kwargs = self.enter(part, cells, data, forks)
            return leave(entered, self.fun(*inner, **inner_kwargs), self.name)

        @pure.defjvp
        def pure_jvp(primals: Any, tangents: Any) -> Any:
            (cells, data), (cell_tangents, data_tangents) = primals, tangents
            entered, inner, _ = self.enter(part, cells, data, forks)
            given = part.pack([cell_tangents[i] for i in part.cells], data_tangents)
            chosen = tuple(inner[i] for i in range(len(inner)) if i not in self.nondiff)
            out, tangent = rule(*nondiff, chosen, given)
            outcome = leave(entered, out, self.name)
            zeros = jax.tree.map(_zero_tangent, outcome.values)
            return outcome, Outcome(zeros, tangent, outcome.effects)

        return commit(part.call, pure(part.call.cells(), [part.call.data[i] for i in part.data]))


def _zero_tangent(value: Any) -> Any:
    dtype = jnp.result_type(value)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.zeros(jnp.shape(value), dtype)
    return np.zeros(jnp.shape(value), jax.dtypes.float0)


@decorator
def custom_vjp(fun: Any, *, wrt: Any = Param, nondiff_argnums: int | Sequence[int] = ()) -> Any:
    """A function with a backward pass of its own, given by `defvjp(fwd, bwd)` as for `jax.custom_vjp`.

    Args:
      fun: the function; it may take Modules anywhere, and change them.
      wrt: which part of a Module has a cotangent; a filter.
      nondiff_argnums: arguments that are handed to the backward pass as they are.

    >>> @nnx.custom_vjp
    ... def f(m, x):
    ...     return m.w * x
    >>> f.defvjp(lambda m, x: (m.w * x, (m, x)),
    ...          lambda residuals, g: (jax.tree.map(lambda w: 10 * g, residuals[0].filter(nnx.Param)), g))
    >>> float(nnx.grad(f)(nnx.Dict(w=nnx.Param(jnp.array(1.0))), 2.0)["w"].value)
    10.0
    """
    return CustomVJP(fun, "nnx.custom_vjp", wrt, nondiff_argnums)


@decorator
def custom_jvp(fun: Any, *, wrt: Any = Param, nondiff_argnums: int | Sequence[int] = ()) -> Any:
    """A function with a forward derivative of its own, given by `defjvp(rule)` as for `jax.custom_jvp`.

    Args:
      fun: the function; it may take Modules anywhere, and change them.
      wrt: which part of a Module has a tangent; a filter.
      nondiff_argnums: arguments that are handed to the rule as they are.

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
