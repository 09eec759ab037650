"""An interactive tree of a model, drawn by treescope in a notebook or to an HTML file.

Modules are shown by layer name, Variables by their type with value and metadata, arrays as treescope shows them. A
Module that was shown before (it is shared, or part of a cycle) appears as `Name(...)` with its first path.
"""

import html
import importlib.util
import os
import pathlib
import sys
import warnings
from typing import Any

from nnx.core.extras import require
from nnx.core.module.attributes import variable_of
from nnx.core.module.dict_sequence import Dict, Sequence
from nnx.core.module.info import info_of, values_of
from nnx.core.module.kinds import Absent
from nnx.core.module.module import Module
from nnx.core.repr import short
from nnx.core.state.paths import segment_of
from nnx.core.state.state import State
from nnx.core.variables.refs import Ref
from nnx.core.variables.variables import Container, Spec
from nnx.storage.files import local_path

PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title></head>
<body>
{tree}
</body>
</html>
"""


def display(model: Any, path: str | os.PathLike[str] | None = None, *, visualize: bool = False) -> pathlib.Path | None:
    """Shows a model as a tree that folds, in the notebook or in an HTML file.

    In a plain terminal, where nothing folds, it does what `print` does. In a notebook or with a path it needs treescope
    (the extra "display").

    Args:
        model: a Module, State, Variable, or any pytree of them.
        path: a file to write the tree to, as a self-contained HTML page.
        visualize: whether to draw arrays as pictures of their values, where pictures can be shown.

    Returns:
        The path of the page; None if none was written.

    >>> nnx.display(nnx.Sequence([jnp.sin]))
    Sequence(0: jax.numpy.sin)
    """
    if path is None and not in_notebook():
        print(model)
        return None
    treescope = require("treescope", "display", "nnx.display")
    renderer = treescope.active_renderer.get().extended_with(handlers=[_Modules().render, _render_container])
    pictures = treescope.ArrayAutovisualizer() if visualize else None
    with (
        treescope.active_renderer.set_scoped(renderer),
        treescope.active_autovisualizer.set_scoped(pictures),
        warnings.catch_warnings(),
    ):
        # treescope searches all names in numpy and jax for aliases, and reading a deprecated one warns.
        warnings.simplefilter("ignore", DeprecationWarning)
        if path is not None:
            return _write(path, model, treescope.render_to_html(model, compressed=False))
        treescope.display(model, streaming=False)
    return None


def _write(path: str | os.PathLike[str], model: Any, tree: str) -> pathlib.Path:
    file = local_path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(PAGE.format(title=html.escape(type(model).__name__), tree=tree), encoding="utf-8")
    return file


def in_notebook() -> bool:
    """Whether this runs in a notebook, which can show HTML; a plain IPython terminal cannot."""
    if "IPython" not in sys.modules or importlib.util.find_spec("IPython") is None:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and shell.has_trait("kernel")


class _Modules:
    """Renders Modules, each in full at its first occurrence."""

    def __init__(self) -> None:
        self.shown: dict[int, str | None] = {}  # the path of the first occurrence, by id

    def render(self, node: Any, path: str | None, subtree_renderer: Any) -> Any:
        if isinstance(node, Ref):
            return _render_container(node.variable, path, subtree_renderer)
        if isinstance(node, State):
            return _library().render_dictionary_wrapper(
                object_type=State, wrapped_dict=dict(node), path=path, subtree_renderer=subtree_renderer
            )
        if not isinstance(node, Module):
            return NotImplemented
        if id(node) in self.shown:
            return self._again(node)
        self.shown[id(node)] = path
        options = {"object_type": type(node), "path": path, "subtree_renderer": subtree_renderer}
        if type(node) is Sequence:
            return _library().render_list_wrapper(wrapped_sequence=list(_attributes(node).values()), **options)
        if type(node) is Dict:
            return _library().render_dictionary_wrapper(wrapped_dict=_attributes(node), **options)
        color = _formatting().color_from_string(type(node).__qualname__)
        return _library().render_object_constructor(attributes=_attributes(node), color=color, **options)

    def _again(self, node: Any) -> Any:
        parts = require("treescope.rendering_parts", "display")
        comment = parts.comment_color(parts.text(f"  # the same as {self.shown[id(node)] or 'the root'}"))
        return parts.build_one_line_tree_node(parts.siblings(f"{type(node).__name__}(...)", comment))


def _render_container(node: Any, path: str | None, subtree_renderer: Any) -> Any:
    if not isinstance(node, Container):
        return NotImplemented
    given = {name: value for name, value in node.metadata.items() if value is not None}
    return _library().render_object_constructor(
        object_type=type(node),
        attributes={"value": node.value, **given},
        path=path,
        subtree_renderer=subtree_renderer,
    )


def _attributes(module: Any) -> dict[str, Any]:
    """Returns the attributes of a Module to show: variables in their containers, everything else unchanged."""
    info, values = info_of(module), values_of(module)
    shown = {}
    for name in info.printed_names():
        kind = info.kinds[name]
        if type(kind) is not Absent:
            is_variable = isinstance(kind, (Spec, Ref))
            shown[segment_of(name)] = variable_of(module, name) if is_variable else _plain(values[name])
    return shown


def _plain(value: Any) -> Any:
    return _Text(short(value)) if callable(value) and not isinstance(value, (Module, type)) else value


class _Text:
    """Shown as the given text. An object that has only a repr would be followed by a comment with its address."""

    def __init__(self, text: str):
        self.text = text

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        parts = require("treescope.rendering_parts", "display")
        return parts.build_one_line_tree_node(parts.text(self.text))


def _library() -> Any:
    return require("treescope.repr_lib", "display")


def _formatting() -> Any:
    return require("treescope.formatting_util", "display")
