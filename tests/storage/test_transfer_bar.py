"""The bar of loads and saves that take long: when it appears, what it counts, and that it never does harm."""

import io
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from nnx.storage import transfer_bar
from nnx.storage.transfer_bar import moved, transfer
from tests.models.published import golden_directory, sending_to_cpus


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Gone(Terminal):
    def write(self, text):
        raise OSError("the terminal is gone")


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(transfer_bar, "AFTER", 0.0)
    monkeypatch.setattr(transfer_bar, "_EVERY", 0.0)


@pytest.fixture(params=["rich", "text"])
def drawn(request, monkeypatch, at_once):
    """Standard error, as a terminal."""
    if request.param == "rich":
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
    terminal = Terminal()
    monkeypatch.setattr(transfer_bar, "sys", types.SimpleNamespace(stderr=terminal))  # pytest changes that of `sys`
    return terminal


def test_every_way_to_load_and_save_is_shown_and_counts_to_the_end(drawn, tmp_path, monkeypatch):
    ends = []
    close = transfer_bar.TransferBar.close
    monkeypatch.setattr(
        transfer_bar.TransferBar, "close", lambda bar: (ends.append((bar._what, bar._done, bar._size)), close(bar))
    )
    model = nnx.Dict(w=nnx.Param(jnp.ones((40, 50))), b=nnx.Param(jnp.ones(50)))
    golden = golden_directory("llama")
    ways = {
        "saving c": lambda: nnx.save(tmp_path / "c", model),
        "loading c": lambda: nnx.load(tmp_path / "c", model),
        "saving m.safetensors": lambda: nnx.save_safetensors(tmp_path / "m.safetensors", model),
        "loading m.safetensors": lambda: nnx.load_safetensors(tmp_path / "m.safetensors", model),
        "loading parameters": lambda: nnx.models.from_pretrained(golden),
    }
    for what, work in ways.items():
        ends.clear()
        work()
        assert [(name, done) for name, done, _ in ends] == [(what, size) for _, _, size in ends] != []
        assert what in drawn.getvalue()
    ends.clear()
    with sending_to_cpus():
        nnx.models.from_pretrained(golden)
    ((_, done, size),) = ends
    assert done == size
    with nnx.CheckpointManager(tmp_path / "steps") as manager:  # in the background
        ends.clear()
        manager.save(0, model)
        manager.wait()
    assert not ends


def test_nothing_is_shown_before_a_second_has_passed(monkeypatch):
    terminal = Terminal()
    with transfer("loading", "x", 100, stream=terminal):
        moved(100)
    assert not terminal.getvalue()


@pytest.mark.parametrize("off", ["not a terminal", "switched off", "closed"])
def test_nothing_is_shown_where_nobody_watches(off, at_once, monkeypatch):
    stream = io.StringIO() if off == "not a terminal" else Terminal()
    if off == "switched off":
        monkeypatch.setenv("NNX_PROGRESS", "0")
    if off == "closed":
        stream.close()
    with transfer("loading", "x", 100, stream=stream):
        moved(50)
    assert off == "closed" or not stream.getvalue()


def test_a_terminal_that_is_gone_does_no_harm(at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer_bar, "sys", types.SimpleNamespace(stderr=Gone()))
    nnx.save(tmp_path / "c", {"w": np.ones(100)})
    assert nnx.load(tmp_path / "c")["w"].all()


def test_another_bar_of_rich_is_left_alone(drawn):
    rich = pytest.importorskip("rich.progress")
    with rich.Progress(console=rich.Console(file=Terminal())) as other:
        task = other.add_task("training", total=2)
        with transfer("loading", "x", 100):
            moved(50)
        other.update(task, completed=2)
    assert other.finished
