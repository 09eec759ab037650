"""How the benchmarks are timed and judged.

A *contender* is a function without arguments that performs the operation once. All contenders for a question run in one
process, taking turns: the same code varies by more than ten percent from one run to the next, but by far less between
neighboring turns. A turn is a burst of calls that ends when the last result is ready. The *best* turn shows what the
operation costs when nothing disturbs it; ratios are ratios of best turns.

A *row* is one line of the table: our time, the time it is compared with, the goal, and the peers for information.
"""

import dataclasses
import gc
import random
import time
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any

import jax

Contender = Callable[[], Any]

OURS = "nnx"
SLOW = 0.1
"""Seconds. Longer turns leave so much garbage behind that the next ones would wait for new memory."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call."""

    best: float
    median: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured goal. `value` is compared with `limit`; both are in the unit that `goal` is written in."""

    measure: str
    ours: float
    value: float
    limit: float
    goal: str
    unit: str
    others: dict[str, float]

    @property
    def passed(self) -> bool:
        return self.value <= self.limit


@dataclasses.dataclass(frozen=True)
class Settings:
    """How long to measure: `--quick` takes a fifth of the time and is less precise."""

    quick: bool = False

    def seconds(self, full: float) -> float:
        return full / 5 if self.quick else full


def interleave(
    contenders: Mapping[str, Contender],
    *,
    seconds: float,
    turn: float = 3e-4,
    clock: Callable[[], float] = time.perf_counter,
    compared: int = 2,
) -> dict[str, Timing]:
    """Times the contenders in turns.

    Args:
        contenders: the functions to time, by name.
        seconds: the total time to measure; up to twice as long while the best times are still falling.
        turn: the approximate seconds per turn; a contender slower than that makes one call a turn. Short turns are
            more likely to pass undisturbed.
        clock: the clock to use. For pure computation, such as tracing, `time.process_time` ignores the time that other
            programs take meanwhile.
        compared: the number of contenders, from the first, that a goal compares. The others are included for
            information and get a quarter of their time each.
    """
    calls = {name: _calls_per_turn(run, turn) for name, run in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    spent = dict.fromkeys(contenders, 0.0)
    order, shuffle = list(contenders), random.Random(0).shuffle
    pair = order[:compared]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        while (total := sum(spent.values())) < seconds or (total < 2 * seconds and not _is_settled(times)):
            shuffle(order)  # so that no contender always inherits the cache contents of the same neighbor
            share = 2 * min(spent[name] for name in pair)
            for name in order:
                # a slow contender gets fewer turns, so that each gets about its share of the time
                if spent[name] <= (share if name in pair else share / 8):
                    if times[name] and times[name][-1] > SLOW:
                        gc.collect()
                    times[name].append(_seconds_per_call(contenders[name], calls[name], clock))
                    spent[name] += times[name][-1] * calls[name]
            if sum(map(len, times.values())) % 256 < len(order):
                gc.collect()
    finally:
        if was_enabled:
            gc.enable()
    return {name: Timing(min(values), sorted(values)[len(values) // 2]) for name, values in times.items()}


def _is_settled(times: dict[str, list[float]]) -> bool:
    """Returns whether the last quarter of the turns improved the best time by less than a percent."""
    return all(len(values) < 4 or min(values[: -(len(values) // 4)]) <= 1.01 * min(values) for values in times.values())


def _seconds_per_call(run: Contender, calls: int, clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    for _ in repeat(None, calls - 1):
        run()
    result = run()
    if isinstance(result, jax.Array):
        result.block_until_ready()
    else:
        jax.block_until_ready(result)
    return (clock() - start) / calls


def _calls_per_turn(run: Contender, turn: float) -> int:
    for _ in range(2):  # compile, then reach the steady state
        jax.block_until_ready(run())
    calls = 1
    while calls * (seconds := _seconds_per_call(run, calls)) < turn / 4:
        calls *= 4
    return max(1, round(turn / seconds))


def ratio_row(measure: str, timings: Mapping[str, Timing], against: str, limit: float, goal: str = "") -> Row:
    """Returns the row for our best time as a multiple of another contender's."""
    ours, other = timings[OURS].best, timings[against].best
    return Row(measure, ours, ours / other, limit, goal or f"≤ {limit:g} × {against}", "×", _others(timings))


def time_row(measure: str, timings: Mapping[str, Timing], limit: float) -> Row:
    """Returns the row for our best time in seconds."""
    ours = timings[OURS].best
    return Row(measure, ours, ours, limit, f"≤ {seconds_text(limit)}", "s", _others(timings))


def _others(timings: Mapping[str, Timing]) -> dict[str, float]:
    return {name: timing.best for name, timing in timings.items() if name != OURS}


def seconds_text(seconds: float) -> str:
    """Formats a duration for people.

    >>> seconds_text(2.1e-05), seconds_text(0.25)
    ('21 µs', '250 ms')
    """
    for unit, scale in (("ns", 1e9), ("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 1000:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"
