"""A model as a tree to click through, drawn by treescope: in a notebook, or as an HTML file.

Modules are shown by layer name, Variables by their type with value and metadata, arrays as treescope shows them. A
Module that has been shown before, shared or cyclic, is `Name(...)` with the path of its first place.
"""

import html
import importlib.util
import pathlib
import sys
import warnings
from typing import Any

from nnx.core.attributes import variable_of
from nnx.core.containers import Dict, Sequence
from nnx.core.extras import require
from nnx.core.info import Absent, segment_of
from nnx.core.module import Module
from nnx.core.refs import Ref
from nnx.core.repr import short
from nnx.core.state import State
from nnx.core.variables import Container, Spec

PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title></head>
<body>
{tree}
</body>
</html>
"""


def display(model: Any, path: Any = None, *, visualize: bool = False) -> pathlib.Path | None:
    """Shows a model as a tree that folds: in a notebook where it is called, or in an HTML file.

    Needs treescope (the extra "display"). Outside of a notebook and without a path it prints the tree as text.

    Args:
      model: a Module, State, Variable, or any pytree of them.
      path: where to write an HTML page, complete in itself.
      visualize: draw the arrays as pictures of their values.

    Returns:
      The path of the page, if one was written.

    >>> nnx.display(nnx.Sequence([jnp.sin]))
    Sequence([jax.numpy.sin])
    """
    treescope = require("treescope", "display", "nnx.display")
    renderer = treescope.active_renderer.get().extended_with(handlers=[_Modules().render, _render_container])
    pictures = treescope.ArrayAutovisualizer() if visualize else None
    with (
        treescope.active_renderer.set_scoped(renderer),
        treescope.active_autovisualizer.set_scoped(pictures),
        warnings.catch_warnings(),
    ):
        # treescope looks through all names of numpy and jax for aliases, deprecated ones included
        warnings.simplefilter("ignore", DeprecationWarning)
        if path is not None:
            return _write(path, model, treescope.render_to_html(model, compressed=False))
        if _in_notebook():
            treescope.display(model, streaming=False)
        else:
            print(treescope.render_to_text(model))
    return None


def _write(path: Any, model: Any, tree: str) -> pathlib.Path:
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PAGE.format(title=html.escape(type(model).__name__), tree=tree), encoding="utf-8")
    return path


def _in_notebook() -> bool:
    """Whether something that shows HTML is listening; a plain IPython terminal is not."""
    if "IPython" not in sys.modules or importlib.util.find_spec("IPython") is None:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and shell.has_trait("kernel")


class _Modules:
    """Renders Modules, each in full where it is met first."""

    def __init__(self) -> None:
        self.shown: dict[int, str | None] = {}  # where each was met

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
    """What a Module shows of itself: variables in their containers, everything else as it is."""
    kinds, values = module._nnx_info.kinds, vars(module)
    shown = {}
    for name in module._nnx_info.sorted_names():
        kind = kinds[name]
        if type(kind) is not Absent:
            is_variable = isinstance(kind, (Spec, Ref))
            shown[segment_of(name)] = variable_of(module, name) if is_variable else _plain(values[name])
    return shown


def _plain(value: Any) -> Any:
    return _Text(short(value)) if callable(value) and not isinstance(value, (Module, type)) else value


class _Text:
    """A value whose text is known."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _library() -> Any:
    return require("treescope.repr_lib", "display")


def _formatting() -> Any:
    return require("treescope.formatting_util", "display")
