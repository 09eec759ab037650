"""nnx.TrainLog: progress for the person watching, metrics and a plot on disk."""

import io
import itertools
import json
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


class Terminal(io.StringIO):
    def isatty(self):
        return True


def lines_of(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def quiet(**options):
    return nnx.TrainLog(file=io.StringIO(), **options)


def test_every_step_is_a_line_of_json(tmp_path):
    with quiet(total=3, path=tmp_path, plot=False) as log:
        for step in range(3):
            log(step, loss=1.0 / (step + 1), tokens=100 * step)
    records = lines_of(tmp_path)
    assert [record["step"] for record in records] == [0, 1, 2]
    assert [record["loss"] for record in records] == [1.0, 0.5, 1 / 3]
    assert [record["tokens"] for record in records] == [0, 100, 200]
    assert all(record["time"] > 1.7e9 for record in records)


def test_any_one_number_is_a_metric(tmp_path):
    with quiet(path=tmp_path, plot=False) as log:
        log(0, a=jnp.float32(0.5), b=jnp.bfloat16(0.25), c=np.int64(3), d=jnp.ones((1, 1)), e=True, f=np.ones(1))
    (record,) = lines_of(tmp_path)
    del record["step"], record["time"]
    assert record == {"a": 0.5, "b": 0.25, "c": 3, "d": 1.0, "e": 1, "f": 1.0}


def test_numbers_that_json_does_not_know_are_words(tmp_path):
    with quiet(path=tmp_path, plot=False) as log:
        log(0, loss=math.nan, other=jnp.inf)
    (record,) = lines_of(tmp_path)
    assert (record["loss"], record["other"]) == ("nan", "inf")
    (read,) = nnx.read_metrics(tmp_path)
    assert math.isnan(read["loss"]) and read["other"] == math.inf


def test_metric_that_is_not_a_number_raises_with_its_name():
    log = quiet()
    with pytest.raises(TypeError, match=r"The metric 'loss' of step 7 is float32\[3\].*loss=loss.mean\(\)"):
        log(7, loss=jnp.ones(3))
    with pytest.raises(TypeError, match="The metric 'note' of step 0 is 'hello'"):
        log(0, note="hello")
    with pytest.raises(ValueError, match="'time' cannot be the name of a metric"):
        log(0, time=1.0)


def test_a_metric_may_be_donated_after_it_was_logged(tmp_path):
    with quiet(path=tmp_path, plot=False) as log:
        loss = jnp.float32(2.0)
        log(0, loss=loss)
        loss.delete()
    assert lines_of(tmp_path)[0]["loss"] == 2.0


def test_values_on_their_way_are_written_in_order(tmp_path):
    slow = jax.jit(lambda x: jnp.linalg.svd(x)[1][0])
    with quiet(path=tmp_path, plot=False) as log:
        for step in range(20):
            log(step, loss=slow(jnp.ones((60, 60))) if step % 2 else 0.0)
    assert [record["step"] for record in lines_of(tmp_path)] == list(range(20))


# Resuming


def test_a_log_that_is_there_is_continued(tmp_path):
    for start in (0, 2):
        with quiet(total=4, path=tmp_path, plot=False) as log:
            for step in range(start, start + 2):
                log(step, loss=float(step))
    assert [record["step"] for record in lines_of(tmp_path)] == [0, 1, 2, 3]


def test_steps_done_again_replace_those_of_the_run_that_died(tmp_path):
    for start, loss in ((0, 1.0), (2, 5.0)):
        with quiet(path=tmp_path, plot=False) as log:
            for step in range(start, 4):
                log(step, loss=loss)
    records = nnx.read_metrics(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["loss"]) for record in records] == [(0, 1.0), (1, 1.0), (2, 5.0), (3, 5.0)]


