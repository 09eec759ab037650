"""The comparisons of `parity` for encoders: read, write and fresh, on random configurations."""

import pathlib
import tempfile
from typing import Any, NamedTuple

import encoders
import numpy as np

import nnx

TOLERANCE, ROUNDING = 1e-4, 1e-6  # of the relative error
FAMILIES = tuple(encoders.RANDOM)


class Comparison(NamedTuple):
    """The relative errors that one configuration showed, as in `parity`."""

    read: float
    write: float
    fresh: float
    same: bool  # whether every tensor survived the round trip bit for bit

    @property
    def agrees(self) -> bool:
        """Whether all of it is as it should be."""
        # The same tensors can have outputs that differ: the order of torch's sums depends on where they are in memory.
        return self.read <= TOLERANCE and self.fresh <= TOLERANCE and self.write <= ROUNDING and self.same


def computed(model: Any, given: encoders.Arrays) -> encoders.Arrays:
    """Returns what a model of NNX computes."""
    out = nnx.jit(lambda model, given: model(**given))(model, given)
    found = out._asdict() if isinstance(out, tuple) else {"logits": out}
    return {name: np.asarray(array) for name, array in found.items() if array is not None}


def relative_error(ours: encoders.Arrays, theirs: encoders.Arrays) -> float:
    """Returns the largest difference over the largest value, of the output in which it is worst."""
    assert ours.keys() == theirs.keys(), f"{list(ours)} and {list(theirs)}"
    assert all(ours[name].shape == theirs[name].shape for name in ours)
    errors = [np.abs(ours[name] - theirs[name]).max() / np.abs(theirs[name]).max() for name in ours]
    return float(np.max(errors))  # NaN stays NaN


def compare(family: str, seed: int, folder: pathlib.Path) -> Comparison:
    """Compares one random configuration of a family, both ways."""
    case = encoders.RANDOM[family](np.random.default_rng([seed, *family.encode()]))
    made = encoders.make(case, seed)
    made.save_pretrained(folder / "theirs", max_shard_size="10KB" if seed % 3 == 0 else "1GB")
    theirs = encoders.load(folder / "theirs", case.cls)
    given = encoders.inputs(theirs.config, seed)
    expected = encoders.outputs(theirs, given)

    model = nnx.models.from_pretrained(folder / "theirs")
    read = relative_error(computed(model, given), expected)

    nnx.models.save_pretrained(model, folder / "ours", max_shard_size="10KB" if seed % 3 == 1 else "1GB")
    again = encoders.load(folder / "ours", case.cls)
    write = relative_error(encoders.outputs(again, given), expected)
    before, after = theirs.state_dict(), again.state_dict()
    same = before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)

    made_here = type(model)(model.config.replace(extra=()), ctx=nnx.context(seed))
    nnx.models.save_pretrained(made_here, folder / "fresh")
    loaded = encoders.load(folder / "fresh", case.cls)
    fresh = relative_error(computed(made_here, given), encoders.outputs(loaded, given))
    return Comparison(read, write, fresh, same)


def compare_family(family: str, cases: int) -> bool:
    """Compares some random configurations of a family, prints a line, and returns whether all agree."""
    results = []
    for seed in range(cases):
        with tempfile.TemporaryDirectory() as folder:
            results.append(compare(family, seed, pathlib.Path(folder)))
        if not results[-1].agrees:
            print(f"{family}, configuration {seed}: {results[-1]}", flush=True)
    read, write, fresh = (np.max([getattr(result, way) for result in results]) for way in ("read", "write", "fresh"))
    equal = f"{sum(result.same for result in results)} of {cases} with equal tensors"
    errors = f"read {read:.1e}   write {write:.1e}, {equal}   fresh {fresh:.1e}"
    print(f"{family:12}  {cases} configurations   {errors}", flush=True)
    return all(result.agrees for result in results)
