"""Calls that no signal can interrupt: Ctrl-C waits until they have ended.

Python runs the handler of a signal between two bytecodes of the main thread, and the handler of Ctrl-C raises there. A
donated step has taken the old values of its Modules when it starts, so from then until the new values are written
there must be no such place. The fast path makes do with C calls. Wherever Python has to run in between, in JAX (the
first call, a step with `jax.debug.print`) or in this package (a structural change), the call is made from here.
"""

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# The functions of `signal` without their conversions to enums, which would take longer than a small step.
_handler_of: Callable[[int], Any] = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_set_handler: Callable[[int, Any], Any] = getattr(signal.signal, "__wrapped__", signal.signal)

SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGBREAK")
    if hasattr(signal, name)
]
"""Signals that come from outside and that programs handle."""


class _HeldSignals:
    """The signals that arrive during a call, and the handlers that will get them."""

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}
        self.arrived: list[int] = []  # without their frames, which would keep this object, and arrays, alive
        self.active: bool = True

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Stands in for the handlers. Should an interrupt keep it installed after the call, it passes signals on."""
        if self.active:
            self.arrived.append(number)
        else:
            self.handlers[number](number, frame)


def uninterrupted(fun: Callable[..., Any], *args: Any) -> Any:
    """Calls a function; signals that arrive meanwhile are handled when it has ended.

    Only the main thread handles signals, so in any other the call needs no protection.
    """
    if threading.current_thread() is not threading.main_thread():
        return fun(*args)
    held = _HeldSignals()
    try:
        for number in SIGNALS:
            handler = _handler_of(number)
            if callable(handler):  # a function; the defaults of the system are numbers, and are not held back
                held.handlers[number] = handler
                _set_handler(number, held.handle)
        return fun(*args)
    finally:
        held.active = False
        for number, handler in held.handlers.items():
            _set_handler(number, handler)
        # Handled here, not sent again: an event loop that was woken up by the signal must not wake up twice.
        for number in held.arrived:
            held.handlers[number](number, sys._getframe())
