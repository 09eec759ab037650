"""Every transform twice: lifted, and as the plain Python it stands for.

Both take and return functions of one form, `f(m, n, x, ctx) -> (total, extra)`, with a scalar `total`, so that they
nest in any order. `jit(f)` is the lifted one, `jit.eager(f)` is what it must agree with. Bodies that run many times
run twice, on `x` and `x + 1`.
"""

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import nnx
from nnx.core.module.info import info_of
from tests.fuzz.vocabulary import fold, keys
from tests.fuzz.walks import (
    arrange_items,
    cells_of,
    items_of,
    mapped_in_order,
    modules_of,
    put_in_order,
    restore,
    snapshot,
    tied,
)

Function = Callable[..., Any]
STEPS = np.array([0, 1], np.float32)
TWO = (0, 1)


class Gradient(NamedTuple):
    """In an eager result, the place of a derivative of `total`, which the runner computes by differences.

    Forms: the "gradient" of the first argument, "cotangents" of both, or the "directional" derivative.
    """

    form: str
    total: Any


def in_order(f: Function) -> Function:
    """The function as a body that runs many times, or never: what was there before stays in its place."""

    def call(m: Any, n: Any, *args: Any) -> Any:
        before = [(module, list(vars(module)), data_of(module)) for module in modules_of((m, n))]
        orders = [{name: items_of(value) for name, value in data.items()} for _, _, data in before]
        out = f(m, n, *args)
        for (module, names, _), order in zip(before, orders):
            arrange(module, names)
            for name, value in data_of(module).items():
                arrange_items(value, order.get(name))
        return out

    return call


def data_of(module: Any) -> dict[str, Any]:
    return {name: vars(module)[name] for _, name in cells_of([module])}


def arrange(module: Any, names: list[str]) -> None:
    """Puts the attributes of a Module in order, by means that no user has."""
    if [name for name in names if name in vars(module)] != list(vars(module))[: len(names)]:
        for held in (info_of(module).kinds, vars(module)):
            put_in_order(held, names)
        info_of(module).changed()


class Transform:
    """A pair of functions of functions.

    Args:
      lifted: the transform.
      eager: what it stands for.
      weight: how often programs use it.
      many: whether the body runs many times or maybe never, so that it must not change structure.
      stacked: whether each run sees one slice of every parameter.
      mapped: whether what is not stacked must not depend on the run.
      broadcast: whether the body must not write batch statistics.
      two: whether it takes two functions.
      stateless: whether changes are discarded.
      outermost: whether it must not be inside another transform.
      compiled: whether only XLA shows its effect.
      interruptible: whether a compiled call can be repeated, with an interrupt.
      derivative: whether it returns one.
      lacks: features that programs leave out under it.
      unique_keys: whether no key may be drawn twice.
    """

    def __init__(self, lifted: Function, eager: Function, weight: int = 10, **flags: Any):
        self.name = lifted.__name__
        self.many = flags.get("many", False)
        self.lifted, self.weight = lifted, weight
        self.eager = (lambda *functions: eager(*map(in_order, functions))) if self.many else eager
        self.stacked = flags.get("stacked", False)
        self.mapped = flags.get("mapped", False)
        self.broadcast = flags.get("broadcast", False)
        self.two = flags.get("two", False)
        self.stateless = flags.get("stateless", False)
        self.outermost = flags.get("outermost", False) or self.stateless
        self.compiled = flags.get("compiled", False)
        self.interruptible = flags.get("interruptible", False)
        self.derivative = flags.get("derivative", False)
        self.reverse = self.derivative and self.name != "jvp"
        self.lacks = flags.get("lacks", ())
        self.unique_keys = flags.get("unique_keys", True)

    def __call__(self, *functions: Function) -> Function:
        return self.lifted(*functions)

    def may_contain(self, inner: "Transform") -> bool:
        """Whether the two may be nested, `inner` inside this one."""
        if inner.outermost or (self.two and inner.two) or (self.stacked and inner.stacked):
            return False
        if self.mapped and inner.two:  # which branch runs would depend on the member, and so would what it writes
            return False
        return not (self.reverse and inner.name.startswith("while_loop"))  # as in JAX


TRANSFORMS: dict[str, Transform] = {}


def transform(eager: Function, weight: int = 10, **flags: Any) -> Callable[[Function], Transform]:
    def register(lifted: Function) -> Transform:
        pair = TRANSFORMS[lifted.__name__] = Transform(lifted, eager, weight, **flags)
        return pair

    return register


def same(f: Function) -> Function:
    return f


