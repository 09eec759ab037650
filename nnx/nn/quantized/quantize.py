"""`quantize` and `dequantize`: storing the matrices of a model as small integers, and turning them back.

Layers remain the same objects: their weight becomes integers, a scale appears next to it, and their arithmetic follows.
`quantized` defines the nouns. Weights that a scan or vmap has stacked are quantized member by member.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nnx.core.module.attributes import set_spec
from nnx.core.module.info import ModuleBase, info_of
from nnx.core.module.module import Module
from nnx.core.repr import short
from nnx.core.state.paths import listing
from nnx.core.state.selectors import ModuleSelector, to_module_predicate
from nnx.core.state.updates import check_levels
from nnx.core.trace import is_tracer
from nnx.core.variables.refs import Ref
from nnx.core.variables.variables import Param, spec_of
from nnx.nn.einsum import Einsum, parse_equation
from nnx.nn.embed import Embed
from nnx.nn.linear import Linear, LinearGeneral
from nnx.nn.lora import LoRALinear, LoRALinearGeneral
from nnx.nn.moe.moe import MoE
from nnx.nn.quantized.quantized import INTEGERS, QuantizedParam, to_integers, to_weight
from nnx.sharding.axes import aligned_names, taken_over
from nnx.sharding.defaults import current_names, default_axes

LAYERS = (Linear, LinearGeneral, LoRALinear, LoRALinearGeneral, Einsum, Embed, MoE)
"""The layers that can be quantized. Subclasses are left alone, because they may use their weight in other ways."""
GROUP_SIZES = (128, 64, 32)
"""The sizes of groups that are tried for 4 bits."""

NOT_A_MODEL = "nnx.{name} takes a Module, got {model}."
WRONG_BITS = "nnx.quantize: `bits` is 8 or 4, got {got!r}."
WRONG_GROUP = "nnx.quantize: `group_size` is a positive number of inputs that share a scale, or None; got {got!r}."
NOTHING_SELECTED = "nnx.{name}: where={where} selects no layer {that}. In this {model}, those are: {paths}."
TWICE = (
    "nnx.quantize: {path!r} is quantized already, to {dtype}. Leave it out with `where=`, or call "
    "`nnx.dequantize(model, where={path!r})` first."
)
TIED = (
    "nnx.quantize: {path!r} is a Ref, so another layer may use the same weight and would find integers there. Untie it "
    "(assign a plain Param), or leave it out with `where=`."
)
NOT_A_WEIGHT = (
    "nnx.quantize: {path!r} is {got}, expected a Param of floating-point numbers. Leave it out with `where=`."
)
WRONG_SHAPE = (
    "nnx.quantize: {path!r} has shape {got}, expected {expected}, or the same after the axes along which a scan or "
    "vmap has stacked it. Stack along axis 0 to quantize the layer, or leave it out with `where=`."
)
NO_EQUATION = (
    "nnx.quantize: the Einsum at {path!r} gets its equation in the call, so the axes it sums over are not known. Pass "
    "the equation to its constructor, or leave it out with `where=`."
)
NO_SUM = (
    "nnx.quantize: the Einsum at {path!r} ({equation!r}) sums over no axis of its kernel, so every weight would have "
    "its own scale. Leave it out with `where=`."
)
DOES_NOT_DIVIDE = (
    "nnx.quantize: {path!r} sums over {inputs} inputs, which groups of {size} do not divide. Pass another "
    "`group_size`, or leave it out with `where=`."
)


class Weight(NamedTuple):
    """The weight of a layer: its attribute, its shape in one layer, and the axes of that shape that are summed over."""

    name: str
    shape: tuple[int, ...]
    summed: tuple[int, ...]


class Quantization(NamedTuple):
    """What happens to one weight: its layer and path, its summed axes in the stack, bits, and the size of groups."""

    layer: Any
    path: str
    name: str
    summed: tuple[int, ...]
    bits: int
    group_size: int | None


def quantize(
    model: Module, bits: Literal[8, 4] = 8, group_size: int | None = None, *, where: ModuleSelector = ...
) -> list[str]:
    """Stores the matrices of linear layers and embeddings as integers with scales, in place.

    The layers remain the same objects with the same paths, and compute as before, up to rounding. The weight becomes
    integers, and a scale appears next to it (`kernel_scale`, or `embedding_scale`) in the dtype of the weight, or in
    float32 for a float16 weight. Both are `QuantizedParam`s, so training with `wrt=nnx.Param` or `wrt=nnx.LoRAParam`
    leaves them alone. The experts of an `nnx.MoE` are three such weights (`gate`, `up` and `down`). Biases, norms,
    convolutions and routers are not changed.

    Args:
        model: the model. An abstract one gets the shapes and dtypes of the result, for example to load it into.
        bits: 8 for `int8`, which is close to exact; 4 for `int4`, half the size again.
        group_size: the number of inputs that share a scale. By default, all inputs of an output share one with 8 bits,
            and groups of 128 do with 4 bits: or 64, or 32 if the number of inputs demands it, or all if they are fewer.
        where: a Module selector for the layers to quantize: a Module type, a glob over paths, a function
            `f(path, module)`, a list of these, or `...` for every `Linear`, `LinearGeneral`, `Einsum`, `Embed` and
            `MoE` (the layers of `MLP` and attention are among them).

    Returns:
        The paths of the quantized layers.

    Raises:
        TypeError: `model` is not a Module, or `where` is not a selector.
        ValueError: `bits` is not 8 or 4, groups do not divide the inputs, a selected layer is quantized already or its
            weight is tied, or nothing is selected. Nothing has changed then.

    >>> model = nnx.MLP(64, 256, 10, ctx=nnx.context(0))
    >>> nnx.quantize(model, bits=8)
    ['layers/0', 'layers/1']
    >>> model.layers[0].kernel.dtype, model.layers[0].kernel_scale.shape
    (dtype('int8'), (256,))
    >>> nnx.dequantize(model)
    ['layers/0', 'layers/1']
    """
    if not isinstance(model, ModuleBase):
        raise TypeError(NOT_A_MODEL.format(name="quantize", model=type(model).__name__))
    if isinstance(bits, bool) or bits not in INTEGERS:
        raise ValueError(WRONG_BITS.format(got=bits))
    if group_size is not None and (isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1):
        raise ValueError(WRONG_GROUP.format(got=group_size))
    layers = {path: module for path, module in Module.named_modules(model) if type(module) in LAYERS}
    chosen = _chosen(model, layers, where, "quantize", "that can be quantized")
    plans = [plan for path, layer in chosen.items() for plan in _plans(path, layer, bits, group_size)]
    check_levels([plan.layer for plan in plans], "quantize")
    defaults = default_axes(model)
    for plan in plans:
        _replace_weight(plan, defaults.get(plan.path))
    return list(chosen)


def dequantize(model: Module, *, where: ModuleSelector = ...) -> list[str]:
    """Turns quantized weights back into `Param`s of the layers' `param_dtype`, in place.

    The values are those that the quantized layers computed with; what was lost in rounding does not come back.

    Args:
        model: the model.
        where: a Module selector for the layers, as in `quantize`; by default, all that are quantized.

    Returns:
        The paths of the changed layers.

    Raises:
        TypeError: `model` is not a Module, or `where` is not a selector.
        ValueError: no quantized layer is selected.

    >>> model = nnx.Embed(10, 4, ctx=nnx.context(0))
    >>> paths = nnx.quantize(model)
    >>> nnx.dequantize(model) == paths, model.variable("embedding")
    (True, Param(float32[10,4]))
    """
    if not isinstance(model, ModuleBase):
        raise TypeError(NOT_A_MODEL.format(name="dequantize", model=type(model).__name__))
    layers = {path: module for path, module in Module.named_modules(model) if is_quantized(module)}
    chosen = _chosen(model, layers, where, "dequantize", "that is quantized")
    check_levels(chosen.values(), "dequantize")
    weights = [
        (layer, _located(path, layer, weight)) for path, layer in chosen.items() for weight in _weights(path, layer)
    ]
    for layer, (name, _, summed) in weights:
        integers, scale = getattr(layer, name), getattr(layer, f"{name}_scale")
        weight = _run(to_weight, (integers, scale), (summed, layer.param_dtype), _sharding(integers))
        metadata = Module.variable(layer, name).metadata
        delattr(layer, f"{name}_scale")
        _store(layer, name, Param(weight, **metadata))
    return list(chosen)


def is_quantized(layer: Any) -> bool:
    """Whether a Module is a layer whose weight is quantized."""
    name = {Embed: "embedding", MoE: "gate"}.get(type(layer), "kernel")
    return type(layer) in LAYERS and getattr(layer, f"{name}_scale") is not None


def _chosen(model: Any, layers: dict[str, Any], where: Any, name: str, that: str) -> dict[str, Any]:
    matches = to_module_predicate(where, f"nnx.{name}")
    chosen = {path: layer for path, layer in layers.items() if matches(path, layer)}
    if not chosen:
        text = {"where": short(where), "model": type(model).__name__, "paths": listing(layers) or "(none)"}
        raise ValueError(NOTHING_SELECTED.format(name=name, that=that, **text))
    return chosen


# What to do with a layer


def _weights(path: str, layer: Any) -> list[Weight]:
    """Returns the weights of a layer, as they are without stacking."""
    if not isinstance(layer, MoE):
        return [_weight(path, layer)]
    experts, inputs, hidden, outputs = layer.num_experts, layer.in_features, layer.hidden_features, layer.out_features
    raised = (experts, inputs, hidden)
    return [Weight("gate", raised, (1,)), Weight("up", raised, (1,)), Weight("down", (experts, hidden, outputs), (1,))]


def _weight(path: str, layer: Any) -> Weight:
    """Returns the weight of a layer that has only one, as it is without stacking."""
    if isinstance(layer, Linear):
        return Weight("kernel", (layer.in_features, layer.out_features), (0,))
    if isinstance(layer, Embed):
        return Weight("embedding", (layer.num_embeddings, layer.features), (1,))
    if isinstance(layer, LinearGeneral):
        first = len(layer.batch_sizes)
        shape = layer.batch_sizes + layer.in_features + layer.out_features
        return Weight("kernel", shape, tuple(range(first, first + len(layer.in_features))))
    if layer.einsum_str is None:
        raise ValueError(NO_EQUATION.format(path=path))
    summed = parse_equation(layer.einsum_str).kernel_axes()[0]
    if not summed:
        raise ValueError(NO_SUM.format(path=path, equation=layer.einsum_str))
    return Weight("kernel", layer.kernel_shape, summed)


def _located(path: str, layer: Any, weight: Weight) -> Weight:
    """Returns a weight of a layer with its shape and summed axes in the stack, if it is stacked."""
    name, shape, summed = weight
    whole = tuple(getattr(layer, name).shape)
    stacked = len(whole) - len(shape)
    if stacked < 0 or whole[stacked:] != shape:
        raise ValueError(WRONG_SHAPE.format(path=_join(path, name), got=whole, expected=shape))
    return Weight(name, whole, tuple(axis + stacked for axis in summed))


def _plans(path: str, layer: Any, bits: int, group_size: int | None) -> list[Quantization]:
    weights = _weights(path, layer)
    if is_quantized(layer):
        raise ValueError(TWICE.format(path=path, dtype=getattr(layer, weights[0].name).dtype))
    return [_plan(path, layer, weight, bits, group_size) for weight in weights]


def _plan(path: str, layer: Any, weight: Weight, bits: int, group_size: int | None) -> Quantization:
    name = weight.name
    full = _join(path, name)
    kind = info_of(layer).kinds[name]
    if type(kind) is Ref:
        raise ValueError(TIED.format(path=full))
    variable = Module.variable(layer, name)
    if type(variable) is not Param or not jnp.issubdtype(variable.value.dtype, jnp.floating):
        raise ValueError(NOT_A_WEIGHT.format(path=full, got=short(variable)))
    _, shape, summed = _located(path, layer, weight)
    size = _group_size(full, math.prod(shape[axis] for axis in summed), bits, group_size)
    return Quantization(layer, full, name, summed, bits, size)


def _group_size(path: str, inputs: int, bits: int, wanted: int | None) -> int | None:
    """Returns how many inputs share a scale; None if all of them do."""
    if wanted is None:
        if bits == 8 or inputs <= GROUP_SIZES[0]:
            return None
        fitting = [size for size in GROUP_SIZES if inputs % size == 0]
        if not fitting:
            raise ValueError(DOES_NOT_DIVIDE.format(path=path, inputs=inputs, size=", ".join(map(str, GROUP_SIZES))))
        return fitting[0]
    if inputs % wanted:
        raise ValueError(DOES_NOT_DIVIDE.format(path=path, inputs=inputs, size=wanted))
    return None if wanted == inputs else wanted


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


# Doing it


def _replace_weight(plan: Quantization, default: Any) -> None:
    layer, name, summed = plan.layer, plan.name, plan.summed
    variable = Module.variable(layer, name)
    weight, metadata = variable.value, variable.metadata
    # For each axis of the scale, the axis of the weight that it comes from. Groups come from the first summed axis.
    dropped = summed if plan.group_size is None else summed[1:]
    axes = [axis for axis in range(weight.ndim) if axis not in dropped]
    names = _scale_names(current_names(metadata["sharding"], default), weight.ndim, axes)
    groups = math.prod(weight.shape[axis] for axis in summed) // (plan.group_size or 1)
    sizes = [groups if axis == summed[0] else weight.shape[axis] for axis in axes]
    whole = _sharding(weight)
    shardings = None if whole is None else (whole, _scale_sharding(whole, axes, sizes))
    integers, scale = _run(to_integers, (weight,), (summed, plan.bits, plan.group_size), shardings)
    _store(layer, name, QuantizedParam(integers, **metadata))
    setattr(layer, f"{name}_scale", QuantizedParam(scale, **{**metadata, "sharding": names}))


def _store(layer: Any, name: str, variable: Any) -> None:
    """Replaces a Variable by one of another type, which `del` and `setattr` would move behind the other attributes."""
    set_spec(layer, name, spec_of(variable))
    setattr(layer, name, variable.value)


def _scale_names(sharding: Any, ndim: int, axes: Iterable[int]) -> Any:
    """Returns the axis names of a scale, given those of the weight."""
    if sharding is None:
        return None
    names = aligned_names(sharding, ndim)
    return taken_over(names + (None,) * (ndim - len(names)), list(axes))


def _sharding(array: Any) -> NamedSharding | None:
    """Returns how an array is split over a mesh; None if it is not, or inside a trace, where it is not known."""
    sharding = None if is_tracer(array) else getattr(array, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _scale_sharding(whole: NamedSharding, axes: list[int], sizes: list[int]) -> NamedSharding:
    """Returns the split of a scale along with its weight. Groups that cannot be split evenly stay whole."""
    entries: list[Any] = []
    for axis, size in zip(axes, sizes, strict=True):
        entry = whole.spec[axis] if axis < len(whole.spec) else None
        over = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        entries.append(None if size % math.prod(whole.mesh.shape[name] for name in over) else entry)
    return NamedSharding(whole.mesh, PartitionSpec(*entries))


def _run(fn: Any, arrays: tuple[Any, ...], settings: tuple[Any, ...], shardings: Any) -> Any:
    """Runs a compiled function on arrays, or only on their shapes if they are abstract."""
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays):
        shapes = jax.eval_shape(lambda *arrays: fn(*arrays, *settings), *arrays)
        if shardings is None:
            return shapes
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    statics = tuple(range(len(arrays), len(arrays) + len(settings)))
    if shardings is None:
        return jax.jit(fn, static_argnums=statics)(*arrays, *settings)
    # JAX has no rule for merging or dividing an axis that is split on an explicit mesh axis; the partitioner can do it.
    mesh = jax.tree.leaves(shardings)[0].mesh
    automatic = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    with jax.set_mesh(automatic):
        specs = [whole.spec if (whole := _sharding(array)) else PartitionSpec() for array in arrays]
        placed = jax.device_put(list(arrays), [NamedSharding(automatic, spec) for spec in specs])
        meant = jax.tree.map(lambda sharding: NamedSharding(automatic, sharding.spec), shardings)
        made = jax.jit(fn, static_argnums=statics, out_shardings=meant)(*placed, *settings)
    return jax.device_put(made, shardings)
