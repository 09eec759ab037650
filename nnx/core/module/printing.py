"""What `repr(model)` and `print(model)` show: the tree of a Module's attributes, in full and in short.

Both print a Module once; where it appears again, it is `Name(...)`. The repr leaves out options that have their default
value. `print` shows a model in as few lines as it takes to see what it is made of: a Module without submodules is one
line, which starts like the call that made it; consecutive items of a Sequence that print alike are one entry, `0-11:
Block(`; static attributes that are None, empty, or equal to the default of the constructor, are left out as well. A
line has at most 100 columns: in a longer one, Variables lose their type, and `...` stands for what does not fit.
"""

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from nnx.core.module.info import class_of, info_of, values_of
from nnx.core.module.kinds import STATIC, SUBMODULE, Absent
from nnx.core.repr import short
from nnx.core.state.paths import segment_of
from nnx.core.variables.refs import Ref
from nnx.core.variables.variables import Spec

WIDTH = 100  # of a line that `print` shows

Labeled = tuple[str, Any]  # a label, and a text or the number of a Module to print there


def module_repr(root: Any) -> str:
    """Returns a Module as an indented tree."""
    tree = _PrintOrder(root, _is_option_left_alone)
    return _printed(tree, tree.attributes.__getitem__, lambda prefix, number, attributes: None, cut=lambda line: line)


def module_str(root: Any) -> str:
    """Returns a Module as a short indented tree."""
    tree = _PrintOrder(root, _is_uninteresting)
    tree.compare()

    def on_one_line(prefix: str, number: int, attributes: list[Labeled]) -> str | None:
        return None if _has_modules(attributes) else _one_line(prefix, tree.names[number], tree.parts(number))

    return _printed(tree, tree.grouped, on_one_line, cut=_cut)


def _printed(
    tree: "_PrintOrder",
    attributes_of: Callable[[int], list[Labeled]],
    on_one_line: Callable[[str, int, list[Labeled]], str | None],
    cut: Callable[[str], str],
) -> str:
    lines: list[str] = []
    stack: list[tuple[int, str, Any]] = [(0, "", 0)]  # depth, label, and a text or the number of a Module
    while stack:
        depth, label, value = stack.pop()
        prefix = f"{'  ' * depth}{label}"
        if isinstance(value, str):
            lines.append(cut(f"{prefix}{value}"))
            continue
        attributes = attributes_of(value)
        line = on_one_line(prefix, value, attributes) if attributes else f"{prefix}{tree.names[value]}()"
        if line is not None:
            lines.append(line)
            continue
        lines.append(f"{prefix}{tree.names[value]}(")
        stack.append((depth, "", ")"))
        stack.extend((depth + 1, f"{label}: ", inner) for label, inner in reversed(attributes))
    return "\n".join(lines)


def _one_line(prefix: str, name: str, parts: Sequence["_AttributeText"]) -> str:
    """Returns a Module without submodules as one line: in full, else with short Variables, else as much as fits."""
    for texts in ([part.text for part in parts], [part.short for part in parts]):
        line = f"{prefix}{name}({', '.join(texts)})"
        if len(line) <= WIDTH:
            return line
    ends = itertools.accumulate((len(part.short) + 2 for part in parts), initial=len(f"{prefix}{name}(...)"))
    fitting = sum(end <= WIDTH for end in ends) - 1
    return f"{prefix}{name}({', '.join([*(part.short for part in parts[: max(fitting, 0)]), '...'])})"


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def _has_modules(attributes: Sequence[Labeled]) -> bool:
    return any(not isinstance(value, str) for _, value in attributes)


class _AttributeText(NamedTuple):
    """One attribute in the line of a Module, in full and in short."""

    text: str
    short: str


