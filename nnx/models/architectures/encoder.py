"""What encoders of text and images share: their layer, and the record they return."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.dict_sequence import Sequence
from nnx.core.module.module import Module
from nnx.models.activations_by_name import activation_of
from nnx.nn.attention.attention import MultiHeadAttention
from nnx.nn.mlp import MLP
from nnx.nn.norms.norm import LayerNorm

WRONG_MASK = "{model}: expected a mask of shape [batch, length] = {expected} or with four axes, got {got}."


class EncoderOutput(NamedTuple):
    """What an encoder without a task head returns.

    Attributes:
        last_hidden_state: the features of every token, `[batch, length, features]`; of a `ResNet`, those of every place
            in the image, `[batch, height, width, features]`.
        pooler_output: one vector for the whole input, `[batch, features]`; None if a task does not need it.
    """

    last_hidden_state: jax.Array
    pooler_output: jax.Array | None


class EncoderBlock(Module):
    """One layer of an encoder: attention and MLP, each added to its input and normalized, before or after.

    Args:
        features: the number of features of a token.
        hidden_features: the number of hidden features of the MLP.
        num_heads: the number of heads.
        activation: the activation of the MLP.
        epsilon: the epsilon of the norms.
        post_norm: whether the sums are normalized (as in bert) rather than the inputs of attention and MLP.
        use_qkv_bias: whether the projections of queries, keys and values have biases.
        dtype: the computation dtype; by default, that of input and parameters.
        param_dtype: the dtype in which the parameters are stored.
        ctx: the Context; its stream "params" initializes the parameters.

    Attributes:
        attention: the `MultiHeadAttention`.
        attention_norm: the `LayerNorm` of its input, or of the sum with its output.
        mlp: the `MLP`.
        mlp_norm: the `LayerNorm` of its input, or of the sum with its output.

    >>> block = nnx.models.EncoderBlock(16, 32, 4, activation=nnx.gelu, ctx=nnx.context(0))
    >>> block(jnp.ones((2, 5, 16))).shape
    (2, 5, 16)
    """

    post_norm: bool
    attention: MultiHeadAttention
    attention_norm: LayerNorm
    mlp: MLP
    mlp_norm: LayerNorm

    def __init__(
        self,
        features: int,
        hidden_features: int,
        num_heads: int,
        *,
        activation: Callable[[jax.Array], jax.Array],
        epsilon: float = 1e-6,
        post_norm: bool = False,
        use_qkv_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ctx: Context,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ctx": ctx}
        self.post_norm = post_norm
        self.attention = MultiHeadAttention(num_heads, features, use_bias=use_qkv_bias, use_out_bias=True, **options)
        self.attention_norm = LayerNorm(features, epsilon=epsilon, **options)
        self.mlp = MLP(features, hidden_features, features, activation=activation, **options)
        self.mlp_norm = LayerNorm(features, epsilon=epsilon, **options)

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        lengths: jax.Array | None = None,
        is_causal: bool = False,
    ) -> jax.Array:
        """Applies the layer.

        Args:
            x: an array of shape `[batch, length, features]`.
            mask: an array that is true where a token may see another; broadcasts to `[batch, heads, length, length]`.
            lengths: `[batch]`, the number of real tokens in each row, which come first; the others are hidden.
            is_causal: whether a token sees only itself and those before it.

        Returns:
            An array of the same shape.
        """
        options: dict[str, Any] = {"mask": mask, "seq_lengths": lengths, "is_causal": is_causal}
        if self.post_norm:
            x = self.attention_norm(x + self.attention(x, **options))
            return self.mlp_norm(x + self.mlp(x))
        x = x + self.attention(self.attention_norm(x), **options)
        return x + self.mlp(self.mlp_norm(x))


class LayersConfig(Protocol):
    """The fields that the configs of all encoders have."""

    @property
    def features(self) -> int: ...
    @property
    def hidden_features(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def norm_epsilon(self) -> float: ...


def encoder_blocks(config: LayersConfig, **options: Any) -> Sequence:
    """Returns the layers of an encoder; the options are those of `EncoderBlock` that the config does not have."""
    return Sequence(
        EncoderBlock(
            config.features,
            config.hidden_features,
            config.num_heads,
            activation=activation_of(config.activation),
            epsilon=config.norm_epsilon,
            **options,
        )
        for _ in range(config.num_layers)
    )


def key_mask(model: str, mask: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns a mask of tokens as one of keys, `[batch, heads, query, key]`; a mask with four axes is one already.

    Args:
        model: the name of the model, for errors.
        mask: the mask.
        tokens: the tokens, `[batch, length]`.
    """
    if mask.ndim == 4:
        return mask
    if mask.shape != tokens.shape:
        raise ValueError(WRONG_MASK.format(model=model, expected=tokens.shape, got=mask.shape))
    return mask[:, None, None, :]
