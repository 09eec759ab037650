"""One small model per library, wrapped, and five steps of Adam by that library's own means.

Every model is a dense layer, a batch norm, a dropout and a dense layer, so that each has parameters, statistics that a
call changes, a mode and a use for keys. `native` returns the losses, and the gradients by path, of every step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as linen
import flax.nnx as flax
import haiku as hk
import jax
import jax.numpy as jnp
import optax

import nnx
from nnx import bridge

X = jax.random.normal(jax.random.key(1), (4, 3))
Y = jnp.array([0, 1, 1, 0])
KEYS = [*jax.random.split(jax.random.key(2), 5)]
TX = optax.adam(1e-2)

Steps = tuple[list[jax.Array], list[dict[str, jax.Array]]]


class Case(NamedTuple):
    """A library: how its model is wrapped, and what is known about it."""

    make: Callable[..., bridge.Foreign]
    native: Callable[[], Steps]
    params: set[str]
    stats: set[str]
    hidden: bool = True  # whether the model has a method of that name


def drawn(key: jax.Array) -> jax.Array:
    """The key that a model draws from `nnx.context(dropout=key)`."""
    return nnx.context(dropout=key).make_rng("dropout")


def loss_of(logits: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, Y).mean()


def five_steps(loss: Callable[..., Any], params: Any, state: Any, flat: Callable[[Any], dict[str, jax.Array]]) -> Steps:
    """Trains with `loss(params, state, key) -> (loss, state)`, as one writes it for optax."""

    @jax.jit
    def step(params: Any, state: Any, moments: Any, key: jax.Array) -> Any:
        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, key)
        updates, moments = TX.update(grads, moments, params)
        return value, grads, optax.apply_updates(params, updates), state, moments

    moments, losses, all_grads = TX.init(params), [], []
    for key in KEYS:
        value, grads, params, state, moments = step(params, state, moments, key)
        losses.append(value)
        all_grads.append(flat(grads))
    return losses, all_grads


# Linen


class LinenNet(linen.Module):
    width: int = 5

    def setup(self) -> None:
        self.dense = linen.Dense(self.width)
        self.norm = linen.BatchNorm(momentum=0.9)
        self.drop = linen.Dropout(0.5)
        self.out = linen.Dense(2, kernel_init=linen.with_partitioning(linen.initializers.normal(), ("embed", None)))

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = self.norm(self.hidden(x), use_running_average=not train)
        self.sow("intermediates", "normed", x)
        return self.out(self.drop(x, deterministic=not train))

    def hidden(self, x: jax.Array) -> jax.Array:
        return self.dense(x)


def linen_variables() -> Any:
    return LinenNet().init(jax.random.key(0), X, False)


def make_linen(**options: Any) -> bridge.Foreign:
    return bridge.from_linen(LinenNet(), variables=linen_variables(), **options)


def native_linen() -> Steps:
    variables = linen.unbox(linen_variables())

    def loss(params: Any, stats: Any, key: jax.Array) -> Any:
        model, rngs = {"params": params, "batch_stats": stats}, {"dropout": drawn(key)}
        logits, new = LinenNet().apply(model, X, True, rngs=rngs, mutable=["batch_stats"])
        return loss_of(logits), new["batch_stats"]

    def flat(grads: Any) -> dict[str, jax.Array]:
        return {f"{layer}/{name}": x for layer, arrays in grads.items() for name, x in arrays.items()}

    return five_steps(loss, variables["params"], variables["batch_stats"], flat)


# Flax NNX, whose random numbers come from its own state here


class FlaxNet(flax.Module):
    def __init__(self, rngs: flax.Rngs):
        self.dense = flax.Linear(3, 5, rngs=rngs)
        self.norm = flax.BatchNorm(5, momentum=0.9, rngs=rngs)
        self.drop = flax.Dropout(0.5, rngs=rngs)
        normal = flax.with_partitioning(flax.initializers.normal(), ("embed", None), eager_sharding=False)
        self.out = flax.Linear(5, 2, kernel_init=normal, rngs=rngs)
        self.activation = lambda x: x

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.drop(self.activation(self.norm(self.hidden(x)))))

    def hidden(self, x: jax.Array) -> jax.Array:
        return self.dense(x)


def make_flax() -> bridge.Foreign:
    return bridge.from_flax(FlaxNet(flax.Rngs(0)))


def native_flax() -> Steps:
    model = FlaxNet(flax.Rngs(0))
    optimizer = flax.Optimizer(model, TX, wrt=flax.Param)

    @flax.jit
    def step(model: Any, optimizer: Any) -> Any:
        value, grads = flax.value_and_grad(lambda model: loss_of(model(X)))(model)
        optimizer.update(model, grads)
        return value, grads

    losses, all_grads = [], []
    for _ in KEYS:
        value, grads = step(model, optimizer)
        losses.append(value)
        all_grads.append({"/".join(path): leaf.get_value() for path, leaf in flax.to_flat_state(grads)})
    return losses, all_grads


# Equinox


class EquinoxNet(eqx.Module):
    dense: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    out: eqx.nn.Linear
    activation: Callable[[jax.Array], jax.Array]

    def __init__(self, key: jax.Array):
        first, second = jax.random.split(key)
        self.dense = eqx.nn.Linear(3, 5, key=first)
        self.norm = eqx.nn.BatchNorm(5, "batch", mode="batch")
        self.drop = eqx.nn.Dropout(0.5)
        self.out = eqx.nn.Linear(5, 2, key=second)
        self.activation = lambda x: x

    def __call__(self, x: jax.Array, state: Any, key: jax.Array | None = None) -> Any:
        x, state = self.norm(self.dense(x), state)
        return self.out(self.drop(self.activation(x), key=key)), state

    def hidden(self, x: jax.Array) -> jax.Array:
        return jax.vmap(self.dense)(x)


def over_batch(model: Any, x: jax.Array, state: Any, key: jax.Array | None = None) -> Any:
    return jax.vmap(model, axis_name="batch", in_axes=(0, None, None), out_axes=(0, None))(x, state, key)


def make_equinox() -> bridge.Foreign:
    return bridge.from_equinox(*eqx.nn.make_with_state(EquinoxNet)(jax.random.key(0)), call=over_batch)


def native_equinox() -> Steps:
    model, state = eqx.nn.make_with_state(EquinoxNet)(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params: Any, state: Any, key: jax.Array) -> Any:
        logits, state = over_batch(eqx.combine(params, static), X, state, drawn(key))
        return loss_of(logits), state

    def flat(grads: Any) -> dict[str, jax.Array]:
        layers = {name: getattr(grads, name) for name in ("dense", "norm", "out")}
        return {f"{name}/{part}": getattr(layer, part) for name, layer in layers.items() for part in ("weight", "bias")}

    return five_steps(loss, params, state, flat)


# Haiku


def haiku_net(x: jax.Array, is_training: bool) -> jax.Array:
    x = hk.BatchNorm(True, True, 0.9, name="norm")(hk.Linear(5, name="dense")(x), is_training)
    x = hk.dropout(hk.next_rng_key(), 0.5, x) if is_training else x
    return hk.nets.MLP([2], name="out")(x)


HAIKU = hk.transform_with_state(haiku_net)


def make_haiku() -> bridge.Foreign:
    params, state = HAIKU.init(jax.random.key(0), X, True)
    return bridge.from_haiku(HAIKU, params=params, state=state)


def native_haiku() -> Steps:
    params, state = HAIKU.init(jax.random.key(0), X, True)

    def loss(params: Any, state: Any, key: jax.Array) -> Any:
        logits, state = HAIKU.apply(params, state, drawn(key), X, True)
        return loss_of(logits), state

    def flat(grads: Any) -> dict[str, jax.Array]:
        return {f"{layer}/{name}": x for layer, arrays in grads.items() for name, x in arrays.items()}

    return five_steps(loss, params, state, flat)


# Functions


def init_functions() -> Any:
    first, second = jax.random.split(jax.random.key(0))
    params = {"dense": jax.random.normal(first, (3, 5)), "out": [jax.random.normal(second, (5, 2)), jnp.zeros(2)]}
    return params, {"mean": jnp.zeros(5)}


def apply_functions(params: Any, state: Any, key: Any, x: jax.Array, *, train: bool) -> Any:
    x = x @ params["dense"]
    mean = x.mean(0) if train else state["mean"]
    x = x - mean
    if train:
        x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)
    return x @ params["out"][0] + params["out"][1], {"mean": 0.9 * state["mean"] + 0.1 * mean if train else mean}


def make_functions() -> bridge.Foreign:
    return bridge.from_functions(apply_functions, *init_functions(), stream="dropout")


def native_functions() -> Steps:
    def loss(params: Any, state: Any, key: jax.Array) -> Any:
        logits, state = apply_functions(params, state, drawn(key), X, train=True)
        return loss_of(logits), state

    def flat(grads: Any) -> dict[str, jax.Array]:
        return {"dense": grads["dense"], "out/0": grads["out"][0], "out/1": grads["out"][1]}

    return five_steps(loss, *init_functions(), flat)


DENSE = {"dense/bias", "dense/kernel", "norm/bias", "norm/scale", "out/bias", "out/kernel"}
MOMENTS = {f"norm/~/{name}_ema/{part}" for name in ("mean", "var") for part in ("average", "counter", "hidden")}
CASES = {
    "linen": Case(make_linen, native_linen, DENSE, {"norm/mean", "norm/var"}),
    "flax": Case(make_flax, native_flax, DENSE, {"norm/mean", "norm/var"}),
    "equinox": Case(
        make_equinox,
        native_equinox,
        {f"{layer}/{name}" for layer in ("dense", "norm", "out") for name in ("weight", "bias")},
        {"norm/batch_counter", "norm/batch_state_index/0", "norm/batch_state_index/1"},
    ),
    "haiku": Case(
        make_haiku,
        native_haiku,
        {"dense/b", "dense/w", "norm/offset", "norm/scale", "out/~/linear_0/b", "out/~/linear_0/w"},
        MOMENTS,
        hidden=False,
    ),
    "functions": Case(make_functions, native_functions, {"dense", "out/0", "out/1"}, {"mean"}, hidden=False),
}
