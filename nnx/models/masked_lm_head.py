"""`MaskedLMHead`: the output layer of models that fill in masked tokens."""

from typing import Any, ClassVar, Protocol

import jax
import numpy as np
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.module import Module
from nnx.models.activations_by_name import activation_of
from nnx.nn.embed import Embed
from nnx.nn.initializers import zeros
from nnx.nn.linear import Linear
from nnx.nn.norms.norm import LayerNorm
from nnx.nn.support.parameters import AxisNames, make_param
from nnx.nn.support.settings import as_dtype


class MaskedLMConfig(Protocol):
    """The fields of a config that the head needs."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def features(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def head_activation(self) -> str | None: ...
    @property
    def norm_epsilon(self) -> float: ...


class MaskedLMHead(Module):
    """The head that fills in masked tokens; its last matrix is the embedding, transposed.

    Attributes:
        dense: a `Linear` layer.
        norm: the `LayerNorm` after it.
        bias: the bias of every token.
    """

    logical_axes: ClassVar[AxisNames] = {"dense/kernel": ("embed", None), "dense/bias": (None,), "bias": ("vocab",)}

    config: MaskedLMConfig
    param_dtype: np.dtype
    dense: Linear
    norm: LayerNorm
    bias: jax.Array

    def __init__(
        self,
        config: MaskedLMConfig,
        *,
        use_bias: bool = True,
        use_norm_bias: bool = True,
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        ctx: Context,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ctx": ctx}
        self.config = config
        self.param_dtype = as_dtype(param_dtype)
        self.dense = Linear(config.features, config.features, use_bias=use_bias, **options)
        self.norm = LayerNorm(config.features, epsilon=config.norm_epsilon, use_bias=use_norm_bias, **options)
        self.bias = make_param(self, zeros(), ctx, (config.vocab_size,))

    def __call__(self, x: jax.Array, embed: Embed) -> jax.Array:
        """Returns logits `[batch, length, vocab_size]`."""
        activation = self.config.head_activation or self.config.activation
        x = self.norm(activation_of(activation)(self.dense(x)))
        logits = embed.attend(x)
        return logits + self.bias.astype(logits.dtype)
