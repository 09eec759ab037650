"""What does an Adam step cost when a Module holds the optax state, compared with hand-written optax over nested dicts?

Layers of a kernel and a bias with a real gradient. The state is held in two ways: in a Module such as a user might
write, which keeps the result of `tx.init` as one attribute, and in `nnx.Optimizer`. JAX takes such an attribute apart
container by container, in Python, which shows when there are hundreds of parameters and hardly any work.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import nnx
from benchmarks.blocks import WIDTH, Raw
from benchmarks.harness import OURS, Contender, Row, Settings, interleave, ratio_row


def measure(settings: Settings) -> Iterator[Row]:
    seconds = settings.seconds(10)
    timings = interleave(_contenders(_OwnOptimizer, 15), seconds=seconds)
    yield ratio_row("Adam step, state in a user-defined Module, 30 Variables", timings, "raw optax", 1.1)
    timings = interleave(_contenders(_OwnOptimizer, 150), seconds=seconds)
    yield ratio_row("Adam step, state in a user-defined Module, 300 Variables", timings, "raw optax", 1.25)
    timings = interleave(_contenders(nnx.Optimizer, 15), seconds=seconds)
    yield ratio_row("Adam step through nnx.Optimizer, 30 Variables", timings, "raw optax", 1.1)


class _Layer(nnx.Module):
    def __init__(self, i: int):
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) / WIDTH)
        self.bias = nnx.Param(jnp.zeros((WIDTH,)))


class _Stack(nnx.Module):
    def __init__(self, n: int):
        self.layers = [_Layer(i) for i in range(n)]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(x @ layer.kernel + layer.bias)
        return x


class _OwnOptimizer(nnx.Module):
    """What a user would write to keep the optax state in a Module."""

    def __init__(self, model: nnx.Module, tx: optax.GradientTransformation):
        self.tx = tx
        self.state = tx.init(model.filter(nnx.Param))

    def update(self, model: nnx.Module, grads: nnx.State) -> None:
        params = model.filter(nnx.Param)
        updates, self.state = self.tx.update(grads, self.state, params)
        model.update_state(optax.apply_updates(params, updates))


def _contenders(make_optimizer: Callable[..., Any], layers: int) -> dict[str, Contender]:
    x, y = jnp.ones((8, WIDTH)), jnp.zeros((8, WIDTH))
    model = _Stack(layers)
    optimizer = make_optimizer(model, optax.adam(1e-3))
    own = make_optimizer is _OwnOptimizer

    @nnx.jit
    def step(model: _Stack, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, grads) if own else optimizer.update(grads)
        return loss

    tx = optax.adam(1e-3)
    params = {f"{i:03}": {"kernel": layer.kernel, "bias": layer.bias} for i, layer in enumerate(_Stack(layers).layers)}
    opt_state = tx.init(params)

    @jax.jit
    def raw_step(params: Raw, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_fn(params: Raw) -> jax.Array:
            out = x
            for layer in params.values():
                out = jnp.tanh(out @ layer["kernel"] + layer["bias"])
            return jnp.mean((out - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def run_raw() -> jax.Array:
        nonlocal params, opt_state
        params, opt_state, loss = raw_step(params, opt_state, x, y)
        return loss

    return {OURS: lambda: step(model, optimizer, x, y), "raw optax": run_raw}
