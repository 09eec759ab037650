"""`prefetch`: moving batches to the devices before the step asks for them.

A loader that can be resumed has a *position*: what `get_state()` or `state_dict()` returns. Reading ahead moves it past
the batch that was yielded last, so each waiting batch keeps the position that belongs to it.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from nnx.core.user_warnings import warn_user
from nnx.training.prefetch_batches import check_batch
from nnx.training.prefetch_position import Loader, Position, loader_of

B = TypeVar("B")

WRONG_SIZE = "nnx.prefetch: size is the number of batches to keep on the devices, an int of at least 1; got {size!r}."
NOT_ITERABLE = "nnx.prefetch takes an iterable of batches; got {got}."


def prefetch(iterable: Iterable[B], size: int = 2, sharding: Any = None) -> "Prefetch[B]":
    """Yields the batches of an iterable with their arrays on the devices, transferring ahead of the step.

    JAX transfers and computes asynchronously: while a step runs, the next batches are read and transferred. Batches
    are copied first, so a loader can reuse its buffers.

    If the loader can be resumed (its iterator or itself has `get_state` and `set_state`, or `state_dict` and
    `load_state_dict`), the result has these methods, too. The state is that of the batch yielded last, not of those
    read ahead, so saving it in a checkpoint resumes exactly.

    Args:
        iterable: the batches, pytrees of arrays.
        size: the number of batches to hold on the devices.
        sharding: the sharding of the arrays, or a pytree of shardings that is a prefix of a batch; by default, the
            default device. If it spans several processes, each passes its own part of the batch.

    Raises:
        TypeError: `iterable` cannot be iterated over, or a batch holds strings or other objects than arrays.
        ValueError: `size` is not a positive int.

    >>> batches = [{"x": np.full(2, i)} for i in range(3)]
    >>> [int(batch["x"][0]) for batch in nnx.prefetch(batches)]
    [0, 1, 2]
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(WRONG_SIZE.format(size=size))
    if not isinstance(iterable, Iterable):
        raise TypeError(NOT_ITERABLE.format(got=type(iterable).__name__))
    iterator = iter(iterable)
    loader = loader_of(iterable, iterator)
    return Prefetch(iterator, size, sharding) if loader is None else ResumablePrefetch(iterator, size, sharding, loader)


class _Waiting(NamedTuple):
    """A batch on the devices, and the position of the loader after it."""

    batch: Any
    position: Position | None


class Prefetch(Iterator[B], Generic[B]):
    """What `nnx.prefetch` returns: an iterator over batches on the devices."""

    def __init__(self, iterator: Iterator[B], size: int, sharding: Any):
        self._iterator = iterator
        self._size = size
        self._sharding = sharding
        self._start()

    def _start(self) -> None:
        self._waiting: deque[_Waiting] = deque()
        self._failure: BaseException | None = None
        self._warned = False
        self._more = True

    def __next__(self) -> B:
        while self._more and len(self._waiting) < self._size:
            try:
                self._waiting.append(self._read())
            except StopIteration:
                self._more = False
            except Exception as error:  # raised when its turn comes, after the batches before it
                self._failure, self._more = error, False
        if self._waiting:
            return self._yielded(self._waiting.popleft())
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        raise StopIteration

    def _read(self) -> _Waiting:
        batch = next(self._iterator)
        warning = check_batch(batch)
        if warning is not None and not self._warned:
            self._warned = True
            warn_user(warning)
        return _Waiting(_put(batch, self._sharding), self._position())

    def _position(self) -> Position | None:
        return None

    def _yielded(self, waiting: _Waiting) -> B:
        return waiting.batch


class ResumablePrefetch(Prefetch[B]):
    """What `nnx.prefetch` returns for a loader that can be resumed."""

    def __init__(self, iterator: Iterator[B], size: int, sharding: Any, loader: Loader):
        super().__init__(iterator, size, sharding)
        self._loader = loader
        self._last = loader.position()

    def get_state(self) -> Any:
        """Returns the state of the loader after the batch that was yielded last."""
        return self._last.state()

    def set_state(self, state: Any) -> None:
        """Continues after the batch that a state belongs to. What was read ahead is dropped."""
        self._iterator = self._loader.resume(self._iterator, state)
        self._start()
        self._last = self._loader.position()

    def state_dict(self) -> Any:
        """Returns the same as `get_state`, under the name that PyTorch's loaders use."""
        return self.get_state()

    def load_state_dict(self, state: Any) -> None:
        """Does the same as `set_state`, under the name that PyTorch's loaders use."""
        self.set_state(state)

    def _position(self) -> Position:
        return self._loader.position()

    def _yielded(self, waiting: _Waiting) -> B:
        assert waiting.position is not None
        self._last = waiting.position
        return waiting.batch


def _put(batch: Any, sharding: Any) -> Any:
    if sharding is None:
        return jax.device_put(jax.tree.map(_own, batch))
    return jax.tree.map(lambda each, part: jax.tree.map(lambda x: _place(x, each), part), sharding, batch)


def _place(array: Any, sharding: Any) -> Any:
    array = _own(array)
    if isinstance(array, np.ndarray) and not sharding.is_fully_addressable:
        return jax.make_array_from_process_local_data(sharding, array)
    return jax.device_put(array, sharding)


def _own(array: Any) -> Any:
    # Transfers from NumPy memory are asynchronous, and on a CPU there is none: the array is used where it is. A loader
    # that writes the next batch into the same buffer would change this one.
    return np.array(array) if isinstance(array, np.ndarray) else array
