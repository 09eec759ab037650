"""The activations of published models, by the names their configs use."""

from collections.abc import Callable

import jax

from nnx.nn.activations import gelu, relu, sigmoid, silu

UNKNOWN_ACTIVATION = "The activation {got!r} is not among the known ones: {known}."


def exact_gelu(x: jax.Array) -> jax.Array:
    """The Gaussian error linear unit, computed with the error function rather than its approximation by tanh."""
    return gelu(x, approximate=False)


def quick_gelu(x: jax.Array) -> jax.Array:
    """The approximation `x * sigmoid(1.702 x)` of the Gaussian error linear unit."""
    return x * sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": silu,
    "swish": silu,
    "relu": relu,
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
