"""Any path: local directories and URLs of object stores, as places where keys have values.

A *location* is a local directory, or a prefix in an object store: `gs://bucket/run`, `s3://bucket/run`, or `memory://run`
in this process. Keys below it are read and written through TensorStore, which is imported on the first use. A value has
a *generation*, which differs after every write. A write that names the generation it replaces fails if another writer
was faster, on every store: that is what makes checkpoints safe without locks.

Credentials and endpoints come from the environment, as the tools of the stores read them: `AWS_ACCESS_KEY_ID`,
`AWS_REGION`, `AWS_ENDPOINT_URL`, and Google's application default credentials.
"""

import contextlib
import dataclasses
import functools
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple
from urllib.parse import unquote

from nnx.storage.files import path_text, sync_directory

UNKNOWN_SCHEME = """{path!r} is a URL that cannot be read or written. A path is local, or begins with file://, gs://, \
s3:// or memory://."""
COLLAPSED = """{path!r} was a URL before pathlib took it apart. Pass it as a string, or as an etils.epath.Path."""
NO_BUCKET = "{path!r} does not name a bucket and a path in it: {scheme}://bucket/path."
OTHER_HOST = "{path!r} is on another host. A file:// URL has three slashes: file:///path."
DOTS = "{path!r} contains {segment!r}, which means nothing in an object store."

RETRIES = {"max_retries": 6, "initial_delay": "500ms", "max_delay": "16s"}
"""How long a request is repeated: about a minute, instead of the fifteen of TensorStore."""

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://(?P<rest>.*)", re.DOTALL)
_COLLAPSED_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:[/\\]")  # two letters at least: `C:/` is a drive


@functools.cache
def tensorstore() -> Any:
    """Returns the library, imported on the first call because that takes time."""
    import tensorstore

    return tensorstore


@functools.cache
def context() -> Any:
    """Returns the resources that everything in this process shares, such as the values of `memory://`."""
    return tensorstore().Context({"gcs_request_retries": RETRIES, "s3_request_retries": RETRIES})


class StoredValue(NamedTuple):
    """The value of a key, None if there is none, and the generation of either."""

    value: bytes | None
    generation: bytes


@dataclasses.dataclass(frozen=True)
class Location:
    """A directory, or a prefix in an object store.

    Attributes:
        name: the path or URL, for messages.
        local: the directory, if it is on a local disk.
        spec: the description of the key-value store for TensorStore, without the path.
        path: the path in that store, with a slash at the end.
    """

    name: str
    local: Path | None
    spec: Mapping[str, Any]
    path: str

    def __str__(self) -> str:
        return self.name

    def __fspath__(self) -> str:
        return self.name

    def __truediv__(self, key: str) -> "Location":
        local = None if self.local is None else self.local / key
        return Location(f"{self.name.rstrip('/')}/{key}", local, self.spec, f"{self.path}{key}/")

    def store(self, *, sync: bool = True) -> dict[str, Any]:
        """Returns the description of this location for TensorStore.

        Args:
            sync: whether a write to a local disk ends only when it is on the disk.
        """
        return {**self.spec, "path": self.path, **({} if sync or self.local is None else {"file_io_sync": False})}

    def _keys(self) -> Any:
        return tensorstore().KvStore.open(self.store(), context=context()).result()

    # Reading

    def read(self, key: str, size: int | None = None) -> StoredValue:
        """Returns the value of a key, or the first bytes of it.

        Raises:
            OSError: it cannot be read, or is a link, a directory, a pipe or a device.
        """
        if self.local is not None:
            refuse_special(self.local / key)
        with _as_os_errors():
            found = self._keys().read(key, byte_range=None if size is None else slice(0, size)).result()
        return StoredValue(found.value if found.state == "value" else None, found.stamp.generation)

    def heads(self, keys: Sequence[str], size: int) -> list[bytes | None]:
        """Returns the first bytes of the value of each key, None where there is none."""
        if self.local is not None:
            return [_head(self.local / key, size) for key in keys]
        with _as_os_errors():
            store = self._keys()
            reads = [store.read(key) for key in keys]
            return [found.value[:size] if found.state == "value" else None for found in (r.result() for r in reads)]

    def ranges(self, wanted: Mapping[str, range]) -> dict[str, bytes]:
        """Returns a range of the bytes of the values of some keys; nothing for those that have none."""
        if not wanted:
            return {}
        with _as_os_errors():
            store = self._keys()
            reads = {key: store.read(key, byte_range=slice(at.start, at.stop)) for key, at in wanted.items()}
            return {key: read.result().value for key, read in reads.items() if read.result().state == "value"}

    def names(self) -> list[str]:
        """Returns the names of the files and folders here; empty if there is no such directory."""
        if self.local is not None:
            return sorted(os.listdir(self.local)) if self.local.is_dir() else []
        with _as_os_errors():
            return sorted({key.decode().partition("/")[0] for key in self._keys().list().result()})

    # Writing

    def replace(self, key: str, value: bytes | None, generation: bytes) -> bytes | None:
        """Replaces or removes the value of a key, unless it was changed in the meantime.

        Args:
            key: the key.
            value: the new value; None removes it.
            generation: the generation of the value to replace, from an earlier call.

        Returns:
            The new generation; None if another writer was faster, in which case nothing was changed.

        Raises:
            OSError: the value could not be written.
        """
        try:
            with _as_os_errors():
                written = _result(self._keys().write(key, value, if_equal=generation)).generation
        except OSError:
            # It may have been written nevertheless: the answer of the store was lost, or the file system cannot sync
            # directories (EINVAL). No other writer writes the same value, so reading it settles the question.
            found = self.read(key)
            if found.value != value or value is None:
                raise
            return found.generation
        return written or None

    def write(self, key: str, value: bytes) -> None:
        """Writes a value, whatever was there before."""
        while self.replace(key, value, self.read(key).generation) is None:
            pass

    def remove(self, names: Iterable[str]) -> None:
        """Removes files, or folders with everything in them. What is not there, or is a link, is left alone."""
        for name in names:
            if self.local is not None:
                _remove_local(self.local / name)
            else:
                with _as_os_errors():
                    store, keys = self._keys(), tensorstore().KvStore.KeyRange
                    store.delete_range(keys(f"{name}/", f"{name}0")).result()  # "0" is the character after "/"
                    store.write(name, None).result()

    def sync(self) -> None:
        """Flushes a new directory on a local disk: the directory it was created in lists it."""
        if self.local is not None:
            sync_directory(self.local.parent)