# Bodies that run once


@transform(same, 30, interruptible=True)
def jit(f: Function) -> Function:
    return nnx.jit(f)


@transform(same, 2, outermost=True, compiled=True, interruptible=True)
def jit_donating(f: Function) -> Function:
    return nnx.jit(f, donate_argnums=(0,))


@transform(same, 2, outermost=True, compiled=True, interruptible=True)
def jit_donating_both(f: Function) -> Function:
    return nnx.jit(f, donate_argnums=(0, 1))


@transform(same, 8, outermost=True)
def jit_method(f: Function) -> Function:
    methods: dict[int, Any] = {}

    def call(m: Any, *args: Any) -> Any:
        if id(m) not in methods:
            methods[id(m)] = nnx.jit(types.MethodType(f, m))
        return methods[id(m)](*args)

    return call


@transform(same, 6, outermost=True)
def jit_views(f: Function) -> Function:
    step = nnx.jit(f)

    def call(m: Any, n: Any, *args: Any) -> Any:
        pair = nnx.Dict(m=m, n=n)
        view = pair.view()  # of both together: a Module that they share has one view
        originals = {id(viewed): module for viewed, module in zip(view.modules(), pair.modules(), strict=True)}
        out = step(view.m, view.n, *args)
        return jax.tree.map(lambda leaf: originals.get(id(leaf), leaf), out)

    return call


@transform(same, 8, stateless=True)
def jit_stateless(f: Function) -> Function:
    return nnx.jit(f, stateful=False)


@transform(same, 10, unique_keys=False)
def remat(f: Function) -> Function:
    return nnx.remat(f)


@transform(same, 6, stateless=True, unique_keys=False)
def remat_stateless(f: Function) -> Function:
    return nnx.remat(f, stateful=False)


@transform(same, 6)
def checkify(f: Function) -> Function:
    checked = nnx.checkify(f)
    return lambda *args: checked(*args)[1]


@transform(same, 8, stateless=True)
def clone(f: Function) -> Function:
    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        both = nnx.Dict(m=m, n=n).clone()
        return f(both.m, both.n, x, ctx)

    return call


# a State is what it says: it has the Module's own numpy arrays, and one entry for each attribute that holds a pytree
@transform(same, 8, stateless=True, lacks=("numpy", "shared pytree", "share pytree"))
def merge(f: Function) -> Function:
    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        both = nnx.Dict(m=m, n=n).partition().merge()
        return f(both.m, both.n, x, ctx)

    return call


# Derivatives


def with_gradient(form: str) -> Callable[[Function], Function]:
    def eager(f: Function) -> Function:
        def call(*args: Any) -> Any:
            total, extra = f(*args)
            return total, {"derivative": Gradient(form, total), "extra": extra}

        return call

    return eager


def by_path(**gradients: Any) -> dict[str, Any]:
    return {f"{arg}:{path}": leaf.value for arg, state in gradients.items() for path, leaf in state.items()}


@transform(with_gradient("gradient"), 14, derivative=True, unique_keys=False)
def grad(f: Function) -> Function:
    lifted = nnx.value_and_grad(f, has_aux=True)

    def call(*args: Any) -> Any:
        (total, extra), gradient = lifted(*args)
        return total, {"derivative": by_path(m=gradient), "extra": extra}

    return call


@transform(with_gradient("gradient"), 6, derivative=True, stateless=True, unique_keys=False)
def grad_stateless(f: Function) -> Function:
    lifted = nnx.value_and_grad(f, has_aux=True, stateful=False)

    def call(*args: Any) -> Any:
        (total, extra), gradient = lifted(*args)
        return total, {"derivative": by_path(m=gradient), "extra": extra}

    return call


@transform(with_gradient("cotangents"), 6, derivative=True, unique_keys=False)
def vjp(f: Function) -> Function:
    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        total, pull, extra = nnx.vjp(f, m, n, x, ctx, has_aux=True)
        of_m, of_n, *_ = pull(jnp.ones_like(total))
        return total, {"derivative": by_path(m=of_m, n=of_n), "extra": extra}

    return call


@transform(with_gradient("directional"), 6, derivative=True, unique_keys=False)
def jvp(f: Function) -> Function:
    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        ones = jax.tree.map(jnp.ones_like, m.filter(nnx.Param))
        primals, tangents = (m, n, x, ctx), (ones, nnx.State({}), jnp.zeros_like(x), None)
        total, tangent, extra = nnx.jvp(f, primals, tangents, has_aux=True)
        return total, {"derivative": tangent, "extra": extra}

    return call


