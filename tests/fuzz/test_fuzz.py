"""Lifted equals eager, on thousands of random programs; `make fuzz` runs as many as you have time for."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest

import nnx
from tests.fuzz import transforms
from tests.fuzz.compare import Registry
from tests.fuzz.programs import draw_program
from tests.fuzz.runner import run_program, run_seed, run_seeds, shrunk
from tests.fuzz.threads import run_threads

PROGRAMS, PARTS = 1000, 4
SHOWN = 3  # how many failures of a part are shrunk and printed in full


@pytest.mark.parametrize("part", range(PARTS))
def test_lifted_equals_eager(part):
    _, failures = run_seeds(range(part, PROGRAMS, PARTS))
    if failures:
        shown = [f"{shrunk(failure).program.listing()}\n\n{failure.report()}" for failure in failures[:SHOWN]]
        seeds = ", ".join(str(failure.program.seed) for failure in failures)
        pytest.fail(f"{len(failures)} programs differ, seeds {seeds}.\n\n" + "\n\n\n".join(shown), pytrace=False)


@pytest.mark.filterwarnings("ignore:.* has been traced .* times")  # static values that come and go are the point
@pytest.mark.parametrize("seed", range(3))
def test_threads_share_one_jitted_function(seed):
    calls, wrong = run_threads(seed)
    assert not wrong
    assert calls == 4 * 2000


# The fuzzer itself


def test_a_seed_always_means_the_same_program():
    assert [draw_program(seed).listing() for seed in range(50)] == [draw_program(seed).listing() for seed in range(50)]


def test_a_listing_is_a_script_that_runs():
    program = next(p for p in map(draw_program, range(100)) if p.illegal is None and not any(c.fails for c in p.calls))
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(program.listing(), "<listing>", "exec"), {"__name__": "listing"})


def test_modules_below_one_that_has_left_the_graph_are_numbered_at_every_look():
    def grow(looks: Callable[[Registry, Any], Any]) -> dict[str, Any]:
        root, left, registry = nnx.Dict(), nnx.Dict(), Registry()
        root.left = left
        looks(registry, root)
        del root.left
        left.below = nnx.Dict(s=1)
        looks(registry, root)
        root.later = nnx.Dict(s=2)
        return registry.portrait([root])

    seen = grow(lambda registry, root: registry.see([root]))
    assert seen == grow(lambda registry, root: registry.portrait([root]))
    assert seen["#1.below"] == "#2" and seen["#0.later"] == "#3"


def test_a_replayed_world_agrees_with_one_that_was_never_replayed():
    """The first call changes a Module that leaves the graph; the second one raises, so its world is replayed."""
    assert run_seed(1794846748070) is None


def forgets_writes(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda m, n, x, ctx: f(m.clone(), n.clone(), x, ctx)


def ignores_later_changes(f: Callable[..., Any]) -> Callable[..., Any]:
    results: list[Any] = []

    def call(*args: Any) -> Any:
        results.append(f(*args))
        return results[0]

    return call


@pytest.mark.parametrize("broken", [forgets_writes, ignores_later_changes])
def test_a_broken_transform_is_noticed_and_the_program_shrunk(broken, monkeypatch):
    monkeypatch.setattr(transforms.TRANSFORMS["remat"], "lifted", broken)
    seeds = [seed for seed in range(300) if draw_program(seed).transforms == ["remat"]]
    failure = next(failure for seed in seeds if (failure := run_seed(seed)))
    small = shrunk(failure)
    assert run_program(small.program) is not None
    assert len(small.program.listing()) < len(failure.program.listing())
    assert f"python -m tests.fuzz --seed {failure.program.seed}" in failure.report()
