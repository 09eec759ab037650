"""Linear layers given by an equation: `Einsum`, and `Bilinear` for two inputs."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module import Module
from nnx.core.variables import Param
from nnx.nn.checks import check_last_axis
from nnx.nn.dtypes import PromoteDtype, as_dtype, as_optional_dtype, promote_dtype
from nnx.nn.initial_values import InitializerLike, compiled, default_bias_init, default_kernel_init, initial_value
from nnx.nn.initializers import lecun_normal
from nnx.nn.linear import NO_METADATA

EQUATION_GIVEN = (
    "Einsum needs its equation exactly once: in the constructor or in the call, got {got}. "
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


class _Equation(NamedTuple):
    """An einsum equation: one string of letters per operand, `...` allowed in `inputs` and `output`."""

    text: str
    inputs: str
    kernel: str
    output: str

    def kernel_sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        if len(shape) != len(self.kernel):
            raise ValueError(
                KERNEL_AXES.format(equation=self.text, letters=self.kernel, n=len(self.kernel), shape=shape)
            )
        return dict(zip(self.kernel, shape, strict=True))

    def check_bias(self, kernel_shape: tuple[int, ...], bias_shape: tuple[int, ...] | None) -> None:
        sizes = self.kernel_sizes(kernel_shape)
        expected = tuple(sizes[letter] for letter in self.output if letter in sizes)
        if bias_shape is not None and bias_shape != expected:
            raise ValueError(BIAS_AXES.format(equation=self.text, expected=expected, got=bias_shape))

    def check_input(self, kernel_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
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

    def bias_layout(self, kernel_shape: tuple[int, ...], input_axes: int) -> tuple[int, ...]:
        """The shape in which the bias meets the output: size one along axes that come from the input."""
        sizes = self.kernel_sizes(kernel_shape)
        unnamed = (1,) * (input_axes - len(self.inputs.replace("...", "")))
        before, ellipsis, after = self.output.partition("...")
        return (
            *(sizes.get(letter, 1) for letter in before),
            *(unnamed if ellipsis else ()),
            *(sizes.get(letter, 1) for letter in after),
        )


@cache
def _parse(text: str) -> _Equation:
    operands, arrow, output = text.replace(" ", "").partition("->")
    inputs, comma, kernel = operands.partition(",")
    if not (arrow and comma) or "," in kernel or "." in kernel:
        raise ValueError(EQUATION_FORM.format(got=text))
    return _Equation(text, inputs, kernel, output)


def _einsum(
    x: Array,
    kernel: Array,
    bias: Array | None,
    *,
    equation: _Equation,
    dtype: Any,
    precision: PrecisionLike,
    preferred_element_type: Any,
    out_sharding: Any,
    einsum_op: Callable[..., Array] = jnp.einsum,
    promote: PromoteDtype = promote_dtype,
) -> Array:
    x, kernel, bias = promote((x, kernel, bias), dtype=dtype)
    options = {} if out_sharding is None else {"out_sharding": out_sharding}
    y = einsum_op(
        equation.text, x, kernel, precision=precision, preferred_element_type=preferred_element_type, **options
    )
    return y if bias is None else y + jnp.reshape(bias, equation.bias_layout(kernel.shape, x.ndim))


_einsum_compiled = partial(
    jax.jit, static_argnames=("equation", "dtype", "precision", "preferred_element_type", "out_sharding")
)(_einsum)


class Einsum(Module):
    """`einsum(equation, x, kernel) + bias` with a learned kernel and bias.

    Args:
        einsum_str: the equation, input first, kernel second; `None` to give it in the call instead.
        kernel_shape: shape of the kernel.
        bias_shape: sizes of those output axes that are axes of the kernel, in output order; `None` for no bias.
        dtype: of the computation; by default that of input and parameters.
        param_dtype: in which the parameters are stored.
        precision: of the product, see `jax.lax.Precision`.
        kernel_init: initialiser of the kernel.
        bias_init: initialiser of the bias.
        promote_dtype: replaces the function that brings input, kernel and bias to one dtype.
        einsum_op: replaces `jax.numpy.einsum`.
        preferred_element_type: in which the product is accumulated and returned.
        ctx: draws the parameters from its stream "params".
        kernel_metadata: metadata of the kernel's Variable.
        bias_metadata: metadata of the bias's Variable.

    >>> import nnx, jax.numpy as jnp
    >>> layer = nnx.Einsum("nta,hab->nthb", (8, 2, 4), (8, 4), ctx=nnx.context(0))
    >>> layer(jnp.ones((16, 11, 2))).shape
    (16, 11, 8, 4)
    """

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
        promote_dtype: PromoteDtype = promote_dtype,
        einsum_op: Callable[..., Array] = jnp.einsum,
        preferred_element_type: DTypeLike | None = None,
        ctx: Context,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        self.einsum_str = einsum_str
        self.kernel_shape = tuple(kernel_shape)
        self.bias_shape = None if bias_shape is None else tuple(bias_shape)
        if einsum_str is not None:
            _parse(einsum_str).check_bias(self.kernel_shape, self.bias_shape)
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = param_dtype = as_dtype(param_dtype)
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.einsum_op = einsum_op
        self.preferred_element_type = as_optional_dtype(preferred_element_type)
        self.kernel = Param(initial_value(self, kernel_init, ctx, self.kernel_shape, param_dtype), **kernel_metadata)
        self.bias = None
        if self.bias_shape is not None:
            self.bias = Param(initial_value(self, bias_init, ctx, self.bias_shape, param_dtype), **bias_metadata)

    def __call__(self, inputs: Array, einsum_str: str | None = None, out_sharding: Any = None) -> Array:
        text = self.einsum_str if einsum_str is None else einsum_str
        if text is None or (einsum_str is not None and self.einsum_str is not None):
            raise ValueError(EQUATION_GIVEN.format(got="neither" if text is None else "both"))
        equation = _parse(text)
        equation.check_bias(self.kernel_shape, self.bias_shape)
        equation.check_input(self.kernel_shape, inputs.shape)
        settings = {
            "equation": equation,
            "dtype": self.dtype,
            "precision": self.precision,
            "preferred_element_type": self.preferred_element_type,
            "out_sharding": out_sharding,
        }
        if self.einsum_op is jnp.einsum and self.promote_dtype is promote_dtype:
            return _einsum_compiled(inputs, self.kernel, self.bias, **settings)
        return _einsum(inputs, self.kernel, self.bias, **settings, einsum_op=self.einsum_op, promote=self.promote_dtype)


@partial(jax.jit, static_argnames=("dtype", "precision"))
def _bilinear(
    x1: Array, x2: Array, kernel: Array, bias: Array | None, *, dtype: Any, precision: PrecisionLike
) -> Array:
    x1, x2, kernel, bias = promote_dtype((x1, x2, kernel, bias), dtype=dtype)
    y = jnp.einsum("...i,...j,ijk->...k", x1, x2, kernel, precision=precision)
    return y if bias is None else y + jnp.reshape(bias, (1,) * (y.ndim - 1) + bias.shape)


_pairs_lecun_normal = compiled(lecun_normal(in_axis=(0, 1), out_axis=2))


class Bilinear(Module):
    """`y[k] = sum_ij x1[i] kernel[i, j, k] x2[j] + bias[k]` on the last axes of two inputs.

    Shapes: `(..., in1_features), (..., in2_features) -> (..., out_features)`, with equal leading axes.

    Args:
        in1_features: size of the first input's last axis.
        in2_features: size of the second input's last axis.
        out_features: size of the output's last axis.
        use_bias: whether to add a bias.
        dtype: of the computation; by default that of inputs and parameters.
        param_dtype: in which the parameters are stored.
        precision: of the products, see `jax.lax.Precision`.
        kernel_init: initialiser of the kernel, of shape `(in1_features, in2_features, out_features)`.
        bias_init: initialiser of the bias.
        ctx: draws the parameters from its stream "params".

    >>> import nnx, jax.numpy as jnp
    >>> layer = nnx.Bilinear(3, 4, 5, ctx=nnx.context(0))
    >>> layer(jnp.ones((2, 3)), jnp.ones((2, 4))).shape
    (2, 5)
    """

    logical_axes = {"kernel": ("in", None, "out"), "bias": ("out",)}

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
    ):
        self.in1_features = in1_features
        self.in2_features = in2_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = param_dtype = as_dtype(param_dtype)
        self.precision = precision
        shape = (in1_features, in2_features, out_features)
        self.kernel = Param(initial_value(self, kernel_init, ctx, shape, param_dtype))
        self.bias = None
        if use_bias:
            self.bias = Param(initial_value(self, bias_init, ctx, (out_features,), param_dtype))

    def __call__(self, x1: Array, x2: Array) -> Array:
        check_last_axis(self, x1, self.in1_features, "in1_features")
        check_last_axis(self, x2, self.in2_features, "in2_features")
        if x1.shape[:-1] != x2.shape[:-1]:
            raise ValueError(BILINEAR_AXES.format(first=x1.shape, second=x2.shape))
        return _bilinear(x1, x2, self.kernel, self.bias, dtype=self.dtype, precision=self.precision)
