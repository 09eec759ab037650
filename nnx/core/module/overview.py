"""What `print(model)` shows: the tree of a Module, in as few lines as it takes to see what it is made of.

The rules are those of the repr (see module_repr), and three more. A Module without submodules is one line, unless it is
very long. Consecutive items of a Sequence that print alike are one entry, `0-11: Block(`. Static attributes that are
None, or have the default value of the constructor, are left out.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from nnx.core.module.info import class_of, info_of, values_of
from nnx.core.module.kinds import STATIC, SUBMODULE
from nnx.core.module.tree_repr import attribute_text, constructor_defaults, is_option_left_alone
from nnx.core.state.paths import segment_of

WIDTH = 160  # of a line that holds a whole Module

Labeled = tuple[str, Any]  # a label, and a text or the number of a Module to print there


class _Tree:
    """The Modules of a graph in the order they are printed in, each with its labeled attributes."""

    def __init__(self, root: Any):
        self.names: list[str] = []  # of the classes, by number
        self.entries: list[list[Labeled]] = []
        self.looks: list[int] = []  # Modules that print alike have the same number here
        self._defaults: dict[type, dict[str, Any]] = {}
        seen: dict[int, int] = {}
        # Depth first, by an explicit stack: the attributes of each open Module that are still to come.
        stack: list[tuple[int, Iterator[Labeled]]] = [self._open(root, seen)]
        while stack:
            number, attributes = stack[-1]
            for label, value in attributes:
                if isinstance(value, str):
                    self.entries[number].append((label, value))
                elif id(value) in seen:
                    self.entries[number].append((label, f"{class_of(value).__name__}(...)"))
                else:
                    self.entries[number].append((label, len(self.names)))
                    stack.append(self._open(value, seen))
                    break
            else:
                stack.pop()
        self._compare()

    def _open(self, module: Any, seen: dict[int, int]) -> tuple[int, Iterator[Labeled]]:
        number = seen[id(module)] = len(self.names)
        self.names.append(class_of(module).__name__)
        self.entries.append([])
        return number, iter(self._attributes(module))

    def _attributes(self, module: Any) -> list[Labeled]:
        info, values, cls = info_of(module), values_of(module), class_of(module)
        if cls not in self._defaults:
            self._defaults[cls] = constructor_defaults(cls)
        defaults, found = self._defaults[cls], []
        for name in info.printed_names():
            kind, value = info.kinds[name], values.get(name)
            if kind is STATIC and (value is None or _is_default(defaults, name, value)):
                continue
            found.append((segment_of(name), value if kind is SUBMODULE else attribute_text(kind, value)))
        return found

    def _compare(self) -> None:
        """Numbers what Modules look like; the last ones first, because a Module looks as its submodules do."""
        known: dict[Any, int] = {}
        self.looks = [0] * len(self.names)
        for number in reversed(range(len(self.names))):
            parts = [
                (label, text if isinstance(text, str) else self.looks[text]) for label, text in self.entries[number]
            ]
            self.looks[number] = known.setdefault((self.names[number], *parts), len(known))

    def grouped(self, number: int) -> list[Labeled]:
        """Returns the entries of a Module, with one for each run of numbered submodules that look alike."""
        groups: list[tuple[str, str, Any]] = []  # the first label, the last one, and the text or number
        for label, value in self.entries[number]:
            first, last, before = groups[-1] if groups else ("", "", "")
            is_next = label.isdecimal() and last.isdecimal() and int(label) == int(last) + 1
            if is_next and self._look(value) == self._look(before):
                groups[-1] = (first, label, before)
            else:
                groups.append((label, label, value))
        return [(first if first == last else f"{first}-{last}", value) for first, last, value in groups]

    def _look(self, value: Any) -> Any:
        return value if isinstance(value, str) else self.looks[value]


def module_str(root: Any) -> str:
    """Returns a Module as a short indented tree."""
    tree = _Tree(root)
    lines: list[str] = []
    stack: list[tuple[int, str, Any]] = [(0, "", 0)]  # depth, label, and a text or the number of a Module
    while stack:
        depth, label, value = stack.pop()
        prefix = f"{'  ' * depth}{label}"
        if isinstance(value, str):
            lines.append(f"{prefix}{value}")
            continue
        name, entries = tree.names[value], tree.grouped(value)
        line = _in_one_line(name, entries)
        if line is not None and len(prefix) + len(line) <= WIDTH:
            lines.append(f"{prefix}{line}")
            continue
        lines.append(f"{prefix}{name}(")
        stack.append((depth, "", ")"))
        stack.extend((depth + 1, f"{label}: ", inner) for label, inner in reversed(entries))
    return "\n".join(lines)


def _in_one_line(name: str, entries: Sequence[Labeled]) -> str | None:
    """Returns a Module without submodules as one line."""
    if not all(isinstance(text, str) for _, text in entries):
        return None
    return f"{name}({', '.join(f'{label}: {text}' for label, text in entries)})"


def _is_default(defaults: dict[str, Any], name: str, value: Any) -> bool:
    """Whether a static value is the default that the constructor has for that name, or repeats it for every axis."""
    if is_option_left_alone(defaults, name, value):
        return True
    default = defaults.get(name)
    if isinstance(value, tuple) and isinstance(default, int):
        return all(type(item) is int and item == default for item in value)
    return type(value) is type(default) and isinstance(value, (int, float, str, tuple)) and value == default