class _PrintOrder:
    """The Modules of a graph in the order they are printed in, each with its labeled attributes.

    Args:
        root: the Module.
        is_hidden: a function of the defaults of a constructor, and the name and value of a static attribute.
    """

    def __init__(self, root: Any, is_hidden: Callable[[dict[str, Any], str, Any], bool]):
        self.names: list[str] = []  # of the classes, by number
        self.attributes: list[list[Labeled]] = []
        self.required: list[list[str]] = []  # the labels that the call of the constructor starts with
        self.looks: list[int] = []  # Modules that print alike have the same number here; see `compare`
        self._is_hidden = is_hidden
        self._parameters: dict[type, dict[str, Any]] = {}  # of constructors: their defaults, by name
        seen: dict[int, int] = {}
        # Depth first, by an explicit stack: the attributes of each open Module that are still to come.
        stack: list[tuple[int, Iterator[Labeled]]] = [self._open(root, seen)]
        while stack:
            number, attributes = stack[-1]
            for label, value in attributes:
                if isinstance(value, str):
                    self.attributes[number].append((label, value))
                elif id(value) in seen:
                    self.attributes[number].append((label, f"{class_of(value).__name__}(...)"))
                else:
                    self.attributes[number].append((label, len(self.names)))
                    stack.append(self._open(value, seen))
                    break
            else:
                stack.pop()

    def _open(self, module: Any, seen: dict[int, int]) -> tuple[int, Iterator[Labeled]]:
        number = seen[id(module)] = len(self.names)
        self.names.append(class_of(module).__name__)
        self.attributes.append([])
        shown = self._shown(module)
        required = (name for name, default in self._parameters_of(module).items() if default is _REQUIRED)
        labels = {label for label, value in shown if isinstance(value, str)}
        self.required.append(list(itertools.takewhile(labels.__contains__, required)))
        return number, iter(shown)

    def _shown(self, module: Any) -> list[Labeled]:
        info, values, found = info_of(module), values_of(module), []
        defaults = {name: default for name, default in self._parameters_of(module).items() if default is not _REQUIRED}
        for name in info.printed_names():
            kind, value = info.kinds[name], values.get(name)
            if kind is not STATIC or not self._is_hidden(defaults, name, value):
                found.append((segment_of(name), value if kind is SUBMODULE else _text(kind, value)))
        return found

    def _parameters_of(self, module: Any) -> dict[str, Any]:
        cls = class_of(module)
        if cls not in self._parameters:
            self._parameters[cls] = _constructor_parameters(cls)
        return self._parameters[cls]

    def parts(self, number: int) -> list[_AttributeText]:
        """Returns the attributes of a Module without submodules, the required arguments of its constructor first."""
        texts = {label: value for label, value in self.grouped(number)}
        required = [label for label in self.required[number] if label in texts]
        first = [_AttributeText(texts[label], texts[label]) for label in required]
        rest = [label for label in texts if label not in required]
        return [
            *first,
            *(_AttributeText(f"{label}: {texts[label]}", f"{label}: {_without_type(texts[label])}") for label in rest),
        ]

    def compare(self) -> None:
        """Numbers what Modules look like; the last ones first, because a Module looks as its submodules do."""
        known: dict[Any, int] = {}
        self.looks = [0] * len(self.names)
        for number in reversed(range(len(self.names))):
            parts = [(label, self._look(value)) for label, value in self.attributes[number]]
            self.looks[number] = known.setdefault((self.names[number], *parts), len(known))

    def grouped(self, number: int) -> list[Labeled]:
        """Returns the attributes of a Module, with one for each run of numbered submodules that look alike."""
        groups: list[tuple[str, str, Any]] = []  # the first label, the last one, and the text or number
        for label, value in self.attributes[number]:
            first, last, before = groups[-1] if groups else ("", "", "")
            is_next = label.isdecimal() and last.isdecimal() and int(label) == int(last) + 1
            if is_next and self._look(value) == self._look(before):
                groups[-1] = (first, label, before)
            else:
                groups.append((label, label, value))
        return [(first if first == last else f"{first}-{last}", value) for first, last, value in groups]

    def _look(self, value: Any) -> Any:
        return value if isinstance(value, str) else self.looks[value]


def _text(kind: Any, value: Any) -> str:
    """Returns an attribute that is not a submodule as text."""
    if type(kind) is Absent:
        return f"{kind.spec} without state"
    if type(kind) is Ref:
        return repr(kind)
    return repr(kind.box(value)) if type(kind) is Spec else short(value)


_REQUIRED: Any = object()


def _constructor_parameters(cls: type) -> dict[str, Any]:
    """Returns the positional parameters of a class's constructor, and the others that have a default, with defaults."""
    try:
        parameters = [*inspect.signature(cls.__init__).parameters.values()][1:]
    except (TypeError, ValueError):  # a constructor without a signature
        return {}
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {
        p.name: _REQUIRED if p.default is p.empty else p.default
        for p in parameters
        if p.default is not p.empty or p.kind in positional
    }


def _without_type(text: str) -> str:
    """Returns what a Variable prints as without its type, `float32[3]`; other texts unchanged."""
    found = _VARIABLE.fullmatch(text)
    return found[1] if found else text


_VARIABLE = re.compile(r"\w+\((\w+\[[\d,]*\]).*\)")


def _is_option_left_alone(defaults: dict[str, Any], name: str, value: Any) -> bool:
    """Whether a flag, function, dtype or None is the default that the constructor has for that name."""
    if name not in defaults:
        return False
    default = defaults[name]
    if isinstance(value, np.dtype):
        return default is not None and value == default
    return value is default and (value is None or isinstance(value, bool) or callable(value))


def _is_uninteresting(defaults: dict[str, Any], name: str, value: Any) -> bool:
    """Whether a static value is None, empty, the default for that name, or a tuple that repeats the default."""
    if value is None or (type(value) is tuple and not value) or _is_option_left_alone(defaults, name, value):
        return True
    if callable(value) and getattr(value, "__name__", None) == name:  # `dot_general: dot_general`
        return True
    default = defaults.get(name)
    if isinstance(value, tuple) and isinstance(default, int):
        return all(type(item) is int and item == default for item in value)
    return type(value) is type(default) and isinstance(value, (int, float, str, tuple)) and value == default
