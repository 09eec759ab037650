"""`find_nans`: the first submodule whose output is not finite."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.module.info import info_of
from nnx.core.trace import same_level
from nnx.inspection.observing import ObservedCall
from nnx.transforms.engine.annotations import P
from nnx.transforms.engine.decorators import named_after
from nnx.transforms.engine.observed import Observer, add_observation
from nnx.transforms.engine.tracebacks import boundary


class NotFinite(NamedTuple):
    """A call of a submodule whose output holds a NaN or an infinity.

    Attributes:
        path: the path of the submodule; `""` is the model itself.
        kind: the name of its class.
        call: which of its calls, counted from 0.
        index: in which steps of the surrounding `nnx.scan`s and `nnx.vmap`s, outermost first.
        inputs_are_finite: whether its arguments were finite. If not, the cause is outside every submodule.
    """

    path: str
    kind: str
    call: int
    index: tuple[int, ...]
    inputs_are_finite: bool

    def __str__(self) -> str:
        place = f"{self.path!r} ({self.kind})" + (f" in call {self.call}" if self.call else "")
        place += f" at step {', '.join(map(str, self.index))}" if self.index else ""
        inputs = "finite" if self.inputs_are_finite else "not finite either"
        return f"The output of {place} is not finite; its inputs are {inputs}."


class _Checker(Observer):
    """Records whether the inputs and outputs of a Module are finite, and when it returned, counted in calls traced."""

    __slots__ = ()

    def __init__(self, path: str, methods: tuple[str, ...], clock: Iterator[int]):
        # The clock is the key. A run shares nothing that was compiled with earlier ones, so all times are its own.
        super().__init__("nnx.find_nans", path, methods, clock)

    def run(self, module: Any, position: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = _is_finite((args, kwargs))
        out = call(*args, **kwargs)
        if same_level(info_of(module).level):
            add_observation(module, position, (before, _is_finite(out), jnp.asarray(next(self.key))))
        return out

    def skips(self) -> bool:
        return True


def find_nans(fun: Callable[P, Any]) -> Callable[P, NotFinite | None]:
    """Returns a function that finds the first submodule whose output is not finite.

    "First" is the first to return of those whose inputs were finite: where the trouble starts, and not the Modules that
    it goes through later. The function runs once and leaves its Modules as they are. What runs inside `nnx.jit` and
    other transforms is traced again every time, so this is for looking for an error, not for training. Modules that run
    inside loops, branches and raw JAX transforms are not checked; those around them are.

    Args:
        fun: a function of Modules, a Module, or a bound method of one. Only Modules among the arguments are seen.

    Returns:
        A function with the arguments of `fun`. It returns None if all outputs are finite, else a record with
        the `path` of the submodule, its class as `kind`, the number of the `call`, the `index` in surrounding scans
        and vmaps, and `inputs_are_finite`; printed, it is a sentence.

    >>> model = nnx.Sequence([nnx.Linear(2, 2, ctx=nnx.context(0)), nnx.Linear(2, 2, ctx=nnx.context(1))])
    >>> model[1].kernel = model[1].kernel.at[0, 0].set(jnp.inf)
    >>> print(nnx.find_nans(model)(jnp.ones(2)))
    The output of '1' (Linear) is not finite; its inputs are finite.
    """

    @boundary
    def lifted(*args: Any, **kwargs: Any) -> NotFinite | None:
        observed = ObservedCall("nnx.find_nans", fun, ..., (), args, kwargs)
        clock = itertools.count()
        _, observations = observed.run(lambda path, methods: _Checker(path, methods, clock))
        found = []
        for number, path in observed.selected.items():
            kind = observed.kind(number)
            for call, observation in enumerate(observations[path]):
                before, after, time = jax.tree.map(np.asarray, observation.value)
                for is_start in (before & ~after, ~after):
                    if is_start.any():
                        index = tuple(int(i) for i in np.argwhere(is_start)[0])
                        inputs_are_finite = bool(before[index])
                        trouble = NotFinite(path, kind, call, index, inputs_are_finite)
                        found.append((not inputs_are_finite, int(time.min()), trouble))
                        break
        return min(found)[-1] if found else None

    return named_after(lifted, fun)


def _is_finite(value: Any) -> jax.Array:
    """Whether all floating-point numbers among the leaves of a value are finite."""
    checks = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(value) if _is_number(leaf)]
    return jnp.all(jnp.stack(checks)) if checks else jnp.array(True)


def _is_number(leaf: Any) -> bool:
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic))
    return isinstance(leaf, float) or (is_array and jnp.issubdtype(leaf.dtype, jnp.inexact))
