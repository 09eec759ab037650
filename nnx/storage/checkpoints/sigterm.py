"""SIGTERM: a program that is told to end first finishes the save in progress, and can save once more.

A signal arrives between two lines of the main thread, perhaps in the middle of a step, so the handler does not save
anything new. It completes the save in progress, or records that the program is to end; the next `manager.save` then
saves what the training loop passes to it. After that, the signal is sent again to the previous handler.

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
    """An object that can be told to end."""

    def end_soon(self) -> bool:
        """Completes the save in progress, if that is possible here; returns whether the program may end now."""
        ...


_savers: dict[int, Saver] = {}
_before: list[Any] = []  # the handler that was installed before ours, if ours is


def watch(saver: Saver) -> None:
    """Registers a saver to be told when SIGTERM arrives. Only the main thread can; elsewhere, this has no effect."""
    if threading.current_thread() is not threading.main_thread() or jax.process_count() > 1:
        return
    if not _before:
        current = signal.getsignal(signal.SIGTERM)
        if current is None:  # a handler installed from C, which Python could not restore
            return
        _before.append(current)
        signal.signal(signal.SIGTERM, _handle)
    _savers[id(saver)] = saver


def unwatch(saver: Saver) -> None:
    """Unregisters a saver; after the last one, the previous handler is restored."""
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
        if signal.getsignal(signal.SIGTERM) is _handle:  # else another handler was installed in the meantime
            signal.signal(signal.SIGTERM, before)


def _handle(number: int, frame: FrameType | None) -> None:
    if all([saver.end_soon() for saver in list(_savers.values())]):
        end_now()
