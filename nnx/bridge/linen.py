"""Models of Flax Linen as Modules."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nnx.bridge.call import ForeignCall
from nnx.bridge.foreign import Foreign, Ran
from nnx.bridge.linen_fields import LinenFields, put_together, take_apart
from nnx.bridge.linen_paths import Paths, name_in_linen
from nnx.bridge.trees import own
from nnx.core.context import Context
from nnx.core.extras import require
from nnx.core.variables.on_demand import var
from nnx.core.variables.variables import Variable

NOT_LINEN = "nnx.bridge.from_linen takes an instance of flax.linen.Module; got {got}."
IS_BOUND = "nnx.bridge.from_linen takes an unbound module: module, variables = module.unbind()."
NEEDS_VARIABLES = """nnx.bridge.from_linen initializes the model with example inputs and keys, from_linen(module, x, \
ctx=nnx.context(0)), or takes its variables: from_linen(module, variables=variables)."""
READ_ONLY = ("params", "intermediates")


@dataclasses.dataclass(frozen=True)
class LinenAdapter:
    """Runs the Linen module that these LinenFields describe; `sow` are the collections that a call fills from empty."""

    module: LinenFields
    sow: tuple[str, ...]

    def run(self, call: ForeignCall, variables: Mapping[str, Any]) -> Ran:
        """Runs a method with `module.apply`."""
        paths = {}
        for path, variable in variables.items():
            if isinstance(variable, Variable):
                collection = type(variable).collection
                paths[collection, name_in_linen(collection, path)] = path
        given: dict[str, dict[str, Any]] = {}
        for (collection, name), path in paths.items():
            if collection not in ("intermediates", *self.sow):
                given.setdefault(collection, {})[name] = variables[path].value
        kwargs = call.kwargs_for(getattr(self.module.cls, call.method), len(call.args) + 1)
        trees = require("flax.traverse_util", "bridge", "A model of Linen")
        out, new = put_together(self.module).apply(
            {collection: trees.unflatten_dict(values, sep="/") for collection, values in given.items()},
            *call.args,
            rngs=call.keys(),
            method=call.method,
            mutable=[*(name for name in given if name not in READ_ONLY), *self.sow],
            **kwargs,
        )
        return Ran(out, dict(_variables(new, paths, Paths(variables))))

    def has_method(self, name: str) -> bool:
        """Whether the class of the module has a method of this name that is not one of every Linen module."""
        base = require("flax.linen", "bridge", "A model of Linen").Module
        return not name.startswith("_") and callable(getattr(self.module.cls, name, None)) and not hasattr(base, name)


def _variables(
    collections: Mapping[str, Any], known: Mapping[tuple[str, str], str], paths: Paths
) -> Iterator[tuple[str, Any]]:
    """Yields the variables of Linen as ours, with their paths: known ones, and new ones for the others."""
    trees = require("flax.traverse_util", "bridge", "A model of Linen")
    for collection, tree in collections.items():
        for name, boxed in trees.flatten_dict(tree, sep="/").items():
            axes = getattr(boxed, "names", None)  # of nn.Partitioned and its relatives
            value = own(boxed.unbox() if axes is None and hasattr(boxed, "unbox") else getattr(boxed, "value", boxed))
            path = known.get((collection, name)) or paths.new(collection, name)
            yield path, var(collection, value, axes)


def from_linen(
    module: Any,
    *example: Any,
    ctx: Context | None = None,
    variables: Mapping[str, Any] | None = None,
    sow: Sequence[str] = (),
    method: str = "__call__",
    **kwargs: Any,
) -> Foreign:
    """Returns a Module that runs a Flax Linen module.

    Its variables have the type of their collection (`params` are Params, `batch_stats` are `nnx.BatchStat`s) and keep
    their paths and axis names. Every collection but `params` is mutable in a call.

    Args:
        module: the Linen module.
        *example: the inputs that `module.init` is called with, unless the `variables` are given.
        ctx: the Context whose streams initialize the variables.
        variables: the variables of a trained model, as `module.init` returned them.
        sow: the collections that `self.sow` writes to in a call, such as `["intermediates"]`. They start empty in each.
        method: the name of the method that initializes the model.
        **kwargs: keyword arguments for `module.init`. Mode arguments such as `train` are those of evaluation, unless
            given here.
    """
    linen = require("flax.linen", "bridge", "nnx.bridge.from_linen")
    if not isinstance(module, linen.Module):
        raise TypeError(NOT_LINEN.format(got=type(module).__name__))
    if module.scope is not None:
        raise ValueError(IS_BOUND)
    parts = take_apart(module)
    if variables is None:
        if ctx is None:
            raise TypeError(NEEDS_VARIABLES)
        call = ForeignCall(method, example, kwargs, ctx, False)
        filled = call.kwargs_for(getattr(type(module), method), len(example) + 1)
        variables = put_together(parts).init(ctx.partition().keys, *example, method=method, **filled)
    assert variables is not None
    # Params come first, so that they keep their paths.
    collections = {name: tree for name, tree in variables.items() if name != "intermediates"}
    params = {"params": collections.pop("params")} if "params" in collections else {}
    made = _variables({**params, **collections}, {}, Paths())
    return Foreign(LinenAdapter(parts, (sow,) if isinstance(sow, str) else tuple(sow)), dict(made))
