"""DynamicScale: loss scaling, so that the small gradients of a float16 model do not round to zero."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from nnx.core.module.module import Module
from nnx.core.repr import short
from nnx.core.state.filters import Filter
from nnx.core.state.state import State
from nnx.core.variables.variables import Param
from nnx.training.optimizer_state import OptState
from nnx.transforms.derivatives.grad import value_and_grad
from nnx.transforms.engine.call import callee_of

P = ParamSpec("P")
R = TypeVar("R")

BAD_SETTING = "nnx.DynamicScale: expected {expected}, got {name}={got}."
NOT_GRADIENTS = "DynamicScale.unscale takes the gradients as a State, as nnx.grad(f)(model) returns them; got {got}."


class DynamicScale(Module):
    """Scales a loss up and its gradients back down, by a factor that adapts while the model trains.

    The smallest float16 number is 6e-8, and gradients below it are lost. Multiplying the loss by a large factor moves
    them into range. If the factor is too large, gradients overflow: that step is skipped and the factor is halved.
    After `growth_interval` finite steps in a row, it is doubled.

    Use it with `nnx.Optimizer(..., skip_nonfinite=True)`, which skips the update if a gradient is not finite. Keep the
    parameters in float32 (`dtype=jnp.float16`, not `param_dtype`). bfloat16 has the range of float32 and needs none of
    this. Factors are powers of two by default, so scaling rounds nothing.

    Args:
        scale: the initial factor.
        growth_interval: the number of finite steps in a row after which the factor grows.
        growth_factor: what it is then multiplied by.
        backoff_factor: what it is multiplied by after a step that is not finite.
        min_scale, max_scale: the bounds of the factor.

    Attributes:
        scale: the factor, a float32 scalar in an `OptState` Variable, so it is saved with the rest of a run.
        finite_steps: the number of finite steps since the factor last changed.

    Raises:
        ValueError: a setting is out of range.

    >>> import optax
    >>> model = nnx.Linear(2, 3, dtype=jnp.float16, ctx=nnx.context(0))
    >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), skip_nonfinite=True)
    >>> scale = nnx.DynamicScale()
    >>> @nnx.jit
    ... def train_step(optimizer, scale, x):
    ...     loss, grads = scale.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(optimizer.model)
    ...     optimizer.update(grads)
    ...     return loss
    >>> loss = train_step(optimizer, scale, jnp.ones((4, 2)))
    >>> float(scale.scale), int(scale.finite_steps), int(optimizer.step)
    (32768.0, 1, 1)
    """

    growth_interval: int
    growth_factor: float
    backoff_factor: float
    min_scale: float
    max_scale: float
    scale: jax.Array
    finite_steps: jax.Array

    def __init__(
        self,
        scale: float = 2.0**15,
        *,
        growth_interval: int = 2000,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
    ):
        for is_valid, expected, name, got in (
            (0 < min_scale <= scale <= max_scale, "0 < min_scale <= scale <= max_scale", "scale", scale),
            (growth_interval >= 1, "at least 1 step", "growth_interval", growth_interval),
            (growth_factor > 1, "a factor above 1", "growth_factor", growth_factor),
            (0 < backoff_factor < 1, "a factor between 0 and 1", "backoff_factor", backoff_factor),
        ):
            if not is_valid:
                raise ValueError(BAD_SETTING.format(expected=expected, name=name, got=got))
        self.growth_interval = growth_interval
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.min_scale = min_scale
        self.max_scale = max_scale
        self.scale = OptState(jnp.float32(scale))
        self.finite_steps = OptState(jnp.int32(0))

    def value_and_grad(
        self, fun: Callable[P, R], wrt: Filter = Param, *, has_aux: bool = False
    ) -> Callable[P, tuple[R, State]]:
        """Like `nnx.value_and_grad`, computed with a scaled loss; the factor is adjusted in place.

        Args:
            fun: the loss, a function of a Module and anything else. It should return float32.
            wrt: a filter that selects the Variables to differentiate.
            has_aux: whether the function returns `(loss, aux)`.

        Returns:
            A function that returns `(value, gradient)`, both unscaled. If the gradient overflowed, some of it is not
            finite.
        """
        callee = callee_of(fun, "DynamicScale.value_and_grad")

        def differentiated(*args: Any, **kwargs: Any) -> Any:
            scale = self.scale

            def scaled(*args: Any, **kwargs: Any) -> Any:
                out: Any = callee.fun(*args, **kwargs)
                loss = jnp.asarray(out[0] if has_aux else out)
                return loss.astype(jnp.promote_types(loss.dtype, jnp.float32)) * scale, out

            (_, out), grads = value_and_grad(scaled, wrt, has_aux=True)(*callee.bound, *args, **kwargs)
            return out, self.unscale(grads)

        return differentiated

    def unscale(self, grads: State) -> State:
        """Divides gradients by the factor, then adjusts it in place; for loops that multiply the loss themselves.

        Args:
            grads: the gradients of `loss * scale.scale`.

        Returns:
            The gradients of the loss, in at least float32.

        Raises:
            TypeError: `grads` is not a State.
        """
        if not isinstance(grads, State):
            raise TypeError(NOT_GRADIENTS.format(got=short(grads)))
        unscaled = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)) / self.scale, grads)
        self._adjust(jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(unscaled)])))
        return unscaled

    def _adjust(self, finite: jax.Array) -> None:
        steps = self.finite_steps + 1
        grows = steps >= self.growth_interval
        grown = jnp.where(grows, jnp.minimum(self.scale * self.growth_factor, self.max_scale), self.scale)
        shrunk = jnp.maximum(self.scale * self.backoff_factor, self.min_scale)
        self.scale = jnp.where(finite, grown, shrunk)
        self.finite_steps = jnp.where(finite & ~grows, steps, 0)
