"""Balances a pole with PPO; environment, policy and learning are one compiled program.

    python examples/programs/ppo.py                     a million steps, in seconds
    python examples/programs/ppo.py --resume --updates 120     go on from the last checkpoint
    python examples/programs/ppo.py --python            the same algorithm, with the environment in Python
    python examples/programs/ppo.py --compare           both, for the same time, and their steps per second

The task is CartPole as it is usually given: keep the pole upright for 500 steps. Proximal policy optimization collects
128 steps of 64 environments with the current policy, estimates how much better each action was than expected, and
improves the policy in small batches, never far from the one that collected. Where the environment is written in JAX,
`nnx.scan` runs all of it, and Python is asked once in ten updates: to log, to save, and to stop.

Returns, a checkpoint and a picture go to examples/output/ppo/.
"""

import argparse
import math
import pathlib
import random
import shutil
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--updates", type=int, help="120 if not given; each learns from environments × steps transitions")
parser.add_argument("--environments", type=int, default=64)
parser.add_argument("--steps", type=int, default=128, help="of each environment between two updates")
parser.add_argument("--rate", type=float, default=1e-3, help="the learning rate at first; it falls to 0")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--python", action="store_true", help="step environments in Python, one after the other")
parser.add_argument("--compare", action="store_true", help="measure both ways, and learn nothing")
parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
parser.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = parser.parse_args()
args.updates = args.updates or (20 if args.smoke else 120)
EPOCHS, BATCHES, CHUNK = 4, 4, 10  # passes over what was collected, batches in each, updates in a compiled call
DISCOUNT, TRACE, CLIP, ENTROPY, VALUE = 0.99, 0.95, 0.2, 0.01, 0.5
LONGEST = 500
output = pathlib.Path(__file__).parent.parent / "output" / ("ppo-smoke" if args.smoke else "ppo")

# The environment. A state is the position and speed of the cart, the angle and speed of the pole. The same arithmetic
# serves JAX, on all environments at once, and Python, on one.


def accelerate(state: Any, action: Any, sin: Callable[..., Any], cos: Callable[..., Any]) -> tuple[Any, Any, Any, Any]:
    """Moves cart and pole for 0.02 seconds, with a force of 10 N to the left (0) or the right (1)."""
    x, speed, angle, turning = state
    force = 20.0 * action - 10.0
    pushed = (force + 0.05 * turning**2 * sin(angle)) / 1.1
    turns = (9.8 * sin(angle) - cos(angle) * pushed) / (0.5 * (4.0 / 3.0 - 0.1 * cos(angle) ** 2 / 1.1))
    moves = pushed - 0.05 * turns * cos(angle) / 1.1
    return x + 0.02 * speed, speed + 0.02 * moves, angle + 0.02 * turning, turning + 0.02 * turns


LIMITS = 2.4, 12 * math.pi / 180  # beyond this position or angle, the episode ends


class World(NamedTuple):
    """All environments: their states `[environments, 4]`, and how many steps each episode has lasted."""

    states: jax.Array
    ages: jax.Array


def new_states(key: jax.Array, count: int) -> jax.Array:
    return jax.random.uniform(key, (count, 4), minval=-0.05, maxval=0.05)


def step_world(world: World, actions: jax.Array, key: jax.Array) -> tuple[World, dict[str, jax.Array]]:
    """Steps every environment, and starts those anew whose episode ends; returns what was seen on the way."""
    states = jnp.stack(accelerate(world.states.T, actions, jnp.sin, jnp.cos), axis=-1)
    ages = world.ages + 1
    fell = (jnp.abs(states[:, 0]) > LIMITS[0]) | (jnp.abs(states[:, 2]) > LIMITS[1])
    ended = fell | (ages == LONGEST)
    seen = {"next": states, "fell": fell, "ended": ended, "length": jnp.where(ended, ages, 0)}
    states = jnp.where(ended[:, None], new_states(key, len(states)), states)
    return World(states, jnp.where(ended, 0, ages)), seen


# The model: what to do, and how much reward to expect.


