"""What a body that runs many times, or maybe never, may do to a Module: scan, vmap, loops and branches.

New values, yes; a new variable where the transform has a place for it; but no change of a static attribute, a submodule
or a deletion: what would they be after no run, or after five?
"""

from typing import Any

from nnx.core.graph import ABSENT, SHARED, GraphKey, is_static, module_path
from nnx.core.info import MODULE, join
from nnx.transforms.rewrite import Rewrite

BODY_CHANGES_STRUCTURE = """{name}: the body {what} {path!r}. It runs many times, or maybe never, so the structure of \
Modules must stay as it is: do this before or after, or keep the value in a Variable."""

NEW_VARIABLE = """{name}: the body adds the variable {path!r}, {kind}. {cure}"""


def check_structure(name: str, before: GraphKey | None, rewrite: Rewrite, returned: bool) -> list[tuple[int, str, Any]]:
    """The new variables of a body, as `(cell, path, kind)`.

    Raises:
      ValueError: the body changed anything else about the structure.
    """
    old: Any = before.table[1] if before is not None else ()
    parents = before.parents() if before is not None else []
    new = rewrite.key.table[1]
    places = {(at, attribute): cell for cell, (at, attribute, _) in enumerate(rewrite.key.cells)}
    added = []
    for at, (_, attrs) in enumerate(old):
        was = {entry[0]: entry for entry in attrs}
        now = {entry[0]: entry for entry in new[at][1]}
        prefix = module_path(parents, at)
        for attribute in [*was, *(a for a in now if a not in was)]:
            path = join(prefix, attribute)
            what = _difference(was.get(attribute), now.get(attribute))
            if what == "adds":
                if (at, attribute) in places:
                    added.append((places[at, attribute], path, now[attribute][1]))
            elif what is not None:
                raise ValueError(BODY_CHANGES_STRUCTURE.format(name=name, what=what, path=path))
    if len(new) > len(old) and returned:
        for cell, (at, _, kind) in enumerate(rewrite.key.cells):
            if at >= len(old):
                added.append((cell, rewrite.key.cell_roots()[cell][1], kind))
    return added


def _difference(was: Any, now: Any) -> str | None:
    if now is None:
        return "deletes"
    kind = now[1]
    if was is None:
        if is_static(kind):
            return "sets the new static attribute"
        return "adds the submodule" if kind is MODULE else "adds"
    if was[1] is not kind:
        was_static, static = is_static(was[1]), is_static(kind)
        if {was[1], kind} <= {SHARED} or (was[1] is ABSENT and not static and kind is not MODULE):
            return "adds" if was[1] is ABSENT else None
        return "changes the static attribute" if was_static and static else "changes the kind of"
    if is_static(kind) and was[2] != now[2]:
        return "changes the static attribute"
    if kind is MODULE and was[2] != now[2]:
        return "replaces the submodule"
    return None
