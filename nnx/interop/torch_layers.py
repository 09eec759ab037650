"""How the built-in layers store what PyTorch's layers hold under other names and in other layouts.

A *conversion* is one array of a layer, together with the *tensors* of PyTorch that it is made from. A *rule* lists
those of one layer. Paths and names in a rule are those below the layer: `kernel` is made from `weight`. Recurrent
layers are in `torch_recurrent`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from nnx.nn.activations import PReLU
from nnx.nn.attention.attention import MultiHeadAttention
from nnx.nn.conv import Conv, ConvTranspose
from nnx.nn.embed import Embed, LearnedPositionEmbed
from nnx.nn.linear import Linear, LinearGeneral
from nnx.nn.norms.batch_norm import BatchNorm
from nnx.nn.norms.norm_base import NormBase

Shape = tuple[int, ...]
Has = Callable[[str], bool]
"""Whether the state dict has a tensor of this name below the layer."""


class Mismatch(Exception):
    """Raised by a conversion if the layer cannot represent the tensors.

    Args:
        have: a description of what the state dict holds.
        want: a description of what the layer can hold.
    """

    def __init__(self, have: str, want: str):
        super().__init__(have, want)
        self.have = have
        self.want = want


class Conversion(NamedTuple):
    """One array of a layer and the tensors it is made from.

    Attributes:
        path: the path of the array.
        tensors: the shapes of the tensors in PyTorch, by name.
        convert: a function from these tensors, in order, to the array.
    """

    path: str
    tensors: dict[str, Shape]
    convert: Callable[..., np.ndarray]

    def below(self, path: str) -> "Conversion":
        """Returns this conversion of the layer at `path` as one of the model."""
        tensors = {dotted(path, name): shape for name, shape in self.tensors.items()}
        return Conversion(f"{path}/{self.path}" if path else self.path, tensors, self.convert)


class Rule(NamedTuple):
    """The conversions of a layer.

    Attributes:
        conversions: the conversions.
        submodules: the names of the submodules whose arrays are among the conversions.
        ignored: the names of tensors that NNX has no use for.
    """

    conversions: list[Conversion]
    submodules: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def dotted(path: str, name: str) -> str:
    """Returns the name in a state dict of the tensor `name` of the layer at `path`."""
    return f"{path.replace('/', '.')}.{name}" if path else name


def unchanged(path: str, name: str, array: Any) -> list[Conversion]:
    """Returns the conversion for an array that looks the same in PyTorch; none if the layer does not have it."""
    return [] if array is None else [Conversion(path, {name: tuple(array.shape)}, lambda tensor: tensor)]


def _linear(layer: Linear, has: Has) -> Rule:
    kernel = Conversion("kernel", {"weight": layer.kernel.shape[::-1]}, np.transpose)
    return Rule([kernel, *unchanged("bias", "bias", layer.bias)])


def _linear_general(layer: LinearGeneral, has: Has) -> Rule:
    """A Linear whose features are unfolded into several axes."""
    if layer.batch_sizes:
        return Rule([])
    conversions = [_unfolded("kernel", {"weight": _matrix(layer)}, layer.kernel.shape)]
    if layer.bias is not None:
        conversions.append(_unfolded("bias", {"bias": (layer.bias.size,)}, layer.bias.shape))
    return Rule(conversions)


def _matrix(layer: LinearGeneral) -> tuple[int, int]:
    """Returns the shape of the weight of a LinearGeneral in PyTorch."""
    return math.prod(layer.out_features), math.prod(layer.in_features)


def _unfolded(
    path: str, tensors: dict[str, Shape], shape: Shape, start: int = 0, size: int | None = None
) -> Conversion:
    """Returns the conversion for some rows of a matrix or vector, transposed and then unfolded to `shape`."""
    stop = None if size is None else start + size
    return Conversion(path, tensors, lambda tensor: tensor[start:stop].T.reshape(shape))


def _conv(layer: Conv, has: Has) -> Rule:
    *sizes, inputs, outputs = layer.kernel.shape

    def convert(weight: np.ndarray) -> np.ndarray:
        return np.moveaxis(weight, (0, 1), (-1, -2))

    kernel = Conversion("kernel", {"weight": (outputs, inputs, *sizes)}, convert)
    return Rule([kernel, *unchanged("bias", "bias", layer.bias)])


def _conv_transpose(layer: ConvTranspose, has: Has) -> Rule:
    sizes = layer.kernel_size

    def convert(weight: np.ndarray) -> np.ndarray:  # [in, out, *sizes]
        if layer.transpose_kernel:
            return np.moveaxis(weight, (0, 1), (-1, -2))
        # PyTorch's layer is the transpose of a convolution with this kernel, so its kernel is applied back to front.
        return np.flip(np.moveaxis(weight, (0, 1), (-2, -1)), tuple(range(len(sizes))))

    kernel = Conversion("kernel", {"weight": (layer.in_features, layer.out_features, *sizes)}, convert)
    return Rule([kernel, *unchanged("bias", "bias", layer.bias)])


def _norm(layer: NormBase, has: Has) -> Rule:
    return Rule([*unchanged("scale", "weight", layer.scale), *unchanged("bias", "bias", layer.bias)])


def _batch_norm(layer: BatchNorm, has: Has) -> Rule:
    conversions = [*unchanged("mean", "running_mean", layer.mean), *unchanged("var", "running_var", layer.var)]
    return Rule([*_norm(layer, has).conversions, *conversions], ignored=("num_batches_tracked",))


def _embed(layer: Embed | LearnedPositionEmbed, has: Has) -> Rule:
    return Rule(unchanged("embedding", "weight", layer.embedding))


def _prelu(layer: PReLU, has: Has) -> Rule:
    shape = layer.negative_slope.shape
    return Rule([Conversion("negative_slope", {"weight": shape or (1,)}, lambda weight: weight.reshape(shape))])


def _attention(layer: MultiHeadAttention, has: Has) -> Rule | None:
    """The packed projection, or three of them where keys have other features; None for Linears with names."""
    if has("query.weight"):
        return None
    projections = {"query": layer.query, "key": layer.key, "value": layer.value}
    rows = [_matrix(projection)[0] for projection in projections.values()]
    conversions: list[Conversion] = []
    for i, (name, projection) in enumerate(projections.items()):
        start, size = sum(rows[:i]), rows[i]
        if has("in_proj_weight") or not has("q_proj_weight"):
            tensors: dict[str, Shape] = {"in_proj_weight": (sum(rows), _matrix(projection)[1])}
            conversions.append(_unfolded(f"{name}/kernel", tensors, projection.kernel.shape, start, size))
        else:
            tensors = {f"{name[0]}_proj_weight": _matrix(projection)}
            conversions.append(_unfolded(f"{name}/kernel", tensors, projection.kernel.shape))
        if projection.bias is not None:
            tensors = {"in_proj_bias": (sum(rows),)}
            conversions.append(_unfolded(f"{name}/bias", tensors, projection.bias.shape, start, size))
    out = [
        Conversion(
            f"out/{conversion.path}",
            {f"out_proj.{name}": shape for name, shape in conversion.tensors.items()},
            conversion.convert,
        )
        for conversion in _linear_general(layer.out, has).conversions
    ]
    return Rule(conversions + out, submodules=("query", "key", "value", "out"))


_RULES: list[tuple[Any, Callable[[Any, Has], Rule | None]]] = [
    (Linear, _linear),
    (LinearGeneral, _linear_general),
    (Conv, _conv),
    (ConvTranspose, _conv_transpose),
    (BatchNorm, _batch_norm),
    (NormBase, _norm),
    ((Embed, LearnedPositionEmbed), _embed),
    (MultiHeadAttention, _attention),
    (PReLU, _prelu),
]


def layer_rule(layer: Any, has: Has) -> Rule | None:
    """Returns the rule of a built-in layer; None for other Modules, whose conversions are those of their submodules."""
    return next((rule(layer, has) for types, rule in _RULES if isinstance(layer, types)), None)
