"""One call of a foreign model: its method and arguments, and how the mode, flags and keys get into them.

A *mode argument* is one with which other libraries switch between training and evaluation. Its value in training is in
`IN_TRAINING`; in evaluation it is the opposite. `train()` and `eval()` decide first, then the flags of the Context.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax

from nnx.core.context import Context

IN_TRAINING = {
    "deterministic": False,
    "use_running_average": False,
    "inference": False,
    "train": True,
    "training": True,
    "is_training": True,
}
"""The mode arguments, with their values in training."""


@dataclasses.dataclass(frozen=True)
class ForeignCall:
    """A call of a foreign model.

    Attributes:
        method: the name of the method.
        args: the positional arguments.
        kwargs: the keyword arguments.
        ctx: the Context of the call, if it has one.
        training: the mode that `train()` or `eval()` has set, if one did.
    """

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ctx: Context | None
    training: bool | None

    def mode(self, name: str) -> bool | None:
        """Returns the value of a mode argument; None if nothing decides it.

        A flag of the argument's own name counts before one of the others: the flag `deterministic` fills `train`, too.
        """
        training = self.training
        if training is None and self.ctx is not None:
            if self.ctx.has_flag(name):
                return self.ctx.get_flag(name)
            decided = [flag for flag in IN_TRAINING if isinstance(self.ctx.get_flag(flag), bool)]
            training = (IN_TRAINING[decided[0]] is self.ctx.get_flag(decided[0])) if decided else None
        return None if training is None else IN_TRAINING[name] is training

    def kwargs_for(self, function: Callable[..., Any], given: int) -> dict[str, Any]:
        """Returns the keyword arguments, completed by the mode and the flags that the function takes and lacks.

        Args:
            function: the function or bound method to be called.
            given: the number of its arguments that are passed by position.
        """
        filled = dict(self.kwargs)
        for position, parameter in enumerate(parameters_of(function)):
            name = parameter.name
            by_position = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            if name in filled or not (by_position or parameter.kind is parameter.KEYWORD_ONLY):
                continue
            if by_position and position < given:
                continue
            if name in IN_TRAINING:
                mode = self.mode(name)
                if mode is not None:
                    filled[name] = mode
            elif self.ctx is not None and self.ctx.has_flag(name):
                filled[name] = self.ctx.get_flag(name)
        return filled

    def key(self, stream: str) -> jax.Array | None:
        """Returns a new key from a stream of the Context; None if there is no such stream."""
        return self.ctx.make_rng(stream) if self.ctx is not None and self.ctx.has_rng(stream) else None

    def keys(self) -> dict[str, jax.Array]:
        """Returns a new key from every stream of the Context but "params", which initializes."""
        keys = {} if self.ctx is None else self.ctx.partition().keys
        return {name: key for name, key in keys.items() if name != "params"}


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns the parameters of a function; none if Python does not know them."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
