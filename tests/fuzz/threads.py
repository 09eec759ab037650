"""One jitted function, called by several threads at the same time, each with its own Modules.

Every thread repeats a few calls and edits that leave its Modules as they were, so that each call has one right result,
found before by running eagerly. Contexts with different flags and static values that come and go make the threads use
different compiled functions all the time.
"""

import random
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import nnx
from tests.fuzz.vocabulary import Plain, digest, fold, leaf, num

MODES = ["train", "eval", (1, 2), 3]


@dataclass
class Work:
    """What one thread does, and what it found."""

    model: Any
    context: Any
    rng: random.Random
    replaces: bool  # whether it replaces a submodule from time to time
    calls: int = 0
    wrong: str = ""

    def expected(self) -> float:
        return float(loss(self.model, self.context))

    def run(self, function: Any, until: float, limit: int) -> None:
        try:
            results = {}
            while self.calls < limit and not self.wrong and time.monotonic() < until:
                mode = self.rng.choice(MODES)
                self.model.mode = mode
                if self.replaces and self.calls % 16 == 0:
                    self.model.child = leaf(num(self.calls % 8), s=1)
                key = (mode, float(np.asarray(self.model.child.v0)))
                if key not in results:
                    results[key] = self.expected()
                count = int(self.model.count)
                got = float(function(self.model, self.context))
                self.calls += 1
                if got != results[key]:
                    self.wrong = f"call {self.calls} with {key} returned {got}, not {results[key]}"
                elif int(self.model.count) != count + 1:
                    self.wrong = f"call {self.calls} left the counter at {int(self.model.count)}, not {count + 1}"
        except Exception as error:
            self.wrong = f"call {self.calls + 1} raised {error!r}"


def loss(model: Any, ctx: Any) -> Any:
    total = fold(model.w) + fold(model.child.v0) + digest(model.mode) + digest(ctx.get_flag("flag"))
    return total + 0.25 * model.child.s0


def step(model: Any, ctx: Any) -> Any:
    model.count = model.count + 1
    return loss(model, ctx)


def build(number: int) -> Any:
    model = Plain()
    model.w = nnx.Param(num(number / 4))
    model.count = nnx.Variable(jax.numpy.asarray(np.int32(0)))
    model.child = leaf(num(1.5), s=1)
    model.mode = "train"
    return model


def run_threads(seed: int, threads: int = 4, calls: int = 2000, seconds: float = float("inf")) -> tuple[int, list[str]]:
    """The number of calls made by all threads, and what went wrong in any of them."""
    rng = random.Random(seed)
    works = [
        Work(build(i), nnx.context(0, flags={"flag": i % 3}), random.Random(rng.random()), replaces=i == 0)
        for i in range(threads)
    ]
    function = nnx.jit(step)
    until = time.monotonic() + seconds
    runners = [threading.Thread(target=work.run, args=(function, until, calls)) for work in works]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads take turns as often as they can
    try:
        for runner in runners:
            runner.start()
        for runner in runners:
            runner.join()
    finally:
        sys.setswitchinterval(interval)
    return sum(work.calls for work in works), [work.wrong for work in works if work.wrong]
