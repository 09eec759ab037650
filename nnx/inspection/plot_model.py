"""A picture of a model as SVG: its Modules as nested boxes in the order of the calls, and arrows for where values go.

A *box* is one drawn Module. Items of a list that look alike are one box, `0-11`. Nothing else is needed to draw it.
"""

import html
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nnx.core.context import Context
from nnx.core.module.module import Module
from nnx.inspection.data_flow import INPUT, edges_of
from nnx.inspection.recording import record
from nnx.inspection.summary import ModuleRow, Summary, summarize
from nnx.storage.files import atomic_file, local_path

WIDTH, HEIGHT, PAD, GAP, HEADER, LANE = 300, 42, 14, 22, 26, 11  # pixels
OUTPUT = -2  # the number of the output of the model
AROUND = "#f6f7f9"
COLORS = ("#dbe9f6", "#e3f1dd", "#fdeacc", "#f3dfee", "#dff0ef", "#f6e0dc", "#e8e4f5", "#eeeedd")


class ModuleBox(NamedTuple):
    """A drawn Module and its place; `label` is its name in the Module around it."""

    number: int
    label: str
    row: ModuleRow
    x: float
    y: float
    width: float
    height: float
    is_leaf: bool


class ModelPicture:
    """A picture of a model; notebooks show it.

    Attributes:
        svg: the picture as text.
        edges: pairs of paths between which values go; "input" and "output" are those of the model.
    """

    def __init__(self, svg: str, edges: set[tuple[str, str]]):
        self.svg = svg
        self.edges = edges

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Writes the picture to an SVG file and returns its path."""
        file = local_path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as stream:
            stream.write(self.svg.encode())
        return file


def plot_model(
    model: Module,
    *inputs: Any,
    path: str | os.PathLike[str] | None = None,
    depth: int | None = None,
    ctx: Context | None = None,
    method: str | Callable[..., Any] | None = None,
    **kwargs: Any,
) -> ModelPicture:
    """Draws a model: nested boxes with output shapes and parameter counts, and arrows for where values go.

    The call is traced on abstract values, as by `nnx.summary`; nothing is computed. An arrow leads from a Module to one
    that uses what it returned, also if other operations come in between, such as the sum of a residual connection.

    Args:
        model: a Module; its arrays may be `ShapeDtypeStruct`s.
        *inputs: the arguments to call it with. Without inputs the picture has no shapes and no arrows.
        path: an SVG file to write.
        depth: the number of levels to draw; a Module at that level is one box, with all that is in it.
        ctx: a Context to pass to the call as `ctx`.
        method: the method to call instead of `__call__`.
        **kwargs: further arguments of the call.

    Returns:
        The picture. A notebook shows it, and `picture.save(path)` writes it.

    >>> ctx = nnx.context(0)
    >>> model = nnx.Sequence([nnx.Linear(2, 3, ctx=ctx), nnx.relu, nnx.Linear(3, 1, ctx=ctx)])
    >>> picture = nnx.plot_model(model, jnp.ones((4, 2)))
    >>> sorted(picture.edges)
    [('0', '2'), ('2', 'output'), ('input', '0')]
    """
    if ctx is not None:
        kwargs["ctx"] = ctx
    recording = record(model, method or "__call__", inputs, kwargs) if inputs or kwargs or method else None
    table = summarize(model, recording)
    numbers = {path: number for number, (path, _) in enumerate(Module.named_modules(model))}
    tree = _Boxes(table, numbers, depth)
    edges: set[tuple[int, int]] = set()
    if recording is not None:
        edges, last = edges_of(recording, tree.box_of)
        edges |= {(number, OUTPUT) for number in last}
    edges = {(tree.drawn_as(a), tree.drawn_as(b)) for a, b in edges}
    edges = {(a, b) for a, b in edges if a != b}
    names = {INPUT: "input", OUTPUT: "output"} | {box.number: box.row.path or "(root)" for box in tree.boxes}
    picture = ModelPicture(_svg(tree, edges, recording is not None), {(names[a], names[b]) for a, b in edges})
    if path is not None:
        picture.save(path)
    return picture


class _Boxes:
    """The boxes of a model, placed."""

    def __init__(self, table: Summary, numbers: dict[str, int], depth: int | None):
        self.rows = {row.path: row for row in table.rows}
        self.numbers = numbers
        self.depth = depth
        self.children: dict[str, list[str]] = {path: [] for path in self.rows}
        for path in self.rows:
            if path:
                self.children[path.rpartition("/")[0]].append(path)
        self.boxes: list[ModuleBox] = []  # those around others first
        self._same: dict[int, int] = {}  # by number, the number of the box that stands for several
        self.height: float = PAD + HEIGHT * 0.6 + GAP
        self.height += self._place("", table.rows[0].layer, 0, self.height)

    def _shown(self, path: str) -> list[str]:
        is_deep = self.depth is not None and path and path.count("/") + 1 >= self.depth
        return [] if is_deep else self.children[path]

    def _looks(self, path: str) -> Any:
        row = self.rows[path]
        return (row.layer, row.output, row.parameters, *map(self._looks, self.children[path]))

    def _groups(self, paths: list[str]) -> list[list[str]]:
        """Returns the paths, those of consecutive items that look alike together."""
        groups: list[list[str]] = []
        for path in paths:
            before = groups[-1][-1] if groups else None
            names = [p.rpartition("/")[2] for p in (before or "", path)]
            follows = all(map(str.isdecimal, names)) and int(names[1]) == int(names[0]) + 1
            if before is not None and follows and self._looks(before) == self._looks(path):
                groups[-1].append(path)
            else:
                groups.append([path])
        return groups

    def _place(self, path: str, label: str, level: int, y: float) -> float:
        """Places a Module with all that is in it, and returns its height."""
        x, width = PAD * (level + 1), WIDTH - 2 * PAD * level + 120
        shown = self._shown(path)
        at = len(self.boxes)
        self.boxes.append(ModuleBox(self.numbers[path], label, self.rows[path], x, y, width, HEIGHT, not shown))
        if not shown:
            return HEIGHT
        height: float = HEADER
        for group in self._groups(shown):
            names = [member.rpartition("/")[2] for member in (group[0], group[-1])]
            name = names[0] if len(group) == 1 else f"{names[0]}-{names[1]} ({len(group)} times)"
            height += self._place(group[0], name, level + 1, y + height) + GAP
            for other in group[1:]:
                self._merge(other, group[0])
        height += PAD - GAP
        self.boxes[at] = self.boxes[at]._replace(height=height)
        return height

    def _merge(self, path: str, into: str) -> None:
        self._same[self.numbers[path]] = self.numbers[into]
        for child, other in zip(self.children[path], self.children[into]):
            self._merge(child, other)

    def drawn_as(self, number: int) -> int:
        return self._same.get(number, number)

    def box_of(self, number: int) -> int | None:
        """Returns the number of the Module whose box shows the operations of a Module; None if none does."""
        paths = {number: path for path, number in self.numbers.items()}
        path = paths[number]
        while path and self.depth is not None and path.count("/") + 1 > self.depth:
            path = path.rpartition("/")[0]
        return None if self._shown(path) else self.numbers[path]


# Drawing


def _svg(tree: _Boxes, edges: set[tuple[int, int]], has_call: bool) -> str:
    ends = _ends(tree, has_call)
    boxes = {box.number: box for box in (*tree.boxes, *ends)}
    order = [box.number for box in sorted((b for b in boxes.values() if b.is_leaf), key=lambda box: box.y)]
    arrows, lanes = _arrows(boxes, order, edges)
    width = WIDTH + 120 + 2 * PAD + LANE * lanes
    height = tree.height + (GAP + HEIGHT * 0.6 if has_call else 0) + PAD
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="12">',
        '<defs><marker id="nnx-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#5a6270"/></marker></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
        *map(_box_shape, tree.boxes),
        *arrows,
        *map(_box_text, tree.boxes),
        *map(_end_text, ends),
        "</svg>",
    ]
    return "\n".join(parts)


def _ends(tree: _Boxes, has_call: bool) -> list[ModuleBox]:
    """Returns boxes for the input and the output of the model."""
    if not has_call:
        return []
    root = tree.boxes[0]
    top = root._replace(number=INPUT, label="input", y=PAD, height=HEIGHT * 0.6, is_leaf=True)
    return [top, top._replace(number=OUTPUT, label="output", y=tree.height + GAP)]


def _box_shape(box: ModuleBox) -> str:
    place = f'x="{box.x}" y="{box.y:.1f}" width="{box.width}" height="{box.height:.1f}"'
    if not box.is_leaf:
        return f'<rect {place} rx="6" fill="{AROUND}" stroke="#c3c9d2"/>'
    color = COLORS[sum(map(ord, box.row.layer)) % len(COLORS)]
    return f'<rect {place} rx="5" fill="{color}" stroke="#9aa3b0"/>'


def _box_text(box: ModuleBox) -> str:
    row = box.row
    label = [] if row.path == "" else [f'<tspan font-weight="bold">{html.escape(_fit(box.label, 24))}</tspan>']
    layer = html.escape(_fit(row.layer, 24))
    name = " ".join([*label, layer if label else f'<tspan font-weight="bold">{layer}</tspan>'])
    count = f"{row.parameters:,} parameters" if row.parameters else ""
    # The text of a box around others has a halo, because arrows into the box pass under it.
    halo = "" if box.is_leaf else f' paint-order="stroke" stroke="{AROUND}" stroke-width="5"'
    texts = [f'<text x="{box.x + 8}" y="{box.y + 17:.1f}" fill="#222"{halo}>{name}</text>']
    if box.is_leaf:
        facts = html.escape("   ".join(fact for fact in (_fit(row.output or "", 34), count) if fact))
        place = f'x="{box.x + 8}" y="{box.y + 33:.1f}"'
        texts.append(f'<text {place} fill="#555" font-size="11" xml:space="preserve">{facts}</text>')
    elif count:
        place = f'x="{box.x + box.width - 8}" y="{box.y + 17:.1f}"'
        texts.append(f'<text {place} fill="#666" text-anchor="end"{halo}>{count}</text>')
    return "".join(texts)


def _end_text(box: ModuleBox) -> str:
    middle = (box.x + box.width) / 2 + 3.6 * PAD
    place = f'x="{middle}" y="{box.y + 17:.1f}"'
    return f'<text {place} fill="#444" text-anchor="middle" font-style="italic">{box.label}</text>'


def _fit(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _arrows(boxes: dict[int, ModuleBox], order: Sequence[int], edges: set[tuple[int, int]]) -> tuple[list[str], int]:
    """Returns the arrows, and the number of lanes at the right that those around other boxes need."""
    place = {number: at for at, number in enumerate(order)}
    style = 'fill="none" stroke="#5a6270" stroke-width="1.3" marker-end="url(#nnx-arrow)"'
    drawn: list[str] = []
    lanes: list[list[tuple[float, float]]] = []
    right = max(box.x + box.width for box in boxes.values())
    middle = right / 2 + 3.6 * PAD
    for a, b in sorted(edges, key=lambda edge: abs(place[edge[1]] - place[edge[0]])):
        source, target = boxes[a], boxes[b]
        if place[b] == place[a] + 1:
            x = middle
            drawn.append(f'<path d="M{x},{source.y + source.height:.1f} L{x},{target.y - 1:.1f}" {style}/>')
            continue
        start, end = source.y + source.height * 0.7, target.y + target.height * 0.3
        low, high = min(start, end), max(start, end)
        lane = next((i for i, taken in enumerate(lanes) if all(high < a or low > b for a, b in taken)), len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append((low, high))
        x = right + LANE * (lane + 0.8)
        bend = 6 if end > start else -6
        out = f"M{source.x + source.width},{start:.1f} H{x - 6:.1f} Q{x:.1f},{start:.1f} {x:.1f},{start + bend:.1f}"
        back = f"V{end - bend:.1f} Q{x:.1f},{end:.1f} {x - 6:.1f},{end:.1f} H{target.x + target.width + 1}"
        drawn.append(f'<path d="{out} {back}" {style}/>')
    return drawn, len(lanes)
