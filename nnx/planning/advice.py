"""Advice: what would make a step fit, and which mesh is fastest, found by compiling."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nnx.core.module.module import Module
from nnx.planning.arguments import Arguments
from nnx.planning.compiling import Request
from nnx.sharding.placement import shard
from nnx.sharding.rules import Rules, on_host
from nnx.sharding.rulesets import fsdp_rules, fsdp_tensor_parallel_rules
from nnx.training.optimizer import Optimizer
from nnx.training.optimizer_state import OptState
from nnx.transforms.jit.jit import jit

REMAT: dict[str, Any] = {
    'remat=("attention_out", "mlp_hidden")': ("attention_out", "mlp_hidden"),
    'remat=("attention_out", "mlp_out")': ("attention_out", "mlp_out"),
    "remat=True": True,
}
"""The policies that are tried, from the one that keeps most to the one that keeps nothing."""

_ENOUGH = 3  # remedies that fit

MakePlan = Callable[..., Any]


class Remedy(NamedTuple):
    """Something that was tried to make a step fit.

    Attributes:
        change: what was changed.
        fits: whether the step fits then.
        bytes: what it needs on one chip.
        seconds: the least time of a step; None if it is not known.
        plan: the whole plan.
    """

    change: str
    fits: bool
    bytes: int
    seconds: float | None
    plan: Any


def remedies(request: Request, plan: Any, make: MakePlan) -> tuple[Remedy, ...]:
    """Tries what would help a step that does not fit, until three things do; the best come first."""
    found: list[Remedy] = []
    for change, changed in _candidates(request, plan):
        try:
            tried = make(changed, f", {change}")
        except (ValueError, TypeError):  # this model cannot be split or run like that
            continue
        if tried.bytes < plan.bytes:
            found.append(Remedy(change, tried.fits, tried.bytes, tried.seconds, tried))
        if sum(remedy.fits for remedy in found) == _ENOUGH:
            break
    return tuple(sorted(found, key=lambda remedy: (not remedy.fits, remedy.seconds or 0.0, remedy.bytes)))


def searched(request: Request, make: MakePlan) -> Iterator[Any]:
    """Returns the plans of the other meshes of a machine, and of policies of `nnx.remat`."""
    for axes, rules in meshes(request):
        changed = request.replace(mesh=request.machine.mesh(axes), rules=rules)
        try:
            found = make(changed)
        except (ValueError, TypeError):
            continue
        yield found
        for change, policy in REMAT.items() if _can_remat(request) else ():
            yield make(changed.replace(change=_with_remat(policy)), f", {change}")


def meshes(request: Request) -> list[tuple[dict[str, int], Rules]]:
    """Returns the other meshes of a machine: all ways to divide the chips between data and tensor parallelism.

    Tensor parallelism stays within a node of GPUs, and within 16 chips.
    """
    count, most = request.machine.count, min(request.machine.chip.node, 16)
    if request.machine.chip.platform == "cpu":
        most = 16
    found: list[tuple[dict[str, int], Rules]] = []
    for parts in itertools.takewhile(lambda parts: parts <= min(count, most), (2**n for n in itertools.count())):
        if count % parts == 0:
            axes = {"data": count // parts, "model": parts}
            found.append((axes, fsdp_tensor_parallel_rules()))
    here = {name: size for name, size in request.mesh.shape.items() if size > 1}
    return [(axes, rules) for axes, rules in found if {n: s for n, s in axes.items() if s > 1} != here]


def _candidates(request: Request, plan: Any) -> Iterator[tuple[str, Request]]:
    yield from _donation(request, plan)
    if _can_remat(request):
        for change, policy in REMAT.items():
            yield change, request.replace(change=_with_remat(policy))
    yield from _of_optimizers(request, plan)
    if _rows(request) > 1:
        yield "half the batch", request.replace(change=_halve)
    for axes, rules in meshes(request):
        shown = " × ".join(f"{name}={size}" for name, size in axes.items())
        yield f"the mesh {shown}", request.replace(mesh=request.machine.mesh(axes), rules=rules)


# Donation


def _donation(request: Request, plan: Any) -> Iterator[tuple[str, Request]]:
    at = [i for i, arg in enumerate(request.args) if isinstance(arg, Module)]
    if at and not plan.donated and plan.compiled is not None:
        change = f"nnx.jit(step, donate_argnums={at[0] if len(at) == 1 else tuple(at)})"
        yield change, request.replace(wrap=lambda step: jit(_plain(step), donate_argnums=tuple(at)))


def _plain(step: Any) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return wrapped


# Recomputation


def _decoders(arguments: Arguments) -> list[Any]:
    """Returns the Modules in arguments that take a policy of `nnx.remat` as an attribute, as `nnx.models.Decoder`."""
    modules = [module for _, leaf in arguments.leaves() if isinstance(leaf, Module) for module in leaf.modules()]
    return [module for module in modules if "remat" in vars(module)]


def _can_remat(request: Request) -> bool:
    return any(module.remat is not True for module in _decoders(Arguments(request.args, request.kwargs)))


def _with_remat(policy: Any) -> Callable[[Arguments], Arguments]:
    def change(arguments: Arguments) -> Arguments:
        for module in _decoders(arguments):
            module.remat = policy
        return arguments

    return change


# Optimizers


def _optimizers(arguments: Arguments) -> list[Any]:
    modules = [module for _, leaf in arguments.leaves() if isinstance(leaf, Module) for module in leaf.modules()]
    return [module for module in modules if isinstance(module, Optimizer)]


def _of_optimizers(request: Request, plan: Any) -> Iterator[tuple[str, Request]]:
    if not _optimizers(Arguments(request.args, request.kwargs)) or not plan.parts["optimizer state"]:
        return
    if plan.parts["optimizer state"] >= 1.5 * plan.parts["parameters"] and "data" in request.mesh.shape:
        yield (
            "nnx.shard(optimizer.opt_state, mesh, nnx.fsdp_rules())",
            request.replace(change_placed=_shard_optimizers),
        )
    at = (
        tuple(i for i, arg in enumerate(request.args) if isinstance(arg, Module))
        if plan.donated or plan.compiled is None
        else ()
    )
    wrap = lambda step: jit(_with_small_moments(step), donate_argnums=at or None)  # noqa: E731
    yield "moments in bfloat16", request.replace(change=_small_moments, wrap=wrap)
    if request.machine.chip.platform == "tpu":  # the devices of GPUs that are not here have no memory of a host
        yield "nnx.on_host(nnx.OptState)", request.replace(rules=(on_host(OptState), *request.rules))


def _shard_optimizers(arguments: Arguments, request: Request) -> None:
    for optimizer in _optimizers(arguments):
        shard(optimizer.opt_state, request.mesh, fsdp_rules())


def _small_moments(arguments: Arguments) -> Arguments:
    for optimizer in _optimizers(arguments):
        _cast(optimizer.opt_state, jnp.float32, jnp.bfloat16)
    return arguments


def _with_small_moments(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step that keeps moments in bfloat16 and computes with them in float32."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        optimizers = _optimizers(Arguments(args, kwargs))
        for optimizer in optimizers:
            _cast(optimizer.opt_state, jnp.bfloat16, jnp.float32)
        result = step(*args, **kwargs)
        for optimizer in optimizers:
            _cast(optimizer.opt_state, jnp.float32, jnp.bfloat16)
        return result

    return wrapped


def _cast(module: Module, before: Any, after: Any) -> None:
    def cast(leaf: Any) -> Any:
        if leaf.dtype != before or leaf.ndim == 0:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, after, sharding=leaf.sharding)
        return leaf.astype(after)

    Module.update_state(module, jax.tree.map(cast, Module.get_state(module)))


# The batch


def _rows(request: Request) -> int:
    """Returns the rows of the batch on each part of the mesh that the batch is split over, at most."""
    arrays = [leaf for _, leaf in Arguments(request.args, request.kwargs).leaves() if hasattr(leaf, "shape")]
    sizes = {leaf.shape[0] for leaf in arrays if leaf.shape}
    return max(sizes, default=0) // max(request.mesh.shape.get("data", 1), 1)


def _halve(arguments: Arguments) -> Arguments:
    def half(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.shape and leaf.shape[0] > 1:
            return jax.ShapeDtypeStruct((leaf.shape[0] // 2, *leaf.shape[1:]), leaf.dtype, sharding=leaf.sharding)
        return leaf

    return arguments.map(half)
