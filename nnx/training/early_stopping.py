"""EarlyStopping: ends a run whose metric no longer improves."""

import math
from typing import Any, Literal

NOT_ONE_NUMBER = "EarlyStopping takes one number per evaluation, such as float(loss); got {got}."
BAD_SETTING = "nnx.EarlyStopping: expected {expected}, got {got}."


class EarlyStopping:
    """Decides when to stop: after `patience` evaluations in a row without an improvement.

    A plain Python object, for the loop around the compiled step. NaN is never an improvement.

    Args:
        patience: the number of evaluations without improvement to wait for.
        min_delta: how much better than the best value so far an improvement has to be.
        mode: "min" if smaller is better, as for a loss; "max" if larger is better, as for an accuracy.

    Attributes:
        best: the best value so far; None before the first one.
        stale: the number of evaluations since then.
        improved: whether the last value was the best so far, and so the moment to save the model.

    Raises:
        ValueError: a setting is out of range.

    >>> stop = nnx.EarlyStopping(patience=2)
    >>> [stop(loss) for loss in (0.9, 0.5, 0.6, 0.5)]
    [False, False, False, True]
    >>> stop.best, stop.stale
    (0.5, 2)
    """

    def __init__(self, patience: int, *, min_delta: float = 0.0, mode: Literal["min", "max"] = "min"):
        if not isinstance(patience, int) or patience < 1:
            raise ValueError(BAD_SETTING.format(expected="a patience of at least 1 evaluation", got=repr(patience)))
        if not min_delta >= 0:
            raise ValueError(BAD_SETTING.format(expected="a min_delta of at least 0", got=repr(min_delta)))
        if mode not in ("min", "max"):
            raise ValueError(BAD_SETTING.format(expected='the mode "min" or "max"', got=repr(mode)))
        self.patience = patience
        self.min_delta = min_delta
        self.mode: Literal["min", "max"] = mode
        self.reset()

    def __call__(self, value: Any) -> bool:
        """Takes the value of one evaluation and returns whether to stop.

        Args:
            value: a number, or an array of one element, whose value is waited for.

        Raises:
            TypeError: it is something else.
        """
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(NOT_ONE_NUMBER.format(got=repr(value))) from error
        gain = math.inf
        if self.best is not None:
            gain = self.best - number if self.mode == "min" else number - self.best
        # The first value counts as an improvement, later ones only if they are better, even if min_delta is 0.
        self.improved = not math.isnan(number) and gain > self.min_delta
        if self.improved:
            self.best = number
        self.stale = 0 if self.improved else self.stale + 1
        return self.should_stop

    @property
    def should_stop(self) -> bool:
        """Whether the last `patience` evaluations brought no improvement."""
        return self.stale >= self.patience

    def reset(self) -> None:
        """Forgets all values."""
        self.best: float | None = None
        self.stale: int = 0
        self.improved: bool = False

    def get_state(self) -> dict[str, float | int]:
        """Returns what to save with a checkpoint, for `load_state`; the best value is NaN if there is none."""
        return {"best": math.nan if self.best is None else self.best, "stale": self.stale}

    def load_state(self, state: Any) -> None:
        """Continues where another run was when it called `get_state`."""
        best = float(state["best"])
        self.best = None if math.isnan(best) else best
        self.stale = int(state["stale"])
        self.improved = False

    def __repr__(self) -> str:
        settings = f"patience={self.patience}, min_delta={self.min_delta}, mode={self.mode!r}"
        return f"EarlyStopping({settings}, best={self.best}, stale={self.stale})"