class ActorCritic(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        small = nnx.initializers.orthogonal(0.01)  # at first, both actions are equally likely
        body = {"activation": nnx.tanh, "kernel_init": nnx.initializers.orthogonal(math.sqrt(2))}
        self.actor = nnx.MLP(4, 64, 64, **body, ctx=ctx)
        self.choose = nnx.Linear(64, 2, kernel_init=small, ctx=ctx)
        self.critic = nnx.MLP(4, 64, 64, **body, ctx=ctx)
        self.expect = nnx.Linear(64, 1, ctx=ctx)

    def __call__(self, states: jax.Array) -> jax.Array:
        """Returns the log-probability of each action, `[..., 2]`."""
        return nnx.log_softmax(self.choose(nnx.tanh(self.actor(states))))

    def value(self, states: jax.Array) -> jax.Array:
        """Returns the discounted sum of rewards to come, `[...]`."""
        return self.expect(nnx.tanh(self.critic(states)))[..., 0]


def chosen(log_probabilities: jax.Array, actions: jax.Array) -> jax.Array:
    return jnp.take_along_axis(log_probabilities, actions[..., None], axis=-1)[..., 0]


# Learning from what was collected: arrays with leading axes [steps, environments].


def advantages(model: ActorCritic, seen: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns how much better each action was than expected, and what should have been expected."""
    values = model.value(seen["states"])
    # An episode that was cut off would have gone on: what it had left to expect counts.
    surprises = 1.0 + DISCOUNT * jnp.where(seen["fell"], 0.0, model.value(seen["next"])) - values

    def back(later: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        surprise, ended = step
        now = surprise + DISCOUNT * TRACE * jnp.where(ended, 0.0, later)
        return now, now

    _, better = jax.lax.scan(back, jnp.zeros_like(values[0]), (surprises, seen["ended"]), reverse=True)
    return better, better + values


def loss_fn(model: ActorCritic, batch: dict[str, jax.Array]) -> jax.Array:
    log_probabilities = model(batch["states"])
    ratio = jnp.exp(chosen(log_probabilities, batch["actions"]) - batch["log_probability"])
    better = nnx.standardize(batch["better"])
    policy = -jnp.minimum(ratio * better, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * better).mean()
    value = ((model.value(batch["states"]) - batch["expected"]) ** 2).mean()
    entropy = -(jnp.exp(log_probabilities) * log_probabilities).sum(-1).mean()
    return policy + VALUE * value - ENTROPY * entropy


def learn(optimizer: nnx.Optimizer, seen: dict[str, Any], key: jax.Array) -> jax.Array:
    """Improves the policy; returns the mean length of the episodes that ended."""
    seen["better"], seen["expected"] = advantages(optimizer.model, seen)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), seen)
    count = len(flat["ended"])

    def improve(optimizer: nnx.Optimizer, _: None, rows: jax.Array) -> tuple[None, jax.Array]:
        batch = jax.tree.map(lambda x: x[rows], flat)
        loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model, batch)
        optimizer.update(grads)
        return None, loss

    orders = jax.vmap(lambda key: jax.random.permutation(key, count))(jax.random.split(key, EPOCHS))
    nnx.scan(improve)(optimizer, None, orders.reshape(EPOCHS * BATCHES, -1))
    return seen["length"].sum() / jnp.maximum(seen["ended"].sum(), 1)


# Everything in one program: collect, learn, again.


@nnx.jit
def train(optimizer: nnx.Optimizer, world: World, keys: jax.Array) -> tuple[World, jax.Array]:
    """Runs one update per key; returns the environments and the mean length of the episodes in each update."""

    def act(model: ActorCritic, world: World, key: jax.Array) -> tuple[World, dict[str, jax.Array]]:
        log_probabilities = model(world.states)
        actions = jax.random.categorical(key, log_probabilities)
        after, seen = step_world(world, actions, jax.random.fold_in(key, 1))
        log_probability = chosen(log_probabilities, actions)
        return after, {**seen, "states": world.states, "actions": actions, "log_probability": log_probability}

    def update(optimizer: nnx.Optimizer, world: World, key: jax.Array) -> tuple[World, jax.Array]:
        collecting, learning = jax.random.split(key)
        world, seen = nnx.scan(act)(optimizer.model, world, jax.random.split(collecting, args.steps))
        return world, learn(optimizer, seen, learning)

    return nnx.scan(update)(optimizer, world, keys)


# The same with environments in Python: the policy is asked once per step.


class PythonWorld:
    """Environments in Python objects, stepped one after the other."""

    def __init__(self, count: int, seed: int):
        self.random = random.Random(seed)
        self.states = [self.new() for _ in range(count)]
        self.ages = [0] * count

    def new(self) -> tuple[float, ...]:
        return tuple(self.random.uniform(-0.05, 0.05) for _ in range(4))

    def step(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        after, fell, lengths = [], [], []
        for i, action in enumerate(actions.tolist()):
            state = accelerate(self.states[i], action, math.sin, math.cos)
            self.ages[i] += 1
            fell.append(abs(state[0]) > LIMITS[0] or abs(state[2]) > LIMITS[1])
            ended = fell[-1] or self.ages[i] == LONGEST
            after.append(state)
            lengths.append(self.ages[i] if ended else 0)
            self.states[i], self.ages[i] = (self.new(), 0) if ended else (state, self.ages[i])
        length = np.array(lengths)
        return {"next": np.array(after, np.float32), "fell": np.array(fell), "ended": length > 0, "length": length}


@nnx.jit
def choose(model: ActorCritic, states: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    log_probabilities = model(states)
    actions = jax.random.categorical(key, log_probabilities)
    return actions, chosen(log_probabilities, actions)


learn_from = nnx.jit(learn)


def train_in_python(optimizer: nnx.Optimizer, world: PythonWorld, keys: jax.Array) -> tuple[PythonWorld, np.ndarray]:
    lengths = []
    for key in keys:
        collecting, learning = jax.random.split(key)
        steps = []
        for each in jax.random.split(collecting, args.steps):
            states = np.array(world.states, np.float32)
            actions, log_probability = map(np.asarray, choose(optimizer.model, states, each))
            seen = {"states": states, "actions": actions, "log_probability": log_probability}
            steps.append({**world.step(actions), **seen})
        together = {name: np.stack([step[name] for step in steps]) for name in steps[0]}
        lengths.append(learn_from(optimizer, together, learning))
    return world, np.array(lengths)


# Training


def start(python: bool) -> tuple[nnx.Optimizer, Any, Any]:
    """Returns an optimizer, environments, and the function that trains with them."""
    total = args.updates * EPOCHS * BATCHES
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(optax.linear_schedule(args.rate, 0.0, total)))
    optimizer = nnx.Optimizer(ActorCritic(ctx=nnx.context(args.seed)), tx)
    if python:
        return optimizer, PythonWorld(args.environments, args.seed), train_in_python
    states = new_states(jax.random.key(args.seed), args.environments)
    return optimizer, World(states, jnp.zeros(args.environments, jnp.int32)), train


keys = jax.random.split(jax.random.key(args.seed + 1), args.updates)
per_update = args.steps * args.environments
if args.compare:
    for name, python, updates in (("in JAX", False, CHUNK), ("in Python", True, 2)):
        optimizer, world, run = start(python)
        seconds = []
        for _ in range(5):  # the first compiles
            began = time.perf_counter()
            world, lengths = run(optimizer, world, keys[:updates])
            jax.block_until_ready(lengths)
            seconds.append(time.perf_counter() - began)
        print(f"environments {name}: {updates * per_update / min(seconds):,.0f} steps/s")
    raise SystemExit

optimizer, world, run = start(args.python)
manager = nnx.CheckpointManager(output / "checkpoints", keep_last=2)
done = 0
if args.resume:
    done = manager.resume(optimizer) or 0
else:
    shutil.rmtree(output / "checkpoints", ignore_errors=True)
    (output / "metrics.jsonl").unlink(missing_ok=True)
history: list[float] = []
began = time.perf_counter()
with nnx.TrainLog(total=args.updates, path=output, name="ppo") as log:
    for first in range(done, args.updates, CHUNK):
        world, lengths = run(optimizer, world, keys[first : first + CHUNK])
        history += np.asarray(lengths).tolist()
        log(min(first + CHUNK, args.updates) - 1, mean_return=history[-1])
        manager.save(min(first + CHUNK, args.updates), optimizer, overwrite=True)
manager.wait()
seconds = time.perf_counter() - began
print(
    f"{len(history) * per_update:,} steps in {seconds:.1f} s, compilation included, on {jax.devices()[0].device_kind}"
)

# What it has learned: one episode in each environment, without chance.


@nnx.jit
def best_lengths(model: ActorCritic, key: jax.Array) -> jax.Array:
    def act(carry: tuple[World, jax.Array], key: jax.Array) -> tuple[tuple[World, jax.Array], None]:
        world, lengths = carry
        world, seen = step_world(world, model(world.states).argmax(-1), key)
        return (world, jnp.where(lengths == 0, seen["length"], lengths)), None

    none = jnp.zeros(args.environments, jnp.int32)
    world = World(new_states(key, args.environments), none)
    (_, lengths), _ = jax.lax.scan(act, (world, none), jax.random.split(key, LONGEST))
    return lengths


final = float(best_lengths(optimizer.model, jax.random.key(args.seed + 2)).mean())
figure = Figure(figsize=(6, 2.8), layout="constrained")
axes = figure.add_subplot(xlabel="steps", ylabel="mean return", ylim=(0, LONGEST + 20))
axes.plot(per_update * (done + 1 + np.arange(len(history))), history)
axes.axhline(LONGEST, color="gray", linewidth=0.7, linestyle="--")
output.mkdir(parents=True, exist_ok=True)
figure.savefig(output / "returns.png", dpi=150)
assert args.smoke or args.resume or final > 475, final
assert not args.smoke or final > 100, final
print(f"final mean return: {final:.1f}")
