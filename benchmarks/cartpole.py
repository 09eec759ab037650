"""A pole on a cart, in plain Python, and a replay buffer in numpy: what the DQN of every library plays with."""

import math
import random

import numpy as np

Observation = tuple[float, float, float, float]
Batch = dict[str, np.ndarray]

MAX_STEPS = 200
GRAVITY, CART_MASS, POLE_MASS, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
MAX_POSITION, MAX_ANGLE = 2.4, math.radians(12)


class CartPole:
    """Push the cart left (0) or right (1); the reward is 1 for every step in which the pole stays up.

    The equations of motion are those of Barto, Sutton and Anderson (1983), integrated by Euler's method.
    """

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self.observation: Observation = self.reset()

    def reset(self) -> Observation:
        """Starts an episode near the upright position."""
        uniform, self.steps = self._random.uniform, 0
        self.observation = (uniform(-0.05, 0.05), uniform(-0.05, 0.05), uniform(-0.05, 0.05), uniform(-0.05, 0.05))
        return self.observation

    def step(self, action: int) -> tuple[Observation, bool, bool]:
        """Pushes the cart; returns the observation, whether the pole fell, and whether the episode is over."""
        x, speed, angle, turn = self.observation
        force = FORCE if action else -FORCE
        sine, cosine, mass = math.sin(angle), math.cos(angle), CART_MASS + POLE_MASS
        pull = (force + POLE_MASS * HALF_LENGTH * turn * turn * sine) / mass
        leverage = HALF_LENGTH * (4 / 3 - POLE_MASS * cosine * cosine / mass)
        angular = (GRAVITY * sine - cosine * pull) / leverage
        linear = pull - POLE_MASS * HALF_LENGTH * angular * cosine / mass
        x, speed = x + SECONDS * speed, speed + SECONDS * linear
        angle, turn = angle + SECONDS * turn, turn + SECONDS * angular
        self.observation, self.steps = (x, speed, angle, turn), self.steps + 1
        fell = abs(x) > MAX_POSITION or abs(angle) > MAX_ANGLE
        return self.observation, fell, fell or self.steps == MAX_STEPS


class Replay:
    """The last transitions, in a ring."""

    def __init__(self, capacity: int, seed: int):
        self._random = np.random.default_rng(seed)
        self._arrays: Batch = {
            "observation": np.zeros((capacity, 4), np.float32),
            "action": np.zeros((capacity,), np.int32),
            "next": np.zeros((capacity, 4), np.float32),
            "fell": np.zeros((capacity,), np.float32),
        }
        self._capacity, self._count = capacity, 0

    def add(self, observation: Observation, action: int, after: Observation, fell: bool) -> None:
        i, self._count = self._count % self._capacity, self._count + 1
        for name, value in zip(self._arrays, (observation, action, after, fell)):
            self._arrays[name][i] = value

    def sample(self, size: int) -> Batch:
        """Returns a batch of transitions, drawn with replacement."""
        rows = self._random.integers(min(self._count, self._capacity), size=size)
        return {name: array[rows] for name, array in self._arrays.items()}
