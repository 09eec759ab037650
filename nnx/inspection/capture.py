"""`capture`: the outputs of submodules, and their gradients, without editing a layer."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.repr import short
from nnx.core.state.selectors import ModuleSelector
from nnx.inspection.observing import ObservedCall
from nnx.transforms.engine.annotations import P, R
from nnx.transforms.engine.commit import finish
from nnx.transforms.engine.decorators import decorator
from nnx.transforms.engine.observed import Observer, add_observation, check_recordable, next_probe

NOT_DATA = """nnx.capture cannot record {path!r} ({kind}): its output holds {leaf}, which is not an array or a number. \
Narrow `where=` so that it does not select this Module."""

NOT_A_SCALAR = """nnx.capture(grads=True) takes a function that returns a real number, the loss; {name} returned \
{got}."""


class Recorder(Observer):
    """Records what a Module returns."""

    __slots__ = ()

    def __init__(self, path: str, methods: tuple[str, ...]):
        super().__init__("nnx.capture", path, methods)

    def run(self, module: Any, position: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        check_recordable(module, position)
        probe = next_probe(module, position)
        if probe is not None:
            out = _add(out, probe)
        # Mapping over the leaves copies every container, so that later changes to the output are not seen.
        add_observation(module, position, jax.tree.map(lambda leaf: self._data(module, leaf), out))
        return out

    def _data(self, module: Any, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        if not isinstance(leaf, (jax.Array, np.generic, int, float, complex)):
            raise TypeError(NOT_DATA.format(path=self.path, kind=type(module).__name__, leaf=short(leaf)))
        return leaf


class CaptureDecorator(Protocol):
    """What `nnx.capture(**options)` returns."""

    def __call__(self, fun: Callable[P, R], /) -> Callable[P, tuple[R, dict[str, Any]]]: ...


class CaptureWithGradsDecorator(Protocol):
    """What `nnx.capture(grads=True, **options)` returns."""

    def __call__(self, fun: Callable[P, R], /) -> Callable[P, tuple[R, dict[str, Any], dict[str, Any]]]: ...


class CaptureOptions(TypedDict, total=False):
    """The options of `nnx.capture` that do not decide what it returns."""

    where: ModuleSelector
    methods: str | Sequence[str]
    stateful: bool


@overload
def capture(
    fun: Callable[P, R], *, grads: Literal[False] = False, **options: Unpack[CaptureOptions]
) -> Callable[P, tuple[R, dict[str, Any]]]: ...
@overload
def capture(
    fun: Callable[P, R], *, grads: Literal[True], **options: Unpack[CaptureOptions]
) -> Callable[P, tuple[R, dict[str, Any], dict[str, Any]]]: ...
@overload
def capture(*, grads: Literal[False] = False, **options: Unpack[CaptureOptions]) -> CaptureDecorator: ...
@overload
def capture(*, grads: Literal[True], **options: Unpack[CaptureOptions]) -> CaptureWithGradsDecorator: ...
@decorator
def capture(
    fun: Any,
    *,
    where: ModuleSelector = ...,
    methods: str | Sequence[str] = (),
    grads: bool = False,
    stateful: bool = True,
) -> Callable[..., Any]:
    """Returns a function that also returns the outputs of submodules, by path.

    No layer has to be edited, and calls that are not captured cost the same as ever. The values come out of `nnx.jit`,
    derivatives and `nnx.remat`, and of `nnx.vmap` and `nnx.scan`, which stack them along a new first axis. Repeating a
    call with an equal `where` does not trace anything again. Calls of copies that the function makes of a Module, with
    `clone` or `apply`, are not captured.

    Args:
        fun: a function of Modules, a Module, or a bound method of one. Only Modules among the arguments are captured.
        where: the submodules to capture: a Module type, a path glob such as `"blocks/*/attention"`, a function
            `f(path, module) -> bool`, a sequence of these, or `...` for all.
        methods: names of methods whose outputs are captured as well as those of `__call__`.
        grads: whether to return the gradient of the result, a scalar, with respect to each captured value.
        stateful: whether changes to Modules are written back.

    Returns:
        A function with the arguments of `fun` that returns `(out, acts)`, or `(out, acts, grads)`. `acts` is a dict
        from paths to outputs; where a submodule ran several times, to a tuple of them. Submodules that did not run are
        left out. `grads` has the same structure, with None for values that are not floating point. If several Modules
        are passed, each path starts with the number of its Module: `"0/encoder"`.

    Raises:
        ValueError: no Module was passed or selected, or a selected one ran inside a loop or branch.
        TraceContextError: a selected Module ran inside a raw JAX transform.

    >>> ctx = nnx.context(0)
    >>> model = nnx.Sequence([nnx.Linear(2, 4, ctx=ctx), nnx.relu, nnx.Linear(4, 3, ctx=ctx)])
    >>> out, acts = nnx.capture(model, where=nnx.Linear)(jnp.ones((1, 2)))
    >>> {path: value.shape for path, value in acts.items()}
    {'0': (1, 4), '2': (1, 3)}
    """

    def lifted(*args: Any, **kwargs: Any) -> Any:
        observed = ObservedCall("nnx.capture", fun, where, methods, args, kwargs)
        if grads:
            return _with_gradients(observed, stateful)
        outcome, observations = observed.run(Recorder)
        values = {path: [observation.value for observation in found] for path, found in observations.items()}
        return finish(observed.call, outcome, stateful), _by_path(observed, values)

    return lifted


def _by_path(observed: ObservedCall, values: dict[str, list[Any]]) -> dict[str, Any]:
    """Returns the values of Modules that ran, in path order; as a tuple where there are several."""
    found = {path: values[path] for path in observed.selected.values() if values[path]}
    return {path: tuple(several) if len(several) > 1 else several[0] for path, several in found.items()}


# Gradients


def _with_gradients(observed: ObservedCall, stateful: bool) -> Any:
    """Differentiates with respect to probes, zeros that are added to the outputs.

    A first run, an abstract one, finds out how many there are, their shapes, and which of them scan and vmap stack.
    """
    stacked: dict[str, list[int]] = {}

    def find_probes() -> Any:
        _, observations = observed.run(Recorder)
        stacked.update({path: [observation.stacked for observation in found] for path, found in observations.items()})
        return {path: [_zeros(observation.value) for observation in found] for path, found in observations.items()}

    def loss(probes: Any) -> Any:
        outcome, observations = observed.run(Recorder, probes, stacked)
        _check_scalar(observed.name, outcome.out)
        return outcome.out, (
            outcome,
            {path: [observation.value for observation in found] for path, found in observations.items()},
        )

    probes = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), jax.eval_shape(find_probes))
    (_, (outcome, values)), gradients = jax.value_and_grad(loss, has_aux=True)(probes)
    grads = {path: list(map(_unflatten, values[path], gradients[path])) for path in values}
    return finish(observed.call, outcome, stateful), _by_path(observed, values), _by_path(observed, grads)


def _check_scalar(name: str, out: Any) -> None:
    if not isinstance(out, jax.Array) or out.shape or not jnp.issubdtype(out.dtype, jnp.floating):
        got = str(jax.typeof(out)) if isinstance(out, jax.Array) else short(out)
        raise TypeError(NOT_A_SCALAR.format(name=name, got=got))


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _zeros(value: Any) -> list[jax.Array]:
    """Returns zeros for the floating-point leaves of a value."""
    return [jnp.zeros(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(value) if _is_float(leaf)]


def _add(value: Any, probe: Sequence[Any]) -> Any:
    rest = iter(probe)
    return jax.tree.map(lambda leaf: leaf + next(rest) if _is_float(leaf) else leaf, value)


def _unflatten(value: Any, gradients: Sequence[Any]) -> Any:
    rest = iter(gradients)
    return jax.tree.map(lambda leaf: next(rest) if _is_float(leaf) else None, value)
