"""`vjp`, `jvp`, `linearize`, `jacfwd`, `jacrev`, `hessian`: the other derivatives.

Tangents and cotangents of a Module are States of its `wrt` part; see `differentiated_part` for Modules that share a
cell. Changes made in the forward pass are kept. A Module in the output has no tangent: the derivative has None in its
place.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast, overload

import jax

from nnx.core.state.filters import Filter
from nnx.core.variables.variables import Param
from nnx.transforms.derivatives.differentiated_part import (
    DifferentiatedPart,
    as_tangents,
    with_modules,
    without_modules,
)
from nnx.transforms.engine.annotations import A, JacobianTransform, JacrevTransform, R
from nnx.transforms.engine.call import callee_of
from nnx.transforms.engine.commit import finish
from nnx.transforms.engine.decorators import decorator
from nnx.transforms.engine.outcome import Outcome
from nnx.transforms.engine.tracebacks import boundary


def _whole(
    transform: str, fun: Any, primals: Sequence[Any], wrt: Filter
) -> tuple[Callable[..., Any], DifferentiatedPart]:
    """Returns a function and the differentiated part of its call with these arguments: all of them."""
    callee = callee_of(fun, transform)
    arguments = (*callee.bound, *primals)
    name, argnums = f"{transform}({callee.name})", tuple(range(len(arguments)))
    return callee.fun, DifferentiatedPart(name, arguments, {}, argnums, wrt)


def _with_aux(pure: Callable[[Any], Outcome], has_aux: bool) -> Callable[[Any], tuple[Any, Outcome]]:
    """Returns a function of the differentiated output, with everything else as auxiliary output."""

    def split(differentiated: Any) -> tuple[Any, Outcome]:
        outcome = pure(differentiated)
        out, aux = outcome.out if has_aux else (outcome.out, None)
        return out, Outcome(outcome.values, aux, outcome.effects)

    return split


def _finish(part: DifferentiatedPart, out: Any, outcome: Outcome, stateful: bool) -> tuple[Any, Any]:
    """Commits what happened; returns the output and the auxiliary output, with the caller's Modules in them."""
    whole = Outcome(outcome.values, (out, outcome.out), outcome.effects)
    return finish(part.call, whole, stateful)


@overload
def vjp(
    fun: Callable[..., R], *primals: Any, has_aux: Literal[False] = False, wrt: Filter = Param, stateful: bool = True
) -> tuple[R, Callable[[Any], Any]]: ...
@overload
def vjp(
    fun: Callable[..., tuple[R, A]], *primals: Any, has_aux: Literal[True], wrt: Filter = Param, stateful: bool = True
) -> tuple[R, Callable[[Any], Any], A]: ...
@boundary
def vjp(fun: Any, *primals: Any, has_aux: bool = False, wrt: Filter = Param, stateful: bool = True) -> Any:
    """Returns `(out, vjp_fn)`, or `(out, vjp_fn, aux)`: the value and the function that pulls cotangents back.

    `vjp_fn(cotangent)` returns one cotangent per primal; for a Module, a State of its `wrt` part. A cell that several
    primals share appears once, at its canonical place.

    Args:
        fun: the function, a Module, or a bound method of one.
        *primals: its arguments.
        has_aux: whether `fun` returns `(out, aux)`.
        wrt: which part of a Module has a cotangent; a filter.
        stateful: whether changes to Modules in the forward pass are written back.

    >>> model = nnx.Dict(w=nnx.Param(jnp.array(3.0)))
    >>> out, vjp_fn = nnx.vjp(lambda m, x: m.w * x, model, 2.0)
    >>> state, x_bar = vjp_fn(1.0)
    >>> float(out), float(state["w"].value), float(x_bar)
    (6.0, 2.0, 3.0)
    """
    fun, part = _whole("nnx.vjp", fun, primals, wrt)
    raw, pull, outcome = jax.vjp(_with_aux(part.function(fun), has_aux), part.primals(), has_aux=True)
    out, aux = _finish(part, raw, outcome, stateful)
    returns_modules = outcome.effects.returns_modules
    structure = jax.tree.map(lambda _: 0, raw)

    def vjp_fn(cotangent: Any) -> Any:
        ((cells, data),) = pull(with_modules(structure, cotangent) if returns_modules else cotangent)
        return part.pack(cells, data)

    return (out, vjp_fn, aux) if has_aux else (out, vjp_fn)


