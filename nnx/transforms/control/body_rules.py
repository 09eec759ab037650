"""What a body that runs many times, or never, is allowed to do to a Module: scan, vmap, loops and branches.

It can set new values, and add a variable where the transform has a place for it. It cannot change a static attribute or
a submodule, delete anything, or tie and untie attributes: the result would depend on how often the body ran.
"""

from collections.abc import Sequence
from typing import Any

import jax

from nnx.core.state.paths import join
from nnx.core.structure.structure import (
    AbsentAttribute,
    Attribute,
    ChildAttribute,
    DataAttribute,
    GraphKey,
    StaticAttribute,
)
from nnx.transforms.engine.call import cell_paths
from nnx.transforms.engine.outcome import returned_modules, structure_text
from nnx.transforms.engine.rewrite import UNTIED, Rewrite

BODY_CHANGES_STRUCTURE = """{name}: the body {what} {path!r}. It runs many times, or maybe never, so the structure of \
Modules must stay as it is: do this before or after, or keep the value in a Variable."""

BODY_CHANGES_TIES = """{name}: the body {what}: {path!r}. It runs many times, or maybe never, so what is shared with \
what must stay as it is: tie and untie before or after. To change the value, assign it."""

OTHER_CARRY = """{name}: the body received {what} of the structure {before} and returned {after}. What is handed from \
step to step must keep its structure.{advice}"""

NEW_MODULE_HANDED_ON = """ {new} was made in the body, as a clone perhaps. The Module that goes in has to come \
out: assign to its attributes, write a State into it with update_state, or hand on a State (module.get_state())."""

MODULE_HANDED_ON = """ A Module stays where it is: hand on what changes, such as a State (module.get_state())."""

NEW_VARIABLE = """{name}: the body adds the variable {path!r}, {kind}. {advice}"""


def check_structure(name: str, before: GraphKey | None, rewrite: Rewrite, returned: bool) -> list[tuple[int, str, Any]]:
    """Returns the new variables of a body, as `(cell, path, kind)`.

    Raises:
        ValueError: the body changed anything else about the structure.
    """
    after, added = rewrite.key, []
    old_count = before.module_count if before is not None else 0
    if before is not None:
        added = _new_variables(name, before, rewrite)
    if after.module_count > old_count and returned:
        for cell, (at, _, kind) in enumerate(after.cells):
            if at >= old_count:
                added.append((cell, after.cell_roots()[cell].path, kind))
    return added


def _new_variables(name: str, before: GraphKey, rewrite: Rewrite) -> list[tuple[int, str, Any]]:
    """The new variables of the Modules that were there before, as `(cell, path, kind)`."""
    after, paths = rewrite.key, before.module_paths()
    homes = {(at, attribute): cell for cell, (at, attribute, _) in enumerate(after.cells)}
    added = []
    for at, prefix in enumerate(paths):
        if after.class_of(at) is not before.class_of(at):
            raise ValueError(BODY_CHANGES_STRUCTURE.format(name=name, what="changes the class of", path=prefix))
        was = {attribute.name: attribute for attribute in before.attributes(at)}
        now = {attribute.name: attribute for attribute in after.attributes(at)}
        for attribute in [*was, *(a for a in now if a not in was)]:
            path = join(prefix, attribute)
            old, new = was.get(attribute), now.get(attribute)
            if type(old) is DataAttribute and type(new) is DataAttribute:
                _check_cell(name, before, rewrite, path, old.cell, new.cell)
                continue
            what = _difference(old, new)
            if what == "adds":
                if (at, attribute) in homes:
                    added.append((homes[at, attribute], path, now[attribute].kind))
            elif what is not None:
                raise ValueError(BODY_CHANGES_STRUCTURE.format(name=name, what=what, path=path))
    return added


def check_carry(name: str, what: str, before: Any, carry: Any, key: GraphKey | None) -> None:
    """Checks that what a body passes to the next step has the structure of what it received.

    Args:
        name: the transform.
        what: what is passed on, for the error.
        before: the structure of what it received.
        carry: what it passes on.
        key: the structure of the Modules it received.

    Raises:
        TypeError: the structures differ.
    """
    after = jax.tree.structure(carry)
    if after == before:
        return
    count, handed_on = 0 if key is None else key.module_count, returned_modules(after)
    new = [module for module in handed_on if module.index >= count]
    advice = NEW_MODULE_HANDED_ON.format(new=new[0]) if new else MODULE_HANDED_ON if handed_on else ""
    text = {"before": structure_text(before), "after": structure_text(after), "advice": advice}
    raise TypeError(OTHER_CARRY.format(name=name, what=what, **text))


def check_aliases(name: str, before: GraphKey | None, regrouped: Sequence[int]) -> None:
    """Raises ValueError if a body changed which cells hold one container; `regrouped` are those cells."""
    if regrouped:
        what = "changes which attributes hold one and the same container"
        raise ValueError(BODY_CHANGES_TIES.format(name=name, what=what, path=cell_paths(before)[regrouped[0]]))


def _check_cell(name: str, before: Any, rewrite: Rewrite, path: str, was: int, now: int) -> None:
    """Raises ValueError if an attribute that holds data is on a different Ref than before, or of a different kind."""
    ref = was if was in rewrite.tied else UNTIED
    if rewrite.refs[now] != ref:
        what = "unties" if rewrite.refs[now] == UNTIED else "ties" if ref == UNTIED else "rebinds"
        raise ValueError(BODY_CHANGES_TIES.format(name=name, what=f"{what} an attribute", path=path))
    if before.kinds[was] is not rewrite.key.kinds[now]:
        raise ValueError(BODY_CHANGES_STRUCTURE.format(name=name, what="changes the kind of", path=path))


def _difference(was: Attribute | None, now: Attribute | None) -> str | None:
    """Returns what happened to an attribute that did not hold data both before and after, or None."""
    if now is None:
        return "deletes"
    is_static, is_child = type(now) is StaticAttribute, type(now) is ChildAttribute
    if was is None:
        if is_static:
            return "sets the new static attribute"
        return "adds the submodule" if is_child else "adds"
    if was.kind is not now.kind:
        if type(was) is AbsentAttribute and not is_static and not is_child:
            return "adds"
        return "changes the static attribute" if is_static and type(was) is StaticAttribute else "changes the kind of"
    if type(was) is StaticAttribute and type(now) is StaticAttribute and was.key != now.key:
        return "changes the static attribute"
    if type(was) is ChildAttribute and type(now) is ChildAttribute and was.module != now.module:
        return "replaces the submodule"
    return None
