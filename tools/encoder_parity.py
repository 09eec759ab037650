"""The comparisons of `parity` for encoders: read, write and fresh, on random configurations.

For an encoder-decoder also *greedy*: `nnx.generate` writes the same tokens, with its cache, as `transformers` without.
"""

import pathlib
import tempfile
from typing import Any, NamedTuple

import encoders
import numpy as np

import nnx

TOLERANCE, ROUNDING = 1e-4, 1e-6  # of the relative error
NEW_TOKENS, SMALLEST_LEAD = 24, 1e-3  # as in `parity`
FAMILIES = tuple(encoders.RANDOM)


class Comparison(NamedTuple):
    """The relative errors that one configuration showed, as in `parity`."""

    read: float
    write: float
    fresh: float
    same: bool  # whether every tensor survived the round trip bit for bit
    greedy: bool | None  # whether the texts agree; None if rounding could decide, and for models that do not write

    @property
    def agrees(self) -> bool:
        """Whether all of it is as it should be."""
        # The same tensors can have outputs that differ: the order of torch's sums depends on where they are in memory.
        errors = self.read <= TOLERANCE and self.fresh <= TOLERANCE and self.write <= ROUNDING
        return errors and self.same and self.greedy is not False


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


def writes_the_same(model: Any, theirs: Any, given: encoders.Arrays) -> bool | None:
    """Whether both write the same text; None if rounding could decide."""
    text, lead = encoders.greedy(theirs, given, NEW_TOKENS)
    if lead <= SMALLEST_LEAD:
        return None
    source = {name: array for name, array in given.items() if name != "decoder_tokens"}
    conditioned = model.conditioned(model.encode(**source), given.get("mask"))
    start = np.full((text.shape[0], 1), model.config.start_token, np.int32)
    ours = nnx.generate(conditioned, start, max_new_tokens=NEW_TOKENS, temperature=0)
    return bool(np.array_equal(ours, text))


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
    greedy = writes_the_same(model, theirs, given) if "decoder_tokens" in given else None

    nnx.models.save_pretrained(model, folder / "ours", max_shard_size="10KB" if seed % 3 == 1 else "1GB")
    again = encoders.load(folder / "ours", case.cls)
    write = relative_error(encoders.outputs(again, given), expected)
    before, after = theirs.state_dict(), again.state_dict()
    same = before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)

    made_here = type(model)(model.config.replace(extra=()), ctx=nnx.context(seed))
    nnx.models.save_pretrained(made_here, folder / "fresh")
    loaded = encoders.load(folder / "fresh", case.cls)
    fresh = relative_error(computed(made_here, given), encoders.outputs(loaded, given))
    return Comparison(read, write, fresh, same, greedy)


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
    written = [result.greedy for result in results if result.greedy is not None]
    equal += f"   greedy {sum(written)} of {len(written)}" if written else ""
    errors = f"read {read:.1e}   write {write:.1e}, {equal}   fresh {fresh:.1e}"
    print(f"{family:12}  {cases} configurations   {errors}", flush=True)
    return all(result.agrees for result in results)
