"""Runs programs: lifted and eagerly, side by side, and says where they differ."""

import contextlib
import functools
import itertools
import random
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import nnx
from tests.fuzz.compare import Difference, Registry, differences, mutable_objects
from tests.fuzz.constructions import DECORATORS, Construction, draw_construction, stack_everything
from tests.fuzz.graphs import EVERYTHING, Features
from tests.fuzz.holders import Holders
from tests.fuzz.interpret import interpreted
from tests.fuzz.interrupts import can_interrupt, interrupted
from tests.fuzz.programs import Call, Program, draw_program
from tests.fuzz.shrinking import shrink
from tests.fuzz.transforms import TRANSFORMS, Gradient
from tests.fuzz.vocabulary import DRAWN, NAMES, canonical
from tests.fuzz.walks import mapped_in_order

SCOPE = {**NAMES, **TRANSFORMS, "__name__": "tests.fuzz.program"}


@dataclass
class Failure:
    """One difference between lifted and eager."""

    program: Program | Construction
    kind: str
    call: int
    details: str

    def report(self) -> str:
        names = sorted(self.program.features.off)
        without = f" --without {','.join(names)}" if names else ""
        command = f"python -m tests.fuzz --seed {self.program.seed}{without}"
        return f"{self.kind}, at call {self.call + 1}:\n{self.details}\nReproduce with: {command}"


class Found(Exception):
    """Raised where a difference shows."""

    def __init__(self, kind: str, details: str):
        super().__init__(kind)
        self.kind, self.details = kind, details


class Side:
    """Two worlds and what has been seen of them."""

    def __init__(self, run: "Run"):
        self.worlds = {number: run.scope["build"](number) for number in run.used}
        self.registry = Registry()
        self.see()

    def roots(self) -> list[Any]:
        return [module for world in self.worlds.values() for module in (world.m, world.n, world.out)]

    def see(self, out: Any = None) -> None:
        """Numbers the Modules that are new; both sides do it at the same moments."""
        self.registry.see([*self.roots(), *modules_in(out)])

    def portrait(self, out: Any = None) -> dict[str, Any]:
        return self.registry.portrait([*self.roots(), *modules_in(out)])

    def edit(self, run: "Run", call: Call) -> None:
        world = self.worlds[call.world]
        run.scope[f"edit{call.edit}"](world.m, world.n, world.out, world.ctx)

    def call(self, function: Any, call: Call, scope: Any) -> Any:
        world = self.worlds[call.world]
        return function(world.m, world.n, eval(code_of(call.x), scope), world.boom if call.fails else world.ctx)


@functools.cache
def code_of(expression: str) -> Any:
    return compile(expression, "<argument>", "eval")


def modules_in(value: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(value, is_leaf=is_module) if is_module(leaf)]


def is_module(value: Any) -> bool:
    return isinstance(value, nnx.Module)


