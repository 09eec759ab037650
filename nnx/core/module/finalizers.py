"""`__del__` on a class of Modules: refused, because Python would call it on copies that the user never sees.

A transform rebuilds the Modules of a call from their state, and drops them when the function has been traced.
"""

from typing import Any

DEFINES_DEL = """{owner} has a __del__ method{origin}. Transforms make copies of a Module and drop them, and Python \
calls __del__ on every copy: a file is closed by the first nnx.grad. Say what is to happen when the object itself dies:

    def __init__(self, path):
        self.file = open(path)
        weakref.finalize(self, self.file.close)

If the method comes from a class you cannot change, and may run on copies: \
class {owner}(..., finalizers=True)."""


def refuse_del(cls: Any, assigned: Any = None) -> None:
    """Raises TypeError if a class of Modules has `__del__`, or is assigned one, and has not opted out."""
    if cls._nnx_finalizers or (assigned is None and getattr(cls, "__del__", None) is None):
        return
    definer = cls if assigned is not None else next(base for base in cls.__mro__ if "__del__" in vars(base))
    origin = "" if definer is cls else f", from {definer.__name__}"
    raise TypeError(DEFINES_DEL.format(owner=cls.__name__, origin=origin))
