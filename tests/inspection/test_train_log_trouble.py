"""What can go wrong around a training log while a run goes on, none of which ends the run."""

import io
import itertools
import json
import math
import os
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(params=[io.StringIO, Terminal], ids=["lines", "bar"])
def stream(request, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return request.param()


def lines_of(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


# Names and values


@pytest.mark.parametrize("name", ["[bold]", "[/]", "loss [red]x[/red]", "{0}", "%s", "[link=http://x]", ":smile:"])
def test_names_are_text_and_never_markup(stream, name):
    with nnx.TrainLog(total=2, file=stream, interval=0, name=f"run{name}") as log:
        log(0, **{name: 1.0})
        log(1, **{name: 2.0})
    assert f"{name} 2.0000" in stream.getvalue() and f"run{name}" in stream.getvalue()


def test_a_name_cannot_move_the_cursor_or_end_the_line(stream, tmp_path):
    with nnx.TrainLog(file=stream, interval=0, path=tmp_path, plot=True) as log:
        log(0, **{"a\nb\x1b[2J\rc loss": 1.0, "\ud800": 2.0})
    assert "a?b?[2J?c loss 1.0000" in stream.getvalue() and "? 2.0000" in stream.getvalue()
    assert lines_of(tmp_path)[0]["a\nb\x1b[2J\rc loss"] == 1.0


def test_ascii_stream_gets_ascii_characters():
    buffer = io.BytesIO()
    with nnx.TrainLog(file=io.TextIOWrapper(buffer, encoding="ascii"), interval=0) as log:
        log(0, β=1.0)
        assert buffer.getvalue().startswith(b"train 1  ? 1.0000")


def test_values_that_are_not_finite_are_shown_written_and_plotted(stream, tmp_path):
    with nnx.TrainLog(total=3, file=stream, path=tmp_path, interval=0, plot=True) as log:
        for step, loss in enumerate((math.nan, math.inf, -math.inf)):
            log(step, loss=loss, other_loss=jnp.float32(loss), count=-(10**9999))
    assert "loss -inf  other_loss -inf  count -inf" in stream.getvalue()
    read = nnx.read_metrics(tmp_path)
    assert math.isnan(read[0]["loss"]) and read[1]["other_loss"] == math.inf and read[2]["loss"] == -math.inf
    assert (tmp_path / "loss.png").exists()


@pytest.mark.parametrize("name", ["loss $x$", "loss $", r"loss \frac{", "_loss", "loss_"])
def test_names_are_no_formulas_in_the_plot(tmp_path, name):
    with nnx.TrainLog(total=1, file=io.StringIO(), path=tmp_path, plot=True, name=name) as log:
        log(0, **{name: 1.0, "other_loss": 2.0})
    assert (tmp_path / "loss.png").exists()


@pytest.mark.parametrize("value", [1j, jnp.complex64(1), np.str_("x"), np.datetime64("2020-01-01"), None, [1.0]])
def test_value_that_is_not_a_real_number_is_refused_at_the_call(value):
    with pytest.raises(TypeError, match="The metric 'loss' of step 0 is .*, and a metric is one number"):
        nnx.TrainLog(file=io.StringIO())(0, loss=value)


def test_any_integer_is_a_step_and_nothing_else_is(tmp_path):
    with nnx.TrainLog(file=io.StringIO(), path=tmp_path, plot=False) as log:
        for step in (0, np.int64(1), jnp.int32(2), np.array([3])):
            log(step, loss=0.0)
        for step in (1.5, True, "4", None, jnp.float32(5)):
            with pytest.raises(TypeError, match="A step is an integer, got"):
                log(step, loss=0.0)
    assert [record["step"] for record in lines_of(tmp_path)] == [0, 1, 2, 3]


# Calls


def test_two_calls_for_one_step_make_one_record(stream, tmp_path):
    with nnx.TrainLog(total=2, file=stream, path=tmp_path, interval=0, plot=False) as log:
        for step in range(2):
            log(step, loss=1.0 + step)
            log(step, valid_loss=2.0 + step, accuracy=0.5)
    records = nnx.read_metrics(tmp_path)
    assert [{k: v for k, v in record.items() if k != "time"} for record in records] == [
        {"step": 0, "loss": 1.0, "valid_loss": 2.0, "accuracy": 0.5},
        {"step": 1, "loss": 2.0, "valid_loss": 3.0, "accuracy": 0.5},
    ]
    assert "loss 2.0000  valid_loss 3.0000  accuracy 0.5000" in stream.getvalue()


def test_a_second_call_for_a_step_does_not_reset_the_rate(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks) / 2)
    stream = io.StringIO()
    with nnx.TrainLog(file=stream, interval=0) as log:
        for step in range(3):
            log(step, a=1.0)
            log(step, b=1.0)
    assert stream.getvalue().splitlines()[-1].endswith("steps/s")


def test_a_call_inside_a_transform_warns_and_logs_nothing(tmp_path):
    with nnx.TrainLog(file=io.StringIO(), path=tmp_path, plot=False) as log:

        @jax.jit
        def step(x):
            log(0, loss=x)
            log(x, loss=1.0)
            return x + 1

        with pytest.warns(UserWarning, match="called inside a transform, where 'loss' has no value yet") as caught:
            assert step(1) == 2
        log(1, loss=1.0)
    assert len(caught) == 1 and [record["step"] for record in lines_of(tmp_path)] == [1]


def test_a_call_from_a_debug_callback_is_logged(tmp_path):
    with nnx.TrainLog(file=io.StringIO(), path=tmp_path, plot=False) as log:
        jax.jit(lambda x: jax.debug.callback(lambda value: log(0, loss=value), x))(2.5)
        jax.effects_barrier()
    assert lines_of(tmp_path)[0]["loss"] == 2.5


def test_a_value_whose_buffer_is_gone_is_left_out_with_a_warning(tmp_path):
    loss = jnp.float32(1.0)
    loss.delete()
    with nnx.TrainLog(file=io.StringIO(), path=tmp_path, plot=False) as log:
        with pytest.warns(UserWarning, match="The metric 'loss' of step 0 has no value .*deleted"):
            log(0, loss=loss, accuracy=0.5)
        log(1, loss=loss)
    assert [record.keys() - {"time"} for record in lines_of(tmp_path)] == [{"step", "accuracy"}, {"step"}]


def test_threads_share_a_log(tmp_path):
    with nnx.TrainLog(file=io.StringIO(), path=tmp_path, plot=False) as log:
        work = [
            threading.Thread(target=lambda k=k: [log(step, **{f"m{k}": jnp.float32(step)}) for step in range(40)])
            for k in range(4)
        ]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
    assert len(lines_of(tmp_path)) == 160
    assert all(record[f"m{k}"] == record["step"] for record in nnx.read_metrics(tmp_path) for k in range(4))


# The outside world


def test_a_stream_that_is_closed_ends_the_display_and_not_the_run(stream, tmp_path):
    with nnx.TrainLog(total=3, file=stream, path=tmp_path, interval=0, plot=False) as log:
        log(0, loss=1.0)
        stream.close()
        log(1, loss=1.0)
        log(2, loss=1.0)
    assert len(lines_of(tmp_path)) == 3


class Pipe(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


class TerminalPipe(Pipe):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [Pipe, TerminalPipe])
def test_a_broken_pipe_and_a_missing_stream_end_nothing(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("TERM", "xterm")
    with nnx.TrainLog(total=2, file=kind(), path=tmp_path, interval=0, plot=False) as log:
        log(0, loss=1.0)
        log(1, loss=1.0)
    monkeypatch.setattr(sys, "stderr", None)
    with nnx.TrainLog(path=tmp_path, plot=False) as log:
        log(2, loss=1.0)
    assert len(lines_of(tmp_path)) == 3


def test_a_full_disk_is_one_warning_and_the_file_stays_readable(tmp_path, monkeypatch):
    with nnx.TrainLog(file=io.StringIO(), path=tmp_path, plot=False) as log:
        log(0, loss=1.0)
        whole, file = log._metrics_file._file.write, log._metrics_file._file

        class Full:
            def write(self, line):
                return whole(line[:10])  # a part of the line fits

            close = file.close

        log._metrics_file._file = Full()
        with pytest.warns(
            UserWarning, match="The metrics of step 1 could not be written to .*The run continues"
        ) as caught:
            log(1, loss=1.0)
            log(2, loss=1.0)
        log._metrics_file._file = file
        log(3, loss=1.0)
    assert len(caught) == 1
    assert [record["step"] for record in nnx.read_metrics(tmp_path)] == [0, 3]


def test_a_plot_that_fails_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "loss.png").mkdir()
    with pytest.warns(UserWarning, match="could not be plotted"):
        with nnx.TrainLog(total=1, file=io.StringIO(), path=tmp_path, plot=True) as log:
            log(0, loss=1.0)


def test_bytes_that_are_no_text_in_an_old_file_end_nothing(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0, "loss": 1.0}\n\xff\xfe\x00broken\n\xff')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with nnx.TrainLog(total=2, file=io.StringIO(), path=tmp_path, plot=True) as log:
            log(1, loss=0.5)
        assert [record["loss"] for record in nnx.read_metrics(tmp_path)] == [1.0, 0.5]
    texts = [str(warning.message).split(" of ")[0] for warning in caught]
    assert texts == 2 * ["Skipped line 2", "Skipped line 3"]
    assert (tmp_path / "loss.png").exists()


def test_several_programs_append_whole_lines(tmp_path):
    logs = [nnx.TrainLog(file=io.StringIO(), path=tmp_path, plot=False) for _ in range(3)]
    for step in range(30):
        for k, log in enumerate(logs):
            log(step * (k + 1), **{f"metric of program {k}": 1.0})
    for log in logs:
        log.close()
    assert len(lines_of(tmp_path)) == 90
    read = nnx.read_metrics(tmp_path)
    for k in range(3):
        assert sum(f"metric of program {k}" in record for record in read) == 30


def test_progress_bar_of_another_library_does_not_interfere(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    outer, inner = Terminal(), Terminal()
    with nnx.TrainLog(total=1, file=outer) as first, nnx.TrainLog(total=1, file=inner) as second:
        first(0, loss=1.0)
        second(0, loss=2.0)
    assert "loss 1.0000" in outer.getvalue() and "loss 2.0000" in inner.getvalue()


def test_of_several_processes_only_the_first_one_plots_or_calls_sinks(tmp_path, monkeypatch):
    with nnx.TrainLog(total=1, file=io.StringIO(), path=tmp_path, plot=False) as log:
        log(0, loss=1.0)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    called = []
    with nnx.TrainLog(total=1, file=io.StringIO(), path=tmp_path, plot=True) as log:
        log.add_sink(lambda *record: called.append(record))
        log(0, loss=1.0)
        assert log.plot() is None
    nnx.plot_metrics(tmp_path, tmp_path / "picture.png")
    assert os.listdir(tmp_path) == ["metrics.jsonl"] and not called