@overload
def jvp(
    fun: Callable[..., R],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    has_aux: Literal[False] = False,
    wrt: Filter = Param,
    stateful: bool = True,
) -> tuple[R, Any]: ...
@overload
def jvp(
    fun: Callable[..., tuple[R, A]],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    has_aux: Literal[True],
    wrt: Filter = Param,
    stateful: bool = True,
) -> tuple[R, Any, A]: ...
@boundary
def jvp(
    fun: Any,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    has_aux: bool = False,
    wrt: Any = Param,
    stateful: bool = True,
) -> Any:
    """Returns `(out, tangent_out)`, or `(out, tangent_out, aux)`: the value and the directional derivative.

    The tangent of a Module is a State of its `wrt` part. Paths it leaves out are zero. If several States name one cell,
    because a Module is passed twice or two Modules share it, the tangents are added.

    Args:
        fun: the function, a Module, or a bound method of one.
        primals: its arguments.
        tangents: one tangent per argument.
        has_aux: whether `fun` returns `(out, aux)`.
        wrt: which part of a Module has a tangent; a filter.
        stateful: whether changes to Modules are written back.

    >>> model = nnx.Dict(w=nnx.Param(jnp.array(3.0)))
    >>> tangent = nnx.State({"w": nnx.Param(jnp.array(1.0))})
    >>> out, tangent_out = nnx.jvp(lambda m: m.w**2, (model,), (tangent,))
    >>> float(out), float(tangent_out)
    (9.0, 6.0)
    """
    fun, part = _whole("nnx.jvp", fun, primals, wrt)
    given = part.unpack(tuple(tangents), "the tangents")
    function = _with_aux(part.function(fun), has_aux)
    raw, tangent, outcome = jax.jvp(function, (part.primals(),), (as_tangents(given, part.primals()),), has_aux=True)
    out, aux = _finish(part, raw, outcome, stateful)
    tangent = without_modules(tangent)
    return (out, tangent, aux) if has_aux else (out, tangent)


@overload
def linearize(
    fun: Callable[..., R], *primals: Any, has_aux: Literal[False] = False, wrt: Filter = Param, stateful: bool = True
) -> tuple[R, Callable[..., Any]]: ...
@overload
def linearize(
    fun: Callable[..., tuple[R, A]], *primals: Any, has_aux: Literal[True], wrt: Filter = Param, stateful: bool = True
) -> tuple[R, Callable[..., Any], A]: ...
@boundary
def linearize(fun: Any, *primals: Any, has_aux: bool = False, wrt: Filter = Param, stateful: bool = True) -> Any:
    """Returns `(out, f_jvp)`, or `(out, f_jvp, aux)`: the value and the derivative as a linear function of tangents.

    The arguments are those of `vjp`; `f_jvp` takes one tangent per primal, as `jvp` does.

    >>> model = nnx.Dict(w=nnx.Param(jnp.array(3.0)))
    >>> out, f_jvp = nnx.linearize(lambda m: m.w**2, model)
    >>> float(f_jvp(nnx.State({"w": nnx.Param(jnp.array(1.0))})))
    6.0
    """
    fun, part = _whole("nnx.linearize", fun, primals, wrt)
    function = _with_aux(part.function(fun), has_aux)
    values = part.primals()
    raw, push, outcome = jax.linearize(function, values, has_aux=True)
    out, aux = _finish(part, raw, outcome, stateful)

    def f_jvp(*tangents: Any) -> Any:
        return without_modules(push(as_tangents(part.unpack(tangents, "the tangents"), values)))

    return (out, f_jvp, aux) if has_aux else (out, f_jvp)


# Jacobians


def _jacobian_transform(transform: Callable[..., Any]) -> JacobianTransform:
    return cast(JacobianTransform, decorator(transform))


def _jacrev_transform(transform: Callable[..., Any]) -> JacrevTransform:
    return cast(JacrevTransform, decorator(transform))


