"""Which tensor of a checkpoint is which parameter of a `Decoder`: declarative tables that work in both directions.

A `TableEntry` names a tensor, the parameters it holds, and their `TensorLayout`. Several parameters in one tensor are
*fused*: they follow each other along its output axis, or take turns along it (*interleaved*). A `Table` has the entries
of one family: those of a layer are written once for all layers, and those of an expert once for all experts.

`links` applies a table to one model. It numbers the layers and experts, leaves out what the model does not have (an
absent bias), and gives each parameter that is part of a stack its index there: a scanned model stacks its layers, and
the experts of a layer are always one parameter.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nnx.models.config import DecoderConfig

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """How the axes of a parameter are arranged in a tensor.

    Attributes:
        inputs: the number of leading axes of the parameter that a product sums over; the others are its outputs. `None`
            if the parameter is not a matrix.
        transposed: whether the tensor is `[outputs, inputs]`, as in PyTorch's `Linear`.
        flat: whether the tensor has one axis, however many the parameter has.
        order: for convolutions, the parameter's axis for each axis of the tensor.
        leading: the number of axes of size one that the tensor has before those of the parameter.
        interleaved: the number of fused parameters that take turns along the tensor's last axis; 0 if they do not.
    """

    inputs: int | None = None
    transposed: bool = False
    flat: bool = False
    order: tuple[int, ...] | None = None
    leading: int = 0
    interleaved: int = 0

    def tensor_shape(self, shape: Shape) -> Shape:
        """Returns the shape of the tensor (or the part of a fused one) for a parameter of a shape."""
        if self.order is not None:
            return tuple(shape[axis] for axis in self.order)
        if self.leading:
            return (1,) * self.leading + shape
        if self.flat:
            return (math.prod(shape),)
        if self.inputs is None:
            return shape
        pair = math.prod(shape[: self.inputs]), math.prod(shape[self.inputs :])
        return pair[::-1] if self.transposed else pair

    @property
    def output_axis(self) -> int:
        """The axis of the tensor along which fused parameters follow each other, or take turns."""
        if self.interleaved:
            return -1
        return 0 if self.inputs is None or self.transposed else 1

    def to_tensor(self, array: np.ndarray) -> np.ndarray:
        """Arranges a parameter as in a checkpoint, as a view where possible."""
        if self.order is not None:
            return array.transpose(self.order)
        if not self.transposed:
            return array.reshape(self.tensor_shape(array.shape))
        return array.reshape(self.tensor_shape(array.shape)[::-1]).T

    def joined(self, tensors: Sequence[jax.Array]) -> jax.Array:
        """Returns the tensor of fused parameters, each of which is arranged as in a checkpoint."""
        if not self.interleaved:
            return jnp.concatenate(tensors, axis=self.output_axis)
        return jnp.stack(tensors, axis=-1).reshape(*tensors[0].shape[:-1], -1)


SAME = TensorLayout()
FLAT = TensorLayout(flat=True)
LINEAR = TensorLayout(1, transposed=True)
FROM_HEADS = TensorLayout(2, transposed=True)
KERNEL_2D = TensorLayout(order=(3, 2, 0, 1))  # [outputs, inputs, height, width] and [height, width, inputs, outputs]
KERNEL_1D = TensorLayout(order=(2, 1, 0))  # [outputs, inputs, length] and [length, inputs, outputs]
CONV1D = TensorLayout(1)  # GPT-2 stores its products as [inputs, outputs]
CONV1D_FROM_HEADS = TensorLayout(2)
IN_TURNS = TensorLayout(interleaved=2)


class TableEntry(NamedTuple):
    """A tensor, the parameters it holds (several if it is fused), and their layout.

    A tensor with `{}` in its name exists once for every expert, and holds one entry of a stacked parameter.
    """

    name: str
    paths: tuple[str, ...]
    layout: TensorLayout = SAME


@dataclasses.dataclass(frozen=True)
class Table:
    """The tensors of one family.

    Attributes:
        prefix: the start of all names but that of `head`; some checkpoints leave it out.
        outer: the entries outside of layers.
        layer: the start of the names in a layer, with `{}` for its number.
        layers: the entries of each layer.
        head: the entry of the output layer.
        ignored: patterns of tensors that are not parameters.
    """

    prefix: str
    outer: tuple[TableEntry, ...]
    layer: str
    layers: tuple[TableEntry, ...]
    head: TableEntry = TableEntry("lm_head.weight", ("head/kernel",), LINEAR)
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)


class Parameter(NamedTuple):
    """A parameter of a model: its path, and its index in the stack of layers, of experts, or of both, if any."""

    path: str
    index: tuple[int, ...] = ()


class Link(NamedTuple):
    """A tensor of one checkpoint, and the parameters of one model that it holds."""

    name: str
    parameters: tuple[Parameter, ...]
    layout: TensorLayout


_QKV = ("attention/query", "attention/key", "attention/value")
_OUTER = (TableEntry("embed_tokens.weight", ("embed/embedding",)), TableEntry("norm.weight", ("norm/scale",)))


def _kernels_and_biases(name: str, paths: Iterable[str], layout: TensorLayout) -> tuple[TableEntry, TableEntry]:
    paths = tuple(paths)
    return (
        TableEntry(f"{name}.weight", tuple(f"{path}/kernel" for path in paths), layout),
        TableEntry(f"{name}.bias", tuple(f"{path}/bias" for path in paths), FLAT),
    )


_ATTENTION = (
    *_kernels_and_biases("self_attn.q_proj", _QKV[:1], LINEAR),
    *_kernels_and_biases("self_attn.k_proj", _QKV[1:2], LINEAR),
    *_kernels_and_biases("self_attn.v_proj", _QKV[2:], LINEAR),
    *_kernels_and_biases("self_attn.o_proj", ("attention/out",), FROM_HEADS),
    TableEntry("self_attn.q_norm.weight", ("attention/query_ln/scale",)),
    TableEntry("self_attn.k_norm.weight", ("attention/key_ln/scale",)),
)
_MLP = (
    *_kernels_and_biases("mlp.gate_proj", ("mlp/gate",), LINEAR),
    *_kernels_and_biases("mlp.up_proj", ("mlp/up",), LINEAR),
    *_kernels_and_biases("mlp.down_proj", ("mlp/down",), LINEAR),
)
_NORMS = (
    TableEntry("input_layernorm.weight", ("attention_norm/scale",)),
    TableEntry("post_attention_layernorm.weight", ("mlp_norm/scale",)),
)
_MIXTRAL_EXPERTS = (
    TableEntry("block_sparse_moe.gate.weight", ("mlp/router",), LINEAR),
    TableEntry("block_sparse_moe.experts.{}.w1.weight", ("mlp/gate",), LINEAR),
    TableEntry("block_sparse_moe.experts.{}.w3.weight", ("mlp/up",), LINEAR),
    TableEntry("block_sparse_moe.experts.{}.w2.weight", ("mlp/down",), LINEAR),
)
_QWEN3_EXPERTS = (
    TableEntry("mlp.gate.weight", ("mlp/router",), LINEAR),
    TableEntry("mlp.experts.{}.gate_proj.weight", ("mlp/gate",), LINEAR),
    TableEntry("mlp.experts.{}.up_proj.weight", ("mlp/up",), LINEAR),
    TableEntry("mlp.experts.{}.down_proj.weight", ("mlp/down",), LINEAR),
)
_GPT_OSS_EXPERTS = (  # each tensor has all experts
    TableEntry("mlp.router.weight", ("mlp/router",), LINEAR),
    TableEntry("mlp.router.bias", ("mlp/router_bias",)),
    TableEntry("mlp.experts.gate_up_proj", ("mlp/gate", "mlp/up"), IN_TURNS),
    TableEntry("mlp.experts.gate_up_proj_bias", ("mlp/gate_bias", "mlp/up_bias"), IN_TURNS),
    TableEntry("mlp.experts.down_proj", ("mlp/down",)),
    TableEntry("mlp.experts.down_proj_bias", ("mlp/down_bias",)),
)
_SINKS = (TableEntry("self_attn.sinks", ("attention/sinks",)),)
_LLAMA = Table("model.", _OUTER, "layers.{}.", (*_ATTENTION, *_MLP, *_NORMS))
_GEMMA = Table(
    "model.",
    _OUTER,
    "layers.{}.",
    (
        *_ATTENTION,
        *_MLP,
        TableEntry("input_layernorm.weight", ("attention_norm/scale",)),
        TableEntry("post_attention_layernorm.weight", ("attention_post_norm/scale",)),
        TableEntry("pre_feedforward_layernorm.weight", ("mlp_norm/scale",)),
        TableEntry("post_feedforward_layernorm.weight", ("mlp_post_norm/scale",)),
    ),
)
_PHI3 = Table(
    "model.",
    _OUTER,
    "layers.{}.",
    (
        *_kernels_and_biases("self_attn.qkv_proj", _QKV, LINEAR),
        *_kernels_and_biases("self_attn.o_proj", ("attention/out",), FROM_HEADS),
        *_kernels_and_biases("mlp.gate_up_proj", ("mlp/gate", "mlp/up"), LINEAR),
        *_kernels_and_biases("mlp.down_proj", ("mlp/down",), LINEAR),
        *_NORMS,
    ),
)


def _layer_norm(name: str, path: str) -> tuple[TableEntry, TableEntry]:
    return TableEntry(f"{name}.weight", (f"{path}/scale",)), TableEntry(f"{name}.bias", (f"{path}/bias",))


_GPT2 = Table(
    "transformer.",
    (
        TableEntry("wte.weight", ("embed/embedding",)),
        TableEntry("wpe.weight", ("positions/embedding",)),
        *_layer_norm("ln_f", "norm"),
    ),
    "h.{}.",
    (
        *_layer_norm("ln_1", "attention_norm"),
        *_kernels_and_biases("attn.c_attn", _QKV, CONV1D),
        *_kernels_and_biases("attn.c_proj", ("attention/out",), CONV1D_FROM_HEADS),
        *_layer_norm("ln_2", "mlp_norm"),
        *_kernels_and_biases("mlp.c_fc", ("mlp/layers/0",), CONV1D),
        *_kernels_and_biases("mlp.c_proj", ("mlp/layers/1",), CONV1D),
    ),
    ignored=(r".*\.attn\.(masked_)?bias",),
)

TABLES = {
    "gpt2": _GPT2,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA),
    "phi3": _PHI3,
    "mixtral": Table("model.", _OUTER, "layers.{}.", (*_ATTENTION, *_MIXTRAL_EXPERTS, *_NORMS)),
    "gpt_oss": Table("model.", _OUTER, "layers.{}.", (*_ATTENTION, *_SINKS, *_GPT_OSS_EXPERTS, *_NORMS)),
    "qwen3_moe": Table("model.", _OUTER, "layers.{}.", (*_ATTENTION, *_QWEN3_EXPERTS, *_NORMS)),
}
"""The table of each family, by `model_type`."""


def links(config: DecoderConfig, scanned: bool, present: Iterable[str], prefix: str | None = None) -> list[Link]:
    """Returns the tensors of a checkpoint of a model, with the parameters that each one holds.

    Args:
        config: the architecture.
        scanned: whether the layers of the model are stacked.
        present: the paths of the model's parameters. Entries for others (an absent bias) are left out.
        prefix: the start of the names, if not the usual one of the family.
    """
    table, known = TABLES[config.model_type], set(present)
    prefix = table.prefix if prefix is None else prefix

    def located(start: str, entries: Iterable[TableEntry], place: str, index: tuple[int, ...] = ()) -> Iterator[Link]:
        for entry in entries:
            paths = tuple(place + path for path in entry.paths)
            experts = [(e,) for e in range(config.num_experts or 0)] if "{}" in entry.name else [()]
            for expert in experts if known.issuperset(paths) else ():
                parameters = tuple(Parameter(path, (*index, *expert)) for path in paths)
                yield Link(start + entry.name.format(*expert), parameters, entry.layout)

    found = list(located(prefix, table.outer, ""))
    for number, (place, index) in enumerate(layer_places(config, scanned)):
        found += located(prefix + table.layer.format(number), table.layers, place, index)
    return [*found, *located("", (table.head,), "")]


def layer_places(config: DecoderConfig, scanned: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the start of the paths of each layer, and its index in the stack if it is in one."""
    stack = config.stack
    if not scanned or stack.count < 2:  # a Decoder does not scan a single period either
        return [(f"layers/{i}/", ()) for i in range(config.num_layers)]
    numbers = range(stack.count * stack.period)
    stacked = [(f"layers/scan_module/layers/{i % stack.period}/", (i // stack.period,)) for i in numbers]
    rest = range(config.num_layers - stack.lead - len(numbers))
    return [*((f"lead/{i}/", ()) for i in range(stack.lead)), *stacked, *((f"tail/{i}/", ()) for i in rest)]


def is_ignored(config: DecoderConfig, name: str) -> bool:
    """Whether a tensor is not a parameter of such a model: a buffer, or the second copy of a tied embedding."""
    table = TABLES[config.model_type]
    tied = config.tie_embeddings and name == table.head.name
    return tied or any(re.fullmatch(pattern, name) for pattern in table.ignored)


def checkpoint_prefix(config: DecoderConfig, names: Any) -> str:
    """Returns the start of the names in a checkpoint: the usual one of the family, or none."""
    table = TABLES[config.model_type]
    first = table.outer[0].name
    return "" if first in names and table.prefix + first not in names else table.prefix
