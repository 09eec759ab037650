"""What a body that runs many times, or never, is allowed to do to a Module: scan, vmap, loops and branches.

It can set new values, and add a variable where the transform has a place for it. It cannot change a static attribute or
a submodule, delete anything, or tie and untie attributes: the result would depend on how often the body ran.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nnx.core.graph import ABSENT, GraphKey, is_static, module_path
from nnx.core.info import MODULE, join
from nnx.transforms.effects import cell_paths
from nnx.transforms.rewrite import UNTIED, Rewrite, data_attributes

BODY_CHANGES_STRUCTURE = """{name}: the body {what} {path!r}. It runs many times, or maybe never, so the structure of \
Modules must stay as it is: do this before or after, or keep the value in a Variable."""

BODY_CHANGES_TIES = """{name}: the body {what}: {path!r}. It runs many times, or maybe never, so what is shared with \
what must stay as it is: tie and untie before or after. To change the value, assign it."""

NEW_VARIABLE = """{name}: the body adds the variable {path!r}, {kind}. {advice}"""


def check_structure(name: str, before: GraphKey | None, rewrite: Rewrite, returned: bool) -> list[tuple[int, str, Any]]:
    """Returns the new variables of a body, as `(cell, path, kind)`.

    Raises:
      ValueError: the body changed anything else about the structure.
    """
    old: Any = before.table[1] if before is not None else ()
    parents = before.parents() if before is not None else []
    new = rewrite.key.table[1]
    places = {(at, attribute): cell for cell, (at, attribute, _) in enumerate(rewrite.key.cells)}
    cells_before, cells = _cells(before), _cells(rewrite.key)
    added = []
    for at, (cls, attrs) in enumerate(old):
        if new[at][0] is not cls:
            path = module_path(parents, at)
            raise ValueError(BODY_CHANGES_STRUCTURE.format(name=name, what="changes the class of", path=path))
        was = {entry[0]: entry for entry in attrs}
        now = {entry[0]: entry for entry in new[at][1]}
        prefix = module_path(parents, at)
        for attribute in [*was, *(a for a in now if a not in was)]:
            path, place = join(prefix, attribute), (at, attribute)
            if place in cells_before and place in cells:
                _check_cell(name, before, rewrite, path, cells_before[place], cells[place])
                continue
            what = _difference(was.get(attribute), now.get(attribute))
            if what == "adds":
                if place in places:
                    added.append((places[place], path, now[attribute][1]))
            elif what is not None:
                raise ValueError(BODY_CHANGES_STRUCTURE.format(name=name, what=what, path=path))
    if len(new) > len(old) and returned:
        for cell, (at, _, kind) in enumerate(rewrite.key.cells):
            if at >= len(old):
                added.append((cell, rewrite.key.cell_roots()[cell][1], kind))
    return added


def check_aliases(name: str, before: GraphKey | None, regrouped: Sequence[int]) -> None:
    """Raises ValueError if a body changed which cells hold one container; `regrouped` are those cells."""
    if regrouped:
        what = "changes which attributes hold one and the same container"
        raise ValueError(BODY_CHANGES_TIES.format(name=name, what=what, path=cell_paths(before)[regrouped[0]]))


def _cells(key: GraphKey | None) -> dict[tuple[int, str], int]:
    return {} if key is None else {(at, attribute): cell for at, attribute, cell in data_attributes(key.table)}


def _check_cell(name: str, before: Any, rewrite: Rewrite, path: str, was: int, now: int) -> None:
    """Raises ValueError if an attribute that holds data is on a different Ref than before, or of a different kind."""
    ref = was if was in rewrite.tied else UNTIED
    if rewrite.refs[now] != ref:
        what = "unties" if rewrite.refs[now] == UNTIED else "ties" if ref == UNTIED else "rebinds"
        raise ValueError(BODY_CHANGES_TIES.format(name=name, what=f"{what} an attribute", path=path))
    if before.kinds[was] is not rewrite.key.kinds[now]:
        raise ValueError(BODY_CHANGES_STRUCTURE.format(name=name, what="changes the kind of", path=path))


def _difference(was: Any, now: Any) -> str | None:
    """Returns what happened to an attribute that did not hold data both before and after, or None."""
    if now is None:
        return "deletes"
    kind, static = now[1], is_static(now[1])
    if was is None:
        if static:
            return "sets the new static attribute"
        return "adds the submodule" if kind is MODULE else "adds"
    if was[1] is not kind:
        if was[1] is ABSENT and not static and kind is not MODULE:
            return "adds"
        return "changes the static attribute" if static and is_static(was[1]) else "changes the kind of"
    if static and was[2] != now[2]:
        return "changes the static attribute"
    if kind is MODULE and was[2] != now[2]:
        return "replaces the submodule"
    return None


def type_text(value: Any) -> str:
    """Returns the shape and dtype of a value, or of all leaves of a tree, for errors."""

    def one(leaf: Any) -> str:
        return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"

    leaves, treedef = jax.tree.flatten(value)
    return one(value) if len(leaves) == 1 and leaves[0] is value else f"{treedef} of {', '.join(map(one, leaves))}"
