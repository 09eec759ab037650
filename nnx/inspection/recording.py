"""A recording of one abstract run of a model: which Modules were called, and what they returned.

The run uses a copy, inside a trace. Every Module of the copy is observed (see `nnx.transforms.engine.observed`), also
after a lifted transform has rebuilt it. When it is called, it runs under the named scope of its number, by which its
operations are later found in the jaxpr (see flops), and the shapes of its output are recorded.
"""

import copy
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr

from nnx.core.context import Context, PureContext
from nnx.core.module.modes import evaluate_where_unset
from nnx.core.module.module import Module
from nnx.core.state.pure import Pure
from nnx.core.state.state import State
from nnx.core.variables.variables import Param
from nnx.inspection.buffers import Peaks, peaks
from nnx.inspection.flops import count_by_scope, kept_by_scope, scope, scopes_in
from nnx.transforms.engine.observed import Observer, observe

NOT_CALLABLE = """nnx.summary was given inputs for {name}, which has no method {method!r}. Name the one to run with \
`method=`, or leave the inputs out for a table without output shapes."""


class Training(NamedTuple):
    """What the gradient of all Params adds to a run, by the number of the Module."""

    flops: Counter[int]  # of the backward pass
    kept: Counter[int]  # the bytes of values that the forward pass keeps for it, besides parameters and inputs
    program: Any  # the jaxpr of the gradient


class Recording(NamedTuple):
    """The results of one run, by the number of the Module in `named_modules()`."""

    outputs: dict[int, list[Any]]  # the distinct outputs, as pytrees of ShapeDtypeStruct; in the order of the calls
    flops: Counter[int]
    program: Any  # the jaxpr of the run
    inputs: list[bool]  # for each of its arguments, whether it is an array that was passed to the call
    outputs_count: int  # how many of its results the call returned; the others are the state
    training: Training | None = None  # if it was asked for

    def compiled(self) -> Any:
        """Compiles the program, or that of the gradient if there is one."""
        program = self.program if self.training is None else self.training.program
        arguments = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals]
        run = jax.jit(functools.partial(eval_jaxpr, program.jaxpr, program.consts))
        return run.lower(*arguments).compile()

    def peaks(self) -> Peaks:
        """Returns the memory that the compiled program holds."""
        return peaks(self.compiled().as_text(), scopes_in)


class _Run:
    """A run in progress: the Modules being called, innermost last, and the outputs so far.

    A run is the key of its observers, and equal only to itself. So a function that was compiled in an earlier run is
    not reused but traced again.
    """

    def __init__(self) -> None:
        self.active: list[Any] = []
        self.outputs: dict[int, list[Any]] = {}

    def observe(self, root: Module) -> "_CallRecorder":
        """Observes every Module of a copy; returns the observer of the root."""
        modules = [*Module.named_modules(root)]
        recorders = [_CallRecorder(self, number, path) for number, (path, _) in enumerate(modules)]
        for recorder, (_, module) in zip(recorders, modules):
            observe(module, recorder)
        return recorders[0]


class _CallRecorder(Observer):
    """Runs the calls of one Module under the scope of its number, and notes the shapes of what they return."""

    __slots__ = ("number",)

    def __init__(self, run: _Run, number: int, path: str):
        super().__init__("nnx.summary", path, ("__call__",), run)
        self.number = number

    def run(self, module: Any, position: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run: _Run = self.key
        if run.active and run.active[-1] is module:  # it calls itself
            return call(*args, **kwargs)
        run.active.append(module)
        seen = run.outputs.setdefault(self.number, [])
        try:
            with scope(self.number):
                out = call(*args, **kwargs)
        finally:
            run.active.pop()
        shapes = jax.tree.map(_shape, out)
        if shapes not in seen:
            seen.append(shapes)
        return out


def record(
    model: Module, method: Any, args: Sequence[Any], kwargs: dict[str, Any], *, backward: bool = False
) -> Recording:
    """Calls a method of a copy of the model on abstract values.

    Args:
        model: the Module to copy.
        method: the name of a method, or a function whose first argument is the Module.
        args: the positional arguments. Arrays and `ShapeDtypeStruct`s become abstract; Contexts are copied, so that the
            caller's does not advance; anything else is passed unchanged.
        kwargs: the keyword arguments, treated likewise.
        backward: whether to trace the gradient as well.
    """
    state, moduledef = Module.partition(model)
    leaves, treedef = jax.tree.flatten((tuple(args), kwargs), is_leaf=_is_split)
    traced = {i: _split(leaf) for i, leaf in enumerate(leaves) if _is_split(leaf) or _is_array(leaf)}
    run = _Run()

    def trace(state: Any, traced: dict[int, Any]) -> Any:
        module = moduledef.merge(state)
        inner = [_merge(traced[i]) if i in traced else leaf for i, leaf in enumerate(leaves)]
        # Shapes are the same in both modes, so nobody has to choose one to see them.
        evaluate_where_unset(module, [value for value in inner if isinstance(value, Context)])
        recorder = run.observe(module)
        inner_args, inner_kwargs = jax.tree.unflatten(treedef, inner)
        out = recorder.run(module, 0, _method(module, method), *inner_args, **inner_kwargs)
        return [leaf for leaf in jax.tree.leaves(out) if isinstance(leaf, jax.Array)], Module.get_state(module)

    program, (returned, _) = jax.make_jaxpr(trace, return_shape=True)(state, traced)
    inputs = [False] * len(jax.tree.leaves(state))
    for i, value in traced.items():
        inputs += [_is_array(leaves[i])] * len(jax.tree.leaves(value))
    flops = count_by_scope(program)
    training = _training(trace, state, traced, flops) if backward else None
    return Recording(run.outputs, flops, program, inputs, len(returned), training)


def _training(trace: Callable[..., Any], state: State, traced: Any, forward: Counter[int]) -> Training:
    """Traces the gradient of the sum of all outputs with respect to the Params."""

    def loss(params: State, rest: State, traced: Any) -> Any:
        out, _ = trace(State.merge(params, rest), traced)
        return sum(jnp.sum(jnp.real(value)) for value in out if jnp.issubdtype(value.dtype, jnp.inexact))

    params, rest = state.partition(_is_trained, ...)
    program = jax.make_jaxpr(jax.grad(loss))(params, rest, traced)
    return Training(count_by_scope(program) - forward, kept_by_scope(program), program)


def _is_trained(path: str, variable: Any) -> bool:
    return isinstance(variable, Param) and all(
        jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in jax.tree.leaves(variable)
    )


def _method(module: Module, method: Any) -> Callable[..., Any]:
    if not isinstance(method, str):
        return functools.partial(method, module)
    if not hasattr(module, method):
        raise ValueError(NOT_CALLABLE.format(name=type(module).__name__, method=method))
    return getattr(module, method)


def _is_split(leaf: Any) -> bool:
    return isinstance(leaf, (Context, Module))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic))


def _split(leaf: Any) -> Any:
    if isinstance(leaf, Context):
        return copy.deepcopy(leaf).partition()
    return Module.partition(leaf) if isinstance(leaf, Module) else leaf


def _merge(value: Any) -> Any:
    return value.merge() if isinstance(value, (Pure, PureContext)) else value


def _shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if _is_array(leaf) else leaf
