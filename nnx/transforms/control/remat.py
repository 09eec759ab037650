"""`remat`: intermediate results are recomputed in the backward pass instead of kept in memory."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Unpack, overload

import jax

from nnx.core.old_names import old_names
from nnx.transforms.control.eager_traces import functions_run, kept_trace
from nnx.transforms.control.vmap import is_init_method
from nnx.transforms.engine.annotations import Decorator, P, R, RematOptions
from nnx.transforms.engine.call import Call, callee_of, is_module
from nnx.transforms.engine.commit import finish
from nnx.transforms.engine.decorators import decorator
from nnx.transforms.engine.leave import run
from nnx.transforms.engine.selected_arguments import Selection, StaticArgument, make_static, unwrap_static
from nnx.transforms.engine.shared_traces import shared_body

NOT_A_POLICY = """nnx.remat: policy is the name of an activation to keep, a list of names, a mapping from name to \
memory ("device" or "pinned_host"), or a policy such as jax.checkpoint_policies.dots_saveable; got {got!r}."""

SEVERAL_MEMORIES = """nnx.remat: besides "device", a policy can name one memory, e.g. "pinned_host"; got {kept}."""

_recomputed: ContextVar[bool] = ContextVar("nnx_recomputed", default=False)

is_recomputed: Callable[[], bool] = _recomputed.get
"""Returns whether the running code is being traced for `nnx.remat`, where names of activations matter."""


@overload
def remat(fun: Callable[P, R], **options: Unpack[RematOptions]) -> Callable[P, R]: ...
@overload
def remat(**options: Unpack[RematOptions]) -> Decorator: ...
@old_names(f="fun")
@decorator
def remat(
    fun: Any,
    *,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] | None = None,
    policy: Callable[..., Any] | str | Sequence[str] | Mapping[str, str] | None = None,
    stateful: bool = True,
    is_init: bool | None = None,
) -> Callable[..., Any]:
    """`jax.checkpoint` for functions that take Modules; keyword arguments are allowed.

    Inside a lifted function (`nnx.jit`, `nnx.grad` ...), calls of the same function on Modules of equal structure share
    one trace, as 64 equal blocks do: Python side effects of the function happen once.

    Args:
        fun: the function, a Module, or a bound method of one. `__init__` runs unchanged: a constructor makes variables,
            and there is nothing to recompute. A Module class is wrapped as by `nnx.Remat`.
        prevent_cse: as in `jax.checkpoint`.
        policy: the intermediate results to keep: their names, e.g. `("attention", "mlp_hidden")`, or a policy of
            `jax.checkpoint_policies`; none by default. A mapping also says which memory each is kept in:
            `{"attention": "device", "mlp_hidden": "pinned_host"}`. Built-in layers name the results listed in the
            guide; name your own with `jax.ad_checkpoint.checkpoint_name`.
        static_argnums: positions of arguments that are not data, counted as the call is written: Modules count, but the
            one in front of the dot does not, nor does the class of a class method. In `block(x, flag)` and
            `block.encode(x, flag)`, `flag` is number 1, no matter whether `remat` was applied to the class, the method
            or the Module; in `f(block, x, flag)` it is 2. A static method whose first argument is a Module counts like
            a method.
        stateful: whether changes to Modules are written back.
        is_init: whether the function is a constructor; by default, whether its name is `__init__`.

    >>> layer = nnx.Linear(2, 2, ctx=nnx.context(0))
    >>> forward = nnx.remat(lambda layer, x: jnp.sin(layer(x)), policy=jax.checkpoint_policies.dots_saveable)
    >>> grads = nnx.grad(lambda layer, x: forward(layer, x).sum())(layer, jnp.ones((1, 2)))
    >>> list(grads)
    ['bias', 'kernel']

    >>> block = nnx.remat(nnx.MLP(2, 8, 2, ctx=nnx.context(0)), policy="mlp_hidden")
    >>> block(jnp.ones((1, 2))).shape
    (1, 2)
    """
    kept = _as_policy(policy)
    if is_init_method(fun, is_init):
        return _constructor(fun)
    callee = callee_of(fun, "nnx.remat")
    positional = Selection(callee.fun, static_argnums, None, len(callee.bound))
    of_method = Selection(callee.fun, static_argnums, None, 1) if _is_method(callee.fun) else positional
    body = unwrap_static(callee.fun)
    name = f"nnx.remat({callee.name})"

    def trace(call: Call, cells: Any, data: Any, forks: Any) -> Any:
        token = _recomputed.set(True)
        try:
            return run(body, call.signature, call.statics, cells, data, forks, name)
        finally:
            _recomputed.reset(token)

    def lifted(*args: Any, **kwargs: Any) -> Any:
        args = (*callee.bound, *args)
        in_class = bool(args) and isinstance(args[0], type)  # a class method, called for this class
        static = of_method if args and (in_class or is_module(args[0])) else positional
        args, kwargs = make_static(static, args, kwargs, callee.name)
        if in_class:
            args = (StaticArgument(args[0], "the class"), *args[1:])
        call = Call(args, kwargs)
        pure = shared_body(callee.fun, call, trace)
        checkpointed = jax.checkpoint(
            pure, prevent_cse=prevent_cse, policy=_keep_only(kept) if isinstance(kept, tuple) else kept
        )
        outcome = kept_trace(
            checkpointed,
            (call.cells(), call.data, call.forks()),
            functions=functions_run(callee.fun, call),
            options=("nnx.remat", prevent_cse, kept),
            signature=call.signature,
        )
        return finish(call, outcome, stateful)

    return lifted


def _as_policy(policy: Any) -> Callable[..., Any] | tuple[tuple[str, str], ...] | None:
    """Returns a callable policy unchanged, any other as pairs of name and memory, which compare by value."""
    if policy is None or callable(policy):
        return policy
    if isinstance(policy, str):
        policy = (policy,)
    if isinstance(policy, (list, tuple, set)):
        policy = dict.fromkeys(policy, "device")
    if (
        not policy
        or not isinstance(policy, Mapping)
        or not all(isinstance(x, str) for x in (*policy, *policy.values()))
    ):
        raise TypeError(NOT_A_POLICY.format(got=policy))
    return tuple(sorted(policy.items()))


@functools.lru_cache(maxsize=128)
def _keep_only(kept: tuple[tuple[str, str], ...]) -> Callable[..., Any]:
    # JAX compares policies by identity: equal blocks share what is derived from their traces if this is one object.
    on_device = [name for name, memory in kept if memory == "device"]
    elsewhere = {memory for _, memory in kept if memory != "device"}
    if not elsewhere:
        return jax.checkpoint_policies.save_only_these_names(*on_device)
    if len(elsewhere) > 1:
        raise ValueError(SEVERAL_MEMORIES.format(kept=dict(kept)))
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=on_device,
        names_which_can_be_offloaded=[name for name, memory in kept if memory != "device"],
        offload_src="device",
        offload_dst=elsewhere.pop(),
    )


def _is_method(fun: Any) -> bool:
    """Whether a function was defined in the body of a class, and is not bound to that class."""
    owner = getattr(fun, "__qualname__", "").rpartition(".")[0]
    return bool(owner) and not owner.endswith("<locals>") and not inspect.ismethod(fun)


def _constructor(fun: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        return fun(self, *args, **kwargs)

    return init
