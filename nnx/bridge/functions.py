"""Functions of parameters as a Module; models of Haiku are a pair of such functions."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from nnx.bridge.call import ForeignCall, parameters_of
from nnx.bridge.foreign import Foreign, Ran
from nnx.bridge.trees import is_data, put_back, read_off, take_out
from nnx.core.context import Context
from nnx.core.variables.variables import BatchStat, Param

NOT_FUNCTIONS = """{where} takes a function apply(params, ...), or a mapping from names to such functions; got \
{got}."""
NOT_HAIKU = """nnx.bridge.from_haiku takes what hk.transform, hk.transform_with_state or hk.multi_transform returns; \
got {got}."""
NEEDS_PARAMS = """nnx.bridge.from_haiku initializes the model with example inputs and keys, \
from_haiku(transformed, x, ctx=nnx.context(0)), or takes its parameters: from_haiku(transformed, params=params)."""


@dataclasses.dataclass(frozen=True)
class FunctionAdapter:
    """Runs `apply(params[, state][, key], *args) -> out`, or `-> (out, state)`; functions by the name of the method."""

    functions: tuple[tuple[str, Callable[..., Any]], ...]
    params: Any
    state: Any
    has_state: bool
    stream: str | None

    def run(self, call: ForeignCall, variables: Mapping[str, Any]) -> Ran:
        """Runs the function of that name."""
        function = dict(self.functions).get(call.method)
        if function is None:
            raise AttributeError(f"There is no function {call.method!r} among {[name for name, _ in self.functions]}.")
        leading = [put_back(self.params, variables)]
        if self.has_state:
            leading.append(put_back(self.state, variables))
        if self.stream is not None:
            leading.append(call.key(self.stream))
        kwargs = call.kwargs_for(function, len(leading) + len(call.args))
        out = function(*leading, *call.args, **kwargs)
        if not self.has_state:
            return Ran(out, {})
        out, state = out
        return Ran(out, {path: BatchStat(value) for path, value in read_off(self.state, state).items()})

    def has_method(self, name: str) -> bool:
        """Whether there is a function of this name."""
        return any(name == known for known, _ in self.functions)


def from_functions(
    apply: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    params: Any,
    state: Any = None,
    *,
    stream: str | None = None,
) -> Foreign:
    """Returns a Module that calls a function of parameters: `apply(params, *args)`.

    The parameters are Params at their paths in `params`. With a `state`, the function is `apply(params, state, *args)`
    and returns `(out, new_state)`; the arrays of the state are `nnx.BatchStat`s.

    Args:
        apply: the function, or a mapping from names of methods to functions; `__call__` is the call itself.
        params: the parameters, a pytree of arrays.
        state: the state, a pytree of arrays.
        stream: the stream of the Context to draw a key from. The key follows `params` and `state`; it is None in a
            call without that stream. By default, no key is passed.

    >>> model = nnx.bridge.from_functions(lambda p, x: x @ p["w"] + p["b"], {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)})
    >>> sorted(nnx.grad(lambda model, x: model(x).sum())(model, jnp.ones(2)))
    ['b', 'w']
    """
    functions = dict(apply) if isinstance(apply, Mapping) else {"__call__": apply}
    if not functions or not all(map(callable, functions.values())):
        raise TypeError(NOT_FUNCTIONS.format(where="nnx.bridge.from_functions", got=type(apply).__name__))
    frame, weights = take_out(params, "parameters", is_data)
    state_frame, stats = take_out(state, "state", is_data, "state", weights)
    adapter = FunctionAdapter(tuple(functions.items()), frame, state_frame, state is not None, stream)
    variables = {path: Param(value) for path, value in weights.items()}
    return Foreign(adapter, {**variables, **{path: BatchStat(value) for path, value in stats.items()}})


def from_haiku(
    transformed: Any,
    *example: Any,
    ctx: Context | None = None,
    params: Any = None,
    state: Any = None,
    stream: str = "dropout",
    **kwargs: Any,
) -> Foreign:
    """Returns a Module that runs a model of Haiku.

    The parameters are Params at paths such as `mlp/~/linear_0/w`. The state is in `nnx.BatchStat`s.

    Args:
        transformed: what `hk.transform`, `hk.transform_with_state` or `hk.multi_transform` returned.
        *example: the inputs that `transformed.init` is called with, unless `params` are given.
        ctx: the Context whose stream "params" initializes the parameters.
        params: the parameters of a trained model, as `transformed.init` returned them.
        state: the state that belongs to them.
        stream: the stream of the Context that a call draws its key from.
        **kwargs: keyword arguments for `transformed.init`. Mode arguments such as `is_training` are those of training,
            unless given here.
    """
    init, apply = getattr(transformed, "init", None), getattr(transformed, "apply", None)
    if init is None or apply is None:
        raise TypeError(NOT_HAIKU.format(got=type(transformed).__name__))
    has_state = type(transformed).__name__.endswith("WithState")
    if params is None:
        if ctx is None:
            raise TypeError(NEEDS_PARAMS)
        call = ForeignCall("init", example, kwargs, ctx, True)  # batch norms of Haiku make their state in training only
        made = init(ctx.make_rng("params"), *example, **call.kwargs_for(init, len(example) + 1))
        params, state = made if has_state else (made, None)
    functions = apply._asdict() if hasattr(apply, "_asdict") else apply
    every = list(functions.values()) if isinstance(functions, Mapping) else [functions]
    takes_key = any(parameter.name == "rng" for function in every for parameter in parameters_of(function))
    return from_functions(functions, params, state if has_state else None, stream=stream if takes_key else None)
