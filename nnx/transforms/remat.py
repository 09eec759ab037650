"""`remat`: compute again in the backward pass instead of keeping in memory."""

from collections.abc import Callable, Sequence
from typing import Any, Unpack, overload

import jax

from nnx.transforms.annotations import Decorator, P, R, RematOptions
from nnx.transforms.arguments import Selection, make_static, unwrap_static
from nnx.transforms.lift import Call, commit, discard, run, target_of
from nnx.transforms.maps import is_init_method
from nnx.transforms.reuse import reused
from nnx.transforms.wrapper import decorator


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

    Args:
      fun: the function, a Module, or a bound method of one. `__init__` runs as it is: a constructor makes variables,
        and leaves nothing to compute again.
      prevent_cse, policy: as in `jax.checkpoint`.
      static_argnums: arguments that are not data; indices count Modules as usual.
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

    def lifted(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = make_static(static, (*target.bound, *args), kwargs, target.name)
        call = Call(args, kwargs)

        def pure(cells: Any, data: Any, forks: Any) -> Any:
            return run(body, call.signature, call.statics, cells, data, forks, name)

        checkpointed = jax.checkpoint(pure, prevent_cse=prevent_cse, policy=policy)
        outcome = reused(
            checkpointed,
            (call.cells(), call.data, call.forks()),
            functions=(target.fun,),
            options=("nnx.remat", prevent_cse, policy),
            signature=call.signature,
        )
        return commit(call, outcome) if stateful else discard(call, outcome)

    return lifted


def _constructor(fun: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        return fun(self, *args, **kwargs)

    return init
