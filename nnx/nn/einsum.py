"""Linear layers written as an equation: `Einsum`, and `Bilinear` for two inputs."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.module import Module
from nnx.nn.quantized.quantized import as_operand, weight_dtype
from nnx.nn.quantized.quantized_product import quantized_product
from nnx.nn.support.checks import check_last_axis, check_sizes, shape_of
from nnx.nn.support.draws import fan_in_initializer
from nnx.nn.support.parameters import (
    NO_METADATA,
    AxisNames,
    InitializerLike,
    default_bias_init,
    default_kernel_init,
    kernel_init_for,
    make_param,
)
from nnx.nn.support.settings import (
    Hook,
    PromoteDtype,
    as_dtype,
    as_optional_dtype,
    cast,
    compiled_body,
    default_promote_dtype,
    promote_dtype,
    statistics_dtype,
)

EQUATION_GIVEN = (
    "Einsum needs its equation exactly once, in the constructor or in the call, got {got}. "
    "Write `nnx.Einsum('ab,bc->ac', kernel_shape, ctx=ctx)` and call it with the input alone."
)
EQUATION_FORM = (
    "Einsum expects an equation with the input, the kernel and the output, like 'ab,bc->ac' or '...b,bc->...c' "
    "(no `...` in the kernel), got {got!r}."
)
KERNEL_AXES = "Einsum with {equation!r}: the kernel {letters!r} has {n} axes, but `kernel_shape` is {shape}."
BIAS_AXES = (
    "Einsum with {equation!r}: the output axes that come from the kernel have sizes {expected}, "
    "but `bias_shape` is {got}. Write `bias_shape={expected}`."
)
INPUT_AXES = "Einsum with {equation!r} expected an input with {expected} axes, got {got}: the input has shape {shape}."
INPUT_SIZE = (
    "Einsum with {equation!r} and a kernel of shape {kernel} expected {expected} features on the input's axis "
    "{letter!r}, got {got}: the input has shape {shape}."
)
BILINEAR_AXES = (
    "Bilinear expected two inputs with equal leading axes, got shapes {first} and {second}. "
    "Broadcast one of them with `jnp.broadcast_to` first."
)


class Equation(NamedTuple):
    """A parsed equation: one string of letters per operand, with `...` allowed in `inputs` and `output`."""

    text: str
    inputs: str
    kernel: str
    output: str

    def kernel_sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Returns the size of each letter of the kernel."""
        if len(shape) != len(self.kernel):
            raise ValueError(
                KERNEL_AXES.format(equation=self.text, letters=self.kernel, n=len(self.kernel), shape=shape)
            )
        return dict(zip(self.kernel, shape, strict=True))

    def kernel_axes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Returns the kernel's axes by what they are to its initializer: summed over, new, shared with the input."""
        axes = list(enumerate(self.kernel))
        summed = tuple(i for i, letter in axes if letter not in self.output)
        new = tuple(i for i, letter in axes if letter in self.output and letter not in self.inputs)
        return summed, new, tuple(i for i, letter in axes if letter in self.output and letter in self.inputs)

    def check_bias(self, kernel_shape: tuple[int, ...], bias_shape: tuple[int, ...] | None) -> None:
        """Raises `ValueError` unless the bias has the output axes that come from the kernel."""
        sizes = self.kernel_sizes(kernel_shape)
        expected = tuple(sizes[letter] for letter in self.output if letter in sizes)
        if bias_shape is not None and bias_shape != expected:
            raise ValueError(BIAS_AXES.format(equation=self.text, expected=expected, got=bias_shape))

    def check_input(self, kernel_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
        """Raises `ValueError` unless an input of this shape fits the equation and the kernel."""
        before, ellipsis, after = self.inputs.partition("...")
        named = len(before) + len(after)
        if len(shape) < named or (not ellipsis and len(shape) > named):
            expected = f"at least {named}" if ellipsis else named
            raise ValueError(INPUT_AXES.format(equation=self.text, expected=expected, got=len(shape), shape=shape))
        sizes = self.kernel_sizes(kernel_shape)
        trailing = shape[len(shape) - len(after) :]
        for letter, got in [*zip(before, shape, strict=False), *zip(after, trailing, strict=True)]:
            expected = sizes.get(letter, got)
            if got != expected:
                message = INPUT_SIZE.format(
                    equation=self.text, kernel=kernel_shape, expected=expected, letter=letter, got=got, shape=shape
                )
                raise ValueError(message)

    @property
    def is_matrix_product(self) -> bool:
        """Whether the last axes of the input are summed with the first ones of the kernel, whose others come last."""
        summed = len(self.kernel_axes()[0])
        inputs, outputs = self.kernel[:summed], self.kernel[summed:]
        kept = self.inputs.removesuffix(inputs)
        return self.inputs == kept + inputs and self.output == kept + outputs and not set(kept) & set(self.kernel)

    @property
    def kept_order(self) -> tuple[int, ...]:
        """The order in which the other axes of the kernel appear in the output."""
        kept = [letter for letter in self.kernel if letter in self.output]
        return tuple(kept.index(letter) for letter in self.output if letter in kept)

    def bias_layout(self, kernel_shape: tuple[int, ...], input_axes: int) -> tuple[int, ...]:
        """Returns the shape in which the bias meets the output: size 1 along axes that come from the input."""
        sizes = self.kernel_sizes(kernel_shape)
        unnamed = (1,) * (input_axes - len(self.inputs.replace("...", "")))
        before, ellipsis, after = self.output.partition("...")
        return (
            *(sizes.get(letter, 1) for letter in before),
            *(unnamed if ellipsis else ()),
            *(sizes.get(letter, 1) for letter in after),
        )


@cache
def parse_equation(text: str) -> Equation:
    """Returns the parts of an equation like 'ab,bc->ac'."""
    operands, arrow, output = text.replace(" ", "").partition("->")
    inputs, comma, kernel = operands.partition(",")
    if not (arrow and comma) or "," in kernel or "." in kernel:
        raise ValueError(EQUATION_FORM.format(got=text))
    return Equation(text, inputs, kernel, output)


@compiled_body
def _einsum(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    scale: jax.Array | None,
    *,
    equation: Equation,
    dtype: Any,
    param_dtype: Any,
    precision: PrecisionLike,
    preferred_element_type: Any,
    out_sharding: Any,
    einsum_op: Hook[Callable[..., jax.Array]] = jnp.einsum,
    promote: Hook[PromoteDtype] = default_promote_dtype,
) -> jax.Array:
    if scale is None:
        x, kernel, bias = promote((x, kernel, bias), dtype=dtype)
    else:
        x, _, bias = promote((x, cast(scale, weight_dtype(scale, param_dtype)), bias), dtype=dtype)
        summed, is_replaced = equation.kernel_axes()[0], einsum_op is not jnp.einsum
        is_plain = precision is None and out_sharding is None and not is_replaced
        if is_plain and equation.is_matrix_product:
            y = quantized_product(x, kernel, scale, len(summed), dtype=preferred_element_type)
            if y is not None:
                return y if bias is None else y + jnp.reshape(bias, equation.bias_layout(kernel.shape, x.ndim))
        kernel, scale = as_operand(kernel, scale, summed, x.dtype, whole=is_replaced)
    options = {} if out_sharding is None else {"out_sharding": out_sharding}
    # Sums of products with integers can be large, so they are not rounded before they are scaled.
    wide = preferred_element_type if scale is None else preferred_element_type or statistics_dtype(x.dtype)
    y = einsum_op(equation.text, x, kernel, precision=precision, preferred_element_type=wide, **options)
    if scale is not None:
        scale = jnp.reshape(jnp.transpose(scale, equation.kept_order), equation.bias_layout(kernel.shape, x.ndim))
        y = cast(y * scale, preferred_element_type or x.dtype)
    return y if bias is None else y + jnp.reshape(bias, equation.bias_layout(kernel.shape, x.ndim))


class Einsum(Module):
    """Computes `einsum(equation, x, kernel) + bias` with a learned kernel and bias.

    Args:
        einsum_str: the equation, input first, kernel second; `None` to pass it in the call instead.
        kernel_shape: the shape of the kernel.
        bias_shape: the sizes of the output axes that are axes of the kernel, in output order; `None` for no bias.
        dtype: the computation dtype; by default, the dtype that input and parameters promote to.
        param_dtype: the dtype in which the parameters are stored.
        precision: the precision of the product, see `jax.lax.Precision`.
        kernel_init: the initializer of the kernel. The default finds the axes that are summed over in the equation; if
            that is passed in the call, they are all but the last.
        bias_init: the initializer of the bias.
        promote_dtype: a replacement for the function that converts input, kernel and bias to one dtype.
        einsum_op: a replacement for `jax.numpy.einsum`.
        preferred_element_type: the dtype in which the product is accumulated and returned.
        ctx: the Context; its stream "params" initializes the parameters.
        kernel_metadata: metadata of the kernel's Variable.
        bias_metadata: metadata of the bias's Variable.

    >>> layer = nnx.Einsum("nta,hab->nthb", (8, 2, 4), (8, 4), ctx=nnx.context(0))
    >>> layer(jnp.ones((16, 11, 2))).shape
    (16, 11, 8, 4)
    """

    einsum_str: str | None
    kernel_shape: tuple[int, ...]
    bias_shape: tuple[int, ...] | None
    dtype: np.dtype | None
    param_dtype: np.dtype
    precision: PrecisionLike
    promote_dtype: PromoteDtype
    einsum_op: Callable[..., jax.Array]
    preferred_element_type: np.dtype | None
    kernel: jax.Array
    kernel_scale: jax.Array | None = None
    bias: jax.Array | None

    def __init__(
        self,
        einsum_str: str | None,
        kernel_shape: Sequence[int],
        bias_shape: Sequence[int] | None = None,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: InitializerLike = default_kernel_init,
        bias_init: InitializerLike = default_bias_init,
        promote_dtype: PromoteDtype = default_promote_dtype,
        einsum_op: Callable[..., jax.Array] = jnp.einsum,
        preferred_element_type: DTypeLike | None = None,
        ctx: Context,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        check_sizes(self, kernel_shape=kernel_shape)
        self.einsum_str = einsum_str
        self.kernel_shape = tuple(kernel_shape)
        self.bias_shape = None if bias_shape is None else tuple(bias_shape)
        if einsum_str is not None:
            equation = parse_equation(einsum_str)
            equation.check_bias(self.kernel_shape, self.bias_shape)
            kernel_init = kernel_init_for(kernel_init, *equation.kernel_axes())
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.einsum_op = einsum_op
        self.preferred_element_type = as_optional_dtype(preferred_element_type)
        self.kernel = make_param(self, kernel_init, ctx, self.kernel_shape, kernel_metadata)
        self.bias = None
        if self.bias_shape is not None:
            self.bias = make_param(self, bias_init, ctx, self.bias_shape, bias_metadata)

    def __call__(self, inputs: jax.Array, einsum_str: str | None = None, out_sharding: Any = None) -> jax.Array:
        """Applies the layer.

        Args:
            inputs: the first operand of the equation.
            einsum_str: the equation, if the constructor did not get one.
            out_sharding: the sharding of the result on explicit mesh axes, see `jax.numpy.einsum`.

        Returns:
            The output of the equation.
        """
        text = self.einsum_str if einsum_str is None else einsum_str
        if text is None or (einsum_str is not None and self.einsum_str is not None):
            raise ValueError(EQUATION_GIVEN.format(got="neither" if text is None else "both"))
        equation = parse_equation(text)
        equation.check_bias(self.kernel_shape, self.bias_shape)
        equation.check_input(self.kernel_shape, shape_of(self, inputs))
        return _einsum(
            inputs,
            self.kernel,
            self.bias,
            self.kernel_scale,
            equation=equation,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
            einsum_op=self.einsum_op,
            promote=self.promote_dtype,
        )


@compiled_body
def _bilinear(
    x1: jax.Array, x2: jax.Array, kernel: jax.Array, bias: jax.Array | None, *, dtype: Any, precision: PrecisionLike
) -> jax.Array:
    x1, x2, kernel, bias = promote_dtype((x1, x2, kernel, bias), dtype=dtype)
    y = jnp.einsum("...i,...j,ijk->...k", x1, x2, kernel, precision=precision)
    return y if bias is None else y + jnp.reshape(bias, (1,) * (y.ndim - 1) + bias.shape)


# Every output sums over all pairs of inputs, so both input axes count toward the fan-in.
_pairs_lecun_normal = fan_in_initializer(1.0, "truncated_normal", in_axis=(0, 1), out_axis=2)


class Bilinear(Module):
    """Computes `y[k] = sum_ij x1[i] kernel[i, j, k] x2[j] + bias[k]` on the last axes of two inputs.

    Shapes: `(..., in1_features), (..., in2_features) -> (..., out_features)`, with equal leading axes.

    Args:
        in1_features: the size of the first input's last axis.
        in2_features: the size of the second input's last axis.
        out_features: the size of the output's last axis.
        use_bias: whether to add a bias.
        dtype: the computation dtype; by default, the dtype that inputs and parameters promote to.
        param_dtype: the dtype in which the parameters are stored.
        precision: the precision of the products, see `jax.lax.Precision`.
        kernel_init: the initializer of the kernel, of shape `(in1_features, in2_features, out_features)`.
        bias_init: the initializer of the bias.
        ctx: the Context; its stream "params" initializes the parameters.

    >>> layer = nnx.Bilinear(3, 4, 5, ctx=nnx.context(0))
    >>> layer(jnp.ones((2, 3)), jnp.ones((2, 4))).shape
    (2, 5)
    """

    logical_axes: ClassVar[AxisNames] = {"kernel": ("in", None, "out"), "bias": ("out",)}

    in1_features: int
    in2_features: int
    out_features: int
    use_bias: bool
    dtype: np.dtype | None
    param_dtype: np.dtype
    precision: PrecisionLike
    kernel: jax.Array
    bias: jax.Array | None

    def __init__(
        self,
        in1_features: int,
        in2_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: InitializerLike = _pairs_lecun_normal,
        bias_init: InitializerLike = default_bias_init,
        ctx: Context,
    ) -> None:
        check_sizes(self, in1_features=in1_features, in2_features=in2_features, out_features=out_features)
        self.in1_features = in1_features
        self.in2_features = in2_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.precision = precision
        self.kernel = make_param(self, kernel_init, ctx, (in1_features, in2_features, out_features))
        self.bias = make_param(self, bias_init, ctx, (out_features,)) if use_bias else None

    def __call__(self, x1: jax.Array, x2: jax.Array) -> jax.Array:
        """Applies the layer to inputs of shapes `(..., in1_features)` and `(..., in2_features)`."""
        check_last_axis(self, x1, self.in1_features, "in1_features")
        check_last_axis(self, x2, self.in2_features, "in2_features")
        if x1.shape[:-1] != x2.shape[:-1]:
            raise ValueError(BILINEAR_AXES.format(first=x1.shape, second=x2.shape))
        return _bilinear(x1, x2, self.kernel, self.bias, dtype=self.dtype, precision=self.precision)
