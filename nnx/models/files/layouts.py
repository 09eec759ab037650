"""How the axes of a parameter are arranged in the tensor of a checkpoint: `TensorLayout`, and those that occur.

Several parameters in one tensor are *fused*. They follow each other along its output axis, take turns along it
(*interleaved*), or take turns by groups of heads (*grouped*).
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

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
        grouped: whether fused projections to heads take turns: some heads of the first one, of the second, …. There
            are as many groups as the parameter with the fewest heads has.
    """

    inputs: int | None = None
    transposed: bool = False
    flat: bool = False
    order: tuple[int, ...] | None = None
    leading: int = 0
    interleaved: int = 0
    grouped: bool = False

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
        if self.order is not None:
            return self.order.index(len(self.order) - 1)
        return 0 if self.inputs is None or self.transposed else 1

    def to_tensor(self, array: np.ndarray) -> np.ndarray:
        """Arranges a parameter as in a checkpoint, as a view where possible."""
        if self.order is not None:
            return array.transpose(self.order)
        if not self.transposed:
            return array.reshape(self.tensor_shape(array.shape))
        return array.reshape(self.tensor_shape(array.shape)[::-1]).T

    def joined(self, tensors: Sequence[jax.Array | np.ndarray], shapes: Sequence[Shape] = ()) -> jax.Array:
        """Returns the tensor of fused parameters.

        Args:
            tensors: the parameters, each arranged as in a checkpoint.
            shapes: their shapes as parameters, which tell the number of heads; needed only for groups.
        """
        if self.grouped:
            groups = self.groups(shapes)
            parts = [jnp.reshape(tensor, (groups, -1, *tensor.shape[1:])) for tensor in tensors]
            whole = jnp.concatenate(parts, axis=1)
            return whole.reshape(-1, *whole.shape[2:])
        if not self.interleaved:
            return jnp.concatenate(tensors, axis=self.output_axis)
        return jnp.stack(tensors, axis=-1).reshape(*tensors[0].shape[:-1], -1)

    def groups(self, shapes: Sequence[Shape]) -> int:
        """Returns the number of groups in which fused parameters of these shapes take turns."""
        return min(shape[self.inputs or 0] for shape in shapes)


SAME = TensorLayout()
FLAT = TensorLayout(flat=True)
LINEAR = TensorLayout(1, transposed=True)
FROM_HEADS = TensorLayout(2, transposed=True)
KERNEL_2D = TensorLayout(order=(3, 2, 0, 1))  # [outputs, inputs, height, width] and [height, width, inputs, outputs]
KERNEL_1D = TensorLayout(order=(2, 1, 0))  # [outputs, inputs, length] and [length, inputs, outputs]
CONV1D = TensorLayout(1)  # GPT-2 stores its products as [inputs, outputs]
CONV1D_FROM_HEADS = TensorLayout(2)
STACKED = TensorLayout(order=(0, 2, 1))  # [experts, outputs, inputs] and [experts, inputs, outputs]
IN_TURNS = TensorLayout(interleaved=2)
IN_GROUPS = TensorLayout(1, transposed=True, grouped=True)
FLAT_IN_GROUPS = TensorLayout(flat=True, grouped=True)
HALVES = TensorLayout(order=(0, 1, 2))  # [experts, inputs, outputs], with fused outputs