def test_a_line_cut_short_by_a_crash_harms_no_other(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "lo')
    with quiet(path=tmp_path, plot=False) as log:
        log(1, loss=0.5)
    assert [record["loss"] for record in nnx.read_metrics(tmp_path)] == [1.0, 0.5]


def test_a_file_without_metrics_is_an_error(tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text("hello\n[1]\n")
    with pytest.raises(ValueError, match="other.jsonl holds no metrics"):
        nnx.read_metrics(path)


# Showing progress


def two_steps_per_second(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks) / 2)


def test_elsewhere_than_on_a_terminal_there_are_plain_lines(monkeypatch):
    two_steps_per_second(monkeypatch)
    stream = io.StringIO()
    with nnx.TrainLog(total=20, file=stream, interval=0, name="gpt") as log:
        for step in range(2):
            log(step, loss=0.5, lr=1e-5)
    first, second = stream.getvalue().splitlines()
    assert first == "gpt 1/20  loss 0.5000  lr 1.000e-05"
    assert second.startswith("gpt 2/20") and "steps/s" in second and second.endswith("left")


def test_calls_that_return_before_their_steps_have_run_are_no_rate():
    stream = io.StringIO()
    with nnx.TrainLog(total=9, file=stream, interval=0) as log:
        log(0, loss=0.5)
        log(1, loss=0.5)
    assert stream.getvalue().splitlines()[-1] == "train 2/9  loss 0.5000"


def test_lines_come_now_and_then_and_at_the_end():
    stream = io.StringIO()
    with nnx.TrainLog(file=stream, interval=1000) as log:
        for step in range(50):
            log(step, loss=0.0)
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == ["train 1", "train 50"]


def test_on_a_terminal_there_is_a_bar_with_metrics_and_time_left(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    two_steps_per_second(monkeypatch)
    terminal = Terminal()
    with nnx.TrainLog(total=4, file=terminal) as log:
        for step in range(3):
            log(step, loss=0.25)
    text = terminal.getvalue()
    assert "━" in text and "3/4" in text and "loss 0.2500" in text and "left" in text


def test_without_a_total_there_is_no_time_left():
    stream = io.StringIO()
    with nnx.TrainLog(file=stream, interval=0) as log:
        log(0, loss=1.0)
        log(1, loss=1.0)
    assert "left" not in stream.getvalue() and "train 2  loss 1.0000" in stream.getvalue()


def test_of_several_processes_only_the_first_one_logs(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    stream = io.StringIO()
    with nnx.TrainLog(total=2, path=tmp_path, file=stream) as log:
        log(0, loss=1.0)
    assert stream.getvalue() == "" and not list(tmp_path.iterdir())


# The plot


def test_the_losses_are_plotted_at_the_end(tmp_path):
    with quiet(total=3, path=tmp_path) as log:
        for step in range(3):
            log(step, loss=1.0, valid_loss=2.0, accuracy=0.5)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_an_error_in_the_loop_is_the_one_that_is_seen_and_nothing_is_lost(tmp_path):
    with pytest.raises(ZeroDivisionError), quiet(path=tmp_path, plot=False) as log:
        log(0, loss=1.0)
        _ = 1 / 0
    assert lines_of(tmp_path)[0]["loss"] == 1.0


def test_log_works_without_a_with_block(tmp_path):
    log = quiet(path=tmp_path, plot=False)
    log(0, loss=1.0)
    log.close()
    log.close()
    assert len(lines_of(tmp_path)) == 1


def test_a_missing_plotting_library_is_noticed_at_the_start(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"nnx\[plot\]"):
        nnx.TrainLog(plot=True)


def test_tokens_and_utilization_are_computed_from_the_rate(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    shown = io.StringIO()
    log = nnx.TrainLog(
        10, tmp_path, plot=False, file=shown, interval=0, tokens_per_step=600, flops_per_step=3e12, peak_flops=3e13
    )
    with log:
        for step in range(3):
            log(step, loss=1.0)
            now[0] += 0.5
    records = lines_of(tmp_path)
    assert "mfu" not in records[0]  # one step has no rate
    assert records[2]["tokens_per_second"] == pytest.approx(1200)
    assert records[2]["flops_per_second"] == pytest.approx(6e12)
    assert records[2]["mfu"] == pytest.approx(0.2)
    assert "2 steps/s  1,200 tokens/s  20.0% MFU" in shown.getvalue()
    assert "tokens_per_second" not in shown.getvalue()


def test_without_a_peak_the_operations_per_second_are_shown(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    shown = io.StringIO()
    with nnx.TrainLog(file=shown, interval=0, flops_per_step=2e12) as log:
        for step in (0, 4):
            log(step, loss=1.0)
            now[0] += 1.0
    assert "4 steps/s  8 TFLOP/s" in shown.getvalue() and "MFU" not in shown.getvalue()


def test_the_work_of_a_step_is_checked():
    with pytest.raises(ValueError, match="tokens_per_step is a positive number, got 0"):
        quiet(tokens_per_step=0)
    with pytest.raises(
        ValueError, match="peak_flops=1000000.0 needs to be positive, and needs flops_per_step, got None"
    ):
        quiet(peak_flops=1e6)
    with pytest.raises(ValueError, match="'mfu' cannot be the name of a metric"):
        quiet()(0, mfu=0.5)


def test_a_path_in_the_place_of_the_number_of_steps_is_the_path(tmp_path):
    with nnx.TrainLog(tmp_path / "run", file=io.StringIO(), plot=False) as log:
        log(0, loss=1.0)
    assert log.total is None and lines_of(tmp_path / "run")[0]["loss"] == 1.0
    with pytest.raises(TypeError, match="was given two paths"):
        nnx.TrainLog("a", "b")


# The curve


def run_with_curve(stream=None, **options):
    with nnx.TrainLog(total=40, file=stream, plot=False, interval=0, **options) as log:
        for step in range(40):
            log(step, loss=1 / (step + 1), accuracy=step)


def test_a_terminal_shows_the_curve_of_the_loss_below_the_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    plain, drawn = Terminal(), Terminal()
    run_with_curve(plain)
    run_with_curve(drawn, curve=True)
    assert "\u2801" <= max(drawn.getvalue()) <= "\u28ff" and "1.0000 │" in drawn.getvalue()
    assert not any("\u2800" <= c <= "\u28ff" for c in plain.getvalue())


def test_a_notebook_shows_the_curve_in_place(monkeypatch):
    pages = []

    def display(data, raw, display_id):
        pages.append(data["text/plain"])
        return types.SimpleNamespace(update=lambda data, raw: pages.append(data["text/html"]))

    monkeypatch.setattr("nnx.inspection.train_log.in_notebook", lambda: True)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    run_with_curve(curve="accuracy")
    assert pages[0] == "train" and "<svg" in pages[-1] and "accuracy</text>" in pages[-1]
    assert "train 40/40" in pages[-1] and "loss</text>" not in pages[-1]


def test_a_long_run_keeps_few_points_of_its_curve():
    from nnx.inspection.curve import MAX_POINTS, Curve

    curve = Curve()
    for step in range(10_000):
        curve.add({"step": step, "loss": 10_000 - step, "time": 0.0})
    curve.add({"step": 10_000, "loss": math.nan})
    points = curve.points["loss"]
    assert len(points) <= MAX_POINTS and points[0][0] < 20 and points[-1][0] > 9_900
    assert all(x + y == 10_000 for x, y in points)
    lines = curve.lines(20, 4)
    assert len(lines) == 5 and lines[1].startswith("99") and all(len(line) == len(lines[1]) for line in lines[1:])
