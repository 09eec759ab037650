"""`vjp`, `jvp`, `linearize`, `jacfwd`, `jacrev`, `hessian`: the other derivatives.

Tangents and cotangents of a Module are States of its `wrt` part; see `differentiate` for what happens where Modules
share a cell. Changes made in the forward pass are kept. A Module in the output has no tangent: the derivative has None
in its place.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack, overload

import jax

from nnx.core.filters import Filter
from nnx.core.state import State
from nnx.core.variables import Param
from nnx.transforms.annotations import A, DerivativeDecorator, Differentiated, JacobianOptions, P, R
from nnx.transforms.call import target_of
from nnx.transforms.decorators import decorator
from nnx.transforms.differentiated_part import Part, as_tangents, with_modules, without_modules
from nnx.transforms.effects import Outcome, finish


def _all(count: int) -> tuple[int, ...]:
    return tuple(range(count))


def _with_aux(pure: Callable[[Any], Outcome], has_aux: bool) -> Callable[[Any], tuple[Any, Outcome]]:
    """The function's output to be differentiated, and all the rest as auxiliary output."""

    def split(differentiated: Any) -> tuple[Any, Outcome]:
        outcome = pure(differentiated)
        out, aux = outcome.out if has_aux else (outcome.out, None)
        return out, Outcome(outcome.values, aux, outcome.effects)

    return split


def _finish(part: Part, out: Any, outcome: Outcome, stateful: bool) -> tuple[Any, Any]:
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
    target = target_of(fun, "nnx.vjp")
    part = Part(
        f"nnx.vjp({target.name})", (*target.bound, *primals), {}, _all(len(primals) + len(target.bound)), wrt, False
    )
    raw, pull, outcome = jax.vjp(_with_aux(part.function(target.fun), has_aux), part.primals(), has_aux=True)
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
    target = target_of(fun, "nnx.jvp")
    primals = (*target.bound, *primals)
    part = Part(f"nnx.jvp({target.name})", primals, {}, _all(len(primals)), wrt, False)
    given = part.unpack(tuple(tangents), "the tangents")
    function = _with_aux(part.function(target.fun), has_aux)
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
def linearize(fun: Any, *primals: Any, has_aux: bool = False, wrt: Filter = Param, stateful: bool = True) -> Any:
    """Returns `(out, f_jvp)`, or `(out, f_jvp, aux)`: the value and the derivative as a linear function of tangents.

    The arguments are those of `vjp`; `f_jvp` takes one tangent per primal, as `jvp` does.

    >>> model = nnx.Dict(w=nnx.Param(jnp.array(3.0)))
    >>> out, f_jvp = nnx.linearize(lambda m: m.w**2, model)
    >>> float(f_jvp(nnx.State({"w": nnx.Param(jnp.array(1.0))})))
    6.0
    """
    target = target_of(fun, "nnx.linearize")
    primals = (*target.bound, *primals)
    part = Part(f"nnx.linearize({target.name})", primals, {}, _all(len(primals)), wrt, False)
    function = _with_aux(part.function(target.fun), has_aux)
    values = part.primals()
    raw, push, outcome = jax.linearize(function, values, has_aux=True)
    out, aux = _finish(part, raw, outcome, stateful)

    def f_jvp(*tangents: Any) -> Any:
        return without_modules(push(as_tangents(part.unpack(tangents, "the tangents"), values)))

    return (out, f_jvp, aux) if has_aux else (out, f_jvp)


def _jacobian(
    transform: Any, name: str, fun: Any, wrt: Any, argnums: Any, has_aux: bool, stateful: bool, options: Any
) -> Callable[..., Any]:
    target = target_of(fun, name)
    argnums = argnums if isinstance(argnums, int) else tuple(argnums)

    def lifted(*args: Any, **kwargs: Any) -> Any:
        part = Part(
            f"{name}({target.name})", (*target.bound, *args), kwargs, argnums, wrt, bool(options.get("allow_int"))
        )
        structure: list[Any] = []
        split = _with_aux(part.function(target.fun), has_aux)

        def function(differentiated: Any) -> tuple[Any, Outcome]:
            out, outcome = split(differentiated)
            structure[:] = [jax.tree.structure(out)]
            return out, outcome

        jacobian, outcome = transform(function, has_aux=True, **options)(part.primals())
        aux = finish(part.call, outcome, stateful)
        leaves = [part.pack(*inner) for inner in structure[0].flatten_up_to(jacobian)]
        packed = without_modules(jax.tree.unflatten(structure[0], leaves))
        return (packed, aux) if has_aux else packed

    return lifted