def _jacobian(
    transform: Callable[..., Any],
    fun: Any,
    wrt: Any,
    argnums: Any,
    has_aux: bool,
    stateful: bool,
    *,
    pack: Callable[[DifferentiatedPart, Any], Any],
    **options: Any,
) -> Callable[..., Any]:
    """Lifts one of JAX's transforms from a function to the derivatives of its output leaves.

    Args:
        transform: `jax.jacfwd`, `jax.jacrev` or `jax.hessian`.
        fun, wrt, argnums, has_aux, stateful: those of the lifted transform.
        pack: a function from the differentiated part and the derivative of one output leaf to what the user gets.
        **options: those of `transform`.
    """
    name = f"nnx.{transform.__name__}"
    callee = callee_of(fun, name)
    argnums = argnums if isinstance(argnums, int) else tuple(argnums)
    allow_int = bool(options.get("allow_int"))

    def lifted(*args: Any, **kwargs: Any) -> Any:
        given = (*callee.bound, *args)
        part = DifferentiatedPart(f"{name}({callee.name})", given, kwargs, argnums, wrt, allow_int=allow_int)
        structure: list[Any] = []
        split = _with_aux(part.function(callee.fun), has_aux)

        def function(differentiated: Any) -> tuple[Any, Outcome]:
            out, outcome = split(differentiated)
            structure[:] = [jax.tree.structure(out)]
            return out, outcome

        derivative, outcome = transform(function, has_aux=True, **options)(part.primals())
        aux = finish(part.call, outcome, stateful)
        leaves = [pack(part, of_leaf) for of_leaf in structure[0].flatten_up_to(derivative)]
        packed = without_modules(jax.tree.unflatten(structure[0], leaves))
        return (packed, aux) if has_aux else packed

    return lifted


def _pack_row(part: DifferentiatedPart, row: Any) -> Any:
    cells, data = row
    return part.pack(cells, data)


def _pack_block(part: DifferentiatedPart, block: Any) -> Any:
    """Packs a second derivative: a row of the differentiated part's shape for each of its values."""
    structure = jax.tree.structure(part.primals())
    rows = [part.pack(*row) for row in structure.flatten_up_to(block)]
    cells, data = jax.tree.unflatten(structure, rows)
    return part.pack(cells, data, boxed=False)  # a row is a State already, not the value of a Variable


@_jacobian_transform
def jacfwd(
    fun: Any,
    wrt: Any = Param,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    stateful: bool = True,
) -> Callable[..., Any]:
    """Returns a function that computes the Jacobian by forward mode: cheaper for few inputs and many outputs.

    For each leaf of the output, the Jacobian has the shape of the differentiated argument, with States for Modules. The
    options are those of `grad`.

    >>> model = nnx.Dict(w=nnx.Param(jnp.array(3.0)))
    >>> nnx.jacfwd(lambda m: m.w * jnp.arange(3.0))(model)["w"].value.tolist()
    [0.0, 1.0, 2.0]
    """
    return _jacobian(jax.jacfwd, fun, wrt, argnums, has_aux, stateful, pack=_pack_row, holomorphic=holomorphic)


@_jacrev_transform
def jacrev(
    fun: Any,
    wrt: Any = Param,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    stateful: bool = True,
) -> Callable[..., Any]:
    """Returns a function that computes the Jacobian by reverse mode: cheaper for many inputs and few outputs.

    For each leaf of the output, the Jacobian has the shape of the differentiated argument, with States for Modules. The
    options are those of `grad`.

    >>> model = nnx.Dict(w=nnx.Param(jnp.array([1.0, 2.0])))
    >>> nnx.jacrev(lambda m: m.w**2)(model)["w"].value.tolist()
    [[2.0, 0.0], [0.0, 4.0]]
    """
    options = {"holomorphic": holomorphic, "allow_int": allow_int}
    return _jacobian(jax.jacrev, fun, wrt, argnums, has_aux, stateful, pack=_pack_row, **options)


@_jacobian_transform
def hessian(
    fun: Any,
    wrt: Any = Param,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    stateful: bool = True,
) -> Callable[..., Any]:
    """Returns a function that computes second derivatives: the differentiated argument's shape, nested in itself.

    For a Module, `hessian["a"]["b"]` is the block of the variables at the paths `a` and `b`. The options are those of
    `grad`.

    >>> model = nnx.Dict(w=nnx.Param(jnp.array(3.0)))
    >>> float(nnx.hessian(lambda m: m.w**3)(model)["w"]["w"].value)
    18.0
    """
    return _jacobian(jax.hessian, fun, wrt, argnums, has_aux, stateful, pack=_pack_block, holomorphic=holomorphic)
