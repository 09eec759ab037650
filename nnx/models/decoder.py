"""`Decoder`: every decoder-only language model of `nnx.models`, made from public layers.

A *block* is one layer: a mixer of tokens (`mixers`) and an MLP, each with its norm, added to its input. Blocks are in a
list, or *scanned*: then the blocks of one *period*, the repeating pattern of layers, form one Module whose parameters
are stacked, and `nnx.scan` runs it over the stack. The layers before the first period are the *lead*, those left over
after the last whole one the *tail*; both are lists. Scanning over periods rather than layers keeps every window and
rotary base a static value, so fused attention kernels apply.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.dict_sequence import Sequence
from nnx.core.module.module import Module
from nnx.core.variables.variables import Variable
from nnx.models.block import DecoderBlock, Period, constrained, run_block
from nnx.models.config import DecoderConfig
from nnx.models.inputs.tokens import check_tokens, too_long, without_negatives
from nnx.models.layer_spec import LayerSpec
from nnx.models.masked_lm_head import MaskedLMHead
from nnx.models.mixers.norms import make_norm
from nnx.nn.attention.kv_cache import DecoderCache
from nnx.nn.attention.rotary_scaling import DynamicNTKScaling, LongRoPEScaling
from nnx.nn.embed import Embed, LearnedPositionEmbed
from nnx.nn.linear import Linear
from nnx.nn.norms.norm import LayerNorm, RMSNorm
from nnx.nn.quantized.quantized import to_weight, weight_dtype
from nnx.nn.support.parameters import AxisNames
from nnx.nn.support.settings import as_dtype, as_optional_dtype, cast
from nnx.sharding.axes import PARTITION_NAME, DefaultAxes
from nnx.transforms.control.class_forms import Scan
from nnx.transforms.control.scan import scan

LAYERS_AXIS = "layers"
"""The logical name of the axis along which a scanned decoder stacks its layers."""

NO_LAYER_CACHE = "Decoder.decode: expected a cache with {expected} layers (see init_cache), got one with {got}."
NO_HEAD = (
    "Decoder: this model has no output layer (config.head is 'none'), so it has no logits and writes no text. "
    "`model.features(tokens)` are the hidden states of its tokens."
)
NO_LABELS = "Decoder.classify: this model has no labels (config.head is {head!r}); `model(tokens)` are its logits."
ADAPTED_HEAD = (
    "Decoder.head_kernel: the output layer is a {got}, which is more than one matrix. Merge it first "
    "(`nnx.merge_lora`), or compute the loss from `model.logits(features)`."
)
NOT_CAUSAL = (
    "Decoder.decode: in a {family} model every token sees all others, so there is nothing to keep for the next one. "
    "Call the model with the whole text; it fills in masked tokens."
)
WRONG_ROWS = "Decoder.decode: expected a cache with {expected} rows, one per row of tokens, got {got}."


class Decoder(Module):
    """A decoder-only language model: tokens `[batch, length]` in, logits `[batch, length, vocab_size]` out.

    Args:
        config: the architecture.
        dtype: the computation dtype; by default, that of the parameters.
        param_dtype: the dtype in which the parameters are stored.
        scan_layers: whether to stack the parameters of equal layers and scan over them. It compiles faster; a list of
            layers can be changed one by one, and decodes without unstacking.
        remat: whether to recompute each layer in the backward pass instead of keeping its activations; names
            such as `("attention", "mlp_hidden")`, or a policy, keep some of them, as in `nnx.remat`.
        ctx: the Context; its stream "params" initializes the parameters.

    Attributes:
        config: the architecture.
        embed: the `Embed` of tokens.
        positions: the `LearnedPositionEmbed`, or None with rotary positions.
        embed_norm: the norm of embeddings, or None.
        layers: a `Sequence` of `DecoderBlock`s; with `scan_layers`, the scanned stack of periods.
        lead, tail: the blocks before and after the scanned stack; empty without one.
        norm: the norm before the output layer.
        head: the output layer, such as a `Linear` or a `MaskedLMHead`; None if it is the transposed embedding, or if
            there is none.

    >>> config = nnx.models.DecoderConfig(
    ...     model_type="llama", vocab_size=64, features=16, hidden_features=32, num_layers=2, num_heads=4, max_length=9)
    >>> model = nnx.models.Decoder(config, ctx=nnx.context(0))
    >>> tokens = jnp.array([[3, 1, 4, 1, 5]])
    >>> logits = model(tokens)
    >>> logits.shape
    (1, 5, 64)
    >>> cache = model.init_cache(batch=1, length=8)
    >>> first, cache = model.decode(tokens[:, :3], cache)
    >>> rest, cache = model.decode(tokens[:, 3:], cache)
    >>> bool(jnp.allclose(jnp.concatenate([first, rest], axis=1), logits, atol=1e-4))
    True
    """

    logical_axes: ClassVar[AxisNames] = {"head/kernel": ("embed", "vocab"), "head/bias": ("vocab",)}

    config: DecoderConfig
    dtype: np.dtype | None
    param_dtype: np.dtype
    remat: bool | str | tuple[str, ...] | Callable[..., Any]
    embed: Embed
    positions: LearnedPositionEmbed | None
    layers: Any  # a Sequence or a Scan; a union would make an editor refuse `model.layers[0]`
    lead: Sequence
    tail: Sequence
    norm: RMSNorm | LayerNorm
    head: Linear | MaskedLMHead | None
    embed_norm: RMSNorm | LayerNorm | None

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        scan_layers: bool = False,
        remat: bool | str | tuple[str, ...] | Callable[..., Any] = False,
        ctx: Context,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ctx": ctx}
        self.config = config
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.remat = remat
        self.embed = Embed(config.vocab_size, config.features, **options)
        self.positions = (
            LearnedPositionEmbed(config.max_length, config.features, **options) if config.rotary is None else None
        )
        self.embed_norm = make_norm(config, config.features, options) if config.embed_norm else None

        def blocks(specs: tuple[LayerSpec, ...]) -> Sequence:
            return Sequence(DecoderBlock(config, spec, **options) for spec in specs)

        stack = config.stack
        if scan_layers and stack.count > 1:
            self.lead = blocks(config.layers[: stack.lead])
            self.layers = Scan(
                Period,
                # All Variables, not only Params: one that was added unstacked is an error instead of silently shared.
                variable_axes={...: 0},
                split_rngs="params",
                length=stack.count,
                metadata_params={PARTITION_NAME: LAYERS_AXIS},
            )(config, **options)
            self.tail = blocks(config.layers[stack.lead + stack.count * stack.period :])
        else:
            self.lead, self.layers, self.tail = blocks(()), blocks(config.layers), blocks(())
        self.norm = make_norm(config, config.features, options)
        if config.head == "labels":
            self.head = Linear(config.features, len(config.labels), use_bias=False, **options)
        elif config.head != "none" and config.head_activation is not None:
            self.head = MaskedLMHead(config, use_bias=False, use_norm_bias=config.use_norm_bias, **options)
        elif config.head == "none" or config.tie_embeddings:
            self.head = None
        else:
            self.head = Linear(config.features, config.vocab_size, use_bias=config.use_head_bias, **options)

    def __call__(
        self, tokens: jax.Array, *, positions: jax.Array | None = None, mask: jax.Array | None = None
    ) -> jax.Array:
        """Returns the logits of the token after each one.

        Args:
            tokens: integers `[batch, length]` within `0..vocab_size - 1`. Others are an error; inside a transform,
                where values are unknown, they turn all logits of their row into NaN.
            positions: the position of each token, `[batch, length]` or `[length]`; 0, 1, 2 … by default.
            mask: an array that is true where a token may see another, in addition to causality and windows;
                broadcasts to `[batch, heads, length, length]`.

        Returns:
            Logits of shape `[batch, length, vocab_size]`. A model without an output layer returns its `features`, a
            classifier the logits of its labels after each token; see `classify`.
        """
        features = self.features(tokens, positions=positions, mask=mask)
        return features if self.config.head == "none" else self.logits(features)

    def classify(self, tokens: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """Returns the logits of a classifier's labels for whole texts: those after the last token of each.

        Args:
            tokens: integers `[batch, length]`, padded on the right.
            lengths: `[batch]`, the number of real tokens in each row; all of them by default.

        Returns:
            An array of shape `[batch, labels]`; the names of the labels are `config.labels`.
        """
        if self.config.head != "labels":
            raise ValueError(NO_LABELS.format(head=self.config.head))
        features = self.features(tokens)
        if lengths is None:
            return self.logits(features[:, -1])
        last = jnp.asarray(lengths)[:, None, None] - 1
        return self.logits(jnp.take_along_axis(features, last, axis=1)[:, 0])

    def features(
        self, tokens: jax.Array, *, positions: jax.Array | None = None, mask: jax.Array | None = None
    ) -> jax.Array:
        """Returns what the output layer reads: the hidden state of each token after the last norm.

        They are embeddings of texts, and with `head_kernel` all that `nnx.linear_cross_entropy` needs to compute the
        loss without the logits of every position. The arguments are those of a call.

        Returns:
            An array of shape `[batch, length, features]`.

        >>> config = nnx.models.DecoderConfig(
        ... model_type="llama", vocab_size=64, features=8, hidden_features=16, num_layers=1, num_heads=1, max_length=9)
        >>> model, tokens = nnx.models.Decoder(config, ctx=nnx.context(0)), jnp.array([[3, 1, 4, 1, 5]])
        >>> features = model.features(tokens[:, :-1])
        >>> loss = nnx.linear_cross_entropy(features, model.head_kernel, tokens[:, 1:], soft_cap=config.logits_soft_cap)
        >>> bool(jnp.allclose(loss, nnx.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])))
        True
        """
        check_tokens("Decoder", tokens, self.config.vocab_size)
        x = constrained(self._embedded(tokens, positions))
        is_scanned = isinstance(self.layers, Scan)
        for block in self.lead if is_scanned else self.layers:
            x = run_block(block, x, positions, mask, self.remat)
        if is_scanned:
            x, _ = self._scanned(x, positions, mask)
        for block in self.tail:
            x = run_block(block, x, positions, mask, self.remat)
        return self.norm(x)

    def logits(self, features: jax.Array) -> jax.Array:
        """Applies the output layer to `features`, `[batch, length, features]`."""
        if self.config.head == "none":
            raise ValueError(NO_HEAD)
        if isinstance(self.head, MaskedLMHead):
            return self.head(features, self.embed)
        if self.config.head == "labels" and self.head is not None:
            return self.head(features)
        logits = self.embed.attend(features) if self.head is None else self.head(features)
        cap, scale = self.config.logits_soft_cap, self.config.logits_scale
        logits = logits if scale == 1.0 else logits * jnp.asarray(scale, logits.dtype)
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    @property
    def head_kernel(self) -> jax.Array:
        """The matrix of the output layer, `[features, vocab_size]`, whether it is the embedding or not.

        Logits are `features @ head_kernel`, plus `head.bias` if there is one, bounded by `config.logits_soft_cap` if
        the model has one. The matrix includes `config.logits_scale`.
        """
        if self.config.head == "none":
            raise ValueError(NO_HEAD)
        if self.head is None:
            table, scale, summed = self.embed.embedding, self.embed.embedding_scale, (1,)
        elif type(self.head) is Linear:
            table, scale, summed = self.head.kernel, self.head.kernel_scale, (0,)
        else:
            raise ValueError(ADAPTED_HEAD.format(got=type(self.head).__name__))
        if scale is not None:
            table = to_weight(table, scale, summed, weight_dtype(scale, self.param_dtype))
        table = table if self.dtype is None else cast(table, self.dtype)
        table = table if self.config.logits_scale == 1.0 else table * jnp.asarray(self.config.logits_scale, table.dtype)
        return table.T if self.head is None else table

    @property
    def max_length(self) -> int | None:
        """The longest text the model can take; None with rotary positions, which do not end."""
        return None if self.positions is None else self.config.max_length

    @property
    def rotary_boundary(self) -> int | None:
        """The length of text above which other rotary frequencies apply; None if they never change.

        A cache with room for longer texts uses their frequencies from the first token on.
        """
        scalings = [rotary.scaling for rotary in (self.config.rotary, self.config.local_rotary) if rotary is not None]
        lengths = [s.original_max_length for s in scalings if isinstance(s, (DynamicNTKScaling, LongRoPEScaling))]
        return min(lengths, default=None)

    def init_cache(self, batch: int, length: int, dtype: DTypeLike | None = None) -> DecoderCache:
        """Returns an empty cache for `decode`.

        Args:
            batch: the number of rows.
            length: the number of tokens that each row can hold. Rotary frequencies that depend on the length of the
                text are those of a text of this length.
            dtype: the dtype in which keys and values are stored; the computation dtype by default.
        """
        if dtype is None:
            table, scale = self.embed.embedding, self.embed.embedding_scale
            stored: DTypeLike = table.dtype if scale is None else weight_dtype(scale, self.embed.param_dtype)
            dtype = stored if self.dtype is None else self.dtype
        layers = tuple(block.attention.make_cache(batch, length, dtype) for block in self._blocks())
        return DecoderCache(layers, jnp.zeros((batch,), jnp.int32))

    def decode(
        self, tokens: jax.Array, cache: DecoderCache, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, DecoderCache]:
        """Appends tokens to the text in a cache, and returns the logits of the token after each one.

        The model does not change, and the given cache stays valid.

        Args:
            tokens: integers `[batch, length]`, the next tokens of each row.
            cache: the cache, see `init_cache`.
            lengths: `[batch]`, the number of real tokens in each row, which come first; all of them by default.

        Returns:
            Logits `[batch, length, vocab_size]`, and the cache with the tokens added.

        Raises:
            ValueError: the model is not causal, or a row would overflow. (In a transform, such a row gets NaN instead.)
        """
        if not self.config.causal:
            raise ValueError(NOT_CAUSAL.format(family=self.config.model_type))
        if isinstance(self.layers, Scan):
            return self.unscanned().decode(tokens, cache, lengths)
        check_tokens("Decoder", tokens, self.config.vocab_size)
        if len(cache.layers) != self.config.num_layers:
            raise ValueError(NO_LAYER_CACHE.format(expected=self.config.num_layers, got=len(cache.layers)))
        if cache.lengths.shape != tokens.shape[:1]:
            raise ValueError(WRONG_ROWS.format(expected=tokens.shape[0], got=cache.lengths.shape[0]))
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        x = self._embedded(tokens, positions)
        layers = []
        for block, held in zip(self.layers, cache.layers, strict=True):
            x, held = block.decode_step(x, held, cache.lengths, lengths)
            layers.append(held)
        return self.logits(self.norm(x)), cache.advanced(layers, tokens.shape[1] if lengths is None else lengths)

    def unscanned(self) -> "Decoder":
        """Returns an equal model with its layers in a list; the model itself if they already are.

        The stacked parameters are sliced, so they are in memory twice as long as both models exist.
        """
        if not isinstance(self.layers, Scan):
            return self
        period = self.layers.scan_module
        definition: Any = Module.get_module_def(period)
        state = Module.get_state(period)
        blocks = []
        for i in range(self.config.stack.count):
            layer = state.map(lambda path, leaf, i=i: _sliced(leaf, i))
            blocks += list(definition.merge(layer).layers)
        rest: Any = Module.clone(self)
        rest.layers = Sequence((*rest.lead, *blocks, *rest.tail))
        rest.lead, rest.tail = Sequence(()), Sequence(())
        return rest

    def _blocks(self) -> list[DecoderBlock]:
        """Returns the block of each layer; those of a scanned stack, whose parameters are stacked, several times."""
        if not isinstance(self.layers, Scan):
            return list(self.layers)
        return [*self.lead, *list(self.layers.scan_module.layers) * self.config.stack.count, *self.tail]

    def _scanned(self, x: jax.Array, positions: Any, mask: Any) -> tuple[jax.Array, None]:
        layers: Any = self.layers

        def body(period: Period, x: jax.Array, _: None, positions: Any, mask: Any) -> tuple[jax.Array, None]:
            return period(x, None, positions, mask, self.remat)

        return scan(body, **layers.options)(layers.scan_module, x, None, positions, mask)

    def _embedded(self, tokens: jax.Array, positions: jax.Array | None) -> jax.Array:
        x = self.embed(without_negatives(tokens, self.config.vocab_size))
        if self.config.scale_embeddings:
            x = x * jnp.asarray(self.config.features**0.5, x.dtype)
        if self.config.embedding_scale != 1.0:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        if self.positions is not None:
            if positions is None and tokens.shape[1] > self.config.max_length:
                raise too_long("Decoder", self.config.max_length, tokens.shape[1])
            x = self.positions(x, positions)
        return x if self.embed_norm is None else self.embed_norm(x)


def _sliced(leaf: Any, i: int) -> Any:
    """Returns entry `i` of a stacked Variable, without the name of the stacked axis."""
    if not isinstance(leaf, Variable):
        return leaf[i]
    names = leaf.sharding
    if isinstance(names, tuple) and not isinstance(names, DefaultAxes) and names[:1] == (LAYERS_AXIS,):
        names = names[1:]
    value = leaf.value
    if isinstance(value, jax.ShapeDtypeStruct):
        return leaf.replace(jax.ShapeDtypeStruct(value.shape[1:], value.dtype), sharding=names)
    return leaf.replace(value[i], sharding=names)