def weighted_sum(m: Any, n: Any) -> Any:
    """A function of two Modules whose gradient is 1 in the parameters of the first and 2 in those of the second."""
    return total_of(m.filter(nnx.Param)) + 2 * total_of(n.filter(nnx.Param))


def total_of(state: Any) -> Any:
    return sum((jnp.sum(leaf) for leaf in jax.tree.leaves(state)), jnp.zeros(()))


def weighted_forward(m: Any, n: Any) -> Any:
    return weighted_sum(m, n), (m.filter(nnx.Param), n.filter(nnx.Param))


def weighted_backward(states: Any, cotangent: Any) -> Any:
    return tuple(
        jax.tree.map(lambda w, weight=weight: weight * cotangent * jnp.ones_like(w), state)
        for weight, state in enumerate(states, 1)
    )


def eager_custom_vjp(f: Function) -> Function:
    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        total, extra = f(m, n, x, ctx)
        return total + weighted_sum(m, n), extra

    return with_gradient("gradient")(call)


@transform(eager_custom_vjp, 6, derivative=True, unique_keys=False)
def custom_vjp(f: Function) -> Function:
    custom = nnx.custom_vjp(weighted_sum)
    custom.defvjp(weighted_forward, weighted_backward)

    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        total, extra = f(m, n, x, ctx)
        return total + custom(m, n), extra

    return grad.lifted(call)


# Bodies that run many times, or maybe never


def eager_scan(f: Function) -> Function:
    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        each = [f(m, n, fold(x) + step, ctx)[0] for step in STEPS]
        return each[0] + each[1], {"each": jnp.stack(each)}

    return call


def scanned(f: Function, **options: Any) -> Function:
    def body(m: Any, carry: Any, x: Any, n: Any, ctx: Any) -> Any:
        total, _ = f(m, n, x, ctx)
        return carry + total, total

    lifted = nnx.scan(body, **options)

    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        carry, each = lifted(m, jnp.zeros(()), fold(x) + STEPS, n, ctx)
        return carry, {"each": each}

    return call


@transform(eager_scan, 10, many=True, unique_keys=False)
def scan(f: Function) -> Function:
    return scanned(f)


@transform(eager_scan, 6, many=True, broadcast=True, unique_keys=False)
def scan_broadcast(f: Function) -> Function:
    return scanned(f, variable_broadcast=nnx.BatchStat)


@transform(eager_scan, 5, many=True, stateless=True, unique_keys=False)
def scan_stateless(f: Function) -> Function:
    return scanned(f, stateful=False)


def eager_scan_stacked(f: Function) -> Function:
    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        runs = [lambda i=i: f(m, n, fold(x) + STEPS[i], ctx)[0] for i in TWO]
        each = run_on_slices((m, n), runs)
        return each[0] + each[1], {"each": jnp.stack(each)}

    return call


def run_on_slices(roots: Any, runs: Any) -> Any:
    """Runs a function on each slice of the parameters, and stacks what it leaves there."""
    cells = [group[0] for group in tied(cells_of(modules_of(roots), nnx.Param))]
    known = {(id(module), name) for module, name in cells_of(modules_of(roots), nnx.Param)}
    stacks = [vars(module)[name] for module, name in cells]
    results, slices, added = [], [], []
    for i, run in enumerate(runs):
        for (module, name), stack in zip(cells, stacks):
            setattr(module, name, mapped_in_order(lambda v, i=i: v[i], stack))
        results.append(run())
        slices.append([vars(module)[name] for module, name in cells])
        new = [cell for cell in cells_of(modules_of(roots), nnx.Param) if (id(cell[0]), cell[1]) not in known]
        added.append([(module, name, module.variable(name)) for module, name in new])
        for module, name in new:  # every run starts without them
            delattr(module, name)
    for (module, name), *values in zip(cells, *slices):
        setattr(module, name, mapped_in_order(lambda *v: jnp.stack(v), *values))
    for (module, name, first), (_, _, second) in zip(*added):
        setattr(module, name, first.replace(jnp.stack([first.value, second.value])))
    return results


@transform(eager_scan_stacked, 8, many=True, stacked=True, unique_keys=False)
def scan_stacked(f: Function) -> Function:
    return scanned(f, variable_axes={nnx.Param: 0}, length=2)


def eager_vmap(f: Function) -> Function:
    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        before = snapshot(cells_of(modules_of((m, n))))
        first, _ = f(m, n, fold(x), ctx)
        restore(before)
        second, _ = f(m, n, fold(x) + STEPS[1], ctx)
        return first + second, {"each": jnp.stack([first, second])}

    return call


