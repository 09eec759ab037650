"""What does a training step of a wrapped model cost, compared with the same step in its own library?

One row per library. The model is two dense layers over a batch, small enough that what remains is the libraries'
overhead; Adam updates it. The native step is written the way that library's users write it. With Linen, Haiku and plain
functions that is `jax.jit` over nested dicts, so a wrapped model can at best be level.
"""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import flax.linen as linen
import flax.nnx
import haiku as hk
import jax
import jax.numpy as jnp
import optax

import nnx
from benchmarks.harness import OURS, Contender, Row, Settings, interleave, ratio_row

X = jnp.ones((8, 16))
TX = optax.adam(1e-3)
# The most that a wrapped step may take, as a multiple of the native one.
GOALS = {"linen": 1.6, "haiku": 1.6, "functions": 1.6, "flax": 1.0, "equinox": 1.0}


def measure(settings: Settings) -> Iterator[Row]:
    libraries = {"linen": _linen, "haiku": _haiku, "functions": _functions, "flax": _flax, "equinox": _equinox}
    for name, contenders in libraries.items():
        timings = interleave(contenders(), seconds=settings.seconds(8))
        yield ratio_row(f"step of a wrapped model, {name}", timings, name, GOALS[name])


def _wrapped(model: nnx.Module) -> Contender:
    @nnx.jit
    def step(optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(optimizer.model)
        optimizer.update(grads)
        return loss

    optimizer = nnx.Optimizer(model, TX)
    return lambda: step(optimizer, X)


def _raw(apply: Callable[..., Any], params: Any) -> Contender:
    @jax.jit
    def step(params: Any, moments: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda params: jnp.mean(apply(params, x) ** 2))(params)
        updates, moments = TX.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    moments = TX.init(params)

    def run() -> jax.Array:
        nonlocal params, moments
        params, moments, loss = step(params, moments, X)
        return loss

    return run


# The model, once per library.


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(16)(linen.relu(linen.Dense(32)(x)))


def _linen() -> dict[str, Contender]:
    model = LinenModel()
    variables = model.init(jax.random.key(0), X)
    native = _raw(lambda params, x: model.apply({"params": params}, x), variables["params"])
    return {OURS: _wrapped(nnx.bridge.from_linen(model, variables=variables)), "linen": native}


def _haiku() -> dict[str, Contender]:
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 16])(x)))
    params = model.init(jax.random.key(0), X)
    return {OURS: _wrapped(nnx.bridge.from_haiku(model, params=params)), "haiku": _raw(model.apply, params)}


def _functions() -> dict[str, Contender]:
    params = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ params["up"]) @ params["down"]

    return {OURS: _wrapped(nnx.bridge.from_functions(apply, params)), "functions": _raw(apply, params)}


class FlaxModel(flax.nnx.Module):
    def __init__(self, rngs: flax.nnx.Rngs):
        self.up = flax.nnx.Linear(16, 32, rngs=rngs)
        self.down = flax.nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(flax.nnx.relu(self.up(x)))


def _flax() -> dict[str, Contender]:
    @flax.nnx.jit
    def step(model: FlaxModel, optimizer: flax.nnx.Optimizer, x: jax.Array) -> jax.Array:
        loss, grads = flax.nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def native(cached: bool) -> Contender:
        model = FlaxModel(flax.nnx.Rngs(0))
        optimizer = flax.nnx.Optimizer(model, TX, wrt=flax.nnx.Param)
        if cached:
            cached_step = flax.nnx.cached_partial(step, model, optimizer)
            return lambda: cached_step(X)
        return lambda: step(model, optimizer, X)

    ours = _wrapped(nnx.bridge.from_flax(FlaxModel(flax.nnx.Rngs(0))))
    return {OURS: ours, "flax": native(cached=False), "flax cached_partial": native(cached=True)}


def _equinox() -> dict[str, Contender]:
    def make() -> eqx.nn.MLP:
        return eqx.nn.MLP(16, 16, 32, 1, key=jax.random.key(0))

    @eqx.filter_jit
    def step(model: eqx.nn.MLP, moments: Any, x: jax.Array) -> Any:
        loss, grads = eqx.filter_value_and_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
        updates, moments = TX.update(grads, moments, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), moments, loss

    model = make()
    moments = TX.init(eqx.filter(model, eqx.is_inexact_array))

    def run() -> jax.Array:
        nonlocal model, moments
        model, moments, loss = step(model, moments, X)
        return loss

    ours = _wrapped(nnx.bridge.from_equinox(make(), call=lambda model, x: jax.vmap(model)(x)))
    return {OURS: ours, "equinox": run}
