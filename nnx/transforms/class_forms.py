"""The class forms `Scan`, `Vmap` and `Remat`: a transform of a Module class is a constructor of Modules that wrap one.

The wrapped Module is an attribute (`scan_module`, `vmap_module`, `remat_module`). Calling the outer Module runs the
wrapped one's `__call__` transformed, and `.call.method(...)` does the same for any other method.
"""

from collections.abc import Callable, Mapping
from typing import Any, Generic, Unpack

from nnx.core.module import Module
from nnx.core.proxies import Access, Way
from nnx.transforms.annotations import M, P, RematOptions, ScanOptions, VmapOptions
from nnx.transforms.call import CallAt
from nnx.transforms.remat import remat
from nnx.transforms.scan import scan
from nnx.transforms.stacking import Stacking
from nnx.transforms.vmap import construct, vmap


class TransformedModule(Module):
    """A Module that holds another one, and runs it transformed."""

    def _inner(self) -> Any:
        raise AssertionError("each subclass returns the Module it wraps")

    def _lift(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        raise AssertionError("each subclass applies its transform")

    @property
    def call(self) -> Access:
        """Any method of the wrapped Module, transformed: `m.call.method(...)`."""

        def run(way: Way, args: Any, kwargs: Any) -> Any:
            return self._lift(CallAt(way))(self._inner(), *args, **kwargs)

        return Access(run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the wrapped Module's `__call__`, transformed."""
        return self.call(*args, **kwargs)


class ScanModule(TransformedModule, Generic[M]):
    """What `nnx.Scan` builds: `m(carry, xs, *broadcast)` returns `(carry, ys)`."""

    scan_module: M
    options: dict[str, Any]

    def __init__(self, module: M, options: dict[str, Any]):
        self.scan_module = module
        self.options = options

    def _inner(self) -> Any:
        return self.scan_module

    def _lift(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        return scan(fun, **self.options)


class VmapModule(TransformedModule, Generic[M]):
    """What `nnx.Vmap` builds: one Module that is many, called on mapped arguments."""

    vmap_module: M
    options: dict[str, Any]

    def __init__(self, module: M, options: dict[str, Any]):
        self.vmap_module = module
        self.options = options

    def _inner(self) -> Any:
        return self.vmap_module

    def _lift(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        in_axes = self.options.get("in_axes", 0)
        if isinstance(in_axes, (tuple, list)):
            return vmap(fun, **{**self.options, "in_axes": (None, *in_axes)})
        return vmap(fun, **self.options)


class RematModule(TransformedModule, Generic[M]):
    """What `nnx.Remat` builds: the wrapped Module, computed again in the backward pass."""

    remat_module: M
    options: dict[str, Any]

    def __init__(self, module: M, options: dict[str, Any]):
        self.remat_module = module
        self.options = options

    def _inner(self) -> Any:
        return self.remat_module

    def _lift(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        static = self.options.get("static_argnums")
        if static is not None:  # the user counts without the Module
            numbers = (static,) if isinstance(static, int) else tuple(static)
            options: dict[str, Any] = {**self.options, "static_argnums": tuple(n + 1 if n >= 0 else n for n in numbers)}
            return remat(fun, **options)
        return remat(fun, **self.options)


def _stacked(outer: Any, name: str, size_name: str, module_type: Any, options: dict[str, Any]) -> Callable[..., Any]:
    stacking = Stacking.of(
        name,
        size_name,
        options.get("variable_axes"),
        ...,
        None,
        options.get("split_rngs"),
        options.get(size_name),
        options.get("metadata_params"),
        None,
    )
    stacking.require_size()

    def make(*args: Any, **kwargs: Any) -> Any:
        return outer(construct(stacking, module_type, args, kwargs), options)

    make.__name__ = f"{outer.__name__}[{getattr(module_type, '__name__', module_type)}]"
    make.__doc__ = module_type.__doc__
    return make


def Scan(
    module_type: Callable[P, M],
    *,
    variable_axes: Mapping[Any, int] | None = None,
    length: int | None = None,
    **options: Unpack[ScanOptions],
) -> Callable[P, ScanModule[M]]:
    """A constructor of `length` Modules in one, scanned over when called.

    Args:
        module_type: a Module class, or another such constructor (`nnx.Remat(Block)`).
        variable_axes: which variables are stacked, `{filter: axis}`.
        length: the number of steps.
        **options: those of `nnx.scan`.

    Returns:
        A constructor with the arguments of `module_type`. The Module it builds has the stacked one as `scan_module`;
        calling it, or `model.call.any_method(carry, xs)`, scans over the steps.

    >>> class Block(nnx.Module):
    ...     def __init__(self, *, ctx):
    ...         self.linear = nnx.Linear(2, 2, ctx=ctx)
    ...     def __call__(self, x, _):
    ...         return self.linear(x), None
    >>> stack = nnx.Scan(Block, variable_axes={nnx.Param: 0}, split_rngs="params", length=5)(ctx=nnx.context(0))
    >>> stack.scan_module.linear.kernel.shape
    (5, 2, 2)
    >>> carry, _ = stack(jnp.ones((1, 2)), None)
    """
    given = {"variable_axes": dict(variable_axes or {}), "length": length, **options}
    return _stacked(ScanModule, "nnx.scan", "length", module_type, given)


def Vmap(
    module_type: Callable[P, M],
    *,
    variable_axes: Mapping[Any, int] | None = None,
    axis_size: int | None = None,
    **options: Unpack[VmapOptions],
) -> Callable[P, VmapModule[M]]:
    """A constructor of `axis_size` Modules in one, mapped over when called: an ensemble.

    Args:
        module_type: a Module class, or another such constructor.
        variable_axes: which variables are stacked, `{filter: axis}`.
        axis_size: the number of members.
        **options: those of `nnx.vmap`.

    Returns:
        A constructor with the arguments of `module_type`. The Module it builds has the stacked one as `vmap_module`;
        calling it, or `model.call.any_method(...)`, maps over the members.

    >>> make = nnx.Vmap(nnx.Linear, variable_axes={nnx.Param: 0}, split_rngs="params", axis_size=6, in_axes=None)
    >>> ensemble = make(3, 2, ctx=nnx.context(0))
    >>> ensemble.vmap_module.kernel.shape, ensemble(jnp.ones((4, 3))).shape
    ((6, 3, 2), (6, 4, 2))
    """
    given = {"variable_axes": dict(variable_axes or {}), "axis_size": axis_size, **options}
    return _stacked(VmapModule, "nnx.vmap", "axis_size", module_type, given)


def Remat(module_type: Callable[P, M], **options: Unpack[RematOptions]) -> Callable[P, RematModule[M]]:
    """A constructor of Modules that are computed again in the backward pass.

    Args:
        module_type: a Module class, or another such constructor.
        **options: those of `nnx.remat`.

    Returns:
        A constructor with the arguments of `module_type`. The Module it builds has the real one as `remat_module`.

    >>> block = nnx.Remat(nnx.Linear)(2, 3, ctx=nnx.context(0))
    >>> block(jnp.ones((1, 2))).shape, block.remat_module.kernel.shape
    ((1, 3), (2, 3))
    """

    def make(*args: P.args, **kwargs: P.kwargs) -> RematModule[M]:
        return RematModule(module_type(*args, **kwargs), dict(options))

    make.__name__ = f"RematModule[{getattr(module_type, '__name__', module_type)}]"
    make.__doc__ = module_type.__doc__
    return make
