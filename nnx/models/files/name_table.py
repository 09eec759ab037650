"""Tables between tensors and parameters for models whose layers are in lists: entries with `{}` in place of numbers.

A `NameTable` is a list of `TableEntry`s. Where a name has `{}`, the paths of the entry have one as well, and the entry
holds for every number that occurs in the model. A model with a task head keeps the plain model under one attribute; its
paths then start with the *scope*, and the names of its tensors with the *prefix*.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from nnx.models.files.tables import FLAT, FROM_HEADS, LINEAR, Link, Parameter, TableEntry, TensorLayout


@dataclasses.dataclass(frozen=True)
class NameTable:
    """The tensors of one family.

    Attributes:
        body: the entries of the plain model.
        head: the entries outside of it, with whole names and paths.
        prefix: the start of the names of the plain model's tensors, if it has a head.
        scope: the start of the paths of its parameters, likewise.
        ignored: patterns of tensors that are allowed although no parameter needs them.
        older: for the ends of some names, those that older checkpoints have instead.
    """

    body: tuple[TableEntry, ...]
    head: tuple[TableEntry, ...] = ()
    prefix: str = ""
    scope: str = ""
    ignored: tuple[str, ...] = ()
    older: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def links(self, paths: Collection[str], names: Collection[str]) -> list[Link]:
        """Returns which tensor holds which of these parameters.

        Args:
            paths: the parameters of a model. Entries for others (an absent bias) are left out.
            names: the tensors of a checkpoint; empty when one is written.
        """
        scoped = bool(self.scope) and any(path.startswith(self.scope) for path in paths)
        prefixed = any(name.startswith(self.prefix) for name in names) if names else scoped
        body = [
            (
                self.prefix + entry.name if prefixed else entry.name,
                tuple(self.scope + path if scoped else path for path in entry.paths),
                entry.layout,
            )
            for entry in self.body
        ]
        return [
            Link(self._spelling(name, names), parameters, layout)
            for name, parameters, layout in _expanded((*body, *self.head), paths)
        ]

    def ignores(self, name: str) -> bool:
        """Whether a tensor is allowed although no parameter needs it."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def _spelling(self, name: str, names: Collection[str]) -> str:
        if name not in names:
            for end, older in self.older.items():
                if name.endswith(end) and name.removesuffix(end) + older in names:
                    return name.removesuffix(end) + older
        return name


def _expanded(
    entries: Iterable[tuple[str, tuple[str, ...], TensorLayout]], paths: Collection[str]
) -> Iterator[tuple[str, tuple[Parameter, ...], TensorLayout]]:
    """Applies every entry to all numbers for which the model has its parameters."""
    for name, patterns, layout in entries:
        pattern = re.compile(re.escape(patterns[0]).replace(r"\{\}", r"(\d+)"))
        for path in paths:
            match = pattern.fullmatch(path)
            if match is not None:
                found = [pattern.format(*match.groups()) for pattern in patterns]
                if all(path in paths for path in found):
                    yield name.format(*match.groups()), tuple(map(Parameter, found)), layout


def linear(name: str, path: str, layout: TensorLayout = LINEAR) -> tuple[TableEntry, TableEntry]:
    """Returns the entries of a linear layer (or a convolution): its kernel and its bias."""
    return TableEntry(f"{name}.weight", (f"{path}/kernel",), layout), TableEntry(
        f"{name}.bias", (f"{path}/bias",), FLAT
    )


def norm(name: str, path: str) -> tuple[TableEntry, TableEntry]:
    """Returns the entries of a layer norm: its scale and its bias."""
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
