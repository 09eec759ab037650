"""`checkify`: run-time checks inside compiled functions, returned as a value."""

from collections.abc import Callable, Collection
from typing import Any, overload

from jax.experimental import checkify as jax_checkify

from nnx.transforms.engine.annotations import P, R
from nnx.transforms.engine.call import Call, callee_of
from nnx.transforms.engine.commit import finish
from nnx.transforms.engine.decorators import decorator
from nnx.transforms.engine.leave import run
from nnx.transforms.engine.outcome import Outcome


@overload
def checkify(
    fun: Callable[P, R], *, errors: Collection[Any] = ..., stateful: bool = True
) -> Callable[P, tuple[jax_checkify.Error, R]]: ...
@overload
def checkify(
    *, errors: Collection[Any] = ..., stateful: bool = True
) -> Callable[[Callable[P, R]], Callable[P, tuple[jax_checkify.Error, R]]]: ...
@decorator
def checkify(
    fun: Any, *, errors: Collection[Any] = jax_checkify.user_checks, stateful: bool = True
) -> Callable[..., Any]:
    """`jax.experimental.checkify` for functions that take Modules: returns `(error, out)`.

    A check inside, `checkify.check(pred, message)`, is a part of the computation, so it works on traced values and
    inside `nnx.jit`, `nnx.scan` and the other transforms. Outside, `error.throw()` raises for the first check that
    failed. Changes to Modules are kept, whether or not a check failed.

    Args:
        fun: a function, a Module, or a bound method of one. Without it, a decorator is returned.
        errors: the checks to make, as in JAX: `checkify.user_checks`, or sets of automatic ones, such as
            `checkify.nan_checks`, `checkify.index_checks` or `checkify.all_checks`.
        stateful: whether changes to Modules are written back.

    >>> from jax.experimental import checkify
    >>> def step(model, x):
    ...     checkify.check(jnp.all(x > 0), "x must be positive, got {x}", x=x)
    ...     return model(x)
    >>> checked = nnx.jit(nnx.checkify(step))
    >>> error, out = checked(nnx.Linear(2, 2, ctx=nnx.context(0)), jnp.array([1.0, -1.0]))
    >>> error.get()
    'x must be positive, got [ 1. -1.] (`check` failed)'
    """
    callee = callee_of(fun, "nnx.checkify")
    name = f"nnx.checkify({callee.name})"

    def lifted(*args: Any, **kwargs: Any) -> Any:
        call = Call((*callee.bound, *args), kwargs)
        forks = call.forks()

        # jax.checkify traces captured values as it traces arguments, so there is nothing to pass.
        def pure() -> Outcome:
            return run(callee.fun, call.signature, call.statics, call.cells(), call.data, forks, name)

        checked: Any = jax_checkify.checkify(pure, errors=frozenset(errors))
        error, outcome = checked()
        return error, finish(call, outcome, stateful)

    return lifted
