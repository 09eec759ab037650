"""Functions that read more than their arguments: Modules reached by every route, and settings read indirectly."""

import contextvars
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import nnx
from tests.fuzz.transforms import Function, eager_scan, same, scanned, transform


class Weights(nnx.Module):
    """A Module with an array, one in a tree, and a static number, which all change between calls."""

    def __init__(self) -> None:
        self.set(0)

    def set(self, number: int) -> None:
        self.w = nnx.Param(jnp.array(float(number)))
        self.tree = {"b": [jnp.array(2.0 * number)]}
        self.static = number // 3

    def read(self) -> Any:
        return self.w + self.tree["b"][0] + self.static


GLOBAL = Weights()


def read_global() -> Any:
    return GLOBAL.read()


def read_default(weights: Any = None) -> Any:
    return weights.read()


# JAX keeps the traces of these functions from program to program, with the weights as constants
@jax.jit
def keep_trace() -> Any:
    return GLOBAL.read()


def scan_body(total: Any, _: Any) -> Any:
    return total + GLOBAL.read(), None


def keep_trace_of_scan() -> Any:
    return jax.lax.scan(scan_body, jnp.zeros(()), None, length=2)[0]


def in_context() -> Any:
    return CURRENT.get().read()


CURRENT: contextvars.ContextVar[Any] = contextvars.ContextVar("CURRENT", default=GLOBAL)


class Namespace:
    """Holds a Module as an attribute, and another one in its class."""

    shared: Any = None

    def __init__(self) -> None:
        self.own = Weights()

    def read(self) -> Any:
        return self.own.read()

    def __call__(self) -> Any:
        return self.shared.read()

    @property
    def by_property(self) -> Any:
        return self.own


class Captured:
    """Modules on every route, which change with every call of the function that reads them."""

    def __init__(self) -> None:
        self.closure, self.namespace, self.by_name = Weights(), Namespace(), {"a": [Weights()]}
        Namespace.shared = Weights()
        self.partial = functools.partial(read_default, weights=Weights())

    def change(self, call: int) -> None:
        if call % 3 == 0:  # names that lead to another Module from now on
            self.namespace.own = Weights()
            self.by_name["a"] = [Weights()]
        modules = [self.closure, self.namespace.own, Namespace.shared, self.by_name["a"][0]]
        for number, weights in enumerate([*modules, self.partial.keywords["weights"], GLOBAL]):
            weights.set(call + number)

    def reader(self, keep: bool) -> Callable[[], Any]:
        """Returns a function that reads all of them; without `keep`, through no function that JAX keeps a trace of."""
        closure, namespace, by_name, partial = self.closure, self.namespace, self.by_name, self.partial

        def read() -> Any:
            found = closure.read() + namespace.read() + Namespace.shared.read() + getattr(namespace, "o" + "wn").w
            found = found + namespace() + namespace.by_property.read() + in_context()
            kept = keep_trace() + keep_trace_of_scan() if keep else 3 * GLOBAL.read()
            return found + by_name["a"][0].read() + partial() + read_global() + kept

        return read


class Calls(weakref.WeakKeyDictionary[Any, int]):
    """The number of the next call with a Module; the runner replays calls with new Modules."""

    def __getitem__(self, module: Any) -> int:
        return self.get(module, 1)


calls = Calls()


def capturing(lift: Function) -> Function:
    def wrap(f: Function) -> Function:
        captured = Captured()
        read = captured.reader(keep=lift is not same)

        def reading(m: Any, n: Any, x: Any, ctx: Any) -> Any:
            total, extra = f(m, n, x, ctx)
            return total + read(), extra

        step = lift(reading)

        def call(*args: Any) -> Any:
            captured.change(calls[args[0]])
            out = step(*args)
            calls[args[0]] += 1
            return out

        return call

    return wrap


@transform(capturing(same), 6, outermost=True)
def jit_capturing(f: Function) -> Function:
    return capturing(nnx.jit)(f)


@transform(capturing(same), 2, outermost=True, compiled=True)
def jit_capturing_donating(f: Function) -> Function:
    return capturing(functools.partial(nnx.jit, donate_argnums=(0,)))(f)


settings = types.SimpleNamespace(scale=1.0)


def setting() -> Any:
    return settings.scale


def per_call(lift: Function) -> Function:
    def wrap(f: Function) -> Function:
        def call(*args: Any) -> Any:
            settings.scale = float(calls[args[0]])

            def body(*args: Any) -> Any:
                total, extra = f(*args)
                return total * setting(), extra

            out = lift(body)(*args)
            calls[args[0]] += 1
            return out

        return call

    return wrap


@transform(per_call(same), 4, outermost=True)
def remat_per_call(f: Function) -> Function:
    return per_call(nnx.remat)(f)


@transform(per_call(eager_scan), 2, outermost=True, many=True, unique_keys=False)
def scan_per_call(f: Function) -> Function:
    return per_call(scanned)(f)
