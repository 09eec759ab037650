"""Portraits: everything about a world that the contract promises, as plain values that can be compared.

A portrait has the class of every Module ever seen, each attribute's kind (the container's type and metadata), values,
static values, the order of attributes and of the items of dicts, which Module is where (by number), which static
containers and pytrees are one object, and which attributes are tied. Of data, values and dtypes count; whether a number
is a Python number, a numpy array or a `jax.Array` does not, since a transform may turn one into another. Static values
keep their exact types.
"""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

import nnx
from tests.fuzz.transforms import Gradient
from tests.fuzz.vocabulary import canonical
from tests.fuzz.walks import attributes, items_of, modules_of, tied, variable_of

Difference = tuple[str, Any, Any]


class Registry:
    """Numbers the Modules of one side, and keeps them.

    Modules that have appeared since the last look are numbered in the order of a walk, so two sides with isomorphic
    graphs that look at the same moments have the same numbers, no matter in which order their Modules were created.
    """

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.modules: list[Any] = []

    def number(self, module: Any) -> int:
        if id(module) not in self.numbers:
            self.numbers[id(module)] = len(self.modules)
            self.modules.append(module)
        return self.numbers[id(module)]

    def see(self, roots: Iterable[Any]) -> None:
        """Numbers what is new: below the roots, then below the Modules seen before, even if they have left the graph.

        Every look has to be this complete. If `portrait` alone went on to the Modules that have left, a side that was
        replayed without portraits would number their new submodules later than a side that was not.
        """
        for module in modules_of([*roots, *self.modules]):
            self.number(module)

    def portrait(self, roots: Iterable[Any] = (), types_only: bool = False) -> dict[str, Any]:
        """Every Module seen so far; `types_only` leaves out values and keeps what decides a compiled function."""
        self.see(roots)
        numbers: dict[int, int] = {}
        homes: dict[int, str] = {}
        lines: dict[str, Any] = {}
        variables: list[Any] = []
        for number, module in enumerate(self.modules):
            lines[f"#{number}"] = type(module).__qualname__
            lines[f"#{number} order"] = (list(vars(module)), list(module) if isinstance(module, nnx.Dict) else None)
            for name, value in attributes(module):
                place = f"#{number}.{name}"
                if isinstance(value, nnx.Module):
                    lines[place] = f"#{self.number(value)}"
                    continue
                variable = variable_of(module, name)
                if variable is None or isinstance(variable, nnx.Static):
                    lines[place] = (type(variable).__name__, canonical(value, numbers, self.number))
                    continue
                if isinstance(variable, nnx.Variable):
                    variables.append((module, name))
                data = concrete(value, numbers) if not types_only else abstract(value)
                if types_only and isinstance(value, (list, dict)):  # one container under two attributes is structure
                    data = (data, homes.setdefault(id(value), place))
                metadata = {key: item for key, item in variable.metadata.items() if item is not None}
                lines[place] = (type(variable).__name__, *([canonical(metadata)] if metadata else []), data)
        groups = [group for group in tied(variables) if len(group) > 1]
        lines["tied"] = [[f"#{self.number(module)}.{name}" for module, name in group] for group in groups]
        return lines

    def result(self, value: Any) -> Any:
        """A function's output."""
        if isinstance(value, nnx.Module):
            return f"#{self.number(value)}"
        if isinstance(value, nnx.State):
            return {path: self.leaf(leaf) for path, leaf in value.items()}
        if isinstance(value, dict):
            return {key: self.result(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)) and not isinstance(value, Gradient):
            return [self.result(item) for item in value]
        return value if value is None or isinstance(value, Gradient) else concrete(value, {})

    def leaf(self, leaf: Any) -> Any:
        """An entry of a State."""
        if isinstance(leaf, nnx.Node):
            return (type(leaf).__name__, self.result(leaf.value))
        return self.result(leaf)


def concrete(value: Any, numbers: dict[int, int]) -> Any:
    """A data value: numbers and arrays by dtype and content, containers by type, content and identity."""
    if isinstance(value, (dict, list, tuple)):
        if id(value) in numbers:
            return ("again", numbers[id(value)])
        numbers[id(value)] = len(numbers)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        number = None if isinstance(value, tuple) else numbers[id(value)]
        return (type(value).__name__, number, [(key, concrete(item, numbers)) for key, item in items])
    if isinstance(value, jax.core.Tracer):
        return "a leaked tracer"
    if isinstance(value, jax.Array) and value.is_deleted():
        return "a deleted array"
    array = np.asarray(value)
    dtype = array.dtype if isinstance(value, (jax.Array, np.ndarray)) else jax.numpy.result_type(value)
    return (name_of(dtype), array.shape, array.tolist())


@functools.cache
def name_of(dtype: Any) -> str:
    return dtype.name


def abstract(value: Any) -> Any:
    """The types of a data value, as a compiled function sees them."""
    types = jax.tree.map(lambda leaf: str(jax.typeof(leaf)) + str(getattr(leaf, "weak_type", True)), value)
    return f"{types} {items_of(value)}"


def differences(expected: Any, actual: Any, path: str = "") -> list[Difference]:
    """Where two descriptions differ; floats may differ in the last bits."""
    if expected == actual:
        return []
    if isinstance(expected, dict) and isinstance(actual, dict):
        found: list[Difference] = []
        for key in sorted({*expected, *actual}, key=str):
            if key not in expected or key not in actual:
                found.append((f"{path}{key}", expected.get(key, "absent"), actual.get(key, "absent")))
            else:
                found += differences(expected[key], actual[key], f"{path}{key} ")
        return found
    if not alike(expected, actual):
        return [(path.strip(), expected, actual)]
    return []


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or abs(a - b) <= 1e-5 * max(abs(a), abs(b)) or (a != a and b != b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    return a == b


def mutable_objects(roots: Iterable[Any], values: Iterable[Any] = ()) -> dict[int, Any]:
    """Every object in Modules and values that could be changed in place, by id; Modules included."""
    found: dict[int, Any] = {}
    stack = list(values)
    for module in modules_of(roots):
        found[id(module)] = module
        for name, value in attributes(module):
            if isinstance(value, nnx.Module):
                continue
            if isinstance(variable_of(module, name), nnx.Node):
                stack.append(value)
            else:
                numbers: dict[int, int] = {}
                canonical(value, numbers)
                found |= dict.fromkeys(numbers, value)
    while stack:
        value = stack.pop()
        if isinstance(value, (dict, list, np.ndarray)):
            if id(value) in found:
                continue
            found[id(value)] = value
        if isinstance(value, nnx.Module):
            found |= mutable_objects([value])
        elif isinstance(value, nnx.State):
            stack += [getattr(leaf, "value", leaf) for leaf in value.values()]
        elif isinstance(value, dict):
            stack += list(value.values())
        elif isinstance(value, (list, tuple)):
            stack += list(value)
    return found