class Run:
    """One run of a program."""

    def __init__(self, program: Program):
        self.program = program
        self.scope = dict(SCOPE)
        exec(compile(program.sources(), f"<seed {program.seed}>", "exec"), self.scope)
        self.lifted = self.scope["lifted"]
        self.eager = eval(program.expression(".eager"), self.scope)
        self.stack = [TRANSFORMS[name] for name in program.transforms]
        self.stateless = self.stack[0].stateless
        self.history: list[Callable[[Side], Any]] = []
        self.traced: set[str] = set()
        self.drawn: set[Any] = set()
        self.used = sorted({call.world for call in program.calls})
        self.number = 0
        self.rng = random.Random(program.seed)
        self.before: Any = None  # the last portrait, while it is true

    def run(self) -> None:
        """Raises Found at the first difference."""
        sides, error = attempt(lambda: (Side(self), Side(self)))
        if sides is None:
            raise Found("building the Modules", text_of(error))
        self.left, self.right = sides
        for number, call in enumerate(self.program.calls):
            self.number = number
            if call.edit is not None:
                self.edit(call)
            self.step(call)
        if self.stack[0].interruptible and self.program.compiled and self.program.illegal is None and can_interrupt():
            self.interrupt(self.program.calls[-1])

    def edit(self, call: Call) -> None:
        errors = [attempt(lambda side=side: side.edit(self, call))[1] for side in (self.left, self.right)]
        if type(errors[0]) is not type(errors[1]) or isinstance(errors[1], AssertionError):
            raise Found("an edit between calls", f"lifted world: {errors[0]!r}, eager world: {errors[1]!r}")
        self.history.append(lambda side: attempt(lambda: side.edit(self, call)))
        self.before = self.left.portrait()
        self.check(self.right.portrait(), self.before, "after an edit between calls")

    def step(self, call: Call) -> None:
        before = self.before if self.before is not None else self.left.portrait()
        # a Ref with one owner left looks like a plain variable from outside, but is another structure
        traces = None if self.program.reties() else getattr(self.lifted, "trace_count", None)
        types = self.types(call) if traces is not None else ""
        holders = Holders(self.rng, self.left.roots()) if self.program.compiled else None
        DRAWN.clear()
        with contextlib.nullcontext() if self.program.compiled else interpreted():
            out, error = attempt(lambda: self.left.call(self.lifted, call, self.scope))
        jax.effects_barrier()
        drawn = list(DRAWN)
        if holders is not None and (complaint := holders.complaint()):
            raise Found("an array that somebody else holds", complaint)
        del holders
        if self.program.illegal is not None:
            self.expect_refusal(error)
            return
        right = self.replay() if self.stateless else self.right
        expected, eager_error = attempt(lambda: right.call(self.eager, call, self.scope))
        if type(error) is not type(eager_error):
            raise Found("exceptions", f"eager: {eager_error!r}\nlifted: {text_of(error)}")
        if error is not None:
            self.right = self.replay()
            self.check(before, self.left.portrait(), "changed by a call that raised")
            return
        if self.stateless:
            self.compare_stateless(right, before, out, expected)
        else:
            # both sides number their Modules in the same order
            after = [self.right.portrait(expected), self.left.portrait(out)]
            self.check(*after, "state")
            self.before = after[1]
            self.check_results(self.right.registry.result(expected), self.left.registry.result(out))
        self.compare_derivatives(call, expected, out)
        if not self.stateless:
            self.history.append(lambda side: side.see(side.call(self.eager, call, self.scope)))
        if self.program.draws_once():
            self.check_keys(drawn)
        if traces is not None:
            if types in self.traced and self.lifted.trace_count > traces:
                raise Found("traced again", f"an equal call was traced before ({self.lifted.trace_count} traces)")
            self.traced.add(types)

    def interrupt(self, call: Call) -> None:
        """Repeats a call with an interrupt somewhere in it: all of its changes are there, or none."""
        if self.types(call) not in self.traced or call.fails:
            return  # what happens while tracing is for JAX to get right
        before, right = Registry().portrait(self.left.roots()), self.replay()
        start = time.perf_counter()
        _, error = attempt(lambda: right.call(self.eager, call, self.scope))
        seconds = self.rng.choice([1e-4, 1e-3, time.perf_counter() - start])
        after = Registry().portrait(right.roots())
        if error is not None:
            return
        ended = interrupted(lambda: self.left.call(self.lifted, call, self.scope), self.rng, seconds)
        now = Registry().portrait(self.left.roots())
        found = differences(after, now)
        if found and (ended or differences(before, now)):
            raise_found("an interrupted call is neither whole nor undone", found)

    def types(self, call: Call) -> str:
        world = self.left.worlds[call.world]
        flags = canonical(dict((world.boom if call.fails else world.ctx).flags))
        portrait = Registry().portrait([world.m, world.n, world.out], types_only=True)
        return repr((portrait, call.x, call.fails, flags))

    def replay(self) -> Side:
        """A new eager side with the same history."""
        side = Side(self)
        for event in self.history:
            event(side)
            side.see()
        return side

    def compare_stateless(self, right: Side, before: Any, out: Any, expected: Any) -> None:
        self.check(before, self.left.portrait(), "changed by a stateless call")
        left_results, right_results = Registry(), Registry()
        left, right_ = left_results.result(out), right_results.result(expected)
        self.check(right_results.portrait(), left_results.portrait(), "Modules in the result")
        self.check_results(right_, left)
        own = mutable_objects(self.left.roots())
        shared = [value for key, value in mutable_objects([], [out]).items() if key in own]
        if shared:
            raise Found("a stateless result shares an object with the caller", f"{shared[0]!r:.300}")

    def compare_derivatives(self, call: Call, expected: Any, out: Any) -> None:
        for depth, place in enumerate(gradients_in(expected)):
            out = out[1] if depth == 0 else out["extra"]
            if self.number in (0, 2):
                self.compare_derivative(call, depth, place, out["derivative"])

    def compare_derivative(self, call: Call, depth: int, place: Gradient, actual: Any) -> None:
        """By differences: programs are linear in the parameters."""

        def moved(keys: Iterable[str]) -> float:
            side = self.replay()
            for key in keys:
                arg, path = key.split(":")
                leaf = getattr(side.worlds[call.world], arg).mutable_state_dict()[path]
                leaf.value = mapped_in_order(lambda v: v + 1, leaf.value)
            total = gradients_in(side.call(self.eager, call, self.scope))[depth].total
            return float(total) - float(place.total)

        paths = [f"m:{path}" for path in self.replay().worlds[call.world].m.filter(nnx.Param)]
        if place.form == "directional":
            self.check({"": moved(paths)}, {"": float(actual)}, "the derivative")
            return
        missing = [key for key in paths if key not in actual] if place.form == "gradient" else []
        if missing:
            raise Found("the derivative", f"nothing for {missing}")
        for key in random.Random(self.program.seed).sample(sorted(actual), min(2, len(actual))):
            gradient = float(sum(np.sum(np.asarray(leaf)) for leaf in jax.tree.leaves(actual[key])))
            self.check({key: moved([key])}, {key: gradient}, "the derivative")

    def check_keys(self, drawn: list[Any]) -> None:
        for key in drawn:
            if key in self.drawn:
                raise Found("a key was drawn twice", f"{key}")
            self.drawn.add(key)

    def expect_refusal(self, error: Any) -> None:
        if not isinstance(error, ValueError):
            raise Found("a structural change in a body that runs many times is not refused", text_of(error))
        if self.program.illegal not in str(error):
            raise Found("the refusal does not name the attribute", text_of(error))

    def check_results(self, expected: Any, actual: Any) -> None:
        names = ("total", "extra")
        found = differences(dict(zip(names, expected)), dict(zip(names, actual)))
        raise_found("result", [d for d in found if not d[0].endswith("derivative")])

    def check(self, expected: Any, actual: Any, kind: str) -> None:
        raise_found(kind, differences(expected, actual))


