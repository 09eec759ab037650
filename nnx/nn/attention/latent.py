"""Multi-head latent attention: keys and values of all heads are projections of one small vector per token.

That vector, the *latent*, is what a cache keeps: of DeepSeek-V3, 576 numbers per token and layer in place of 32,768.
There are two ways to attend, with equal results. *Expanded*, the latents are projected to the keys and values of every
head, which is cheap per query if there are many, as in training. *Absorbed*, the queries are multiplied by that
projection instead, and attend to the latents directly, so that a token written by a decoder reads nothing but them.

A part of each query and key does not come from the latent: it rotates with the position, and its key is shared by all
heads.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.module import Module
from nnx.nn.attention.attention_kernel import attention_implementation
from nnx.nn.attention.dot_product import dot_product_attention
from nnx.nn.attention.kv_cache import LayerCache, causal_options, next_positions
from nnx.nn.attention.rotary import RotaryEmbedding, rotate_pair
from nnx.nn.linear import Linear, LinearGeneral
from nnx.nn.norms.norm import RMSNorm
from nnx.nn.quantized.quantized import to_weight, weight_dtype
from nnx.nn.support.activation_names import named
from nnx.nn.support.checks import check_sizes, shape_of
from nnx.nn.support.parameters import AxisNames, InitializerLike, default_kernel_init
from nnx.nn.support.settings import as_dtype, as_optional_dtype, cast, infer_dtype, statistics_dtype

WRONG_INPUT = "LatentAttention: expected inputs of shape [batch..., length, {features}], got {got}."
NO_ROTARY = (
    "LatentAttention: expected rotary=nnx.RotaryEmbedding(n), where n is the number of features of a head that rotate "
    "in addition to head_dim={head_dim}, got {got}."
)


class LatentAttention(Module):
    """Causal or full attention of a sequence to itself, with keys and values that are projected from one latent.

    Args:
        num_heads: the number of heads.
        in_features: the number of features of the input.
        kv_rank: the number of features of the latent of keys and values.
        rotary: the embedding of the part of each head that rotates; its `head_dim` is the size of that part.
        head_dim: the number of features of a query or key that do not rotate.
        value_dim: the number of features of a value; `head_dim` by default.
        query_rank: the number of features of a latent from which the queries are projected; by default, they are
            projected from the input.
        out_features: the number of features of the output; `in_features` by default.
        use_bias: whether the projections to latents and the output projection have biases.
        epsilon: the epsilon of the norms of the latents.
        scale: the scale of the attention logits; `1 / sqrt(head_dim + rotary.head_dim)` by default.
        dtype: the computation dtype; by default, the dtype that inputs and parameters promote to.
        param_dtype: the dtype in which the parameters are stored.
        kernel_init: the initializer of the projections.
        ctx: the Context; its stream "params" initializes the parameters.

    Attributes:
        query_down, query_norm: the `Linear` to the latent of queries and its norm; None without `query_rank`.
        query: a `LinearGeneral` to `[heads, head_dim + rotary.head_dim]`.
        kv_down: a `Linear` to `kv_rank + rotary.head_dim` features: the latent, and the key that rotates.
        kv_norm: the norm of the latent.
        kv_up: a `LinearGeneral` from the latent to `[heads, head_dim + value_dim]`.
        out: a `LinearGeneral` with a kernel `[heads, value_dim, out_features]`.

    >>> layer = nnx.LatentAttention(4, 16, kv_rank=8, head_dim=6, rotary=nnx.RotaryEmbedding(2), ctx=nnx.context(0))
    >>> x = jnp.ones((2, 5, 16))  # batch, length, features
    >>> full = layer(x, is_causal=True)
    >>> cache = layer.make_cache(2, max_length=8)
    >>> cache.value.shape, cache.key.shape  # the latents, and the keys that rotate
    ((2, 8, 1, 8), (2, 8, 1, 2))
    >>> first, cache = layer.decode_step(x[:, :4], cache, jnp.array([0, 0]))
    >>> last, cache = layer.decode_step(x[:, 4:], cache, jnp.array([4, 4]))
    >>> bool(jnp.allclose(jnp.concatenate([first, last], axis=1), full, atol=1e-5))
    True
    """

    logical_axes: ClassVar[AxisNames] = {
        **dict.fromkeys(("query_down/kernel", "kv_down/kernel"), ("embed", None)),
        **dict.fromkeys(("query/kernel", "kv_up/kernel"), ("embed", "heads", "head_dim")),
        "out/kernel": ("heads", "head_dim", "embed"),
        "out/bias": ("embed",),
    }

    num_heads: int
    in_features: int
    out_features: int
    kv_rank: int
    head_dim: int
    value_dim: int
    scale: float
    dtype: np.dtype | None
    param_dtype: np.dtype
    rotary: RotaryEmbedding
    query_down: Linear | None
    query_norm: RMSNorm | None
    query: LinearGeneral
    kv_down: Linear
    kv_norm: RMSNorm
    kv_up: LinearGeneral
    out: LinearGeneral

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        kv_rank: int,
        rotary: RotaryEmbedding,
        head_dim: int,
        value_dim: int | None = None,
        query_rank: int | None = None,
        out_features: int | None = None,
        use_bias: bool = False,
        epsilon: float = 1e-6,
        scale: float | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: InitializerLike = default_kernel_init,
        ctx: Context,
    ) -> None:
        check_sizes(self, num_heads=num_heads, in_features=in_features, kv_rank=kv_rank, head_dim=head_dim)
        if not isinstance(rotary, RotaryEmbedding):
            raise TypeError(NO_ROTARY.format(head_dim=head_dim, got=rotary))
        value_dim = head_dim if value_dim is None else value_dim
        out_features = in_features if out_features is None else out_features
        self.num_heads, self.in_features, self.out_features = num_heads, in_features, out_features
        self.kv_rank, self.head_dim, self.value_dim = kv_rank, head_dim, value_dim
        self.scale = (head_dim + rotary.head_dim) ** -0.5 if scale is None else float(scale)
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.rotary = rotary

        norm: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ctx": ctx}
        plain: dict[str, Any] = {**norm, "kernel_init": kernel_init, "use_bias": False}
        if query_rank is None:
            self.query_down = self.query_norm = None
        else:
            self.query_down = Linear(in_features, query_rank, **{**plain, "use_bias": use_bias})
            self.query_norm = RMSNorm(query_rank, epsilon=epsilon, **norm)
        whole = head_dim + rotary.head_dim
        self.query = LinearGeneral(in_features if query_rank is None else query_rank, (num_heads, whole), **plain)
        self.kv_down = Linear(in_features, kv_rank + rotary.head_dim, **{**plain, "use_bias": use_bias})
        self.kv_norm = RMSNorm(kv_rank, epsilon=epsilon, **norm)
        self.kv_up = LinearGeneral(kv_rank, (num_heads, head_dim + value_dim), **plain)
        out = {**plain, "use_bias": use_bias}
        self.out = LinearGeneral((num_heads, value_dim), out_features, axis=(-2, -1), **out)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        mask: jax.Array | None = None,
        is_causal: bool = False,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Attends from every token to all tokens, or to those before it.

        Args:
            inputs: `[batch..., length, in_features]`.
            mask: an array that is true where a token may see another; broadcasts to `[batch..., heads, length,
                length]`.
            is_causal: whether a token sees only itself and those before it.
            positions: the positions of the tokens, `[batch..., length]` or `[length]`; 0, 1, 2 … by default.

        Returns:
            An array of shape `[batch..., length, out_features]`.
        """
        query, turned, latent, key = self._projected(inputs, positions)
        return self._expanded(query, turned, latent, key, {"mask": mask, "is_causal": is_causal})

    def make_cache(
        self, batch_shape: int | tuple[int, ...], max_length: int, dtype: DTypeLike = jnp.float32
    ) -> LayerCache:
        """Returns an empty cache for `decode_step`: its values are the latents, its keys the ones that rotate."""
        return LayerCache.empty(batch_shape, max_length, 1, self.rotary.head_dim, self.kv_rank, dtype=dtype)

    def decode_step(
        self, inputs: jax.Array, cache: LayerCache, lengths: jax.Array, seq_lengths: jax.Array | None = None
    ) -> tuple[jax.Array, LayerCache]:
        """Appends tokens to a cache that the caller owns, and attends causally to all tokens so far.

        Args:
            inputs: `[batch..., length, in_features]`, the next tokens.
            cache: the cache, see `make_cache`.
            lengths: `[batch...]`, the number of tokens each row holds before this call.
            seq_lengths: `[batch...]`, the number of real tokens in each row, which come first; others are not written.

        Returns:
            An array of shape `[batch..., length, out_features]`, and the cache with the tokens appended.
        """
        positions = next_positions(lengths, shape_of(self, inputs)[-2])
        query, turned, latent, key = self._projected(inputs, positions, cache.max_length)
        cache = cache.append(key, latent, lengths, seq_lengths)
        # A token sees at least its own slot.
        options = {**causal_options(positions, cache.max_length, None), "assume_seen": True}
        latent, key = (cast(held, query.dtype) for held in (cache.value, cache.key))
        attend = self._absorbed if self._is_cheaper_absorbed(inputs.shape[-2]) else self._expanded
        return attend(query, turned, latent, key, options), cache

    def _projected(
        self, inputs: jax.Array, positions: jax.Array | None, text_length: int | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns queries in two parts, the second of which rotated, latents, and the keys that rotated.

        Their shapes are `[batch..., length, heads or 1, features]`.
        """
        shape = shape_of(self, inputs)
        if len(shape) < 2 or shape[-1] != self.in_features:
            raise ValueError(WRONG_INPUT.format(features=self.in_features, got=shape))
        narrow = inputs
        if self.query_down is not None and self.query_norm is not None:
            narrow = self.query_norm(self.query_down(inputs))
        query, turned = jnp.split(self.query(narrow), [self.head_dim], axis=-1)
        latent, key = jnp.split(self.kv_down(inputs)[..., None, :], [self.kv_rank], axis=-1)
        turned, key = rotate_pair(self.rotary, turned, key, positions, positions, text_length)
        return query, turned, self.kv_norm(latent), key

    def _is_cheaper_absorbed(self, length: int) -> bool:
        """Returns whether so many queries of a row attend with fewer operations absorbed than expanded.

        Per head and token of the past, absorbed queries meet a wider key and value, once each; expanded, the token is
        projected first, once for all of them.
        """
        if type(self.kv_up) is not LinearGeneral:  # a low-rank adaptation is not one matrix
            return False
        narrow, wide = self.head_dim + self.value_dim, 2 * self.kv_rank
        return length * (wide - narrow) < self.kv_rank * narrow

    def _expanded(
        self, query: jax.Array, turned: jax.Array, latent: jax.Array, key: jax.Array, options: dict[str, Any]
    ) -> jax.Array:
        up = self.kv_up(latent[..., 0, :])
        key = jnp.broadcast_to(key, (*up.shape[:-1], key.shape[-1]))
        query = jnp.concatenate((query, turned), -1)
        key = jnp.concatenate((up[..., : self.head_dim], cast(key, up.dtype)), -1)
        value = up[..., self.head_dim :]
        missing = key.shape[-1] - value.shape[-1]
        if missing > 0:
            # Fused kernels take keys and values of one width. Zeros cost less than the weights in memory.
            wide = jnp.pad(value, [(0, 0)] * (value.ndim - 1) + [(0, missing)])
            shown = {"mask": options.get("mask"), "is_causal": options.get("is_causal", False)}
            value = value if attention_implementation(query, key, wide, **shown) == "xla" else wide
        attended = dot_product_attention(query, key, value, scale=self.scale, dtype=self.dtype, **options)
        return self._output(attended[..., : self.value_dim])

    def _absorbed(
        self, query: jax.Array, turned: jax.Array, latent: jax.Array, key: jax.Array, options: dict[str, Any]
    ) -> jax.Array:
        kernel, scale = self.kv_up.kernel, self.kv_up.kernel_scale
        if scale is not None:
            kernel = to_weight(kernel, scale, (0,), weight_dtype(scale, self.param_dtype))
        kernel = cast(kernel, infer_dtype((query, kernel), self.dtype))  # [rank, heads, head_dim + value_dim]
        wide = jnp.einsum("...lhd,rhd->...lhr", query, kernel[..., : self.head_dim])
        # The part that rotated adds its logits; concatenating the two would copy the cache.
        bias = jnp.einsum(
            "...lhd,...sd->...hls", turned, key[..., 0, :], preferred_element_type=statistics_dtype(key.dtype)
        )
        attended = dot_product_attention(
            wide, latent, latent, bias * self.scale, scale=self.scale, dtype=self.dtype, **options
        )
        return self._output(jnp.einsum("...lhr,rhv->...lhv", attended, kernel[..., self.head_dim :]))

    def _output(self, attended: jax.Array) -> jax.Array:
        return named(self.out(named(attended, "attention")), "attention_out")
