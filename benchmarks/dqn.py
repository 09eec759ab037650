"""A program in which the overhead of a call shows: DQN with the environment in Python, one jitted call per step.

Each step of the environment (CartPole, in plain Python) is one call: it learns from a batch of the replay buffer, moves
the target network, and picks the next action. The network is small, as it is in practice for such tasks, so the host
and not the device sets the pace. All contenders start from the same weights and the same random numbers, take turns,
and must then reach the same return.
"""

import functools
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import nnx
from benchmarks.cartpole import Batch, CartPole, Replay
from benchmarks.harness import OURS, Row, Settings, interleave, ratio_row

SIZES = (4, 64, 64, 2)
BATCH, DISCOUNT, RATE, TARGET_RATE = 64, 0.99, 1e-3, 0.002
RANDOM_STEPS, EXPLORATION_STEPS, LEAST_EXPLORATION = 200, 1_500, 0.05
STEPS, RETURN = 5_000, 150.0  # after so many steps, the best ten episodes in a row must have had this mean return
LIMIT = 1.15

Act = Callable[[np.ndarray, Batch], Any]
"""One call of an agent: learns from a batch, and returns the best action for an observation."""

NO_RETURN = "DQN with {name} reached a mean return of {found:.0f} in {steps} steps; {expected:.0f} was expected."


def measure(settings: Settings) -> Iterator[Row]:
    agents: dict[str, Callable[[], Act]] = {
        OURS: ours,
        "raw": raw,
        "equinox": equinox,
        "flax cached_partial": functools.partial(flax_agent, cached=True),
        "flax": functools.partial(flax_agent, cached=False),
    }
    if importlib.util.find_spec("torch") is not None:
        agents["torch"] = torch_agent
    else:
        print("PyTorch is not installed: left out of dqn", file=sys.stderr)
    runs = {name: Run(agent()) for name, agent in agents.items()}
    timings = interleave({name: run.step for name, run in runs.items()}, seconds=settings.seconds(10))
    for name, run in runs.items():
        if name in (OURS, "raw") or not settings.quick:
            run.check_return(name)
    yield ratio_row("DQN, one environment step: act and learn", timings, "raw", LIMIT)


class Run:
    """A training run, one environment step at a time."""

    def __init__(self, act: Act):
        self.act, self.env, self.replay = act, CartPole(seed=1), Replay(capacity=10_000, seed=2)
        self.returns: list[int] = []
        self._random, self._steps = random.Random(3), 0
        for _ in range(RANDOM_STEPS):
            self._play(self._random.randrange(2))

    def step(self) -> None:
        """Makes one step in the environment, and one of learning."""
        observation = np.array(self.env.observation, np.float32)
        action = int(self.act(observation, self.replay.sample(BATCH)))
        self._steps += 1
        if self._random.random() < max(LEAST_EXPLORATION, 1 - self._steps / EXPLORATION_STEPS):
            action = self._random.randrange(2)
        self._play(action)

    def _play(self, action: int) -> None:
        before = self.env.observation
        after, fell, over = self.env.step(action)
        self.replay.add(before, action, after, fell)
        if over:
            self.returns.append(self.env.steps)
            self.env.reset()

    def check_return(self, name: str) -> None:
        """Trains on until there were enough steps; raises if the agent has not learned to balance the pole."""
        while self._steps < STEPS:
            self.step()
        means = [sum(self.returns[i : i + 10]) / 10 for i in range(max(1, len(self.returns) - 9))]
        if max(means) < RETURN:
            raise AssertionError(NO_RETURN.format(name=name, found=max(means), steps=self._steps, expected=RETURN))


# The agent, once per library.


