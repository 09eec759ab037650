"""The class forms `Scan`, `Vmap` and `Remat`: Modules that hold another one and run it transformed.

`nnx.Scan(Block, ...)` returns a constructor with the arguments of `Block`, and that constructor makes a `Scan`. The
wrapped Module is an attribute (`scan_module`, `vmap_module`, `remat_module`). Calling the outer Module runs the
wrapped one's `__call__` transformed, and `.call.method(...)` does the same for any other method.

`nnx.scan`, `nnx.vmap` and `nnx.remat` of a Module class or of such a constructor mean these forms.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Unpack

from nnx.core.hints.hints import add_hints
from nnx.core.hints.table import SCAN_MODULE
from nnx.core.module.attributes import decide_again
from nnx.core.module.call_chains import Access, Way
from nnx.core.module.info import info_of, new_module
from nnx.core.module.module import Module
from nnx.transforms.control.remat import remat
from nnx.transforms.control.scan import scan
from nnx.transforms.control.stacking import Stacking
from nnx.transforms.control.vmap import construct, vmap
from nnx.transforms.engine.annotations import M, P, RematFlags, ScanOptions, VmapOptions
from nnx.transforms.engine.call import CallAt
from nnx.transforms.engine.decorators import class_forms


class TransformedModule(Module, Generic[M]):
    """A Module that holds another one, and runs it transformed."""

    inner_name = ""  # the attribute that holds it
    options: dict[str, Any]

    def _lift(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        raise AssertionError("each subclass applies its transform")

    @property
    def call(self) -> Access:
        """Any method of the wrapped Module, transformed: `m.call.method(...)`."""

        def run(way: Way, args: Any, kwargs: Any) -> Any:
            return self._lift(CallAt(way))(getattr(self, self.inner_name), *args, **kwargs)

        return Access(run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the wrapped Module's `__call__`, transformed."""
        return self.call(*args, **kwargs)

    @classmethod
    def _constructor(cls, module_type: Any, options: dict[str, Any], build: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a constructor of this class, which wraps what `build` returns."""

        def make(*args: Any, **kwargs: Any) -> Any:
            inner = build(*args, **kwargs)
            # What a constructor does, without calling the class: its `__new__` returns constructors, not instances.
            outer = new_module(cls, {}, constructing=True)
            setattr(outer, cls.inner_name, inner)
            outer.options = dict(options)
            decide_again(outer)
            info_of(outer).constructing = False
            return outer

        make.__name__ = f"{cls.__name__}[{getattr(module_type, '__name__', module_type)}]"
        make.__doc__ = module_type.__doc__
        make.makes_modules = True
        return make


class Scan(TransformedModule[M]):
    """A Module that is `length` Modules in one, scanned over when called.

    `nnx.Scan(Block, ...)` returns a constructor with the arguments of `Block`. The Module it builds has the stacked one
    as `scan_module`; calling it, or `model.call.any_method(carry, xs)`, scans over the steps.

    Args:
        module_type: a Module class, or another such constructor (`nnx.Remat(Block)`).
        variable_axes: which variables are stacked, `{filter: axis}`.
        length: the number of steps.
        **options: those of `nnx.scan`.

    >>> class Block(nnx.Module):
    ...     def __init__(self, *, ctx):
    ...         self.linear = nnx.Linear(2, 2, ctx=ctx)
    ...     def __call__(self, x, _):
    ...         return self.linear(x), None
    >>> stack = nnx.Scan(Block, variable_axes={nnx.Param: 0}, split_rngs="params", length=5)(ctx=nnx.context(0))
    >>> isinstance(stack, nnx.Scan), stack.scan_module.linear.kernel.shape
    (True, (5, 2, 2))
    >>> carry, _ = stack(jnp.ones((1, 2)), None)
    """

    inner_name = "scan_module"
    scan_module: M

    def __new__(
        cls,
        module_type: Callable[P, M],
        *,
        variable_axes: Mapping[Any, int] | None = None,
        length: int | None = None,
        **options: Unpack[ScanOptions],
    ) -> Callable[P, "Scan[M]"]:
        given = {"variable_axes": dict(variable_axes or {}), "length": length, **options}
        return cls._constructor(module_type, given, _stacked("nnx.scan", "length", module_type, given))

    def _lift(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        return scan(fun, **self.options)


add_hints(Scan, SCAN_MODULE)


class Vmap(TransformedModule[M]):
    """A Module that is `axis_size` Modules in one, mapped over when called: an ensemble.

    `nnx.Vmap(Linear, ...)` returns a constructor with the arguments of `Linear`. The Module it builds has the stacked
    one as `vmap_module`; calling it, or `model.call.any_method(...)`, maps over the members.

    Args:
        module_type: a Module class, or another such constructor.
        variable_axes: which variables are stacked, `{filter: axis}`.
        axis_size: the number of members.
        **options: those of `nnx.vmap`.

    >>> make = nnx.Vmap(nnx.Linear, variable_axes={nnx.Param: 0}, split_rngs="params", axis_size=6, in_axes=None)
    >>> ensemble = make(3, 2, ctx=nnx.context(0))
    >>> ensemble.vmap_module.kernel.shape, ensemble(jnp.ones((4, 3))).shape
    ((6, 3, 2), (6, 4, 2))
    """

    inner_name = "vmap_module"
    vmap_module: M

    def __new__(
        cls,
        module_type: Callable[P, M],
        *,
        variable_axes: Mapping[Any, int] | None = None,
        axis_size: int | None = None,
        **options: Unpack[VmapOptions],
    ) -> Callable[P, "Vmap[M]"]:
        given = {"variable_axes": dict(variable_axes or {}), "axis_size": axis_size, **options}
        return cls._constructor(module_type, given, _stacked("nnx.vmap", "axis_size", module_type, given))

    def _lift(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        in_axes = self.options.get("in_axes", 0)
        if isinstance(in_axes, (tuple, list)):
            return vmap(fun, **{**self.options, "in_axes": (None, *in_axes)})
        return vmap(fun, **self.options)


class Remat(TransformedModule[M]):
    """A Module that is computed again in the backward pass.

    `nnx.Remat(Block)` returns a constructor with the arguments of `Block`. The Module it builds has the real one as
    `remat_module`.

    Args:
        module_type: a Module class, or another such constructor.
        prevent_cse, static_argnums, policy: as in `nnx.remat`.
        **options: the others of `nnx.remat`.

    >>> block = nnx.Remat(nnx.Linear)(2, 3, ctx=nnx.context(0))
    >>> block(jnp.ones((1, 2))).shape, block.remat_module.kernel.shape
    ((1, 3), (2, 3))
    """

    inner_name = "remat_module"
    remat_module: M

    def __new__(
        cls,
        module_type: Callable[P, M],
        prevent_cse: bool = True,
        static_argnums: int | Sequence[int] | None = None,
        policy: Callable[..., Any] | str | Sequence[str] | Mapping[str, str] | None = None,
        **options: Unpack[RematFlags],
    ) -> Callable[P, "Remat[M]"]:
        given = {"prevent_cse": prevent_cse, "static_argnums": static_argnums, "policy": policy, **options}
        return cls._constructor(module_type, given, module_type)

    def _lift(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        static = self.options["static_argnums"]
        if static is not None:  # the user counts without the Module
            numbers = (static,) if isinstance(static, int) else tuple(static)
            options: dict[str, Any] = {**self.options, "static_argnums": tuple(n + 1 if n >= 0 else n for n in numbers)}
            return remat(fun, **options)
        return remat(fun, **self.options)


def _stacked(name: str, size_name: str, module_type: Any, options: dict[str, Any]) -> Callable[..., Any]:
    """Returns a function that builds one Module whose variables are stacked."""
    stacking = Stacking(
        name=name,
        size_name=size_name,
        variable_axes=options.get("variable_axes"),
        broadcast=...,
        split_rngs=options.get("split_rngs"),
        size=options.get(size_name),
        metadata_params=options.get("metadata_params"),
    )
    stacking.require_size()
    return lambda *args, **kwargs: construct(stacking, module_type, args, kwargs)


class_forms.update(scan=Scan, vmap=Vmap, remat=Remat)
