"""What a user calls the values of a split call: argument names, and paths of Variables.

A split call is a list of cells and a tuple of data. Messages speak of `batch['x']` and `'layers/0/kernel' of model`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import SequenceKey, keystr

from nnx.transforms.engine.call import DATA_MARK, Signature

NOT_GIVEN = "not given"


class _ArgumentLeaf:
    """A leaf of the arguments, as it appears in the text of an argument's structure."""

    def __init__(self, mark: int):
        self.text = "array" if mark == DATA_MARK else "Module" if mark >= 0 else "Context"

    def __repr__(self) -> str:
        return self.text


class ArgumentNames:
    """The names of everything in a call of a function.

    Attributes:
        modules: per distinct Module, the name of the argument it is or is in.
        contexts: the same for Contexts.
        data: the name of every other leaf.
        arguments: the structure of every argument as text, by its name.
    """

    def __init__(self, fun: Callable[..., Any], signature: Signature):
        self.signature = signature
        self._parameters = _parameters(fun)
        leaves = [_ArgumentLeaf(mark) for mark in signature.marks]
        args, kwargs = jax.tree.unflatten(signature.treedef, leaves)
        self.modules: list[str] = []
        self.contexts: list[str] = []
        self.data: list[str] = []
        paths = [self._name(path) for path, _ in jax.tree_util.tree_leaves_with_path((args, kwargs))]
        for mark, name in zip(signature.marks, paths, strict=True):
            if mark == DATA_MARK:
                self.data.append(name)
            elif mark == len(self.modules):
                self.modules.append(name)
            elif -2 - mark == len(self.contexts):
                self.contexts.append(name)
        self.arguments = {self._positional(i): repr(arg) for i, arg in enumerate(args)}
        self.arguments |= {name: repr(arg) for name, arg in kwargs.items()}

    def cells(self) -> list[str]:
        """Returns the name of every cell."""
        key = self.signature.key
        if key is None:
            return []
        names = dict(zip(key.roots, self.modules, strict=True))
        return [f"{path!r} of {names[root]}" for root, path in key.cell_roots()]

    def differences(self, other: "ArgumentNames") -> list[str]:
        """Returns how the arguments of another call differ in structure from these."""
        ours, theirs = self.arguments, other.arguments
        names = [*ours, *(name for name in theirs if name not in ours)]
        pairs = [(name, ours.get(name, NOT_GIVEN), theirs.get(name, NOT_GIVEN)) for name in names]
        return [f"{name}: {_cut(before)} -> {_cut(after)}" for name, before, after in pairs if before != after]

    def _name(self, path: tuple[Any, ...]) -> str:
        """Returns the name of a leaf of `(args, kwargs)`."""
        name = path[1].key if path[0].idx == 1 else self._positional(path[1].idx)
        return f"{name}{keystr(path[2:])}"

    def _positional(self, position: int) -> str:
        names, variadic = self._parameters
        if position < len(names):
            return names[position]
        return f"{variadic}{keystr((SequenceKey(position - len(names)),))}" if variadic else f"argument {position}"


def _parameters(fun: Callable[..., Any]) -> tuple[list[str], str]:
    """Returns the names of the positional parameters, and that of `*args` or an empty string."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return [], ""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    variadic = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
    return [p.name for p in parameters if p.kind in positional], variadic[0] if variadic else ""


def _cut(text: str, width: int = 200) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
