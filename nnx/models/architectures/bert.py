"""BERT and RoBERTa: encoders of text, plain (`Bert`) or with a head for a task (`BertWithHead`)."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.dict_sequence import Sequence
from nnx.core.module.module import Module
from nnx.models.architectures.encoder import EncoderOutput, encoder_blocks, key_mask
from nnx.models.files.config_entries import TWO_LABELS, check_config
from nnx.models.inputs.tokens import check_tokens, too_long, without_negatives
from nnx.models.masked_lm_head import MaskedLMHead
from nnx.nn.embed import Embed, LearnedPositionEmbed
from nnx.nn.linear import Linear
from nnx.nn.norms.norm import LayerNorm
from nnx.nn.support.parameters import AxisNames
from nnx.nn.support.settings import as_dtype, as_optional_dtype

BertTask = Literal["masked_lm", "sequence_classification", "token_classification", "question_answering"]

SIZES = ("vocab_size", "features", "hidden_features", "num_layers", "num_heads", "max_length", "num_segments")
TASKS = ("masked_lm", "sequence_classification", "token_classification", "question_answering")
NO_TASK = "BertWithHead: the config has no task. Set one of {known}, or use Bert, which has no head."
TWO_LOGITS = "BertConfig: question answering has two labels, for start and end, got {got!r}."


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig:
    """The architecture of a BERT; the defaults are those of the base model.

    Args:
        model_type: the family: "bert", "roberta" or "xlm-roberta".
        vocab_size: the number of tokens.
        features: the number of features of a token between layers.
        hidden_features: the number of hidden features of the MLPs.
        num_layers: the number of layers.
        num_heads: the number of heads.
        max_length: the number of positions, including those that are never used.
        padding_token: the token of padding, if texts begin at the position after its number, and only other tokens are
            counted, as in roberta; by default, positions are 0, 1, 2 ….
        num_segments: the number of segments that a token can belong to.
        activation: the name of the activation; one of `nnx.models.ACTIVATIONS`.
        head_activation: the activation of the head that fills in masked tokens; `activation` by default.
        norm_epsilon: the epsilon of every norm.
        task: the task of the head: "masked_lm", "sequence_classification", "token_classification" or
            "question_answering"; None for the plain model.
        labels: the names of the classes, for the classification tasks.
        extra: the other entries of the `config.json` this was read from, as JSON by name. They are written back.

    >>> nnx.models.BertConfig(num_layers=6).replace(task="sequence_classification").task
    'sequence_classification'
    """

    model_type: str = "bert"
    vocab_size: int = 30522
    features: int = 768
    hidden_features: int = 3072
    num_layers: int = 12
    num_heads: int = 12
    max_length: int = 512
    padding_token: int | None = None
    num_segments: int = 2
    activation: str = "gelu"
    head_activation: str | None = None
    norm_epsilon: float = 1e-12
    task: BertTask | None = None
    labels: tuple[str, ...] = TWO_LABELS
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_config(self, SIZES, TASKS)
        if self.task == "question_answering" and len(self.labels) != 2:
            raise ValueError(TWO_LOGITS.format(got=self.labels))

    def replace(self, **changes: Any) -> "BertConfig":
        """Returns a copy with other values in some fields."""
        return dataclasses.replace(self, **changes)


class Bert(Module):
    """An encoder of text: tokens `[batch, length]` in, an `EncoderOutput` out.

    Args:
        config: the architecture.
        dtype: the computation dtype; by default, that of the parameters.
        param_dtype: the dtype in which the parameters are stored.
        ctx: the Context; its stream "params" initializes the parameters.

    Attributes:
        config: the architecture.
        embed: the `Embed` of tokens.
        positions: the `LearnedPositionEmbed`.
        segments: the `Embed` of segments.
        norm: the `LayerNorm` of their sum.
        layers: a `Sequence` of `EncoderBlock`s.
        pooler: the `Linear` layer behind `pooler_output`; None if the task does not need it.

    >>> config = nnx.models.BertConfig(
    ...     vocab_size=64, features=16, hidden_features=32, num_layers=2, num_heads=4, max_length=9)
    >>> model = nnx.models.Bert(config, ctx=nnx.context(0))
    >>> tokens = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]])
    >>> out = model(tokens, lengths=jnp.array([5, 3]))
    >>> out.last_hidden_state.shape, out.pooler_output.shape
    ((2, 5, 16), (2, 16))
    """

    config: BertConfig
    dtype: np.dtype | None
    param_dtype: np.dtype
    embed: Embed
    positions: LearnedPositionEmbed
    segments: Embed
    norm: LayerNorm
    layers: Sequence
    pooler: Linear | None

    logical_axes: ClassVar[AxisNames] = {
        "segments/embedding": (None, "embed"),
        "pooler/kernel": ("embed", None),
        "pooler/bias": (None,),
    }

    def __init__(
        self,
        config: BertConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ctx: Context,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ctx": ctx}
        features = config.features
        self.config = config
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.embed = Embed(config.vocab_size, features, **options)
        self.positions = LearnedPositionEmbed(config.max_length, features, **options)
        self.segments = Embed(config.num_segments, features, **options)
        self.norm = LayerNorm(features, epsilon=config.norm_epsilon, **options)
        self.layers = encoder_blocks(config, post_norm=True, **options)
        pooled = config.task in (None, "sequence_classification")
        self.pooler = Linear(features, features, **options) if pooled else None

    def __call__(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        mask: jax.Array | None = None,
        lengths: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> EncoderOutput:
        """Encodes texts.

        Args:
            tokens: integers `[batch, length]` within `0..vocab_size - 1`. Others are an error; inside a transform,
                where values are unknown, they turn their row into NaN.
            segments: the segment of each token, `[batch, length]`; 0 by default. (Elsewhere, "token type ids".)
            mask: `[batch, length]`, true for tokens and false for padding; or an array that is true where a token may
                see another, which broadcasts to `[batch, heads, length, length]`.
            lengths: `[batch]`, the number of tokens in each row, if padding comes last; faster than a mask on GPUs.
            positions: the position of each token, `[batch, length]` or `[length]`; 0, 1, 2 … by default.
        """
        size, length, padding = self.config.vocab_size, tokens.shape[-1], self.config.padding_token
        check_tokens("Bert", tokens, size)
        first = 0 if padding is None else padding + 1
        if positions is not None:
            positions = positions + first
        elif first + length > self.config.max_length:
            raise too_long("Bert", self.config.max_length - first, length)
        elif padding is not None:
            real = tokens != padding
            positions = jnp.where(real, jnp.cumsum(real, axis=-1), 0) + padding
        mask = None if mask is None else key_mask("Bert", mask, tokens)
        x = self.embed(without_negatives(tokens, size))
        x = x + self.segments(jnp.zeros_like(tokens) if segments is None else segments)
        x = self.norm(self.positions(x, positions))
        for block in self.layers:
            x = block(x, mask=mask, lengths=lengths)
        return EncoderOutput(x, None if self.pooler is None else jnp.tanh(self.pooler(x[:, 0])))


class BertWithHead(Module):
    """A `Bert` with a head for the task of its config: tokens `[batch, length]` in, logits out.

    The logits are `[batch, length, vocab_size]` for "masked_lm", `[batch, labels]` for "sequence_classification",
    `[batch, length, labels]` for "token_classification", and `[batch, length, 2]` (start and end of the answer) for
    "question_answering".

    Args:
        config: the architecture, with a task.
        dtype, param_dtype, ctx: as in `Bert`.

    Attributes:
        config: the architecture.
        encoder: the `Bert`.
        head: a `MaskedLMHead`, or a `Linear` layer.

    >>> config = nnx.models.BertConfig(
    ...     vocab_size=64, features=16, hidden_features=32, num_layers=1, num_heads=4, max_length=9,
    ...     task="sequence_classification", labels=("bad", "fine", "good"))
    >>> model = nnx.models.BertWithHead(config, ctx=nnx.context(0))
    >>> model(jnp.array([[3, 1, 4, 1, 5]])).shape
    (1, 3)
    """

    logical_axes: ClassVar[AxisNames] = {"head/kernel": ("embed", None), "head/bias": (None,)}

    config: BertConfig
    param_dtype: np.dtype
    encoder: Bert
    head: Any  # a union would make an editor refuse `model.head.kernel`

    def __init__(
        self,
        config: BertConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ctx: Context,
    ) -> None:
        if config.task is None:
            raise ValueError(NO_TASK.format(known=", ".join(map(repr, TASKS))))
        self.config = config
        self.param_dtype = as_dtype(param_dtype)
        self.encoder = Bert(config, dtype=dtype, param_dtype=param_dtype, ctx=ctx)
        if config.task == "masked_lm":
            self.head = MaskedLMHead(config, dtype=dtype, param_dtype=param_dtype, ctx=ctx)
        else:
            self.head = Linear(config.features, len(config.labels), dtype=dtype, param_dtype=param_dtype, ctx=ctx)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        mask: jax.Array | None = None,
        lengths: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the logits; the arguments are those of `Bert`."""
        out = self.encoder(tokens, segments=segments, mask=mask, lengths=lengths, positions=positions)
        if self.config.task == "masked_lm":
            return self.head(out.last_hidden_state, self.encoder.embed)
        return self.head(out.last_hidden_state if out.pooler_output is None else out.pooler_output)
