"""Plain compositions: `MLP`, `GatedMLP`, and `Identity` as a placeholder for a layer."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.dict_sequence import Sequence as Layers
from nnx.core.module.module import Module
from nnx.core.repr import short
from nnx.nn.activations import relu, silu
from nnx.nn.linear import Linear
from nnx.nn.stochastic import Dropout
from nnx.nn.support.activation_names import named
from nnx.nn.support.checks import as_tuple, check_last_axis, check_sizes
from nnx.nn.support.parameters import AxisNames, InitializerLike, default_bias_init, default_kernel_init

T = TypeVar("T")

GatedActivation = Callable[[jax.Array, jax.Array], jax.Array]
"""A function of gates and values, which have the same shape."""

TWO_ACTIVATIONS = (
    "{layer}: `gated_activation` replaces `activation`, but activation={activation} was given as well. Apply it inside "
    "the gated_activation, or drop one of the two."
)


class Identity(Module):
    """Returns its input; call options meant for the layer it replaces are ignored.

    >>> nnx.Identity()(3, deterministic=True)
    3
    """

    def __call__(self, x: T, **_: Any) -> T:
        """Returns `x`."""
        return x


class MLP(Module):
    """Linear layers with an activation between them; shape `(..., in_features) -> (..., out_features)`.

    Args:
        in_features: the size of the input's last axis.
        hidden_features: the sizes of the hidden layers; an int for one hidden layer, `()` for none.
        out_features: the size of the output's last axis.
        activation: the activation after every hidden layer.
        activate_final: whether to apply activation and dropout after the last layer as well.
        dropout_rate: the rate of the dropout after each activation; 0, the default, needs neither mode nor Context.
        use_bias: whether the layers add biases.
        dtype: the computation dtype; by default, the dtype that input and parameters promote to.
        param_dtype: the dtype in which the parameters are stored.
        precision: the precision of the products, see `jax.lax.Precision`.
        kernel_init: the initializer of the kernels.
        bias_init: the initializer of the biases.
        ctx: the Context; its stream "params" initializes the parameters.

    >>> model = nnx.MLP(3, (16, 16), 2, activation=nnx.gelu, ctx=nnx.context(0))
    >>> model(jnp.ones((5, 3))).shape
    (5, 2)
    """

    in_features: int
    out_features: int
    activation: Callable[[jax.Array], jax.Array]
    activate_final: bool
    layers: Layers
    dropout: Dropout

    def __init__(
        self,
        in_features: int,
        hidden_features: int | Sequence[int],
        out_features: int,
        *,
        activation: Callable[[jax.Array], jax.Array] = relu,
        activate_final: bool = False,
        dropout_rate: float = 0.0,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: InitializerLike = default_kernel_init,
        bias_init: InitializerLike = default_bias_init,
        ctx: Context,
    ) -> None:
        check_sizes(self, in_features=in_features, hidden_features=hidden_features, out_features=out_features)
        sizes = (in_features, *as_tuple(hidden_features), out_features)
        self.in_features = in_features
        self.out_features = out_features
        self.activation = activation
        self.activate_final = activate_final
        self.layers = Layers(
            Linear(
                sizes[i],
                sizes[i + 1],
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                precision=precision,
                kernel_init=kernel_init,
                bias_init=bias_init,
                ctx=ctx,
            )
            for i in range(len(sizes) - 1)
        )
        self.dropout = Dropout(dropout_rate)

    @property
    def logical_axes(self) -> AxisNames:
        """The default names of the parameters' axes, "embed" and "mlp" in turn."""
        axes: dict[str, tuple[str | None, ...]] = {}
        for i in range(len(self.layers)):
            before, after = ("embed", "mlp") if i % 2 == 0 else ("mlp", "embed")
            axes |= {f"layers/{i}/kernel": (before, after), f"layers/{i}/bias": (after,)}
        return axes

    def __call__(self, x: jax.Array, *, deterministic: bool | None = None, ctx: Context | None = None) -> jax.Array:
        """Applies the layers.

        Args:
            x: an array of shape `(..., in_features)`.
            deterministic: the mode of the dropout; overrides the instance's and the Context's.
            ctx: the Context; needed only for dropout.

        Returns:
            An array of shape `(..., out_features)`.
        """
        check_last_axis(self, x, self.in_features, "in_features")
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            x = named(layer(x), "mlp_hidden" if i < last else "mlp_out")
            if self.activate_final or i < last:
                x = self.activation(x)
                x = self.dropout(x, deterministic=deterministic, ctx=ctx)
        return x


