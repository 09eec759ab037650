"""`grad` and `value_and_grad`: gradients of Modules as States."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack, overload

import jax

from nnx.core.repr import short
from nnx.core.state.filters import Filter
from nnx.core.state.state import State
from nnx.core.variables.variables import Param
from nnx.transforms.derivatives.differentiated_part import DifferentiatedPart
from nnx.transforms.engine.annotations import (
    A,
    DerivativeDecorator,
    Differentiated,
    GradDecorator,
    GradOptions,
    GradWithAuxDecorator,
    P,
    PositionalFilter,
    R,
    ValueAndDerivativeDecorator,
    ValueAndGradDecorator,
)
from nnx.transforms.engine.call import callee_of
from nnx.transforms.engine.commit import finish
from nnx.transforms.engine.decorators import decorator
from nnx.transforms.engine.outcome import Outcome

NOT_A_PAIR = """{name}: with has_aux=True the function returns a pair, the value to differentiate and anything else: \
`return loss, logits`. It returned {got}."""
NOT_A_NUMBER = "{name}: the function has to return one number, and returned {got}.{advice}"
NO_RETURN = " Is its `return` missing?"
USE_HAS_AUX = """ To return more than the number to differentiate, put that first, `return loss, logits`, and pass \
has_aux=True."""
REDUCE = """ Reduce it: `.mean()`, as for the losses of a batch, or `.sum()`. For the gradient of each number, use \
nnx.jacrev."""


@overload
def value_and_grad(
    wrt: PositionalFilter, /, *, argnums: Literal[0] = 0, has_aux: bool = False, **options: Unpack[GradOptions]
) -> ValueAndGradDecorator: ...
@overload
def value_and_grad(
    wrt: PositionalFilter, /, *, argnums: int | Sequence[int], has_aux: bool = False, **options: Unpack[GradOptions]
) -> ValueAndDerivativeDecorator: ...
@overload
def value_and_grad(
    fun: Callable[P, R],
    wrt: Filter = Param,
    *,
    argnums: Literal[0] = 0,
    has_aux: bool = False,
    **options: Unpack[GradOptions],
) -> Differentiated[P, tuple[R, State], tuple[R, Any]]: ...
@overload
def value_and_grad(
    fun: Callable[P, R],
    wrt: Filter = Param,
    *,
    argnums: int | Sequence[int],
    has_aux: bool = False,
    **options: Unpack[GradOptions],
) -> Callable[P, tuple[R, Any]]: ...
@overload
def value_and_grad(
    *, wrt: Filter = Param, argnums: Literal[0] = 0, has_aux: bool = False, **options: Unpack[GradOptions]
) -> ValueAndGradDecorator: ...
@overload
def value_and_grad(
    *, wrt: Filter = Param, argnums: int | Sequence[int], has_aux: bool = False, **options: Unpack[GradOptions]
) -> ValueAndDerivativeDecorator: ...
@decorator
def value_and_grad(
    fun: Any,
    wrt: Any = Param,
    *,
    argnums: int | Sequence[int] = 0,
    stateful: bool = True,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[str] = (),
) -> Callable[..., Any]:
    """Like `grad`, but returns `(value, gradient)`, or `((value, aux), gradient)` with `has_aux`.

    >>> model = nnx.Dict(w=nnx.Param(jnp.array(3.0)))
    >>> value, grads = nnx.value_and_grad(lambda m: m.w ** 2)(model)
    >>> float(value), float(grads["w"].value)
    (9.0, 6.0)
    """
    return _value_and_gradient(
        "nnx.value_and_grad", fun, wrt, argnums, stateful, has_aux, holomorphic, allow_int, reduce_axes
    )


@overload
def grad(
    wrt: PositionalFilter, /, *, argnums: Literal[0] = 0, has_aux: Literal[True], **options: Unpack[GradOptions]
) -> GradWithAuxDecorator: ...
@overload
def grad(
    wrt: PositionalFilter,
    /,
    *,
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    **options: Unpack[GradOptions],
) -> GradDecorator: ...
@overload
def grad(
    wrt: PositionalFilter, /, *, argnums: int | Sequence[int], has_aux: bool = False, **options: Unpack[GradOptions]
) -> DerivativeDecorator: ...
@overload
def grad(
    fun: Callable[P, tuple[Any, A]],
    wrt: Filter = Param,
    *,
    argnums: Literal[0] = 0,
    has_aux: Literal[True],
    **options: Unpack[GradOptions],
) -> Differentiated[P, tuple[State, A], tuple[Any, A]]: ...
@overload
def grad(
    fun: Callable[P, Any],
    wrt: Filter = Param,
    *,
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    **options: Unpack[GradOptions],
) -> Differentiated[P, State, Any]: ...
@overload
def grad(
    fun: Callable[P, Any],
    wrt: Filter = Param,
    *,
    argnums: int | Sequence[int],
    has_aux: bool = False,
    **options: Unpack[GradOptions],
) -> Callable[P, Any]: ...
@overload
def grad(
    *, wrt: Filter = Param, argnums: Literal[0] = 0, has_aux: Literal[True], **options: Unpack[GradOptions]
) -> GradWithAuxDecorator: ...
@overload
def grad(
    *, wrt: Filter = Param, argnums: Literal[0] = 0, has_aux: Literal[False] = False, **options: Unpack[GradOptions]
) -> GradDecorator: ...
@overload
def grad(
    *, wrt: Filter = Param, argnums: int | Sequence[int], has_aux: bool = False, **options: Unpack[GradOptions]
) -> DerivativeDecorator: ...
@decorator
def grad(
    fun: Any,
    wrt: Any = Param,
    *,
    argnums: int | Sequence[int] = 0,
    stateful: bool = True,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[str] = (),
) -> Callable[..., Any]:
    """Returns a function that computes the gradient of a scalar function, with Modules anywhere in its arguments.

    Args:
        fun: the function, a Module, or a bound method of one.
        wrt: a filter for the part of a Module that is differentiated. `@nnx.grad(nnx.Param)` is a decorator.
        argnums: the argument to differentiate, or several.
        stateful: whether changes to Modules in the forward pass are written back.
        has_aux: whether `fun` returns `(value, aux)`; then the result is `(gradient, aux)`.
        holomorphic, allow_int: as in `jax.grad`.
        reduce_axes: names of mapped axes to sum the gradient over.

    Returns:
        A function with the arguments of `fun`. The gradient has the shape of the differentiated argument, with each
        Module replaced by a State of the same Variable types and metadata.

    Raises:
        TypeError: `wrt` selects an integer value.

    >>> model = nnx.Dict(w=nnx.Param(jnp.array(3.0)))
    >>> nnx.grad(lambda m: m.w ** 2)(model)
    State({
      'w': Param(float32[]),
    })
    """
    both = _value_and_gradient("nnx.grad", fun, wrt, argnums, stateful, has_aux, holomorphic, allow_int, reduce_axes)

    def lifted(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return lifted


def _value_and_gradient(
    caller: str,
    fun: Any,
    wrt: Any,
    argnums: int | Sequence[int],
    stateful: bool,
    has_aux: bool,
    holomorphic: bool,
    allow_int: bool,
    reduce_axes: Sequence[str],
) -> Callable[..., Any]:
    callee = callee_of(fun, caller)
    argnums = argnums if isinstance(argnums, int) else tuple(argnums)
    name = f"nnx.grad({callee.name})"

    def lifted(*args: Any, **kwargs: Any) -> Any:
        given = (*callee.bound, *args)
        part = DifferentiatedPart(name, given, kwargs, argnums, wrt, allow_int=allow_int, trained_only=True)
        pure = part.function(callee.fun)

        def loss(differentiated: Any) -> tuple[Any, Outcome]:
            outcome = pure(differentiated)
            value, aux = _value_and_aux(outcome.out, has_aux, f"{caller}({callee.name})")
            return value, Outcome(outcome.values, (value, aux), outcome.effects)

        # Changed values are auxiliary output: they pass through, and no gradient flows from them.
        transform = jax.value_and_grad(loss, has_aux=True, holomorphic=holomorphic, allow_int=allow_int)
        (value, outcome), (cells, data) = transform(part.primals())
        if reduce_axes:
            cells, data = jax.lax.psum((cells, data), tuple(reduce_axes))
        _, aux = finish(part.call, outcome, stateful)
        return ((value, aux) if has_aux else value), part.pack(cells, data)

    return lifted


def _value_and_aux(out: Any, has_aux: bool, name: str) -> tuple[Any, Any]:
    """Returns the value to differentiate, and what the function returned along with it.

    Raises:
        TypeError: the function returned anything else than one number, or than a pair if it has auxiliary output.
    """
    if has_aux and not (isinstance(out, (tuple, list)) and len(out) == 2):
        raise TypeError(NOT_A_PAIR.format(name=name, got=short(out)))
    value, aux = out if has_aux else (out, None)
    if value is None or isinstance(value, (tuple, list, dict)) or getattr(value, "shape", ()) != ():
        advice = NO_RETURN if value is None else REDUCE if hasattr(value, "shape") else USE_HAS_AUX
        raise TypeError(NOT_A_NUMBER.format(name=name, got=short(value), advice=advice))
    return value, aux
