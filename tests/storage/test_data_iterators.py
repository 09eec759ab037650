"""Data iterators and bytes in checkpoints: a resumed run reads the batches that an uninterrupted one reads."""

import collections

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx
from nnx.storage.checkpoints import matching
from nnx.storage.checkpoints.manifest import read_manifest
from nnx.storage.leaves import Leaves
from nnx.storage.locations import location
from nnx.storage.states import decode, encode


class Dataset:
    """Like the loaders of torchdata: `state_dict` and `load_state_dict`."""

    def __init__(self):
        self.seen, self.rng = 0, np.random.default_rng(0)

    def __next__(self):
        self.seen += 1
        return self.rng.integers(1000)

    def state_dict(self):
        return collections.OrderedDict(seen=self.seen, rng=self.rng.bit_generator.state, cache=[None, (1.5, b"\0")])

    def load_state_dict(self, state):
        assert state["cache"] == [None, (1.5, b"\0")]
        self.seen, self.rng.bit_generator.state = state["seen"], state["rng"]


def batches(seed: int = 3):
    data = np.random.default_rng(1).normal(size=(64, 4)).astype(np.float32)
    return iter(grain.MapDataset.source(data).shuffle(seed=seed).repeat().batch(8).to_iter_dataset())


def loader():
    return iter(
        grain.DataLoader(
            data_source=np.arange(40),
            sampler=grain.samplers.IndexSampler(40, grain.sharding.ShardOptions(0, 1), shuffle=True, seed=0),
            operations=[grain.transforms.Batch(4)],
        )
    )


@pytest.mark.parametrize("make", [batches, loader, Dataset, lambda: np.random.RandomState(1)])
def test_an_iterator_goes_on_where_it_was(tmp_path, make):
    def following(iterator):
        return [np.asarray(next(iterator) if hasattr(iterator, "__next__") else iterator.rand(3)) for _ in range(3)]

    first, second = make(), make()
    following(first)
    nnx.save(tmp_path / "c", {"data": first, "x": jnp.ones(2)})
    expected = following(first)
    target = {"data": second, "x": jnp.zeros(2)}
    nnx.load(tmp_path / "c", target)
    assert target["data"] is second
    np.testing.assert_array_equal(following(second), expected)
    assert nnx.checkpoint_entries(tmp_path / "c")["data"].kind == "state"


@nnx.jit
def train_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(grads)
    return loss


def test_a_resumed_run_with_a_grain_loader_has_the_same_losses_bit_for_bit(tmp_path):
    def run(manager, until):
        model = nnx.Linear(4, 4, ctx=nnx.context(0))
        things = {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(0.1)), "data": batches()}
        start = manager.resume(things) if manager else None
        losses = {}
        for step in range(0 if start is None else start + 1, until):
            losses[step] = float(train_step(model, things["optimizer"], next(things["data"])))
            if manager:
                manager.save(step, things)
        return losses

    whole = run(None, 12)
    with nnx.CheckpointManager(tmp_path) as manager:
        first, second = run(manager, 5), run(manager, 12)
    assert list(second) == list(range(5, 12)) and {**first, **second} == whole


def test_bytes_survive_in_their_own_kind_only(tmp_path):
    nnx.save(tmp_path / "c", {"state": b"\x00\xff", "text": "x"})
    assert nnx.load(tmp_path / "c", {"state": b"", "text": ""}) == {"state": b"\x00\xff", "text": "x"}
    assert nnx.load(tmp_path / "c")["state"] == b"\x00\xff"
    for wrong in ("", 0, jnp.ones(()), Dataset()):
        with pytest.raises(nnx.CheckpointError, match="'state' is bytes in the checkpoint"):
            nnx.load(tmp_path / "c", {"state": wrong, "text": ""}, cast=True)


def test_a_state_that_is_refused_changes_nothing(tmp_path):
    class Picky(Dataset):
        def load_state_dict(self, state):
            raise RuntimeError("other file")

    nnx.save(tmp_path / "c", {"data": Dataset(), "x": jnp.ones(2)})
    target = {"data": Picky(), "x": jnp.zeros(2)}
    with pytest.raises(nnx.CheckpointError, match="Picky at 'data' did not accept .*other file.*No array"):
        nnx.load(tmp_path / "c", target)
    assert not target["x"].any()


def test_a_state_of_another_number_of_processes_does_not_fit(tmp_path, monkeypatch):
    nnx.save(tmp_path / "c", {"data": Dataset()})
    monkeypatch.setattr(matching.jax, "process_count", lambda: 2)
    manifest, target = read_manifest(location(tmp_path / "c")), {"data": Dataset()}
    expected = {"data": matching.Expected.of(target["data"])}
    found, report = matching.match_entries(manifest, Leaves(target), expected, strict=False, cast=False, rename=None)
    assert not found and "the state of a data iterator in each of 1 processes" in str(report)


def test_a_state_that_is_not_plain_data_is_refused_with_what_is_in_it(tmp_path):
    class Bad(Dataset):
        def state_dict(self):
            return {"model": jax.nn.relu}

    with pytest.raises(TypeError, match="Cannot save 'data': the state of this Bad contains .*relu.*plain|consist of"):
        nnx.save(tmp_path / "c", {"data": Bad()})
    assert not (tmp_path / "c").exists()


PLAIN = {"a": [1, 2.5, None, True, "x", b"\0y", (), (1, [2])], 3: {"n": np.arange(6).reshape(2, 3)}, ("k",): -(10**30)}


def test_a_state_comes_back_exactly():
    back = decode(encode(PLAIN))
    assert list(back) == list(PLAIN) and back["a"] == PLAIN["a"] and type(back["a"][6]) is tuple
    assert back[3]["n"].dtype == np.int64 and (back[3]["n"] == PLAIN[3]["n"]).all() and back[("k",)] == -(10**30)
    scalar = decode(encode(np.float32(1.5)))
    assert type(scalar) is np.float32 and scalar == 1.5


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"list": []},
        {"tuple": 3},
        {"dict": [1]},
        {"dict": [[1]]},
        {"dict": [[[], 1]]},
        {"bytes": "?"},
        {"bytes": "YQ==", "more": 1},
        {"array": "YQ==", "dtype": "O", "shape": [1]},
        {"array": "YQ==", "dtype": "|u1", "shape": [-1]},
        {"array": "YQ==", "dtype": "|u1", "shape": [10**30]},
        {"array": "YQ==", "dtype": "a,b", "shape": [1]},
        {"scalar": "YQ==", "dtype": "|u1", "shape": [1]},
    ],
    ids=str,
)
def test_a_malformed_state_is_refused(state):
    with pytest.raises(ValueError):
        decode(state)
