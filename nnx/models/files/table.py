"""Which tensor of a checkpoint is which parameter of a model: a declarative table that works in both directions.

A `TableEntry` names a tensor, the parameters it holds, and their `TensorLayout`. A `{}` in both stands for a number,
such as that of a layer. A `{}` more in the name than in the path numbers the experts: they are a stack, one parameter
in the model and one tensor each in the file.

`Table.links` applies the entries to one model: it fills in the numbers and leaves out what the model does not have (an
absent bias).
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from nnx.models.files.layouts import FLAT, FROM_HEADS, LINEAR, SAME, TensorLayout


class TableEntry(NamedTuple):
    """A tensor, the parameters it holds (several if it is fused), and their layout."""

    name: str
    paths: tuple[str, ...]
    layout: TensorLayout = SAME


class Parameter(NamedTuple):
    """A parameter of a model: its path, and its index in the stack of layers, of experts, or of both, if any."""

    path: str
    index: tuple[int, ...] = ()


class Link(NamedTuple):
    """A tensor of one checkpoint, and the parameters of one model that it holds."""

    name: str
    parameters: tuple[Parameter, ...]
    layout: TensorLayout


@dataclasses.dataclass(frozen=True)
class Table:
    """The tensors of one family.

    Attributes:
        body: the entries of the plain model.
        head: the entries outside of it, with whole names and paths.
        prefix: the start of the names of the plain model's tensors, if it has a head.
        scope: the attribute that holds the plain model in one with a head, if there is a class for each of them.
        ignored: patterns of tensors that are allowed although no parameter needs them.
        older: for the ends of some names, those that older checkpoints have instead.
        others: other starts of the names of the plain model, in place of the prefix.
    """

    body: tuple[TableEntry, ...]
    head: tuple[TableEntry, ...] = ()
    prefix: str = ""
    scope: str = ""
    ignored: tuple[str, ...] = ()
    older: Mapping[str, str] = dataclasses.field(default_factory=dict)
    others: tuple[str, ...] = ()

    def links(
        self, parameters: Mapping[str, Parameter], names: Collection[str] = (), num_experts: int | None = None
    ) -> list[Link]:
        """Returns which tensor holds which of these parameters.

        Args:
            parameters: the parameters of a model, by the path they have if no layers are stacked.
            names: the tensors of a checkpoint; empty when one is written.
            num_experts: the number of experts in a stack.
        """
        scope = self.scope if any(path.startswith(self.scope) for path in parameters) else ""
        prefix = self._prefix(names, bool(scope))
        body = (
            TableEntry(prefix + entry.name, tuple(scope + path for path in entry.paths), entry.layout)
            for entry in self.body
        )
        found = []
        for entry in (*body, *self.head):
            for numbers in _numbers(entry, parameters):
                parts = [parameters[path.format(*numbers)] for path in entry.paths]
                stacked = entry.name.count("{}") > len(numbers)
                for expert in [(i,) for i in range(num_experts or 0)] if stacked else [()]:
                    name = self._spelling(entry.name.format(*numbers, *expert), names)
                    if name not in names and f"language_model.{name}" in names:  # the head, beside other parts
                        name = f"language_model.{name}"
                    indexed = tuple(Parameter(path, (*index, *expert)) for path, index in parts)
                    found.append((numbers[:1], Link(name, indexed, entry.layout)))
        # Layer by layer, as files are read.
        return [link for _, link in sorted(found, key=lambda numbered: numbered[0])]

    def ignores(self, name: str) -> bool:
        """Whether a tensor is allowed although no parameter needs it."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def _prefix(self, names: Collection[str], scoped: bool) -> str:
        """Returns the start of the names in a checkpoint, which may hold a model with or without a head."""
        first = self.body[0].name
        usual = self.prefix if scoped or not self.scope else ""
        return next((prefix for prefix in (self.prefix, "", *self.others) if prefix + first in names), usual)

    def _spelling(self, name: str, names: Collection[str]) -> str:
        if name not in names:
            for end, older in self.older.items():
                if name.endswith(end) and name.removesuffix(end) + older in names:
                    return name.removesuffix(end) + older
        return name


def _numbers(entry: TableEntry, parameters: Mapping[str, Parameter]) -> Iterator[tuple[int, ...]]:
    """Yields the numbers with which a model has all parameters of an entry."""
    if "{}" not in entry.paths[0]:
        yield from [()] if all(path in parameters for path in entry.paths) else []
        return
    pattern = re.compile(re.escape(entry.paths[0]).replace(r"\{\}", r"(\d+)"))
    for path in parameters:
        match = pattern.fullmatch(path)
        if match is not None:
            numbers = tuple(map(int, match.groups()))
            if all(other.format(*numbers) in parameters for other in entry.paths):
                yield numbers


def linear(name: str, paths: str | Iterable[str], layout: TensorLayout = LINEAR) -> tuple[TableEntry, TableEntry]:
    """Returns the entries of a linear layer, or of several fused ones: kernel and bias."""
    paths = (paths,) if isinstance(paths, str) else tuple(paths)
    flat = FLAT if not layout.grouped else dataclasses.replace(FLAT, grouped=True)
    return (
        TableEntry(f"{name}.weight", tuple(f"{path}/kernel" for path in paths), layout),
        TableEntry(f"{name}.bias", tuple(f"{path}/bias" for path in paths), flat),
    )


def norm(name: str, path: str) -> tuple[TableEntry, TableEntry]:
    """Returns the entries of a norm: its scale and its bias."""
    return TableEntry(f"{name}.weight", (f"{path}/scale",)), TableEntry(f"{name}.bias", (f"{path}/bias",))


def attention(name: str, projections: Iterable[str], path: str) -> tuple[TableEntry, ...]:
    """Returns the entries of a `MultiHeadAttention`; the projections are those of query, key, value and output."""
    query, key, value, out = (f"{name}.{projection}" for projection in projections)
    return (
        *linear(query, f"{path}/query"),
        *linear(key, f"{path}/key"),
        *linear(value, f"{path}/value"),
        *linear(out, f"{path}/out", FROM_HEADS),
    )