class GatedMLP(Module):
    """A gated feed-forward layer: `down(activation(gate(x)) * up(x))`, or `down(gated_activation(gate(x), up(x)))`.

    With the default activation it is SwiGLU; with `nnx.gelu` GeGLU; with `nnx.sigmoid` the original GLU.

    Args:
        in_features: the size of the input's last axis.
        hidden_features: the number of hidden features.
        out_features: the size of the output's last axis; `in_features` by default.
        activation: the activation of the gate.
        gated_activation: a function of gates and values, in place of `activation(gate) * up`.
        use_bias: whether the three layers add biases.
        dtype: the computation dtype; by default, the dtype that input and parameters promote to.
        param_dtype: the dtype in which the parameters are stored.
        precision: the precision of the products, see `jax.lax.Precision`.
        kernel_init: the initializer of the kernels.
        bias_init: the initializer of the biases.
        ctx: the Context; its stream "params" initializes the parameters.

    Attributes:
        gate, up: the `Linear`s from the input to the hidden features.
        down: the `Linear` from the hidden features to the output.

    >>> layer = nnx.GatedMLP(4, 16, ctx=nnx.context(0))
    >>> layer(jnp.ones((5, 4))).shape
    (5, 4)
    """

    logical_axes: ClassVar[AxisNames] = {
        **dict.fromkeys(("gate/kernel", "up/kernel"), ("embed", "mlp")),
        **dict.fromkeys(("gate/bias", "up/bias"), ("mlp",)),
        "down/kernel": ("mlp", "embed"),
        "down/bias": ("embed",),
    }

    in_features: int
    hidden_features: int
    out_features: int
    activation: Callable[[jax.Array], jax.Array]
    gated_activation: GatedActivation | None
    gate: Linear
    up: Linear
    down: Linear

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Callable[[jax.Array], jax.Array] = silu,
        gated_activation: GatedActivation | None = None,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: InitializerLike = default_kernel_init,
        bias_init: InitializerLike = default_bias_init,
        ctx: Context,
    ) -> None:
        check_sizes(self, in_features=in_features, hidden_features=hidden_features)
        check_activations("GatedMLP", activation, gated_activation)
        out_features = in_features if out_features is None else out_features

        def linear(features_in: int, features_out: int) -> Linear:
            return Linear(
                features_in,
                features_out,
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                precision=precision,
                kernel_init=kernel_init,
                bias_init=bias_init,
                ctx=ctx,
            )

        self.in_features = in_features
        self.hidden_features = hidden_features
        self.out_features = out_features
        self.activation = activation
        self.gated_activation = gated_activation
        self.gate = linear(in_features, hidden_features)
        self.up = linear(in_features, hidden_features)
        self.down = linear(hidden_features, out_features)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to an array of shape `(..., in_features)`."""
        check_last_axis(self, x, self.in_features, "in_features")
        gate, up = named(self.gate(x), "mlp_hidden"), named(self.up(x), "mlp_hidden")
        hidden = self.activation(gate) * up if self.gated_activation is None else self.gated_activation(gate, up)
        return named(self.down(hidden), "mlp_out")


def check_activations(layer: str, activation: Any, gated_activation: GatedActivation | None) -> None:
    """Raises `ValueError` if a gated layer was given both kinds of activation, of which it would use only one."""
    if gated_activation is not None and activation is not silu:
        raise ValueError(TWO_ACTIVATIONS.format(layer=layer, activation=short(activation)))
