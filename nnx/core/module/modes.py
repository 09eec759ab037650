"""Modes: switching every layer of a model between training and evaluation at once.

A layer takes its mode from the call, else from its own attribute, else from the Context's flag. Functions here set the
attribute, so a call can still override it, and `None` leaves the decision to the Context.
"""

from collections.abc import Iterable
from typing import Any

from nnx.core.context import Context
from nnx.core.module.info import ModuleBase, info_of, values_of
from nnx.core.module.kinds import STATIC
from nnx.core.state.updates import check_levels
from nnx.core.structure.walk import number_modules

MODES = {"deterministic": False, "use_running_average": False, "update_stats": True}
"""The attributes that are a mode, with their values in training; in evaluation they have the opposite ones."""


def set_mode(model: Any, training: bool | None) -> None:
    """Sets the mode of every layer in a Module that has one.

    Args:
        model: the Module.
        training: True for training, False for evaluation, None to leave the mode to the Context's flags again.

    Raises:
        TypeError: `model` is not a Module.

    >>> model = nnx.Sequence([nnx.Linear(2, 2, ctx=nnx.context(0)), nnx.Dropout(0.5)])
    >>> nnx.set_mode(model, training=False)
    >>> model[1].deterministic
    True
    """
    if not isinstance(model, ModuleBase):
        raise TypeError(f"nnx.set_mode takes a Module, got {type(model).__name__}.")
    layers = [module for module in number_modules((model,)).modules if _modes_of(module)]
    check_levels(layers, "setting the mode")
    for layer in layers:
        for name in _modes_of(layer):
            setattr(layer, name, None if training is None else MODES[name] is training)


def evaluate_where_unset(model: Any, contexts: Iterable[Context]) -> None:
    """Sets every mode that neither its layer nor a flag of one of the Contexts decides to that of evaluation."""
    unset = [name for name in MODES if all(ctx.get_flag(name) is None for ctx in contexts)]
    for layer in number_modules((model,)).modules:
        for name in _modes_of(layer):
            if name in unset and values_of(layer)[name] is None:
                setattr(layer, name, not MODES[name])


def _modes_of(module: Any) -> list[str]:
    kinds, values = info_of(module).kinds, values_of(module)
    return [
        name for name in MODES if kinds.get(name) is STATIC and (values[name] is None or type(values[name]) is bool)
    ]
