"""Traced programs: jaxprs, what is inside them, and how to run one with other constants than it was traced with.

A program calls others: the body of a scan, a function under `jax.jit`, the rules of a derivative. They are parameters
of its equations, some of them *closed*, with constants of their own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import eval_jaxpr

from nnx.transforms.engine.inner_traces import with_fresh_traces

_ARRAYS = (jax.Array, np.ndarray)
_ATOMS = frozenset({type(None), bool, int, float, str, type(np.dtype("float32"))})


def programs_in(eqn: Any) -> list[Any]:
    """Returns the programs that an equation calls, closed or not."""
    # JAX's newer primitives (`jax_custom_vjp3`, `jax_remat3`) are objects with parameters of their own, and some of
    # these are what `jax.jit(f).trace(...)` returns.
    held = eqn.params.values()
    if "_prim" in eqn.params:
        held = (*held, *getattr(eqn.params["_prim"], "params", {}).values())
    programs = []
    for value in held:  # a large program has tens of thousands of equations, most of which hold atoms only
        if type(value) not in _ATOMS:
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if type(item) not in _ATOMS:
                    program = item if hasattr(item, "eqns") else getattr(item, "jaxpr", None)
                    if hasattr(program, "eqns"):
                        programs.append(program)
    return programs


def is_rule(eqn: Any) -> bool:
    """Whether an equation calls a function with a derivative rule (`custom_jvp`, `custom_vjp`)."""
    return eqn.primitive.name.startswith("custom_") or type(eqn.params.get("_prim")).__name__.startswith("Custom")


def equations(program: Any) -> Iterator[Any]:
    """Yields the equations of a program and of all programs inside it; a program that is called twice counts once."""
    stack, seen = [program], {id(program)}
    while stack:
        for eqn in stack.pop().eqns:
            yield eqn
            inner = [called for called in programs_in(eqn) if id(called) not in seen]
            seen.update(map(id, inner))
            stack += inner


def constants_of(program: Any) -> list[Any]:
    """Returns the constants of one program, including those written into its equations."""
    return [*getattr(program, "consts", ()), *_literals(getattr(program, "jaxpr", program))]


def _literals(jaxpr: Any) -> Iterator[Any]:
    """Yields the arrays in the equations themselves; `jax_use_simplified_jaxpr_constants` puts constants there."""
    for variables in (*[eqn.invars for eqn in jaxpr.eqns], jaxpr.outvars):
        for variable in variables:
            value = getattr(variable, "val", None)
            if isinstance(value, _ARRAYS):
                yield value


def is_inlined(eqn: Any) -> bool:
    """Whether an equation calls a program in a way that can be replaced by the program itself."""
    return eqn.primitive.name in ("jit", "pjit")


def identity(value: Any) -> Any:
    """Returns what identifies an array: its id, or for NumPy the memory, since JAX wraps such an array each time."""
    if isinstance(value, jax.Array):
        return id(value)
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        array = np.asarray(value)
        return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype
    return None


class TracedProgram(NamedTuple):
    """A traced function. The fields have the names of those in `jax.stages.Traced`, which can be used in its place."""

    jaxpr: Any
    out_tree: Any


def trace_program(fun: Callable[..., Any], *operands: Any) -> TracedProgram:
    """Traces a function. Unlike in `jax.jit(fun).trace`, tracers that it captures are constants of the program."""
    with with_fresh_traces():
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*operands)
    return TracedProgram(closed, jax.tree.structure(shapes))


def evaluate(program: Any, inputs: dict[Any, Any], operands: Any) -> Any:
    """Runs a program with inputs in place of its captured constants."""
    return jax.tree.unflatten(program.out_tree, _evaluate(program.jaxpr, inputs, jax.tree.leaves(operands)))


def _evaluate(closed: Any, inputs: dict[Any, Any], args: Sequence[Any]) -> list[Any]:
    consts = [inputs.get(identity(const), const) for const in closed.consts]
    opened = {id(eqn) for eqn in closed.jaxpr.eqns if is_inlined(eqn) and _uses(eqn.params["jaxpr"], inputs)}
    if not opened and not any(identity(value) in inputs for value in _literals(closed.jaxpr)):
        return eval_jaxpr(closed.jaxpr, consts, *args)
    # As `eval_jaxpr` does it, except that captured literals are replaced, and that programs inside with captured
    # constants are opened.
    values = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*consts, *args], strict=True))

    def read(variable: Any) -> Any:
        if not hasattr(variable, "val"):
            return values[variable]
        return inputs.get(identity(variable.val), variable.val) if isinstance(variable.val, _ARRAYS) else variable.val

    for eqn in closed.jaxpr.eqns:
        operands = [read(variable) for variable in eqn.invars]
        with jax.named_scope(str(eqn.source_info.name_stack)), eqn.ctx.manager:
            if id(eqn) in opened:
                outs = _evaluate(eqn.params["jaxpr"], inputs, operands)
            else:
                outs = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        values.update(zip(eqn.outvars, outs if eqn.primitive.multiple_results else [outs]))
    return [read(variable) for variable in closed.jaxpr.outvars]


def _uses(closed: Any, inputs: Mapping[Any, Any]) -> bool:
    """Whether a program, or one inside it that can be opened, has a captured constant."""
    if any(identity(const) in inputs for const in constants_of(closed)):
        return True
    return any(_uses(eqn.params["jaxpr"], inputs) for eqn in closed.jaxpr.eqns if is_inlined(eqn))
