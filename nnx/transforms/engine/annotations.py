"""The types of transforms: what an editor knows about a decorator's options and the function it returns.

Users never meet these at run time: `nnx.jit` returns a plain function, and a type checker reads it as the Protocol
`JitWrapped`. *Options* are the keyword arguments of one transform, written once for its forms:
`nnx.vmap(f, ...)`, `@nnx.vmap(...)` and the class form `nnx.Vmap(Module, ...)`.
"""

from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

import jax
from jax.typing import ArrayLike

from nnx.core.module.module import Module
from nnx.core.state.filters import Filter
from nnx.core.state.state import State

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S_co = TypeVar("S_co", covariant=True)
A = TypeVar("A")
T = TypeVar("T")
M = TypeVar("M", bound=Module)

PositionalFilter = type | str | EllipsisType | Sequence[Filter]
"""What can be the first argument of `@nnx.grad(nnx.Param)`. A predicate cannot: it looks like the function itself."""

# Options


class JitOptions(TypedDict, total=False):
    """The options of `nnx.jit`."""

    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Sequence[str] | None
    in_shardings: Any
    out_shardings: Any
    keep_unused: bool
    inline: bool
    compiler_options: Mapping[str, Any] | None
    device: Any
    backend: str | None
    stateful: bool
    explain_recompiles: bool


class StackOptions(TypedDict, total=False):
    """The options that `nnx.scan` and `nnx.vmap` have in common, apart from `variable_axes`."""

    variable_broadcast: Filter
    split_rngs: Any
    in_axes: Any
    out_axes: Any
    data_transform: Callable[[Any], Any] | None
    metadata_params: Mapping[Any, Any] | None
    stateful: bool
    is_init: bool | None


class ScanOptions(StackOptions, total=False):
    """The options of `nnx.scan` and `nnx.Scan`, apart from `variable_axes` and `length`."""

    variable_carry: Filter
    reverse: bool
    unroll: int | bool


class VmapOptions(StackOptions, total=False):
    """The options of `nnx.vmap` and `nnx.Vmap`, apart from `variable_axes` and `axis_size`."""

    axis_name: Any
    spmd_axis_name: Any


class RematFlags(TypedDict, total=False):
    """The options of `nnx.remat` and `nnx.Remat` that are given by name only."""

    stateful: bool
    is_init: bool | None


class RematOptions(RematFlags, total=False):
    """The options of `nnx.remat`."""

    prevent_cse: bool
    static_argnums: int | Sequence[int] | None
    policy: Callable[..., Any] | str | Sequence[str] | Mapping[str, str] | None


class CustomOptions(TypedDict, total=False):
    """The options of `nnx.custom_vjp` and `nnx.custom_jvp`."""

    wrt: Filter
    nondiff_argnums: int | Sequence[int]


class DerivativeOptions(TypedDict, total=False):
    """The options that all derivatives have in common and that do not change the type of the result."""

    holomorphic: bool
    stateful: bool


class IntegerDerivativeOptions(DerivativeOptions, total=False):
    """The options of derivatives that can be taken with respect to integers, too."""

    allow_int: bool


class GradOptions(IntegerDerivativeOptions, total=False):
    """The options of `nnx.grad` and `nnx.value_and_grad` that do not change the type of the result."""

    reduce_axes: Sequence[str]


class JacobianOptions(DerivativeOptions, total=False):
    """The options of `nnx.jacfwd` and `nnx.hessian`."""

    argnums: int | Sequence[int]
    has_aux: bool


class JacrevOptions(IntegerDerivativeOptions, total=False):
    """The options of `nnx.jacrev`."""

    argnums: int | Sequence[int]
    has_aux: bool


# Decorators: what `@nnx.vmap(...)` and the like return


class Decorator(Protocol):
    """A decorator that keeps the arguments and the result of a function."""

    def __call__(self, fun: Callable[P, R], /) -> Callable[P, R]: ...


class JitDecorator(Protocol):
    """What `nnx.jit(**options)` returns."""

    def __call__(self, fun: Callable[P, R], /) -> "JitWrapped[P, R]": ...


class GradDecorator(Protocol):
    """What `nnx.grad(**options)` returns, without `has_aux`."""

    def __call__(self, fun: Callable[P, Any], /) -> "Differentiated[P, State, Any]": ...


class GradWithAuxDecorator(Protocol):
    """What `nnx.grad(has_aux=True, **options)` returns."""

    def __call__(self, fun: Callable[P, tuple[Any, A]], /) -> "Differentiated[P, tuple[State, A], tuple[Any, A]]": ...


class ValueAndGradDecorator(Protocol):
    """What `nnx.value_and_grad(**options)` returns."""

    def __call__(self, fun: Callable[P, R], /) -> "Differentiated[P, tuple[R, State], tuple[R, Any]]": ...


