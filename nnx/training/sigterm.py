"""SIGTERM: a program that is told to end finishes the save under way first, and may save once more.

A signal arrives between two lines of the main thread, in the middle of a step perhaps. So nothing new is saved from
here: the handler completes what is being written, or notes that the program is to end, and the next `manager.save`
saves what the training loop hands it. Then the signal is sent again to whoever handled it before.

With several processes JAX watches for the signal itself and tells every process at which step all of them stop:
`jax.experimental.multihost_utils.reached_preemption_sync_point`. No handler is installed then.
"""

import os
import signal
import threading
from types import FrameType
from typing import Any, Protocol

import jax


class Saver(Protocol):
    """What can be told to end."""

    def end_soon(self) -> bool:
        """Completes what is being written, if that is possible here; returns whether the program may end now."""
        ...


_savers: dict[int, Saver] = {}
_before: list[Any] = []  # the handler that was there before ours


def watch(saver: Saver) -> None:
    """Has a saver told when SIGTERM arrives. Only the main thread can arrange that; elsewhere nothing happens."""
    if threading.current_thread() is not threading.main_thread() or jax.process_count() > 1:
        return
    if not _before:
        current = signal.getsignal(signal.SIGTERM)
        if current is None:  # a handler that Python does not know and could not restore
            return
        _before.append(current)
        signal.signal(signal.SIGTERM, _handle)
    _savers[id(saver)] = saver


def unwatch(saver: Saver) -> None:
    """Forgets a saver; without any, the handler of before is put back."""
    _savers.pop(id(saver), None)
    if not _savers and _before and threading.current_thread() is threading.main_thread():
        _restore()


def end_now() -> None:
    """Ends the program as SIGTERM would have ended it."""
    _savers.clear()
    _restore()
    os.kill(os.getpid(), signal.SIGTERM)


def _restore() -> None:
    if _before:
        before = _before.pop()
        if signal.getsignal(signal.SIGTERM) is _handle:  # else somebody has put another one in its place
            signal.signal(signal.SIGTERM, before)


def _handle(number: int, frame: FrameType | None) -> None:
    if all([saver.end_soon() for saver in list(_savers.values())]):
        end_now()
