"""`eval_shape`: the shapes of a call's output, and Modules without values."""

from collections.abc import Callable
from typing import Any, overload

import jax
import numpy as np

from nnx.transforms.engine.annotations import M
from nnx.transforms.engine.call import Call, callee_of, with_values
from nnx.transforms.engine.commit import discard
from nnx.transforms.engine.leave import run
from nnx.transforms.engine.outcome import Outcome
from nnx.transforms.engine.tracebacks import boundary


@overload
def eval_shape(fun: Callable[..., M], *args: Any, **kwargs: Any) -> M: ...
@overload
def eval_shape(fun: Callable[..., jax.Array], *args: Any, **kwargs: Any) -> jax.ShapeDtypeStruct: ...
@overload
def eval_shape(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...
@boundary
def eval_shape(fun: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the output of a call as shapes and dtypes; nothing is computed, and no Module changes.

    Args:
        fun: a function, a Module, or a Module class.
        *args, **kwargs: its arguments. Only the shapes and dtypes of arrays are used; a `ShapeDtypeStruct` is enough.

    Returns:
        The output with a `jax.ShapeDtypeStruct` for every array. Modules in it are new, with such leaves.

    >>> model = nnx.eval_shape(nnx.Linear, 3, 2, ctx=nnx.context(0))
    >>> model.kernel
    ShapeDtypeStruct(shape=(3, 2), dtype=float32)
    """
    callee = callee_of(fun, "nnx.eval_shape")
    call = Call((*callee.bound, *args), kwargs)
    traced = [i for i, leaf in enumerate(call.data) if isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))]

    def pure(cells: Any, arrays: Any, forks: Any) -> Outcome:
        data = with_values(call.data, (traced, arrays))
        return run(callee.fun, call.signature, call.statics, cells, data, forks, "nnx.eval_shape")

    outcome = jax.eval_shape(pure, call.cells(), [call.data[i] for i in traced], call.forks())
    return discard(call, outcome)
