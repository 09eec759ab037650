"""`remat`: intermediate results are recomputed in the backward pass instead of kept in memory."""

from collections.abc import Callable, Sequence
from typing import Any, Unpack, overload

import jax

from nnx.transforms.annotations import Decorator, P, R, RematOptions
from nnx.transforms.arguments import Selection, make_static, unwrap_static
from nnx.transforms.call import Call, target_of
from nnx.transforms.decorators import decorator
from nnx.transforms.eager_traces import functions_run, kept_trace
from nnx.transforms.effects import finish, run
from nnx.transforms.shared_traces import shared_body
from nnx.transforms.vmap import is_init_method


@overload
def remat(fun: Callable[P, R], **options: Unpack[RematOptions]) -> Callable[P, R]: ...
@overload
def remat(**options: Unpack[RematOptions]) -> Decorator: ...
@decorator
def remat(
    fun: Any,
    *,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] | None = None,
    policy: Callable[..., bool] | None = None,
    stateful: bool = True,
    is_init: bool | None = None,
) -> Callable[..., Any]:
    """`jax.checkpoint` for functions that take Modules; keyword arguments are allowed.

    Inside a lifted function (`nnx.jit`, `nnx.grad` ...), calls of the same function on Modules of equal structure share
    one trace, as 64 equal blocks do: side effects that the function has in Python happen once.

    Args:
        fun: the function, a Module, or a bound method of one. `__init__` runs unchanged: a constructor makes variables,
            and there is nothing to recompute.
        prevent_cse, policy: as in `jax.checkpoint`.
        static_argnums: positions of arguments that are not data, counted with Modules included.
        stateful: whether changes to Modules are written back.
        is_init: whether the function is a constructor; by default, whether its name is `__init__`.

    >>> layer = nnx.Linear(2, 2, ctx=nnx.context(0))
    >>> forward = nnx.remat(lambda layer, x: jnp.sin(layer(x)), policy=jax.checkpoint_policies.dots_saveable)
    >>> grads = nnx.grad(lambda layer, x: forward(layer, x).sum())(layer, jnp.ones((1, 2)))
    >>> list(grads)
    ['bias', 'kernel']
    """
    if is_init_method(fun, is_init):
        return _constructor(fun)
    target = target_of(fun, "nnx.remat")
    static = Selection(target.fun, static_argnums, None, len(target.bound))
    body = unwrap_static(target.fun)
    name = f"nnx.remat({target.name})"

    def trace(call: Call, cells: Any, data: Any, forks: Any) -> Any:
        return run(body, call.signature, call.statics, cells, data, forks, name)

    def lifted(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = make_static(static, (*target.bound, *args), kwargs, target.name)
        call = Call(args, kwargs)
        pure = shared_body(target.fun, call, trace)
        checkpointed = jax.checkpoint(pure, prevent_cse=prevent_cse, policy=policy)
        outcome = kept_trace(
            checkpointed,
            (call.cells(), call.data, call.forks()),
            functions=functions_run(target.fun, call),
            options=("nnx.remat", prevent_cse, policy),
            signature=call.signature,
        )
        return finish(call, outcome, stateful)

    return lifted


def _constructor(fun: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        return fun(self, *args, **kwargs)

    return init