def location(path: str | os.PathLike[str]) -> Location:
    """Returns the location of a path that a user passed; a location is returned as it is.

    Raises:
        ValueError: it is a URL that cannot be read, or was one before `pathlib` took it apart.

    >>> location("s3://bucket/run").path
    'run/'
    """
    if isinstance(path, Location):
        return path
    text = path_text(path)
    url = _URL.fullmatch(text)
    if url is None:
        if "://" in text:
            raise ValueError(UNKNOWN_SCHEME.format(path=text))
        if isinstance(path, PurePath) and _COLLAPSED_URL.match(text):
            raise ValueError(COLLAPSED.format(path=text))
        return _local(text)
    scheme, rest = url["scheme"].lower(), url["rest"]
    if scheme == "file":
        if not rest.startswith("/"):
            raise ValueError(OTHER_HOST.format(path=text))
        return _local(unquote(rest))
    if scheme not in ("gs", "s3", "memory"):
        raise ValueError(UNKNOWN_SCHEME.format(path=text))
    rest = rest.rstrip("/")
    segment = next((part for part in rest.split("/") if part in (".", "..")), None)
    if segment is not None:
        raise ValueError(DOTS.format(path=text, segment=segment))
    name = f"{scheme}://{rest}"
    if scheme == "memory":
        return Location(name, None, {"driver": "memory"}, f"{rest}/")
    bucket, slash, key = rest.partition("/")
    if not bucket or not key:
        raise ValueError(NO_BUCKET.format(path=text, scheme=scheme))
    spec = {"driver": "gcs", "bucket": bucket} if scheme == "gs" else {"driver": "s3", "bucket": bucket, **_endpoint()}
    return Location(name, None, spec, f"{key}/")


def _local(text: str) -> Location:
    directory = Path(text).absolute()
    return Location(str(directory), directory, {"driver": "file"}, f"{os.path.realpath(directory)}/")


def _endpoint() -> dict[str, Any]:
    """Returns the region and endpoint of S3, from the variables that the tools of AWS read."""
    found: dict[str, Any] = {
        "endpoint": os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
        "aws_region": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
    }
    if found["endpoint"] and not found["aws_region"]:  # stores that are not Amazon's have no regions
        found["aws_region"] = "us-east-1"
    if os.environ.get("AWS_ACCESS_KEY_ID"):  # or TensorStore looks for files first, and logs that there are none
        found["aws_credentials"] = {"type": "environment"}
    return {name: value for name, value in found.items() if value}


def _result(future: Any) -> Any:
    """Returns the result of a write. Ctrl-C waits for it: nothing may be written once the caller has cleaned up."""
    try:
        return future.result()
    except KeyboardInterrupt:
        future.exception()
        raise


def reason_of(error: BaseException) -> str:
    """Returns the message of TensorStore without the description of the store, which is long."""
    return re.split(r" \[(?:\w+=|source locations)", str(error).splitlines()[0] if str(error) else "")[0]


@contextlib.contextmanager
def _as_os_errors() -> Any:
    """Turns the errors of TensorStore, which are ValueErrors of any kind, into an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(reason_of(error)) from error


# Local files


def refuse_special(path: Path) -> None:
    """Raises an OSError if there is something else than a regular file at a path: a link, a directory, a pipe."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISREG(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
        raise OSError(f"{path.name} is {what}")


def _head(path: Path, size: int) -> bytes | None:
    try:
        refuse_special(path)
        with open(path, "rb") as file:
            return file.read(size)
    except OSError:
        return None


def _remove_local(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif not path.is_symlink():
        path.unlink(missing_ok=True)
