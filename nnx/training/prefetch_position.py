"""The position of a data loader: read after each batch, and set to resume."""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

PROTOCOLS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
"""The methods of a loader that can be resumed: Grain and others have the first pair, PyTorch's loaders the second."""


class Position(NamedTuple):
    """A position, or why the loader cannot tell it."""

    value: Any
    failure: Exception | None = None

    def state(self) -> Any:
        """Returns the position, or raises what the loader raised."""
        if self.failure is not None:
            raise self.failure
        return copy.deepcopy(self.value)


class Loader(NamedTuple):
    """The object whose position counts, and the names of its methods.

    It is the iterator if that has the methods. Loaders whose iterators have none (PyTorch's, Hugging Face's) take a
    state before a new iterator is made.
    """

    owner: Any
    is_iterator: bool
    get: str
    set: str

    def position(self) -> Position:
        """Returns the position of now."""
        try:
            # A copy: some loaders return the object that they go on to change.
            return Position(copy.deepcopy(getattr(self.owner, self.get)()))
        except Exception as error:  # not every source has one, and most runs do not ask for it
            return Position(None, error)

    def resume(self, iterator: Iterator[Any], state: Any) -> Iterator[Any]:
        """Sets the position and returns the iterator to go on with."""
        getattr(self.owner, self.set)(copy.deepcopy(state))
        return iterator if self.is_iterator else iter(self.owner)


def loader_of(iterable: Any, iterator: Iterator[Any]) -> Loader | None:
    """Returns the Loader of an iterable and its iterator, or None if it cannot be resumed."""
    for owner in (iterator, iterable):
        for get, set_ in PROTOCOLS:
            if callable(getattr(owner, get, None)) and callable(getattr(owner, set_, None)):
                return Loader(owner, owner is iterator, get, set_)
    return None
