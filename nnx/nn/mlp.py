"""Plain compositions: `MLP`, and `Identity` as the layer that is not there."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from nnx.core.containers import Sequence as Layers
from nnx.core.context import Context
from nnx.core.module import Module
from nnx.nn.activations import relu
from nnx.nn.checks import check_last_axis
from nnx.nn.initial_values import InitializerLike, default_bias_init, default_kernel_init
from nnx.nn.linear import Linear
from nnx.nn.stochastic import Dropout

T = TypeVar("T")


class Identity(Module):
    """Returns its input; call options meant for the layer it stands for are ignored.

    >>> import nnx
    >>> nnx.Identity()(3, deterministic=True)
    3
    """

    def __call__(self, x: T, **_: Any) -> T:
        return x


class MLP(Module):
    """Linear layers with an activation between them; shape `(..., in_features) -> (..., out_features)`.

    Args:
        in_features: size of the input's last axis.
        hidden_features: sizes of the hidden layers; an int for one hidden layer, `()` for none.
        out_features: size of the output's last axis.
        activation: applied after every hidden layer.
        activate_final: whether to apply activation and dropout after the last layer as well.
        dropout_rate: of the dropout after each activation; with the default, 0, no mode and no Context are needed.
        use_bias: whether the layers add biases.
        dtype: of the computation; by default that of input and parameters.
        param_dtype: in which the parameters are stored.
        precision: of the products, see `jax.lax.Precision`.
        kernel_init: initialiser of the kernels.
        bias_init: initialiser of the biases.
        ctx: draws the parameters from its stream "params".

    >>> import nnx, jax.numpy as jnp
    >>> model = nnx.MLP(3, (16, 16), 2, activation=nnx.gelu, ctx=nnx.context(0))
    >>> model(jnp.ones((5, 3))).shape
    (5, 2)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | Sequence[int],
        out_features: int,
        *,
        activation: Callable[[Array], Array] = relu,
        activate_final: bool = False,
        dropout_rate: float = 0.0,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: InitializerLike = default_kernel_init,
        bias_init: InitializerLike = default_bias_init,
        ctx: Context,
    ):
        hidden = (hidden_features,) if isinstance(hidden_features, int) else tuple(hidden_features)
        sizes = (in_features, *hidden, out_features)
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
    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        axes = {}
        for i in range(len(self.layers)):
            before, after = ("embed", "mlp") if i % 2 == 0 else ("mlp", "embed")
            axes |= {f"layers/{i}/kernel": (before, after), f"layers/{i}/bias": (after,)}
        return axes

    def __call__(self, x: Array, *, deterministic: bool | None = None, ctx: Context | None = None) -> Array:
        check_last_axis(self, x, self.in_features, "in_features")
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if self.activate_final or i + 1 < len(self.layers):
                x = self.activation(x)
                x = self.dropout(x, deterministic=deterministic, ctx=ctx)
        return x