def weights() -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the kernel and bias of every layer at the start of training."""
    rng = np.random.default_rng(0)
    return [
        (rng.normal(0, (2 / fan_in) ** 0.5, (fan_in, fan_out)).astype(np.float32), np.zeros(fan_out, np.float32))
        for fan_in, fan_out in zip(SIZES, SIZES[1:])
    ]


def run_layers(layers: Any, x: jax.Array) -> jax.Array:
    """Runs a network of `(kernel, bias)` pairs; returns the value of each action."""
    *hidden, (kernel, bias) = layers
    for hidden_kernel, hidden_bias in hidden:
        x = jax.nn.relu(x @ hidden_kernel + hidden_bias)
    return x @ kernel + bias


def td_loss(values: Callable[[Any], jax.Array], target: Callable[[Any], jax.Array], batch: Any) -> jax.Array:
    """The Huber loss of the temporal difference."""
    chosen = jnp.take_along_axis(values(batch["observation"]), batch["action"][:, None], axis=1)[:, 0]
    best = jnp.max(target(batch["next"]), axis=1)
    return jnp.mean(optax.huber_loss(chosen, 1 + DISCOUNT * (1 - batch["fell"]) * best))


def move(target: Any, online: Any) -> Any:
    """Returns the weights of the target network, moved a little toward the others."""
    return jax.tree.map(lambda t, o: t + TARGET_RATE * (o - t), target, online)


class Network(nnx.Module):
    def __init__(self) -> None:
        self.layers = [nnx.Dict(kernel=nnx.Param(kernel), bias=nnx.Param(bias)) for kernel, bias in weights()]

    def __call__(self, x: Any) -> jax.Array:
        return run_layers([(layer.kernel, layer.bias) for layer in self.layers], x)


def ours() -> Act:
    online, target = Network(), Network()
    optimizer = nnx.Optimizer(online, optax.adam(RATE))

    @nnx.jit
    def step(optimizer: Any, target: Network, observation: Any, batch: Any) -> jax.Array:
        online = optimizer.model
        optimizer.update(nnx.grad(lambda online: td_loss(online, target, batch))(online))
        target.update_state(move(target.get_state(), online.get_state()))
        return jnp.argmax(online(observation))

    return lambda observation, batch: step(optimizer, target, observation, batch)


def raw() -> Act:
    tx, online = optax.adam(RATE), jax.tree.map(jnp.asarray, weights())
    target, opt_state = online, tx.init(online)

    @jax.jit
    def step(online: Any, target: Any, opt_state: Any, observation: Any, batch: Any) -> Any:
        def loss(online: Any) -> jax.Array:
            return td_loss(lambda x: run_layers(online, x), lambda x: run_layers(target, x), batch)

        updates, opt_state = tx.update(jax.grad(loss)(online), opt_state, online)
        online = optax.apply_updates(online, updates)
        return online, move(target, online), opt_state, jnp.argmax(run_layers(online, observation))

    def act(observation: np.ndarray, batch: Batch) -> Any:
        nonlocal online, target, opt_state
        online, target, opt_state, action = step(online, target, opt_state, observation, batch)
        return action

    return act


class EquinoxNetwork(eqx.Module):
    layers: list[tuple[jax.Array, jax.Array]]

    def __call__(self, x: Any) -> jax.Array:
        return run_layers(self.layers, x)


def equinox() -> Act:
    tx, online = optax.adam(RATE), EquinoxNetwork(jax.tree.map(jnp.asarray, weights()))
    target, opt_state = online, tx.init(eqx.filter(online, eqx.is_array))

    @eqx.filter_jit
    def step(online: Any, target: Any, opt_state: Any, observation: Any, batch: Any) -> Any:
        grads = eqx.filter_grad(lambda online: td_loss(online, target, batch))(online)
        updates, opt_state = tx.update(grads, opt_state, online)
        online = eqx.apply_updates(online, updates)
        return online, move(target, online), opt_state, jnp.argmax(online(observation))

    def act(observation: np.ndarray, batch: Batch) -> Any:
        nonlocal online, target, opt_state
        online, target, opt_state, action = step(online, target, opt_state, observation, batch)
        return action

    return act


class FlaxLayer(flax.nnx.Module):
    def __init__(self, kernel: np.ndarray, bias: np.ndarray):
        self.kernel, self.bias = flax.nnx.Param(jnp.asarray(kernel)), flax.nnx.Param(jnp.asarray(bias))


class FlaxNetwork(flax.nnx.Module):
    def __init__(self) -> None:
        self.layers = flax.nnx.List([FlaxLayer(*pair) for pair in weights()])

    def __call__(self, x: Any) -> jax.Array:
        return run_layers([(layer.kernel[...], layer.bias[...]) for layer in self.layers], x)


def flax_agent(cached: bool) -> Act:
    online, target = FlaxNetwork(), FlaxNetwork()
    optimizer = flax.nnx.Optimizer(online, optax.adam(RATE), wrt=flax.nnx.Param)

    @flax.nnx.jit
    def step(online: Any, target: Any, optimizer: Any, observation: Any, batch: Any) -> jax.Array:
        optimizer.update(online, flax.nnx.grad(lambda online: td_loss(online, target, batch))(online))
        flax.nnx.update(target, move(flax.nnx.state(target), flax.nnx.state(online)))
        return jnp.argmax(online(observation))

    if cached:
        return flax.nnx.cached_partial(step, online, target, optimizer)
    return lambda observation, batch: step(online, target, optimizer, observation, batch)


def torch_agent() -> Act:
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)  # the arrays are too small for more

    def network() -> Any:
        layers = []
        for kernel, bias in weights():
            linear = torch.nn.Linear(*kernel.shape)
            linear.load_state_dict({"weight": torch.from_numpy(kernel.T.copy()), "bias": torch.from_numpy(bias)})
            layers += [linear, torch.nn.ReLU()]
        return torch.nn.Sequential(*layers[:-1])

    online, target = network(), network()
    optimizer = torch.optim.Adam(online.parameters(), lr=RATE)

    def act(observation: np.ndarray, batch: Batch) -> Any:
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        chosen = online(tensors["observation"]).gather(1, tensors["action"].long()[:, None])[:, 0]
        with torch.no_grad():
            best = target(tensors["next"]).max(dim=1).values
            expected = 1 + DISCOUNT * (1 - tensors["fell"]) * best
        optimizer.zero_grad()
        torch.nn.functional.huber_loss(chosen, expected).backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), TARGET_RATE)
            return online(torch.from_numpy(observation)).argmax()

    return act
