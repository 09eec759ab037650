"""A small pool of threads that still works while the interpreter is shutting down."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class Workers:
    """A small pool of threads; leaving the block waits for all work.

    `concurrent.futures` accepts no work once the main thread has ended, and since Python 3.12 no thread can be started
    then. A save in the background has to be completed nevertheless, so without threads the caller does the work.
    """

    def __init__(self, count: int):
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._jobs = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        for number in range(count):
            thread = threading.Thread(target=self._run, name=f"nnx-worker-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is shutting down
                break
            self._threads.append(thread)

    def submit(self, work: Callable[..., T], *args: Any) -> "Future[T]":
        """Runs `work(*args)` in one of the threads."""
        future: Future[T] = Future()
        if self._threads:
            self._jobs.put((future, work, args))
        else:
            _do(future, work, args)
        return future

    def map(self, work: Callable[[Any], Any], items: list[Any]) -> None:
        """Runs `work` on every item, and raises the first failure."""
        for future in [self.submit(work, item) for item in items]:
            future.result()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            _do(*job)
            del job  # it would keep the written data in memory

    def close(self) -> None:
        """Waits for all work and ends the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _do(future: "Future[Any]", work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        future.set_result(work(*args))
    except BaseException as error:
        future.set_exception(error)
