"""Files that are either complete or absent: exclusive temporary files, syncing, atomic replacement, safe paths.

Every path that a user passes goes through `local_path`, so that a URL never becomes a local folder.

A *temporary file* is created next to the file it will replace, under a name nobody can guess, and never through a
symbolic link. When its bytes are on the disk, it is renamed over the old file, so a reader sees either the old file or
the new one, even after a crash or a power failure. A *leftover* is a temporary file whose writer was killed; the next
writer that holds the lock of the path removes it. That lock belongs to the system, which releases it when its holder
ends, however it ends.
"""

import contextlib
import errno
import os
import re
import secrets
import socket
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePath, PurePosixPath
from typing import BinaryIO

NOT_A_PATH = "Expected a path, got {got}. The path comes first: nnx.save(path, model), nnx.load(path, model)."
URL_NOT_LOCAL = """{path!r} is a URL, and files are read and written on local disks only: object stores and other \
remote file systems are not supported yet, and nothing is fetched from a network. {advice}"""

COPY_IT = "Use a local directory, and copy it with the tools of the store."

DROP_SCHEME = "Write the path without its scheme: {path!r}."

OUTSIDE = "{name!r} is not the path of a file inside {directory}: {reason}"

LOCKED = """{path} is being written by another job: {holder}. Waited {waited:.0f} s for it to finish. Give each job \
its own path."""

WAIT = 60.0
"""The number of seconds a second writer of a path waits before it gives up."""

_O_BINARY = getattr(os, "O_BINARY", 0)  # Windows translates line ends without it, and has no O_NOFOLLOW
_O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp", re.DOTALL)
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://")
_PARSED_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):[/\\]")  # two letters at least: `C:/` is a drive


# What users pass


def path_text(path: str | os.PathLike[str]) -> str:
    """Returns a path that a user passed as text."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(NOT_A_PATH.format(got=type(path).__name__))
    return os.fsdecode(os.fspath(path))


def local_path(path: str | os.PathLike[str]) -> Path:
    """Returns a path that a user passed as a Path.

    Raises:
        ValueError: it is a URL, or was one before `pathlib` took it apart.
    """
    text = path_text(path)
    # `pathlib.Path("gs://bucket")` is `gs:/bucket`.
    url = _PARSED_URL.match(text) if isinstance(path, PurePath) else _URL.match(text)
    if url is not None or "://" in text:
        is_file = url is not None and url["scheme"].lower() == "file"
        advice = DROP_SCHEME.format(path="/" + text[5:].lstrip("/")) if is_file else COPY_IT
        raise ValueError(URL_NOT_LOCAL.format(path=text, advice=advice))
    return Path(path)


# Writing


def unique_token() -> str:
    """Returns 16 hexadecimal digits that no other writer has."""
    return secrets.token_hex(8)


def open_exclusive(path: Path) -> BinaryIO:
    """Creates a file for reading and writing that did not exist before.

    Raises:
        FileExistsError: there is something at the path, even if it is a dangling symbolic link.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _O_NOFOLLOW | _O_BINARY
    return os.fdopen(os.open(path, flags, 0o666), "w+b")


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a file that replaces `path` when the block ends, complete and on the disk.

    If the block raises, the old file is kept and the temporary one is removed.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/notes"
    >>> with atomic_file(path) as file:
    ...     _ = file.write(b"all of it")
    >>> Path(path).read_bytes()
    b'all of it'
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{unique_token()}.tmp")
    file = open_exclusive(temporary)
    try:
        with file:
            yield file
            sync_file(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_file(file: BinaryIO) -> None:
    """Flushes an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flushes a directory to the disk: the files created, renamed and removed in it."""
    if os.name == "nt":  # Windows cannot open a directory, and writes its entries at once
        return
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # what file systems answer that cannot, such as some network disks
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Lets one writer of a path at a time into the block, among threads, processes, and hosts that share a disk.

    On a disk that has no locks everybody enters. Files are replaced in one step even then, so readers never see a
    mixture of two writes, but a writer can fail.

    Raises:
        TimeoutError: another writer is in the block; the message names it.
        OSError: there is a link or a directory in the place of the lock.
    """
    file = path.with_name(f".{path.name}.lock")
    begun = time.monotonic()
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | _O_NOFOLLOW | _O_BINARY, 0o666)
        try:
            if _lock(handle) and _is_at(handle, file):
                text = f"process {os.getpid()} on host {socket.gethostname()}, since {time.strftime('%F %T')}"
                os.truncate(handle, 0)
                os.write(handle, text.encode())
                try:
                    yield
                finally:
                    with contextlib.suppress(OSError):  # before it is released: a waiter that opened it tries again
                        os.unlink(file)
                return
            waited = time.monotonic() - begun
            if waited >= WAIT:
                holder = os.read(handle, 200).decode(errors="replace") or "unknown"
                raise TimeoutError(LOCKED.format(path=path, holder=holder, waited=waited))
        finally:
            os.close(handle)  # which releases the lock
        time.sleep(0.02)


def _lock(handle: int) -> bool:
    """Locks an open file, unless somebody else has; returns whether it did, or the disk has no locks."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
    return True


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def remove_leftovers(directory: Path, name: str | re.Pattern[str] | None = None) -> list[Path]:
    """Removes the temporary files of killed writers and returns their paths.

    Only the holder of the lock of that path may call it: for anyone else, a temporary file might be in use.

    Args:
        directory: the directory of the files that the temporary files would have replaced.
        name: the name of the file, or a pattern for the whole name; None for any.
    """
    pattern = name if isinstance(name, re.Pattern) else re.compile(".*" if name is None else re.escape(name), re.DOTALL)
    found = []
    for path in directory.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match is not None and pattern.fullmatch(match["name"]) and not path.is_dir():
            path.unlink(missing_ok=True)
            found.append(path)
    return found


def remove_empty(directory: Path) -> None:
    """Removes a directory if there is nothing in it."""
    with contextlib.suppress(OSError):
        directory.rmdir()


# Reading


def inside(directory: Path, name: str) -> Path:
    """Returns the path of a file named in another file, after checking that it is inside the directory.

    Args:
        directory: the directory.
        name: a relative path with `/`, as found in a manifest or an index.

    Raises:
        ValueError: the path is absolute, leads out of the directory, or passes through a symbolic link.
    """
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    reason = ""
    if not parts or "\0" in name or "\\" in name:
        reason = "it is not a name"
    elif name.startswith("/") or ".." in parts or ":" in parts[0]:
        reason = "it leads outside"
    if not reason:
        path = directory
        for part in parts:
            path = path / part
            if path.is_symlink():
                reason = f"{part!r} is a symbolic link"
                break
        else:
            return path
    raise ValueError(OUTSIDE.format(name=name, directory=directory, reason=reason))


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading, unbuffered, without following a symbolic link.

    Raises:
        OSError: the file does not exist, or is a link, a directory, a pipe or a device.
    """
    # Without O_NONBLOCK, opening a pipe that somebody planted would wait for a writer.
    handle = os.open(path, os.O_RDONLY | _O_NOFOLLOW | _O_BINARY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(handle, "rb", buffering=0)
