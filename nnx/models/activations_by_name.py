"""The activations of published models, by the names their configs use."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from nnx.nn.activations import gelu, relu, sigmoid, silu

UNKNOWN_ACTIVATION = "The activation {got!r} is not among the known ones: {known}."


def exact_gelu(x: jax.Array) -> jax.Array:
    """The Gaussian error linear unit, computed with the error function rather than its approximation by tanh."""
    return gelu(x, approximate=False)


def quick_gelu(x: jax.Array) -> jax.Array:
    """The approximation `x * sigmoid(1.702 x)` of the Gaussian error linear unit."""
    return x * sigmoid(1.702 * x)


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """The gated activation of gpt_oss: `(value + 1) * gate * sigmoid(alpha * gate)`, with both of them bounded.

    Args:
        limit: the largest gate, and the largest magnitude of a value.
        alpha: the slope of the sigmoid.
    """

    limit: float = 7.0
    alpha: float = 1.702

    def __call__(self, gate: jax.Array, value: jax.Array) -> jax.Array:
        """Returns the hidden features."""
        gate, value = jnp.minimum(gate, self.limit), jnp.clip(value, -self.limit, self.limit)
        return (value + 1) * gate * sigmoid(self.alpha * gate)


def squared_relu(x: jax.Array) -> jax.Array:
    """The square of the rectified linear unit."""
    return jnp.square(relu(x))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": silu,
    "swish": silu,
    "relu": relu,
    "relu2": squared_relu,
    "gelu": exact_gelu,
    "gelu_new": gelu,
    "gelu_pytorch_tanh": gelu,
    "gelu_fast": gelu,
    "quick_gelu": quick_gelu,
}
"""The known activations by name."""


def activation_of(name: str) -> Callable[[jax.Array], jax.Array]:
    """Returns an activation by the name that `config.json` uses."""
    if name not in ACTIVATIONS:
        raise ValueError(UNKNOWN_ACTIVATION.format(got=name, known=", ".join(ACTIVATIONS)))
    return ACTIVATIONS[name]
