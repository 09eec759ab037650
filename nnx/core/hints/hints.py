"""Errors that say what a name or habit from Flax, PyTorch, Equinox or an earlier version of NNX is called here.

Nothing here costs anything until a name is not found. The package has a `__getattr__`. Classes have none, because it
would slow down every attribute read; instead, each of their hints is a *non-data descriptor* on the class that raises
AttributeError. What an instance, a subclass or a mixin defines under that name comes first, and `hasattr` is False.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from numbers import Number
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import jax
import numpy as np

from nnx.core.hints import pytorch
from nnx.core.hints.table import CALL, CONSTRUCTOR, FILES, FUNCTIONS, LAYERS, MODELS, PACKAGE, READERS, Hints
from nnx.core.old_names import adds_hint

P = ParamSpec("P")
R = TypeVar("R")

NO_SUCH_NAME = "module {module!r} has no attribute {name!r}."
CALLED = " That name is from {origin}. Here: {hint}."
NO_SUCH_ATTRIBUTE = "{owner!r} object has no attribute {name!r}."
NOT_ASSIGNED = "Cannot assign attribute {name!r} of {owner}, where nothing would read it.{hint}"
WRONG_CTX = "`ctx` must be a Context, got {got}: write `ctx=nnx.context({seed})`."
MISSING_CTX = "Pass a Context, which initializes the parameters: `ctx=nnx.context(0)`."
KEY_AS_ARGUMENT = "Random keys are passed as a Context, by keyword: `ctx=nnx.context(key)`."
NO_CTX = """{owner} initializes no parameters, so its constructor takes neither `ctx` nor `rngs`{call}."""
CTX_OF_A_CALL = ": pass the Context to the call, `layer(x, ctx=ctx)`"
MISSING_CTX_OF_A_CALL = "Pass a Context to the call, such as `ctx=nnx.context(dropout=1)`."
CELL_OF_A_STEP = "A cell takes one step, cell(carry, inputs); nnx.RNN(cell) runs it over a sequence."
KEYWORD = "The argument {name!r} is from {origin}. Here: {hint}."
SWAPPED = "Mind the order of the arguments: {hint}, in PyTorch it is the other way around."
FORWARD_ONLY = """{owner} cannot be called: it defines `forward`, as in PyTorch, but no `__call__`. Rename the method \
to `__call__`, or call model.forward(...)."""
SEQUENCE_OF_ONE = "nnx.Sequence takes its layers in one list: nnx.Sequence([layer1, nnx.relu, layer2])."
CARRY_FIRST = """ Mind the order of the arguments: the Module comes first in nnx.scan(f)(module, carry, xs), and f is \
f(module, carry, x), not f(carry, module, x) as in Flax."""
NO_MODULE_IN_SCAN = """ nnx.scan is a loop over Modules, nnx.scan(f)(module, carry, xs) with f(module, carry, x), and \
it was given none. Without a Module, write `jax.lax.scan(f, carry, xs)` with f(carry, x)."""
NO_ARITHMETIC = """{owner} has no arithmetic: a Module is neither an array nor a pytree of arrays. Its parameters are \
such a pytree, and model.update_state(params) writes new ones into it:

    params = model.filter(nnx.Param)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)"""
NO_STATE_ARITHMETIC = """{owner} has no arithmetic of values (`-` and `|` are those of sets of paths). It is a pytree \
of arrays: jax.tree.map(lambda x: 0.1 * x, state), jax.tree.map(jnp.add, state, other)."""
OPERATORS = tuple("neg add radd sub rsub mul rmul truediv rtruediv pow rpow matmul rmatmul".split())
OUT_SHARDING = "The axis names of a Variable are called `sharding` here, not {name!r}: {type}(x, sharding={value!r})."
FOREIGN_FILE = "{path} is not a checkpoint of NNX, but {reader}. Checkpoints of NNX are directories, from nnx.save."
TORCH_NAMES = """ These look like the names of PyTorch (such as {name!r}): nnx.load_torch_state_dict(model, mapping) \
translates names and layouts."""


# Names


class Hint:
    """A name that is from elsewhere: reading it raises an AttributeError that says what to write instead."""

    __slots__ = ("cls", "name", "text")

    def __init__(self, cls: type, name: str, text: str):
        self.cls = cls
        self.name = name
        self.text = text

    def __get__(self, instance: Any, owner: type) -> Any:
        # In `class Flow(nnx.Module, Invertible)`, what Invertible defines comes after Module, and must still be found.
        found = getattr(super(self.cls, owner if instance is None else instance), self.name, None)
        if found is not None:
            return found
        text = NO_SUCH_ATTRIBUTE.format(owner=owner.__name__, name=self.name) + self.text
        raise AttributeError(text, name=self.name)


class NoOperator(Hint):
    """An arithmetic operator that a class does not have: a TypeError that says what to write instead.

    Operands that may know what to do are asked, as usual in Python: Equinox writes `tree**ω` for arithmetic on pytrees.
    """

    __slots__ = ()

    def __get__(self, instance: Any, owner: type) -> Any:
        try:
            return super().__get__(instance, owner)  # that of a mixin
        except AttributeError:
            if instance is None:
                raise
            return functools.partial(self._apply, owner)

    def _apply(self, owner: type, *others: Any) -> Any:
        numbers = (Number, np.ndarray, jax.Array)
        if all(isinstance(other, numbers) or type(_static(other, self.name)) is NoOperator for other in others):
            raise TypeError(self.text.format(owner=owner.__name__))
        return NotImplemented


def _static(value: Any, name: str) -> Any:
    return inspect.getattr_static(type(value), name, None)


def called(name: str, hints: Hints) -> str:
    """Returns the sentences that say where a name comes from and what to write instead; empty if the table lacks it."""
    for origin, names in hints.items():
        if name in names:
            return CALLED.format(origin=origin, hint=names[name])
    return ""


def add_hints(cls: type, hints: Hints) -> None:
    """Puts hints on a class, except for names that it has itself."""
    for name in [name for names in hints.values() for name in names]:
        if not hasattr(cls, name):
            type.__setattr__(cls, name, Hint(cls, name, called(name, hints)))


def refuse_arithmetic(cls: type, text: str) -> None:
    """Makes arithmetic with an instance an error that says what to write instead, except for operators that it has."""
    for name in [f"__{operator}__" for operator in OPERATORS]:
        if not hasattr(cls, name):
            type.__setattr__(cls, name, NoOperator(cls, name, text))


def add_layer_hints(cls: type) -> None:
    """Puts hints on a class of `nnx.nn`, if there are any for it."""
    if cls.__name__ in LAYERS and cls.__module__.startswith("nnx.nn."):
        add_hints(cls, LAYERS[cls.__name__])


def refuse_name(cls: type, name: str) -> None:
    """Raises AttributeError if PyTorch would give a meaning to the assignment of a name, and this class has none."""
    if name in pytorch.REFUSED:
        for base in cls.__mro__:
            hint = vars(base).get(name)
            if type(hint) is Hint:
                raise AttributeError(NOT_ASSIGNED.format(name=name, owner=cls.__name__, hint=hint.text), name=name)


def package_error(name: str, in_models: bool) -> AttributeError:
    """Returns the error for a name that the package does not have; `in_models` if `nnx.models` has it."""
    if in_models:
        return AttributeError(NO_SUCH_NAME.format(module="nnx", name=name) + f" Here: nnx.models.{name}.", name=name)
    return AttributeError(NO_SUCH_NAME.format(module="nnx", name=name) + called(name, PACKAGE), name=name)


def models_error(name: str) -> AttributeError:
    """Returns the error for a name that `nnx.models` does not have."""
    return AttributeError(NO_SUCH_NAME.format(module="nnx.models", name=name) + called(name, MODELS), name=name)


# Arguments

_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


def keyword_hint(name: str, hints: Hints) -> str | None:
    """Returns what a keyword argument from elsewhere is called here, or None."""
    for origin, names in hints.items():
        if name in names:
            return KEYWORD.format(name=name, origin=origin, hint=names[name])
    return None


def explain_constructor(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> None:
    """Adds a hint to the message of an error that a constructor raised, if there is one."""
    if type(error) not in (
        TypeError,
        AttributeError,
        ValueError,
    ):  # others may have several arguments
        return
    text = str(error)
    owner = text.partition(".__init__()")[0]  # Python names the class that defines it, which may be a private base
    if owner.startswith("_") and owner in (base.__qualname__ for base in cls.__mro__):
        text = cls.__qualname__ + text.removeprefix(owner)
        error.args = (text,)
    hint = _constructor_hint(cls, args, kwargs, text)
    if hint is not None and hint not in text:  # an outer constructor sees the error of an inner one
        error.args = (f"{text.removesuffix('.')}. {hint}",)


def _constructor_hint(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], text: str) -> str | None:
    unexpected = _UNEXPECTED.search(text)
    name = unexpected[1] if unexpected else None
    ctx = kwargs.get("ctx")
    is_ours = cls.__module__.startswith("nnx.")
    if name in ("ctx", "rngs") and is_ours and not _takes(cls.__init__, "ctx"):
        call = CTX_OF_A_CALL if _takes(cls.__call__, "ctx") else ""
        return NO_CTX.format(owner=cls.__name__, call=call) if text.startswith(f"{cls.__qualname__}.") else None
    if name == "rngs" or (name is not None and is_ours):
        return keyword_hint(name, CONSTRUCTOR)
    if ctx is not None and not hasattr(type(ctx), "make_rng"):
        return WRONG_CTX.format(
            got=type(ctx).__name__, seed="key" if _is_key(ctx) else ctx if isinstance(ctx, int) else 0
        )
    if "required keyword-only argument: 'ctx'" in text:
        return MISSING_CTX
    if "positional arguments but" in text:
        if cls.__name__ == "Sequence":
            return SEQUENCE_OF_ONE
        return KEY_AS_ARGUMENT if is_ours and any(map(_is_key, args)) else None
    if is_ours and cls.__name__ in pytorch.SWAPPED and len(args) >= 2 and all(type(size) is int for size in args[:2]):
        hint, sign = pytorch.SWAPPED[cls.__name__]
        if sign * (args[0] - args[1]) > 0:
            return SWAPPED.format(hint=hint.format(first=args[0], second=args[1]))
    return None


def _takes(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


def _is_key(value: Any) -> bool:
    return "key<" in str(getattr(value, "dtype", ""))


def explain_keywords(fun: Callable[P, R]) -> Callable[P, R]:
    """Adds a hint to the error of a call with a keyword argument that has another name elsewhere."""

    def hint_for(error: TypeError, _: Any) -> str | None:
        found = _UNEXPECTED.search(str(error))
        return keyword_hint(found[1], FUNCTIONS[fun.__qualname__]) if found else None

    return adds_hint(hint_for)(fun)


def call_hint(function: Callable[..., Any], text: str) -> str | None:
    """Returns a hint for an error whose text says that the call of a Module takes other arguments."""
    name = getattr(function, "__qualname__", None)
    unexpected = _UNEXPECTED.search(text)
    if unexpected is not None and text.startswith(f"{name}() got"):
        return keyword_hint(unexpected[1], CALL)
    if text.startswith(f"{name}() missing") and text.endswith("required keyword-only argument: 'ctx'"):
        return MISSING_CTX_OF_A_CALL
    if (
        text.startswith(f"{name}() missing")
        and text.endswith("positional argument: 'inputs'")
        and _takes(function, "carry")
    ):
        return CELL_OF_A_STEP
    return None


def explain_order(error: Exception, has_module: bool) -> None:
    """Adds a hint to the message of an error of a scan whose carry came before the Module, or that has no Module."""
    hint = CARRY_FIRST if has_module else NO_MODULE_IN_SCAN
    if hint not in str(error):  # an outer scan sees the error of an inner one
        error.args = (f"{error}{hint}",)


def refuse_axis_names(metadata: Mapping[str, Any], owner: str) -> None:
    """Raises TypeError if metadata has axis names under the name Flax uses; `owner` names the callee."""
    for name in ("out_sharding", "sharding_names"):
        if name in metadata:
            raise TypeError(OUT_SHARDING.format(type=owner, name=name, value=metadata[name]))


def forward_only(module: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """The `__call__` of a Module class that defines `forward` and no `__call__`."""
    raise TypeError(FORWARD_ONLY.format(owner=type(module).__name__))


# Files


def refuse_foreign_file(path: Path) -> None:
    """Raises ValueError, or FileNotFoundError, if a path is that of a file of another library."""
    if path.suffix in FILES and not path.is_dir():
        reader = READERS[FILES[path.suffix]].format(name=path.name)
        error = ValueError if path.exists() else FileNotFoundError
        raise error(FOREIGN_FILE.format(path=path, reader=reader))


def torch_names_hint(names: list[str]) -> str:
    """Returns a hint if names of arrays look like those of PyTorch; empty otherwise."""
    suspect = next((n for n in names if n.rpartition(".")[2] in ("weight", "running_mean", "in_proj_weight")), None)
    return "" if suspect is None else TORCH_NAMES.format(name=suspect)