class DerivativeDecorator(Protocol):
    """A decorator that returns derivatives of any type: with `argnums`, the type depends on the arguments."""

    def __call__(self, fun: Callable[P, Any], /) -> Callable[P, Any]: ...


class ValueAndDerivativeDecorator(Protocol):
    """A decorator that returns the value and a derivative of any type."""

    def __call__(self, fun: Callable[P, R], /) -> Callable[P, tuple[R, Any]]: ...


# Transforms whose forms are the same


class JacobianTransform(Protocol):
    """The type of `nnx.jacfwd` and `nnx.hessian`, as functions and as decorators."""

    __name__: str

    @overload
    def __call__(self, wrt: PositionalFilter, /, **options: Unpack[JacobianOptions]) -> DerivativeDecorator: ...
    @overload
    def __call__(
        self,
        fun: Callable[P, jax.Array],
        wrt: Filter = ...,
        *,
        argnums: Literal[0] = 0,
        has_aux: Literal[False] = False,
        **options: Unpack[DerivativeOptions],
    ) -> "Differentiated[P, State, Any]": ...
    @overload
    def __call__(
        self, fun: Callable[P, Any], wrt: Filter = ..., **options: Unpack[JacobianOptions]
    ) -> Callable[P, Any]: ...
    @overload
    def __call__(self, *, wrt: Filter = ..., **options: Unpack[JacobianOptions]) -> DerivativeDecorator: ...


class JacrevTransform(Protocol):
    """The type of `nnx.jacrev`: that of `nnx.jacfwd`, with the option `allow_int`."""

    __name__: str

    @overload
    def __call__(self, wrt: PositionalFilter, /, **options: Unpack[JacrevOptions]) -> DerivativeDecorator: ...
    @overload
    def __call__(
        self,
        fun: Callable[P, jax.Array],
        wrt: Filter = ...,
        *,
        argnums: Literal[0] = 0,
        has_aux: Literal[False] = False,
        **options: Unpack[IntegerDerivativeOptions],
    ) -> "Differentiated[P, State, Any]": ...
    @overload
    def __call__(
        self, fun: Callable[P, Any], wrt: Filter = ..., **options: Unpack[JacrevOptions]
    ) -> Callable[P, Any]: ...
    @overload
    def __call__(self, *, wrt: Filter = ..., **options: Unpack[JacrevOptions]) -> DerivativeDecorator: ...


# Transformed functions

# What can be differentiated and is not a Module. The gradient has the same structure, which has no name in types.
Plain = ArrayLike | dict[Any, Any] | list[Any] | tuple[Any, ...]


class Differentiated(Protocol[P, S_co, R_co]):
    """A derivative of a function with respect to its first argument.

    It returns an `S_co` (with a State for the gradient) if that argument is a Module, and an `R_co` otherwise. This is
    decided by the call and not by the function's annotations, since the first parameter of a lambda has none. Where a
    function wants a Module of one class, any Module is accepted: `optimizer.model` is just a Module to a checker.
    """

    @overload
    def __call__(
        self: "Differentiated[Concatenate[Plain, Q], Any, R_co]", first: Plain, /, *args: Q.args, **kwargs: Q.kwargs
    ) -> R_co: ...
    @overload
    def __call__(
        self: "Differentiated[Concatenate[M, Q], S_co, Any]", first: Module, /, *args: Q.args, **kwargs: Q.kwargs
    ) -> S_co: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: Any = None, /) -> "Differentiated[P, S_co, R_co]": ...
    @overload
    def __get__(
        self: "Differentiated[Concatenate[M, Q], S_co, Any]", instance: M, owner: Any = None, /
    ) -> Callable[Q, S_co]: ...


class JitWrapped(Protocol[P, R_co]):
    """What `nnx.jit` returns, to a type checker: the function, and what JAX offers on jitted functions.

    At run time it is a plain function with these attributes.
    """

    __name__: str
    __qualname__: str
    __wrapped__: Any
    trace_count: int
    """The number of times the function has been traced."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: Any = None, /) -> "JitWrapped[P, R_co]": ...
    @overload
    def __get__(self: "JitWrapped[Concatenate[T, Q], R]", instance: T, owner: Any = None, /) -> "JitMethod[Q, R]": ...

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Lowers the function for these arguments, as `jax.jit(f).lower(...)`."""
        ...

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Traces the function for these arguments, as `jax.jit(f).trace(...)`."""
        ...

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Returns the output's shapes and dtypes; nothing is computed and no Module changes."""
        ...

    def clear_cache(self) -> None:
        """Forgets everything compiled."""
        ...


class JitMethod(Protocol[P, R_co]):
    """A jitted method, bound to its Module. `lower` and the like are on the function: `Model.step.lower(model, x)`."""

    __name__: str
    __self__: Any
    __func__: Any
    trace_count: int

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    def clear_cache(self) -> None:
        """Forgets everything compiled, for all Modules."""
        ...
