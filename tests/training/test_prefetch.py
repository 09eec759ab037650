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


class Counting:
    """A loader whose iterator can be resumed, and hands out its live state."""

    def __init__(self, n=6):
        self.n = n
        self.state = {"next": 0}

    def __iter__(self):
        return self

    def __next__(self):
        if self.state["next"] >= self.n:
            raise StopIteration
        self.state["next"] += 1
        return np.array(self.state["next"] - 1)

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


class Resumed:
    """A loader that takes its state before a new iterator is made, as PyTorch's and Hugging Face's do."""

    def __init__(self, n=6):
        self.n, self.at = n, 0

    def __iter__(self):
        while self.at < self.n:
            self.at += 1
            yield np.array(self.at - 1)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("make", [Counting, Resumed])
@pytest.mark.parametrize("size", [1, 4])
def test_state_of_a_prefetched_loader_is_that_of_the_batch_last_yielded(make, size):
    stream = nnx.prefetch(make(), size)
    states = [stream.get_state()]
    seen = []
    for batch in stream:
        seen.append(int(batch))
        states.append(stream.state_dict())
    assert seen == [0, 1, 2, 3, 4, 5]
    for i, state in enumerate(states):
        resumed = nnx.prefetch(make(), size)
        next(resumed)  # what it has read ahead is dropped
        resumed.load_state_dict(state) if i % 2 else resumed.set_state(state)
        assert resumed.get_state() == state
        assert [int(batch) for batch in resumed] == seen[i:]


def test_prefetched_loader_without_a_state_has_none():
    assert not hasattr(nnx.prefetch(batches(2)), "get_state")


def test_loader_that_cannot_tell_its_state_is_read_all_the_same():
    class Forgetful(Counting):
        def get_state(self):
            raise NotImplementedError("no random access")

    stream = nnx.prefetch(Forgetful())
    assert int(next(stream)) == 0
    with pytest.raises(NotImplementedError, match="no random access"):
        stream.get_state()  # pyright: ignore[reportAttributeAccessIssue]


def test_strings_are_refused_with_their_key():
    for column in (["a", "b"], np.array(["a", "b"]), "a", [b"a"]):
        with pytest.raises(TypeError, match=r"batch\['text'\] holds .*string.* if k != 'text'"):
            next(nnx.prefetch([{"x": np.ones(2), "text": column}]))
    with pytest.raises(TypeError, match=r"batch\['inner'\]\['o'\] is an array of Python objects"):
        next(nnx.prefetch([{"inner": {"o": np.array([None, {}])}}]))
    with pytest.raises(TypeError, match=r"batch\[1\] is a object"):
        next(nnx.prefetch([(np.ones(2), object())]))


def test_list_of_python_numbers_warns_once_with_its_key():
    stream = nnx.prefetch([{"label": [1, 2, 3], "x": np.ones(3)}, {"label": [4, 5, 6], "x": np.ones(3)}])
    with pytest.warns(UserWarning, match=r"batch\['label'\] is a list of Python numbers.*with_format") as warned:
        assert [float(sum(batch["label"])) for batch in stream] == [6, 15]
    assert len(warned) == 1
    assert float(next(nnx.prefetch([{"rate": 0.5, "pair": [1.0]}]))["rate"]) == 0.5
