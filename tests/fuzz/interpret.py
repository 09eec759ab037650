"""Running staged programs without XLA: tracing is what it always is, but jaxprs are evaluated operation by operation.

A tiny program takes XLA 30 ms to compile and the library 1 ms to trace, so this is what makes thousands of programs
affordable. Inside `interpreted()`, a call of `jax.jit` outside any trace makes a jaxpr (once per argument types, as
`jax.jit` does) and evaluates it; `scan`, `cond` and `while` inside are evaluated in Python.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import primitives

_real_jit = jax.jit
_ONE = jnp.ones(())


class Interpreted:
    """What `jax.jit` returns inside `interpreted()`."""

    def __init__(self, fun: Any, **options: Any):
        self._compiled = _real_jit(fun, **options)
        self._fun = fun
        self._traced: dict[Any, Any] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves) or _staging():
            return self._compiled(*args)
        leaves = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves]
        key = (structure, *map(jax.typeof, leaves))
        if key not in self._traced:
            abstract = jax.tree.unflatten(structure, leaves)
            jaxpr, shapes = jax.make_jaxpr(self._fun, return_shape=True)(*abstract)
            self._traced[key] = jaxpr, jax.tree.structure(shapes)
        jaxpr, out = self._traced[key]
        return jax.tree.unflatten(out, [jnp.asarray(value) for value in _evaluate(jaxpr, leaves)])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


def _staging() -> bool:
    """Whether a trace is running that stages even what depends on constants alone."""
    return isinstance(jax.lax.neg(_ONE), jax.core.Tracer)


def _evaluate(jaxpr: Any, args: Any) -> list[Any]:
    return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args)


def _jit(*args: Any, jaxpr: Any, **_: Any) -> list[Any]:
    return _evaluate(jaxpr, args)


def _cond(index: Any, *operands: Any, branches: Any, **_: Any) -> list[Any]:
    return _evaluate(branches[min(max(int(index), 0), len(branches) - 1)], operands)


def _while(*args: Any, cond_jaxpr: Any, cond_nconsts: int, body_jaxpr: Any, body_nconsts: int, **_: Any) -> list[Any]:
    cond_consts, rest = args[:cond_nconsts], args[cond_nconsts:]
    body_consts, carry = rest[:body_nconsts], list(rest[body_nconsts:])
    while bool(_evaluate(cond_jaxpr, [*cond_consts, *carry])[0]):
        carry = _evaluate(body_jaxpr, [*body_consts, *carry])
    return carry


def _scan(*args: Any, jaxpr: Any, length: int, reverse: bool, **params: Any) -> list[Any]:
    if "ft_in" in params:  # since JAX 0.11
        num_consts, num_carry, _ = map(len, params["ft_in"].unpack())
    else:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, carry = args[:num_consts], list(args[num_consts : num_consts + num_carry])
    xs, rows = args[num_consts + num_carry :], []
    for i in reversed(range(length)) if reverse else range(length):
        out = _evaluate(jaxpr, [*consts, *carry, *(x[i] for x in xs)])
        carry, row = out[:num_carry], out[num_carry:]
        rows.append(row)
    rows = rows[::-1] if reverse else rows
    return [*carry, *(jnp.stack(column) for column in zip(*rows))]


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Evaluates staged programs in Python; restores JAX afterwards."""
    rules = {primitives.jit_p: _jit, primitives.cond_p: _cond, primitives.while_p: _while, primitives.scan_p: _scan}
    before = {primitive: primitive.impl for primitive in rules}
    try:
        for primitive, rule in rules.items():
            primitive.def_impl(rule)
        jax.jit = Interpreted  # type: ignore[assignment, misc]
        yield
    finally:
        jax.jit = _real_jit
        for primitive, rule in before.items():
            primitive.def_impl(rule)
