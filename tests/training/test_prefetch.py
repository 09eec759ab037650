"""`nnx.prefetch`: batches are on the devices before the step asks for them, unchanged and in order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


def batches(n, log=None):
    for i in range(n):
        if log is not None:
            log.append(i)
        yield {"x": np.full((4, 2), i, np.float32), "y": np.arange(4) + i}


def test_batches_arrive_in_order_as_jax_arrays():
    for size in (1, 2, 7):
        found = list(nnx.prefetch(batches(5), size))
        assert [float(batch["x"][0, 0]) for batch in found] == [0, 1, 2, 3, 4]
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))
    assert list(nnx.prefetch([])) == []


def test_prefetch_reads_size_batches_ahead():
    log: list[int] = []
    stream = nnx.prefetch(batches(10, log), size=3)
    assert log == []
    next(stream)
    assert log == [0, 1, 2]
    next(stream)
    assert log == [0, 1, 2, 3]


def test_a_loader_may_reuse_its_buffer():
    def loader():
        buffer = np.zeros(1024, np.float32)
        for i in range(4):
            buffer[:] = i
            yield buffer

    assert [float(x[0]) for x in nnx.prefetch(loader(), size=3)] == [0, 1, 2, 3]


def test_a_failing_loader_fails_after_the_batches_before():
    def loader():
        yield np.zeros(1)
        yield np.ones(1)
        raise OSError("disk")

    seen = []
    with pytest.raises(OSError, match="disk"):
        for batch in nnx.prefetch(loader(), size=4):
            seen.append(float(batch[0]))
    assert seen == [0.0, 1.0]


def test_arrays_get_the_sharding_one_for_all_or_one_per_part():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    (batch,) = nnx.prefetch(batches(1), sharding=rows)
    assert batch["x"].sharding == rows and batch["y"].sharding == rows
    (batch,) = nnx.prefetch(batches(1), sharding={"x": rows, "y": whole})
    assert batch["x"].sharding == rows and batch["y"].sharding == whole
    (pair,) = nnx.prefetch([(jnp.ones(2), np.ones(2))], sharding=whole)
    assert pair[0].sharding == whole and pair[1].sharding == whole


def test_wrong_arguments_are_refused_at_once():
    for size in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="size is the number of batches"):
            nnx.prefetch([], size)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="takes an iterable of batches; got int"):
        nnx.prefetch(3)  # pyright: ignore[reportArgumentType]
