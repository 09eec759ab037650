"""Floating-point operations of a traced function, counted in its jaxpr: nothing is compiled or run.

A *scope* is a numbered `jax.named_scope`; JAX records the scopes an operation was traced under in its equation. The
cost of an equation counts toward every scope around it: those of its own jaxpr, and those of the equations that call
that jaxpr.

A product or convolution counts two operations per multiply-add, floating-point arithmetic one per element, and a
reduction one per reduced element. Complex numbers count by their real parts: four times as much in a product, six
operations for a multiplication, two otherwise. A function that reduces windows counts once per entry of a window. The
body of a scan counts once per step, a `cond` counts its most expensive branch,
and a `while` counts one iteration, because the number of iterations is not known.
"""

import math
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from nnx.core.sizes import size_in_bytes
from nnx.transforms.engine.programs import programs_in

_SCOPE = re.compile(r"nnx\[(\d+)\]")

Scopes = frozenset[int]

_ELEMENTWISE = frozenset(
    "abs acos acosh add add_any asin asinh atan atan2 atanh cbrt ceil cos cosh digamma div erf erf_inv erfc exp exp2 "
    "expm1 floor integer_pow lgamma log log1p logistic max min mul neg nextafter pow rem round rsqrt sign sin sinh "
    "sqrt square sub tan tanh".split()
)
_REDUCING = frozenset(
    "argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce_max reduce_min reduce_prod reduce_sum".split()
)


_MULTIPLYING = frozenset("cumprod div integer_pow mul reduce_prod square".split())


def scope(number: int) -> Any:
    """Returns the named scope with this number, as a context manager."""
    return jax.named_scope(f"nnx[{number}]")


def scopes_of(equation: Any) -> Scopes:
    """Returns the numbers of the scopes that an equation was traced under."""
    return frozenset(scopes_in(str(equation.source_info.name_stack)))


def scopes_in(name: str) -> list[int]:
    """Returns the numbers of the scopes in the name of an operation, the innermost last."""
    return list(map(int, _SCOPE.findall(name)))


def count_by_scope(jaxpr: Any) -> Counter[int]:
    """Returns the operations of a jaxpr (closed or not) by scope; those within two scopes count in both."""
    totals: Counter[int] = Counter()
    for scopes, operations in _count(getattr(jaxpr, "jaxpr", jaxpr), {}).items():
        for number in scopes:
            totals[number] += operations
    return totals


def kept_by_scope(jaxpr: Any) -> Counter[int]:
    """Returns the bytes of the values in a gradient's jaxpr that the forward pass makes and the backward pass reads.

    The operations of a backward pass are those that JAX traced under `transpose`.
    """
    made: dict[Any, str] = {}
    kept: dict[Any, str] = {}
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        stack = str(equation.source_info.name_stack)
        if "transpose(" in stack:
            kept.update((v, made[v]) for v in equation.invars if not hasattr(v, "val") and v in made)
        else:
            made.update((v, stack) for v in equation.outvars)
    totals: Counter[int] = Counter()
    for variable, stack in kept.items():
        for number in set(scopes_in(stack)):
            totals[number] += size_in_bytes(variable.aval.shape, variable.aval.dtype)
    return totals


def _count(jaxpr: Any, known: dict[int, Counter[Scopes]]) -> Counter[Scopes]:
    """Returns the operations of a jaxpr by the set of scopes around them; `known` has those counted before."""
    totals = known.get(id(jaxpr))
    if totals is not None:
        return totals
    totals = known[id(jaxpr)] = Counter()
    for equation in jaxpr.eqns:
        inner = [_count(getattr(sub, "jaxpr", sub), known) for sub in programs_in(equation)]
        if equation.primitive.name == "cond":
            inner = [max(inner, key=lambda branch: sum(branch.values()))]
        own = 0 if inner else _operations(equation)
        if not own and not any(inner):
            continue
        around = scopes_of(equation)
        if own:
            totals[around] += own
        times = _repetitions(equation)
        for sub in inner:
            for scopes, operations in sub.items():
                totals[around | scopes] += times * operations
    return totals


def _repetitions(equation: Any) -> int:
    match equation.primitive.name:
        case "scan":
            return equation.params["length"]
        case "shard_map":
            # On the other axes of the mesh, the body sees whole arrays. Versions of JAX name the parameter differently.
            params = equation.params
            axes = params.get("manual_axes", params.get("newly_manual_axes"))
            return math.prod(params["mesh"].shape[axis] for axis in axes)
        case "reduce_window":
            window = math.prod(equation.params["window_dimensions"])
            return equation.outvars[0].aval.size * window
        case "reduce":
            return equation.invars[0].aval.size
        case "scatter" | "scatter-add" | "scatter-mul" | "scatter-min" | "scatter-max":
            return equation.invars[2].aval.size
        case "pallas_call":
            grid = equation.params["grid_mapping"].grid
            return math.prod(size for size in grid if isinstance(size, int))
    return 1


def _operations(equation: Any) -> int:
    name, out = equation.primitive.name, equation.outvars[0].aval
    is_complex = jnp.issubdtype(out.dtype, jnp.complexfloating)
    multiply_add = 8 if is_complex else 2
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return multiply_add * out.size * _sizes(equation.invars[0], contracted)
    if name == "ragged_dot_general":
        (contracted, _), _ = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return multiply_add * out.size * _sizes(equation.invars[0], contracted)
    if name == "conv_general_dilated":
        kernel, features = equation.invars[1].aval, equation.params["dimension_numbers"].rhs_spec[0]
        # Input dilation inserts zeros, with which nothing has to be multiplied.
        holes = math.prod(equation.params["lhs_dilation"])
        return multiply_add * out.size * kernel.size // (kernel.shape[features] * holes)
    per_element = (6 if name in _MULTIPLYING else 2) if is_complex else 1
    if name in _ELEMENTWISE and jnp.issubdtype(out.dtype, jnp.inexact):
        return per_element * out.size
    if name in _REDUCING and jnp.issubdtype(equation.invars[0].aval.dtype, jnp.inexact):
        return per_element * equation.invars[0].aval.size
    if name.startswith("reduce_window"):
        return out.size * math.prod(equation.params["window_dimensions"])
    return 0


def _sizes(variable: Any, axes: Any) -> int:
    return math.prod(variable.aval.shape[axis] for axis in axes)
