"""`nnx.EarlyStopping`: a run ends when its metric has stopped improving."""

import jax.numpy as jnp
import pytest

import nnx


def stops_after(stop, values):
    return next((i for i, value in enumerate(values) if stop(value)), None)


def test_stops_after_patience_evaluations_without_improvement():
    stop = nnx.EarlyStopping(patience=3)
    assert stops_after(stop, [1.0, 0.9, 0.95, 0.93, 0.8, 0.9, 0.9, 0.8]) == 7
    assert stop.best == 0.8 and stop.stale == 3 and stop.should_stop


def test_small_improvements_do_not_count():
    assert stops_after(nnx.EarlyStopping(patience=2, min_delta=0.1), [1.0, 0.95, 0.92, 0.5]) == 2
    assert stops_after(nnx.EarlyStopping(patience=2), [1.0, 0.95, 0.92, 0.5]) is None


def test_larger_can_be_better():
    stop = nnx.EarlyStopping(patience=2, mode="max")
    assert stops_after(stop, [0.1, 0.5, jnp.array(0.7), 0.6, jnp.float32(0.7)]) == 4
    assert stop.best == pytest.approx(0.7)


def test_nan_does_not_count_as_an_improvement():
    stop = nnx.EarlyStopping(patience=2)
    assert not stop(float("nan")) and stop.best is None and not stop.improved
    assert not stop(3.0) and stop.improved
    assert not stop(float("nan")) and stop(float("nan"))


def test_a_resumed_run_continues_to_wait(tmp_path):
    stop = nnx.EarlyStopping(patience=3)
    for value in (1.0, 2.0, 2.0):
        stop(value)
    nnx.save(tmp_path / "run", stop.get_state())
    resumed = nnx.EarlyStopping(patience=3)
    resumed.load_state(nnx.load(tmp_path / "run", resumed.get_state()))
    assert (resumed.best, resumed.stale) == (1.0, 2) and resumed(1.0)
    resumed.reset()
    assert repr(resumed) == "EarlyStopping(patience=3, min_delta=0.0, mode='min', best=None, stale=0)"


def test_settings_and_values_are_checked():
    for options, message in [
        ({"patience": 0}, "a patience of at least 1 evaluation, got 0"),
        ({"patience": 1, "min_delta": -1}, "a min_delta of at least 0, got -1"),
        ({"patience": 1, "mode": "low"}, 'the mode "min" or "max", got \'low\''),
    ]:
        with pytest.raises(ValueError, match=message):
            nnx.EarlyStopping(**options)
    with pytest.raises(TypeError, match="one number per evaluation"):
        nnx.EarlyStopping(1)(jnp.ones(3))