def mapped(f: Function, **options: Any) -> Function:
    lifted = nnx.vmap(lambda m, n, x, ctx: f(m, n, x, ctx)[0], in_axes=(None, None, 0, None), **options)

    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        each = lifted(m, n, fold(x) + STEPS, ctx)
        return each[0] + each[1], {"each": each}

    return call


@transform(eager_vmap, 10, many=True, mapped=True, unique_keys=False)
def vmap(f: Function) -> Function:
    return mapped(f)


@transform(eager_vmap, 5, many=True, mapped=True, stateless=True, unique_keys=False)
def vmap_stateless(f: Function) -> Function:
    return mapped(f, stateful=False)


def eager_vmap_stacked(f: Function) -> Function:
    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        parameters = {(id(module), name) for module, name in cells_of(modules_of((m, n)), nnx.Param)}
        others = [c for c in cells_of(modules_of((m, n))) if (id(c[0]), c[1]) not in parameters]
        before = snapshot(others)

        def second() -> Any:
            restore(before)
            return f(m, n, fold(x) + STEPS[1], ctx)[0]

        each = run_on_slices((m, n), [lambda: f(m, n, fold(x), ctx)[0], second])
        return each[0] + each[1], {"each": jnp.stack(each)}

    return call


@transform(eager_vmap_stacked, 8, many=True, mapped=True, stacked=True, unique_keys=False)
def vmap_stacked(f: Function) -> Function:
    return mapped(f, variable_axes={nnx.Param: 0}, axis_size=2)


def without_extra(f: Function) -> Function:
    return lambda m, n, x, ctx: f(m, n, x, ctx)[0]


def eager_cond(f: Function, g: Function) -> Function:
    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        return (f if fold(x) > 1 else g)(m, n, x, ctx)[0], None

    return call


@transform(eager_cond, 10, many=True, two=True)
def cond(f: Function, g: Function) -> Function:
    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        return nnx.cond(fold(x) > 1, without_extra(f), without_extra(g), m, n, x, ctx), None

    return call


@transform(eager_cond, 4, many=True, two=True, stateless=True)
def cond_stateless(f: Function, g: Function) -> Function:
    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        return nnx.cond(fold(x) > 1, without_extra(f), without_extra(g), m, n, x, ctx, stateful=False), None

    return call


def eager_switch(f: Function, g: Function) -> Function:
    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        return (f, g, f)[min(int(fold(x)), 2)](m, n, x, ctx)[0], None

    return call


@transform(eager_switch, 4, many=True, two=True)
def switch(f: Function, g: Function) -> Function:
    branches = [without_extra(f), without_extra(g), without_extra(f)]

    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        return nnx.switch(jnp.int32(fold(x)), branches, m, n, x, ctx), None

    return call


def eager_loop(f: Function) -> Function:
    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        total = 0.0
        for _ in TWO:
            total = total + f(m, n, x, ctx)[0]
        return jnp.asarray(total), None

    return call


@transform(eager_loop, 6, many=True)
def while_loop(f: Function) -> Function:
    def body(carry: Any) -> Any:
        m, n, i, total, x, ctx = carry
        return m, n, i + 1, total + f(m, n, x, ctx)[0], x, ctx

    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        init = (m, n, 0, jnp.zeros(()), x, ctx)
        return nnx.while_loop(lambda carry: carry[2] < 2, body, init)[3], None

    return call


@transform(eager_loop, 2, many=True)
def while_loop_drawing(f: Function) -> Function:
    """Condition and body both draw keys."""

    def condition(carry: Any) -> Any:
        keys(carry[4])
        return carry[1] < 2

    def body(carry: Any) -> Any:
        m, i, total, x, ctx, n = carry
        keys(ctx)
        return m, i + 1, total + f(m, n, x, ctx)[0], x, ctx, n

    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        return nnx.while_loop(condition, body, (m, 0, jnp.zeros(()), x, ctx, n))[2], None

    return call


@transform(eager_loop, 6, many=True)
def fori_loop(f: Function) -> Function:
    def body(i: Any, carry: Any) -> Any:
        m, n, total, x, ctx = carry
        return m, n, total + f(m, n, x, ctx)[0], x, ctx

    def call(m: Any, n: Any, x: Any, ctx: Any) -> Any:
        return nnx.fori_loop(0, 2, body, (m, n, jnp.zeros(()), x, ctx))[2], None

    return call


__all__ = list(TRANSFORMS)
