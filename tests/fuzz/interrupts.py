"""Ctrl-C at a random moment of a call, as far as a test can press it: a timer whose signal raises KeyboardInterrupt."""

import random
import signal
import threading
from collections.abc import Callable
from typing import Any


def can_interrupt() -> bool:
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()


def _raise(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


def interrupted(call: Callable[[], Any], rng: random.Random, seconds: float) -> bool:
    """Makes a call that takes about so long, with an interrupt somewhere in it; returns whether the call ended."""
    previous = signal.signal(signal.SIGALRM, _raise)
    ended = False
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 1.2 * seconds))
            call()
            ended = True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGALRM, previous)
    return ended
