"""`prefetch`: moving batches to the devices before the step asks for them."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

B = TypeVar("B")

WRONG_SIZE = "nnx.prefetch: size is the number of batches to keep on the devices, an int of at least 1; got {size!r}."
NOT_ITERABLE = "nnx.prefetch takes an iterable of batches; got {got}."


def prefetch(iterable: Iterable[B], size: int = 2, sharding: Any = None) -> Iterator[B]:
    """Yields the batches of an iterable with their arrays on the devices, transferring ahead of the step.

    JAX transfers and computes asynchronously: while a step runs, the next batches are read and transferred. Batches
    are copied first, so a loader can reuse its buffers.

    Args:
        iterable: the batches, pytrees of arrays.
        size: the number of batches to hold on the devices.
        sharding: the sharding of the arrays, or a pytree of shardings that is a prefix of a batch; by default, the
            default device. If it spans several processes, each passes its own part of the batch.

    Raises:
        TypeError: `iterable` cannot be iterated over.
        ValueError: `size` is not a positive int.

    >>> batches = [{"x": np.full(2, i)} for i in range(3)]
    >>> [int(batch["x"][0]) for batch in nnx.prefetch(batches)]
    [0, 1, 2]
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(WRONG_SIZE.format(size=size))
    if not isinstance(iterable, Iterable):
        raise TypeError(NOT_ITERABLE.format(got=type(iterable).__name__))
    return _ahead(iter(iterable), size, lambda batch: _put(batch, sharding))


def _ahead(iterator: Iterator[B], size: int, put: Callable[[B], B]) -> Iterator[B]:
    waiting: deque[B] = deque()
    failure: Exception | None = None
    more = True
    while True:
        while more and len(waiting) < size:
            try:
                waiting.append(put(next(iterator)))
            except StopIteration:
                more = False
            except Exception as error:  # raised when its turn comes, after the batches before it
                failure, more = error, False
        if not waiting:
            break
        yield waiting.popleft()
    if failure is not None:
        raise failure


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
