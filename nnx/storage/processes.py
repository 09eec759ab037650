"""Running as several processes: one decides, all agree, and errors name a process that has died.

A program on several hosts runs as several processes that must do the same things in the same order. An *exchange* is
something they do together, such as a save, in *rounds*. In a round every process contributes a value, or the error it
ran into, and receives the contributions of all. So no process leaves a round before all have reached it, and a failure
on one process is a failure on all of them. Exchanges use the key-value store of `jax.distributed`, not the devices, so
they work in any thread and while a step is running.

With a single process everything here is a plain call.
"""

import collections
import itertools
import json
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from nnx.core.trace import distributed_client

T = TypeVar("T")

BEAT = 2.0
"""The number of seconds between two signs of life of a process."""
PEER_TIMEOUT = 60.0
"""The number of seconds without a sign of life after which a process counts as dead; less than JAX's own 100 s."""

NOT_CONNECTED = """{label} runs in one of {count} processes that cannot communicate: call \
jax.distributed.initialize() at the start of the program."""
PEER_DIED = """{label}: process {peer} of {count} showed no sign of life for {seconds:.0f} s and is probably dead. \
Restart all processes."""
PEER_FAILED = "{label} failed on process {peer}: {reason}"
OUT_OF_STEP = """The processes are out of step: process 0 is at {label}, process {peer} is at {other}. Every process \
must make the same calls in the same order."""
NO_STORE = "{label}: cannot reach the other processes ({reason}). Process 0 is probably dead; restart all processes."


class ProcessError(RuntimeError):
    """Another process failed, died, or is out of step."""


def is_first() -> bool:
    """Whether this is process 0, which writes everything that is written only once, such as logs."""
    return jax.process_index() == 0


class Exchange:
    """Something that all processes do together.

    Every process must create its exchanges in the same order, in its main thread. The rounds of one exchange can run in
    any thread.

    Args:
        label: a description for the messages, e.g. `"nnx.save('run/3')"`; it must be the same in all processes.
    """

    def __init__(self, label: str):
        self._label = label
        self._count, self._index = jax.process_count(), jax.process_index()
        self._rounds = itertools.count()
        if self._count > 1:
            self._store = distributed_client()
            if self._store is None:
                raise ProcessError(NOT_CONNECTED.format(label=label, count=self._count))
            self._key = f"nnx/{next(_numbers)}"
            _show_signs_of_life()

    def together(self, work: Callable[[], T]) -> list[T]:
        """Runs `work` on every process and returns the results of all, in the order of the processes.

        Args:
            work: the function to run; its result must be serializable as JSON.

        Raises:
            ProcessError: `work` failed on another process, or a process has died. An error in this process is raised
                unchanged.
        """
        if self._count == 1:
            return [work()]
        error, result = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        reason = None if error is None else f"{type(error).__name__}: {error}"
        try:
            posts = self._share({"label": self._label, "error": reason, "result": result})
        except ProcessError:
            if error is not None:
                raise error from None
            raise
        if error is not None:
            raise error
        for peer, post in enumerate(posts):
            if post["label"] != posts[0]["label"]:
                raise ProcessError(OUT_OF_STEP.format(label=posts[0]["label"], peer=peer, other=post["label"]))
            if post["error"] is not None:
                raise ProcessError(PEER_FAILED.format(label=self._label, peer=peer, reason=post["error"]))
        return [post["result"] for post in posts]

    def on_first(self, work: Callable[[], T]) -> T:
        """Runs `work` on process 0 only and returns its result on every process; if it fails there, it fails on all."""
        return self.together(lambda: work() if self._index == 0 else None)[0]  # type: ignore[return-value]

    def meet(self) -> None:
        """Waits until every process has reached this point."""
        self.together(lambda: None)

    def _share(self, post: Any) -> list[Any]:
        key = f"{self._key}/{next(self._rounds)}"
        try:
            if self._index != 0:
                self._store.key_value_set(f"{key}/{self._index}", json.dumps(post))
                return json.loads(self._await(f"{key}/all", 0))
            posts = [post]
            for peer in range(1, self._count):
                posts.append(json.loads(self._await(f"{key}/{peer}", peer)))
                self._store.key_value_delete(f"{key}/{peer}")
            self._store.key_value_set(f"{key}/all", json.dumps(posts))
            _answers.append(f"{key}/all")
            if len(_answers) > _ANSWERS_KEPT:  # every process has read an answer that old
                self._store.key_value_delete(_answers.popleft())
            return posts
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ProcessError(NO_STORE.format(label=self._label, reason=reason)) from error

    def _await(self, key: str, peer: int) -> str:
        """Returns what a process posts under a key; waits for as long as the process is alive."""
        sign, since = None, time.monotonic()
        while True:
            try:
                return self._store.blocking_key_value_get(key, 1000)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            shown = _sign_of_life(self._store, peer)
            if shown != sign:
                sign, since = shown, time.monotonic()
            elif sign is not None and time.monotonic() - since > PEER_TIMEOUT:
                seconds = time.monotonic() - since
                text = PEER_DIED.format(label=self._label, peer=peer, count=self._count, seconds=seconds)
                raise ProcessError(text)


_ANSWERS_KEPT = 64
_numbers = itertools.count()  # numbers the exchanges the same way in every process, so that they find each other
_answers: collections.deque[str] = collections.deque()


def together(label: str, work: Callable[[], T]) -> list[T]:
    """Runs `work` on every process, as an exchange of one round: see `Exchange.together`."""
    return Exchange(label).together(work)


def on_first(label: str, work: Callable[[], T]) -> T:
    """Runs `work` on process 0 only and returns its result everywhere: see `Exchange.on_first`."""
    return Exchange(label).on_first(work)


def meet(label: str) -> None:
    """Waits until every process has reached this point: see `Exchange.meet`."""
    Exchange(label).meet()


# Signs of life


_beating = threading.Lock()
_beats: list[threading.Thread] = []


def _show_signs_of_life() -> None:
    """Starts the thread that tells the others that this process is alive, unless it is already running."""
    with _beating:
        if not _beats or not _beats[0].is_alive():
            _beats[:] = [threading.Thread(target=_beat, name="nnx-alive", daemon=True)]
            _beats[0].start()


def _beat() -> None:
    for number in itertools.count():
        store = distributed_client()
        try:
            store.key_value_set(f"nnx/alive/{jax.process_index()}", str(number), allow_overwrite=True)
        except Exception:  # jax.distributed was shut down: the program is ending
            return
        time.sleep(BEAT)


def _sign_of_life(store: Any, peer: int) -> str | None:
    """Returns the latest sign of life of a process; None before its first exchange."""
    try:
        return store.key_value_try_get(f"nnx/alive/{peer}")
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise
