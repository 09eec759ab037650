"""The lock of a path: one writer at a time, even if the other one is on another host or has been killed.

The lock is a small file that names its *holder*: host, process, when that process started, and a token. Creating it
exclusively acquires the lock, removing it releases it; a thread of the holder touches it every few seconds, which is
its *heartbeat*. A lock is *stale* when its holder is a process of this host that has ended, or when nobody has touched
it while a waiter watched it for `STALE_AFTER` seconds (the clocks of two hosts are never compared). A stale lock is
taken over.

A holder that was stopped for so long that its lock was taken over finds out before it commits: `check` raises.
"""

import dataclasses
import json
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from nnx.storage.files import open_exclusive, open_regular, unique_token

HEARTBEAT = 5.0
"""The number of seconds between two touches of a lock that is held."""
STALE_AFTER = 30.0
"""The number of seconds without a touch after which a lock of another host counts as abandoned."""
WAIT = 60.0
"""The number of seconds a second writer waits before it gives up."""

LOCKED = """{path} is being written by another job: {holder}. Waited {waited:.0f} s for it to finish. \
Give each job its own path; if that job is gone for good, remove {file}."""
LOST = """The lock on {path} was taken over by another job: {holder}. This process showed no sign of life for \
{stale:.0f} s (it or its disk was suspended). Nothing was replaced."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who holds a lock.

    Attributes:
        token: the unique mark of this acquisition.
        host: the name of the host, and of the process namespace on it.
        process: the process id there.
        started: when that process started, in clock ticks since boot; 0 if the system does not say.
        since: when the lock was acquired, in readable form.
    """

    token: str
    host: str
    process: int
    started: int
    since: str

    def __str__(self) -> str:
        return f"process {self.process} on host {self.host.partition(' ')[0]}, since {self.since}"


class WriterLock:
    """Lets one writer at a time work on a path.

    Args:
        file: the lock file. Everyone who writes the path must use the same one.
        path: the path it protects, for the messages.
        wait: the number of seconds to wait for another holder; 0 gives up at once.
        stale_after: the number of seconds without a heartbeat after which a lock of another host is taken over.

    Raises:
        TimeoutError: (on entering) another process holds the lock; the message names it.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp())
    >>> with WriterLock(directory / ".lock", directory) as lock:
    ...     lock.check()  # before the step that cannot be undone
    """

    def __init__(
        self, file: Path, path: os.PathLike[str] | str, *, wait: float | None = None, stale_after: float | None = None
    ):
        self.file: Path = Path(file)
        self._path = path
        self._wait = WAIT if wait is None else wait
        self._stale_after = STALE_AFTER if stale_after is None else stale_after
        self._holder: Holder | None = None
        self._released = threading.Event()

    def __enter__(self) -> "WriterLock":
        self.acquire()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Acquires the lock; waits for another holder, and takes over from one that is gone.

        Raises:
            TimeoutError: another process holds the lock; the message names it.
        """
        begun = time.monotonic()
        touched, watched_since = None, begun
        while not self._create():
            found = _read(self.file)
            if found is None:
                continue  # just released
            holder, touch = found
            now = time.monotonic()
            if touch != touched:  # a heartbeat, or another holder: the watch begins again
                touched, watched_since = touch, now
            if _has_ended(holder) or now - watched_since > self._stale_after:
                _take_away(self.file, holder)
            elif now - begun >= self._wait:
                text = LOCKED.format(path=self._path, holder=holder or "unknown", waited=now - begun, file=self.file)
                raise TimeoutError(text)
            else:
                time.sleep(0.02)

    def _create(self) -> bool:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = Holder(unique_token(), _host(), os.getpid(), _status(os.getpid())[1], since)
        # Looked up first, because a waiter comes here 50 times a second and would write a temporary file each time.
        if os.path.lexists(self.file) or not _create_whole(self.file, json.dumps(dataclasses.asdict(holder)).encode()):
            return False
        self._holder = holder
        self._released.clear()
        threading.Thread(target=_beat, args=(self.file, self._released), name="nnx-lock", daemon=True).start()
        return True

    def check(self) -> None:
        """Raises if this process no longer holds the lock; call it before the step that cannot be undone.

        Raises:
            TimeoutError: another writer took it over.
        """
        found = _read(self.file)
        if found is None or found[0] != self._holder:
            holder = "it has released it since" if found is None else found[0]
            raise TimeoutError(LOST.format(path=self._path, holder=holder, stale=self._stale_after))

    def release(self) -> None:
        """Releases the lock if this object holds it."""
        self._released.set()
        if self._holder is not None:
            found = _read(self.file)
            if found is not None and found[0] == self._holder:
                self.file.unlink(missing_ok=True)
            self._holder = None


def _create_whole(file: Path, content: bytes) -> bool:
    """Creates a file with its content; returns whether it did so, which it does only if there was none."""
    # Linked rather than written in place: a process killed halfway would leave a lock that names no holder.
    temporary = file.with_name(f".{file.name}.{unique_token()}.tmp")
    with open_exclusive(temporary) as opened:
        opened.write(content)
    try:
        os.link(temporary, file)
    except (FileExistsError, FileNotFoundError):  # the holder of the lock also removes temporary files
        return False
    except OSError:  # a file system without hard links
        return _create_in_place(file, content)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _create_in_place(file: Path, content: bytes) -> bool:
    try:
        with open_exclusive(file) as opened:
            opened.write(content)
    except FileExistsError:
        return False
    return True


def _beat(file: Path, released: threading.Event) -> None:
    while not released.wait(HEARTBEAT):
        try:
            os.utime(file, follow_symlinks=False)
        except OSError:  # taken over, or the disk is gone: `check` tells the holder
            return


def _read(file: Path) -> tuple[Holder | None, Any] | None:
    """Returns the holder named in a lock file (None if unreadable) and its last touch; None if there is no lock."""
    try:
        with open_regular(file) as opened:
            touched = os.fstat(opened.fileno()).st_mtime_ns
            text = opened.read(4096)
    except FileNotFoundError:
        return None
    except OSError:  # a link or a directory with that name is not a lock, and never becomes stale
        return None if not os.path.lexists(file) else (None, time.monotonic())
    try:
        holder = Holder(**json.loads(text))
        holder = Holder(str(holder.token), str(holder.host), int(holder.process), int(holder.started), holder.since)
        return holder, touched
    except (ValueError, TypeError, RecursionError):
        return None, touched


def _take_away(file: Path, stale: Holder | None) -> None:
    """Removes a stale lock, but no other: another waiter may have taken it over a moment ago."""
    aside = file.with_name(f".{file.name}.{unique_token()}.tmp")
    try:
        os.rename(file, aside)
    except FileNotFoundError:
        return
    found = _read(aside)
    try:
        if found is not None and found[0] != stale:
            os.link(aside, file)  # it is live: put it back, unless another was faster, which `check` will notice
    except OSError:
        pass
    finally:
        aside.unlink(missing_ok=True)


def _has_ended(holder: Holder | None) -> bool:
    if holder is None or holder.host != _host():
        return False
    try:
        os.kill(holder.process, 0)
    except ProcessLookupError:
        return True
    except OSError:  # the process exists, and belongs to another user
        pass
    state, started = _status(holder.process)
    reused = 0 not in (started, holder.started) and started != holder.started  # another process has its id now
    return state == "Z" or reused


def _host() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # process ids of two containers cannot be compared
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}".strip()


def _status(process: int) -> tuple[str, int]:
    """Returns the state of a process (Z: it has ended) and when it started; ("", 0) if the system does not say."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            # the second field is the name of the program in parentheses, which may contain anything
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except (OSError, ValueError, IndexError):
        return "", 0
