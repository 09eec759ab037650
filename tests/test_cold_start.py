"""The benchmark of the first seconds runs each model in a process of its own."""

from benchmarks.cold_start import LIBRARIES, PARTS, compare


def test_a_step_of_each_part_is_measured():
    (seconds,) = compare("mlp", ["raw jax"], 1, cached=False).values()
    assert tuple(seconds) == PARTS and all(value > 0 for value in seconds.values())
    assert sum(seconds.values()) - seconds["total"] < seconds["total"]
    assert list(LIBRARIES) == ["nnx", "flax", "equinox", "raw jax", "torch"]
