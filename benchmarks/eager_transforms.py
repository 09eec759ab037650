"""What does a transform called from plain Python cost, compared with the same by hand in `jax.lax`?

JAX stages the body of a scan, a branch or a loop even outside of `jit`. Raw JAX finds an earlier trace by the identity
of the body; NNX has to find it although the Modules of each call are others.
"""

from collections.abc import Callable, Iterator
from typing import Any

import equinox
import flax.nnx
import jax
import jax.numpy as jnp

import nnx
from benchmarks.harness import OURS, Contender, Row, Settings, interleave, ratio_row

LAYERS, WIDTH = 4, 16
LIMIT = 2.0
BODY_PER_CALL = "eager scan, a body made per call"


def measure(settings: Settings) -> Iterator[Row]:
    x, kernels = jnp.ones((2, WIDTH)), jnp.full((LAYERS, WIDTH, WIDTH), 0.1)
    questions: dict[str, Callable[[jax.Array, jax.Array], dict[str, Contender]]] = {
        "scan": _scan,
        "Scan module": _scan_module,
        "cond": _cond,
        "fori_loop": _fori_loop,
        "remat": _remat,
    }
    for name, contenders in questions.items():
        timings = interleave(contenders(x, kernels), seconds=settings.seconds(5))
        yield ratio_row(f"eager {name}, repeated call", timings, "raw", LIMIT)
    timings = interleave(_scan_of_a_body_per_call(x, kernels), seconds=settings.seconds(5))
    yield ratio_row(BODY_PER_CALL, timings, "raw", LIMIT)


def _raw_scan(x: jax.Array, kernels: jax.Array) -> Contender:
    def body(x: Any, kernel: Any) -> Any:
        return jnp.tanh(x @ kernel), None

    return lambda: jax.lax.scan(body, x, kernels)


def _scan(x: jax.Array, kernels: jax.Array) -> dict[str, Contender]:
    model = nnx.Dict(kernel=nnx.Param(kernels))

    @nnx.scan(variable_axes={nnx.Param: 0}, length=LAYERS)
    def ours(layer: Any, x: Any, _: Any) -> Any:
        return jnp.tanh(x @ layer.kernel), None

    class Layer(flax.nnx.Module):
        def __init__(self) -> None:
            self.kernel = flax.nnx.Param(kernels)

    @flax.nnx.scan(in_axes=(0, flax.nnx.Carry), out_axes=flax.nnx.Carry)
    def flax_scan(layer: Any, x: Any) -> Any:
        return jnp.tanh(x @ layer.kernel[...])

    layer = Layer()
    return {OURS: lambda: ours(model, x, None), "raw": _raw_scan(x, kernels), "flax": lambda: flax_scan(layer, x)}


def _scan_of_a_body_per_call(x: jax.Array, kernels: jax.Array) -> dict[str, Contender]:
    """Nothing can be reused: JAX and NNX keep a trace for the function object, and every call makes another one."""
    model = nnx.Dict(kernel=nnx.Param(kernels))

    def ours() -> Any:
        def body(layer: Any, x: Any, _: Any) -> Any:
            return jnp.tanh(x @ layer.kernel), None

        return nnx.scan(body, variable_axes={nnx.Param: 0}, length=LAYERS)(model, x, None)

    def raw() -> Any:
        return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)

    return {OURS: ours, "raw": raw}


class Block(nnx.Module):
    kernel: jax.Array

    def __init__(self, *, ctx: nnx.Context):
        self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (WIDTH, WIDTH)))

    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ self.kernel), None


def _scan_module(x: jax.Array, kernels: jax.Array) -> dict[str, Contender]:
    make = nnx.Scan(Block, variable_axes={nnx.Param: 0}, split_rngs="params", length=LAYERS)
    model = make(ctx=nnx.context(0))
    return {OURS: lambda: model(x, None), "raw": _raw_scan(x, kernels)}


def _cond(x: jax.Array, kernels: jax.Array) -> dict[str, Contender]:
    kernel, pred = kernels[0], jnp.array(True)
    model = nnx.Dict(kernel=nnx.Param(kernel))

    def ours_true(model: Any, x: Any) -> Any:
        return jnp.tanh(x @ model.kernel)

    def ours_false(model: Any, x: Any) -> Any:
        return x

    def raw_true(kernel: Any, x: Any) -> Any:
        return jnp.tanh(x @ kernel)

    def raw_false(kernel: Any, x: Any) -> Any:
        return x

    return {
        OURS: lambda: nnx.cond(pred, ours_true, ours_false, model, x),
        "raw": lambda: jax.lax.cond(pred, raw_true, raw_false, kernel, x),
    }


def _fori_loop(x: jax.Array, kernels: jax.Array) -> dict[str, Contender]:
    kernel = kernels[0]
    model = nnx.Dict(kernel=nnx.Param(kernel))

    def ours_body(_: Any, value: Any) -> Any:
        model, x = value
        return model, jnp.tanh(x @ model.kernel)

    def raw_body(_: Any, value: Any) -> Any:
        kernel, x = value
        return kernel, jnp.tanh(x @ kernel)

    return {
        OURS: lambda: nnx.fori_loop(0, 8, ours_body, (model, x))[1],
        "raw": lambda: jax.lax.fori_loop(0, 8, raw_body, (kernel, x))[1],
    }


def _remat(x: jax.Array, kernels: jax.Array) -> dict[str, Contender]:
    kernel = kernels[0]
    model = nnx.Dict(kernel=nnx.Param(kernel))
    ours = nnx.remat(lambda model, x: jnp.tanh(x @ model.kernel))
    raw = jax.checkpoint(lambda kernel, x: jnp.tanh(x @ kernel))
    peer = equinox.filter_checkpoint(lambda kernel, x: jnp.tanh(x @ kernel))
    return {OURS: lambda: ours(model, x), "raw": lambda: raw(kernel, x), "equinox": lambda: peer(kernel, x)}
