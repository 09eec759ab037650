"""Exchanges between processes, with threads in the place of processes and a dict in the place of the store."""

import threading
import time

import jax
import pytest

from nnx.storage import processes
from nnx.storage.processes import Exchange, ProcessError


class Store:
    """The key-value store of `jax.distributed`, as far as exchanges use it."""

    def __init__(self):
        self.values, self._changed, self.broken = {}, threading.Condition(), False

    def key_value_set(self, key, value, allow_overwrite=False):
        with self._changed:
            assert allow_overwrite or key not in self.values, key
            self.values[key] = value
            self._changed.notify_all()

    def key_value_delete(self, key):
        del self.values[key]

    def key_value_try_get(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("NOT_FOUND: no such key")
        return self.values[key]

    def blocking_key_value_get(self, key, milliseconds):
        if self.broken:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: Socket closed\nmore")
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, min(milliseconds, 50) / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: waited in vain")
            return self.values[key]


@pytest.fixture
def store(monkeypatch):
    """A store that two threads share; each is told its number by a thread-local value."""
    store, numbers = Store(), threading.local()
    monkeypatch.setattr(processes, "distributed_client", lambda: store)
    monkeypatch.setattr(processes, "_show_signs_of_life", lambda: None)
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.jax, "process_index", lambda: numbers.process)
    monkeypatch.setattr(processes, "_numbers", iter([0, 0, 1, 1, 2, 2]))
    store.numbers = numbers
    return store


def both(store, work):
    """Runs `work(process)` as both processes and returns what each returned or raised."""
    found = [None, None]

    def run(process):
        store.numbers.process = process
        try:
            found[process] = work(process)
        except Exception as error:
            found[process] = error

    threads = [threading.Thread(target=run, args=(process,)) for process in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_every_process_gets_the_results_of_all(store):
    def work(process):
        exchange = Exchange("a save")
        return exchange.together(lambda: 10 + process), exchange.on_first(lambda: f"from {process}"), exchange.meet()

    assert both(store, work) == [([10, 11], "from 0", None)] * 2


def test_failure_on_one_process_fails_on_all(store):
    def work(process):
        return Exchange("a save").together(lambda: 1 // (1 - process))

    first, second = both(store, work)
    assert isinstance(second, ZeroDivisionError)
    assert isinstance(first, ProcessError) and "a save failed on process 1: ZeroDivisionError" in str(first)


def test_processes_that_do_different_things_raise(store):
    for error in both(store, lambda process: Exchange(f"step {process}").meet()):
        assert "out of step: process 0 is at step 0, process 1 is at step 1" in str(error)


def test_a_process_that_shows_no_sign_of_life_is_named(store, monkeypatch):
    monkeypatch.setattr(processes, "PEER_TIMEOUT", 0.2)
    store.values["nnx/alive/1"] = "7"
    store.numbers.process = 0
    with pytest.raises(ProcessError, match="a save: process 1 of 2 showed no sign of life for .* is probably dead"):
        Exchange("a save").meet()


def test_a_process_that_is_slow_but_alive_is_waited_for(store, monkeypatch):
    monkeypatch.setattr(processes, "PEER_TIMEOUT", 0.2)

    def work(process):
        for beat in range(10 * process):
            store.key_value_set("nnx/alive/1", str(beat), allow_overwrite=True)
            time.sleep(0.06)
        return Exchange("a save").together(lambda: process)

    assert both(store, work) == [[0, 1], [0, 1]]


def test_a_store_that_cannot_be_reached_is_a_clear_error(store):
    store.broken, store.numbers.process = True, 1
    with pytest.raises(
        ProcessError,
        match=r"cannot reach the other processes \(UNAVAILABLE: Socket closed\). Process 0 is probably dead",
    ):
        Exchange("a save").meet()


def test_unconnected_processes_raise_with_advice(monkeypatch):
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    with pytest.raises(ProcessError, match=r"a save runs in one of 2 processes.*jax.distributed.initialize\(\)"):
        Exchange("a save")


def test_the_store_does_not_fill_up(store, monkeypatch):
    monkeypatch.setattr(processes, "_ANSWERS_KEPT", 3)
    monkeypatch.setattr(processes, "_answers", processes.collections.deque())

    def work(process):
        exchange = Exchange("a save")
        for _ in range(20):
            exchange.meet()

    assert both(store, work) == [None, None] and len(store.values) <= 4


def test_one_process_alone_just_works():
    assert processes.together("a save", lambda: 3) == [3] and processes.on_first("a save", lambda: {"a": 1}) == {"a": 1}
    processes.meet("a save")
    assert processes.is_first()
    with pytest.raises(ZeroDivisionError):
        processes.on_first("a save", lambda: 1 // 0)