def raise_found(kind: str, found: list[Difference]) -> None:
    if found:
        raise Found(kind, "\n".join(map(line_of, found[:6])))


def gradients_in(result: Any) -> list[Gradient]:
    """The places of derivatives in an eager result, outermost first."""
    found, extra = [], result[1]
    while isinstance(extra, dict) and isinstance(extra.get("derivative"), Gradient):
        found.append(extra["derivative"])
        extra = extra["extra"]
    return found


def line_of(difference: Difference) -> str:
    path, expected, actual = difference
    return f"  {path}: expected {expected!r:.400}\n  {' ' * len(path)}       got {actual!r:.400}"


def attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:  # whatever it is, the other side must raise it as well
        return None, error


def text_of(error: Any) -> str:
    if error is None:
        return "None"
    return "".join(traceback.format_exception(error, limit=-3))


def construct(program: Construction) -> None:
    """Compares a decorated constructor with the plain one; raises Found."""
    scope = dict(SCOPE)
    exec(compile(program.sources(), f"<seed {program.seed}>", "exec"), scope)
    expected, eager_error = attempt(lambda: scope["Eager"](1))
    with interpreted():
        actual, error = attempt(lambda: scope["Lifted"](1))
    if type(error) is not type(eager_error):
        raise Found("exceptions", f"eager: {eager_error!r}\nlifted: {text_of(error)}")
    if error is not None:
        return
    if program.decorator != "remat":
        stack_everything(expected)
    portraits = [Registry().portrait([root]) for root in (expected, actual)]
    found = [d for d in differences(*portraits) if d[0] != "#0"]  # the classes have different names
    raise_found("a constructor", found)


@contextlib.contextmanager
def plain_tracebacks() -> Iterator[None]:
    """Spares JAX the filtering of tracebacks, which takes longer than most programs that raise."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


def run_program(program: Program | Construction) -> Failure | None:
    """The first difference that a program shows."""
    run = None
    with warnings.catch_warnings(), plain_tracebacks():
        warnings.simplefilter("ignore")
        try:
            if isinstance(program, Construction):
                construct(program)
            else:
                run = Run(program)
                run.run()
        except Found as found:
            return Failure(program, found.kind, run.number if run else 0, found.details)
        except Exception as error:
            return Failure(program, "the fuzzer itself", run.number if run else 0, text_of(error))
    return None


def run_seed(seed: int, features: Features = EVERYTHING) -> Failure | None:
    return run_program(draw(seed, features))


def draw(seed: int, features: Features = EVERYTHING) -> Program | Construction:
    """The program of a seed; every thirtieth is a constructor."""
    constructs = seed % 30 == 29 and any(features.on(f"{name} constructor") for name in DECORATORS)
    return draw_construction(seed, features) if constructs else draw_program(seed, features)


def shrunk(failure: Failure) -> Failure:
    """The same kind of failure by a smaller program."""
    best = [failure]

    def fails(program: Program | Construction) -> bool:
        try:
            found = run_program(program)
        except Exception:  # dropping a line has made the program invalid
            return False
        if (
            found is not None
            and found.kind == failure.kind
            and (found.kind not in WITH_ERROR or same_error(found, failure))
        ):
            best[0] = found
            return True
        return False

    shrink(failure.program, fails)
    return best[0]


WITH_ERROR = ("exceptions", "building the Modules", "the fuzzer itself")


def same_error(a: Failure, b: Failure) -> bool:
    return a.details.rstrip().split("\n")[-1][:40] == b.details.rstrip().split("\n")[-1][:40]


def run_seeds(
    seeds: Iterable[int], features: Features = EVERYTHING, seconds: float = float("inf")
) -> tuple[int, list[Failure]]:
    """The number of programs run, and what they found."""
    end = time.monotonic() + seconds
    failures, count = [], 0
    for seed in seeds:
        if time.monotonic() > end:
            break
        failure = run_seed(seed, features)
        count += 1
        if failure is not None:
            failures.append(failure)
        if count % 1000 == 0:  # compiled functions of old programs
            jax.clear_caches()
    return count, failures


def work(
    start: int, step: int, count: int | None, features: Features, seconds: float
) -> tuple[int, list[tuple[str, str]]]:
    """One process's share of a long run: how many programs it ran, and the kind and report of each failure."""
    seeds = itertools.islice(itertools.count(start, step), count)
    number, failures = run_seeds(seeds, features, seconds)
    return number, [(failure.kind, failure.report()) for failure in failures]