@overload
def jacfwd(
    fun: Callable[P, jax.Array],
    wrt: Filter = Param,
    *,
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    **options: Unpack[JacobianOptions],
) -> Differentiated[P, State, Any]: ...
@overload
def jacfwd(
    fun: Callable[P, Any],
    wrt: Filter = Param,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Unpack[JacobianOptions],
) -> Callable[P, Any]: ...
@overload
def jacfwd(
    *,
    wrt: Filter = Param,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Unpack[JacobianOptions],
) -> DerivativeDecorator: ...
@decorator
def jacfwd(
    fun: Any,
    wrt: Any = Param,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    stateful: bool = True,
) -> Callable[..., Any]:
    """The Jacobian by forward mode: per output leaf the shape of the differentiated argument, Modules as States.

    The options are those of `grad`. Forward mode is the cheaper one for few inputs and many outputs.

    >>> model = nnx.Dict(w=nnx.Param(jnp.array(3.0)))
    >>> nnx.jacfwd(lambda m: m.w * jnp.arange(3.0))(model)["w"].value.tolist()
    [0.0, 1.0, 2.0]
    """
    return _jacobian(jax.jacfwd, "nnx.jacfwd", fun, wrt, argnums, has_aux, stateful, {"holomorphic": holomorphic})


@overload
def jacrev(
    fun: Callable[P, jax.Array],
    wrt: Filter = Param,
    *,
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    allow_int: bool = False,
    **options: Unpack[JacobianOptions],
) -> Differentiated[P, State, Any]: ...
@overload
def jacrev(
    fun: Callable[P, Any],
    wrt: Filter = Param,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    allow_int: bool = False,
    **options: Unpack[JacobianOptions],
) -> Callable[P, Any]: ...
@overload
def jacrev(
    *,
    wrt: Filter = Param,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    allow_int: bool = False,
    **options: Unpack[JacobianOptions],
) -> DerivativeDecorator: ...
@decorator
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
    """The Jacobian by reverse mode: per output leaf the shape of the differentiated argument, Modules as States.

    The options are those of `grad`. Reverse mode is the cheaper one for many inputs and few outputs.

    >>> model = nnx.Dict(w=nnx.Param(jnp.array([1.0, 2.0])))
    >>> nnx.jacrev(lambda m: m.w**2)(model)["w"].value.tolist()
    [[2.0, 0.0], [0.0, 4.0]]
    """
    options = {"holomorphic": holomorphic, "allow_int": allow_int}
    return _jacobian(jax.jacrev, "nnx.jacrev", fun, wrt, argnums, has_aux, stateful, options)


@overload
def hessian(
    fun: Callable[P, jax.Array],
    wrt: Filter = Param,
    *,
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    **options: Unpack[JacobianOptions],
) -> Differentiated[P, State, Any]: ...
@overload
def hessian(
    fun: Callable[P, Any],
    wrt: Filter = Param,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Unpack[JacobianOptions],
) -> Callable[P, Any]: ...
@overload
def hessian(
    *,
    wrt: Filter = Param,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Unpack[JacobianOptions],
) -> DerivativeDecorator: ...
@decorator
def hessian(
    fun: Any,
    wrt: Any = Param,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    stateful: bool = True,
) -> Callable[..., Any]:
    """The second derivative: the differentiated argument's shape, each leaf holding that shape again.

    For a Module, `hessian["a"]["b"]` is the block of the variables at the paths `a` and `b`. The options are those of
    `grad`.

    >>> model = nnx.Dict(w=nnx.Param(jnp.array(3.0)))
    >>> float(nnx.hessian(lambda m: m.w**3)(model)["w"]["w"].value)
    18.0
    """
    target = target_of(fun, "nnx.hessian")
    argnums = argnums if isinstance(argnums, int) else tuple(argnums)

    def lifted(*args: Any, **kwargs: Any) -> Any:
        part = Part(f"nnx.hessian({target.name})", (*target.bound, *args), kwargs, argnums, wrt, False)
        structure: list[Any] = []
        split = _with_aux(part.function(target.fun), has_aux)

        def function(differentiated: Any) -> tuple[Any, Outcome]:
            out, outcome = split(differentiated)
            structure[:] = [jax.tree.structure(out)]
            return out, outcome

        blocks, outcome = jax.hessian(function, has_aux=True, holomorphic=holomorphic)(part.primals())
        aux = finish(part.call, outcome, stateful)
        cells, data = part.primals()
        inner = jax.tree.structure((cells, data))

        def pack_one(block: Any) -> Any:
            rows = [part.pack(*row) for row in inner.flatten_up_to(block)]
            row_cells, row_data = jax.tree.unflatten(inner, rows)
            return part.pack(row_cells, row_data, boxed=False)

        leaves = [pack_one(block) for block in structure[0].flatten_up_to(blocks)]
        packed = without_modules(jax.tree.unflatten(structure[0], leaves))
        return (packed, aux) if has_aux else packed

    return lifted
