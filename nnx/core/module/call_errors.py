"""What the error of a failed call of a Module says besides the message of JAX: whose habit it was, or what is wrong.

Nothing here runs unless a call has raised a TypeError or ValueError.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from nnx.core.context import context
from nnx.core.foreign_models import refuse_foreign_model
from nnx.core.hints.hints import call_hint
from nnx.core.module.info import class_of, info_of, values_of
from nnx.core.module.kinds import STATIC
from nnx.core.repr import short
from nnx.core.structure.walk import named_modules
from nnx.core.variables.variables import Spec

MISSHAPED = """{name!r} of the {layer}{where} is {got}, and with {settings} it would be {expected}: a value of another \
shape was assigned to it."""

_ABOUT_SHAPES = re.compile("shape|dimension|broadcast|compatible|axis|axes|size|rank")
_ORIGINAL = "_nnx_original"  # the attribute of an error with its text before a hint was added

MAX_LAYERS = 256  # to look at, since the error may be one that the caller expects


def explain_call(
    module: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> None:
    """Adds a hint to the message of an error that a call of a Module raised, if there is one."""
    if type(error) not in (TypeError, ValueError):  # the text of others may be made of several arguments
        return
    text = getattr(error, _ORIGINAL, str(error))
    try:
        hint = call_hint(function, text) or _foreign_input(module, args, kwargs)
        if hint is None and _ABOUT_SHAPES.search(text):  # stacked layers have other shapes than were built, rightly
            hint = _misshaped(module)
    except Exception:  # what was wrong with the call may be in the way here, too
        hint = None
    if hint is not None and hint not in text:
        setattr(error, _ORIGINAL, text)  # an outer call sees the error again, and knows a longer path of the layer
        error.args = (f"{text.removesuffix('.')}. {hint}",)


def _foreign_input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    try:
        for value in (*args, *kwargs.values()):
            refuse_foreign_model(value, class_of(module).__name__)
    except TypeError as error:
        return str(error)
    return None


def _misshaped(root: Any) -> str | None:
    """Returns what is wrong with the first parameter of a layer that does not have the shape it was built with."""
    expected: dict[Any, Mapping[str, Any]] = {}
    for number, (path, layer) in enumerate(named_modules(root)):
        cls = class_of(layer)
        if number >= MAX_LAYERS or not cls.__module__.startswith("nnx.nn."):
            continue
        settings = _settings(layer, cls)
        if settings is None:
            continue
        known = (cls, *map(repr, settings.items()))
        if known not in expected:
            expected[known] = _parameters_when_built(cls, settings)
        for name, built in expected[known].items():
            now: Any = values_of(layer).get(name)
            if hasattr(now, "shape") and now.shape != built.shape:
                at = info_of(layer).path or path
                required = [n for n, p in _parameters(cls).items() if p.default is p.empty and n in settings]
                return MISSHAPED.format(
                    name=name,
                    layer=cls.__name__,
                    where=f" at {at!r}" if at else "",
                    got=short(now).removeprefix("traced "),
                    settings=", ".join(f"{n}={settings[n]!r}" for n in required),
                    expected=short(built).removeprefix("ShapeDtypeStruct(").removesuffix(")"),
                )
    return None


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(cls.__init__).parameters.items() if name not in ("self", "ctx")}


def _settings(layer: Any, cls: type) -> dict[str, Any] | None:
    """Returns the arguments that build such a layer, which it keeps as attributes; None if it keeps too few."""
    kinds, values = info_of(layer).kinds, values_of(layer)
    parameters = _parameters(cls)
    settings = {name: values[name] for name in parameters if kinds.get(name) is STATIC}
    missing = (n for n, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD)
    return None if any(name not in settings for name in missing) else settings


def _parameters_when_built(cls: type, settings: dict[str, Any]) -> Mapping[str, Any]:
    """Returns the variables of a newly built layer, as shapes."""
    takes_ctx = "ctx" in inspect.signature(cls.__init__).parameters

    def build() -> dict[str, Any]:
        layer = cls(**settings, **({"ctx": context(0)} if takes_ctx else {}))
        return {n: values_of(layer)[n] for n, kind in info_of(layer).kinds.items() if type(kind) is Spec}

    return jax.eval_shape(build)
