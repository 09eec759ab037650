"""Sending metrics to TensorBoard, Weights & Biases and other functions."""

import importlib.util
import io
import math
import struct
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

import nnx

WRITES_EVENTS = pytest.mark.skipif(not importlib.util.find_spec("tensorboardX"), reason="needs tensorboardX")


def quiet(**options):
    return nnx.TrainLog(file=io.StringIO(), **options)


def test_a_sink_gets_every_call_with_plain_numbers():
    records = []
    with quiet() as log:
        assert log.add_sink(sink := lambda step, values: records.append((step, values))) is sink
        log(0, loss=jnp.float32(0.5), tokens=jnp.int32(3))
        log(0, accuracy=0.25)
        log(1, loss=math.inf)
    assert records == [(0, {"loss": 0.5, "tokens": 3}), (0, {"accuracy": 0.25}), (1, {"loss": math.inf})]
    assert type(records[0][1]["loss"]) is float and type(records[0][1]["tokens"]) is int


def test_a_sink_may_change_its_values_and_is_flushed_and_closed_with_the_log(tmp_path):
    calls = []

    class Sink:
        def __call__(self, step, values):
            values.clear()
            calls.append(step)

        def flush(self):
            calls.append("flush")

        def close(self):
            calls.append("close")

    with quiet(path=tmp_path, plot=False) as log:
        log.add_sink(Sink())
        log(0, loss=1.0)
        log.flush()
    assert calls == [0, "flush", "flush", "close"] and nnx.read_metrics(tmp_path)[0]["loss"] == 1.0


def test_a_sink_that_fails_is_one_warning_and_is_called_again(tmp_path):
    steps = []

    def sink(step, values):
        steps.append(step)
        raise ConnectionError("no network")

    with quiet(path=tmp_path, plot=False) as log:
        log.add_sink(sink)
        with pytest.warns(UserWarning, match=r"The sink .* failed at step 0 \(ConnectionError: no network\)") as caught:
            log(0, loss=1.0)
            log(1, loss=1.0)
    assert len(caught) == 1 and steps == [0, 1] and len(nnx.read_metrics(tmp_path)) == 2


def test_sink_that_cannot_be_called_raises():
    with pytest.raises(TypeError, match="A sink is a function of a step and a dict of values.*got 'runs'"):
        quiet().add_sink("runs")


class FakeRun:
    """A run of Weights & Biases, as far as the sink uses it."""

    def __init__(self):
        self.logged = []

    def log(self, data, step=None):
        self.logged.append((step, data))


def test_weights_and_biases_gets_values_by_step():
    run = FakeRun()
    with quiet() as log:
        log.add_sink(nnx.wandb_sink(run))
        log(3, loss=0.5, **{"valid/loss": 1.5})
    assert run.logged == [(3, {"loss": 0.5, "valid/loss": 1.5})]


def events_in(directory):
    """The scalars in TensorBoard's event files: records of length, checksum, protocol buffer, checksum."""
    from tensorboardX.proto import event_pb2

    for path in sorted(directory.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            yield from ((event.step, value.tag, value.simple_value) for value in event.summary.value)
            data = data[16 + length :]


@WRITES_EVENTS
def test_tensorboard_finds_the_values_in_its_event_files(tmp_path):
    sink = nnx.tensorboard_sink(tmp_path / "board")
    assert not (tmp_path / "board").exists()  # only the process that logs makes one
    for start in (0, 2):  # a log that is closed and continued
        with quiet() as log:
            log.add_sink(sink)
            for step in range(start, start + 2):
                log(step, loss=1 / 2**step, **{"valid/loss": float(step)})
    expected = [(s, tag, value) for s in range(4) for tag, value in (("loss", 1 / 2**s), ("valid/loss", float(s)))]
    assert sorted(events_in(tmp_path / "board")) == expected


def test_a_missing_tensorboard_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"nnx.tensorboard_sink needs the package 'tensorboardX'.*nnx\[tensorboard\]"):
        nnx.tensorboard_sink(tmp_path)


# Images and histograms


def event_kinds(directory):
    """The kinds of summaries in the event files of a directory, by tag."""
    from tensorboardX.proto import event_pb2

    kinds = {}
    for file in directory.iterdir():
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            kinds.update({value.tag: value.WhichOneof("value") for value in event.summary.value})
            data = data[12 + length + 4 :]
    return kinds


@WRITES_EVENTS
def test_tensorboard_receives_images_and_histograms(tmp_path):
    with quiet(tensorboard=tmp_path) as log:
        log(0, loss=0.5)
        log.images(0, one=jnp.zeros((4, 5)), several=np.ones((3, 4, 5, 3), np.float32))
        log.histograms(
            0, params=nnx.Linear(2, 3, ctx=nnx.context(0)).filter(nnx.Param), noise=jnp.array([1.0, jnp.nan])
        )
    kinds = event_kinds(tmp_path)
    assert kinds.pop("loss") == "simple_value"
    assert kinds == {
        "one": "image", "several": "image", "params/bias": "histo", "params/kernel": "histo", "noise": "histo"
    }  # fmt: skip


def test_wandb_receives_images_and_histograms_after_the_records_before_them(monkeypatch):
    calls = []

    class Run:
        __module__ = "wandb.sdk"

        def log(self, data, step=None):
            calls.append((step, data))

    wandb = types.SimpleNamespace(Image=lambda pixels: pixels.tolist(), Histogram=lambda numbers: numbers.tolist())
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with quiet() as log:
        log.add_sink(nnx.wandb_sink(Run()))
        log(3, loss=0.5)
        log.images(3, sample=np.array([[0.0, 0.5, 2.0]]))
        log.histograms(3, grads=np.array([[1.0, 2.0]]))
    assert calls == [(3, {"loss": 0.5}), (3, {"sample": [[[0, 128, 255]]]}), (3, {"grads": [1.0, 2.0]})]


def test_sinks_without_images_are_left_alone_and_wrong_shapes_are_refused():
    records = []
    with quiet() as log:
        log.add_sink(lambda step, values: records.append(step))
        log.images(1, picture=np.zeros((2, 2), bool))
        with pytest.raises(ValueError, match="The image 'picture' of step 1 is np.float64"):
            log.images(1, picture=np.zeros((2, 2, 7)))
    assert records == []
