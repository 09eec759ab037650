"""What every test shares: a deterministic hypothesis profile and a few small fixtures."""

import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.unfinished_jax import why_not

settings.register_profile(
    "nnx",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("nnx")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what JAX itself cannot do."""
    for item in items:
        if (reason := why_not(item.nodeid)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def small_heap_for_the_garbage_collector() -> Iterator[None]:
    """Hides what earlier files left behind from the garbage collector.

    JAX keeps every trace and compiled function of a process, some gigabytes by the end of the suite. Each full
    collection would walk through all of it.
    """
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture
def without_garbage_collector() -> Iterator[None]:
    """Runs the test with the cyclic garbage collector switched off, after one full collection."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
